"""An option is refused in a group as in the constructor, in the same words, and never by a step:
every optimizer, every option, several wrong values.
"""

import inspect
import math
import re
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import lowbit
from tests.optim.misuse.test_refusals import OPTIONS, RULES, stepped

pytestmark = pytest.mark.slow

WRONG = (
    "1e-8",
    None,
    -1.0,
    math.nan,
    (0.9,),
    (0.5, -1.0),
    (0.5, "0.9"),
    torch.ones(2),
    torch.tensor(0.5),
    1.5,
    2,
)
# Schedule-Free's own, no options
COUNTED = ("k", "train_mode", "weight_sum", "lr_max", "scheduled_lr")


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
                group = refusal(lambda ps: cls([{"params": ps, key: value}], **own))  # noqa: B023
            assert type(whole) is type(group), (key, value, whole, group)
            if whole is not None:
                said = (
                    str(group)
                    .removeprefix("parameter group 0: ")
                    .replace("the parameter group", "the optimizer")
                )
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
    for cls, words in (
        (lowbit.AdEMAMix, "betas should be 3 numbers"),
        (lowbit.Adafactor, "eps should be 2 numbers"),
    ):
        opt = cls(params())
        before = opt.state_dict()["param_groups"]
        with pytest.raises(TypeError, match=f"group 0 of the state dict .*{cls.__name__}.*{words}"):
            opt.load_state_dict(saved)
        assert opt.state_dict()["param_groups"] == before


SAVED = (  # what schedules, torch and programs leave in groups, which a step takes
    ("AdamW", {}, {"lr": -1e-20, "fused": True, "foreach": True, "differentiable": True}),
    ("AdamW", {}, {"lr": torch.tensor([-1e-9]), "weight_decay": -1e-20, "betas": [0.9, 1.0]}),
    (
        "AdamW",
        {},
        {"betas": torch.tensor([0.9, 0.99]), "eps": torch.tensor(1e-8), "lr": np.array(1e-3)},
    ),
    (
        "AdamW",
        {},
        {"betas": (torch.tensor(0.9), 0.99), "weight_decay": np.array(0.1), "lr": math.nan},
    ),
    (
        "AdamW",
        {},
        {
            "betas": np.array([0.9, 0.99]),
            "maximize": np.bool_(False),
            "cautious": torch.tensor(False),
        },
    ),
    ("AdamW", {}, {"amsgrad": None, "maximize": None, "capturable": None, "cautious": None}),
    ("SGD", {"momentum": 0.9, "nesterov": True}, {"momentum": 0.0}),
    (
        "SGD",
        {"momentum": 0.9},
        {"nesterov": None, "dampen_first": None, "maximize": None, "dampening": np.float32(0.0)},
    ),
    ("MuonWithAdamW", {}, {"nesterov": None, "momentum": torch.tensor(0.95), "lr": -1e-20}),
    (
        "Adafactor",
        {},
        {"beta1": None, "eps": [None, -1e-20], "relative_step": None, "add_eps": None},
    ),
    ("AdEMAMix", {}, {"betas": (0.9, 0.999, 1.0), "t_alpha": None}),
)


def built(name, here, **own):
    use_muon = {"use_muon": True} if name == "MuonWithAdamW" else {}
    return getattr(lowbit, name)([{"params": here, **use_muon}], **own)


@pytest.mark.parametrize(("name", "own", "settings"), SAVED)
def test_a_load_takes_what_is_left_in_groups_and_a_second_one_too(name, own, settings):
    """Ranges are for what a user asks for: a cosine ends a little below 0,
    and the next load finds that in the live group.
    """
    saved = stepped(built(name, here := params(), **own), here)
    saved["param_groups"][0] |= settings
    opt = built(name, here := params(), **own)
    for _ in range(2):
        opt.load_state_dict(saved)
        stepped(opt, here)


