"""Parameter formats: what is stored,
and that random bits belong to the element and not to whoever computes it.
"""

import numpy as np
import pytest
import torch

from lowbit import ops
from tests.support.philox import random16
from tests.support.plans import extra_for, plan_row

pytestmark = pytest.mark.slow

CATALOG = ops.catalog()
PARAMS = CATALOG["param"]
NAMES = [p["name"] for p in PARAMS]
RANDOM = [p["name"] for p in PARAMS if p["random"]]


def store_pair(value, param_format, *, first=0, seed=0, step=1, stream=0, global_cols=None):
    """Stores float32 `value` [rows, cols] in a parameter, through a step that adds exactly `value`
    to zero: it, and what is kept beside it.

    AdamW with beta = 0 and a huge eps: m = g, the denominator is eps to the bit,
    and p = 0 - lr / eps * m / 1 = value.
    """
    rows, cols = value.shape
    p = torch.zeros((rows, cols), dtype=getattr(torch, ops.param_format(param_format)["dtype"]))
    extra = extra_for((rows, cols), param_format)
    state = [*extra, torch.zeros(rows, cols), torch.zeros(rows, cols)]
    plan = plan_row(
        rows,
        cols,
        ["float32"] * 2,
        param_format,
        first=first,
        stream=stream,
        global_cols=global_cols,
    )
    steps = [torch.tensor(float(step - 1))]
    big = 2.0**60  # sqrt(v) = |g| vanishes beside it
    ops.step("adamw", [p], [-value], state, steps, plan, [big, 0.0, 0.0, big, 0.0], seed=seed)
    return p, extra[0] if extra else None


def store(value, param_format, **where):
    """The parameter of `store_pair`."""
    return store_pair(value, param_format, **where)[0]


@pytest.fixture(params=CATALOG["isas"])
def isa(request):
    before = ops.catalog()["isa"]
    ops.set_isa(request.param)
    yield request.param
    ops.set_isa(before)


