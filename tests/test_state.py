"""State formats: what a code means, and that every instruction set means the same. A format added to the registry is picked up by all of it."""

import json
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import need
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import plan_row
from torch import nn

import lowbit
from lowbit import ops

ROOT = pathlib.Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden"
CODED = [s for s in ops.catalog()["state"] if s["scaled"]]
ISAS = ops.catalog()["isas"]
BLOCKS = [32, 64, 128, 256, 512, 1024, 2048]
F = np.float32


def ids(format):
    return format["name"]


@pytest.fixture(params=ISAS)
def isa(request):
    """Forces one instruction set for the test."""
    before = ops.catalog()["isa"]
    ops.set_isa(request.param)
    yield request.param
    ops.set_isa(before)


# Codes out of bytes, and the other way round, written independently: bit i * bits + k of a row is bit k of code i.


def unpack(format, codes, cols):
    """uint8 [rows, bytes] -> int64 [rows, cols]."""
    bits = np.unpackbits(np.asarray(codes), axis=1, bitorder="little")
    bits = bits[:, : cols * format["bits"]].reshape(len(bits), cols, format["bits"])
    return bits.astype(np.int64) @ (1 << np.arange(format["bits"], dtype=np.int64))


def pack(format, codes):
    bits = (codes[..., None] >> np.arange(format["bits"])) & 1
    flat = bits.reshape(len(codes), -1).astype(np.uint8)
    return torch.from_numpy(np.packbits(flat, axis=1, bitorder="little"))


def tables(format, scales):
    """What every code means at each row's scale: float64 [rows, 2**bits]. scales: of rows of one block."""
    count, width = 1 << format["bits"], 256
    rows = len(scales)
    every = np.arange(count).reshape(-1, min(count, width))
    codes = pack(format, np.tile(every, (rows, 1)))
    repeated = scales.repeat_interleave(len(every), 0)
    values = ops.decode(codes, repeated, format["name"], width, every.shape[1])
    return values.numpy().astype(np.float64).reshape(rows, count)


KINDS = ["normal", "squares", "exponents", "near one", "subnormal", "huge", "mostly zero"]


def blocks(format, kind, rows=6, cols=256, seed=0):
    """Rows of one block each; the largest magnitude of an even row is a power of two, so that its z is not rounded."""
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    x = rng.standard_normal((rows, cols))
    if kind == "squares":
        x = x * x * 1e-6
    elif kind == "exponents":
        x = np.copysign(np.exp2(rng.uniform(-30, 0, x.shape)), x)
    elif kind == "near one":
        x = np.copysign(1 - rng.uniform(0, 0.2, x.shape), x)
    elif kind == "subnormal":
        x = x * 1e-41
    elif kind == "huge":
        x = x * 1e37
    elif kind == "mostly zero":
        x = np.where(rng.uniform(size=x.shape) < 0.9, 0, x)
    x = x.astype(F)
    x[::2] /= np.abs(x[::2]).max(axis=1, keepdims=True) + F(1e-45)
    x[::2, 0] = 1
    x[::2] *= np.exp2(np.floor(np.log2(np.abs(x[1::2]).max(axis=1, keepdims=True) + F(1e-45))))
    return np.abs(x) if not format["signed"] else x


def domain(format, values, top):
    """Values where the format measures distances; `top` is the largest magnitude of the block's table."""
    with np.errstate(divide="ignore", invalid="ignore"):
        if format["domain"] == "log2":  # magnitudes outside count as the ends
            return np.log2(np.clip(np.abs(values), 2.0**-126, 2.0**126))
        if format["domain"] == "sqrt":
            return np.sqrt(values)
        if format["domain"] == "softsign":
            n = values / top
            return 2 * n / (1 + np.abs(n))
    assert format["domain"] == "linear", f"write the domain {format['domain']!r} into this test"
    return values


