"""State dicts of an optimizer: copies, files, pickles, and loads of other dtypes and formats."""

import copy
import functools
import io
import pickle
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import lowbit
from lowbit import ops
from tests.optim.small_net import bits, model, set_grads, train
from tests.support.bits import same


def test_state_dict_survives_copies_files_and_weights_only():
    net = model()
    opt = lowbit.AdamW(lowbit.param_groups(net), lr=1e-2)
    train(net, opt)
    buffer = io.BytesIO()
    torch.save(opt.state_dict(), buffer)
    buffer.seek(0)
    for state in (
        copy.deepcopy(opt.state_dict()),
        pickle.loads(pickle.dumps(opt.state_dict())),
        torch.load(buffer, weights_only=True),
    ):
        net2 = copy.deepcopy(net)
        opt2 = lowbit.AdamW(lowbit.param_groups(net2), lr=1e-2)
        opt2.load_state_dict(state)
        assert same(bits(opt), bits(opt2))
        mine, theirs = copy.deepcopy((net, opt)), (net2, opt2)
        for pair in (mine, theirs):
            train(*pair, steps=3, first=5)
        assert same(bits(mine[1]), bits(theirs[1]))


def test_pickled_and_deep_copied_optimizers_step_on():
    net = model()
    opt = lowbit.AdamW(net.parameters())
    train(net, opt)
    (net2, opt2), (net3, opt3) = copy.deepcopy((net, opt)), pickle.loads(pickle.dumps((net, opt)))
    for pair in ((net, opt), (net2, opt2), (net3, opt3)):
        train(*pair, first=5)
    assert same(bits(opt), bits(opt2)) and same(bits(opt), bits(opt3))


def test_two_optimizers_from_one_state_dict_do_not_share_their_step():
    net = model()
    opt = lowbit.AdamW(net.parameters())
    train(net, opt)
    state = opt.state_dict()
    opts = [lowbit.AdamW(net.parameters()) for _ in range(2)]
    for o in opts:
        o.load_state_dict(state)
        set_grads(net, 9)
        o.step()
    assert [o.state[net[0].weight]["step"].item() for o in (opt, *opts)] == [5, 6, 6]


def test_dtypes_never_change_on_load():
    net = model()
    opt = lowbit.AdamW(net.parameters())
    train(net, opt)
    before = {k: t.dtype for k, t in opt.state[net[0].weight].items()}
    opt.load_state_dict(opt.state_dict())
    assert {k: t.dtype for k, t in opt.state[net[0].weight].items()} == before
    assert (
        before["exp_avg_dynamic8"] == torch.uint8
        and before["exp_avg_dynamic8_scale"] == torch.float32
    )


@pytest.mark.parametrize(
    "state, word",
    [
        ({"step": 3, "state1": torch.zeros(1), "qmap1": torch.zeros(256)}, "bitsandbytes"),
        ({"step": torch.tensor(1.0), "exp_avg": torch.zeros(128, 96)}, "no exp_avg_sq"),
        ({"step": torch.tensor(1.0), "momentum_buffer": torch.zeros(128, 96)}, "SGD"),
        ({"exp_avg": torch.zeros(128, 96)}, "no 'step'"),
        (
            {
                "step": torch.tensor(1.0),
                "exp_avg": torch.zeros(96, 128),
                "exp_avg_sq": torch.zeros(96, 128),
            },
            "expected floating point",
        ),
        (
            {
                "step": torch.tensor(1.0),
                "exp_avg_dynamic8": torch.zeros(128, 96).bfloat16(),
                "exp_avg_dynamic8_scale": torch.zeros(128, 1),
            },
            "cast",
        ),
    ],
)
def test_unknown_layouts_raise_and_say_what_to_do(state, word):
    net = model()
    opt = lowbit.AdamW(net.parameters())
    before = bits(opt)
    given = opt.state_dict()
    given["state"][0] = state
    with pytest.raises(ValueError, match=word):
        opt.load_state_dict(given)
    assert same(before, bits(opt)), "a refused load leaves the optimizer as it was"


