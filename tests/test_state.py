"""State formats: what a code means, and that every instruction set means the same. A format added to the registry is picked up by all of it."""

import json
import pathlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit import ops

GOLDEN = pathlib.Path(__file__).parent / "golden"
CODED = [s for s in ops.catalog()["state"] if s["scaled"]]
ISAS = ops.catalog()["isas"]
F = np.float32


def ids(format):
    return format["name"]


def table_of(format):
    """The value of every code at scale 1, float32 [2**bits]."""
    n = 2 ** format["bits"]
    assert format["bits"] == 8, (
        "codes of fewer bits share a byte: extend this helper with the packing"
    )
    codes = torch.arange(n, dtype=torch.uint8).reshape(1, n)
    scales = torch.ones(1, -(-n // format["block"]))
    return ops.decode(codes, scales, format["name"], format["block"], n)[0].numpy()


def encode_at_scale_one(format, z):
    """Codes of z [n] in blocks whose largest magnitude is 1, so that z is not rounded on the way."""
    block = format["block"]
    rows = -(-z.size // (block - 1))
    x = np.zeros((rows, block), F)
    x[:, 0] = 1.0
    x[:, 1:].flat[: z.size] = z
    codes, scales = ops.encode(torch.from_numpy(x), format["name"], block)
    assert (scales == 1).all()
    return codes.numpy()[:, 1:].reshape(-1)[: z.size]


def nearest(format, table, z):
    """Brute force: distances to every entry in float64, the larger value on a tie; unsigned: no zero for a positive value."""
    distance = np.abs(z[:, None].astype(np.float64) - table.astype(np.float64))
    best = (
        distance.shape[1] - 1 - np.argmin(distance[:, ::-1], axis=1)
    )  # entries ascend with the code
    if not format["signed"]:
        best[(z > 0) & (table[best] == 0)] = np.flatnonzero(table > 0)[0]
    return best


@pytest.fixture(params=ISAS)
def isa(request):
    """Forces one instruction set for the test."""
    before = ops.catalog()["isa"]
    ops.set_isa(request.param)
    yield request.param
    ops.set_isa(before)


def probes(table, signed):
    """Every entry, every midpoint, their neighbours in float32, subnormals, and a spread of the whole range."""
    middles = ((table[1:].astype(np.float64) + table[:-1]) / 2).astype(F)
    exact = np.concatenate([table, middles])
    around = [exact]
    for direction in (-np.inf, np.inf):
        step = exact
        for _ in range(3):
            step = np.nextafter(step, F(direction))
            around.append(step)
    spread = np.exp2(np.linspace(-149, 0, 20001)).astype(F)
    bits = np.random.default_rng(0).integers(0, 0x3F800000, 20000, dtype=np.uint32).view(F)
    z = np.concatenate([*around, spread, bits])
    z = np.concatenate([z, -z]) if signed else np.abs(z)
    return z[np.abs(z) <= 1]


@pytest.mark.parametrize("format", CODED, ids=ids)
def test_codes_are_brute_force_nearest(format, isa):
    table = table_of(format)
    assert (np.diff(table) > 0).all(), "decode must be monotone"
    z = probes(table, format["signed"])
    want = nearest(format, table, z)
    got = encode_at_scale_one(format, z)
    wrong = np.flatnonzero(got != want)
    assert wrong.size == 0, f"{z[wrong[:5]]}: codes {got[wrong[:5]]}, nearest {want[wrong[:5]]}"
    print(f"{format['name']} on {isa}: {z.size} values, every code is the nearest")


@pytest.mark.parametrize("format", CODED, ids=ids)
def test_every_code_survives_a_round_trip(format, isa):
    table = table_of(format)
    np.testing.assert_array_equal(encode_at_scale_one(format, table), np.arange(table.size))


@pytest.mark.parametrize("format", CODED, ids=ids)
def test_error_is_at_most_half_a_gap(format):
    table = table_of(format)
    z = probes(table, format["signed"])
    got = table[encode_at_scale_one(format, z)].astype(np.float64)
    above = np.clip(np.searchsorted(table, z), 1, table.size - 1)
    gap = table[above].astype(np.float64) - table[above - 1]
    error = np.abs(got - z)
    outside = np.maximum(
        np.maximum(z.astype(np.float64) - table[-1], table[0] - z.astype(np.float64)), 0
    )
    raised = (
        (not format["signed"]) & (z > 0) & (z < table[table > 0][0])
    )  # zero rule: up to a whole gap
    assert (error <= np.where(raised, gap, np.maximum(gap / 2, outside)) * (1 + 1e-12)).all()


@pytest.mark.parametrize("format", CODED, ids=ids)
def test_zero_rules(format, isa):
    name, block = format["name"], format["block"]
    zeros = torch.zeros(2, block + 3)
    codes, scales = ops.encode(zeros, name, block)
    assert (scales == 0).all() and (ops.decode(codes, scales, name, block, block + 3) == 0).all()
    x = torch.zeros(1, block)
    x[0, 0] = 3.0
    codes, scales = ops.encode(x, name, block)
    assert (ops.decode(codes, scales, name, block, block)[0, 1:] == 0).all(), (
        "a zero beside values stays zero"
    )
    if not format["signed"]:
        for smallest in (1e-45, 1e-38, 1e-30, 1e-12):
            for largest in (smallest, 1e-37, 1.0):  # a ratio that float32 can hold
                x[0, 0], x[0, 1] = largest, smallest
                codes, scales = ops.encode(x, name, block)
                assert (ops.decode(codes, scales, name, block, block)[0, :2] > 0).all()


@pytest.mark.parametrize("format", CODED, ids=ids)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_stay_so(format, isa, bad):
    name, block = format["name"], format["block"]
    x = torch.rand(3, 2 * block)
    x[1, 5] = bad
    codes, scales = ops.encode(x, name, block)
    y = ops.decode(codes, scales, name, block, 2 * block)
    assert y[1, :block].isnan().all() and y[1, block:].isfinite().all() and y[0].isfinite().all()
    assert scales[1, 0].view(torch.int32).item() == 0x7FC00000, "one NaN for every processor"


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 5),
    cols=st.integers(1, 700),
    spread=st.floats(-30, 30),
    seed=st.integers(0, 2**32 - 1),
    exponent=st.integers(-40, 37),
)
def test_isas_agree_and_slices_commute(rows, cols, spread, seed, exponent):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, cols)) * np.exp2(rng.uniform(-abs(spread), 0, (rows, cols)))
    x = torch.from_numpy((x * 10.0**exponent).astype(F))
    before = ops.catalog()["isa"]
    for format in CODED:
        name, block = format["name"], format["block"]
        value = x if format["signed"] else x.abs()
        results = []
        for isa in ISAS:
            ops.set_isa(isa)
            codes, scales = ops.encode(value, name, block)
            results.append((codes, scales, ops.decode(codes, scales, name, block, cols)))
        ops.set_isa(before)
        for other in results[1:]:
            for a, b in zip(results[0], other, strict=True):
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        codes, scales, _ = results[-1]
        cut = rows // 2
        for part, where in ((value[:cut], slice(0, cut)), (value[cut:], slice(cut, rows))):
            sliced = ops.encode(part.contiguous(), name, block)
            assert torch.equal(sliced[0], codes[where]) and torch.equal(sliced[1], scales[where])


