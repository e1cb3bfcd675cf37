"""An option is refused in a group as in the constructor, in the same words, and never by a step: every optimizer, every option, several wrong values."""

import inspect
import math
import warnings

import pytest
import torch
from test_refusals import OPTIONS, RULES, stepped
from torch import nn

import lowbit

WRONG = ("1e-8", None, -1.0, math.nan, (0.9,), (0.5, -1.0), (0.5, "0.9"), torch.ones(2), torch.tensor(0.5), 1.5, 2)  # fmt: skip
COUNTED = (
    "k",
    "train_mode",
    "weight_sum",
    "lr_max",
    "scheduled_lr",
)  # Schedule-Free's own, no options


def params():
    return [nn.Parameter(torch.ones(16, 48))]


def refusal(make):
    """The error of a constructor; None if there is none, and then two steps pass."""
    here = params()
    try:
        opt = make(here)
    except (TypeError, ValueError, RuntimeError) as error:
        return error
    stepped(opt, here)
    return None


@pytest.mark.parametrize("name", RULES)
def test_a_group_refuses_what_the_constructor_refuses(name, one_thread):
    cls, own = getattr(lowbit, name), {**OPTIONS.get(name, {}), "min_numel": 0}
    options = cls(params(), **own).defaults.keys() & inspect.signature(cls).parameters.keys()
    refused = 0
    for key in sorted(options - {*COUNTED}):
        for value in WRONG:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                whole = refusal(lambda here: cls(here, **{**own, key: value}))  # noqa: B023
                group = refusal(lambda here: cls([{"params": here, key: value}], **own))  # noqa: B023
            assert type(whole) is type(group), (key, value, whole, group)
            if whole is not None:
                said = str(group).removeprefix("parameter group 0: ").replace("the parameter group", "the optimizer")  # fmt: skip
                assert said == str(whole), (key, value)
                refused += 1
    assert refused > 10


def test_a_group_that_is_added_is_checked_and_named():
    opt = lowbit.AdamW(params())
    for options, error, words in (
        ({"betas": (0.9, 0.99, 0.999)}, TypeError, "parameter group 1: betas should be 2 numbers"),
        ({"weight_decay": "1e-2"}, TypeError, "weight_decay should be a number but is: '1e-2'"),
        ({"eps": -1.0}, ValueError, "Invalid epsilon value"),
        ({"maximize": "false"}, TypeError, "maximize should be True or False"),
    ):
        with pytest.raises(error, match=words):
            opt.add_param_group({"params": params(), **options})
    assert len(opt.param_groups) == 1
    with pytest.raises(ValueError, match="decay_by should be one of"):
        lowbit.Adafactor([{"params": params(), "decay_by": "lr_"}])
    with pytest.raises(TypeError, match="group 0: betas"):
        lowbit.MuonWithAdamW([{"params": params(), "use_muon": False, "betas": (0.9,)}])


def test_settings_of_another_rule_are_refused_by_the_load():
    saved = stepped(lowbit.AdamW(here := params()), here)
    for cls, words in ((lowbit.AdEMAMix, "betas should be 3 numbers"), (lowbit.Adafactor, "eps should be 2 numbers")):  # fmt: skip
        opt = cls(params())
        before = opt.state_dict()["param_groups"]
        with pytest.raises(TypeError, match=f"group 0 of the state dict .*{cls.__name__}.*{words}"):
            opt.load_state_dict(saved)
        assert opt.state_dict()["param_groups"] == before


def test_what_schedulers_leave_is_loaded():
    """A rate a little below 0, which cosine schedules end with, and torch's own flags."""
    saved = stepped(lowbit.AdamW(here := params()), here)
    saved["param_groups"][0] |= {"lr": -1e-20, "fused": True, "foreach": True}
    opt = lowbit.AdamW(here := params())
    opt.load_state_dict(saved)
    stepped(opt, here)


def test_a_format_that_is_none_is_refused_where_a_rule_keeps_nothing():
    for cls in (lowbit.Adafactor, lowbit.SGD):
        with pytest.raises(ValueError, match="8bti"):
            cls(params(), state_format="8bti")