@pytest.mark.parametrize("make", [lowbit.SGD, lowbit.Muon])
@pytest.mark.parametrize(
    "state",
    [
        {"momentum_buffer::quantized": torch.zeros(48, dtype=torch.int8)},
        {"state1": torch.zeros(6, 8)},
        {"lookahead_slow_buff": torch.zeros(6, 8)},
    ],
    ids=lambda state: next(iter(state)),
)
def test_unknown_state_is_not_taken_for_a_momentum_before_the_first_step(make, state):
    p = nn.Parameter(torch.ones(6, 8))
    opt = make([p], lr=0.1, momentum=0.9)
    before = bits(opt)
    with pytest.raises(ValueError, match=r"state\[0\].*it has no momentum_buffer.*It holds"):
        opt.load_state_dict({**opt.state_dict(), "state": {0: state}})
    assert same(before, bits(opt))


def test_a_momentum_of_none_is_one_before_the_first_step():
    p = nn.Parameter(torch.ones(6, 8))
    opt = lowbit.SGD([p], lr=0.1, momentum=0.9)
    state = {"momentum_buffer": None, "lookahead_slow_buff": torch.zeros(6, 8)}
    opt.load_state_dict({**opt.state_dict(), "state": {0: state}})
    assert opt.state[p]["step"] == 0


def test_lion_goes_on_from_a_state_that_counts_no_steps():
    """lion-pytorch's is the average alone; Lion's steps do not depend on their number."""
    torch.manual_seed(0)
    p, mean = nn.Parameter(torch.randn(64, 80)), torch.randn(64, 80)
    opt = lowbit.Lion([p], lr=1e-2, state_format="float32")
    opt.load_state_dict({**opt.state_dict(), "state": {0: {"exp_avg": mean.clone()}}})
    p.grad = torch.randn(64, 80)
    want = p.detach() - 1e-2 * (0.9 * mean + 0.1 * p.grad).sign()
    opt.step()
    torch.testing.assert_close(p.detach(), want)
    torch.testing.assert_close(opt.state[p]["exp_avg"], 0.99 * mean + 0.01 * p.grad)


def test_state_of_another_format_is_decoded_and_encoded():
    net = model()
    full_precision = lowbit.AdamW(net.parameters(), state_format="bfloat16")
    train(net, full_precision)
    opt = lowbit.AdamW(net.parameters())
    opt.load_state_dict(full_precision.state_dict())
    state = opt.state[net[0].weight]
    values = ops.dequantize(
        state["exp_avg_dynamic8"], state["exp_avg_dynamic8_scale"], "dynamic8", 256, 96
    )
    torch.testing.assert_close(
        values, full_precision.state[net[0].weight]["exp_avg_bfloat16"].float(), rtol=0.2, atol=2e-3
    )
    assert opt.param_groups[0]["state_format"] == "8bit"


WIDE = {"embeddings": "float32", "heads": "float32"}


class Words(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.tokens, self.body = nn.Embedding(300, 64), nn.Linear(64, 64)
        self.head = nn.Linear(64, 300, bias=False)
        if tied:
            self.head.weight = self.tokens.weight


def words_trained(steps, seed=0, opt=None, net=None, tied=False, **formats):
    if net is None:
        torch.manual_seed(seed)
        net = Words(tied)
    opt = opt or lowbit.AdamW(lowbit.param_groups(net, **formats), lr=1e-2)
    for step in range(steps):
        for i, p in enumerate(net.parameters()):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + i))
        opt.step()
    return net, opt


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("way", ["state dict", "torch file", "directory"])
def test_float32_state_of_embeddings_goes_on_in_the_new_default(way, tied, tmp_path, request):
    """And the other way: converted once, and nothing else is changed."""
    if way != "state dict":
        request.getfixturevalue("ckpt")
    for saved, chosen in ((WIDE, {}), ({}, WIDE)):
        net, opt = words_trained(3, tied=tied, **saved)
        fresh = lowbit.AdamW(lowbit.param_groups(net, **chosen), lr=1e-2)
        path, states = tmp_path / f"{len(saved)}", {"model": net.state_dict()}
        states["optimizer"] = opt.state_dict()
        if way == "torch file":
            torch.save(states, path)
        elif way == "directory":
            dcp.save(states, checkpoint_id=path, no_dist=True)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if way == "state dict":
                fresh.load_state_dict(opt.state_dict())
            else:
                lowbit.load_optimizer(fresh, path, model=net)
        assert len(said) == (saved is WIDE), "one sentence, and only where precision is lost"
        names = "'tokens.weight'" if tied else "'tokens.weight', 'head.weight'"
        assert all(f"keep float32 state for {names}, and" in str(w.message) for w in said)
        body, kept = opt.state[net.body.weight], fresh.state[net.body.weight]
        assert body.keys() == kept.keys() and same(body.values(), kept.values())
        for weight in (net.tokens.weight, net.head.weight):
            wide, coded = (opt, fresh) if saved else (fresh, opt)
            kept = coded.state[weight]
            assert "exp_avg_dynamic8" in kept and "exp_avg" not in kept
            values = ops.dequantize(
                kept["exp_avg_dynamic8"], kept["exp_avg_dynamic8_scale"], "dynamic8", 256, 64
            )
            largest = values.abs().amax(1, keepdim=True)
            assert ((values - wide.state[weight]["exp_avg"]).abs() <= 0.02 * largest).all()
            assert float(fresh.state[weight]["step"]) == 3
        words_trained(1, opt=fresh, net=net)
        assert float(fresh.state[net.tokens.weight]["step"]) == 4


