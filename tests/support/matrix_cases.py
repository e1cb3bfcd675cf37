"""What the matrix of docs/sharding-matrix.md is about: the rules and formats, the rows of wrappers
with their ranks, and a run of each.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
import torch.distributed as dist
import wrap
import wrappers_worker
from digests import whole_weight
from torch.distributed.optim import ZeroRedundancyOptimizer
from wrappers_worker import Kept, equal, global_gradient, name_of

import lowbit
from lowbit import flat, fsdp1, sharding
from lowbit.config.overrides import clean_name
from lowbit.flat import FlatSlice

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
# The kinds of checkpoints: of 8-bit state, and of a factored one beside it.
OF_KINDS = {name: RULES[name] for name in ("AdamW", "Adafactor")}
OVER_KINDS = {
    name: (4,)
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
    "products": (PRODUCTS, {"FSDP2": (4,), "EP x FSDP 2x2": (4,)}),
    "kinds": (OF_KINDS, OVER_KINDS),
}


# A recording, and `make matrix`, run every cell.
WHOLE = "1" in (os.environ.get("LOWBIT_WHOLE"), os.environ.get("LOWBIT_RECORD"))


def cases_on(table: str, wrapper: str, ranks: int) -> dict[str, Case]:
    return TABLES[table][0]


def cases_in_run(table: str, wrapper: str, ranks: int) -> dict[str, Case]:
    """Of the products every other one, the others under the other wrapper: every pair of a rule, a
    format and a wrapper is among them (test_matrix_page.py)."""
    cases = cases_on(table, wrapper, ranks)
    if WHOLE or table != "products":
        return cases
    turn = list(TABLES[table][1]).index(wrapper)
    rules, formats = list(OF_PRODUCTS), list(IN_PRODUCTS)
    return {
        f"{rule}, {name}": cases[f"{rule}, {name}"]
        for i, rule in enumerate(rules)
        for j, name in enumerate(formats)
        if (i + j + turn) % 2 == 0
    }


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
        """The parameters of which what is here are not the bytes of one process: weight or
        state.
        """
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
