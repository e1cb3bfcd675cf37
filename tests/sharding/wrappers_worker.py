"""What a rank does in test_wrappers.py: the same global gradients under any wrapper, and everything
that is here beside what one process has.
"""

from __future__ import annotations

import functools
import math
import pathlib
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import lowbit
from lowbit import fsdp1, sharding
from lowbit.config.overrides import clean_name
from tests.sharding.same_bytes import chunk, equal
from tests.sharding.wrapped_checkpoint import load, save, spoil
from tests.support import wrap
from tests.support.selection import WHOLE
from tests.support.wrap import wrapped

# The steps before a checkpoint, and those in all. AdEMAMix warms up for 3 and Schedule-Free for 4.
SAVED, END = (10, 12) if WHOLE else (4, 6)
# Rows are fewer than a real model's; columns are what blocks are cut by.
UNITS = {
    "a": {"square": (96, 896), "vector": (1000,)},
    "b": {"wide": (36, 1408), "odd": (100, 77)},
    "c": {"long": (7, 4096), "conv": (3, 3, 3, 5), "tied": (40, 128)},
    "d": {"never": (70, 70)},
    "e": {"frozen": (5, 33)},
}
REAL_UNITS = {
    **UNITS,
    "a": {"square": (896, 896), "vector": (1000,)},
    "b": {"wide": (1440, 1408), "odd": (1000, 77)},
}
FORMATS = {
    "8bit": lambda p: lowbit.AdamW(p, lr=1e-2, seed=5),
    "4bit": lambda p: lowbit.AdamW(p, lr=1e-2, seed=5, state_format="4bit"),
    "rank-1": lambda p: lowbit.AdamW(p, lr=1e-2, seed=5, state_format="lpmm4"),
    "Adafactor": lambda p: lowbit.Adafactor(p, lr=1e-2, seed=5, beta1=0.9),
}
# Of parameters of the sizes that models have.
REAL = "8bit, real sizes"
# Beyond the table and test_matrix_pairs.py: scales of two numbers, scales that cover more, two
# factored moments, norms, and what is kept beside weights.
MORE = {
    "log8, Kahan": lambda p: lowbit.AdamW(
        p, lr=1e-2, seed=5, state_format="log8", param_format="bfloat16_kahan"
    ),
    "Schedule-Free": lambda p: lowbit.ScheduleFreeAdamW(
        p, lr=1e-2, seed=5, warmup_steps=4, weight_decay=0.1
    ),
    "Schedule-Free, split8": lambda p: lowbit.ScheduleFreeAdamW(
        p, lr=1e-2, seed=5, param_format="bfloat16_split8"
    ),
    "LAMB, split16": lambda p: lowbit.LAMB(p, lr=1e-2, seed=5, param_format="bfloat16_split16"),
    "CAME": lambda p: lowbit.CAME(p, lr=1e-2, seed=5),
    "two lengths, by chance": lambda p: lowbit.AdamW(
        p,
        lr=1e-2,
        seed=5,
        state_format={
            "exp_avg": lowbit.scaled("dynamic8", block=2048, rounding="stochastic"),
            "exp_avg_sq": lowbit.scaled("power1_8_unsigned", block=64),
        },
    ),
    "rows": lambda p: lowbit.Lion(
        p, lr=1e-2, seed=5, state_format=lowbit.scaled("linear8", scale="row")
    ),
    "tensor": lambda p: lowbit.Lion(
        p, lr=1e-2, seed=5, state_format=lowbit.scaled("linear8", scale="tensor")
    ),
}
MAKE = {**FORMATS, **MORE, REAL: FORMATS["8bit"]}
# What is trained side by side and kept in one checkpoint.
TOGETHER = {"formats": [*FORMATS], "more": [*MORE], REAL: [REAL]}
# Wrapper: ranks.
WRAPPERS = {
    "single": 1,
    "DDP": 2,
    "FSDP1 orig": 4,
    "FSDP1 flat": 3,
    "FSDP2": 4,
    "HSDP 2x2": 4,
    "TP x FSDP 2x2 row": 4,
    "TP x FSDP 2x2 col": 4,
    "CPU offload": 2,
}


class Model(wrap.Model):
    def __init__(self, dtype: torch.dtype, seed: int = 0, units: wrap.Units = UNITS) -> None:
        super().__init__(dtype, seed, units)


def build(wrapper: str, name: str, seed: int = 0, dtype: torch.dtype = torch.bfloat16, **binding):
    """The model in a wrapper and its optimizer of the format `name`."""
    model = wrapped(Model(dtype, seed, REAL_UNITS if name == REAL else UNITS), wrapper)
    opt = MAKE[name](model.named_parameters())
    if wrapper.startswith("FSDP1"):
        fsdp1.bind(model, opt, **binding)
    return model, opt


# Gradients


def global_gradient(name: str, step: int, shape, dtype: torch.dtype) -> torch.Tensor:
    """Of a parameter's name and the step alone; not to be written to. Of the largest, one is drawn
    and moved on by each step: drawing takes longer than stepping.
    """
    if math.prod(shape) < 1 << 17:
        return _kept_gradient(name, step, tuple(shape), dtype)
    drawn = _kept_gradient(name, 0, tuple(shape), dtype)
    return drawn.reshape(-1).roll(7919 * step).reshape(shape)


@functools.lru_cache(maxsize=512)
def _kept_gradient(name: str, step: int, shape, dtype: torch.dtype) -> torch.Tensor:
    seed = zlib.crc32(f"{name} {step}".encode())
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def name_of(p, name: str) -> str:
    return clean_name(p.name if isinstance(p, sharding.FlatShard) else name)