@pytest.mark.parametrize("wide", [True, False])
def test_overrides_decide_what_was_kept_in_float32(wide):
    """As they did where it was saved: they go before the group's `full_precision`."""
    overrides = lowbit.override("tokens.*", full_precision=wide)
    net, opt = words_trained(1, full_precision=not wide, overrides=overrides)
    assert ("exp_avg" in opt.state[net.tokens.weight]) == wide
    fresh = lowbit.AdamW(lowbit.param_groups(net))
    names = "'tokens.weight'" if wide else "'body.weight', 'head.weight'"
    with pytest.warns(UserWarning, match=f"keep float32 state for {names}, and"):
        fresh.load_state_dict(opt.state_dict())


def test_groups_of_embeddings_have_no_key_that_others_lack():
    """A checkpoint of an optimizer without them loads by plain `dcp.load`."""
    net, opt = words_trained(1)
    wide = {"full_precision"} | set(lowbit.AdamW(net.named_parameters()).param_groups[0])
    assert all(set(group) <= wide for group in opt.param_groups)
    low = lowbit.APOLLO(lowbit.param_groups(net, embeddings="8bit"), lr=1e-2, rank=4)
    assert {group["rank"] for group in low.param_groups} == {4, None}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_old_choice_loads_its_own_checkpoints_with_plain_dcp(tied, tmp_path):
    net, opt = words_trained(3, tied=tied, **WIDE)
    dcp.save({"optim": get_optimizer_state_dict(net, opt)}, checkpoint_id=tmp_path, no_dist=True)
    again, fresh = words_trained(0, tied=tied, **WIDE)
    again.load_state_dict(net.state_dict())
    states = {"optim": get_optimizer_state_dict(again, fresh)}
    dcp.load(states, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(again, fresh, states["optim"])
    assert same(bits(opt), bits(fresh))
    again, fresh = words_trained(0, tied=tied)
    states = {"optim": get_optimizer_state_dict(again, fresh)}
    with pytest.raises(dcp.api.CheckpointException, match=r"Missing key.*tokens\.weight"):
        dcp.load(states, checkpoint_id=tmp_path, no_dist=True)


def test_hooks_of_a_state_dict_may_give_another_structure():
    opt = lowbit.AdamW([("w", nn.Parameter(torch.ones(64, 64)))])
    opt.register_state_dict_post_hook(lambda _, made: {"optim": made})
    assert list(opt.state_dict()) == ["optim"]


def test_a_parameter_without_rows_is_saved_and_loaded():
    make = functools.partial(lowbit.AdamW, min_numel=0)
    p = nn.Parameter(torch.ones(0, 64))
    opt = make([("w", p)])
    for _ in range(2):
        p.grad = torch.ones_like(p)
        opt.step()
    again = make([("w", nn.Parameter(torch.ones(0, 64)))])
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    (state,) = again.state.values()
    assert state["exp_avg_dynamic8"].shape == (0, 64) and state["step"] == 2