@pytest.mark.parametrize("format", CODED, ids=ids)
def test_codes_are_brute_force_nearest(format, isa):
    """Within the rounding of z (2^-20 of a gap) no other code lies nearer; the error is at most half a gap; zero rules hold."""
    checked = exact = 0
    for kind in KINDS:
        x = blocks(format, kind)
        codes, scales = ops.encode(torch.from_numpy(x), format["name"], 256)
        got = unpack(format, codes, 256)
        for row, table, chosen in zip(
            x.astype(np.float64), tables(format, scales), got, strict=True
        ):
            used = np.isfinite(table)
            values, place = np.unique(table[used] + 0.0, return_index=True)  # ascending
            meant = table[chosen]
            assert np.isfinite(meant).all()
            if values.size == 1:  # a block without anything in it
                assert (row == 0).all() or values[0] != 0
                continue
            top = np.abs(values).max()
            positive = row > 0
            if not format["signed"]:
                assert (meant[positive] > 0).all(), "a positive value became zero"
            zero = row == 0
            least = np.abs(values).min()
            assert (np.abs(meant[zero]) <= least).all(), "a zero is kept, or the least there is"
            # the candidates for a value other than zero: those of its sign where logarithms are compared
            for sign in (1.0, -1.0) if format["signed"] else (1.0,):
                mine = (np.sign(row) == sign) & ~zero
                if format["domain"] == "log2":
                    entries = np.sort(np.abs(values[np.sign(values) == sign]))
                    mine &= meant != 0
                    lost = (np.sign(row) == sign) & (meant == 0) & ~zero
                    assert (np.abs(row[lost]) <= entries[0] * 0.50001).all()
                elif not format["signed"]:
                    entries = values[values > 0]
                else:
                    entries = values
                if not mine.any():
                    continue
                wanted = domain(
                    format, np.abs(row[mine]) if format["domain"] == "log2" else row[mine], top
                )
                kept = domain(
                    format, np.abs(meant[mine]) if format["domain"] == "log2" else meant[mine], top
                )
                lattice = np.sort(domain(format, entries, top))
                at = (
                    np.clip(np.searchsorted(lattice, wanted), 1, len(lattice) - 1)
                    if len(lattice) > 1
                    else None
                )
                best = np.abs(wanted[:, None] - lattice[None]).min(axis=1)
                error = np.abs(kept - wanted)
                gap = lattice[at] - lattice[at - 1] if at is not None else np.zeros_like(wanted)
                slack = 2.0**-20 * gap + 3e-7 * np.maximum(np.abs(wanted), np.abs(kept))
                if format["bits"] > 8:  # logarithms of float32 accuracy beside steps of 1 / 65534
                    slack += 0.03 * gap
                if (
                    format["scale_dtype"] == "float16"
                ):  # codes are those of the scale before rounding
                    slack += 2.0**-10 * np.abs(wanted)
                if format["domain"] == "linear" and top == 1.0:
                    slack = 0 * gap  # z is exact here
                    exact += len(wanted)
                assert (error <= best + slack).all(), f"{kind}: a nearer code exists"
                inside = (wanted >= lattice[0]) & (wanted <= lattice[-1])
                assert (error[inside] <= gap[inside] / 2 + slack[inside]).all()
                checked += len(wanted)
    assert checked > 3000
    print(
        f"{format['name']} on {isa}: {checked} values, every code is the nearest ({exact} of them without rounding)"
    )


