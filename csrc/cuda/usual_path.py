"""The usual path of a fixed kernel: what a warp executes for one tile of 256 values,
counted in the machine code of a cubin.

The path is the shortest way around the loop over tiles that makes every store and passes two
functions of the XU pipe for each of a lane's 8 values (a root and a division, or their
approximations), of which rules that take neither need none. That leaves out what ordinary data do
not take: a new unit or job, rows that end inside a tile, values near the ends of the range, exact
division where the approximation does not decide, negative second moments. Two notes: an inner loop
is counted once, and blocks are whole tiles (256 values), so a maximum over a warp is one
instruction.

Clocks are of one multiprocessor for one tile, each pipe taken by itself: the largest is a bound
from below, and a kernel whose clocks are below those of memory can be bound by memory.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

INSTRUCTION = 16
XU_FUNCTIONS = 16  # two for each of a lane's values
ROOTLESS = ("Lion", "SgdRule", "Lars", "Muon")  # rules that neither divide nor take a root


def functions_of(name: str) -> int:
    """How many functions of the XU pipe the usual path of a kernel of that name takes at least:
    those of the rule, of which CAME's has two roots and divisions, and one for each companded code.
    """
    least = 0 if any(rule in name for rule in ROOTLESS) else XU_FUNCTIONS
    if "CameRule" in name:
        least += XU_FUNCTIONS
    return least + XU_FUNCTIONS // 2 * name.count("Companded8")


# The lower 9 bits of an instruction are its operation, in all forms of operands,
# on sm_80 to sm_120.
PIPES = {
    # FMUL FADD FFMA
    "fp32": (0x020, 0x021, 0x023),
    # IMAD, wide, IDP, high, HADD2 (makes a float of a float16), HFMA2 (moves constants)
    "imad": (0x024, 0x025, 0x026, 0x027, 0x030, 0x031, 0x035),
    # FLO BREV FCHK F2I I2F MUFU POPC F2F
    "xu": (0x100, 0x101, 0x102, 0x105, 0x106, 0x108, 0x109, 0x110, 0x111, 0x112),
    # S2R LD LDG LDC LDS ST STG STS SHFL CREDUX S2UR REDUX
    "memory": (0x119, 0x11A, 0x180, 0x181, 0x182, 0x184, 0x185, 0x186, 0x188, 0x189, 0x0CC, 0x1C3,
               0x1C4),
    "control": (0x118, 0x141, 0x142, 0x144, 0x145, 0x146, 0x147, 0x148, 0x149, 0x14D, 0x150, 0x155,
                0x156, 0x11B, 0x11D, 0x15D),
    "uniform": (0x04A, 0x055, 0x05A, 0x07C, 0x082, 0x083, 0x087, 0x08C, 0x090, 0x091, 0x092, 0x097,
                0x099, 0x0A4, 0x0A5, 0x0B9, 0x1AC),
    "alu": (0x002, 0x003, 0x005, 0x006, 0x007, 0x008, 0x009, 0x00B, 0x00C, 0x00F, 0x010, 0x011,
            0x012, 0x013, 0x016, 0x017, 0x019, 0x01C, 0x036, 0x03E, 0x045, 0x046, 0x048, 0x076),
}  # fmt: skip
PIPE_OF = {code: pipe for pipe, codes in PIPES.items() for code in codes}
MUFU, FCHK = 0x108, 0x102
BRANCH, CALL, EXIT, RETURN, INDIRECT = 0x147, 0x144, 0x14D, 0x150, 0x149
LOAD, LOAD_GLOBAL, STORE, STORE_GLOBAL, LOAD_SHARED, STORE_SHARED = (
    0x180,
    0x181,
    0x185,
    0x186,
    0x184,
    0x188,
)
SETS_PREDICATE = (0x00B, 0x00C, 0x01C)
WORDS = {4: 1, 5: 2, 6: 4}  # by size
ALWAYS, TOGETHER, IF_APART = 7, 91, 2

# Wavefronts of a look-up by 32 lanes in a table of floats: from simulated Adam states, 2.8 for
# values by codes and 3.4 for cells.
LOOKUP = 3.1


@dataclass
class Card:
    """Bytes per second of memory (as measured for copies, else 90 % of the data sheet),
    multiprocessors, and their clock.
    """

    name: str
    rate: float
    processors: int
    clock: float


# By the architecture whose machine code they run: sm_89 runs that of sm_80.
CARDS = {
    "80": [Card("A100", 1.83e12, 108, 1.41e9), Card("RTX 4090", 0.907e12, 128, 2.52e9)],
    "90": [Card("H200", 4.30e12, 132, 1.755e9), Card("H100", 3.02e12, 132, 1.755e9)],
    "100": [Card("B200", 7.20e12, 148, 1.85e9)],
    "120": [Card("RTX 5090", 1.61e12, 170, 2.41e9)],
}


def family(arch: str) -> str:
    """The architecture in CARDS whose pipes and encoding are those of `arch`."""
    return max((known for known in CARDS if int(known) <= int(arch)), key=int, default="80")


@dataclass
class Path:
    """Instructions of a tile by pipe; clocks and wavefronts of one multiprocessor; bytes moved."""

    pipes: Counter[str]
    unknown: list[int]
    wavefronts: float
    bytes: int

    @property
    def instructions(self) -> int:
        return sum(self.pipes.values())

    def memory_clocks(self, card: Card) -> float:
        return self.bytes / (card.rate / card.processors / card.clock)


@dataclass
class Instruction:
    word: int
    target: int | None = None
    together: bool = False  # of all threads of a warp, which are together here (BRA.CONV, BRA.DIV)

    @property
    def code(self) -> int:
        return self.word & 0x1FF

    @property
    def guarded(self) -> bool:
        return self.word >> 12 & 15 != ALWAYS


def signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def decode(code: bytes, arch: int) -> list[Instruction]:
    made = []
    for i in range(0, len(code), INSTRUCTION):
        instruction = Instruction(int.from_bytes(code[i : i + INSTRUCTION], "little"))
        if instruction.code == BRANCH:
            far = signed(instruction.word >> 34 & (1 << 48) - 1, 48)
            words = far if arch < 90 else far << 8 | instruction.word >> 16 & 255
            instruction.target = i // INSTRUCTION + 1 + words * 4 // INSTRUCTION
            if instruction.word >> TOGETHER & 1:
                instruction.together = True
                if instruction.word >> 32 & 3 == IF_APART:
                    instruction.target = i // INSTRUCTION + 1
        made.append(instruction)
    return made


def successors(program: list[Instruction], at: int) -> list[int]:
    here = program[at]
    # calls are the slow paths of division and square root
    if here.code in (CALL, RETURN, INDIRECT, EXIT):
        return [at + 1] if here.guarded else []
    if here.target is None:
        return [at + 1]
    return [at + 1, here.target] if here.guarded and not here.together else [here.target]


def is_store(i: Instruction) -> bool:
    return i.code in (STORE, STORE_GLOBAL)


def in_order(program: list[Instruction], head: int) -> list[tuple[int, list[int]]]:
    """The instructions reached from `head`, each after all that lead to it, with their successors.
    An edge that closes a loop is left out.
    """
    seen, open_, done = {head}, {head}, []
    stack = [(head, successors(program, head), [])]
    while stack:
        at, left, kept = stack[-1]
        if not left:
            stack.pop()
            open_.discard(at)
            done.append((at, kept))
            continue
        to = left.pop()
        if to >= len(program) or to in open_:
            continue
        kept.append(to)
        if to not in seen:
            seen.add(to)
            open_.add(to)
            stack.append((to, successors(program, to), []))
    return done[::-1]


def tile_loop(program: list[Instruction]) -> tuple[int, int, list[tuple[int, list[int]]]] | None:
    """The smallest loop with the most stores: its first and its last instruction, and what is
    reached from the first, in order.
    """
    found = []
    for at, i in enumerate(program):
        if i.code == BRANCH and i.target is not None and i.target <= at:
            stores = sum(is_store(x) for x in program[i.target : at])
            if stores:
                found.append((-stores, at - i.target, i.target, at))
    for _, _, head, back in sorted(found):
        order = in_order(program, head)
        # else the branch returns from code that is out of the way
        if any(at == back for at, _ in order):
            return head, back, order
    return None


def usual(program: list[Instruction], most: int = XU_FUNCTIONS) -> list[int] | None:
    """Indices of the instructions of the usual path.
    most: functions of the XU pipe that it counts.
    """
    loop = tile_loop(program)
    if loop is None:
        return None
    head, back, order = loop
    # Of each instruction and number of XU functions before it: missing stores, length,
    # and the state before.
    best: dict[tuple[int, int], tuple[int, int, tuple[int, int] | None]] = {(head, 0): (0, 0, None)}
    for at, next_ in order:
        for functions in range(most + 1):
            if at == back or (at, functions) not in best:
                continue
            stores, length, _ = best[at, functions]
            now = min(functions + (program[at].code == MUFU), most)
            cost = stores - is_store(program[at]), length + 1
            for to in next_:
                if (to, now) not in best or cost < best[to, now][:2]:
                    best[to, now] = *cost, (at, functions)
    ends = [(best[back, f][0], -f, back, f) for f in range(most + 1) if (back, f) in best]
    if not ends:
        return None
    state: tuple[int, int] | None = min(ends)[2:]
    path = []
    while state is not None:
        path.append(state[0])
        state = best[state][2]
    return path[::-1]


def measure(code: bytes, arch: str, functions: int = XU_FUNCTIONS) -> Path | None:
    """Counts the usual path of a kernel; None if it has no loop that stores."""
    program = decode(code, int(arch))
    indices = usual(program, functions)
    if indices is None:
        return None
    path = [program[i] for i in indices]
    written = set()
    for i in path:
        if not is_store(i) and i.code not in (*SETS_PREDICATE, BRANCH, STORE_SHARED):
            first = i.word >> 16 & 255
            written |= {first, first + 1}
    pipes: Counter[str] = Counter()
    wavefronts, moved, unknown = 0.0, 0, []
    for i in path:
        if i.code not in PIPE_OF:
            unknown.append(i.word & 0xFFF)
        pipes[PIPE_OF.get(i.code, "alu")] += 1
        words = WORDS.get(i.word >> 73 & 7, 1)
        if i.code == LOAD_SHARED:  # an address from the tile's data, or one that all lanes share
            wavefronts += LOOKUP if (i.word >> 24 & 255) in written and words == 1 else 1
        elif i.code in (STORE_SHARED, 0x189):
            wavefronts += 1
        elif i.code in (LOAD_GLOBAL, STORE_GLOBAL):
            moved += 32 * 4 * words
        elif i.code in (LOAD, STORE):  # the scale of a block
            moved += 4
    return Path(pipes, unknown, wavefronts, moved)
