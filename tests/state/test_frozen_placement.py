"""A frozen parameter may lie where state could not follow it: it gets none before it is trained."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

import lowbit

MAKERS = {
    "AdamW 4 bit": lambda ps: lowbit.AdamW(ps, state_format="4bit"),
    "an override": lambda ps: lowbit.AdamW(ps, overrides={"w": {"state_format": "4bit"}}),
    "APOLLO": lambda ps: lowbit.APOLLO(ps, rank=8),
    "Adafactor": lambda ps: lowbit.Adafactor(ps, rank=8),
}


@pytest.fixture
def mesh():
    """This process as one of four ranks that never meet."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (4,))
    finally:
        dist.destroy_process_group()


def cut_inside_a_byte(mesh, trained):
    """Columns 0..25 of [64, 100]."""
    local = DTensor.from_local(torch.zeros(64, 25), mesh, [Shard(1)], run_check=False)
    return nn.Parameter(local, requires_grad=trained)


@pytest.mark.parametrize("name", MAKERS)
def test_it_is_refused_once_it_is_trained(name, mesh):
    w, a = cut_inside_a_byte(mesh, False), nn.Parameter(torch.ones(64, 100))
    opt = MAKERS[name]([("w", w), ("a", a)])
    for _ in range(2):
        a.grad = torch.ones_like(a)
        opt.step()
    assert w not in opt.state and len(opt.state_dict()["state"]) == 1
    w.requires_grad_()
    w.grad = torch.zeros_like(w)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"'w' of 100 columns is cut at columns"):
            opt.step()
    assert opt.state[a]["step"] == 2
    w.requires_grad_(False)
    w.grad = None
    opt.step()
    assert opt.state[a]["step"] == 3
    with pytest.raises(ValueError, match=r"'w' of 100 columns is cut at columns"):
        MAKERS[name]([("w", cut_inside_a_byte(mesh, True)), ("a", a)])


def test_a_parameter_without_a_name_is_not_called_none(mesh):
    with pytest.raises(ValueError, match=r"parameter 0 of .* full_precision=True$"):
        lowbit.AdamW([cut_inside_a_byte(mesh, True)], state_format="4bit")


def test_options_that_fit_nothing_are_refused_as_before(mesh):
    with pytest.raises(ValueError, match="no parameter format is named"):
        lowbit.AdamW([("w", cut_inside_a_byte(mesh, False))], param_format="float33")
