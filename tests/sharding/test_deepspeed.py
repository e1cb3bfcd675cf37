"""What DeepSpeed's ZeRO does to an optimizer's groups is refused in the first step where nothing
was bound; a stand-in does the same without the package.
"""

import functools
import sys
import types
from unittest import mock

import pytest
import torch

import lowbit
from lowbit.flat import FlatSlice
from lowbit.integrations import deepspeed

UNBOUND = (
    r"flat "
    r"partitions.*DeepSpeed.*lowbit\.integrations\.deepspeed\.bind\(engine\).*lowbit\.flat\.bind"
)


def parameters():
    return [torch.nn.Parameter(torch.randn(64, 64)), torch.nn.Parameter(torch.randn(64))]


def flat(params):
    """A group's parameters in one float32 vector, of which ZeRO gives each rank a part."""
    vector = torch.cat([p.detach().reshape(-1) for p in params]).requires_grad_()
    vector.grad = torch.ones_like(vector)
    return vector


@pytest.mark.parametrize("by_place", [False, True])
def test_initialize_binds_what_waits_and_refuses_what_replaces_it(by_place):
    """accelerate passes DeepSpeedCPUAdam in place of any optimizer whose state is offloaded."""

    def initialize(args=None, model=None, optimizer=None, config=None):
        return types.SimpleNamespace(optimizer=optimizer), optimizer

    theirs = types.SimpleNamespace(initialize=initialize)
    model = torch.nn.Linear(64, 64)
    opt = lowbit.AdamW(model.named_parameters())
    with (
        mock.patch.dict(sys.modules, deepspeed=theirs),
        mock.patch.object(deepspeed, "bind") as bind,
    ):
        deepspeed.bind_when_initialized(opt, export="fp32")

        def called(optimizer):
            if by_place:
                return theirs.initialize(None, model, optimizer)
            return theirs.initialize(model=model, optimizer=optimizer)

        with pytest.raises(RuntimeError, match=r"SGD in place of lowbit\.AdamW.*zero_force_ds_cpu"):
            called(torch.optim.SGD(model.parameters()))
        called(torch.optim.SGD(torch.nn.Linear(2, 2).parameters()))
        assert not bind.called
        engine, _ = called(opt)
        bind.assert_called_once_with(engine, export="fp32")


def test_float32_copies_of_16_bit_weights_are_named():
    """As stage 0 under bf16 makes them, and steps them in deepspeed.initialize."""
    model = torch.nn.Linear(64, 64, bias=False).bfloat16()
    opt = lowbit.AdamW(model.named_parameters(), param_format="bfloat16_kahan")
    copies = [p.detach().float().requires_grad_() for p in model.parameters()]
    for p in copies:
        p.grad = torch.zeros_like(p)
    opt.param_groups[0]["params"] = copies
    with pytest.raises(ValueError, match=r"bfloat16_kahan.*copies, as DeepSpeed does in stage 0"):
        opt.step()


def test_an_export_without_partitions_is_refused():
    """As in stage 0, where checkpoints would keep quantized state without a word."""
    opt = lowbit.AdamW(parameters())
    engine = types.SimpleNamespace(optimizer=opt)
    assert deepspeed.bind(engine) is None
    with pytest.raises(ValueError, match="export='fp32' is for the flat partitions of ZeRO"):
        deepspeed.bind(engine, export="fp32")


def test_stages_1_and_2_step_one_group_of_flat_partitions_at_a_time():
    weight, bias = parameters()
    opt = lowbit.AdamW([{"params": [weight]}, {"params": [bias], "weight_decay": 0.0}])
    for group in opt.param_groups:
        group["params"] = [flat(group["params"])]
    opt.param_groups = opt.param_groups[:1]
    with pytest.raises(RuntimeError, match=UNBOUND):
        opt.step()


def test_stage_3_steps_one_flat_partition_after_another_in_the_same_group():
    weight, bias = parameters()
    opt = lowbit.AdamW([weight, bias])
    opt.param_groups[0]["params"] = [flat([weight])]
    with pytest.raises(RuntimeError, match=UNBOUND):
        opt.step()


def test_one_group_is_refused_too():
    opt = lowbit.AdamW(parameters())
    opt.param_groups[0]["params"] = [flat(opt.param_groups[0]["params"])]
    with pytest.raises(RuntimeError, match=UNBOUND):
        opt.step()


