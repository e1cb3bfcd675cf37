"""Settings that contradict each other, or that name what is not there,
raise ValueError at construction.
"""

import pytest
import torch
from torch import nn

import lowbit
from lowbit import sharding
from lowbit.state import layout
from tests.support.configured import model


def of_other_dtypes():
    """Every parameter format for parameters of a dtype that it does not store, and the dtype that
    it does.
    """
    for entry in lowbit.catalog()["param"]:
        for dtype in sorted({other["dtype"] for other in lowbit.catalog()["param"]}):
            if entry["dtype"] != dtype:
                yield entry["name"], dtype, entry["dtype"]


S = lowbit.scaled
SENSELESS = [
    # (what is wrong, optimizer and options, words of the reason)
    ("stochastic rounding of float32", lambda: S("float32", rounding="stochastic"), "not rounded"),
    ("scales of float32", lambda: S("float32", scale="row"), "no scales"),
    ("blocks of bfloat16", lambda: S("bfloat16", block=64), "no scales"),
    ("no scale", lambda: S("dynamic8", scale="none"), "needs a scale"),
    ("a block of rows", lambda: S("dynamic8", scale="row", block=64), "leave block out"),
    ("an odd block", lambda: S("dynamic8", block=100), "power of two"),
    ("an unknown scale", lambda: S("dynamic8", scale="diagonal"), "scale must be one of"),
    ("an unknown rounding", lambda: S("dynamic8", rounding="up"), "rounding one of"),
    ("a threshold below 0", lambda: S("dynamic8", min_numel=-1), "min_numel"),
    (
        "an unknown option",
        {"state_format": {"exp_avg": {"format": "dynamic8", "blok": 64}}},
        "blok",
    ),
    ("neither preset nor format", {"state_format": {"exp_avg": 8}}, "is not a state format"),
    ("unsigned for signed", {"state_format": "dynamic8_unsigned"}, "negative values"),
    ("factored for signed", {"state_format": "factored"}, "negative values"),
    ("factored for signed by name", {"state_format": {"exp_avg": "factored"}}, "negative values"),
    (
        "factored in blocks",
        {"state_format": {"exp_avg_sq": {"format": "factored", "block": 64}}},
        "leave the rest out",
    ),
    (
        "factored under amsgrad",
        {"state_format": "factored8", "amsgrad": True},
        "cannot keep exp_avg_sq and max_exp_avg_sq factored",
    ),
    ("a state that is not kept", {"state_format": {"max_exp_avg_sq": "8bit"}}, "max_exp_avg_sq"),
    (
        "wide and factored",
        {"state_format": "factored8", "full_precision": True},
        "leave one of the two out",
    ),
    (
        "wide and factored in a group",
        {"group": {"state_format": "factored8", "full_precision": True}},
        "parameter group has full_precision=True and factored",
    ),
    (
        "wide and factored in an override",
        {"overrides": {"*": {"state_format": "factored8", "full_precision": True}}},
        r"overrides\['\*'\] has full_precision=True and factored",
    ),
    (
        "an override of nothing",
        {"overrides": lowbit.override("bod.*", full_precision=True)},
        r"overrides\['bod.\*'\] matches the name of no parameter",
    ),
    (
        "an unknown option of an override",
        {"overrides": {"body.*": {"lr": 1.0}}},
        r"overrides\['body.\*'\] has \['lr'\]",
    ),
    ("the same, built", lambda: lowbit.override("x", state="8bit"), "state_format, param_format"),
    (
        "patterns for wide in an override",
        {"overrides": {"body.*": {"full_precision": ["body.*"]}}},
        "True or False",
    ),
    ("overrides without patterns", {"overrides": ["body.*"]}, "must map name patterns"),
    ("an override without options", {"overrides": {"body.*": "8bit"}}, "must map a name pattern"),
    (
        "an unknown format in an override",
        {"overrides": {"body.*": {"state_format": "9bit"}}},
        "named '9bit'",
    ),
    ("a threshold that is not a number", {"min_numel": 1.5}, "min_numel"),
    ("an unknown parameter format", {"param_format": "nope"}, "no parameter format"),
    (
        "a parameter format of another dtype in an override",
        {"overrides": {"head.*": {"param_format": "bfloat16"}}},
        "'head.weight' is float32",
    ),
]
SENSELESS += [
    (
        f"{name} of {dtype}",
        {"param_format": name, "dtype": dtype},
        f"is {dtype}, but param_format='{name}' is for {stored}: convert the model",
    )
    for name, dtype, stored in of_other_dtypes()
]
SENSELESS += [
    (
        f"{entry['name']} with cross-tile scales",
        lambda name=entry["name"]: S(name, scale="tensor"),
        "only have scale='block'",
    )
    for entry in lowbit.catalog()["state"]
    if entry["scaled"] and not entry["cross_tile"]
]


@pytest.mark.parametrize(
    "options, words", [row[1:] for row in SENSELESS], ids=[row[0] for row in SENSELESS]
)
def test_settings_that_make_no_sense(options, words):
    if callable(options):
        with pytest.raises(ValueError, match=words):
            options()
        return
    options = dict(options)
    net = model(getattr(torch, options.pop("dtype", "float32")))
    params = net.named_parameters()
    if "group" in options:
        params = [{"params": params, **options.pop("group")}]
    with pytest.raises(ValueError, match=words):
        lowbit.AdamW(params, **options)


def test_factored_state_where_a_rule_has_no_factored_variant():
    net = model()
    for wide in ((), ["*"]):  # whether or not there is a parameter that it would be done for
        with pytest.raises(ValueError, match="lamb cannot keep exp_avg_sq factored"):
            lowbit.LAMB(net.named_parameters(), state_format="factored8", full_precision=wide)
    # A group may be wide in an optimizer that factors others,
    # and a rule with nothing to factor takes the preset.
    lowbit.AdamW(lowbit.param_groups(net), state_format="factored8")
    lowbit.LARS(net.named_parameters(), state_format="factored8")


def test_measured_scales_that_shards_cannot_agree_on(monkeypatch):
    """At construction, not at the first step."""
    group = object()
    part = sharding.Part((64, 96), (32, 96), (0, 0), ((0, group),))
    monkeypatch.setattr(layout.sharding, "part", lambda p, what: part)
    monkeypatch.setattr("lowbit.state.quantize.sharding.reduce_over", lambda wanted: None)
    specs = {"exp_avg": S("dynamic8", scale="tensor"), "exp_avg_sq": S("dynamic8", scale="row")}
    with pytest.raises(ValueError, match="scale='tensor'"):
        lowbit.AdamW([nn.Parameter(torch.ones(32, 96))], state_format=specs)


@pytest.mark.parametrize("use_muon", [True, False])
@pytest.mark.parametrize(
    "key, value", [("lr", 1e-5), ("betas", (0.8, 0.9)), ("eps", 1e-6), ("weight_decay", 0.0)]
)
def test_what_muon_calls_adamws_is_of_no_group(key, value, use_muon):
    """A group had the constructor's, in silence. Settings of another program's group load."""
    own, p = {f"adamw_{key}": value}, nn.Parameter(torch.ones(32, 64))
    group = {"params": [p], "use_muon": use_muon}
    with pytest.raises(ValueError, match=f"adamw_{key} is for a whole .*: write {key} in a group"):
        lowbit.MuonWithAdamW([{**group, **own}])
    opt = lowbit.MuonWithAdamW([group], **own)
    saved = opt.state_dict()
    saved["param_groups"][0] |= own
    opt.load_state_dict(saved)
