"""`lowbit.param_groups` leaves frozen parameters out. A loop that unfreezes some later is told that
no step trains them; alternating optimizers and the ways that train them are not.
"""

import warnings

import pytest
import torch
from torch import nn

import lowbit


def frozen_below(dtype=torch.float32):
    """Three layers, of which the first two are frozen."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)]).to(dtype)
    model[:2].requires_grad_(False)
    return model


def train(model, opt, steps=70):
    for step in range(steps):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
        model(x.to(model[0].weight.dtype)).square().mean().backward()
        opt.step()
        opt.zero_grad()


@pytest.fixture
def silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize(
    "make",
    [
        lambda model: lowbit.AdamW(lowbit.param_groups(model)),
        lambda model: lowbit.MuonWithAdamW(lowbit.muon_param_groups(model)),
    ],
)
def test_a_layer_that_is_unfrozen_is_missed_once(make):
    model = frozen_below()
    opt = make(model)
    train(model, opt)
    model[1].requires_grad_(True)
    before = model[1].weight.detach().clone()
    with pytest.warns(UserWarning, match="does not train '1.weight' and 1 more: frozen") as caught:
        train(model, opt)
    assert torch.equal(model[1].weight, before)
    (one,) = caught
    assert one.filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, opt)


@pytest.mark.usefixtures("silent")
def test_added_as_the_message_says():
    model = frozen_below()
    opt = lowbit.AdamW(lowbit.param_groups(model))
    train(model, opt)
    model[1].requires_grad_(True)
    opt.add_param_group({"params": list(model[1].named_parameters("1"))})
    before = model[1].weight.detach().clone()
    train(model, opt)
    assert not torch.equal(model[1].weight, before)
    assert opt.param_groups[1]["param_names"] == ["1.weight", "1.bias"]


@pytest.mark.usefixtures("silent")
def test_named_parameters_are_trained_once_they_are_unfrozen():
    model = frozen_below()
    opt = lowbit.AdamW(model.named_parameters())
    assert set(opt.state) == set(model[2].parameters())  # frozen parameters take no memory
    train(model, opt, 3)
    model[1].requires_grad_(True)
    before = model[1].weight.detach().clone()
    train(model, opt, 3)
    assert not torch.equal(model[1].weight, before)
    assert float(opt.state[model[1].weight]["step"]) == 3


@pytest.mark.usefixtures("silent")
def test_frozen_again_or_never_trained():
    model = frozen_below()
    opt = lowbit.AdamW(lowbit.param_groups(model))
    model[0].weight.grad = torch.ones(64, 64)  # left behind by a run before
    train(model, opt)
    model[1].requires_grad_(True)  # for an input's gradient, and nothing else
    model[1].requires_grad_(False)
    train(model, opt)


@pytest.mark.usefixtures("silent")
def test_groups_of_another_model():
    one, other = frozen_below(), frozen_below()
    lowbit.param_groups(one)
    one[1].requires_grad_(True)
    one(torch.randn(4, 64)).sum().backward()
    train(other, lowbit.AdamW(lowbit.param_groups(other)))


@pytest.mark.usefixtures("silent")
def test_another_optimizer_trains_them():
    """As in adversarial training: each optimizer is built while the other's half is frozen."""
    model = frozen_below()
    above = lowbit.AdamW(lowbit.param_groups(model))
    model[:2].requires_grad_(True)
    model[2].requires_grad_(False)
    below = lowbit.AdamW(lowbit.param_groups(model))
    model.requires_grad_(True)
    for _ in range(40):
        train(model, above, 1)
        train(model, below, 1)
    assert above.state and not set(above.state) & set(below.state)


def test_an_optimizer_whose_construction_raised():
    """Its traceback may keep it, as a notebook does."""
    model = frozen_below()
    with pytest.raises(TypeError) as kept:
        lowbit.AdamW(model[0].weight)
    opt = lowbit.AdamW(lowbit.param_groups(model))
    model[1].requires_grad_(True)
    with pytest.warns(UserWarning, match="does not train '1.weight'"):
        train(model, opt)
    assert kept.value.__traceback__ is not None


def test_an_estimate_makes_no_groups():
    model = frozen_below()
    opt = lowbit.AdamW(lowbit.param_groups(model))
    model[1].requires_grad_(True)
    lowbit.estimate(model)
    with pytest.warns(UserWarning, match="does not train '1.weight'"):
        train(model, opt)


@pytest.mark.usefixtures("silent")
def test_an_estimate_leaves_nothing_out():
    model = frozen_below()
    lowbit.estimate(model)
    opt = lowbit.AdamW(model[2].named_parameters("2"))
    model.requires_grad_(True)
    train(model, opt)


@pytest.mark.usefixtures("silent")
def test_a_warning_that_is_an_error_comes_after_the_step():
    model = frozen_below()
    opt = lowbit.AdamW(lowbit.param_groups(model))
    model[1].requires_grad_(True)
    with pytest.raises(UserWarning, match="does not train"):
        train(model, opt)
    assert {float(state["step"]) for state in opt.state.values()} == {32.0}
    assert not opt.stepped_early