@pytest.mark.parametrize(
    "live",
    [
        {"lr": -1e-20},
        {"lr": torch.tensor(-1.0)},
        {"fused": True, "foreach": True},
        {"differentiable": True},
    ],
)
def test_a_load_does_not_ask_what_the_live_group_has(live):
    saved = stepped(lowbit.AdamW(here := params()), here)
    bare = {
        key: value
        for key, value in saved["param_groups"][0].items()
        if key not in live or key == "lr"
    }
    opt = lowbit.AdamW(params(), foreach=True)
    opt.param_groups[0] |= live
    opt.load_state_dict({**saved, "param_groups": [bare]})
    assert opt.param_groups[0]["lr"] == 1e-3


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("AdamW", {"seed": "x"}, "seed should be an int but is: 'x'"),
        ("AdamW", {"lr": None}, "lr should be a number but is: None"),
        ("AdamW", {"lr": "1e-3"}, "lr should be a number but is: '1e-3'"),
        ("AdamW", {"lr": [1e-3]}, "lr should be a number but is: [0.001]"),
        ("AdamW", {"lr": np.array([1e-3])}, "lr should be a number but is: array([0.001])"),
        ("AdamW", {"lr": torch.ones(2)}, "lr should be a number but is: tensor([1., 1.])"),
        ("AdamW", {"lr": 1j}, "lr should be a number but is: 1j"),
        ("AdamW", {"weight_decay": None}, "weight_decay should be a number but is: None"),
        ("AdamW", {"eps": "1e-8"}, "epsilon should be a number but is: '1e-8'"),
        (
            "AdamW",
            {"lr": -1e-20, "weight_decay": -1e-20, "betas": (0.9, "0.99")},
            "betas[1] should be a number but is: '0.99'",
        ),
        (
            "AdamW",
            {"weight_decay": -1.0, "betas": torch.ones(3)},
            "betas should be 2 numbers but is: [1.0, 1.0, 1.0]",
        ),
        ("AdamW", {"maximize": "false"}, "maximize should be True or False but is: 'false'"),
        ("Adafactor", {"decay_by": "rate"}, "decay_by should be one of"),
        ("Adafactor", {"eps": 1e-8}, "eps should be 2 numbers but is: 1e-08"),
        (
            "MuonWithAdamW",
            {"momentum": -1e-20, "ns_coefficients": (1.0, 2.0)},
            "ns_coefficients should be three numbers",
        ),
    ],
)
def test_a_load_refuses_what_cannot_be_a_setting_and_names_the_group(name, settings, words):
    saved = stepped(built(name, here := params()), here)
    saved["param_groups"][0] |= settings
    opt = built(name, params())
    before = opt.state_dict()["param_groups"]
    with pytest.raises(
        (TypeError, ValueError), match=f"group 0 of the state dict .*{re.escape(words)}"
    ):
        opt.load_state_dict(saved)
    assert opt.state_dict()["param_groups"] == before


def test_a_group_that_is_added_need_not_answer_for_a_schedule():
    """A rate that is a tensor is written in place, in the defaults too; a copied group has what a
    schedule left in the other.
    """
    rate = torch.tensor(1e-3)
    opt = lowbit.AdamW(params(), lr=rate)
    rate.fill_(-1e-9)
    opt.add_param_group({"params": params()})
    opt.param_groups[0]["lr"] = -1e-20
    opt.add_param_group({**opt.param_groups[0], "params": params()})
    with pytest.raises(ValueError, match="parameter group 3: Invalid learning rate"):
        opt.add_param_group({"params": params(), "lr": -0.5})
    assert len(opt.param_groups) == 3


def copied(opt):
    return {
        **{key: value for key, value in opt.param_groups[0].items() if key != "params"},
        "params": params(),
    }


def test_a_copy_of_a_live_group_is_taken_as_it_is():
    """A schedule has written in it, which no constructor would take."""
    here = params()
    opt = lowbit.AdamW(here, betas=(torch.tensor(0.9), torch.tensor(0.99)))
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.01, total_steps=40)
    stepped(opt, here)
    schedule.step()
    opt.add_param_group(copied(opt))
    opt = lowbit.SGD(params(), momentum=0.9, nesterov=True)
    opt.param_groups[0]["momentum"] = 0.0
    opt.add_param_group(copied(opt))
    assert len(opt.param_groups) == 2


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adafactor", "Lion"])
def test_a_rate_below_0_that_a_schedule_wrote_does_not_keep_an_optimizer_from_being_built(name):
    make = getattr(lowbit, name)
    opt = make(params(), lr=0.01)
    torch.optim.lr_scheduler.LambdaLR(opt, lambda step: -1e-9)
    assert opt.param_groups[0]["lr"] < 0
    make([copied(opt)])
    with pytest.raises(ValueError, match="learning rate"):
        make([{"params": params(), "lr": -1e-12}])


@pytest.mark.parametrize(
    "settings",
    [
        {
            "lr": np.array(1e-3),
            "weight_decay": np.array(0.01),
            "eps": np.array(1e-8),
            "betas": np.array([0.9, 0.99]),
        },
        {"amsgrad": None, "maximize": None, "capturable": None, "cautious": None},
        {"amsgrad": 0.0, "maximize": torch.tensor(False)},
    ],
)
def test_numbers_of_numpy_and_flags_as_torch_takes_them(settings, one_thread):
    here, there = params(), params()
    stepped(lowbit.AdamW(here, **settings), here)
    stepped(lowbit.AdamW([{"params": there, **settings}]), there)
    assert torch.equal(here[0], there[0]) and not torch.equal(here[0], params()[0])


def test_a_format_that_is_none_is_refused_where_a_rule_keeps_nothing():
    for cls in (lowbit.Adafactor, lowbit.SGD):
        with pytest.raises(ValueError, match="8bti"):
            cls(params(), state_format="8bti")
