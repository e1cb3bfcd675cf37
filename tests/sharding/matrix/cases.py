"""What the matrix of docs/bits/sharding-matrix.md is about: the rules and formats, the rows of
wrappers with their ranks, and a run of each.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

import lowbit
from lowbit import flat, fsdp1, sharding
from lowbit.config.overrides import clean_name
from lowbit.flat import FlatSlice
from tests.sharding import wrappers_worker
from tests.sharding.wrappers_worker import Kept, equal, global_gradient, name_of
from tests.support import wrap
from tests.support.digests import whole_weight

UNITS = {
    "first": {"square": (64, 512), "vector": (1000,)},
    "second": {"odd": (100, 77), "long": (7, 1024)},
    "experts": {"up": (4, 40, 32), "down": (4, 32, 40)},
    "last": {"wide": (36, 256), "bias": (7,)},
}
ZERO, SLICES = "ZeroRedundancyOptimizer", "flat slices"
# The numbers of ranks of each wrapper, the largest first.
WRAPPERS: dict[str, tuple[int, ...]] = {
    ZERO: (4,),
    SLICES: (4,),
    "CPU offload": (4,),
    "HSDP 2x2": (4,),
    "TP x FSDP 2x2 col": (4,),
    "HSDP x TP 2x2x2 row": (8,),
    "EP x HSDP 2x2x2": (8,),
    "pipeline x FSDP2 2x2": (4,),
}
Case = tuple[type, dict[str, Any]]  # an optimizer and its options
RULES: dict[str, Case] = {
    "AdamW": (lowbit.AdamW, {}),
    "Adam": (lowbit.Adam, {"weight_decay": 0.1}),
    "Lion": (lowbit.Lion, {}),
    "AdEMAMix": (lowbit.AdEMAMix, {"t_alpha": 3, "t_beta3": 3}),
    "SGD": (lowbit.SGD, {"momentum": 0.9}),
    "RMSprop": (lowbit.RMSprop, {"centered": True, "momentum": 0.9}),
    "Adagrad": (lowbit.Adagrad, {"lr_decay": 0.1}),
    "cautious AdamW": (lowbit.AdamW, {"cautious": True}),
    "cautious Lion": (lowbit.Lion, {"cautious": True}),
    "Schedule-Free": (lowbit.ScheduleFreeAdamW, {"warmup_steps": 4}),
    "Adafactor": (lowbit.Adafactor, {"beta1": 0.9}),
    "CAME": (lowbit.CAME, {}),
    "LAMB": (lowbit.LAMB, {}),
    "LARS": (lowbit.LARS, {"momentum": 0.9}),
    "APOLLO": (lowbit.APOLLO, {"rank": 4}),
    "APOLLO-Mini": (lowbit.APOLLOMini, {}),
    "Fira": (lowbit.Fira, {"rank": 4}),
    "Adafactor, rank 4": (lowbit.Adafactor, {"rank": 4}),
    "Muon": (lowbit.MuonWithAdamW, {}),
}
COLUMNS = lowbit.scaled("linear8", scale="column")
FORMATS: dict[str, Case] = {
    **{
        name: (lowbit.AdamW, {"state_format": name})
        for name in ("4bit", "fp8", "log8", "lpmm4", "factored8")
    },
    "column scales": (lowbit.Lion, {"state_format": COLUMNS}),
    "Kahan": (lowbit.AdamW, {"param_format": "bfloat16_kahan"}),
    "split8": (lowbit.AdamW, {"param_format": "bfloat16_split8"}),
}
# The columns of the page: cases that behave alike, of which the first is run.
COLUMNS_OF_RULES = {
    "Adam, AdamW, Lion, AdEMAMix": ("AdamW", "Adam", "Lion", "AdEMAMix"),
    "SGD, RMSprop, Adagrad": ("SGD", "RMSprop", "Adagrad"),
    "cautious": ("cautious AdamW", "cautious Lion"),
    "Schedule-Free": ("Schedule-Free",),
}
COLUMNS_OF_REDUCING = {
    "LAMB, LARS": ("LAMB", "LARS"),
    "Adafactor, CAME": ("Adafactor", "CAME"),
    "APOLLO, Fira": ("APOLLO", "APOLLO-Mini", "Fira"),
    "Adafactor with a rank": ("Adafactor, rank 4",),
    "Muon": ("Muon",),
}
COLUMNS_OF_FORMATS = {
    "8bit, log8, fp8": ("AdamW", "log8", "fp8"),
    "4bit": ("4bit",),
    "lpmm4": ("lpmm4",),
    "factored8": ("factored8",),
    "column scales": ("column scales",),
    "Kahan, split8": ("Kahan", "split8"),
}
FIRST = {
    cases[0]
    for columns in (COLUMNS_OF_RULES, COLUMNS_OF_REDUCING, COLUMNS_OF_FORMATS)
    for cases in columns.values()
}
# Every one of these rules in every one of these formats.
OF_PRODUCTS = ("AdamW", "Lion", "Adafactor", "CAME", "LAMB", "Schedule-Free", "Muon", "APOLLO")
IN_PRODUCTS: dict[str, dict[str, Any]] = {
    "8bit": {},
    **{name: {"state_format": name} for name in ("4bit", "fp8", "factored8")},
    "Kahan": {"param_format": "bfloat16_kahan"},
    "split8": {"param_format": "bfloat16_split8"},
}
PRODUCTS: dict[str, Case] = {
    f"{rule}, {name}": (RULES[rule][0], {**RULES[rule][1], **options})
    for rule in OF_PRODUCTS
    for name, options in IN_PRODUCTS.items()
}
# Every column of rules, every format and every wrapper in pairs, which is what CI runs; the other
# tables are whole products. As few ranks as cut every way; 3 divide no dimension of the model but
# 36 rows, and leave one rank no expert.
PLACES: dict[str, tuple[int, ...]] = {
    "DDP": (3,),
    "FSDP1 orig": (2,),
    "FSDP1 flat": (3,),
    "FSDP2": (3,),
    "TP x FSDP 2x2 row": (4,),
    "EP": (3,),
    "EP x FSDP 2x2": (4,),
    "pipeline": (2,),
    ZERO: (2,),
    SLICES: (3,),
    "CPU offload": (2,),
    "HSDP 2x2": (4,),
    "TP x FSDP 2x2 col": (4,),
    "HSDP x TP 2x2x2 row": (8,),
    "EP x HSDP 2x2x2": (8,),
    "pipeline x FSDP2 2x2": (4,),
}
IN_PAIRS: dict[str, dict[str, Any]] = {
    **IN_PRODUCTS,
    **{name: {"state_format": name} for name in ("log8", "lpmm4")},
    "column scales": {"state_format": COLUMNS},
}
COLUMNS_IN_PAIRS = {**COLUMNS_OF_RULES, **COLUMNS_OF_REDUCING}
WHOLE_ROWS = ("FSDP1 orig", "FSDP1 flat", "TP x FSDP 2x2 row", SLICES, "HSDP x TP 2x2x2 row")
# The wrappers under which a column of rules is refused.
REFUSED_UNDER: dict[str, tuple[str, ...]] = {
    "Schedule-Free": (ZERO,),
    "APOLLO, Fira": WHOLE_ROWS,
    "Adafactor with a rank": WHOLE_ROWS,
    "Muon": ("FSDP1 orig", "FSDP1 flat", SLICES),
}
# Rules that one process refuses to keep factored.
NOT_FACTORED = ("AdEMAMix", "RMSprop", "Adagrad", "cautious AdamW", "Schedule-Free", "LAMB")


def rules_in(column: str, form: str) -> list[str]:
    """The rules of a column that a format takes."""
    return [
        rule for rule in COLUMNS_IN_PAIRS[column] if form != "factored8" or rule not in NOT_FACTORED
    ]


Cell = tuple[str, str, str]  # a wrapper, a column of rules and a format


def _served(cell: Cell) -> bool:
    wrapper, column, form = cell
    return wrapper not in REFUSED_UNDER.get(column, ()) and bool(rules_in(column, form))


def _rows() -> list[Cell]:
    """A Latin square: under each wrapper every column of rules, each in another format. Cells more
    have the pairs of those that are refused.
    """
    columns, forms = [*COLUMNS_IN_PAIRS], [*IN_PAIRS]
    rows = [
        (wrapper, column, forms[(i + j) % len(forms)])
        for i, wrapper in enumerate(PLACES)
        for j, column in enumerate(columns)
    ]
    had = {pair for row in rows if _served(row) for pair in itertools.combinations(row, 2)}
    for gain in (2, 1):
        for cell in filter(_served, itertools.product(PLACES, columns, forms)):
            pairs = {*itertools.combinations(cell, 2)}
            if len(pairs - had) >= gain:
                rows.append(cell)
                had |= pairs
    return rows


def _pairs() -> tuple[dict[str, Case], dict[str, list[str]]]:
    """The cases of all wrappers, and their names by wrapper: every pair of a wrapper, a column of
    rules and a format that is not refused. The rules of a column take turns.
    """
    turns: collections.Counter[str] = collections.Counter()
    cases: dict[str, Case] = {}
    by_wrapper: dict[str, list[str]] = {wrapper: [] for wrapper in PLACES}
    for wrapper, column, form in _rows():
        rules = rules_in(column, form) or COLUMNS_IN_PAIRS[column]
        rule = rules[turns[column] % len(rules)]
        turns[column] += 1
        cases[f"{rule}, {form}"] = (RULES[rule][0], {**RULES[rule][1], **IN_PAIRS[form]})
        by_wrapper[wrapper].append(f"{rule}, {form}")
    return cases, by_wrapper


PAIRS, PAIRS_UNDER = _pairs()


def refused_under(wrapper: str, name: str) -> bool:
    """Whether a wrapper refuses the column of rules that a case of PAIRS is of."""
    rule = name.rpartition(", ")[0]
    columns = [column for column, rules in COLUMNS_IN_PAIRS.items() if rule in rules]
    return any(wrapper in REFUSED_UNDER.get(column, ()) for column in columns)


# The kinds of checkpoints: of 8-bit state, and of a factored one beside it.
OF_KINDS = {name: RULES[name] for name in ("AdamW", "Adafactor")}
OVER_KINDS = {
    name: PLACES[name]
    for name in (
        "DDP",
        ZERO,
        "FSDP1 orig",
        "FSDP1 flat",
        SLICES,
        "FSDP2",
        "CPU offload",
        "HSDP 2x2",
        "TP x FSDP 2x2 row",
        "TP x FSDP 2x2 col",
        "EP",
        "EP x FSDP 2x2",
        "pipeline",
        "pipeline x FSDP2 2x2",
    )
}
# By the name of the table: its cases and its wrappers.
TABLES: dict[str, tuple[dict[str, Case], dict[str, tuple[int, ...]]]] = {
    "wrappers": (
        {name: case for name, case in {**RULES, **FORMATS}.items() if name in FIRST},
        WRAPPERS,
    ),
    "pairs": (PAIRS, PLACES),
    "products": (PRODUCTS, {"FSDP2": (4,), "EP x FSDP 2x2": (4,)}),
    "kinds": (OF_KINDS, OVER_KINDS),
}


def cases_on(table: str, wrapper: str) -> dict[str, Case]:
    """The cases of a table that run under a wrapper."""
    cases = TABLES[table][0]
    return {name: cases[name] for name in (PAIRS_UNDER[wrapper] if table == "pairs" else cases)}


@dataclasses.dataclass
class Run:
    """A wrapped model and its optimizer."""

    model: torch.nn.Module
    opt: Any  # lowbit's, which under ZeroRedundancyOptimizer has a part of the parameters
    outer: Any  # what is stepped

    def step(self, number: int) -> None:
        set_grads(self, number)
        self.outer.step()
        self.outer.zero_grad()

    def steps(self, begin: int, end: int) -> None:
        """An optimizer with modes is in eval mode afterwards, as where it is saved."""
        modes = hasattr(self.opt, "train")
        if modes:
            self.opt.train()
        for number in range(begin, end):
            self.step(number)
        if modes:
            self.opt.eval()

    def params(self) -> dict[str, Any]:
        """All that this rank has some of, DTensors and flat shards included, by name."""
        if self.opt is not self.outer:
            return {clean_name(name): p for name, p in self.model.named_parameters()}
        return {name_of(p, name): p for _, p, name, _ in self.opt.members()}

    def weights(self) -> dict[str, torch.Tensor]:
        """What torch.distributed.checkpoint saves, and loads in place but for flat shards."""
        return {
            name: whole_weight(p) if isinstance(p, sharding.FlatShard) else p.detach()
            for name, p in self.params().items()
        }

    @torch.no_grad()
    def take_weights(self, loaded: dict[str, torch.Tensor]) -> None:
        """Those of flat shards, which were not loaded in place."""
        for name, p in self.params().items():
            if isinstance(p, sharding.FlatShard):
                begin, end = p.elements(p.flat.rank)
                p.value.copy_(loaded[name].reshape(-1)[begin:end])

    def unequal(self, want: Kept) -> list[str]:
        """The parameters whose local shard of weight or state has not the bytes of one process."""
        members = {name_of(p, name) for _, p, name, _ in self.opt.members()}
        wrong = wrappers_worker.unequal(self.opt, {name: want[name] for name in members})
        return wrong + [
            f"{name} (weight)"
            for name, p in self.params().items()
            if name not in members and not equal(p.detach(), want[name][""])
        ]


def set_grads(run: Run, number: int) -> None:
    if run.opt is not run.outer:
        for name, p in run.params().items():
            p.grad = global_gradient(name, number, tuple(p.shape), p.dtype).clone()
        return
    members = [p for _, p, _, _ in run.opt.members()]
    if not members or not isinstance(run.model, Vectors):
        return wrappers_worker.set_grads(run.opt, number)
    for p in members:
        begin, end = p.elements(p.flat.rank)
        if p.owner.grad is None:
            p.owner.grad = torch.ones_like(p.owner)  # of padding too, which a step must leave
        grad = global_gradient(p.name, number, tuple(p.shape), p.owner.dtype)
        p.here(p.owner.grad).copy_(grad.reshape(-1)[begin:end])


class Vectors(torch.nn.Module):
    """This rank's part of each unit's parameters in one vector, as ZeRO cuts them, and the slices
    that `lowbit.flat.bind` takes.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.slices: list[FlatSlice] = []
        for unit, module in model.named_children():
            params = dict(module.named_parameters())
            size = -(-sum(p.numel() for p in params.values()) // ranks) + 3
            begin, pieces, places = 0, [], []
            for key, p in params.items():
                offset, length = sharding.sections(begin, p.numel(), size, ranks)[rank]
                begin += p.numel()
                places.append(
                    (f"{unit}.{key}", tuple(p.shape), offset, length, sum(map(len, pieces)))
                )
                piece = p.detach().reshape(-1)[offset : offset + length]
                pieces += [piece, torch.zeros(2, dtype=p.dtype)]  # two of padding
            vector = torch.nn.Parameter(torch.cat(pieces))
            self.register_parameter(unit, vector)
            self.slices += [FlatSlice(vector, *place) for place in places]


def built(wrapper: str, case: Case, seed: int = 0) -> Run:
    """A run before its first step, of another weights by another seed.
    ValueError where lowbit refuses it.
    """
    model = wrap.wrapped(wrap.Model(torch.bfloat16, seed, UNITS), wrapper)
    cls, options = case
    options = {"lr": 1e-2, "seed": 5, **options}
    if wrapper == SLICES:
        model = Vectors(model)
    if cls is lowbit.MuonWithAdamW and wrapper == SLICES:  # by hand: it knows no module's vectors
        groups: Any = [{"params": list(model.parameters()), "use_muon": True}]
    elif cls is lowbit.MuonWithAdamW:
        groups = lowbit.muon_param_groups(model)
    elif wrapper == ZERO:
        groups = lowbit.param_groups(model)
    elif wrapper == SLICES:
        groups = list(model.parameters())
    else:
        groups = list(model.named_parameters())
    if wrapper == ZERO:
        outer = ZeroRedundancyOptimizer(groups, cls, **options)
        return Run(model, outer.optim, outer)
    opt = cls(groups, **options)
    if wrapper.startswith("FSDP1"):
        fsdp1.bind(model, opt)
    elif wrapper == SLICES:
        flat.bind(opt, model.slices)
    return Run(model, opt, opt)
