"""Cautious masks: timm's steps in float32, states that do not know of them, and what is refused.
test_update.py has every format beside a reference.
"""

import numpy as np
import pytest
import torch
from torch import nn

import lowbit
from tests.support.paths import GOLDEN

STEPS = 10  # of tests/golden/make_cautious.py, as the following
CASES = {
    "adamw": (lowbit.AdamW, {"lr": 0.02, "weight_decay": 0.1}),
    "adamw_betas": (lowbit.AdamW, {"lr": 0.02, "betas": (0.6, 0.9), "eps": 1e-4}),
    "amsgrad": (lowbit.AdamW, {"lr": 0.02, "amsgrad": True, "weight_decay": 0.0}),
    "lion": (lowbit.Lion, {"lr": 0.01, "weight_decay": 0.1}),
    "sgd": (lowbit.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "decoupled": True}),
    "nesterov": (lowbit.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
}


def replayed(golden, name, steps=STEPS, **options):
    cls, settings = CASES[name]
    p = nn.Parameter(torch.from_numpy(golden["p0"]))
    opt = cls([p], **settings, **options)
    for t in range(steps):
        p.grad = torch.from_numpy(golden["g0"][t]).float()
        opt.step()
    return p, opt


@pytest.mark.parametrize("name", CASES)
def test_float32_state_reproduces_timm(name):
    golden = np.load(GOLDEN / "cautious.npz")
    p, _ = replayed(golden, name, cautious=True, state_format="float32")
    plain, _ = replayed(golden, name, state_format="float32")
    torch.testing.assert_close(
        p.detach(), torch.from_numpy(golden[f"{name}_p"]), rtol=3e-6, atol=3e-6
    )
    assert not torch.allclose(p, plain)


@pytest.mark.parametrize("name", CASES)
def test_states_are_those_of_a_step_without(name):
    """From the same weights and gradients."""
    golden = np.load(GOLDEN / "cautious.npz")
    made = [replayed(golden, name, 3, cautious=on, min_numel=0)[1].state for on in (True, False)]
    one, other = (next(iter(state.values())) for state in made)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_only_weights_that_agree_move_and_further():
    p, q = (nn.Parameter(torch.zeros(64, 64)) for _ in range(2))
    opts = lowbit.AdamW([p], cautious=True, weight_decay=0.0), lowbit.AdamW([q], weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        grad = torch.randn(64, 64, generator=generator)
        before = p.detach().clone(), q.detach().clone()
        p.grad, q.grad = grad, grad.clone()
        for opt in opts:
            opt.step()
    moved, plain = p.detach() - before[0], q.detach() - before[1]
    mask = plain * grad < 0
    assert torch.equal(moved != 0, mask) and 0.3 < mask.float().mean() < 1
    torch.testing.assert_close(moved[mask], plain[mask] / mask.float().mean(), rtol=1e-4, atol=1e-7)


def test_the_option_may_change_between_steps_and_per_group():
    p, q = (
        nn.Parameter(torch.randn(64, 64, generator=torch.Generator().manual_seed(i)))
        for i in range(2)
    )
    opt = lowbit.Lion([{"params": [p]}, {"params": [q], "cautious": True}])
    rules = [lay.rule for _, _, lay in opt.laid_out()]
    assert rules == ["lion", "cautious_lion"]
    for t in range(2):
        for r in (p, q):
            r.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(10 + t))
        opt.step()
        opt.param_groups[0]["cautious"] = True
    assert [lay.rule for _, _, lay in opt.laid_out()] == ["cautious_lion"] * 2
    saved = opt.state_dict()
    again = lowbit.Lion([{"params": [p]}, {"params": [q]}])
    again.load_state_dict(saved)
    assert [group["cautious"] for group in again.param_groups] == [True, True]


def test_what_is_refused():
    p = nn.Parameter(torch.zeros(64, 128))
    with pytest.raises(ValueError, match=r"cautious=True compares the momentum.*momentum is 0"):
        lowbit.SGD([p], cautious=True)
    with pytest.raises(ValueError, match="cautious_adamw cannot keep exp_avg_sq factored"):
        lowbit.AdamW([p], cautious=True, state_format="factored8")
    with pytest.raises(TypeError, match="unexpected keyword argument 'cautious'"):
        lowbit.LAMB([p], cautious=True)
