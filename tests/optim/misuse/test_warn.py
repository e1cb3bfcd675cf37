"""One warning of each kind where training would suffer, and none where it would not."""

import copy
import warnings

import pytest
import torch
from torch import nn

import lowbit

BFLOAT16 = [entry["name"] for entry in lowbit.catalog()["param"] if entry["dtype"] == "bfloat16"]
UNHARMED = [name for name in BFLOAT16 if name != "bfloat16"]


def build(value=1.0, dtype=torch.bfloat16, cls=lowbit.AdamW, **options):
    """An optimizer of two weights that are `value` everywhere, with gradients."""
    params = [nn.Parameter(torch.full((80, 64), value, dtype=dtype)) for _ in range(2)]
    for p in params:
        p.grad = torch.full_like(p, -1.0)
    return cls([("a", params[0]), ("b", params[1])], **{"lr": 1e-6, **options})


def test_nearest_is_said_once():
    with pytest.warns(
        UserWarning, match="2 bfloat16 parameters, such as 'a', are rounded to nearest"
    ) as caught:
        opt = build(param_format="nearest", lr=1e-3)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert "lr=0.001 that is most updates of weights above 0.512" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step()
        opt.add_param_group({"params": [("c", nn.Parameter(torch.ones(80, 64).bfloat16()))]})
        opt.load_state_dict(opt.state_dict())
        opt.step()
        copied = copy.deepcopy(opt)
        for p in [p for group in copied.param_groups for p in group["params"]]:
            p.grad = torch.ones_like(p)
        copied.step()


def test_what_the_learning_rate_reaches():
    """The bound that the message has: weights above it do not move, and some below it do."""
    bound = 0.512
    for value, moves in ((bound * 1.01, False), (0.249, True)):
        with pytest.warns(UserWarning, match="above 0.512"):
            opt = build(value, param_format="nearest", lr=1e-3, weight_decay=0.0)
        p = opt.param_groups[0]["params"][0]
        before = p.detach().clone()
        opt.step()
        assert (not torch.equal(before, p)) == moves


@pytest.mark.filterwarnings("ignore:2 bfloat16 parameters")
def test_lost_updates_are_said_once():
    opt = build(param_format="nearest", weight_decay=0.0)
    with pytest.warns(
        UserWarning, match="loses 100.00% of the updates of 2 parameters, and of 'a' 100.00%"
    ) as caught:
        stats = opt.stats(probe=True)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert stats["total"]["lost_updates"] == 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.stats(probe=True)
        opt.stats()


@pytest.mark.filterwarnings("ignore:2 bfloat16 parameters")
def test_a_learning_rate_that_nearest_rounding_loses():
    opt = build(param_format="nearest")
    p = opt.param_groups[0]["params"][0]
    p.data[:20] = 2.0**-12  # below 512e-6
    with pytest.warns(
        UserWarning, match="as large as the learning rate is lost .* in 87.50% of the weights"
    ):
        stats = opt.stats()
    assert stats["parameters"]["a"]["out_of_reach"] == 0.75
    assert stats.scalars()["lowbit/out_of_reach"] == 0.875
    assert "out of reach  87.50%" in str(stats)


@pytest.mark.filterwarnings("ignore:2 bfloat16 parameters")
@pytest.mark.parametrize("options", [{"lr": 0.0}, {"lr": 1e-2}, {"cls": lowbit.SGD, "lr": 1e-6}])
def test_no_alarm_where_updates_reach_or_are_of_another_size(options):
    opt = build(param_format="nearest", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.stats()
        if options["lr"] > 1e-3:
            opt.stats(probe=True)


@pytest.mark.parametrize("name", [*UNHARMED, "auto", "float32"])
def test_no_alarm_for_other_parameter_formats(name):
    dtype = torch.float32 if name == "float32" else torch.bfloat16
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt = build(dtype=dtype, param_format=name)
        for _ in range(2):
            stats = opt.stats(probe=True)
            opt.step()
        assert "out_of_reach" not in stats["total"]
        if lowbit.catalog()["param"][BFLOAT16.index(name) if name in BFLOAT16 else 0]["random"]:
            assert stats["total"]["lost_updates"] == 0.0


@pytest.mark.filterwarnings("ignore:2 bfloat16 parameters")
def test_stochastic_rounding_loses_nothing_for_good():
    opt = build(weight_decay=0.0)
    stats = opt.stats(probe=True)
    assert stats["total"]["lost"] > 0.9 and stats["total"]["lost_updates"] == 0.0
    assert "by chance" in str(stats)


def test_frozen_parameters_are_no_reason():
    p, q = (nn.Parameter(torch.ones(80, 64).bfloat16(), requires_grad=False) for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowbit.AdamW([("p", p), ("q", q)], param_format="nearest")


@pytest.mark.parametrize(
    "given, advice",
    [
        ("dynamic8", "'exp_avg_sq': 'dynamic8_unsigned'}, as the preset '8bit' does"),
        ("linear7", "{'exp_avg': 'linear7', 'exp_avg_sq': 'linear7_unsigned'}"),
        (lowbit.scaled("power1_4", block=128), "'exp_avg_sq': 'power1_4_unsigned'}"),
    ],
)
def test_a_second_moment_in_a_signed_map_is_said_once(given, advice):
    """Half of the codes of a map with signs are never used: one bit is lost."""
    with pytest.warns(UserWarning, match="spends one bit of each code on signs") as caught:
        opt = build(state_format=given)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert "exp_avg_sq is never negative" in str(caught[0].message)
    assert advice in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step()
        opt.load_state_dict(opt.state_dict())


@pytest.mark.parametrize(
    "given",
    [
        *[entry["name"] for entry in lowbit.catalog()["presets"]],
        {"exp_avg": "dynamic8", "exp_avg_sq": "dynamic8"},
        "bfloat16",
        "log8_signed",
    ],
    ids=str,
)
def test_presets_states_by_name_and_formats_without_a_twin_are_not_warned_of(given):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(state_format=given)
