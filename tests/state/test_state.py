"""State formats: what a code means, and that every instruction set means the same. A format added
to the registry is picked up by all of it.

LOWBIT_TEST_FORMAT in the environment picks one format: test_added_format.py runs this file so,
on a build of its own.
"""

import json
import zlib

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lowbit import ops
from tests.support.codes import (
    CODED,
    ONLY,
    Table,
    anchors,
    bits_of,
    family,
    one_scale,
    pack,
    table_of,
    unit,
    unpack,
    values_of_codes,
)
from tests.support.paths import GOLDEN
from tests.support.plans import fresh_state, plan_row, run_step

FAMILIES = sorted({family(f) for f in CODED})
ISAS = ops.catalog()["isas"]
BLOCKS = [32, 64, 128, 256, 512, 1024, 2048]
F = np.float32

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(params=FAMILIES)
def formats(request):
    """The formats of one family."""
    return [f for f in CODED if family(f) == request.param]


COVERED: dict[str, dict[str, int]] = {}


def cover(format, test, count):
    COVERED.setdefault(format["name"], {}).setdefault(test, 0)
    COVERED[format["name"]][test] += int(count)


@pytest.fixture(scope="module", autouse=True)
def report():
    yield
    columns = list(dict.fromkeys(c for row in COVERED.values() for c in row))
    print(f"\n\nvalues tested, all of {len(COVERED)} formats x {len(ISAS)} instruction sets")
    print(f"{'format':24}{'domain':>9}{'bits':>5}" + "".join(f"{c:>12}" for c in columns))
    for f in CODED:
        row = COVERED.get(f["name"], {})
        cells = "".join(f"{row.get(c, 0):>12}" for c in columns)
        print(f"{f['name']:24}{f['domain']:>9}{f['bits']:>5}{cells}")


