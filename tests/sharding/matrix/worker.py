"""What a rank does in test_matrix.py: each rule and format under a wrapper, trained, saved and
loaded, beside one process.
"""

from __future__ import annotations

import functools
import pathlib

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import lowbit
from lowbit import fsdp1
from tests.sharding.matrix.cases import UNITS
from tests.sharding.wrappers_worker import (
    Kept,
    Model,
    kept_of,
    name_of,
    take_steps,
    unequal,
    wrapped,
)

# Wrapper: ranks, as few as show it. More of them, by HSDP,
# columns and with CPU offload: test_wrappers.py.
WRAPPERS = {
    "DDP": 2,
    "FSDP1 orig": 2,
    "FSDP1 flat": 2,
    "FSDP2": 2,
    "TP x FSDP 2x2 row": 4,
    "EP": 2,
    "EP x FSDP 2x2": 4,
    "pipeline": 2,
}
# More ranks for one case of each column of the page: 3 divide no dimension of the model but 36
# rows, and leave one rank no expert.
MORE_RANKS = {"DDP": (3,), "FSDP1 flat": (3,), "FSDP2": (3, 4), "EP": (3,)}


def _adamw(**options):
    return functools.partial(lowbit.AdamW, **options)


def _muon(model, **options):
    return lowbit.MuonWithAdamW(lowbit.muon_param_groups(model), **options)


RULES = {
    "AdamW": _adamw(),
    "Lion": lowbit.Lion,
    "SGD": functools.partial(lowbit.SGD, momentum=0.9),
    "RMSprop": functools.partial(lowbit.RMSprop, centered=True, momentum=0.9),
    "Adagrad": functools.partial(lowbit.Adagrad, lr_decay=0.1),
    "Adam": functools.partial(lowbit.Adam, weight_decay=0.1),
    "AdEMAMix": functools.partial(lowbit.AdEMAMix, t_alpha=3, t_beta3=3),
    "cautious AdamW": _adamw(cautious=True),
    "cautious Lion": functools.partial(lowbit.Lion, cautious=True),
    "Schedule-Free": lowbit.ScheduleFreeAdamW,
    "Adafactor": functools.partial(lowbit.Adafactor, beta1=0.9),
    "CAME": lowbit.CAME,
    "LAMB": lowbit.LAMB,
    "LARS": functools.partial(lowbit.LARS, momentum=0.9),
    "APOLLO": functools.partial(lowbit.APOLLO, rank=4),
    "Fira": functools.partial(lowbit.Fira, rank=4),
    "Muon": _muon,
}
FORMATS = {
    **{name: _adamw(state_format=name) for name in ("4bit", "fp8", "log8", "lpmm4", "factored8")},
    "column scales": functools.partial(
        lowbit.Lion, state_format=lowbit.scaled("linear8", scale="column")
    ),
    "Kahan": _adamw(param_format="bfloat16_kahan"),
    "split8": _adamw(param_format="bfloat16_split8"),
}
CASES = {**RULES, **FORMATS}


def built(wrapper: str, name: str, seed: int = 0):
    model = wrapped(Model(torch.bfloat16, seed, UNITS), wrapper)
    given = model if name == "Muon" else model.named_parameters()
    opt = CASES[name](given, lr=1e-2, seed=5)
    if wrapper.startswith("FSDP1"):
        fsdp1.bind(model, opt)
    return model, opt


@functools.cache
def alone(name: str) -> tuple[Kept, Kept]:
    """What one process has after 10 and after 12 steps."""
    model, opt = built("single", name)
    take_steps(opt, 0, 10)
    ten = kept_of(model, opt)
    take_steps(opt, 10, 12)
    return ten, kept_of(model, opt)


def differs(opt, want: Kept) -> list[str]:
    """`unequal` among the parameters that this rank has."""
    here = {name_of(p, name) for _, p, name, _ in opt.members()}
    return unequal(opt, {name: kept for name, kept in want.items() if name in here})


def saved_of(model, opt) -> tuple[dict, dict]:
    """Weights and state, under the names that all wrappers save them by;
    and what a rule keeps in its group.
    """
    state = fsdp1.get_state_dict(opt)
    group = {
        key: value for key, value in state["param_groups"][0].items() if not key.startswith("param")
    }
    return {"model": get_model_state_dict(model)}, {"state": state["state"], "group": group}


def train(
    wrapper: str, names: list[str], folder: str, save_as: str
) -> tuple[dict[str, str], dict[str, list[str]]]:
    """What is refused at construction, with the words; and what is not equal after 10 steps,
    by case. Saves.
    """
    said, wrong, saved = {}, {}, {}
    for name in names:
        try:
            model, opt = built(wrapper, name)
        except ValueError as error:
            said[name] = str(error)
            continue
        take_steps(opt, 0, 10)
        wrong[name] = differs(opt, alone(name)[0])
        weights, rest = saved_of(model, opt)
        saved[name] = {**weights, **rest}
    dcp.save(saved, checkpoint_id=pathlib.Path(folder) / save_as)
    return said, wrong


def resume(wrapper: str, sources: dict[str, list[str]], folder: str) -> dict[str, list[str]]:
    """What is not equal after loading these cases of what other wrappers saved,
    and 2 steps later.
    """
    wrong: dict[str, list[str]] = {}
    for source, names in sources.items():
        runs = {name: built(wrapper, name, seed=1) for name in names}
        both = {name: saved_of(*run) for name, run in runs.items()}
        rest = {name: part for name, (_, part) in both.items()}
        models = {name: weights for name, (weights, _) in both.items()}
        # Weights of FSDP1 apart: docs/bits/sharding-details.md.
        alone_too = wrapper.startswith("FSDP1")
        several = [{name: part} for name, part in models.items()] if alone_too else [models]
        for part in [rest, *several]:
            dcp.load(part, checkpoint_id=pathlib.Path(folder) / source)
        for name, (model, opt) in runs.items():
            set_model_state_dict(model, models[name]["model"])
            groups = fsdp1.get_state_dict(opt)["param_groups"]
            if len(groups) == 1:
                groups[0].update(rest[name]["group"])
            fsdp1.set_state_dict(opt, {"state": rest[name]["state"], "param_groups": groups})
            found = wrong.setdefault(name, [])
            found += [f"{key}, loaded from {source}" for key in differs(opt, alone(name)[0])]
            take_steps(opt, 10, 12)
            found += [f"{key}, from {source}" for key in differs(opt, alone(name)[1])]
    return wrong


def nothing_loaded() -> list[str]:
    """The comparison can fail: what one process has before its first step."""
    _, opt = built("single", "AdamW")
    return differs(opt, alone("AdamW")[0])
