"""`make simulate` without a simulator: what it says is missing, and the PTX that it would run
(tests/cpp/simulator/ptx.py).
"""

import importlib.util
import re
import struct
import subprocess

import pytest

from tests.support.paths import ROOT

FOLDER = ROOT / "tests" / "cpp" / "simulator"


def module(name):
    spec = importlib.util.spec_from_file_location(f"simulator_{name}", FOLDER / f"{name}.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


ptx, run = module("ptx"), module("run")


def bits(x):
    return struct.unpack("<I", struct.pack("<f", x))[0]


def number(word):
    return struct.unpack("<f", struct.pack("<I", word))[0]


INTEGER = {
    "mov.b32": lambda a: a,
    "bfe.u32": lambda a, at, width: a >> at & (1 << width) - 1,
    "mul.lo.u32": lambda a, b: a * b,
    "bfe.s32": lambda a, at, width: -(a >> at & 1),
    "add.u32": lambda a, b: a + b,
    "sub.u32": lambda a, b: a - b,
    "rem.u32": lambda a, b: a % b,
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "clz.b32": lambda a: 32 - a.bit_length(),
    "setp.gt.u32": lambda a, b: a > b,
    "setp.lt.u32": lambda a, b: a < b,
    "setp.eq.u32": lambda a, b: a == b,
    "selp.b32": lambda a, b, first: a if first else b,
    "sqrt.rn.f32": lambda a: bits(number(a) ** 0.5),
    "rcp.rn.f32": lambda a: bits(1 / number(a)),
}


def execute(instruction, **registers):
    """What a line of PTX leaves in %r9 as it is rewritten: 32-bit words, integer instructions
    (bfe.s32 of one bit) and exact roots alone.
    """
    held = {f"%{name}": value for name, value in registers.items()}
    for line in ptx.rewritten("\t" + instruction).split("\n"):
        name, operands = re.fullmatch(r"\t([\w.]+) +(.*);", line).groups()
        to, *given = operands.split(", ")
        values = [held[word] if word.startswith("%") else int(word) & 0xFFFFFFFF for word in given]
        held[to] = int(INTEGER[name](*values)) & 0xFFFFFFFF
    return held["%r9"]


WORDS = (0, 1, 0x80000000, 0x01020304, 0xFFFEFDFC, 0x80FF7F01, 0xFFFFFFFF)


@pytest.mark.parametrize("a", WORDS)
@pytest.mark.parametrize("b", (0x04000000, 0x00000400, 0xFFFEFDFC))
def test_sequences_compute_what_the_instruction_does(a, b):
    both = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    products = [x * y for x, y in zip(both[:4], both[4:], strict=True)]
    assert execute("dp4a.u32.u32 %r9, %r1, %r2, %r3;", r1=a, r2=b, r3=7) == sum(products) + 7
    halves = (a & 0xFFFF) * both[4] + (a >> 16) * both[5]
    assert execute("dp2a.lo.u32.u32 %r9, %r1, %r2, 7;", r1=a, r2=b) == halves + 7 & 0xFFFFFFFF
    taken = bytes((255 * (both[3] >> 7), 255 * (both[7] >> 7), both[0], both[0]))  # 0x00fb
    assert execute("prmt.b32 %r9, %r1, %r2, 251;", r1=a, r2=b) == int.from_bytes(taken, "little")
    assert execute("bfind.shiftamt.u32 %r9, %r1;", r1=a) == (
        32 - a.bit_length() if a else 0xFFFFFFFF
    )


def test_bfloat16_rounds_to_even():
    pairs = {
        0x3F800000: 0x3F80,
        0x3F808000: 0x3F80,
        0x3F818000: 0x3F82,
        0x3F808001: 0x3F81,
        0x7F7FFFFF: 0x7F80,
        0xFF800000: 0xFF80,
        0x7FC12345: 0x7FFF,
        0xFFC00000: 0x7FFF,
    }
    for high, rounded in pairs.items():
        for low, other in pairs.items():
            got = execute("cvt.rn.bf16x2.f32 %r9, %r1, %r2;", r1=high, r2=low)
            assert got == rounded << 16 | other, (hex(high), hex(low))


@pytest.mark.parametrize("name", ("sqrt", "rcp"))
def test_approximations_err_by_a_step_at_most_and_flush_subnormal_numbers(name):
    exact = {"sqrt": lambda x: x**0.5, "rcp": lambda x: 1 / x}[name]
    errors = set()
    for word in range(0x3F800000, 0x40800000, 123457):
        got = execute(f"{name}.approx.ftz.f32 %r9, %r1;", r1=word)
        errors.add(got - bits(exact(number(word))))
    assert errors == {-1, 0, 1}
    if name == "sqrt":
        assert execute("sqrt.approx.ftz.f32 %r9, %r1;", r1=0x007FFFFF) == 0


KERNEL = """.visible .entry one(
	.param .u64 one_param_0
)
{
	.reg .b32 	%r<9>;
	.reg .pred 	%p<3>;

	shfl.sync.bfly.b32 %r1|%p1, %r2, 16, 31, %r3;
	redux.sync.max.u32 %r4, %r4, %r3;
	mul.wide.u32 	%rd1, %r5, -766435501;
	ret;
}
"""


def test_a_kernel():
    made = ptx.rewrite(KERNEL)
    assert "redux" not in made and made.count("shfl.sync.bfly") == 6 and "|%p1" not in made
    assert made.index("%xr<") < made.index("shfl")
    assert "-766435501" in made and "-766435501" not in ptx.rewrite(KERNEL, mistake=True)


@pytest.mark.parametrize(
    "line, reason",
    [
        ("@%p2 redux.sync.max.u32 %r4, %r4, %r3;", "predicated"),
        ("@%p1 bra $L1;", "the predicate %p1 of a shuffle is read"),
    ],
)
def test_what_cannot_be_rewritten_is_an_error(line, reason):
    with pytest.raises(ValueError, match=reason):
        ptx.rewrite(KERNEL.replace("\tret;", f"\t{line}\n\tret;"))
    with pytest.raises(ValueError, match="cannot be planted"):
        ptx.rewrite("", mistake=True)


def test_what_is_missing_is_said_in_one_line(tmp_path):
    done = subprocess.run(
        ["make", "simulate", f"PY={run.sys.executable}", "SIM="],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert (
        len(said) == 1
        and "make simulate needs SIM=FOLDER" in said[0]
        and "docs/kernels/cuda-tests.md" in said[0]
    )
    assert "has no libcuda/gpgpu_context.h" in run.missing(str(tmp_path))
    for name in run.NEEDED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert run.missing(str(tmp_path)) in (
        None,
        "make simulate: nvcc, which makes the PTX, is not on PATH",
    )


def test_results_are_read():
    text = (
        "noise\nFAILED adamw: parameter\n232 passed, 17 failed\n21 of 1804 cases\nmore\n"
        "110 launches, 26400000 instructions\n"
    )
    result = run.Result("shapes", text, 1, 56.0)
    assert result.finished and not result.passed and result.failures == ["FAILED adamw: parameter"]
    assert str(result) == (
        "shapes: 21 of 1804 cases, 232 passed, 17 failed; 110 launches, 26.4 million "
        "instructions of threads, 56 s"
    )
    good = run.Result("once", "61 passed, 0 failed\n40 launches, 5 instructions\n", 0, 1.0)
    assert good.passed
    assert not run.Result(
        "once", "61 passed, 0 failed\n0 launches, 0 instructions\n", 0, 1.0
    ).passed
    assert "without a result" in str(run.Result("once", "", -6, 1.0))
