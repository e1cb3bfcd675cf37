"""nvcc's PTX in words that GPGPU-Sim executes: `python ptx.py FROM TO [--mistake]`.

Each instruction that the simulator does not know, or does not execute by the PTX ISA, becomes a
sequence of older ones with the same results. The two approximations that kernels bracket, which the
simulator computes exactly, err by a step of the last bit here, one way, the other, or not at all,
as a GPU's may (csrc/cuda/arithmetic.cuh). --mistake changes one constant of Philox, for a run that
must fail.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

# Registers of our own. A kernel declares them once,
# and each sequence writes them before it reads them.
DECLARED = "\t.reg .b32 \t%xr<8>;\n\t.reg .f32 \t%xf<2>;\n\t.reg .pred \t%xp<2>;\n"
FULL_WARP = 31  # the clamp of a shuffle among 32 lanes
PHILOX, MISTAKE = "-766435501", "-766435499"


def dot(halves: bool) -> Callable[..., list[str]]:
    """dp4a and dp2a.lo, unsigned: the sum of products of bytes,
    or of halves with the lower bytes.
    """

    def lines(to: str, a: str, b: str, c: str) -> list[str]:
        made, width = [f"mov.b32 %xr2, {c};"], 16 if halves else 8
        for i in range(2 if halves else 4):
            made += [
                f"bfe.u32 %xr0, {a}, {width * i}, {width};",
                f"bfe.u32 %xr1, {b}, {8 * i}, 8;",
                "mul.lo.u32 %xr0, %xr0, %xr1;",
                "add.u32 %xr2, %xr2, %xr0;",
            ]
        return [*made, f"mov.b32 {to}, %xr2;"]

    return lines


def warp_max(to: str, a: str, mask: str) -> list[str]:
    """redux.sync.max of a whole warp, by shuffles."""
    made = [f"mov.b32 %xr0, {a};"]
    for span in (1, 2, 4, 8, 16):
        made += [
            f"shfl.sync.bfly.b32 %xr1, %xr0, {span}, {FULL_WARP}, {mask};",
            "max.u32 %xr0, %xr0, %xr1;",
        ]
    return [*made, f"mov.b32 {to}, %xr0;"]


def max_nan(to: str, a: str, b: str) -> list[str]:
    """The larger one, or the canonical NaN if either is a NaN."""
    return [
        f"setp.nan.f32 %xp0, {a}, {b};",
        f"max.f32 %xf0, {a}, {b};",
        f"selp.f32 {to}, 0f7FFFFFFF, %xf0, %xp0;",
    ]


def two_bfloat16(to: str, high: str, low: str) -> list[str]:
    """Both rounded to the nearest bfloat16, ties to even; NaN is 0x7fff."""
    made = []
    for register, value in (("%xr3", high), ("%xr4", low)):
        made += [
            f"mov.b32 %xr0, {value};",
            "shr.u32 %xr1, %xr0, 16;",
            "and.b32 %xr1, %xr1, 1;",
            "add.u32 %xr1, %xr1, 32767;",
            "add.u32 %xr1, %xr0, %xr1;",
            "shr.u32 %xr1, %xr1, 16;",
            "and.b32 %xr0, %xr0, 2147483647;",
            "setp.gt.u32 %xp0, %xr0, 2139095040;",
            f"selp.b32 {register}, 32767, %xr1, %xp0;",
        ]
    return [*made, "shl.b32 %xr3, %xr3, 16;", f"or.b32 {to}, %xr3, %xr4;"]


def shift_amount(to: str, a: str) -> list[str]:
    """bfind.shiftamt: the leading zeros, and all ones if there is no one."""
    return [
        f"clz.b32 %xr0, {a};",
        f"setp.eq.u32 %xp0, {a}, 0;",
        f"selp.b32 {to}, -1, %xr0, %xp0;",
    ]


def permute(to: str, a: str, b: str, digits: str) -> list[str]:
    """prmt with a digit of 8 or more, which stands for the sign of a byte."""
    made = ["mov.b32 %xr2, 0;"]
    for i in range(4):
        digit = int(digits) >> 4 * i & 15
        source, byte = (a, b)[digit >> 2 & 1], 8 * (digit & 3)
        take = (
            f"bfe.s32 %xr0, {source}, {byte + 7}, 1;"
            if digit & 8
            else f"bfe.u32 %xr0, {source}, {byte}, 8;"
        )
        made += [
            take,
            "and.b32 %xr0, %xr0, 255;",
            f"shl.b32 %xr0, %xr0, {8 * i};",
            "or.b32 %xr2, %xr2, %xr0;",
        ]
    return [*made, f"mov.b32 {to}, %xr2;"]


def add_down(to: str, a: str, b: str) -> list[str]:
    """a + b, rounded down, for an integer b beyond 2^23, beside which a sum has no fraction."""
    return [f"cvt.rmi.f32.f32 %xf0, {a};", f"add.f32 {to}, %xf0, {b};"]


def off_by_a_step(exact: str) -> Callable[..., list[str]]:
    """An approximation that flushes subnormal numbers: a normal result is a step below, the exact
    one, or a step above, as a hash of its bits says.
    """

    def lines(to: str, a: str) -> list[str]:
        flush = [
            "mov.b32 %xr0, {0};",
            "and.b32 %xr1, %xr0, 2147483647;",
            "and.b32 %xr2, %xr0, -2147483648;",
            "setp.lt.u32 %xp0, %xr1, 8388608;",
            "selp.b32 %xr0, %xr2, %xr0, %xp0;",
        ]
        step = [
            "mul.lo.u32 %xr1, %xr0, -1640531527;",
            "rem.u32 %xr1, %xr1, 3;",
            "add.u32 %xr1, %xr1, %xr0;",
            "sub.u32 %xr1, %xr1, 1;",
            "sub.u32 %xr2, %xr0, 8388608;",
            "setp.lt.u32 %xp0, %xr2, 2130706432;",
            "selp.b32 %xr0, %xr1, %xr0, %xp0;",
        ]
        return [
            *(line.format(a) for line in flush),
            "mov.b32 %xf0, %xr0;",
            f"{exact} %xf1, %xf0;",
            *(line.format("%xf1") for line in flush),
            *step,
            f"mov.b32 {to}, %xr0;",
        ]

    return lines


SEQUENCES: dict[str, Callable[..., list[str]]] = {
    "dp4a.u32.u32": dot(halves=False),
    "dp2a.lo.u32.u32": dot(halves=True),
    "redux.sync.max.u32": warp_max,
    "max.NaN.f32": max_nan,
    "add.rm.f32": add_down,
    "prmt.b32": permute,
    "cvt.rn.bf16x2.f32": two_bfloat16,
    "bfind.shiftamt.u32": shift_amount,
    "sqrt.approx.ftz.f32": off_by_a_step("sqrt.rn.f32"),
    "rcp.approx.ftz.f32": off_by_a_step("rcp.rn.f32"),
}
INSTRUCTION = re.compile(r"\t(@!?%p\d+ )?([a-z][\w.]*)\s+(.*);")


def takes_signs(digits: str) -> bool:
    """Whether a selector of prmt has a digit of 8 or more. Those in registers have none."""
    return digits.isdigit() and int(digits) & 0x8888 != 0


def rewritten(line: str) -> str:
    """A line of PTX, or the lines that stand for it."""
    found = INSTRUCTION.fullmatch(line)
    if found is None or found[2] not in SEQUENCES:
        return line
    if found[2] == "prmt.b32" and not takes_signs(found[3].split(", ")[3]):
        return line
    if found[1]:
        raise ValueError(f"{line.strip()}: a predicated instruction has no sequence")
    return "\n".join("\t" + made for made in SEQUENCES[found[2]](*found[3].split(", ")))


def without_shuffle_predicates(text: str) -> str:
    """A shuffle tells whether its source lane exists; the simulator does not,
    and no kernel asks.
    """
    made = []
    for kernel in re.split(r"(?=^\.visible \.entry)", text, flags=re.MULTILINE):
        for predicate in re.findall(r"shfl\.sync\.\w+\.b32\s+%r\d+\|(%p\d+)", kernel):
            if len(re.findall(re.escape(predicate) + r"\b", kernel)) > 1:
                raise ValueError(f"the predicate {predicate} of a shuffle is read")
        made.append(re.sub(r"(shfl\.sync\.\w+\.b32\s+%r\d+)\|%p\d+", r"\1", kernel))
    return "".join(made)


def rewrite(text: str, mistake: bool = False) -> str:
    """A whole file."""
    text = without_shuffle_predicates(text)
    text = re.sub(r"^\{\n(?=\t\.reg)", "{\n" + DECLARED, text, flags=re.MULTILINE)
    text = "\n".join(rewritten(line) for line in text.split("\n"))
    if not mistake:
        return text
    if PHILOX not in text:
        raise ValueError(f"no instruction multiplies by {PHILOX}: the mistake cannot be planted")
    return text.replace(PHILOX, MISTAKE)


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(
        rewrite(Path(sys.argv[1]).read_text(), "--mistake" in sys.argv[3:])
    )
