"""What DeepSpeed's ZeRO does to an optimizer's groups is refused in words that name it; a stand-in does the same without the package."""

import pytest
import torch

import lowbit


def parameters():
    return [torch.nn.Parameter(torch.randn(64, 64)), torch.nn.Parameter(torch.randn(64))]


def flat(params):
    """A group's parameters in one float32 vector, of which ZeRO gives each rank a part."""
    vector = torch.cat([p.detach().reshape(-1) for p in params]).requires_grad_()
    vector.grad = torch.ones_like(vector)
    return vector


def test_stages_1_and_2_step_one_group_of_flat_partitions_at_a_time():
    weight, bias = parameters()
    opt = lowbit.AdamW([{"params": [weight]}, {"params": [bias], "weight_decay": 0.0}])
    for group in opt.param_groups:
        group["params"] = [flat(group["params"])]
    every = opt.param_groups
    with pytest.raises(RuntimeError, match=r"flat partitions.*DeepSpeed.*ZeRO.*stage 0.*FSDP2"):
        for group in every:
            opt.param_groups = [group]
            opt.step()


def test_stage_3_steps_one_flat_partition_after_another_in_the_same_group():
    weight, bias = parameters()
    opt = lowbit.AdamW([weight, bias])
    with pytest.raises(RuntimeError, match=r"flat partitions.*DeepSpeed.*ZeRO.*stage 0.*FSDP2"):
        for p in (weight, bias):
            opt.param_groups[0]["params"] = [flat([p])]
            opt.step()
            opt.param_groups[0]["params"] = []


def test_other_replacements_are_not_called_so():
    weight, bias = parameters()
    opt = lowbit.AdamW([weight, bias])
    weight.grad, bias.grad = torch.ones_like(weight), torch.ones_like(bias)
    opt.step()
    opt.param_groups[0]["params"] = parameters()
    with pytest.raises(RuntimeError, match="was replaced in the optimizer's groups after") as told:
        opt.state_dict()
    assert "DeepSpeed" not in str(told.value)
