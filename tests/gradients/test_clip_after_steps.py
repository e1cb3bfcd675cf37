"""Clipping after a backward pass that has stepped: lowbit warns that none is left."""

import warnings

import pytest
import torch
from torch import nn

import lowbit

CLIPS = [lowbit.clip_grad_norm_, lowbit.clip_scale]


def stepped(**options):
    """A model and its optimizer, which has stepped the weight in the backward pass."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    opt = lowbit.AdamW(lowbit.param_groups(model))
    lowbit.step_in_backward(model, opt, **options)
    model(torch.randn(4, 64)).square().mean().backward()
    return model, opt


@pytest.mark.parametrize("clip", CLIPS)
def test_what_the_backward_pass_has_stepped_is_not_clipped(clip):
    model, opt = stepped()
    with pytest.warns(UserWarning, match=r"2 of these gradients .*max_norm=") as caught:
        clip(model.parameters(), 1.0)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clip(model.parameters(), 1.0)  # said once
        opt.step()
        clip(model.parameters(), 1.0)


@pytest.mark.parametrize("clip", CLIPS)
def test_what_is_clipped_is_silent(clip):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, _ = stepped(max_norm=1.0)
        clip(model.parameters(), 1.0)
        other = nn.Linear(64, 64)  # of no stepper, beside one
        other(torch.randn(4, 64)).square().mean().backward()
        assert float(lowbit.clip_grad_norm_(other.parameters(), 1e-3)) > 0
