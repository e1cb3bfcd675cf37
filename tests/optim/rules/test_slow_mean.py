"""AdEMAMix's slow mean is kept: its format under every preset, what the tool writes,
and a warning for those that lose it.
"""

import subprocess
import warnings

import pytest
import torch
from torch import nn

import lowbit
from tests.support.peers.files import TOOL, need_tool

pytestmark = pytest.mark.slow

PRESETS = [preset["name"] for preset in lowbit.catalog()["presets"]]
# AdEMAMix has no factored variant.
SERVED = [name for name in PRESETS if not name.startswith("factored")]


def build(shape=(80, 64), expected=None, **options):
    """The one warning that is expected, or none, is given."""
    p = nn.Parameter(torch.zeros(shape))
    with pytest.warns(UserWarning, match=expected) if expected else warnings.catch_warnings():
        if not expected:
            warnings.simplefilter("error")
        return lowbit.AdEMAMix([("w", p)], lr=1e-3, **options), p


def slots(opt, p):
    return {s.name: (s.format, s.stochastic) for s in opt.layouts[p].slots}


@pytest.mark.parametrize("preset", SERVED)
def test_presets_keep_the_slow_mean(preset):
    """It takes no codes, whatever the others take;
    small parameters and those in full precision have it in float32.
    """
    opt, p = build(state_format=preset)
    made = slots(opt, p)
    wanted = ("float32", False) if preset == "float32" else ("bfloat16", True)
    assert made["exp_avg_slow"] == wanted
    plain = lowbit.AdamW([("w", nn.Parameter(torch.zeros(80, 64)))], state_format=preset)
    (lay,) = plain.layouts.values()
    assert [made["exp_avg"], made["exp_avg_sq"]] == [(s.format, s.stochastic) for s in lay.slots]
    for small, options in (((40, 40), {}), ((80, 64), {"full_precision": True})):
        opt, p = build(small, state_format=preset, **options)
        made = slots(opt, p)
        assert made["exp_avg_slow"][0] == (
            "bfloat16" if preset.startswith("bfloat16") else "float32"
        )


def test_formats_and_mappings():
    """A format for all states says nothing about the slow mean; a name in a mapping does."""
    signs = "exp_avg_sq is never negative"
    opt, p = build(expected=signs, state_format=lowbit.scaled("dynamic8", block=64, min_numel=0))
    assert slots(opt, p)["exp_avg_slow"] == ("bfloat16", True)
    opt, p = build(state_format=lowbit.scaled("dynamic8", min_numel=10_000))
    assert slots(opt, p)["exp_avg_slow"] == ("float32", False)
    opt, p = build(state_format={"exp_avg": "8bit", "exp_avg_sq": "8bit"})
    assert slots(opt, p)["exp_avg_slow"] == ("float32", False)
    opt, p = build(state_format={"exp_avg_slow": "bfloat16_stochastic"})
    assert slots(opt, p)["exp_avg_slow"] == ("bfloat16", True)


def test_the_catalog_says_which_and_how():
    slow = [
        (rule["name"], s["name"])
        for rule in lowbit.catalog()["rules"]
        for s in rule["slots"]
        if s["slow"]
    ]
    assert slow == [("ademamix", "exp_avg_slow")]
    assert lowbit.catalog()["slow_mean"] == "bfloat16_stochastic"


def test_its_bytes():
    weights = nn.Linear(256, 256, bias=False)
    made = lowbit.estimate(weights, "AdEMAMix")["lowbit"].state[0]
    # Two 8-bit states with a float32 for each block of 256, and 2 bytes; the step,
    # and stream and shape, int64.
    assert made == 256 * 256 * (2 + 2 * 4 / 256 + 2) + 4 + 8 + 16
    opt = lowbit.AdEMAMix([("w", weights.weight)])
    (state,) = opt.state.values()
    assert sum(t.numel() * t.element_size() for t in state.values()) == made
    assert state["exp_avg_slow_bfloat16"].dtype == torch.bfloat16


def relative_error(steps, mean, **options):
    """The error of the slow mean beside float32's after `steps` of the same gradients,
    noise around `mean` deviations.
    """
    names = {"kept": options, "float32": {"state_format": "float32"}}
    draw = torch.Generator().manual_seed(0)
    scale = torch.randn(16, 256, generator=draw).exp()
    away = mean * torch.randn(16, 256, generator=draw).sign()
    params = {name: nn.Parameter(torch.zeros(16, 256)) for name in names}
    grad = torch.zeros(16, 256)
    opts = []
    for name, p in params.items():
        p.grad = grad
        opts.append(lowbit.AdEMAMix([(name, p)], lr=0.0, **names[name]))
    for _ in range(steps):
        torch.randn(16, 256, generator=draw, out=grad).add_(away).mul_(scale)
        for opt in opts:
            opt.step()
    kept, whole = (
        lowbit.AdEMAMix([("w", nn.Parameter(torch.zeros(16, 256)))], state_format="float32")
        for _ in opts
    )
    read = []
    for fresh, opt in zip((kept, whole), opts, strict=True):
        fresh.load_state_dict(opt.state_dict())  # dequantizes
        (state,) = fresh.state.values()
        read.append(state["exp_avg_slow"] / scale)
    return float((read[0] - read[1]).norm() / read[1].norm())