@pytest.mark.parametrize(
    "name, golden", [("dynamic8", "dynamic8_signed"), ("dynamic8_unsigned", "dynamic8_unsigned")]
)
def test_dynamic8_map_is_the_peers(name, golden):
    entry = json.loads((GOLDEN / "dynamic8_maps.json").read_text())[golden]
    want = np.array([int(h, 16) for h in entry["float32_hex"]], dtype=np.uint32)
    table = table_of(next(f for f in CODED if f["name"] == name))
    np.testing.assert_array_equal(table.view(np.uint32), want)


@pytest.mark.parametrize("format", CODED, ids=ids)
def test_codes_on_disk_do_not_drift(format):
    """A digest of the codes of fixed input, committed, so that a format cannot change its meaning by accident."""
    digests = json.loads((GOLDEN / "code_digests.json").read_text())
    assert format["name"] in digests, (
        "a new format: run `python tests/golden/regenerate.py` and commit the result"
    )
    assert digests[format["name"]] == code_digest(format)


def code_digest(format):
    """CRC-32 of codes and scales of a fixed table of 64 x 1000 values that spans 40 binades."""
    import zlib

    i = np.arange(64000, dtype=np.int64)
    x = ((i * 2654435761 % 65521 - 32760) / 32768.0).astype(F) * np.exp2(-(i * 40503 % 41)).astype(
        F
    )
    x = torch.from_numpy((x if format["signed"] else np.abs(x)).reshape(64, 1000))
    codes, scales = ops.encode(x, format["name"], format["block"])
    return f"{zlib.crc32(scales.numpy().tobytes(), zlib.crc32(codes.numpy().tobytes())):08x}"
