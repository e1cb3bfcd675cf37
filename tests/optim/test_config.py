"""What people write to choose how state is kept: presets, and overrides by name."""

import inspect
import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import lowbit
from lowbit import ops
from lowbit.config import presets
from lowbit.state import layout
from tests.support.configured import OPTIMIZERS, PRESETS, formats, model, train
from tests.support.groups import params_for

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
        {
            "params": net["body"].named_parameters(),
            "overrides": lowbit.override("1.weight", full_precision=True),
        },
        {"params": net["head"].named_parameters()},
    ]
    opt = lowbit.AdamW(groups)
    assert formats(opt)["1.weight"] == ["float32"] * 2 and formats(opt)["0.weight"][0] == "dynamic8"
    opt.add_param_group(
        {
            "params": net["tokens"].named_parameters(prefix="tokens"),
            "overrides": {"tokens.*": {"full_precision": True}},
        }
    )
    assert formats(opt)["tokens.weight"] == ["float32"] * 2
    with pytest.raises(ValueError, match="'nothing"):
        opt.add_param_group(
            {
                "params": [("x", nn.Parameter(torch.ones(70, 70)))],
                "overrides": {"nothing*": {"full_precision": True}},
            }
        )
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
            assert torch.equal(again.state[p][key], value) and torch.equal(
                third.state[p][key], value
            )
    assert again.param_groups[0]["overrides"] == overrides


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
    with pytest.raises(ValueError, match="not a parameter of this optimizer"):
        opt.override_quantize_enable(nn.Linear(2, 2), "weight", True)
    one = nn.Linear(96, 64, bias=False)
    cut = lowbit.AdamW(one.named_parameters(), full_precision=True)

    def refused(p, what):
        raise ValueError(f"{what} is sharded on dimension 2")

    with monkeypatch.context() as patched, pytest.raises(ValueError, match="on dimension 2"):
        patched.setattr(layout.sharding, "part", refused)
        cut.override_quantize_enable(one, "weight", True)
    assert formats(cut)["weight"] == wide and set(cut.state[one.weight]) == set(
        opt.state[net["body"][0].weight]
    )
    fresh = lowbit.AdamW(net.parameters())
    with pytest.raises(ValueError, match="two dimensions"):
        fresh.override_quantize_enable(net["body"][0], "bias", True)
    fresh.override_quantize_enable(net["body"][1], "weight", False)  # without names
    assert "exp_avg" in fresh.state[net["body"][1].weight]
    assert "exp_avg_dynamic8" in fresh.state[net["head"].weight]


def test_override_quantize_enable_keeps_the_bits_of_the_weight(monkeypatch):
    net = nn.Linear(96, 64, bias=False)
    wide = {"weight": net.weight.detach().clone()}
    opt = lowbit.AdamW(net.bfloat16().named_parameters(), param_format="bfloat16_split16")
    lowbit.set_fp32_model_state_dict(net, opt, wide)
    kept = lowbit.get_fp32_model_state_dict(net, opt)["weight"]
    assert not torch.equal(kept, net.weight.float())
    opt.override_quantize_enable(net, "weight", False)
    assert "exp_avg" in opt.state[net.weight]
    assert torch.equal(lowbit.get_fp32_model_state_dict(net, opt)["weight"], kept)
    before = dict(opt.state[net.weight])

    def fails(*_):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="out of memory"):
        patched.setattr(opt, "fresh_state", fails)
        opt.override_quantize_enable(net, "weight", True)
    after = opt.state[net.weight]
    assert after.keys() == before.keys() and all(after[key] is before[key] for key in before)
    assert "exp_avg" in opt.state_dict()["state"][0]


def test_override_quantize_enable_leaves_nothing_behind_where_it_fails(monkeypatch):
    with torch.device("meta"):
        net = nn.Linear(96, 64, bias=False)
    opt = lowbit.AdamW(net.named_parameters())

    def refused(*_):
        raise ValueError("refused")

    with monkeypatch.context() as patched, pytest.raises(ValueError, match="refused"):
        patched.setattr(opt, "layout_of", refused)
        patched.setattr(opt, "layouts", {})
        opt.override_quantize_enable(net, "weight", False)
    assert "overrides" not in opt.param_groups[0] and net.weight not in opt.state
