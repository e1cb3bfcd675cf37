"""What a rank does in test_state_home.py: weights cut where their state cannot lie, trained, saved
and loaded, beside one process.
"""

from __future__ import annotations

import functools
import pathlib
import zlib
from collections.abc import Sequence

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

import lowbit
from tests.sharding.same_bytes import equal
from tests.sharding.wrappers_worker import END, SAVED
from tests.support import wrap

# [experts, width, hidden]; experts that ranks do not divide; fewer experts than ranks; four
# dimensions. What is not an expert is on every rank.
SHAPES = {
    "down": (4, 24, 32),
    "uneven": (5, 12, 48),
    "few": (1, 32, 64),
    "deep": (6, 4, 6, 20),
    "up": (4, 32, 24),
    "square": (16, 32),
    "bias": (7,),
}
CUT = ("down", "uneven", "few", "deep")

# Where they lie: the shape of the mesh, and the dimension that each of its own cuts;
# None: a copy on every rank.
PLACES = {
    "single": ((), ()),
    "rows 2": ((2,), (0,)),
    "2": ((2,), (2,)),
    "3": ((3,), (2,)),
    "4": ((4,), (2,)),
    "EP x TP": ((2, 2), (0, 2)),
    "TP x EP": ((2, 2), (2, 0)),
    "columns x TP": ((2, 2), (1, 2)),
    "copies x TP": ((2, 2), (None, 2)),
    "FSDP x EP x TP": ((2, 2, 2), ("strided", 0, 2)),
    "uneven columns": ((3,), (1,)),
}


def _adamw(**options):
    return functools.partial(lowbit.AdamW, **options)


def _linear8(scale: str):
    return functools.partial(lowbit.Lion, state_format=lowbit.scaled("linear8", scale=scale))


RULES = {
    "AdamW": _adamw(),
    "AdamW amsgrad": _adamw(amsgrad=True),
    "cautious": _adamw(cautious=True),
    "Lion": lowbit.Lion,
    "SGD": functools.partial(lowbit.SGD, momentum=0.9, state_format="8bit"),
    "RMSprop": functools.partial(lowbit.RMSprop, momentum=0.9, centered=True),
    "Adagrad": lowbit.Adagrad,
    "AdEMAMix": lowbit.AdEMAMix,
    "LARS": functools.partial(lowbit.LARS, momentum=0.9),
    "LAMB": lowbit.LAMB,
    "Adafactor": functools.partial(lowbit.Adafactor, beta1=0.9),
    "CAME": lowbit.CAME,
    "Schedule-Free": lowbit.ScheduleFreeAdamW,
    "Schedule-Free, split8": functools.partial(
        lowbit.ScheduleFreeAdamW, param_format="bfloat16_split8"
    ),
    "APOLLO": functools.partial(lowbit.APOLLO, rank=4),
    "Muon": lambda params, **options: lowbit.MuonWithAdamW(_muon_groups(params), **options),
    "NorMuon, Kahan": lambda params, **options: lowbit.MuonWithAdamW(
        _muon_groups(params), normuon_beta2=0.95, param_format="bfloat16_kahan", **options
    ),
}
FORMATS = {
    **{name: _adamw(state_format=name) for name in ("4bit", "fp8", "log8", "lpmm4", "factored8")},
    **{f"{scale} scales": _linear8(scale) for scale in ("row", "column", "tensor")},
    "Kahan": _adamw(param_format="bfloat16_kahan"),
    "split8": _adamw(param_format="bfloat16_split8"),
    "split16, LAMB": functools.partial(lowbit.LAMB, param_format="bfloat16_split16"),
    "Kahan, Adafactor": functools.partial(lowbit.Adafactor, param_format="bfloat16_kahan"),
    "full precision": _adamw(full_precision=True),
}
CASES = {**RULES, **FORMATS}


def _muon_groups(params):
    """Batches of three dimensions by Muon, all else by AdamW."""
    params = list(params)
    matrices = [(name, p) for name, p in params if p.dim() == 3]
    return [
        {"params": matrices, "use_muon": True},
        {"params": [each for each in params if each[1].dim() != 3], "use_muon": False},
    ]


# Values


