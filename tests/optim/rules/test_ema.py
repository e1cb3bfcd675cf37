"""The average of weights: it moves where torch's bfloat16 average stands still, with the bits of a
reference in numpy, and gives the weights back.
"""

import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lowbit
from lowbit import ops, sharding
from tests.support.philox import random16

ISAS = ops.catalog()["isas"]


def model_of(dtype=torch.bfloat16, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(48, 40), nn.Linear(40, 8)).to(dtype)


def moved(p, by):
    with torch.no_grad():
        p.copy_(p.float() * (1 + by))


def bits(t):
    return t.detach().contiguous().reshape(-1).view(torch.uint8)


# What it is for


def test_torchs_bfloat16_average_stands_still_and_this_one_does_not():
    """The weights jump by a tenth and stay there;
    after 3,000 updates of decay 0.999 an average has made 95 % of the way.
    """
    model = model_of()
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    ours = lowbit.EMA(model, 0.999)
    theirs.update_parameters(model)
    ours.update_parameters()
    before = {name: p.detach().float() for name, p in model.named_parameters()}
    for p in model.parameters():
        moved(p, 0.1)
    for _ in range(3000):
        theirs.update_parameters(model)
        ours.update_parameters()
    way = {name: p.detach().float() - before[name] for name, p in model.named_parameters()}
    for made, least, most in (
        ({name: p.float() for name, p in theirs.module.named_parameters()}, 0.0, 0.0),
        ({name: t.float() for name, t in ours.averages.items()}, 0.93, 0.97),
    ):
        far = sum(float(((made[n] - before[n]) * way[n]).sum()) for n in way)
        share = far / sum(float(w.square().sum()) for w in way.values())
        assert least <= share <= most, share


def test_its_expected_value_is_the_float32_average():
    """Errors of single elements average out: their mean over a matrix stays a hundredth of their
    size.
    """
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(256, 256) * 0.02)
    ema = lowbit.EMA([("w", p)], 0.99)
    exact = p.detach().double()
    ema.update_parameters()
    exact.copy_(ema.averages["w"])
    for _ in range(300):
        p.data += torch.randn(256, 256) * 1e-3
        ema.update_parameters()
        exact.lerp_(p.detach().double(), 0.01)
    error = ema.averages["w"].double() - exact
    assert error.norm() < 0.06 * (p.detach().double() - exact).norm()
    assert error.mean().abs() < 0.02 * error.square().mean().sqrt()


def test_weights_that_rest_stay():
    """An average that has arrived moves by a step at most, and back."""
    p = nn.Parameter(torch.randn(64, 64).bfloat16())
    ema = lowbit.EMA([("w", p)], 0.9999)
    for _ in range(2000):
        ema.update_parameters()
    away = (ema.averages["w"].float() - p.detach().float()).abs()
    assert (away <= p.detach().float().abs() * 2.0**-7).all()
    assert (away > 0).float().mean() < 0.1


# The bits


def twin(average, weight, decay, seed, step, stream):
    """One update of float32 values in numpy; bfloat16 as float32."""
    keep = np.float32(decay)
    share = np.float32(1.0 - float(keep))
    with np.errstate(invalid="ignore"):
        x = average * keep + weight * share
    b = x.astype(np.float32).view(np.uint32)
    nan = np.isnan(x)
    size, sign = b & 0x7FFFFFFF, b & 0x80000000
    random = (
        random16(np.arange(x.size, dtype=np.uint64), seed, step, stream)
        .astype(np.uint32)
        .reshape(x.shape)
    )
    carries = size < 0x7F7F0000
    up = np.where(carries, size + random, size) & 0xFFFF0000
    return np.where(nan, np.uint32(0x7FC00000), up | sign).astype(np.uint32).view(np.float32)


shapes = st.lists(st.integers(1, 40), max_size=4).filter(lambda s: np.prod(s) < 3000)


@given(
    shapes,
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from(ISAS),
    st.sampled_from([0.0, 0.25, 0.5, 0.9, 0.999, 0.99999]),
    st.integers(0, 2**40),
    st.integers(0, 2**31),
)
def test_every_update_has_the_bits_of_the_reference(shape, dtype, isa, decay, seed, sample):
    before = ops.catalog()["isa"]
    ops.set_isa(isa)
    try:
        generator = torch.Generator().manual_seed(sample)
        p = nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        ema = lowbit.EMA([("a.b", p)], decay, seed=seed)
        average = np.zeros(shape, np.float32)
        for step in range(1, 4):
            keep = 0.0 if step == 1 else decay
            weight = p.detach().float().numpy()
            average = twin(average, weight, keep, seed, step, zlib.crc32(b"ema.a.b"))
            ema.update_parameters()
            found = ema.averages["a.b"]
            assert found.dtype == torch.bfloat16 and found.shape == p.shape
            assert np.array_equal(found.float().numpy().view(np.uint32), average.view(np.uint32))
            p.data = torch.randn(shape, generator=generator).to(dtype)
    finally:
        ops.set_isa(before)