@pytest.mark.parametrize("format", CODED, ids=ids)
def test_every_code_survives_a_round_trip(format, isa):
    """Decoded and encoded again a block has the same scale and codes, if it has its largest value."""
    x = blocks(format, "normal", rows=2)
    _, scales = ops.encode(torch.from_numpy(x), format["name"], 256)
    table = tables(format, scales)[0]
    values = np.unique(table[np.isfinite(table)]).astype(F)
    if not format["signed"]:
        values = values[values >= 0]  # 8-bit floats have a sign that is not used
    largest = values[np.argmax(np.abs(values))]
    assert np.abs(values).max() >= np.abs(x[0]).max() * 0.99
    for piece in np.array_split(values, max(1, len(values) // 200)):
        row = torch.from_numpy(np.concatenate([[largest], piece, piece[:1]]).astype(F))[None]
        codes, again = ops.encode(row, format["name"], 256)
        back = ops.decode(codes, again, format["name"], 256, row.shape[1])
        if (
            format["domain"] == "log2"
        ):  # the least value of the block moves the scale: then by a step
            torch.testing.assert_close(back, row, rtol=0.5, atol=0)
        else:
            torch.testing.assert_close(
                back, row, rtol=3e-7 if format["scale_dtype"] == "float32" else 2e-3, atol=0
            )


@pytest.mark.parametrize("format", CODED, ids=ids)
def test_zero_rules(format, isa):
    name, block = format["name"], format["block"]
    codes, scales = ops.encode(torch.zeros(2, block + 3), name, block)
    assert (ops.decode(codes, scales, name, block, block + 3) == 0).all()
    assert (ops.decode(codes, torch.zeros_like(scales), name, block, block + 3) == 0).all()
    if format["signed"]:
        return
    x = torch.zeros(1, block)
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


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(0, 4),
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
    for format in CODED:
        name = format["name"]
        value = x if format["signed"] else x.abs()
        results = []
        for isa in ISAS:
            ops.set_isa(isa)
            codes, scales = ops.encode(value, name, block)
            results.append((codes, scales, ops.decode(codes, scales, name, block, cols)))
        ops.set_isa(before)
        for other in results[1:]:
            for a, b in zip(results[0], other, strict=True):
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name
        codes, scales, _ = results[-1]
        assert codes.shape == (rows, -(-cols * format["bits"] // 8))
        assert scales.shape == (rows, -(-cols // block) * format["scale_numbers"])
        left = cols * format["bits"] % 8  # bits behind the last code are zero
        assert not left or not (codes[:, -1].int() >> left).any()
        cut = rows // 2
        for part, where in ((value[:cut], slice(0, cut)), (value[cut:], slice(cut, rows))):
            sliced = ops.encode(part.contiguous(), name, block)
            assert torch.equal(sliced[0], codes[where]) and torch.equal(sliced[1], scales[where])


def stored(format, values, stochastic, seed=0, t=1):
    """What a step leaves of a state that is exactly `values` [rows, cols] (squares for an unsigned format), decoded."""
    rows, cols = values.shape
    slot = 0 if format["signed"] else 1
    names = ["float32", "float32"]
    names[slot] = format["name"]
    plan = plan_row(rows, cols, names, stochastic=[k == slot and stochastic for k in range(2)])
    kept = list(ops.encode(torch.zeros(rows, cols), format["name"], format["block"]))
    wide = [torch.zeros(rows, cols)]
    state = kept + wide if slot == 0 else wide + kept
    hyper = [0.0, 0.0, 0.0, 1.0, 0.0]  # lr, both betas, eps, decay: m = g, v = g^2
    p, steps = torch.zeros(rows, cols), [torch.tensor(float(t - 1))]
    ops.step("adamw", [p], [values], state, steps, plan, hyper, seed=seed)
    return ops.decode(*kept, format["name"], format["block"], cols)


@pytest.mark.parametrize("format", CODED, ids=ids)
def test_stochastic_codes_keep_the_mean(format):
    """Between two entries the mean of many is the value, to 4 standard errors, and both entries are met; other seeds draw other bits."""
    if format["domain"] != "linear":
        return  # in another domain it is that domain's mean that is kept
    rng = np.random.default_rng(1)
    for z in (0.9, 0.3, 0.0371, 0.0042):
        x = torch.full((400, 256), z, dtype=torch.float32)
        x[:, ::128] = 1.0
        exact = x if format["signed"] else x * x
        got = stored(format, x, True, seed=int(rng.integers(1 << 40)))
        mine = torch.ones_like(x, dtype=torch.bool)
        mine[:, ::128] = False
        values, value = got[mine].double(), float(exact[0, 1].double())
        entries = values.unique()
        assert len(entries) <= 2
        nearest = stored(format, x, False)[mine].double().unique()
        assert len(nearest) == 1 and nearest[0] in entries
        if len(entries) == 2:
            assert entries[0] <= value <= entries[1]
            error = values.std() / np.sqrt(len(values)) + 2.0**-16 * (entries[1] - entries[0])
            assert abs(values.mean() - value) <= 4 * error, (z, float(values.mean()))
            other = stored(format, x, True, seed=99)
            assert not torch.equal(other, got)
        if not format["signed"]:
            assert (values > 0).all()


MEASURED = [s for s in CODED if s["measurable"]]


@pytest.mark.parametrize("scale", ["row", "column", "tensor", "rank1"])
def test_measured_scales_are_maxima(scale):
    """Every element's scale is the least of the maxima that cover it, for two and for four dimensions; codes are those of that scale."""
    for shape in [(64, 100), (9, 8, 5, 16)]:
        generator = torch.Generator().manual_seed(7)
        g = torch.randn(shape, generator=generator) * torch.exp2(
            torch.randint(-8, 8, shape, generator=generator)
        )
        matrix = g.reshape(shape[0], -1)
        for format in MEASURED:
            slot = "exp_avg" if format["signed"] else "exp_avg_sq"
            p = nn.Parameter(torch.zeros(shape))
            spec = {slot: lowbit.scaled(format["name"], scale=scale)}
            opt = lowbit.AdamW([p], lr=0.0, betas=(0.0, 0.0), state_format=spec, min_numel=0)
            p.grad = g.clone()
            opt.step()
            x = g if format["signed"] else g * g
            absolute = x.abs().numpy().reshape(shape)
            if scale == "rank1":
                covers = [
                    absolute.max(axis=tuple(k for k in range(len(shape)) if k != d), keepdims=True)
                    for d in range(len(shape))
                ]
                want = np.broadcast_arrays(*covers)
                most = np.minimum.reduce(want).reshape(matrix.shape)
            else:
                flat = absolute.reshape(matrix.shape)
                axis = {"row": 1, "column": 0, "tensor": None}[scale]
                most = np.broadcast_to(flat.max(axis=axis, keepdims=True), matrix.shape)
            codes = ops.encode_given(
                x.reshape(matrix.shape), torch.from_numpy(most.copy()), format["name"]
            )
            assert torch.equal(opt.state[p][f"{slot}_{format['name']}"], codes), format["name"]
            back = ops.decode_given(codes, torch.from_numpy(most.copy()), format["name"])
            if format["domain"] == "linear" and format["bits"] == 8:
                assert (
                    (back - x.reshape(matrix.shape)).abs() <= torch.from_numpy(most) * 0.04
                ).all()
            opt.step()  # from what was stored
            assert p.isfinite().all()


@pytest.mark.parametrize(
    "name, golden", [("dynamic8", "dynamic8_signed"), ("dynamic8_unsigned", "dynamic8_unsigned")]
)
def test_dynamic8_map_is_the_peers(name, golden):
    entry = json.loads((GOLDEN / "dynamic8_maps.json").read_text())[golden]
    want = np.array([int(h, 16) for h in entry["float32_hex"]], dtype=np.uint32)
    format = next(f for f in CODED if f["name"] == name)
    table = tables(format, torch.ones(1, 1))[0].astype(F)
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


NEW_FORMAT = """// Five bits: multiples of 1/15.
#pragma once
#include "core/scale/block.h"
namespace lowbit {
struct Fifteenths {
  static constexpr const char *kName = "fifteenths", *kDtype = "uint8", *kDomain = "linear";
  static constexpr int kBits = 5, kBlock = 64;
  static constexpr bool kScaled = true, kSigned = true;
  static constexpr uint32_t kZeroCode = 15;
  using Storage = uint8_t;
  using Scale = BlockScale;
  LB_HD static float decode(uint32_t code) {
    return static_cast<float>(static_cast<int>(code) - 15) / 15.0f;
  }
  LB_HD static uint32_t encode(float z) {
    uint32_t code = 0;  // twice a sum of two entries is exact enough to compare with
    for (int k = 1; k <= 30; ++k)
      code += 2.0 * z >= static_cast<double>(decode(k - 1)) + static_cast<double>(decode(k));
    return code;
  }
  LB_HD static uint32_t neighbour(uint32_t code, bool up) {
    return up ? (code < 30 ? code + 1 : code) : (code > 0 ? code - 1 : code);
  }
};
}  // namespace lowbit
"""


def test_a_new_format_is_one_header_and_one_line(tmp_path):
    """A format that this test adds is built, listed, encoded, stepped and tested like every other."""
    tools = [shutil.which("cmake"), shutil.which("ninja"), shutil.which("c++")]
    need("compiler", all(tools), "building a new format takes cmake, ninja and a C++ compiler")
    for name in ("csrc", "lowbit", "tests", "CMakeLists.txt", "pyproject.toml", "README.md"):
        source = ROOT / name
        skip = shutil.ignore_patterns("*.so", "__pycache__", "cpp")
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=skip)
        else:
            shutil.copy(source, tmp_path / name)
    (tmp_path / "csrc/core/state/fifteenths.h").write_text(NEW_FORMAT)
    registry = tmp_path / "csrc/core/registry.h"
    text = registry.read_text().replace("#include \"core/state/float32.h\"", "#include \"core/state/fifteenths.h\"\n#include \"core/state/float32.h\"")  # fmt: skip
    registry.write_text(text.replace("Companded8Unsigned>", "Companded8Unsigned, Fifteenths>"))
    build = tmp_path / "build"
    configure = ["cmake", "-S", str(tmp_path), "-B", str(build), "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}"]  # fmt: skip
    configure += ["-DLOWBIT_TOOLS=OFF", "-DLOWBIT_CUDA=OFF"]
    subprocess.run(configure, check=True, capture_output=True)
    done = subprocess.run(["cmake", "--build", str(build), "--target", "_ops"], capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    shutil.copy(build / "csrc" / "_ops.so", tmp_path / "lowbit" / "_ops.so")
    program = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in type(f).__name__.lower()]; "
        f"sys.path.insert(0, {str(tmp_path)!r}); sys.path.insert(0, {str(tmp_path / 'tests')!r}); "
        "import pytest; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '-k', 'fifteenths and not drift', 'tests/test_state.py', 'tests/test_update.py']))"
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout
    print(ran.stdout.strip().splitlines()[-1])
