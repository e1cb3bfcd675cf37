"""What people write to choose how state is kept: presets, overrides by name, lpmm's files, and settings that contradict each other."""

import inspect
import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from groups import params_for
from paths import GOLDEN
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import lowbit
from lowbit import ops, sharding
from lowbit.config import presets
from lowbit.state import layout

LPMM = GOLDEN / "lpmm"
PRESETS = {entry["name"]: entry for entry in lowbit.catalog()["presets"]}
OPTIMIZERS = [
    cls
    for name in lowbit.__all__
    if isinstance(cls := getattr(lowbit, name), type)
    and issubclass(cls, lowbit.LowbitOptimizer)
    and cls is not lowbit.LowbitOptimizer
]


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "tokens": nn.Embedding(100, 64),
            "body": nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 40)),
            "head": nn.Linear(64, 100, bias=False),
        }
    ).to(dtype)


def train(net, opt, steps=2):
    if hasattr(opt, "train"):  # Schedule-Free begins in eval mode
        opt.train()
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for p in net.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        opt.step()


def formats(opt):
    """The name of each parameter -> the formats of its states."""
    return {
        name: [slot.format for slot in lay.slots] + (["factored"] if lay.factors else [])
        for name, (_, _, lay) in zip(
            (name for group in opt.param_groups for name in group["param_names"]),
            opt.laid_out(),
            strict=True,
        )
    }


# Presets


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name):
    """Each gives one state with negative values and one without, and steps."""
    entry = PRESETS[name]
    assert entry["signed"]["format"] != "factored" and entry["signed"] == lowbit.scaled(
        **entry["signed"]
    )
    net = model()
    opt = lowbit.AdamW(net.named_parameters(), lr=1e-2, state_format=name)
    signed, unsigned = entry["signed"]["format"], entry["unsigned"]["format"]
    assert formats(opt)["body.0.weight"] == [signed, unsigned]
    lay = opt.layouts[net["body"][0].weight]
    for slot, kind in zip(lay.slots, ("signed", "unsigned"), strict=False):
        spec = entry[kind]
        assert (slot.scale, slot.block) == (spec["scale"], spec["block"])
        assert slot.stochastic == (spec["rounding"] == "stochastic")
    before = net["body"][0].weight.clone()
    train(net, opt)
    assert net["body"][0].weight.isfinite().all()
    assert not torch.equal(net["body"][0].weight, before)
    by_state = lowbit.AdamW(net.parameters(), state_format={"exp_avg": name})
    assert by_state.param_groups[0]["state_format"] == {"exp_avg": name}


def test_presets_are_named_as_in_the_catalog():
    assert list(PRESETS) == presets.available() and {"8bit", "float32", "bfloat16"} <= set(PRESETS)
    assert set(lowbit.catalog()) == {"presets", *ops.catalog()}
    assert set(PRESETS) <= set(presets.known())
    if "lpmm4" in PRESETS:
        assert PRESETS["lpmm4"]["signed"] == lowbit.scaled("dynamic4", block=128)
        assert PRESETS["lpmm4"]["unsigned"] == lowbit.scaled("power1_4_unsigned", scale="rank1")


def test_uniform8_keeps_second_moments_without_a_zero():
    """Its map rounds small positive values to 0, by whose root a step would be divided."""
    p = torch.nn.Parameter(torch.zeros(64, 64))
    opt = lowbit.AdamW([p], lr=1e-3, weight_decay=0.0, state_format="uniform8")
    p.grad = torch.full((64, 64), 1e-4)
    p.grad[:, 0] = 1.0
    opt.step()
    assert {"exp_avg_uniform8", "exp_avg_sq_linear8_unsigned"} <= set(opt.state[p])
    p.grad[:, 0] = 0.0
    before = p.detach().clone()
    opt.step()
    assert p.sub(before).abs().max() < 10e-3


