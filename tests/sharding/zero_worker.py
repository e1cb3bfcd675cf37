"""Ranks of test_zero_redundancy.py: ZeroRedundancyOptimizer over named groups beside one plain
optimizer, from the same gradients.
"""

from __future__ import annotations

import copy
import pathlib
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

import lowbit
from tests.sharding.training_worker import Small, backward, batches

OPTIONS: dict[str, Any] = {"lr": 1e-2, "param_format": "bfloat16_stochastic"}
FEW = lowbit.override("*ond.weight", state_format="4bit")
# Each with what its parameters are grouped by; a rank has whole parameters,
# so none of them needs a collective.
RULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (lowbit.SGD, {"momentum": 0.9}),
    "Lion": (lowbit.Lion, {"cautious": True}),
    "RMSprop": (lowbit.RMSprop, {"centered": True}),
    "Adagrad": (lowbit.Adagrad, {}),
    "AdEMAMix": (lowbit.AdEMAMix, {}),
    "AdamW 4bit": (lowbit.AdamW, {"state_format": "4bit"}),
    "AdamW lpmm4": (lowbit.AdamW, {"state_format": "lpmm4"}),
    "AdamW split8": (lowbit.AdamW, {"param_format": "bfloat16_split8"}),
    "Adafactor": (lowbit.Adafactor, {"beta1": 0.9}),
    "CAME": (lowbit.CAME, {}),
    "LAMB": (lowbit.LAMB, {}),
    "LARS": (lowbit.LARS, {}),
    "APOLLO": (lowbit.APOLLO, {"rank": 8}),
    "Fira": (lowbit.Fira, {"rank": 8}),
    "Muon": (lowbit.MuonWithAdamW, {}),
}


def model() -> torch.nn.Module:
    return Small().bfloat16()


