"""What is compared in docs/quality.md: contestants, and the studies (a model, a text, a number of
steps) in which they run.

A contestant is a rule with a format of its state and of its weights. The first contestant of a rule
in a study tunes the rule's learning rate, with full-precision state; the other contestants of the
rule take its rate. So only one thing differs between two contestants of a rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

# learning rates that every rule tries, 0.00025 to 0.032
GRID = tuple(2.5e-4 * 2**k for k in range(8))
# As many for what is best at an end of these: 0.001 to 0.128, and 0.0000625 to 0.0005.
HIGHER, LOWER = tuple(4 * lr for lr in GRID), tuple(GRID[0] * 2.0**k for k in range(-2, 2))
SEEDS, TUNING_SEED = (0, 1, 2, 3, 4), 100


@dataclass(frozen=True)
class Variant:
    """
    Attributes:
        rule: whose learning rate it takes; contestants of one rule are compared with its first.
        make: "torch", or the name of lowbit's optimizer.
        state: `state_format`.
        weights: `param_format`; weights are bfloat16 with any but None.
        options: further arguments of the optimizer.
        nudged: the first weights are those of the others rounded to bfloat16: what a change that is
            neither good nor bad does to a loss.
        half: what it becomes after half of the steps: the contestant's name,
            and whether by `lowbit-ckpt convert`.
    """

    rule: str
    make: str = "AdamW"
    state: Any = "float32"
    weights: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    half: tuple[str, bool] | None = None
    nudged: bool = False


AVERAGED = {"exp_avg": "float32", "exp_avg_sq": "factored"}
CODES = (
    "8bit",
    "4bit",
    "fp8",
    "bfloat16",
    "bfloat16_stochastic",
    "log8",
    "companded8",
    "linear8",
    "uniform8",
    "lpmm4",
    "fp8_e5m2",
    "7bit",
    "6bit",
    "5bit",
    "3bit",
    "2bit",
)
WEIGHTS = {
    "stochastic": "auto",
    "nearest": "nearest",
    "Kahan": "bfloat16_kahan",
    "+ 8 bits": "bfloat16_split8_stochastic",
    "+ 16 bits": "bfloat16_split16",
}

CONTESTANTS: dict[str, Variant] = {
    "torch AdamW": Variant("AdamW", "torch"),
    "torch AdamW, start rounded": Variant("AdamW", "torch", nudged=True),
    "AdamW, float32": Variant("AdamW"),
    **{f"AdamW, {name}": Variant("AdamW", state=name) for name in CODES},
    **{
        f"AdamW, 8bit, bfloat16 weights {name}": Variant("AdamW", state="8bit", weights=weights)
        for name, weights in WEIGHTS.items()
    },
    "AdamW, 8bit, then 4bit": Variant("AdamW", state="8bit", half=("AdamW, 4bit", False)),
    "torch AdamW, then 8bit by lowbit-ckpt": Variant("AdamW", "torch", half=("AdamW, 8bit", True)),
    "AdamW factored, float32": Variant("AdamW factored", state=AVERAGED),
    "AdamW factored, factored8": Variant("AdamW factored", state="factored8"),
    "AdamW factored, factored4": Variant("AdamW factored", state="factored4"),
    "Adafactor": Variant("Adafactor", "Adafactor"),
    "Adafactor with momentum, float32": Variant(
        "Adafactor with momentum", "Adafactor", options={"beta1": 0.9}
    ),
    "Adafactor with momentum, 8bit": Variant(
        "Adafactor with momentum", "Adafactor", "8bit", options={"beta1": 0.9}
    ),
    "APOLLO, float32": Variant("APOLLO", "APOLLO", options={"rank": "quarter"}),
    "APOLLO, 8bit": Variant("APOLLO", "APOLLO", "8bit", options={"rank": "quarter"}),
    **{
        f"Muon, {name}": Variant("Muon", "MuonWithAdamW", name)
        for name in ("float32", "8bit", "muon4", "4bit")
    },
}


@dataclass(frozen=True)
class Study:
    """
    Attributes:
        name: in results and as a heading.
        model: arguments of the recipe's GPT.
        compute: the dtype of products; "auto": bfloat16 where the processor multiplies it.
        batch: sequences of a step.
        steps, tuning_steps, warm_up: of a run, of one that tunes, and of its beginning.
        betas: of AdamW.
        every: steps of which the mean loss is kept.
        held_out: batches and sequences of each.
        contestants: in the order of the tables.
        rates: learning rates by rule, if not GRID.
        tuned_in: the study whose rates it takes, if it tunes none.
        seeds: runs of each contestant.
    """

    name: str
    model: dict[str, int]
    compute: str
    batch: int
    steps: int
    tuning_steps: int
    warm_up: int
    betas: tuple[float, float]
    every: int
    contestants: tuple[str, ...]
    held_out: tuple[int, int]
    rates: dict[str, tuple[float, ...]] = field(default_factory=dict)
    tuned_in: str | None = None
    seeds: tuple[int, ...] = SEEDS
    weight_decay: float = 0.1

    def settings(self) -> dict[str, Any]:
        """What two lines must have in common to be compared."""
        return {
            **self.model,
            "batch": self.batch,
            "warm_up": self.warm_up,
            "weight_decay": self.weight_decay,
            "betas": list(self.betas),
            "held_out": list(self.held_out),
        }

    def rules(self) -> dict[str, str]:
        """The contestant that tunes each rule."""
        found: dict[str, str] = {}
        for name in self.contestants:
            found.setdefault(CONTESTANTS[name].rule, name)
        return found

    def tuning(self, rule: str) -> list[Run]:
        """The runs among which the rule's rate is chosen."""
        if self.tuned_in:
            return STUDIES[self.tuned_in].tuning(rule)
        rates = self.rates.get(rule, GRID)
        return [
            Run(self.name, self.rules()[rule], lr, TUNING_SEED, self.tuning_steps) for lr in rates
        ]