def quantize_beside(format, heads, x, block):
    """x [n] in one-block rows that begin with `heads`, which alone fix the scale -> codes uint32
    [n], decoded float32 [n].
    """
    heads = np.asarray(heads, F)
    room = block - heads.size
    rows = -(-x.size // room)
    matrix = np.full((rows, block), heads[0], F)
    matrix[:, : heads.size] = heads
    matrix[:, heads.size :].flat[: x.size] = x
    codes, scales = ops.quantize(torch.from_numpy(matrix), format["name"], block)
    want = one_scale(format, heads[None])
    assert torch.equal(bits_of(scales), bits_of(want.expand(rows, -1))), (
        f"{format['name']}: {heads} is not what fixes the scale"
    )
    decoded = ops.dequantize(codes, scales, format["name"], block, block).numpy()
    unpacked = unpack(codes.numpy(), format["bits"], block)
    return tuple(a[:, heads.size :].reshape(-1)[: x.size] for a in (unpacked, decoded))


def probes(table, heads, count):
    """Every value, every midpoint, their neighbours in float32,
    and a spread of what lies between the heads.
    """
    v = table.values if table.values.size <= 256 else table.values[:: table.values.size // 200]
    middles = (v[1:] + v[:-1]) / 2
    if table.format["domain"] == "log2":
        same = v[1:] * v[:-1] > 0
        middles = np.concatenate([middles, np.sqrt((v[1:] * v[:-1])[same]) * np.sign(v[1:][same])])
    exact = np.concatenate([v, middles]).astype(F)
    around = [exact]
    for direction in (-np.inf, np.inf):
        around.append(np.nextafter(exact, F(direction)))
    rng = np.random.default_rng(0)
    most, least = F(np.max(heads)), F(np.min(heads))
    low = np.log2(float(least)) if least < most else -149.0
    spread = np.exp2(np.linspace(low, np.log2(float(most)), count))
    flat = rng.uniform(0, float(most), count)
    z = np.concatenate([*around, spread.astype(F), flat.astype(F)])
    z = np.concatenate([z, -z]) if table.format["signed"] else z[z >= 0]
    z = z[np.abs(z) <= most]
    if least < most:  # nothing below the least, which would be another scale
        z = z[(np.abs(z) >= least) | (z == 0)]
    return z


def test_codes_are_packed_from_the_low_bits(formats):
    """Decoding what numpy has packed gives each code's value; whole bytes at every length."""
    rng = np.random.default_rng(0)
    for f in formats:
        table = Table(f, one_scale(f, anchors(f)[:1]))
        for n in (1, 5, 31, 257, 300):
            codes = rng.integers(0, 2 ** f["bits"], (3, n))
            packed = torch.from_numpy(pack(codes, f["bits"]))
            blocks = -(-n // 64)
            scales = table.scale.repeat(3, blocks)
            for isa in ISAS:
                ops.set_isa(isa)
                got = ops.dequantize(packed, scales, f["name"], 64, n).numpy()
                want = table.raw[codes]
                assert np.array_equal(got.view(np.uint32), want.view(np.uint32)), (
                    f"{f['name']} on {isa}, {n} codes"
                )
            cover(f, "packed", 3 * n)


def test_codes_are_brute_force_nearest(formats):
    """At a scale that rounds nothing, every probe takes the nearest value of its domain, by exactly
    the same code everywhere.
    """
    for f in formats:
        for heads in anchors(f):
            table = Table(f, one_scale(f, [heads]))
            x = probes(table, heads, 1000 if f["domain"] == "log2" else 3000)
            seen = []
            for isa in ISAS:
                ops.set_isa(isa)
                seen.append(quantize_beside(f, heads, x, f["block"]))
            codes, got = seen[0]
            what = f"{f['name']} beside {heads}"
            assert all(np.array_equal(codes, c) for c, _ in seen[1:]), what
            assert np.array_equal(table.raw[codes], got), what
            table.check(x, got, what)
            if f["domain"] == "linear":  # ties
                v = table.values
                above = np.clip(np.searchsorted(v, x.astype(np.float64)), 1, v.size - 1)
                tie = x.astype(np.float64) * 2 == v[above] + v[above - 1]
                tie &= (v[above - 1] != 0) | f["signed"]  # there the rule of zero holds
                even = (codes % 2 == 0) & f["name"].startswith("float8")
                larger = (got == v[above]) & (not f["name"].startswith("float8"))
                assert (even | larger)[tie].all(), f"{what}: ties"
            cover(f, "nearest", x.size)


def test_error_is_at_most_half_a_gap(formats):
    for f in formats:
        for heads in anchors(f):
            table = Table(f, one_scale(f, [heads]))
            x = probes(table, heads, 1000).astype(np.float64)
            _, got = quantize_beside(f, heads, x.astype(F), f["block"])
            inside = (x >= table.values[0]) & (x <= table.values[-1])
            if not f["signed"]:  # up to a whole gap where a positive value may not become zero
                inside &= (x == 0) | (x >= table.least)
            if f["domain"] == "log2":
                inside &= np.abs(x) >= table.least
            error = table.distance(x, got.astype(np.float64))[inside]
            limit = table.half_gap(x[inside]) * (1 + 1e-9) + table.slack
            assert (error <= limit).all(), f"{f['name']} beside {heads}"
            cover(f, "half gap", inside.sum())


def test_every_code_survives_a_round_trip(formats):
    for f in formats:
        for heads in anchors(f):
            table = Table(f, one_scale(f, [heads]))
            x = table.values.astype(F)
            if len(heads) > 1:  # values that would be another least
                x = x[(np.abs(x) >= F(min(heads))) | (x == 0)]
            if f["bits"] > 8 and min(heads) > 1e-3 * max(heads):
                continue  # more codes than floats there
            x = x[np.abs(x) <= F(max(heads))]  # decoding may round the largest up
            assert x.size > 0.6 * table.values.size or f["domain"] == "log2"
            for isa in ISAS:
                ops.set_isa(isa)
                codes, got = quantize_beside(f, heads, x, f["block"])
                wrong = np.flatnonzero(got != x)
                assert wrong.size == 0, (
                    f"{f['name']} on {isa}, {heads}: {x[wrong[:4]]} became {got[wrong[:4]]}"
                )
                assert np.unique(codes).size == x.size, (
                    f"{f['name']} on {isa}: one value, two codes"
                )
            cover(f, "round trip", x.size)


def blocks_of_all_sizes(f, block, rng):
    """Rows of blocks, the last one short, of every magnitude that float32 has."""
    cols = block + 21
    tops = np.array([1e-44, 1e-39, 1e-20, 1e-6, 1.0, 300.0, 1e20, 3e38])[:, None]
    x = rng.standard_normal((8, cols)).clip(-1, 1) * np.exp2(-rng.integers(0, 20, (8, cols)))
    x = (x * tops).astype(F)
    return x if f["signed"] else np.abs(x)


def test_every_block_length_and_every_magnitude(formats):
    """Under every block length and scale a code is nearest to within what float32 rounds; all
    instruction sets give the same bytes.
    """
    rng = np.random.default_rng(1)
    for f in formats:
        for block in BLOCKS:
            x = blocks_of_all_sizes(f, block, rng)
            rows, cols = x.shape
            seen = []
            for isa in ISAS:
                ops.set_isa(isa)
                codes, scales = ops.quantize(torch.from_numpy(x), f["name"], block)
                seen.append((codes, scales, ops.dequantize(codes, scales, f["name"], block, cols)))
            for other in seen[1:]:
                for a, b in zip(seen[0], other, strict=True):
                    assert torch.equal(bits_of(a), bits_of(b)), f"{f['name']}, block {block}"
            y = seen[0][2].numpy()
            assert np.isfinite(y).all(), f"{f['name']}, block {block}"
            count = f["scale_numbers"]
            for row in range(2, rows - 1) if f["scale_dtype"] == "float32" else (4, 5):
                for k, part in enumerate((slice(0, block), slice(block, cols))):
                    scale = scales[row : row + 1, k * count : (k + 1) * count]
                    table = Table(f, scale)
                    slack = table.slack + (1e-3 if f["scale_dtype"] == "float16" else 1e-6)
                    table.check(x[row, part], y[row, part], f"{f['name']}, block {block}", slack)
            cover(f, "blocks", x.size)


def test_zero_rules(formats):
    for f in formats:
        name = f["name"]
        for isa in ISAS:
            ops.set_isa(isa)
            for block in (32, f["block"], 2048):
                zeros = torch.zeros(2, block + 3)
                codes, scales = ops.quantize(zeros, name, block)
                decoded = ops.dequantize(codes, scales, name, block, block + 3)
                assert (scales == 0).all() and (decoded == 0).all(), f"{name}: a block of zeros"
                x = torch.zeros(1, block)
                x[0, 0] = 3.0
                codes, scales = ops.quantize(x, name, block)
                decoded = ops.dequantize(codes, scales, name, block, block)[0, 1:]
                has_zero = (values_of_codes(f, scales) == 0).any()
                if has_zero:
                    assert (decoded == 0).all(), f"{name}: a zero beside values stays zero"
                else:
                    least = np.abs(values_of_codes(f, scales)).min()
                    assert (decoded == float(least)).all(), f"{name}: the least that there is"
                if f["signed"]:
                    continue
                for smallest in (1e-45, 1e-38, 1e-30, 1e-12):
                    for largest in (smallest, 1e-37, 1.0):  # a ratio that float32 can hold
                        if largest < smallest:
                            continue
                        x[0, 0], x[0, 1] = largest, smallest
                        codes, scales = ops.quantize(x, name, block)
                        decoded = ops.dequantize(codes, scales, name, block, block)
                        assert (decoded[0, :2] > 0).all(), (
                            f"{name} on {isa}: {smallest} beside {largest}"
                        )
                        cover(f, "zero rule", 2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_stay_so(formats, bad):
    for f in formats:
        name, block = f["name"], f["block"]
        x = torch.rand(3, 2 * block)
        x[1, 5] = bad
        for isa in ISAS:
            ops.set_isa(isa)
            codes, scales = ops.quantize(x, name, block)
            y = ops.dequantize(codes, scales, name, block, 2 * block)
            assert y[1, :block].isnan().all() and y[1, block:].isfinite().all(), f"{name} on {isa}"
            assert y[0].isfinite().all(), f"{name} on {isa}"
            one = torch.tensor(float("nan")).to(scales.dtype)
            assert torch.equal(
                bits_of(scales[1, : f["scale_numbers"]]),
                bits_of(one.repeat(f["scale_numbers"])),
            ), f"{name} on {isa}: one NaN for every processor"


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(0, 5),
    cols=st.integers(1, 700),
    block=st.sampled_from(BLOCKS),
    spread=st.floats(-30, 30),
    seed=st.integers(0, 2**32 - 1),
    exponent=st.integers(-40, 37),
)
def test_isas_agree_and_slices_commute(rows, cols, block, spread, seed, exponent):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, cols)) * np.exp2(rng.uniform(-abs(spread), 0, (rows, cols)))
    x = torch.from_numpy((x * 10.0**exponent).astype(F))
    before = ops.catalog()["isa"]
    for f in CODED:
        name = f["name"]
        value = x if f["signed"] else x.abs()
        results = []
        for isa in ISAS:
            ops.set_isa(isa)
            codes, scales = ops.quantize(value, name, block)
            results.append((codes, scales, ops.dequantize(codes, scales, name, block, cols)))
        ops.set_isa(before)
        for other in results[1:]:
            for a, b in zip(results[0], other, strict=True):
                assert torch.equal(bits_of(a), bits_of(b)), name
        codes, scales, _ = results[-1]
        cut = rows // 2
        for part, where in ((value[:cut], slice(0, cut)), (value[cut:], slice(cut, rows))):
            sliced = ops.quantize(part.contiguous(), name, block)
            assert torch.equal(sliced[0], codes[where]), name
            assert torch.equal(bits_of(sliced[1]), bits_of(scales[where])), name


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    top=st.floats(1e-30, 1e30),
    count=st.integers(1, 31),
)
@example(seed=1, top=1.0, count=1)  # 9e-8, a scale that is a denormal of float16
@example(seed=41609, top=1e-30, count=1)  # 9e-39, below the least logarithm
def test_any_value_takes_the_nearest_code(seed, top, count):
    """Random blocks of random scale, by brute force in the format's domain."""
    rng = np.random.default_rng(seed)
    x = (rng.uniform(-1, 1, count) * np.exp2(-rng.integers(0, 24, count)) * top).astype(F)
    for f in CODED:
        if f["scale_dtype"] == "float16" and not 1e-3 < np.abs(x).max() < 1e4:
            continue  # beyond float16 values stick to its ends, and its denormals are coarse
        value = torch.from_numpy(x if f["signed"] else np.abs(x))[None]
        codes, scales = ops.quantize(value, f["name"], 32)
        got = ops.dequantize(codes, scales, f["name"], 32, count)
        table = Table(f, scales)
        slack = table.slack + (1e-3 if f["scale_dtype"] == "float16" else 1e-6)
        meant = value.numpy()
        if f["domain"] == "log2":
            meant = np.copysign(
                np.where(meant == 0, 0, np.clip(np.abs(meant), 2.0**-126, 2.0**126)), meant
            )
        table.check(meant, got.numpy(), f["name"], slack)