def samples(n=4096, seed=1):
    rng = np.random.default_rng(seed)
    return torch.from_numpy(
        (rng.standard_normal((8, n // 8)) * np.exp2(rng.integers(-20, 20, (8, n // 8)))).astype(
            np.float32
        )
    )


@pytest.fixture(scope="module", autouse=True)
def report():
    yield
    print("\n\nparameter formats tested:", ", ".join(NAMES))


def half_range(x):
    """Without what float16 does not reach."""
    return x.clamp(-60000, 60000)


def nearest(x, name):
    """x as torch casts it to the format's 16-bit type."""
    return x.to(getattr(torch, ops.param_format(name)["dtype"]))


def half_step(p):
    """Half of a step of a 16-bit parameter at its value, float64; zero and subnormals share the
    step of the smallest normal values.
    """
    bias, mantissa = (127, 7) if p.dtype == torch.bfloat16 else (15, 10)
    field = (p.view(torch.int16).int() & 0x7FFF) >> mantissa
    return torch.exp2((field.clamp(min=1) - bias - mantissa - 1).double())


def kept_apart(name, p, extra):
    """The weight that p and what is kept beside it stand for, float64,
    written independently of the library.
    """
    if extra is None:
        return p.double()
    if name.endswith("kahan"):
        return p.double() - extra.double()
    most = 127 if extra.dtype == torch.int8 else 32767
    c = (
        extra.double()
        if extra.dtype == torch.int8
        else extra.view(torch.int16).squeeze(-1).double()
    )
    return p.double() + c / most * half_step(p)


def test_what_is_stored_is_what_the_format_says(isa):
    """The parameter is the nearest of its type, unless it is rounded by chance; with what is kept
    beside it, the weight is met far closer.
    """
    x = samples()
    bits = x.view(torch.int32)
    bits[0] = (bits[0] & ~0xFFFF) | 0x8000  # exactly between two values of bfloat16
    bits[1] = (bits[1] & ~0x1FFF) | 0x1000  # and of float16
    for name in NAMES:
        value = half_range(x) if name.startswith("float16") else x
        p, extra = store_pair(value, name)
        if name == "float32":
            assert torch.equal(p, value)
            continue
        step = 2 * half_step(nearest(value, name))
        if extra is not None or name not in RANDOM:
            assert torch.equal(p, nearest(value, name)), name
        else:
            assert ((p.double() - value.double()).abs() < step).all(), name
        joined = ops.join(p, extra, name)
        mine = kept_apart(name, p, extra)
        assert ((joined.double() - mine).abs() <= mine.abs() * 2.0**-23 + 2.0**-149).all(), name
        if extra is None:
            continue
        width = extra.element_size() * extra.numel() // p.numel()
        share = {"kahan": 2.0**-8}.get(name.split("_")[1], 0.5 / 127 if width == 1 else 0.5 / 32767)
        most = step * share * (2 if name in RANDOM else 1) / (1 if name.endswith("kahan") else 2)
        if name == "float16_kahan":
            most = most.clamp(min=2.0**-25)  # what is kept beside is a float16 too
        error = (joined.double() - value.double()).abs()
        assert (error <= most + value.double().abs() * 2.0**-23).all(), (
            f"{name}: off by {(error / step).max()} of a step"
        )
        again = ops.join(*ops.split(joined, name), name)  # in the middle p may be the other one
        error = (again.double() - joined.double()).abs()
        assert (error <= most + value.double().abs() * 2.0**-23).all(), f"{name}: a second time"


def test_a_step_and_split_store_the_same(isa):
    for name in NAMES:
        value = half_range(samples()) if name.startswith("float16") else samples()
        p, extra = torch.zeros_like(nearest(value, name)), extra_for(value.shape, name)
        plan = plan_row(1, value.numel(), [], name, stream=4)
        hyper = [1.0] + [0.0] * 6
        steps = [torch.tensor(-1.0)]  # split counts as step 0
        ops.step("sgd", [p], [-value], extra, steps, plan, hyper, seed=9)
        other, beside = ops.split(value, name, seed=9, stream=4)
        assert torch.equal(p, other), name
        assert not extra or torch.equal(extra[0], beside), name


def test_every_isa_stores_the_same():
    """Random bits of float32, NaN and subnormals with them, in every format."""
    before = ops.catalog()["isa"]
    rng = np.random.default_rng(5)
    x = torch.from_numpy(rng.integers(0, 2**32, (7, 301), dtype=np.uint32).view(np.float32))
    for name in NAMES:
        seen = []
        for which in CATALOG["isas"]:
            ops.set_isa(which)
            p, extra = ops.split(x, name, seed=1, stream=2)
            seen.append((p, extra, ops.join(p, extra, name)))
        for other in seen[1:]:
            for a, b in zip(seen[0], other, strict=True):
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name
    ops.set_isa(before)


def test_stochastic_rounding_takes_the_bits_of_the_element(isa):
    """Bit for bit the rule (bits + r) >> 16, with r from a Philox written independently, for odd
    offsets, wide indices and seeds.
    """
    x = samples(4000)
    rows, cols = x.shape
    for first, seed, step, stream in [
        (0, 0, 1, 0),
        (3, 5, 2, 9),
        (2**35 + 13, 2**40 + 7, 100, 2**32 - 1),
    ]:
        got = store(x, "bfloat16_stochastic", first=first, seed=seed, step=step, stream=stream)
        index = np.uint64(first) + np.arange(rows * cols, dtype=np.uint64).reshape(rows, cols)
        bits = x.numpy().view(np.uint32).astype(np.uint64)
        rounded = (bits & np.uint64(0x7FFFFFFF)) + random16(index, seed, step, stream)
        want = rounded >> np.uint64(16) | bits >> np.uint64(16) & np.uint64(0x8000)
        np.testing.assert_array_equal(got.view(torch.int16).numpy().astype(np.uint16), want)


def test_parts_do_not_depend_on_the_shard(isa):
    """Rows, and columns, of the whole stored by themselves give the same bits: sharding in either
    direction.
    """
    x = half_range(samples(4096))
    _rows, cols = x.shape
    for name in NAMES:
        whole = store_pair(x, name, seed=3, stream=11)
        for cut in (1, 3, 8):
            rows = slice(cut - 1, cut)
            part = store_pair(x[rows].contiguous(), name, first=(cut - 1) * cols, seed=3, stream=11)
            for a, b in zip(part, whole, strict=True):
                assert a is b is None or torch.equal(a, b[rows]), name
        for cut in (1, 77, 256, 301):
            part = store_pair(
                x[:, cut:].contiguous(), name, first=cut, seed=3, stream=11, global_cols=cols
            )
            for a, b in zip(part, whole, strict=True):
                assert a is b is None or torch.equal(a, b[:, cut:]), name


@pytest.mark.parametrize("name", RANDOM)
def test_stochastic_rounding_is_unbiased(name, isa):
    """A value 1/16 .. 15/16 of the way between two that can be stored goes up that often: 8
    standard deviations of 2^14 draws.
    """
    n = 2**14
    for base in (1.0, 2.0**-20):  # 2^-20: subnormal in float16
        dtype = getattr(torch, ops.param_format(name)["dtype"])
        low = torch.tensor(base, dtype=dtype)
        gap = float(2 * half_step(low))
        if ops.param_format(name)["compensation"]:
            gap /= 2 * 127  # a step of the correction
        for sixteenths in range(1, 16):
            value = torch.full((4, n // 4), base + gap * sixteenths / 16)
            p, extra = store_pair(value, name, stream=sixteenths)
            got = kept_apart(name, p, extra)
            share = float((value[0, 0].double() - base) / gap)
            up = (got > base + gap / 2).double().mean().item()
            assert got.unique().numel() == 2 and abs(got.unique() - base).min() < 1e-12, name
            assert abs(up - share) < 8 * (share * (1 - share) / n) ** 0.5, f"{name}: {share}"


@pytest.mark.parametrize("name", RANDOM)
def test_different_steps_streams_and_seeds_draw_different_bits(name):
    low = torch.ones((), dtype=getattr(torch, ops.param_format(name)["dtype"]))
    gap = float(2 * half_step(low))
    if ops.param_format(name)["compensation"]:
        gap /= 2 * 127
    x = torch.full((1, 4096), 1 + gap / 2)  # half way
    draws = []
    for k in (
        {},
        {"step": 2},
        {"stream": 1},
        {"seed": 1},
        {"seed": 2**32},
        {"first": 8},
        {"first": 2**35},
    ):
        draws.append(kept_apart(name, *store_pair(x, name, **k)))
    for i, a in enumerate(draws):
        for b in draws[:i]:
            assert 0.4 < (a == b).float().mean() < 0.6  # independent bits agree half the time


def test_values_at_the_edge(isa):
    """Exact values stay, infinity stays, every NaN becomes one,
    and rounding by chance never makes a finite value infinite.
    """
    for name in NAMES:
        dtype = getattr(torch, ops.param_format(name)["dtype"])
        exact = torch.randn(4, 333).to(dtype).float()
        assert torch.equal(store(exact, name).float(), exact), name
        tiny = [[2.0**-24, -(2.0**-23)]] if dtype == torch.float16 else [[2.0**-130, -(2.0**-133)]]
        subnormal = torch.tensor(tiny).to(dtype)
        assert torch.equal(decayed(subnormal, name, 1.0), subnormal), name
        # p + (-lr/eps * m): infinities and NaN come through m,
        # whose denominator |m| + eps makes them NaN
        bad = [float("nan"), float("inf"), -float("inf")]
        canonical = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}[
            dtype
        ]
        integer = torch.int32 if dtype == torch.float32 else torch.int16
        nan, extra = store_pair(torch.tensor([bad]), name)
        assert (nan.view(integer) == canonical).all(), name
        kept, beside = ops.split(torch.tensor([bad]), name)
        want = torch.tensor([bad]).to(dtype)
        assert torch.equal(kept[0, 1:], want[0, 1:]) and kept[0, 0].isnan(), name
        for e in (extra, beside):
            assert e is None or not e.view(torch.uint8).any(), f"{name}: nothing beside it"
        largest = torch.finfo(dtype).max
        if name in RANDOM:
            almost = 1 + 0.4 * torch.finfo(dtype).eps / 2
            x = torch.full((64, 64), largest, dtype=dtype)
            got = decayed(x, name, almost if dtype == torch.float16 else 1 + 2.0**-10)
            assert got.float().isfinite().all() and (got == largest).all(), name


def decayed(p, param_format, factor):
    """p times factor, stored: what `store` cannot reach.
    AdamW with a zero gradient and a weight decay of 1 - factor.
    """
    p = p.clone()
    rows, cols = p.shape
    state = [
        *extra_for((rows, cols), param_format),
        torch.zeros(rows, cols),
        torch.zeros(rows, cols),
    ]
    plan = plan_row(rows, cols, ["float32"] * 2, param_format)
    hyper = [1.0, 0.9, 0.9, 1.0, 1 - factor]
    ops.step("adamw", [p], [torch.zeros(rows, cols)], state, [torch.zeros(())], plan, hyper)
    return p