def test_unknown_names_say_what_there_is(monkeypatch):
    with pytest.raises(
        ValueError, match=r"named 'nope'; presets are .*8bit.*catalog\(\)\['state'\]"
    ):
        lowbit.AdamW(model().parameters(), state_format="nope")
    later = {"signed": {"format": "later4"}, "unsigned": {"format": "float32"}}
    monkeypatch.setitem(presets.known(), "later", later)
    assert "later" not in {entry["name"] for entry in lowbit.catalog()["presets"]}
    with pytest.raises(ValueError, match="'later' needs the state format 'later4'"):
        lowbit.AdamW(model().parameters(), state_format="later")


def test_a_scaled_choice_may_be_given_again():
    for entry in lowbit.catalog()["state"]:
        scales = ["block"] if entry["scaled"] else ["none"]
        for scale in scales + ["row", "column", "tensor", "rank1"] * entry["cross_tile"]:
            spec = lowbit.scaled(entry["name"], scale=scale, min_numel=7)
            assert lowbit.scaled(**spec) == spec and spec["min_numel"] == 7


# Overrides


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_every_optimizer_takes_them(cls):
    known = inspect.signature(cls).parameters
    for name in ("overrides", "min_numel"):  # those by a peer's name hand on what they do not know
        assert "kwargs" in known or known[name].kind == inspect.Parameter.KEYWORD_ONLY
    net = model()
    opt = cls(
        params_for(cls, net),
        overrides=lowbit.override("body.*", full_precision=True),
        min_numel=1 << 20,
    )
    assert not any(slot.coded for _, _, lay in opt.laid_out() for slot in lay.slots)


def test_the_first_pattern_that_matches_counts():
    overrides = (
        lowbit.override("body.0.*", state_format="bfloat16")
        | lowbit.override("body.*", min_numel=0)
        | lowbit.override("head.weight", full_precision=False)
    )
    assert list(overrides) == ["body.0.*", "body.*", "head.weight"]
    opt = lowbit.AdamW(
        model().named_parameters(), full_precision=["head.*", "tokens.*"], overrides=overrides
    )
    wide, coded = ["float32"] * 2, ["dynamic8", "dynamic8_unsigned"]
    assert formats(opt) == {
        "tokens.weight": wide,
        "body.0.weight": ["bfloat16"] * 2,
        "body.0.bias": ["bfloat16"] * 2,
        "body.1.weight": coded,
        "body.1.bias": wide,
        "head.weight": coded,
    }
    small = nn.Linear(32, 32)
    for least, kept in ((0, coded), (1024, coded), (1025, wide), (None, wide)):
        opt = lowbit.AdamW(small.named_parameters(), min_numel=least)
        assert formats(opt)["weight"] == kept
    opt = lowbit.AdamW(
        small.named_parameters(), min_numel=5000, overrides=lowbit.override("weight", min_numel=1)
    )
    assert formats(opt)["weight"] == coded


def test_overrides_of_the_parameters_format_and_of_wrapped_names():
    net = model(torch.bfloat16)
    named = [(f"module._orig_mod.{name}", p) for name, p in net.named_parameters()]
    opt = lowbit.AdamW(named, overrides=lowbit.override("body.*", param_format="bfloat16"))
    kinds = {lay.param_format for _, p, lay in opt.laid_out() if p is net["body"][0].weight}
    assert kinds == {"bfloat16"}
    assert opt.layouts[net["head"].weight].param_format == "bfloat16_stochastic"


def test_one_pattern_is_one_pattern():
    """A string is not a list of its characters, one of which may be '*'."""
    net = model()
    groups = [{"params": net.named_parameters(), "full_precision": "head.*"}]
    for opt in (
        lowbit.AdamW(groups),
        lowbit.AdamW(net.named_parameters(), full_precision="head.*"),
    ):
        kept = formats(opt)
        assert kept["head.weight"][0] == "float32" and kept["tokens.weight"][0] == "dynamic8"