@pytest.mark.parametrize("moments", ["quantized", "flat"])
def test_a_load_into_partitions_that_were_never_bound_is_refused(moments):
    """As Trainer loads a checkpoint right after deepspeed.initialize. Float32 moments of the flat
    shape, of torch's AdamW, would be taken for those of a vector.
    """
    opt = lowbit.AdamW([("weight", p) for p in parameters()[:1]])
    saved = opt.state_dict()
    opt.param_groups[0]["params"] = [vector := flat(opt.param_groups[0]["params"])]
    if moments == "flat":
        zeros = torch.zeros_like(vector)
        saved["state"][0] = {"step": torch.tensor(1.0), "exp_avg": zeros, "exp_avg_sq": zeros}
    with pytest.raises(RuntimeError, match=UNBOUND):
        opt.load_state_dict(saved)


def test_bound_partitions_step():
    weight, bias = parameters()
    opt, alone = lowbit.AdamW([weight, bias]), [p.detach().clone() for p in (weight, bias)]
    opt.param_groups[0]["params"] = [vector := flat([weight, bias])]
    slices = [
        FlatSlice(vector, "weight", (64, 64), 0, 4096, start=0),
        FlatSlice(vector, "bias", (64,), 0, 64, start=4096),
    ]
    lowbit.flat.bind(opt, slices)
    opt.step()
    for p in alone:
        p.grad = torch.ones_like(p)
    lowbit.AdamW([("weight", alone[0]), ("bias", alone[1])]).step()
    assert torch.equal(vector.detach(), torch.cat([p.reshape(-1) for p in alone]))


def test_the_records_of_an_older_deepspeed_are_read():
    """Without round_robin_bit16_offsets (0.19.6) and sub_group_process_groups (0.19.0). Stage 3 of
    0.16.9 has no names either.
    """
    params, group = parameters(), object()
    for p in params:
        p.ds_shape, p.partition_numel = p.shape, functools.partial(int, p.numel() // 2)
    common = {
        "param_names": dict(zip(params, ("weight", "bias"), strict=True)),
        "dp_process_group": group,
    }
    two = types.SimpleNamespace(
        single_partition_of_fp32_groups=[torch.zeros(2080)],
        real_dp_process_group=[group],
        partition_size=[2080.0],
        round_robin_bit16_groups=[params],
        **common,
    )
    three = types.SimpleNamespace(
        fp32_partitioned_groups_flat=[torch.zeros(2080)], fp16_groups=[params], **common
    )

    def read(zero):
        with (
            mock.patch("torch.distributed.get_rank", lambda asked: 1 if asked is group else 0),
            mock.patch("torch.distributed.get_world_size", return_value=2),
        ):
            return [(s.name, s.offset, s.length, s.start) for s in deepspeed._slices(zero)]

    assert read(two) == [("weight", 2080, 2016, 0), ("bias", 0, 64, 2016)]
    assert read(three) == [("weight", 2048, 2048, 0), ("bias", 32, 32, 2048)]
    del three.param_names
    with pytest.raises(ValueError, match=r"no names of parameters.*DeepSpeed 0\.18\.4 or later"):
        read(three)


def test_groups_that_were_never_bound_are_refused_by_name():
    vector = torch.zeros(4096, requires_grad=True)
    opt = lowbit.AdamW([vector])
    lowbit.flat.bind(opt, [FlatSlice(vector, "weight", (64, 64), 0, 4096)], by_parts=True)
    opt.param_groups = [dict(opt.param_groups[0])]
    vector.grad = torch.ones_like(vector)
    with pytest.raises(
        RuntimeError, match="1 of the 1 parameter groups are none of those that were bound"
    ):
        opt.step()


def test_other_replacements_are_not_called_so():
    weight, bias = parameters()
    opt = lowbit.AdamW([weight, bias])
    weight.grad, bias.grad = torch.ones_like(weight), torch.ones_like(bias)
    opt.step()
    opt.param_groups[0]["params"] = parameters()
    with pytest.raises(RuntimeError, match="was replaced in the optimizer's groups after") as told:
        opt.state_dict()
    assert "DeepSpeed" not in str(told.value)