# ---- rounding by chance ----


def stored_by_step(f, x, *, stochastic, block=None, scale="block", isa=None):
    """x [rows, cols] as the state of one step of AdamW whose momenta forget: m = g, v = g * g.
    Unsigned: x must be squares.
    """
    if isa is not None:
        ops.set_isa(isa)
    rows, cols = x.shape
    g = x if f["signed"] else x.sqrt()
    choice = {"format": f["name"], "scale": scale, "stochastic": stochastic}
    if block:
        choice["block"] = block
    formats = [choice, "float32"] if f["signed"] else ["float32", choice]
    state = fresh_state("adamw", (rows, cols), formats)
    plan = plan_row(rows, cols, formats, stream=5)
    hyper = [1e-3, 0.0, 0.0, 1e-8, 0.0]
    steps = [torch.zeros(())]
    run_step("adamw", [torch.zeros(rows, cols)], [g], state, steps, plan, hyper, seed=3)
    at = 0 if f["signed"] else 1
    return state[at], state[at + 1]


def squares(x):
    """The nearest values below x that are squares of float32."""
    root = np.sqrt(x.astype(F))
    return root * root


def test_stochastic_codes_keep_the_mean(formats):
    """Many draws of one value lie on both sides of it, with the right mean of values, also where
    codes are logarithms or roots; all instruction sets draw the same.
    """
    rng = np.random.default_rng(2)
    for f in formats:
        heads = anchors(f)[-1] if f["domain"] != "log2" else anchors(f)[min(2, len(anchors(f)) - 1)]
        block = 256
        heads = np.array(heads, F) if f["signed"] else squares(np.array(heads, F))
        table = Table(f, one_scale(f, heads[None]))
        room = block - heads.size
        # Below it the mean of unsigned and logarithmic codes is another.
        least = table.least * 1.001
        if f["signed"] and f["domain"] != "log2":
            least = float(heads[0]) * 2**-20
        low = np.log2(max(float(heads[-1]) if heads.size > 1 else 0, least))
        x = np.exp2(rng.uniform(low, np.log2(float(heads[0])), room)).astype(F)
        if f["signed"]:
            x *= rng.choice([-1, 1], room)
        else:
            x = squares(x)
        if heads.size > 1:
            x = np.where(np.abs(x) < heads[-1], heads[-1], x)
        copies = 128
        matrix = np.tile(np.concatenate([heads, x]).astype(F), (copies, 1))
        seen = [
            stored_by_step(f, torch.from_numpy(matrix), stochastic=True, block=block, isa=isa)
            for isa in ISAS
        ]
        for codes, scales in seen[1:]:
            assert torch.equal(codes, seen[0][0]), f["name"]
            assert torch.equal(bits_of(scales), bits_of(seen[0][1])), f["name"]
        got = ops.dequantize(*seen[0], f["name"], block, block).numpy()[:, heads.size :]

        v = table.values
        inside = (np.abs(x) <= np.abs(v).max()) & (x >= v[0]) & (x <= v[-1])
        above = np.clip(np.searchsorted(v, x.astype(np.float64)), 1, v.size - 1)
        ends = np.stack([v[above - 1], v[above]])
        on_it = np.isclose(x, ends, rtol=1e-6, atol=0).any(axis=0)
        known = ((got == ends[0]) | (got == ends[1])).all(axis=0)
        if f["bits"] <= 8:
            assert (known | on_it | ~inside).all(), f"{f['name']}: neither neighbour"
        low, high = np.sort(ends, axis=0)
        z, gap = x.astype(np.float64), high - low
        use = inside & ~on_it & (gap > 0) & np.isfinite(gap)
        assert use.sum() > 0.5 * room or f["bits"] <= 3, f"{f['name']}: {use.sum()} usable values"
        share = ((z - low) / np.where(gap > 0, gap, 1))[use].clip(0, 1)
        off = ((got.astype(np.float64) - z) / np.where(gap > 0, gap, 1))[:, use]
        slack = 2e-3 + (0.05 if f["bits"] > 8 else 0)
        error = np.sqrt((share * (1 - share)).sum() * copies) / (use.sum() * copies)
        assert abs(off.mean()) < 4 * error + slack, (
            f"{f['name']}: mean off by {off.mean():.4f} of a gap, standard error {error:.4f}"
        )
        inward = (
            off * np.sign(0.5 - share)
        ).mean()  # towards the farther code: errors of both sides add up
        assert abs(inward) < 4 * error + slack, f"{f['name']}: {inward:.4f} of a gap too far"
        each = np.sqrt(share * (1 - share) / copies)
        rare = 1 / copies  # what is nearly on a code seldom leaves it
        assert (np.abs(off.mean(axis=0)) < 6 * each + 6 * rare + slack).all(), f["name"]
        cover(f, "stochastic", got.size)