def test_overrides_of_groups_and_of_numbers():
    net = model()
    groups = [
        {"params": net["body"].named_parameters(), "overrides": lowbit.override("1.weight", full_precision=True)},
        {"params": net["head"].named_parameters()},
    ]  # fmt: skip
    opt = lowbit.AdamW(groups)
    assert formats(opt)["1.weight"] == ["float32"] * 2 and formats(opt)["0.weight"][0] == "dynamic8"
    opt.add_param_group(
        {"params": net["tokens"].named_parameters(prefix="tokens"), "overrides": {"tokens.*": {"full_precision": True}}}
    )  # fmt: skip
    assert formats(opt)["tokens.weight"] == ["float32"] * 2
    with pytest.raises(ValueError, match="'nothing"):
        opt.add_param_group({"params": [("x", nn.Parameter(torch.ones(70, 70)))], "overrides": {"nothing*": {"full_precision": True}}})  # fmt: skip
    assert len(opt.param_groups) == 3  # as before
    opt = lowbit.AdamW(net.parameters(), overrides=lowbit.override("1", full_precision=True))
    full_precision = [not any(slot.coded for slot in lay.slots) for _, _, lay in opt.laid_out()]
    assert full_precision == [False, True, True, False, True, False]  # the biases by their shape
    with pytest.raises(ValueError, match=r"'some.name'.*there are only numbers, 0 to 5"):
        lowbit.AdamW(net.parameters(), overrides=lowbit.override("some.name", full_precision=True))


def test_saved_and_loaded_settings_stay_this_optimizers():
    """The state is converted to what the loading optimizer's overrides say."""
    net, overrides = model(), lowbit.override("body.0.*", state_format="bfloat16")
    opt = lowbit.AdamW(net.named_parameters(), overrides=overrides, min_numel=100)
    train(net, opt)
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert saved["param_groups"][0]["overrides"] == overrides
    other = lowbit.AdamW(
        net.named_parameters(), overrides=lowbit.override("head.*", full_precision=True)
    )
    other.load_state_dict(saved)
    group = other.param_groups[0]
    assert set(group["overrides"]) == {"head.*"} and "min_numel" not in group
    plain = lowbit.AdamW(net.named_parameters())
    plain.load_state_dict(saved)
    assert "overrides" not in plain.param_groups[0]
    assert "exp_avg_dynamic8" in plain.state[net["body"][0].weight]
    train(net, plain, 1)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.usefixtures("ckpt")
def test_distributed_checkpoints_keep_state_of_overridden_formats(tmp_path, flat):
    overrides = lowbit.override(
        "body.0.weight", state_format={"exp_avg": "bfloat16"}, full_precision=False
    )
    net, options = model(), StateDictOptions(flatten_optimizer_state_dict=flat)
    opt = lowbit.AdamW(net.named_parameters(), overrides=overrides)
    train(net, opt)
    state = {"optim": get_optimizer_state_dict(net, opt, options=options)}
    dcp.save(state, checkpoint_id=tmp_path / "x", no_dist=True)
    again = lowbit.AdamW(net.named_parameters(), overrides=overrides)
    state = {"optim": get_optimizer_state_dict(net, again, options=options)}
    dcp.load(state, checkpoint_id=tmp_path / "x", no_dist=True)
    set_optimizer_state_dict(net, again, state["optim"], options=options)
    third = lowbit.AdamW(net.named_parameters(), overrides=overrides)
    lowbit.load_optimizer(third, tmp_path / "x")
    for p in net.parameters():
        for key, value in opt.state[p].items():
            assert torch.equal(again.state[p][key], value) and torch.equal(third.state[p][key], value)  # fmt: skip
    assert again.param_groups[0]["overrides"] == overrides


# lpmm's configurations


def lpmm(bits=4, block=128, scale="rank1"):
    first = lowbit.scaled(f"dynamic{bits}", block=block, min_numel=4097)
    block = block if scale == "block" else None
    second = lowbit.scaled(f"power1_{bits}_unsigned", scale=scale, block=block, min_numel=4097)
    return {"exp_avg": first, "exp_avg_sq": second}