def test_what_is_not_finite_stays_so_and_what_is_large_stays_finite():
    large = torch.finfo(torch.bfloat16).max
    p = nn.Parameter(torch.tensor([torch.inf, -torch.inf, torch.nan, large, -large, -0.0]))
    ema = lowbit.EMA([("w", p)], 0.9)
    for _ in range(3):
        ema.update_parameters()
        assert torch.equal(ema.averages["w"].isfinite(), p.isfinite())


def averaged_by_both(model, theirs, ours, updates, by):
    """Updates torch's average and ours, and moves the weights after each."""
    for _ in range(updates):
        theirs.update_parameters(model)
        ours.update_parameters()
        for p in model.parameters():
            moved(p, by)


def test_a_float32_average_is_torchs():
    model = model_of(torch.float32)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    ours = lowbit.EMA(model, 0.99, state_format="float32")
    averaged_by_both(model, theirs, ours, updates=50, by=0.01)
    for name, p in theirs.module.named_parameters():
        torch.testing.assert_close(ours.averages[name], p.detach(), rtol=1e-5, atol=1e-7)


def test_random_bits_are_no_optimizers():
    """The weight's rounding at step n and the average's at update n must not go together: the
    average would be off by a step.
    """
    names = {"a.weight", "a.bias"}
    model = nn.ModuleDict({"a": nn.Linear(8, 8)})
    streams = {member.stream for member in lowbit.EMA(model)._members}
    assert len(streams) == 2 and not streams & {zlib.crc32(name.encode()) for name in names}


def test_one_operator_call_whatever_the_dtypes(monkeypatch):
    calls = []
    step = ops.step
    monkeypatch.setattr(ops, "step", lambda *a, **k: calls.append(len(a[1])) or step(*a, **k))
    params = [
        nn.Parameter(torch.ones(3, dtype=d)) for d in (torch.float32, torch.bfloat16, torch.float16)
    ]
    ema = lowbit.EMA(params)
    ema.update_parameters()
    assert calls == [3] and list(ema.averages) == ["0", "1", "2"]


def test_strided_weights_are_averaged_in_their_own_order():
    conv = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    ema = lowbit.EMA(conv, state_format="float32")
    ema.update_parameters()
    assert torch.equal(ema.averages["weight"], conv.weight)
    before = conv.weight.detach().clone()
    with ema.average_parameters():
        moved(ema.averages["weight"], 0)
    assert torch.equal(conv.weight, before)


# How much an update keeps


def test_the_first_update_copies_and_warmup_grows_to_the_decay():
    p = nn.Parameter(torch.zeros(4))
    ema = lowbit.EMA([("w", p)], 0.5, warmup=True, state_format="float32")
    assert ema.next_decay() == 0.0
    p.data.fill_(3.0)
    ema.update_parameters()
    assert ema.averages["w"].tolist() == [3.0] * 4
    found = []
    for _ in range(9):
        found.append(ema.next_decay())
        ema.update_parameters()
    assert found == [min(0.5, (1 + n) / (10 + n)) for n in range(1, 10)] and found[-1] == 0.5
    assert ema.n_averaged == 10


def test_decay_may_be_set_between_updates():
    p = nn.Parameter(torch.ones(4))
    ema = lowbit.EMA([("w", p)], 0.5, state_format="float32")
    ema.update_parameters()
    p.data.zero_()
    ema.decay = 0.75
    ema.update_parameters()
    assert ema.averages["w"].tolist() == [0.75] * 4
    ema.decay = 1.0
    with pytest.raises(ValueError, match=r"Invalid decay value: 1\.0"):
        ema.update_parameters()