def set_grads(opt, step: int) -> None:
    """As each wrapper leaves the global gradients."""
    for _, p, name, _ in opt.members():
        name = name_of(p, name)
        if name in ("d.never", "e.frozen"):
            continue
        grad = global_gradient(name, step, p.shape, p.dtype)
        if isinstance(p, sharding.FlatShard):  # as FSDP1 leaves it, by its own records
            owner = p.owner
            if p.alone:
                begin, end = p.elements(p.flat.rank)
                owner.grad = grad.reshape(-1)[begin:end].clone() if end > begin else None
                continue
            if owner.grad is None:
                owner.grad = torch.zeros_like(owner)
            info = owner._shard_param_infos[owner._fqns.index(name.rpartition(".")[2])]
            if info.in_shard:
                begin, end = info.intra_param_start_idx, info.intra_param_end_idx + 1
                at = info.offset_in_shard
                owner.grad[at : at + end - begin] = grad.reshape(-1)[begin:end]
        elif isinstance(p, DTensor):
            p.grad = DTensor.from_local(
                chunk(grad, p).clone(),
                p.device_mesh,
                p.placements,
                run_check=False,
                shape=p.shape,
                stride=grad.stride(),
            )
        else:
            p.grad = grad.clone()


# Beside what one process has


Kept = dict[str, dict[str, torch.Tensor]]  # weight, as "", and state of each parameter


@functools.cache
def alone(name: str) -> dict[int, Kept]:
    """What one process has when it saves, and 2 steps later."""
    model, opt = build("single", name)
    made = {}
    for begin, end in ((0, SAVED), (SAVED, END)):
        take_steps(opt, begin, end)
        made[end] = kept_of(model, opt)
    return made


def kept_of(model: nn.Module, opt) -> Kept:
    """Copies, in one process."""
    return {
        name: {"": p.detach().clone(), **{key: t.clone() for key, t in opt.state[p].items()}}
        for name, p in model.named_parameters()
    }


def unequal(opt, want: Kept, without: tuple[str, ...] = ()) -> list[str]:
    """The parameters whose local shard of weight or state has not the bytes of one process."""
    state = fsdp1.get_state_dict(opt)["state"]
    members = {name_of(p, name): p for _, p, name, _ in opt.members()}
    wrong = {f"{name} is missing" for name in want.keys() - members.keys()}
    for name, p in members.items():
        found = {"": p.detach() if isinstance(p, torch.Tensor) else p, **state.get(name, {})}
        keys = (found.keys() | want[name].keys()) - set(without)
        if not all(k in found and k in want[name] and equal(found[k], want[name][k]) for k in keys):
            wrong.add(name)
    return sorted(wrong)


# The table


def train(wrapper: str, which: str, folder: str) -> list[tuple[str, str]]:
    """What is not equal when it is saved, by format and parameter."""
    runs = {name: build(wrapper, name) for name in TOGETHER[which]}
    torch.manual_seed(dist.get_rank())  # must not matter
    for _, opt in runs.values():
        take_steps(opt, 0, SAVED)
    save(wrapper, runs, pathlib.Path(folder) / f"{wrapper} {which}")
    return [
        (name, key) for name, (_, opt) in runs.items() for key in unequal(opt, alone(name)[SAVED])
    ]


def loads(which: str, wrapper: str, sources: list[str]) -> dict[str, list[str]]:
    """Source -> the formats that are loaded from it: all from the first, of the others one in turn,
    so that every format comes from every wrapper and to each; all where the product is whole.
    """
    formats, at = TOGETHER[which], [*WRAPPERS].index(wrapper)
    one = {source: [formats[(at + i) % len(formats)]] for i, source in enumerate(sources)}
    return dict.fromkeys(sources, formats) if WHOLE else {**one, sources[0]: formats}


def resume(wrapper: str, which: str, sources: list[str], folder: str) -> list[tuple[str, str]]:
    """What is not equal after loading what each of the other wrappers saved, and 2 steps later."""
    wrong = []
    every = {name: build(wrapper, name, seed=1) for name in TOGETHER[which]}
    for source, names in loads(which, wrapper, sources).items():
        runs = {name: every[name] for name in names}
        for model, opt in runs.values():
            spoil(model, opt)
        load(wrapper, runs, pathlib.Path(folder) / f"{source} {which}")
        for name, (_, opt) in runs.items():
            wrong += [
                (name, f"{key}, loaded from {source}") for key in unequal(opt, alone(name)[SAVED])
            ]
            take_steps(opt, SAVED, END)
            wrong += [(name, f"{key}, from {source}") for key in unequal(opt, alone(name)[END])]
    return wrong


def take_steps(opt, begin: int, end: int) -> None:
    """An optimizer with modes is in eval mode afterwards, as where it is saved."""
    modes = hasattr(opt, "train")
    if modes:
        opt.train()
    for step in range(begin, end):
        set_grads(opt, step)
        opt.step()
        opt.zero_grad()
    if modes:
        opt.eval()


def off_by_one_gradient() -> list[str]:
    """As train, with one element of one gradient of the last step changed."""
    model, opt = build("DDP", "8bit")
    for step in range(SAVED):
        set_grads(opt, step)
        if step == SAVED - 1:
            model.module.a.square.grad[50, 700] *= -1
        opt.step()
        opt.zero_grad()
    return unequal(opt, alone("8bit")[SAVED])


def nothing_loaded() -> list[str]:
    """What `spoil` leaves."""
    model, opt = build("FSDP2", "8bit")
    spoil(model, opt)
    return unequal(opt, alone("8bit")[SAVED])