needs4 = pytest.mark.skipif("4bit" not in PRESETS, reason="no formats of 4 bits")


@needs4
@pytest.mark.parametrize(
    "name, expected",
    [
        ("default", {}), ("2nd_moment_group_128", {"scale": "block"}), ("default_5b", {"bits": 5}), ("default_6b", {"bits": 6}),
        ("default_7b", {"bits": 7}),
    ],
)  # fmt: skip
def test_lpmm_files(name, expected):
    read = lowbit.qconfig(LPMM / f"{name}.yml")
    assert read == lpmm(**expected)
    net = model()
    opt = lowbit.AdamW(net.named_parameters(), state_format=read)
    train(net, opt)
    assert formats(opt)["body.0.weight"] == [read["exp_avg"]["format"], read["exp_avg_sq"]["format"]]  # fmt: skip


@needs4
def test_lpmm_files_that_differ_otherwise():
    rank1 = lpmm()["exp_avg_sq"]
    assert lowbit.qconfig(LPMM / "1st_moment_group_2048.yml") == {
        **lpmm(block=2048),
        "exp_avg_sq": rank1,
    }
    only = lowbit.qconfig(LPMM / "2nd_moment_only_default.yml")
    assert only == {"exp_avg": lowbit.scaled("float32"), "exp_avg_sq": rank1}
    eight = lowbit.qconfig(LPMM / "default_8b.yml")
    assert (eight["exp_avg"]["format"], eight["exp_avg"]["block"]) == ("dynamic8", 128)
    with pytest.raises(ValueError, match=r"M\.GROUP_SIZE is 4096"):
        lowbit.qconfig(LPMM / "1st_moment_group_4096.yml")


@needs4
def test_lpmm_keys(tmp_path):
    group = lpmm(scale="block")
    assert lowbit.qconfig({}) == group  # what lpmm itself does without a file
    assert lowbit.qconfig({"M": {"BITS": 8}}, second=None) == {
        "exp_avg": {**group["exp_avg"], "format": "dynamic8"}
    }
    assert list(lowbit.qconfig({}, first="momentum_buffer", second=None)) == ["momentum_buffer"]
    keys = {"SCALE_TYPE": {"DEFAULT": "dim0"}, "QUANT_TYPE": {"DEFAULT": "power-2"}, "ROUND_TYPE": "real-sr", "THRESHOLD": 10}  # fmt: skip
    assert lowbit.qconfig({"QUANT": {"SQM": keys}})["exp_avg_sq"] == lowbit.scaled(
        "power2_4_unsigned", scale="row", rounding="stochastic", min_numel=11
    )
    (tmp_path / "base.yml").write_text("QUANT: {M: {BITS: 5, ROUND_TYPE: sr}}\n")
    (tmp_path / "child.yml").write_text("BASE: [base.yml]\nQUANT: {M: {BITS: 6}}\n")
    spec = lowbit.qconfig(str(tmp_path / "child.yml"))["exp_avg"]
    assert (spec["format"], spec["rounding"]) == ("dynamic6", "stochastic")


@needs4
def test_lpmms_threshold_is_strict():
    weights = [
        ("at", nn.Parameter(torch.ones(64, 64))),
        ("above", nn.Parameter(torch.ones(64, 65))),
    ]
    assert [kept[0] for kept in formats(lowbit.AdamW(weights)).values()] == ["dynamic8", "dynamic8"]
    opt = lowbit.AdamW(weights, state_format=lowbit.qconfig({}))
    assert [kept[0] for kept in formats(opt).values()] == ["float32", "dynamic4"]
    opt = lowbit.AdamW(weights, state_format=lowbit.qconfig({"M": {"THRESHOLD": 4095}}))
    assert formats(opt)["at"] == ["dynamic4", "float32"]
    opt = lowbit.AdamW(weights, state_format=lowbit.qconfig({}), min_numel=0)
    assert formats(opt)["at"] == ["dynamic4", "power1_4_unsigned"]