def sharded(groups: Any, cls: Any = lowbit.AdamW, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(groups, cls, **{**OPTIONS, **options})


def train(net: torch.nn.Module, opt: torch.optim.Optimizer, begin: int, end: int) -> None:
    for step in range(begin, end):
        backward(net, batches(step, "plain")[0])
        opt.step()
        opt.zero_grad()


def inner(net: torch.nn.Module, opt: ZeroRedundancyOptimizer) -> dict[str, dict[str, torch.Tensor]]:
    """The state of every parameter by its name in the model, from whichever rank steps it."""
    mine = {
        name: dict(opt.optim.state[p]) for name, p in net.named_parameters() if p in opt.optim.state
    }
    parts: list = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return {name: state for part in parts for name, state in part.items()}


def unequal(net: Any, opt: Any, alone: Any, plain: Any) -> list[str]:
    """What ZeroRedundancyOptimizer has otherwise than a plain optimizer,
    streams of random bits included.
    """
    states, wrong = inner(net, opt), []
    for (name, p), q in zip(net.named_parameters(), alone.parameters(), strict=True):
        want = {"": q.detach(), **plain.state[q]}
        found = {"": p.detach(), **states[name]}
        if found.keys() != want.keys():
            wrong.append(f"{name}: {sorted(found.keys() ^ want.keys())}")
        else:
            wrong += [f"{name}.{key}" for key, t in found.items() if not torch.equal(t, want[key])]
    return wrong


def same_bits(overridden: bool) -> list[str]:
    net, alone = model(), model()
    options = {"overrides": FEW} if overridden else {}
    opt = sharded(lowbit.param_groups(net), **options)
    plain = lowbit.AdamW(lowbit.param_groups(alone), **OPTIONS, **options)
    train(net, opt, 0, 3)
    train(alone, plain, 0, 3)
    return unequal(net, opt, alone, plain)


def same_bits_of(rule: str, views: bool = False) -> list[str]:
    """Under another rule; `views`: parameters are views of buckets,
    which ZeroRedundancyOptimizer broadcasts whole.
    """
    net, alone = model(), model()
    cls, options = RULES[rule]
    groups = lowbit.muon_param_groups if cls is lowbit.MuonWithAdamW else lowbit.param_groups
    opt = sharded(groups(net), cls, **options, parameters_as_bucket_view=views)
    if views:
        assert any(p.data_ptr() != p.untyped_storage().data_ptr() for p in net.parameters())
    plain = cls(groups(alone), **{**OPTIONS, **options})
    train(net, opt, 0, 3)
    train(alone, plain, 0, 3)
    return unequal(net, opt, alone, plain)


def names_said() -> list[str]:
    """Wrong names: of this rank's optimizer, and of the whole one behind a step."""
    net = model()
    opt = sharded(lowbit.param_groups(net))
    of = {p: name for name, p in net.named_parameters()}
    wrong = [f"{said}, not {of[p]}" for _, p, said, _ in opt.optim.members() if said != of[p]]
    train(net, opt, 0, 1)
    for group in opt.param_groups:
        if group["param_names"] != [of[p] for p in group["params"]]:
            wrong.append(f"whole: {group['param_names']}")
    state_dicts = opt.optim.state_dict(), copy.deepcopy(opt.optim).state_dict()
    for state_dict in state_dicts:
        for packed, group in zip(state_dict["param_groups"], opt.optim.param_groups, strict=True):
            if packed["param_names"] != [of[p] for p in group["params"]]:
                wrong.append(f"state dict: {packed['param_names']}")
    return wrong


def resumed() -> list[str]:
    """Through a consolidated state dict: into ZeroRedundancyOptimizer,
    and into a plain optimizer.
    """
    alone = model()
    plain = lowbit.AdamW(lowbit.param_groups(alone), **OPTIONS)
    net = model()
    opt = sharded(lowbit.param_groups(net))
    train(alone, plain, 0, 4)
    train(net, opt, 0, 2)
    opt.consolidate_state_dict(to=0)
    said = [opt.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(said, src=0)
    saved: Any = said[0]
    wrong = [
        f"saved: {group['param_names']}"
        for group, of in zip(saved["param_groups"], plain.param_groups, strict=True)
        if group["param_names"] != of["param_names"]
    ]
    again = model()
    again.load_state_dict(net.state_dict())
    loaded = sharded(lowbit.param_groups(again))
    loaded.load_state_dict(copy.deepcopy(saved))
    train(again, loaded, 2, 4)
    wrong += unequal(again, loaded, alone, plain)
    third = model()
    third.load_state_dict(net.state_dict())
    whole = lowbit.AdamW(lowbit.param_groups(third), **OPTIONS)
    whole.load_state_dict(saved)
    train(third, whole, 2, 4)
    pairs = zip(third.named_parameters(), alone.parameters(), strict=True)
    return wrong + [f"plain {name}" for (name, p), q in pairs if not torch.equal(p, q)]


def saved(rule: str, folder: str) -> list[str]:
    """Two steps, and a consolidated state dict in a file."""
    net = model()
    cls, options = RULES[rule]
    opt = sharded(lowbit.param_groups(net), cls, **options)
    train(net, opt, 0, 2)
    opt.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        torch.save([net.state_dict(), opt.state_dict()], pathlib.Path(folder) / f"{rule}.pt")
    return []


def continued(rule: str, folder: str) -> list[str]:
    """Two more steps of what any number of ranks saved, beside four of one process."""
    cls, options = RULES[rule]
    alone, net = model(), model()
    plain = cls(lowbit.param_groups(alone), **{**OPTIONS, **options})
    train(alone, plain, 0, 4)
    weights, state = torch.load(pathlib.Path(folder) / f"{rule}.pt", weights_only=True)
    net.load_state_dict(weights)
    opt = sharded(lowbit.param_groups(net), cls, **options)
    opt.load_state_dict(state)
    train(net, opt, 2, 4)
    return unequal(net, opt, alone, plain)


def overlapped() -> str:
    """What torch says of `overlap_with_ddp`,
    for which it knows functional forms of its own optimizers alone.
    """
    net = model()
    try:
        sharded(net.parameters(), overlap_with_ddp=True)
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def added() -> list[str]:
    """A group that comes later, whose names ZeroRedundancyOptimizer hands over whole again."""
    net, alone = model(), model()
    made = []
    for of, make in ((net, sharded), (alone, lambda groups: lowbit.AdamW(groups, **OPTIONS))):
        first, second = lowbit.param_groups(of)
        opt = make([first])
        opt.add_param_group(second)
        train(of, opt, 0, 2)
        made.append(opt)
    return unequal(net, made[0], alone, made[1])


def refused() -> str:
    """What names by hand are answered with."""
    net = model()
    names, params = zip(*net.named_parameters(), strict=True)
    try:
        sharded([{"params": list(params), "param_names": list(names)}])
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def modes_refused() -> str:
    """Modes are one rank's there."""
    try:
        ZeroRedundancyOptimizer(lowbit.param_groups(model()), lowbit.ScheduleFreeAdamW, lr=1e-2)
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def pattern_of_nothing() -> str:
    net = model()
    try:
        sharded(
            lowbit.param_groups(net), overrides=lowbit.override("*.q_proj", state_format="4bit")
        )
    except ValueError as error:
        return str(error)
    return "nothing was refused"
