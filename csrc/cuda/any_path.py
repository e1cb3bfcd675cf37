"""What step_any executes for a tile of 256 values, counted in the machine code of a cubin, for
combinations of rule and formats.

step_any learns rule and formats at run time, so its code has a loop for each gradient, parameter
and state format, rule and store. They come in the order of the registry (core/registry.h), which is
how this file finds them. The path goes from the head of the loop over chunks of 256 values to its
end and takes, in order, what a combination needs of those loops, 8 values of a lane each. Between
them it is the shortest one. So it leaves out what ordinary data do not take (rows that end inside a
tile, cut rows, slow paths of division and root), and the count is a bound from below.

From sm_100 on nvcc chooses by tables of jumps,
which this file does not read: step_any is counted on sm_80 to sm_90.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from usual_path import (
    BRANCH,
    CALL,
    LOAD,
    LOAD_GLOBAL,
    LOAD_SHARED,
    STORE,
    STORE_GLOBAL,
    STORE_SHARED,
    Instruction,
    decode,
    successors,
)

JUMP_TABLES = 100  # from this architecture on
CORE = Path(__file__).parents[1] / "core"
REGISTRY = ("grad.h", "param/registry.h", "state/registry.h", "update/registry.h")
VALUES = 8  # of a lane
SHUFFLE, WIDE_PRODUCT = 0x189, 0x025
SHUFFLES = 10  # for the largest and the smallest magnitude of a block
PRODUCTS = 13  # of a Philox call, whose first is that of a constant
BYTE, HALF, WORD = 0, 2, 4  # the sizes of an access, as they are encoded
LARGEST_LOOP = 1000  # instructions; longer ones go around all formats

# What is counted: rules, whether each of their states has a sign (None: a mean over thousands of
# steps), and the formats of states with and without one.
SIGNS = {
    "Adam": (True, False),
    "Lion": (True,),
    "SgdMomentum": (True,),
    "Ademamix": (True, None, False),
    "AdafactorMomentum": (True,),
    "Rmsprop": (False,),
    "Adagrad": (False,),
    "Lamb": (True, False),
    "Lars": (True,),
    "Came": (True,),
    "AdamWFactored": (True,),
}
# What is left out: rules that differ from a counted one by a few instructions, AdamW as Adam,
# and what few people use.
NOT_COUNTED = {
    "AdamW",
    "AdamWAmsgrad",
    "AdamAmsgrad",
    "AdamFactored",
    "AdafactorFull",
    "AdafactorFullMomentum",
    "CameFull",
    "RmspropMomentum",
    "RmspropCentered",
    "RmspropCenteredMomentum",
    "ApolloInner",
    "ApolloAdafactor",
    "MuonMomentum",
    "Muon",
    "ScheduleFreeAdamW",
    "Cautious<AdamW>",
    "Cautious<Adam>",
    "Cautious<AdamWAmsgrad>",
    "Cautious<AdamAmsgrad>",
    "Cautious<Lion>",
    "Cautious<SgdMomentum>",
}
CODES = (
    ("Dynamic8", "Dynamic8Unsigned"),
    ("Dynamic4", "PowerOne4Unsigned"),
    ("Float8E4M3", "Float8E4M3Unsigned"),
)
SLOW = "BFloat16State"  # such a mean, rounded stochastically
BITS = {"Dynamic4": 4, "PowerOne4Unsigned": 4}  # of codebooks
# Scaled formats with code of their own, in this order; all codebooks share theirs.
BOOKS = "any codebook"
OWN_CODE = (
    "Dynamic8",
    "Dynamic8Unsigned",
    "Float8E4M3",
    "Float8E4M3Unsigned",
    "Float8E5M2",
    "Float8E5M2Unsigned",
    "Log8Fixed",
    "Log8",
    "Log16",
    "Log8Signed",
    "Companded8",
    "Companded8Unsigned",
)
PARAM, GRAD = "BFloat16Stochastic", "BFloat16Grad"
# Rules with fixed kernels, as these name them.
FIXED = {
    "Adam": "AdamRule<false, false>",
    "Lion": "Lion",
    "SgdMomentum": "SgdRule<true>",
    "Ademamix": "Ademamix",
    "AdafactorMomentum": "AdafactorRule<true, true>",
    "Adafactor": "AdafactorRule<true, false>",
    "Sgd": "SgdRule<false>",
}
# Those that have one for 8-bit state alone.
FIXED_IN_8_BITS = {
    "Rmsprop": "RmspropRule<false, false>",
    "Adagrad": "Adagrad",
    "Lamb": "Lamb",
    "Lars": "Lars",
    "Came": "CameRule<true>",
}


@dataclass(frozen=True)
class Combination:
    """Of bfloat16 gradients and parameters, which are rounded stochastically."""

    rule: str
    states: tuple[str, ...]

    def name(self, kernel: str = "step_any", rule: str = "") -> str:
        return f"{kernel}<{', '.join((rule or self.rule, PARAM, GRAD, *self.states))}>"

    @property
    def fixed(self) -> str | None:
        """The name of its fixed kernel, if it has one."""
        known = FIXED
        if all(state in CODES[0] for state in self.states):
            known = FIXED | FIXED_IN_8_BITS
        return self.name("step_fast", known[self.rule]) if self.rule in known else None


def combinations() -> Iterator[Combination]:
    for rule, signs in SIGNS.items():
        for signed, unsigned in CODES:
            yield Combination(
                rule, tuple(SLOW if s is None else signed if s else unsigned for s in signs)
            )
    yield Combination("Adafactor", ())
    yield Combination("Sgd", ())


def ways(program: Sequence[Instruction]) -> list[list[int]]:
    """As successors, of every instruction.
    sm_80 leaves loops by a guarded call over the branch back to their heads.
    """
    return [
        [at + 1, at + 2] if i.code == CALL and i.guarded else successors(program, at)
        for at, i in enumerate(program)
    ]


class Unexpected(Exception):
    """The code is not laid out as this file expects."""


def registered(name: str) -> list[str]:
    """The types of a list of the registry, in its order."""
    lists = "".join((CORE / file).read_text(encoding="utf-8") for file in REGISTRY)
    found = re.search(rf"using {name} =\s*Types<(.*?)>;\n", lists, re.DOTALL)
    if found is None:
        raise Unexpected(f"{CORE / 'registry.h'} has no list {name}")
    return [word.strip() for word in found[1].split(",")]


def size(i: Instruction) -> int:
    return i.word >> 73 & 7


class Loop:
    def __init__(self, program: Sequence[Instruction], head: int, back: int) -> None:
        self.head, self.back = head, back
        self.accesses: dict[int, list[int]] = {}  # sizes by operation
        for i in program[head : back + 1]:
            self.accesses.setdefault(i.code, []).append(size(i))

    def has(self, *codes: int) -> bool:
        return all(code in self.accesses for code in codes)

    def count(self, code: int, of: int) -> int:
        return self.accesses.get(code, []).count(of)


def loops_of(program: Sequence[Instruction]) -> list[Loop]:
    ends = {}
    for at, i in enumerate(program):
        if i.code == BRANCH and i.target is not None and 1 < at - i.target <= LARGEST_LOOP:
            ends[i.target] = max(at, ends.get(i.target, at))
    return [Loop(program, head, back) for head, back in sorted(ends.items())]


def innermost(loops: list[Loop]) -> list[Loop]:
    """Without those that go around another: code that is out of the way returns by a branch,
    which looks like a loop.
    """
    return [
        k
        for k in loops
        if not any(o is not k and k.head <= o.head and o.back <= k.back for o in loops)
    ]


def named(what: str, loops: list[Loop], names: Sequence[str]) -> dict[str, Loop]:
    """Loops by what they are for, in the order of the registry."""
    if len(loops) != len(names):
        raise Unexpected(
            f"step_any has {len(loops)} {what}, not {len(names)}: its code has changed, so "
            "any_path.py must learn it"
        )
    return dict(zip(names, loops, strict=True))


def in_front(loops: list[Loop], *chosen: Callable[[Loop], bool]) -> list[Loop]:
    """With the first loop of each choice in front: some architectures have them elsewhere."""
    first = [next((k for k in loops if choice(k)), loops[0]) for choice in chosen]
    return first + [k for k in loops if k not in first]


class Walk:
    """The loops of step_any, by what they do."""

    def __init__(self, code: bytes, arch: str) -> None:
        self.program = program = decode(code, int(arch))
        self.ways = ways(program)
        self.known: dict[tuple[object, ...], tuple[int, int]] = {}
        rules, params, grads = (
            registered(n) for n in ("UpdateRules", "ParamFormats", "GradFormats")
        )
        loops = loops_of(program)
        decoders = innermost([k for k in loops if k.has(LOAD, STORE_SHARED)])
        encoders = innermost(
            [
                k
                for k in loops
                if k.has(STORE) and not k.has(SHUFFLE) and len(k.accesses[STORE]) <= VALUES
            ]
        )
        if not decoders or not encoders:
            raise Unexpected("step_any has no loops over codes")
        first, last, next_ = decoders[0].head, decoders[-1].back, encoders[0].head
        loads = innermost([k for k in loops if k.back < first and k.has(LOAD_GLOBAL, STORE_SHARED)])
        loads = loads[-len(params) - len(grads) :]  # before them tables are filled
        updates = innermost(
            [
                k
                for k in loops
                if last < k.head < next_
                and k.count(STORE_SHARED, WORD)
                and k.has(LOAD_SHARED)
                and not k.has(SHUFFLE)
                and not k.has(STORE_GLOBAL)
            ]
        )
        stores = innermost(
            [
                k
                for k in loops
                if k.head > encoders[-1].back and k.has(STORE_GLOBAL) and k.count(LOAD_SHARED, WORD)
            ]
        )
        self.grads = named("loops over gradients", loads[: len(grads)], grads)
        self.params = named(
            "loops over parameters",
            in_front(loads[len(grads) :], lambda k: k.count(LOAD_GLOBAL, WORD) > 0),
            params,
        )
        formats = ("Float32State", SLOW, BOOKS, *OWN_CODE)
        self.decoders = named(
            "loops that dequantize",
            in_front(
                decoders,
                lambda k: k.count(LOAD, WORD) > 0 and not k.has(LOAD_GLOBAL),
                lambda k: k.count(LOAD, HALF) > 0 and not k.has(LOAD_GLOBAL),
            ),
            formats,
        )
        self.encoders = named(
            "loops that quantize",
            in_front(
                encoders,
                lambda k: k.count(STORE, WORD) > 0,
                lambda k: k.count(STORE, HALF) > 0 and not k.has(STORE_GLOBAL),
            ),
            formats,
        )
        self.updates = named("loops of rules", updates, rules)
        for rule, signs in {**SIGNS, "Adafactor": (), "Sgd": ()}.items():
            if self.updates[rule].count(LOAD_SHARED, WORD) != 2 + len(signs):
                raise Unexpected(
                    f"the loop of {rule} does not load a gradient, a "
                    f"parameter and {len(signs)} states"
                )
        # Two values a turn and the random bits of each; that of float16 is longer.
        drawn = [
            k
            for k in stores
            if k.count(STORE_GLOBAL, HALF) == 2
            and k.count(LOAD_SHARED, WORD) == 4
            and not k.has(LOAD_GLOBAL)
        ]
        self.draws = [
            k for k in innermost(loops) if len(k.accesses.get(WIDE_PRODUCT, [])) >= PRODUCTS
        ]
        if len(stores) != len(params) or not drawn or not self.draws:
            raise Unexpected(
                f"step_any has {len(stores)} loops that store parameters, not {len(params)}, "
                f"{len(drawn)} that round them at random"
            )
        self.store = min(drawn, key=lambda k: k.back - k.head)
        around = [
            (at, i.target)
            for at, i in enumerate(program)
            if i.code == BRANCH
            and i.target is not None
            and i.target < loads[0].head
            and stores[-1].back < at
        ]
        if not around:
            raise Unexpected("step_any has no loop over chunks")
        self.end, self.begin = min(around)

    # ---- the path ----

    def go(
        self,
        at: int,
        what: str,
        done: Callable[[int], bool],
        times: int,
        within: tuple[int, int] | None = None,
    ) -> tuple[int, int]:
        """The instructions from `at` until `times` instructions that are `done` were executed, all
        of them `within` a range; and where that is.
        """
        low, high = within or (0, len(self.program))
        counted = {here for here in range(low, min(high + 1, len(self.program))) if done(here)}
        seen = [set[int]() for _ in range(times)]  # by how many were executed
        queue = deque([(at, 0, 0)])
        while queue:
            here, had, length = queue.popleft()
            if here in counted:
                had += 1
                if had == times:
                    return here, length
            for to in self.ways[here]:
                if to < len(self.program) and to not in seen[had]:
                    seen[had].add(to)
                    queue.append((to, had, length + 1))
        raise Unexpected(f"step_any has no way to {what}")

    def is_access(self, code: int, of: int | None) -> Callable[[int], bool]:
        return lambda at: self.program[at].code == code and of in (None, size(self.program[at]))

    def count(self, c: Combination) -> int:
        """Instructions of a warp for 256 values."""
        at, total = self.begin, 1

        def go(what: str, code: int, of: int | None, times: int, within: tuple[int, int]) -> None:
            nonlocal at, total
            asked = at, code, of, times, within  # combinations have much in common
            if asked not in self.known:
                self.known[asked] = self.go(at, what, self.is_access(code, of), times, within)
            at, length = self.known[asked]
            total += length

        def around(loops: dict[str, Loop], name: str) -> tuple[int, int]:
            """A loop with what is left of its values after it."""
            later = [k.head for k in loops.values() if k.head > loops[name].head]
            before = [k.back for k in loops.values() if k.back < loops[name].head]
            return max(before, default=self.begin) + 1, min(later, default=loops[name].back + 1) - 1

        def within(loop: Loop) -> tuple[int, int]:
            return loop.head, loop.back

        for name, loops in ((GRAD, self.grads), (PARAM, self.params)):
            go(f"load {name}", LOAD_GLOBAL, HALF, VALUES, around(loops, name))
        first = max(k.back for k in self.params.values())
        last = min(k.head for k in self.decoders.values())
        for state in c.states:
            own = self.decoders.get(state, self.decoders[BOOKS])
            if state in BITS:
                go("unpack codes", LOAD_GLOBAL, BYTE, BITS[state], (first, last))
            go(f"dequantize {state}", STORE_SHARED, WORD, VALUES, within(own))
        update = self.updates[c.rule]
        go(f"update by {c.rule}", LOAD_SHARED, WORD, VALUES * (2 + len(c.states)), within(update))
        first = max(k.back for k in self.updates.values())
        last = min(k.head for k in self.encoders.values())
        end = max(k.back for k in self.encoders.values())
        for state in c.states:
            own = self.encoders.get(state, self.encoders[BOOKS])
            if state == SLOW:
                go("draw", WIDE_PRODUCT, None, PRODUCTS, (first, last))
                go(f"quantize {state}", LOAD_SHARED, WORD, 2 * VALUES, within(own))
            else:
                go("find a block's extremes", SHUFFLE, None, SHUFFLES, (first, last))
            if state in BITS:
                go(f"quantize {state}", LOAD_GLOBAL, WORD, BITS[state] * VALUES, within(own))
            go(
                f"quantize {state}",
                STORE,
                HALF if state == SLOW else BYTE,
                1 if state == SLOW or state in BITS else VALUES,
                within(own),
            )
            if state in BITS:
                go("pack codes", STORE_GLOBAL, BYTE, BITS[state], (end, self.store.head))
        draw = max((k for k in self.draws if k.head < self.store.head), key=lambda k: k.head)
        go("draw", WIDE_PRODUCT, None, PRODUCTS, within(draw))
        go("store parameters", STORE_GLOBAL, HALF, VALUES, within(self.store))
        at, length = self.go(at, "the next chunk", lambda here: here == self.end, 1)
        return total + length


def measure(code: bytes, arch: str) -> list[tuple[Combination, int]]:
    """The instructions of each combination. Raises Unexpected where the code cannot be read."""
    walk = Walk(code, arch)
    return [(c, walk.count(c)) for c in combinations()]