@pytest.mark.parametrize(
    "config, words",
    [
        ({"M": {"QUANT_TYPE": {"DEFAULT": "float-point"}}}, "M.QUANT_TYPE is 'float-point'"),
        ({"SQM": {"QUANT_TYPE": {"DEFAULT": "power-3"}}}, "SQM.QUANT_TYPE is 'power-3'"),
        ({"SQM": {"SCALE_TYPE": {"DEFAULT": "dim01"}}}, "SQM.SCALE_TYPE is 'dim01'"),
        ({"SQM": {"SCALE_TYPE": {"DEFAULT": "rank1", "DEFAULT_ONLY": False}}}, "SQM.SCALE_TYPE.DEFAULT_ONLY is False"),
        ({"M": {"ROUND_TYPE": "up"}}, "M.ROUND_TYPE is 'up'"), ({"M": {"BITS": 9}}, "M.BITS is 9"), ({"M": {"BITS": 1}}, "M.BITS is 1"),
        ({"M": {"GROUP_SIZE": 100}}, "M.GROUP_SIZE is 100"), ({"M": {"SIGNED": False}}, "M.SIGNED is False"),
        ({"M": {"ENABLE": "yes"}}, "M.ENABLE is 'yes'"), ({"M": {"THRESHOLD": -1}}, "M.THRESHOLD is -1"),
        ({"M": {"BITTS": 4}}, "M.BITTS is 4"), ({"P": {"ENABLE": True}}, "P.ENABLE is True"),
        ({"M": {"ROUND_TYPE": ["up"]}}, "M.ROUND_TYPE is"), ({"SQMM": {"BITS": 8}}, "'SQMM' is no section.* M, SQM"),
    ],
)  # fmt: skip
def test_lpmm_settings_that_cannot_be_expressed(config, words):
    with pytest.raises(ValueError, match=words):
        lowbit.qconfig({"QUANT": config})


def test_override_quantize_enable(monkeypatch):
    net = model()
    opt = lowbit.AdamW(net.named_parameters(), full_precision=["head.*"])
    wide, coded = ["float32"] * 2, ["dynamic8", "dynamic8_unsigned"]
    opt.override_quantize_enable(net["body"][0], "weight", False)
    opt.override_quantize_enable(net["head"], "weight", True)
    small = nn.Linear(32, 32, bias=False)
    # A pattern in a name.
    opt.add_param_group({"params": small.named_parameters(prefix="small[0]")})
    opt.override_quantize_enable(small, "weight", True)
    kept = formats(opt)
    assert kept["body.0.weight"] == wide and kept["head.weight"] == kept["small[0].weight"] == coded
    assert kept["body.1.weight"] == coded and kept["tokens.weight"] == coded  # others stay
    assert set(opt.state[net["body"][0].weight]) == {"step", "stream", "exp_avg", "exp_avg_sq"}
    opt.override_quantize_enable(small, "weight", False)  # as often as one likes
    assert formats(opt)["small[0].weight"] == wide
    train(net, opt)
    with pytest.raises(ValueError, match="before the first step"):
        opt.override_quantize_enable(net["body"][0], "weight", True)
    with pytest.raises(ValueError, match="no parameter of this optimizer"):
        opt.override_quantize_enable(nn.Linear(2, 2), "weight", True)
    one = nn.Linear(96, 64, bias=False)
    cut = lowbit.AdamW(one.named_parameters(), full_precision=True)

    def refused(p, what):
        raise ValueError(f"{what} is sharded on dimension 2")

    with monkeypatch.context() as patched, pytest.raises(ValueError, match="on dimension 2"):
        patched.setattr(layout.sharding, "part", refused)
        cut.override_quantize_enable(one, "weight", True)
    assert formats(cut)["weight"] == wide and set(cut.state[one.weight]) == set(opt.state[net["body"][0].weight])  # fmt: skip
    fresh = lowbit.AdamW(net.parameters())
    with pytest.raises(ValueError, match="two dimensions"):
        fresh.override_quantize_enable(net["body"][0], "bias", True)
    fresh.override_quantize_enable(net["body"][1], "weight", False)  # without names
    assert "exp_avg" in fresh.state[net["body"][1].weight]
    assert "exp_avg_dynamic8" in fresh.state[net["head"].weight]