@functools.lru_cache(maxsize=512)
def value_of(name: str, step: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Of matrices of different sizes, so that statistics of one are seen in another."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    sizes = 10.0 ** torch.randint(-2, 1, (shape[0], *[1] * (len(shape) - 1)), generator=generator)
    return (torch.randn(shape, generator=generator) * sizes).bfloat16()


def part_of(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence) -> torch.Tensor:
    """What torch says is here of a whole tensor with these placements."""
    shape, offset = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
    for dim, (begin, length) in enumerate(zip(offset, shape, strict=True)):
        whole = whole.narrow(dim, begin if length else 0, length)
    return whole.clone(memory_format=torch.contiguous_format)


def placed(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence) -> DTensor:
    return DTensor.from_local(
        part_of(whole, mesh, placements),
        mesh,
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def same(found: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether this rank holds its part of what one process has."""
    if isinstance(found, DTensor):
        if found.shape != want.shape:
            return False
        want = part_of(want, found.device_mesh, found.placements)
        found = found.to_local()
    return equal(found, want)


# Models


class Model(nn.Module):
    def __init__(self, place: str, seed: int = 0, names: Sequence[str] = tuple(SHAPES)) -> None:
        super().__init__()
        sizes, dims = PLACES[place]
        mesh = wrap.shared_mesh(sizes) if sizes else None
        for name in names:
            whole = value_of(name, -1 - seed, SHAPES[name])
            if mesh is None:
                p = whole.clone()
            else:
                cut = name in CUT
                moved = 1 if name == "up" and 2 in dims else None  # TP by rows
                at = dims if cut else [moved if dim == 2 else None for dim in dims]
                p = placed(whole, mesh, [_placement(dim) for dim in at])
            self.register_parameter(name, nn.Parameter(p))


def _placement(dim):
    if dim == "strided":
        return _StridedShard(0, split_factor=2)
    return Replicate() if dim is None else Shard(dim)


def built(place: str, case: str, seed: int = 0, **options):
    names = [*SHAPES]
    if place == "TP x EP":  # where experts lie in that order, ranks have to divide them
        names.remove("uneven"), names.remove("few"), names.remove("deep")
    if place == "columns x TP":
        names.remove("few")
        if CASES[case] in (RULES["Muon"], RULES["NorMuon, Kahan"]):  # refused: rows are cut too
            names.remove("down"), names.remove("uneven")
        if case == "lpmm4":
            names = [name for name in names if name not in CUT]
    model = Model(place, seed, names)
    opt = CASES[case](model.named_parameters(), lr=1e-2, seed=5, min_numel=1, **options)
    return model, opt


def set_grads(model: Model, step: int) -> None:
    for name, p in model.named_parameters():
        whole = value_of(name, step, tuple(p.shape))
        p.grad = (
            placed(whole, p.device_mesh, p.placements) if isinstance(p, DTensor) else whole.clone()
        )


def take_steps(model: Model, opt, begin: int, end: int) -> None:
    modes = hasattr(opt, "train")
    if modes:
        opt.train()
    for step in range(begin, end):
        set_grads(model, step)
        opt.step()
        opt.zero_grad()
    if modes:
        opt.eval()


def kept_of(model: Model, opt) -> dict[str, dict[str, torch.Tensor]]:
    return {
        name: {"": p.detach().clone(), **{key: t.clone() for key, t in opt.state[p].items()}}
        for name, p in model.named_parameters()
    }


def save_alone(folder: str) -> None:
    """What one process has of every case when it saves, and 2 steps later, to compare with; and
    what it saves.
    """
    runs = {case: built("single", case) for case in CASES}
    for run in runs.values():
        take_steps(*run, 0, SAVED)
    save(runs, "single", folder)
    for case, run in runs.items():
        before = kept_of(*run)
        take_steps(*run, SAVED, END)
        torch.save([before, kept_of(*run)], pathlib.Path(folder) / f"alone {case}.pt")


def state_of(run) -> dict[str, dict]:
    weights, state = get_state_dict(*run)
    return {"model": weights, "optim": state}


def save(runs: dict, place: str, folder: str) -> None:
    saved = {case: state_of(run) for case, run in runs.items()}
    dcp.save(saved, checkpoint_id=pathlib.Path(folder) / f"home {place}")


@functools.cache
def alone(folder: str, case: str) -> list[dict[str, dict[str, torch.Tensor]]]:
    return torch.load(pathlib.Path(folder) / f"alone {case}.pt")


def differs(model: Model, opt, want: dict[str, dict[str, torch.Tensor]]) -> list[str]:
    wrong = []
    for name, p in model.named_parameters():
        found = {"": p.detach(), **opt.state[p]}
        wrong += [
            f"{name} {key}"
            for key in found.keys() | want[name].keys()
            if key not in found or key not in want[name] or not same(found[key], want[name][key])
        ]
    return wrong


# What the test calls


def train(place: str, folder: str, cases: Sequence[str] = tuple(CASES)) -> dict[str, list[str]]:
    """What is not equal when it is saved."""
    wrong, runs = {}, {}
    for case in cases:
        model, opt = runs[case] = built(place, case)
        if place in ("2", "EP x TP") and case == "AdamW":
            away = {name for name, p in model.named_parameters() if opt.layouts[p].home}
            assert away == set(CUT), away
        take_steps(model, opt, 0, SAVED)
        wrong[case] = differs(model, opt, alone(folder, case)[0])
    save(runs, place, folder)
    return wrong


def resume(
    place: str, source: str, folder: str, cases: Sequence[str] = tuple(CASES)
) -> dict[str, list[str]]:
    """What is not equal after loading what was saved elsewhere, and 2 steps later."""
    wrong = {}
    runs = {case: built(place, case, seed=1) for case in cases}
    saved = {case: state_of(run) for case, run in runs.items()}
    dcp.load(saved, checkpoint_id=pathlib.Path(folder) / f"home {source}")
    for case, (model, opt) in runs.items():
        found = saved[case]
        set_state_dict(model, opt, model_state_dict=found["model"], optim_state_dict=found["optim"])
        wrong[case] = [f"{each}, loaded" for each in differs(model, opt, alone(folder, case)[0])]
        take_steps(model, opt, SAVED, END)
        wrong[case] += differs(model, opt, alone(folder, case)[1])
    return wrong


def nothing_loaded(folder: str) -> list[str]:
    """The comparison can fail."""
    return differs(*built("2", "AdamW"), alone(folder, "AdamW")[0])