@pytest.mark.parametrize("mean", [0.1, 0.5])
def test_the_default_is_within_a_tenth_of_float32(mean):
    """After 6,000 steps of beta3 0.9999,
    as issue trackers have it: 8-bit codes were off by 0.4 to 0.6.
    """
    assert relative_error(6000, mean) < 0.1


@pytest.mark.filterwarnings("ignore:exp_avg_slow in dynamic8")
def test_codes_lose_it():
    """So that the test above and the warning are about something."""
    assert relative_error(2000, 0.5, state_format={"exp_avg_slow": "8bit"}) > 0.2


@pytest.mark.parametrize(
    "said",
    ["8bit", "4bit", "fp8", "log8", "bfloat16", lowbit.scaled("dynamic8", rounding="stochastic")],
)
def test_a_format_that_loses_it_is_warned_of_once(said):
    params = [(name, nn.Parameter(torch.zeros(80, 64))) for name in "ab"]
    message = (
        r"exp_avg_slow in \w+ loses a mean with a decay of 0.9999.*Leave it out of state_format"
    )
    with pytest.warns(UserWarning, match=message) as caught:
        opt = lowbit.AdEMAMix(params, state_format={"exp_avg_slow": said})
    assert len(caught) == 1 and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.add_param_group({"params": [("c", nn.Parameter(torch.zeros(80, 64)))]})
        opt.load_state_dict(opt.state_dict())


def test_no_warning_where_nothing_is_lost():
    """A short mean, a small parameter, a frozen one, and other optimizers' states."""
    build(betas=(0.9, 0.999, 0.99), state_format={"exp_avg_slow": "8bit"})
    build((40, 40), state_format={"exp_avg_slow": "8bit"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        frozen = nn.Parameter(torch.zeros(80, 64), requires_grad=False)
        lowbit.AdEMAMix([("w", frozen)], state_format={"exp_avg_slow": "8bit"})
        lowbit.AdamW([("w", nn.Parameter(torch.zeros(80, 64)))], betas=(0.9999, 0.9999))


def test_older_states_with_codes_are_read():
    """What was saved when the default was 8 bits continues, and its codes become bfloat16."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        p = nn.Parameter(torch.zeros(80, 64))
        old = lowbit.AdEMAMix(
            [("w", p)],
            state_format={"exp_avg": "8bit", "exp_avg_slow": "8bit", "exp_avg_sq": "8bit"},
        )
    p.grad = torch.randn(80, 64)
    old.step()
    assert "exp_avg_slow_dynamic8" in old.state[p]
    new, q = build()
    new.load_state_dict(old.state_dict())
    state = new.state[q]
    assert "exp_avg_slow_dynamic8" not in state and float(state["step"]) == 1
    had = lowbit.ops.dequantize(
        old.state[p]["exp_avg_slow_dynamic8"],
        old.state[p]["exp_avg_slow_dynamic8_scale"],
        "dynamic8",
        256,
        64,
    )
    torch.testing.assert_close(state["exp_avg_slow_bfloat16"].float(), had, rtol=2**-8, atol=0)


@pytest.mark.parametrize("preset", ["8bit", "4bit", "bfloat16", "float32"])
def test_the_tool_writes_what_python_keeps(tmp_path, preset):
    need_tool()
    params = [("w", nn.Parameter(torch.zeros(80, 64))), ("b", nn.Parameter(torch.zeros(40, 40)))]
    opt = lowbit.AdEMAMix(params, state_format="float32")
    for _, p in params:
        p.grad = torch.randn(p.shape)
    opt.step()
    model = {name: p.detach() for name, p in params}
    torch.save({"model": model, "optimizer": opt.state_dict()}, tmp_path / "a.pt")
    command = [
        TOOL,
        "convert",
        tmp_path / "a.pt",
        tmp_path / "b.pt",
        "--to",
        "lowbit",
        "--state-format",
        preset,
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    got = torch.load(tmp_path / "b.pt", weights_only=True)["optimizer"]["state"].values()
    live = lowbit.AdEMAMix(
        [(name, nn.Parameter(p.detach())) for name, p in params], state_format=preset
    )
    assert [sorted(one) for one in got] == [
        sorted(live.state[p]) for p in live.param_groups[0]["params"]
    ]