# Settings that make no sense together


def of_other_dtypes():
    """Every parameter format for parameters of a dtype that it does not store."""
    for entry in lowbit.catalog()["param"]:
        for dtype in sorted({other["dtype"] for other in lowbit.catalog()["param"]}):
            if entry["dtype"] != dtype:
                yield entry["name"], dtype


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
    ("an unknown option", {"state_format": {"exp_avg": {"format": "dynamic8", "blok": 64}}}, "blok"),
    ("neither preset nor format", {"state_format": {"exp_avg": 8}}, "is no state format"),
    ("unsigned for signed", {"state_format": "dynamic8_unsigned"}, "negative values"),
    ("factored for signed", {"state_format": "factored"}, "negative values"),
    ("factored for signed by name", {"state_format": {"exp_avg": "factored"}}, "negative values"),
    ("factored in blocks", {"state_format": {"exp_avg_sq": {"format": "factored", "block": 64}}}, "leave the rest out"),
    ("factored under amsgrad", {"state_format": "factored8", "amsgrad": True}, "cannot keep exp_avg_sq and max_exp_avg_sq factored"),
    ("a state that is not kept", {"state_format": {"max_exp_avg_sq": "8bit"}}, "max_exp_avg_sq"),
    ("wide and factored", {"state_format": "factored8", "full_precision": True}, "leave one of the two out"),
    ("wide and factored in a group", {"group": {"state_format": "factored8", "full_precision": True}}, "parameter group has full_precision=True and factored"),
    ("wide and factored in an override", {"overrides": {"*": {"state_format": "factored8", "full_precision": True}}}, r"overrides\['\*'\] has full_precision=True and factored"),
    ("an override of nothing", {"overrides": lowbit.override("bod.*", full_precision=True)}, r"overrides\['bod.\*'\] matches the name of no parameter"),
    ("an unknown option of an override", {"overrides": {"body.*": {"lr": 1.0}}}, r"overrides\['body.\*'\] has \['lr'\]"),
    ("the same, built", lambda: lowbit.override("x", state="8bit"), "state_format, param_format"),
    ("patterns for wide in an override", {"overrides": {"body.*": {"full_precision": ["body.*"]}}}, "True or False"),
    ("overrides without patterns", {"overrides": ["body.*"]}, "must map name patterns"),
    ("an override without options", {"overrides": {"body.*": "8bit"}}, "must map a name pattern"),
    ("an unknown format in an override", {"overrides": {"body.*": {"state_format": "9bit"}}}, "named '9bit'"),
    ("a threshold that is no number", {"min_numel": 1.5}, "min_numel"),
    ("an unknown parameter format", {"param_format": "nope"}, "no parameter format"),
    ("a parameter format of another dtype in an override", {"overrides": {"head.*": {"param_format": "bfloat16"}}}, "'head.weight' is float32"),
]  # fmt: skip
SENSELESS += [
    (f"{name} of {dtype}", {"param_format": name, "dtype": dtype}, f"is {dtype}, which param_format='{name}' does not store")
    for name, dtype in of_other_dtypes()
]  # fmt: skip
SENSELESS += [
    (f"{entry['name']} with cross-tile scales", lambda name=entry["name"]: S(name, scale="tensor"), "only have scale='block'")
    for entry in lowbit.catalog()["state"]
    if entry["scaled"] and not entry["cross_tile"]
]  # fmt: skip


@pytest.mark.parametrize("options, words", [row[1:] for row in SENSELESS], ids=[row[0] for row in SENSELESS])  # fmt: skip
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
    # A group may be wide in an optimizer that factors others, and a rule with nothing to factor takes the preset.
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
