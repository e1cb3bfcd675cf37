"""State is loaded by an optimizer that keeps the same codes under other scales: another block
length, or one scale for a row, a column, the tensor, or each dimension's index.
"""

import copy

import pytest
import torch

import lowbit
from tests.support.bits import equal

pytestmark = pytest.mark.slow

KINDS = {
    "8bit": "8bit",
    "4bit": "4bit",
    "lpmm4": "lpmm4",
    "blocks of 64": lowbit.scaled("dynamic8", block=64),
    **{
        kind: lowbit.scaled("dynamic8", scale=kind) for kind in ("row", "column", "tensor", "rank1")
    },
}
SHAPES = {"wide": (16, 128), "tall": (128, 16), "square": (64, 64), "conv": (8, 16, 3, 16)}


def made(state_format, steps=1):
    torch.manual_seed(0)
    params = [(name, torch.nn.Parameter(torch.randn(shape))) for name, shape in SHAPES.items()]
    opt = lowbit.AdamW(params, state_format=state_format, min_numel=1)
    for _ in range(steps):
        for _, p in params:
            p.grad = torch.randn_like(p)
        opt.step()
    return opt


def same(a, b, kept=None):
    """State a is b, or what was kept as it is."""
    assert a.keys() == b.keys()
    for i, state in a.items():
        for key, value in state.items():
            known = [b[i][key]] + ([kept[i][key]] if kept and key in kept[i] else [])
            assert any(equal(*map(torch.as_tensor, (value, x))) for x in known), (i, key)


def load(how, target, source, tmp_path):
    if how == "load_state_dict":
        target.load_state_dict(copy.deepcopy(source.state_dict()))
    else:
        torch.save(source.state_dict(), tmp_path / "saved.pt")
        lowbit.load_optimizer(target, tmp_path / "saved.pt")


@pytest.mark.usefixtures("ckpt")
@pytest.mark.parametrize("how", ["load_state_dict", "load_optimizer"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_loads_into_every_other(tmp_path, how, kind):
    """As it would from the values in float32, or as it is where nothing is another."""
    source, values = made(KINDS[kind]), made("float32", 0)
    load(how, values, source, tmp_path)
    exact = made("float32")
    bound = 0.2 if kind in ("4bit", "lpmm4") else 0.02
    for p, q in zip(values.param_groups[0]["params"], exact.param_groups[0]["params"], strict=True):
        got, expected = values.state[p]["exp_avg"], exact.state[q]["exp_avg"]
        assert (got - expected).norm() <= bound * expected.norm()
    for other in KINDS.keys() - {kind}:
        target, through = made(KINDS[other], 0), made(KINDS[other], 0)
        load(how, target, source, tmp_path)
        load(how, through, values, tmp_path)
        same(*(opt.state_dict()["state"] for opt in (target, through, source)))


def test_a_load_that_fails_changes_nothing():
    source, target = made(KINDS["column"]), made("8bit", 2)
    before, saved = copy.deepcopy(target.state_dict()), source.state_dict()
    del saved["state"][3]["exp_avg_dynamic8_scale_column"]
    with pytest.raises(ValueError, match="exp_avg"):
        target.load_state_dict(saved)
    same(target.state_dict()["state"], before["state"])