# Weights and averages change places


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_weights_come_back_to_the_same_bits(dtype):
    model = model_of(dtype)
    with torch.no_grad():
        model[0].weight[0, :3] = torch.tensor([torch.nan, -0.0, torch.inf])
    ema = lowbit.EMA(model, 0.5)
    for _ in range(3):
        ema.update_parameters()
        for p in model.parameters():
            moved(p, 0.3)
    weights = [bits(p).clone() for p in model.parameters()]
    averages = {name: t.clone() for name, t in ema.averages.items()}
    for error in (None, KeyError):
        try:
            with ema.average_parameters():
                for name, p in model.named_parameters():
                    assert torch.equal(bits(p), bits(averages[name].to(dtype)))
                if error:
                    raise error
        except KeyError:
            assert error
        assert all(map(torch.equal, map(bits, model.parameters()), weights))
        assert all(torch.equal(bits(ema.averages[n]), bits(t)) for n, t in averages.items())
    ema.update_parameters()
    ema.copy_to()
    assert torch.equal(model[1].bias, ema.averages["1.bias"].to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tied", ["by .data", "one tensor"])
def test_tied_weights_come_back_to_the_same_bits(dtype, tied):
    p = nn.Parameter(torch.randn(32, generator=torch.Generator().manual_seed(0)).to(dtype))
    q = p if tied == "one tensor" else nn.Parameter(torch.empty(32, dtype=dtype))
    q.data = p.data
    ema = lowbit.EMA([("a", p), ("b", q)], 0.5)
    for _ in range(2):
        ema.update_parameters()
        moved(p, 0.3)
    weight, averages = bits(p).clone(), {name: t.clone() for name, t in ema.averages.items()}
    with ema.average_parameters():
        assert not torch.equal(bits(p), weight)
    assert torch.equal(bits(p), weight) and torch.equal(bits(q), weight)
    assert all(torch.equal(ema.averages[name], t) for name, t in averages.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("when", ["put in", "taken out"])
def test_an_interrupt_leaves_no_weight_averaged(monkeypatch, dtype, when):
    model = model_of(dtype)
    ema = lowbit.EMA(model, 0.5)
    ema.update_parameters()
    for p in model.parameters():
        moved(p, 0.3)
    weights = [bits(p).clone() for p in model.parameters()]
    averages = {name: t.clone() for name, t in ema.averages.items()}
    local, raised = sharding.local, []

    def interrupted(t):
        if t is ema.averages["0.bias"] and not raised:
            raised.append(True)
            raise KeyboardInterrupt
        return local(t)

    if when == "put in":
        monkeypatch.setattr(sharding, "local", interrupted)
    with pytest.raises(KeyboardInterrupt), ema.average_parameters():
        monkeypatch.setattr(sharding, "local", interrupted)
    assert all(map(torch.equal, map(bits, model.parameters()), weights))
    assert all(torch.equal(ema.averages[name], t) for name, t in averages.items())
    with ema.average_parameters():
        assert torch.equal(model[0].bias, averages["0.bias"].to(dtype))


def test_a_backward_pass_through_weights_of_before_is_refused():
    model = model_of(torch.float32)
    ema = lowbit.EMA(model)
    loss = model(torch.ones(2, 48)).square().sum()
    with ema.average_parameters(), pytest.raises(RuntimeError, match="modified by an inplace"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_would_mix_weights_and_averages_is_refused(dtype):
    model = model_of(dtype)
    ema = lowbit.EMA(model)
    saved = ema.state_dict()
    with ema.average_parameters():
        for call in (
            ema.update_parameters,
            ema.state_dict,
            ema.copy_to,
            lambda: ema.load_state_dict(saved),
        ):
            with pytest.raises(RuntimeError, match="called within average_parameters"):
                call()
        with (
            pytest.raises(RuntimeError, match="average_parameters was called within"),
            ema.average_parameters(),
        ):
            pass
    weights = [p.detach().clone() for p in model.parameters()]
    with (
        pytest.raises(
            RuntimeError, match=r"'1\.bias' was written .* an average of their dtype now has what"
        ),
        ema.average_parameters(),
    ):
        moved(model[1].bias, 1.0)
    assert all(map(torch.equal, model.parameters(), weights))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match=r"'0\.weight' was written"), ema.average_parameters():
        lowbit.AdamW(lowbit.param_groups(model), lr=0.1).step()
    assert all(map(torch.equal, model.parameters(), weights))


# Checkpoints


@pytest.mark.parametrize("state_format", ["bfloat16_stochastic", "float32"])
def test_a_resumed_average_goes_on_with_the_same_bits(tmp_path, state_format):
    def train(ema, model, steps):
        for step in steps:
            for p in model.parameters():
                moved(p, 0.01 * (1 + step % 3))
            ema.update_parameters()

    model = model_of()
    ema = lowbit.EMA(model, 0.9, state_format=state_format)
    train(ema, model, range(5))
    torch.save({"model": model.state_dict(), "ema": ema.state_dict()}, tmp_path / "run.pt")
    train(ema, model, range(5, 10))
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    other = model_of(seed=1)
    resumed = lowbit.EMA(other, 0.9, state_format=state_format)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["ema"])
    assert resumed.n_averaged == 5
    train(resumed, other, range(5, 10))
    assert all(torch.equal(t, resumed.averages[name]) for name, t in ema.averages.items())


def test_a_load_in_place_counts_too():
    """As torch.distributed.checkpoint loads into a state dict: without the count the next update
    would copy the weights.
    """
    model = model_of()
    ema, other = lowbit.EMA(model, 0.9), lowbit.EMA(model, 0.9)
    for _ in range(3):
        ema.update_parameters()
        for p in model.parameters():
            moved(p, 0.1)
    saved, live = ema.state_dict(), other.state_dict()
    for name, t in saved["average_bfloat16"].items():
        live["average_bfloat16"][name].copy_(t)
    live["n_averaged"].copy_(saved["n_averaged"])
    ema.update_parameters()
    other.update_parameters()
    assert other.n_averaged == 4
    assert all(torch.equal(t, other.averages[name]) for name, t in ema.averages.items())


def test_formats_and_torchs_own_load():
    model = model_of()
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    wide = lowbit.EMA(model, 0.9, state_format="float32")
    averaged_by_both(model, theirs, wide, updates=3, by=0.1)
    narrow = lowbit.EMA(model, 0.9)
    narrow.load_state_dict(wide.state_dict())
    assert all(torch.equal(narrow.averages[n], t.bfloat16()) for n, t in wide.averages.items())
    narrow.load_state_dict(theirs.state_dict())
    assert narrow.n_averaged == 3
    for name, p in theirs.module.named_parameters():
        assert torch.equal(narrow.averages[name], p)


def test_what_does_not_fit_is_refused_before_anything_is_written():
    ema = lowbit.EMA(model_of())
    before = {name: t.clone() for name, t in ema.averages.items()}
    saved = lowbit.EMA(model_of(seed=1)).state_dict()
    averages = saved["average_bfloat16"]
    lacking = {n: t for n, t in averages.items() if n != "1.bias"}
    for wrong, message in (
        (lacking, r"lacks '1\.bias'"),
        (averages | {"2.bias": averages["1.bias"]}, r"has '2\.bias', which is not averaged here"),
        (averages | {"1.bias": torch.zeros(3)}, r"the average of '1\.bias' has the shape \(3,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            ema.load_state_dict({**saved, "average_bfloat16": wrong})
    whole = {name: torch.ones_like(t) for name, t in averages.items()}
    for more, message in (
        ({"n_averaged": -3}, "n_averaged is -3; it counts updates"),
        ({"n_averaged": 1.5}, "n_averaged is 1.5; it counts updates"),
        ({"n_averaged": "x"}, "n_averaged is 'x'; it counts updates"),
        ({"n_averaged": torch.ones(2)}, r"n_averaged is tensor\(.*; it counts updates"),
        (
            {"average_bfloat16": whole | {"1.bias": torch.ones(8, dtype=torch.uint8)}},
            r"the average of '1\.bias' is uint8",
        ),
        ({"average_bfloat16": whole | {"1.bias": [1.0] * 8}}, r"the average of '1\.bias' is list"),
    ):
        with pytest.raises(ValueError, match=message):
            ema.load_state_dict({**saved, "average_bfloat16": whole, **more})
    with pytest.raises(ValueError, match="not a state dict of EMA or AveragedModel, but has state"):
        ema.load_state_dict({"state": {}})
    assert ema.n_averaged == 0
    assert all(torch.equal(ema.averages[name], t) for name, t in before.items())


@pytest.mark.usefixtures("ckpt")
def test_the_tool_names_it(tmp_path):
    torch.save({"ema": lowbit.EMA(model_of()).state_dict()}, tmp_path / "ema.pt")
    found = lowbit.checkpoint.inspect(tmp_path / "ema.pt")
    kinds = {each["name"]: each["kind"] for each in found["tensors"]}
    assert kinds["ema.average_bfloat16.0.weight"] == "averages of weights, bfloat16"
    assert kinds["ema.n_averaged"] == "step counters"
