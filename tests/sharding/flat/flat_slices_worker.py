"""What a rank does in test_flat_slices.py: parameters cut into slices of vectors in several ways,
beside one process.
"""

from __future__ import annotations

import functools
import itertools
import math
import pathlib
import zlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import lowbit
from lowbit import flat, sharding
from lowbit.flat import FlatSlice
from tests.sharding.same_bytes import equal

SHAPES = {"square": (48, 448), "vector": (1000,), "odd": (100, 77), "conv": (3, 3, 3, 5), "one": ()}
OPTIONS = {"lr": 1e-2, "seed": 5}
MAKE = {
    "8bit": lambda p: lowbit.AdamW(p, **OPTIONS),
    "4bit": lambda p: lowbit.AdamW(p, **OPTIONS, state_format="4bit"),
    "rank-1": lambda p: lowbit.AdamW(p, **OPTIONS, state_format="lpmm4"),
    "Adafactor": lambda p: lowbit.Adafactor(p, **OPTIONS, beta1=0.9),
}
LAYOUTS = ("sections", "each", "uneven")


def drawn(name: str, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    return torch.randn(SHAPES[name], generator=generator).bfloat16()


@functools.cache
def alone(name: str) -> list[dict[str, dict[str, torch.Tensor]]]:
    """Weights and state of one process after 0, 1, ... steps."""
    params = {key: torch.nn.Parameter(drawn(key, -1)) for key in SHAPES}
    opt = MAKE[name](list(params.items()))
    made = []
    for step in range(5):
        made.append(
            {
                key: {"": p.detach().clone(), **{k: t.clone() for k, t in opt.state[p].items()}}
                for key, p in params.items()
            }
        )
        for key, p in params.items():
            p.grad = drawn(key, step)
        opt.step()
    return made


def ranges_of(layout: str, name: str) -> list[tuple[int, int]]:
    """(offset, length) of a parameter on every rank."""
    ranks, numel = dist.get_world_size(), math.prod(SHAPES[name])
    if layout == "sections":  # of all parameters in one vector, as ZeRO's stages 1 and 2 cut
        begin = 0
        for other, shape in SHAPES.items():
            if other == name:
                break
            begin += math.prod(shape)
        size = -(-sum(map(math.prod, SHAPES.values())) // ranks) + 3
        return sharding.sections(begin, numel, size, ranks)
    if layout == "each":  # of every parameter, as stage 3 cuts
        return sharding.sections(0, numel, -(-numel // ranks), ranks)
    ends = [0, *(numel * (2 * r + 1) // (2 * ranks + 3) for r in range(1, ranks)), numel]
    return [(a, b - a) for a, b in itertools.pairwise(ends)][::-1]  # the last rank first


def build(layout: str, name: str, known: bool = False, **binding):
    """The vectors of a layout and their optimizer;
    `known` says that ranks need not ask each other.
    """
    ranges = {key: ranges_of(layout, key) for key in SHAPES}
    mine = {key: ranges[key][dist.get_rank()] for key in SHAPES}
    parts = {key: drawn(key, -1).reshape(-1)[at : at + n] for key, (at, n) in mine.items()}
    padding = torch.zeros(2).bfloat16()  # with gradients of one a step would move them
    tensors: dict[str, torch.Tensor] = {}
    slices = []
    groups = [["square", "vector"], ["odd", "conv", "one"]]
    for keys in groups:
        tensors["+".join(keys)] = vector = torch.cat([t for k in keys for t in (parts[k], padding)])
        at = 0
        for key in keys:
            slices.append(
                FlatSlice(
                    vector, key, SHAPES[key], *mine[key], at, ranges=ranges[key] if known else None
                )
            )
            at += mine[key][1] + 2
    opt = MAKE[name]([{"params": [vector.requires_grad_()]} for vector in tensors.values()])
    flat.bind(opt, slices, **binding)
    return opt


def step(opt, number: int) -> None:
    for _, p, _, _ in opt.members():
        begin, end = p.elements(p.flat.rank)
        if p.owner.grad is None:
            p.owner.grad = torch.ones_like(p.owner)
        p.here(p.owner.grad).copy_(drawn(p.name, number).reshape(-1)[begin:end])
    opt.step()


def unequal(opt, want) -> list[str]:
    state = flat.get_state_dict(opt)["state"]
    wrong = []
    for _, p, _, _ in opt.members():
        found = {"": p, **state[p.name]}
        keys = found.keys() | want[p.name].keys()
        wrong += [
            f"{p.name}.{k}"
            for k in keys
            if not (k in found and k in want[p.name] and equal(found[k], want[p.name][k]))
        ]
    for group in opt.param_groups:
        for vector in group["params"]:
            rest = vector.detach().clone()
            for p in opt.flat_shards[vector]:
                p.here(rest).zero_()
            wrong += ["padding was stepped"] if rest.any() else []
    return wrong


def same_bits(name: str, folder: str) -> list[str]:
    """Three steps in every layout, each saved; then one more after a load,
    from this layout and from another one.
    """
    wrong, ranks = [], dist.get_world_size()
    place = pathlib.Path(folder) / f"{name} {ranks}"
    for layout in LAYOUTS:
        opt = build(layout, name, known=layout == "each")
        for number in range(3):
            step(opt, number)
        wrong += [f"{layout}: {what}" for what in unequal(opt, alone(name)[3])]
        again = build(layout, name)
        again.load_state_dict(opt.state_dict())
        weights(again, name, 3)
        step(again, 3)
        wrong += [f"{layout}, loaded: {what}" for what in unequal(again, alone(name)[4])]
        dcp.save({"optim": flat.get_state_dict(opt)}, checkpoint_id=place / layout)
    for layout, source in zip(LAYOUTS, (*LAYOUTS[1:], LAYOUTS[0]), strict=True):
        wrong += [
            f"{layout} from {source}: {what}" for what in resumed(layout, name, place / source)
        ]
    return wrong


def weights(opt, name: str, number: int) -> None:
    """Those that one process has after so many steps."""
    for _, p, _, _ in opt.members():
        begin, end = p.elements(p.flat.rank)
        with torch.no_grad():
            p.value.copy_(alone(name)[number][p.name][""].reshape(-1)[begin:end])


def resumed(layout: str, name: str, place: pathlib.Path) -> list[str]:
    opt = build(layout, name)
    saved = {"optim": flat.get_state_dict(opt)}
    dcp.load(saved, checkpoint_id=place)
    flat.set_state_dict(opt, saved["optim"])
    weights(opt, name, 3)
    step(opt, 3)
    return unequal(opt, alone(name)[4])


def from_others(name: str, folder: str) -> list[str]:
    """What 3 ranks saved, on as many as there are."""
    place = pathlib.Path(folder) / f"{name} 3"
    return [w for layout in LAYOUTS for w in resumed(layout, name, place / layout)]


def by_parts(how: str) -> list[str]:
    """One group, or one tensor, is shown at a time."""
    opt = build("sections", "8bit", by_parts=True)
    groups, wrong = opt.param_groups, []
    for number in range(3):
        for _, p, _, _ in opt.members():
            begin, end = p.elements(p.flat.rank)
            p.owner.grad = torch.ones_like(p.owner) if p.owner.grad is None else p.owner.grad
            p.here(p.owner.grad).copy_(drawn(p.name, number).reshape(-1)[begin:end])
        if how == "groups":
            for group in groups:
                opt.param_groups = [group]
                opt.step()
            opt.param_groups = groups
        else:
            held = [group["params"] for group in opt.param_groups]
            for group in opt.param_groups:
                group["params"] = []
            for group, params in zip(opt.param_groups, held, strict=True):
                for p in params:
                    group["params"] = [p]
                    opt.step()
                    group["params"] = []
            if number == 1:  # as stage 3 saves and loads
                for group, params in zip(opt.param_groups, held, strict=True):
                    group["params"] = list(params)
                opt.load_state_dict(opt.state_dict())
            # Between steps the groups are empty.
            saved = opt.state_dict()
            wrong += (
                []
                if len(saved["state"]) == len(held)
                else [f"state of {len(saved['state'])} vectors"]
            )
            counted = opt.stats(probe=True)["parameters"].keys()
            wrong += [] if counted == SHAPES.keys() else [f"stats of {list(counted)}"]
            opt.load_state_dict(saved)
            state = flat.get_state_dict(opt)
            wrong += [] if len(state["state"]) == len(SHAPES) else [f"state of {list(state)}"]
            for group, params in zip(opt.param_groups, held, strict=True):
                group["params"] = list(params)
    return wrong + unequal(opt, alone("8bit")[3])


def float32_view() -> list[str]:
    opt = build("sections", "8bit", export="fp32")
    for number in range(3):
        step(opt, number)
    saved, again = opt.state_dict(), build("sections", "8bit", export="fp32")
    shapes = [value["exp_avg"].shape for value in saved["state"].values()]
    wrong = [] if shapes == [g["params"][0].shape for g in opt.param_groups] else [str(shapes)]
    again.load_state_dict(saved)
    weights(again, "8bit", 3)
    return wrong + unequal(again, alone("8bit")[3])


def float32_view_without_a_moment() -> str:
    """What rank 1 alone lacks."""

    def made():
        begin, n = ranges_of("each", "square")[dist.get_rank()]
        vector = torch.nn.Parameter(drawn("square", -1).reshape(-1)[begin : begin + n].clone())
        opt = lowbit.AdamW([("square", vector)], **OPTIONS)
        held = FlatSlice(vector, "square", SHAPES["square"], begin, n)
        flat.bind(opt, [held], export="fp32")
        return opt, vector

    opt, vector = made()
    vector.grad = torch.ones_like(vector)
    opt.step()
    saved = opt.state_dict()
    if dist.get_rank() == 1:
        del saved["state"][0]["exp_avg_sq"]
    try:
        made()[0].load_state_dict(saved)
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def float32_view_beside_ordinary() -> bool:
    """A parameter that no vector holds, as FSDP1 leaves those of modules that it does not wrap."""

    def made():
        begin, n = ranges_of("each", "square")[dist.get_rank()]
        vector = torch.nn.Parameter(drawn("square", -1).reshape(-1)[begin : begin + n].clone())
        params = {"square": vector, "odd": torch.nn.Parameter(drawn("odd", -1))}
        opt = lowbit.AdamW(list(params.items()), **OPTIONS)
        held = FlatSlice(vector, "square", SHAPES["square"], begin, n)
        flat.bind(opt, [held], export="fp32")

        def advance(number):
            vector.grad = drawn("square", number).reshape(-1)[begin : begin + n].clone()
            params["odd"].grad = drawn("odd", number)
            opt.step()

        return opt, list(params.values()), advance

    opt, params, advance = made()
    again, copies, advance_again = made()
    advance(0)
    for p, q in zip(copies, params, strict=True):
        p.data.copy_(q.data)
    again.load_state_dict(opt.state_dict())
    advance(1)
    advance_again(1)
    return all(map(torch.equal, copies, params))


def clipped() -> tuple[float, float]:
    """The norm of all slices' gradients, and that of whole gradients."""
    opt = build("each", "8bit")
    for _, p, _, _ in opt.members():
        begin, end = p.elements(p.flat.rank)
        p.owner.grad = torch.zeros_like(p.owner) if p.owner.grad is None else p.owner.grad
        p.here(p.owner.grad).copy_(drawn(p.name, 0).reshape(-1)[begin:end])
    found = lowbit.clip_grad_norm_([g["params"][0] for g in opt.param_groups], 1.0)
    plain = [torch.nn.Parameter(drawn(key, -1)) for key in SHAPES]
    for p, key in zip(plain, SHAPES, strict=True):
        p.grad = drawn(key, 0)
    return float(found), float(lowbit.clip_grad_norm_(plain, 1.0))


def refusals() -> dict[str, str]:
    """What bind says on this rank, of 2, of slices that do not fit together."""
    rank, vector = dist.get_rank(), torch.zeros(64)

    def said(*slices: FlatSlice) -> str:
        opt = lowbit.AdamW([vector])
        try:
            flat.bind(opt, slices)
        except ValueError as error:
            return str(error)
        return "nothing was refused"

    half = functools.partial(FlatSlice, vector, "weight", (4, 32), start=0)
    return {
        "fits": said(half(64 * rank, 64)),
        "overlap": said(half(60 * rank, 64)),
        "gap": said(half(64 * rank, 60)),
        "replicas": said(FlatSlice(vector, "weight", (2, 32), 0, 64)),
        "names": said(FlatSlice(vector, f"weight{rank}", (4, 32), 64 * rank, 64)),
        "shapes": said(FlatSlice(vector, "weight", (4 + rank, 32), 64 * rank, 64)),
        "missing": said(
            FlatSlice(vector, "v", (128,), 64 * rank, 32, start=0),
            *([half(0, 32, start=32)] if rank == 0 else []),
        ),
        "none on one rank": said(*([half(0, 64)] if rank == 0 else [])),
        "by itself": said(FlatSlice(vector, "w", (64,), 0, 64, ranges=[(0, 64)])),
        "too many ranges": said(half(64 * rank, 64, ranges=[(0, 64), (64, 64), (128, 0)])),
        "other ranges": said(half(64 * rank, 64, ranges=[(64, 64), (0, 64)])),
        "on one rank alone": said(half(64 * rank, 64 + 8 * rank)),
    }