@dataclass(frozen=True)
class Run:
    study: str
    name: str
    lr: float
    seed: int
    steps: int

    def key(self) -> dict[str, Any]:
        return {
            "study": self.study,
            "run": self.name,
            "lr": self.lr,
            "seed": self.seed,
            "steps": self.steps,
        }


SMALL = {"width": 128, "depth": 2, "heads": 4, "context": 64}
LARGE = {"width": 320, "depth": 8, "heads": 5}
FIRST = ("torch AdamW", "AdamW, 8bit", "AdamW, 4bit")
MUONS = (
    "Muon, float32",
    "Muon, 8bit",
    "AdamW, float32",
    "AdamW, 8bit",
    "Muon, muon4",
    "Muon, 4bit",
)
# The studies together take some four hours of one core. A step of 10 M parameters costs by its
# tokens, 0.15 s for 256 of them and 0.5 s for 1,024: few tokens leave 1,000 steps in the time of
# 300, as many tokens as the small model sees in 500. 20,000 steps ask whether anything diverges, so
# one seed is enough.
_SMALL = Study(
    "0.5 M",
    model=SMALL,
    compute="float32",
    batch=8,
    steps=1500,
    tuning_steps=500,
    warm_up=50,
    betas=(0.9, 0.999),
    every=50,
    contestants=tuple(CONTESTANTS),
    held_out=(16, 64),
    rates={"Adafactor": HIGHER, "Adafactor with momentum": HIGHER},
)
_LONG = replace(
    _SMALL,
    name="0.5 M, 20,000 steps",
    steps=20_000,
    tuning_steps=0,
    every=400,
    contestants=FIRST,
    rates={},
    tuned_in="0.5 M",
    seeds=SEEDS[:1],
)
_LARGE = Study(
    "10 M",
    model={**LARGE, "context": 64},
    compute="auto",
    batch=4,
    steps=1000,
    tuning_steps=250,
    warm_up=50,
    betas=(0.9, 0.95),
    every=50,
    contestants=(*FIRST, "AdamW, 8bit, bfloat16 weights stochastic"),
    held_out=(16, 32),
    rates={"AdamW": LOWER},
)
_SHORT = replace(
    _LARGE,
    name="10 M, 160 steps",
    model={**LARGE, "context": 128},
    batch=8,
    steps=160,
    tuning_steps=64,
    warm_up=20,
    every=10,
    contestants=MUONS,
    held_out=(16, 16),
    rates={"AdamW": GRID[1:5], "Muon": GRID[2:6]},
    seeds=SEEDS[:3],
)
STUDIES = {study.name: study for study in (_SMALL, _LONG, _LARGE, _SHORT)}


def order() -> Iterator[tuple[Study, tuple[str, ...], tuple[int, ...]]]:
    """What is run first: studies, contestants, seeds (none: the tuning alone). The seed changes
    slowest, so that pairs are complete early.
    """
    small, long, large, short = STUDIES.values()
    codes = tuple(f"AdamW, {code}" for code in CODES)
    changed = tuple(n for n in small.contestants if CONTESTANTS[n].weights or CONTESTANTS[n].half)
    other = tuple(n for n in small.contestants if CONTESTANTS[n].rule != "AdamW")
    yield small, (*FIRST, "torch AdamW, start rounded"), SEEDS
    yield small, codes[:6], SEEDS[:3]  # those of docs/presets.md
    yield small, changed[:1], SEEDS[:3]  # the default for bfloat16 weights
    yield small, tuple(n for n in changed if CONTESTANTS[n].half), SEEDS[:3]
    for seeds in (SEEDS[:3], SEEDS):  # three are judged, so no part waits for another's fifth
        yield small, codes, seeds
        yield small, changed, seeds
    for seeds in ((), SEEDS[:3], SEEDS):
        yield small, other, seeds
    yield long, long.contestants, long.seeds
    yield large, large.contestants, SEEDS
    yield short, short.contestants, short.seeds
    yield small, small.contestants, SEEDS
