"""Parameter formats: what is stored, and that random bits belong to the element and not to whoever computes it."""

import numpy as np
import pytest
import torch
from plans import plan_row

from lowbit import ops

CATALOG = ops.catalog()
PARAMS = CATALOG["param"]
M32 = 0xFFFFFFFF


def philox(counter, key):
    """Philox4x32 with 7 rounds, by the paper, in Python integers (Salmon et al., SC11)."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(7):
        a, b = 0xD2511F53 * x0, 0xCD9E8D57 * x2
        x0, x1, x2, x3 = (b >> 32) ^ x1 ^ k0, b & M32, (a >> 32) ^ x3 ^ k1, a & M32
        k0, k1 = (k0 + 0x9E3779B9) & M32, (k1 + 0xBB67AE85) & M32
    return x0, x1, x2, x3


def random16(index, seed, step, stream):
    """The 16 bits of global element `index`."""
    group = index >> 3
    words = philox((group & M32, group >> 32, stream, seed >> 32), (seed & M32, step))
    return words[(index & 7) >> 1] >> (16 * (index & 1)) & 0xFFFF


def kept_beside(p, param_format):
    """What the format keeps beside an exact p, where it keeps something: it comes before the moments."""
    _, extra = ops.split(p.float(), param_format)
    return [extra] if extra.numel() else []


def store(value, param_format, *, first=0, seed=0, step=1, stream=0, global_cols=None):
    """Stores float32 `value` [rows, cols] in a parameter, through a step that adds exactly `value` to zero.

    AdamW with beta = 0 and a huge eps: m = g, the denominator is eps to the bit, and p = 0 - lr / eps * m / 1 = value.
    """
    rows, cols = value.shape
    dtype = next(p["dtype"] for p in PARAMS if p["name"] == param_format)
    p = torch.zeros((rows, cols), dtype=getattr(torch, dtype))
    state = [*kept_beside(p, param_format), torch.zeros(rows, cols), torch.zeros(rows, cols)]
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
    return p


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


def test_float32_stores_what_is_computed(isa):
    x = samples()
    assert torch.equal(store(x, "float32"), x)


def test_bfloat16_is_rounded_to_nearest_even(isa):
    x = samples()
    bits = x.view(torch.int32)
    bits[0] = (bits[0] & ~0xFFFF) | 0x8000  # exactly between two values
    assert torch.equal(store(x, "bfloat16"), x.bfloat16())


def test_stochastic_rounding_takes_the_bits_of_the_element(isa):
    """Bit for bit the rule (bits + r) >> 16, with r from a Philox written independently, for odd offsets, wide indices and seeds."""
    x = samples(4000)
    rows, cols = x.shape
    for first, seed, step, stream in [
        (0, 0, 1, 0),
        (3, 5, 2, 9),
        (2**35 + 13, 2**40 + 7, 100, 2**32 - 1),
    ]:
        got = store(x, "bfloat16_stochastic", first=first, seed=seed, step=step, stream=stream)
        want = np.empty((rows, cols), np.uint32)
        bits = x.numpy().view(np.uint32)
        for r in range(rows):
            for c in range(cols):
                random = random16(first + r * cols + c, seed, step, stream)
                want[r, c] = (int(bits[r, c]) & 0x7FFFFFFF) + random >> 16 | int(
                    bits[r, c]
                ) >> 16 & 0x8000
        np.testing.assert_array_equal(got.view(torch.int16).numpy().astype(np.uint16), want)


def test_random_bits_do_not_depend_on_the_shard(isa):
    """Rows, and columns, of the whole stored by themselves give the same bits: sharding in either direction."""
    x = samples(4096)
    _rows, cols = x.shape
    whole = store(x, "bfloat16_stochastic", seed=3, stream=11)
    for cut in (1, 3, 8):
        part = store(
            x[cut - 1 : cut].contiguous(),
            "bfloat16_stochastic",
            first=(cut - 1) * cols,
            seed=3,
            stream=11,
        )
        assert torch.equal(part, whole[cut - 1 : cut])
    for cut in (1, 77, 256, 301):
        part = store(
            x[:, cut:].contiguous(),
            "bfloat16_stochastic",
            first=cut,
            seed=3,
            stream=11,
            global_cols=cols,
        )
        assert torch.equal(part, whole[:, cut:])


def test_stochastic_rounding_is_unbiased(isa):
    """A value 1/16 .. 15/16 of the way between two bfloat16 goes up that often: 8 standard deviations of 2^18 draws."""
    n = 2**18
    for sixteenths in range(1, 16):
        value = torch.tensor([0x3F800000 + sixteenths * 0x1000], dtype=torch.int32).view(
            torch.float32
        )
        got = store(
            value.expand(4, n // 4).contiguous(), "bfloat16_stochastic", stream=sixteenths
        ).float()
        up = (got > 1).double().mean().item()
        share = sixteenths / 16
        assert set(got.unique().tolist()) == {1.0, 1.0078125}
        assert abs(up - share) < 8 * (share * (1 - share) / n) ** 0.5


def test_different_steps_streams_and_seeds_draw_different_bits():
    x = torch.full((1, 4096), 1.00390625)  # half way
    draws = [
        store(x, "bfloat16_stochastic", **k)
        for k in (
            {},
            {"step": 2},
            {"stream": 1},
            {"seed": 1},
            {"seed": 2**32},
            {"first": 8},
            {"first": 2**35},
        )
    ]
    for i, a in enumerate(draws):
        for b in draws[:i]:
            assert 0.4 < (a == b).float().mean() < 0.6  # independent bits agree half the time


@pytest.mark.parametrize("name", [p["name"] for p in PARAMS if p["dtype"] == "bfloat16"])
def test_values_at_the_edge(name, isa):
    """Exact values stay, infinity stays, every NaN becomes 0x7fc0, and stochastic rounding never makes a finite value infinite."""
    exact = torch.randn(4, 333).bfloat16().float()
    assert torch.equal(store(exact, name).float(), exact)
    subnormal = torch.tensor([[2.0**-130, -(2.0**-133)]]).bfloat16()
    assert torch.equal(decayed(subnormal, name, 1.0), subnormal)
    # p + (-lr/eps * m): infinities and NaN come through m, whose denominator |m| + eps makes them NaN
    nan = store(torch.tensor([[float("nan"), float("inf"), -float("inf")]]), name)
    assert (nan.view(torch.int16) == 0x7FC0).all()
    if name == "bfloat16_stochastic":
        almost_two = float(np.float32(1.9999999))  # 2^127 * (2 - 2^-23) is the largest float32
        got = decayed(torch.full((64, 64), 2.0**127).bfloat16(), name, almost_two)
        assert got.float().isfinite().all() and (got == torch.finfo(torch.bfloat16).max).all()


def decayed(p, param_format, factor):
    """p times factor, stored: what `store` cannot reach. AdamW with a zero gradient and a weight decay of 1 - factor."""
    p = p.clone()
    rows, cols = p.shape
    state = [*kept_beside(p, param_format), torch.zeros(rows, cols), torch.zeros(rows, cols)]
    plan = plan_row(rows, cols, ["float32"] * 2, param_format)
    hyper = [1.0, 0.9, 0.9, 1.0, 1 - factor]
    ops.step("adamw", [p], [torch.zeros(rows, cols)], state, [torch.zeros(())], plan, hyper)
    return p