def test_stochastic_codes_of_positive_values_are_positive():
    for f in CODED:
        if f["signed"]:
            continue
        heads = squares(np.array([unit(f) if f["domain"] != "log2" else 1.0], F))
        table = Table(f, one_scale(f, heads[None]))
        down = np.exp2(-np.linspace(0, 60, 255)) * min(table.least, 1e30) * 1.5
        row = np.concatenate([heads, squares(down.astype(F))])
        x = torch.from_numpy(np.tile(row.astype(F), (40, 1)))
        codes, scales = stored_by_step(f, x, stochastic=True, block=256)
        got = ops.dequantize(codes, scales, f["name"], 256, 256)
        assert (got[x > 0] > 0).all(), f["name"]


def test_stochastic_bfloat16_keeps_the_mean():
    x = torch.linspace(1, 1 + 2**-7, 66)[1:-1].repeat(2000, 1)
    formats = [{"format": "bfloat16", "stochastic": True}, "float32"]
    state = fresh_state("adamw", x.shape, formats)
    plan = plan_row(*x.shape, formats)
    hyper = [1e-3, 0.0, 0.0, 1e-8, 0.0]
    run_step("adamw", [torch.zeros_like(x)], [x], state, [torch.zeros(())], plan, hyper)
    share = (x[0].double() - 1) * 2**7
    up = (state[0].double() - 1).mean(0) * 2**7
    assert ((up - share).abs() < 5 * (share * (1 - share) / 2000).sqrt() + 1e-3).all()


