"""Resources of each kernel, from the cubins that nvcc keeps:
`python resources.py FOLDER [FILE] [--lenient]`.

Reads the ELF files itself, so it needs neither cuobjdump nor a GPU. Prints, or writes to FILE, one
table per architecture: registers per thread, bytes of shared memory per block, instructions, and
how many of them move 16 bytes between a thread and global memory. A second table has what the fixed
kernels execute for a tile of 256 values (usual_path.py): instructions by pipe, the clocks of issue
and of the ALU, and wavefronts of shared memory, beside the clocks that memory needs for the bytes.
A third has the instructions of step_any for a tile (any_path.py), beside those of the fixed kernel
where the rule has one.

Exits with 1 if no cubin is found, if a kernel uses local memory (a stack frame for spilled
registers or for an array that is indexed at run time), or if a kernel executes more for a tile than
tile_limits.txt allows. With --lenient the last two are reported only. --set-limits writes
tile_limits.txt: what was counted.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import any_path
import usual_path

# CUDA's binary format: attributes of .nv.info, and the encoding of instructions since sm_70.
REGISTERS, FRAME = 0x2F, 0x11
HAS_WORD, HAS_BYTES = 0x03, 0x04
INSTRUCTION = 16
NOP, LOAD, STORE = 0x918, 0x981, 0x986
SIZE_AT, SIZE_128 = 73, 6
LIMITS = Path(__file__).with_name("tile_limits.txt")


@dataclass
class Kernel:
    """One kernel on one architecture; sizes in bytes."""

    name: str
    registers: int = 0
    frame: int = 0
    shared: int = 0
    instructions: int = 0
    wide_loads: int = 0
    wide_stores: int = 0
    tile: usual_path.Path | None = None  # of a fixed kernel
    any: list[tuple[any_path.Combination, int]] | None = None  # of step_any
    unreadable: str = ""  # why there is none


@dataclass
class Section:
    name: str
    data: bytes
    size: int


def sections_of(elf: bytes) -> list[Section]:
    (at,) = struct.unpack_from("<Q", elf, 40)
    entry, count, names = struct.unpack_from("<HHH", elf, 58)
    heads = [struct.unpack_from("<IIQQQQIIQQ", elf, at + i * entry) for i in range(count)]
    text = heads[names][4]
    made = []
    for name, kind, _, _, offset, size, *_ in heads:
        begin = text + name
        label = elf[begin : elf.index(b"\0", begin)].decode()
        made.append(Section(label, b"" if kind == 8 else elf[offset : offset + size], size))
    return made


def attributes(info: bytes) -> list[tuple[int, bytes]]:
    """The attributes of an .nv.info section: form, number, and the value,
    whose size depends on the form.
    """
    found, at = [], 0
    while at + 4 <= len(info):
        form, number, length = struct.unpack_from("<BBH", info, at)
        size = length if form == HAS_BYTES else 0
        found.append((number, info[at + 4 : at + 4 + size]))
        at += 4 + size
    return found


def symbols(sections: dict[str, Section]) -> list[str]:
    text, table = sections[".strtab"].data, sections[".symtab"].data
    names = [struct.unpack_from("<I", table, at)[0] for at in range(0, len(table), 24)]
    return [text[n : text.index(b"\0", n)].decode() for n in names]


def count(kernel: Kernel, code: bytes, arch: str) -> None:
    words = [
        int.from_bytes(code[i : i + INSTRUCTION], "little")
        for i in range(0, len(code), INSTRUCTION)
    ]
    while words and words[-1] & 0xFFF == NOP:  # padding to a full cache line
        words.pop()
    kernel.instructions = len(words)
    wide = [w & 0xFFF for w in words if w >> SIZE_AT & 7 == SIZE_128]
    kernel.wide_loads, kernel.wide_stores = wide.count(LOAD), wide.count(STORE)
    if "step_fast" in kernel.name and arch.isdigit():
        kernel.tile = usual_path.measure(code, arch, usual_path.functions_of(kernel.name))
    if "step_any" in kernel.name and arch.isdigit() and int(arch) < any_path.JUMP_TABLES:
        try:
            kernel.any = any_path.measure(code, arch)
        except any_path.Unexpected as why:
            kernel.unreadable = str(why)


def kernels_of(elf: bytes, arch: str) -> list[Kernel]:
    sections = {s.name: s for s in sections_of(elf)}
    kernels = {}
    for name, section in sections.items():
        if name.startswith(".text."):
            kernel = kernels[name[6:]] = Kernel(name[6:])
            count(kernel, section.data, arch)
            shared = sections.get(".nv.shared." + kernel.name)
            kernel.shared = shared.size if shared else 0
    named = symbols(sections)
    for number, value in attributes(sections[".nv.info"].data):
        if number not in (REGISTERS, FRAME):
            continue
        symbol, amount = struct.unpack_from("<II", value)
        if named[symbol] in kernels:
            setattr(kernels[named[symbol]], "registers" if number == REGISTERS else "frame", amount)
    return list(kernels.values())


def readable(names: list[str]) -> list[str]:
    """Demangled names without parameters and namespaces; unchanged if c++filt is missing."""
    if shutil.which("c++filt") is None:
        return names
    out = subprocess.run(["c++filt"], input="\n".join(names), text=True, capture_output=True).stdout
    short = []
    for name in out.splitlines():
        name = re.sub(r"lowbit::(cuda::)?", "", name).removeprefix("void ")
        # the type of an enumerator, which c++filt prints as a number
        name = re.sub(r"\(\w+\)(?=\d)", "", name)
        short.append(re.sub(r"\((?!anonymous).*", "", name))
    return short


def limits() -> dict[tuple[str, str], tuple[int, int]]:
    """The most instructions and wavefronts of a tile, by architecture and kernel."""
    if not LIMITS.exists():
        return {}
    found = {}
    for line in LIMITS.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            arch, instructions, wavefronts, name = line.split(maxsplit=3)
            found[arch, name] = int(instructions), int(wavefronts)
    return found


def write_limits(counted: dict[tuple[str, str], tuple[int, int]]) -> None:
    lines = [
        (
            "# The most that a kernel executes for a tile of 256 values, counted by resources.py "
            "with CUDA 13.0. A build with more fails."
        ),
        "# architecture, instructions, wavefronts of shared memory (0: not counted), kernel",
    ]
    for (arch, name), (instructions, wavefronts) in sorted(
        counted.items(), key=lambda item: (int(item[0][0]), item[0][1])
    ):
        lines.append(f"{arch} {instructions} {wavefronts} {name}")
    LIMITS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def print_tiles(arch: str, tiles: list[tuple[str, usual_path.Path]], out: TextIO) -> list[str]:
    """The table of what a tile takes; returns what is wrong with it."""
    bad = []
    allowed = limits()
    cards = usual_path.CARDS[usual_path.family(arch)]
    named = "".join(f"{card.name.replace(' ', '') + ' clk':>12} " for card in cards)
    print(
        f"\nsm_{arch}: a tile of 256 values, in clocks of a multiprocessor; "
        "what memory needs is by card",
        file=out,
    )
    print(
        f"{'instructions':>12} {'alu':>4} {'fp32':>4} {'imad':>4} {'xu':>3} {'memory':>6} "
        f"{'control':>7} {'uniform':>7} {'issue clk':>9} {'alu clk':>7} {'wavefronts':>10} "
        f"{'bytes':>6} {named} kernel",
        file=out,
    )
    for name, tile in tiles:
        p = tile.pipes
        needed = "".join(f"{tile.memory_clocks(card):12.0f} " for card in cards)
        print(
            f"{tile.instructions:12} {p['alu']:4} {p['fp32']:4} {p['imad']:4} {p['xu']:3} "
            f"{p['memory']:6} {p['control']:7} {p['uniform']:7} {tile.instructions / 4:9.0f} "
            f"{p['alu'] / 2:7.0f} {tile.wavefronts:10.0f} {tile.bytes:6} {needed} {name}",
            file=out,
        )
        if tile.unknown:
            bad.append(
                f"sm_{arch}: {name} has operations that usual_path.py does not know: "
                f"{sorted({hex(u) for u in tile.unknown})}"
            )
        most = allowed.get((arch, name))
        if most and (tile.instructions > most[0] or round(tile.wavefronts) > most[1]):
            bad.append(
                f"sm_{arch}: {name} executes {tile.instructions} instructions and "
                f"{tile.wavefronts:.0f} wavefronts for a tile; tile_limits.txt allows {most[0]} "
                f"and {most[1]}"
            )
    return bad


def print_any(
    arch: str, counts: list[tuple[any_path.Combination, int]], fixed: dict[str, int], out: TextIO
) -> list[str]:
    """The table of what step_any executes for a tile; returns what is wrong with it."""
    bad = []
    allowed = limits()
    print(
        f"\nsm_{arch}: instructions of step_any for a tile of 256 values, at the least, and of "
        "the fixed kernel of the same rule and formats",
        file=out,
    )
    print(f"{'step_any':>8} {'fixed':>5} {'times':>5}  rule and formats", file=out)
    for combination, instructions in counts:
        own = fixed.get(combination.fixed or "")
        beside = f"{own:5} {instructions / own:5.1f}" if own else f"{'':5} {'':5}"
        print(f"{instructions:8} {beside}  {combination.name()}", file=out)
        most = allowed.get((arch, combination.name()))
        if most is None and any(known == arch for known, _ in allowed):
            bad.append(f"sm_{arch}: {combination.name()} has no limit in tile_limits.txt")
        if most and instructions > most[0]:
            bad.append(
                f"sm_{arch}: {combination.name()} executes {instructions} instructions for a tile; "
                f"tile_limits.txt allows {most[0]}"
            )
    return bad


def main(folder: Path, out: TextIO, lenient: bool = False, set_limits: bool = False) -> int:
    cubins = sorted(f for f in folder.glob("*.cubin") if "_dlink" not in f.name)
    bad = []
    tables = 0
    counted: dict[tuple[str, str], tuple[int, int]] = {}
    unread = []
    for file in cubins:
        archs = re.findall(r"(?:sm|compute)_(\d+)", file.name)
        arch = archs[-1] if archs else file.stem
        kernels = kernels_of(file.read_bytes(), arch)
        if not kernels:
            continue
        tables += 1
        named = sorted(
            zip(kernels, readable([k.name for k in kernels]), strict=True), key=lambda pair: pair[1]
        )
        print(f"\nsm_{arch}: {len(kernels)} kernels", file=out)
        print(
            f"{'registers':>9} {'local':>6} {'shared':>7} {'instructions':>12} {'LDG.128':>8} "
            f"{'STG.128':>8}  kernel",
            file=out,
        )
        for kernel, name in named:
            print(
                f"{kernel.registers:9} {kernel.frame:6} {kernel.shared:7} {kernel.instructions:12} "
                f"{kernel.wide_loads:8} {kernel.wide_stores:8}  {name}",
                file=out,
            )
            if kernel.unreadable:
                print(f"not counted: {kernel.unreadable}", file=out)
                unread.append(f"sm_{arch}: {kernel.unreadable}")
                if any(known == arch for known, _ in limits()):  # others are not tested
                    bad.append(f"sm_{arch}: {kernel.unreadable}")
            if kernel.frame:
                bad.append(f"{file.name}: {name} keeps {kernel.frame} bytes in local memory")
        tiles = [(name, kernel.tile) for kernel, name in named if kernel.tile is not None]
        if tiles:
            counted |= {(arch, name): (t.instructions, round(t.wavefronts)) for name, t in tiles}
            bad += [] if set_limits else print_tiles(arch, tiles, out)
        for kernel in kernels:
            counts = kernel.any or []
            counted |= {(arch, c.name()): (instructions, 0) for c, instructions in counts}
            if counts and not set_limits:
                bad += print_any(arch, counts, {name: t.instructions for name, t in tiles}, out)
    if not tables:
        print(f"no kernel found in the cubins of {folder}", file=sys.stderr)
        return 1
    if set_limits and unread:  # the file would lose the limits of what could not be read
        bad += unread
    elif set_limits:
        write_limits(counted)
    for line in bad:
        print(line, file=sys.stderr)
    return 1 if bad and not lenient else 0


if __name__ == "__main__":
    given = [word for word in sys.argv[1:] if not word.startswith("--")]
    with Path(given[1]).open("w", encoding="utf-8") if given[1:] else nullcontext(sys.stdout) as to:
        failed = main(Path(given[0]), to, "--lenient" in sys.argv, "--set-limits" in sys.argv)
    sys.exit(failed)