# ---- what is written on disk ----


@pytest.mark.skipif(bool(ONLY), reason="one format only")
@pytest.mark.parametrize(
    "name, golden", [("dynamic8", "dynamic8_signed"), ("dynamic8_unsigned", "dynamic8_unsigned")]
)
def test_dynamic8_map_is_the_peers(name, golden):
    entry = json.loads((GOLDEN / "dynamic8_maps.json").read_text())[golden]
    want = np.array([int(h, 16) for h in entry["float32_hex"]], dtype=np.uint32)
    table = table_of(next(f for f in CODED if f["name"] == name))
    np.testing.assert_array_equal(table.view(np.uint32), want)


@pytest.mark.skipif(bool(ONLY), reason="a format that is not on any disk")
def test_codes_on_disk_do_not_drift():
    """A digest of the codes of fixed input, committed,
    so that a format cannot change its meaning by accident.
    """
    digests = json.loads((GOLDEN / "code_digests.json").read_text())
    for f in CODED:
        assert f["name"] in digests, (
            f"{f['name']} is new: run `.venv/bin/python -m tests.golden.regenerate` "
            "and commit the result"
        )
        assert digests[f["name"]] == code_digest(f), f["name"]


def code_digest(format):
    """CRC-32 of codes and scales of a fixed table of 64 x 1000 values that spans 40 binades."""
    i = np.arange(64000, dtype=np.int64)
    x = ((i * 2654435761 % 65521 - 32760) / 32768.0).astype(F) * np.exp2(-(i * 40503 % 41)).astype(
        F
    )
    x = torch.from_numpy((x if format["signed"] else np.abs(x)).reshape(64, 1000))
    codes, scales = ops.quantize(x, format["name"], format["block"])
    return f"{zlib.crc32(scales.numpy().tobytes(), zlib.crc32(codes.numpy().tobytes())):08x}"
