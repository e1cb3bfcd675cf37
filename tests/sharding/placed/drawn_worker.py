"""What a rank does in test_drawn_placements.py: the steps of drawn cases on a sharded parameter and
on the whole one, compared byte by byte.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tests.sharding.placed.drawn import Draw
from tests.support.bits import equal
from tests.support.groups import begin
from tests.support.selection import WHOLE

STEPS = 2
KINDS: dict[str, Callable[..., Any]] = {
    "R": lambda: Replicate(),
    "S": lambda dim: Shard(dim),
    "SS": lambda dim, factor: _StridedShard(dim, split_factor=factor),
}
Place = Callable[[torch.Tensor], torch.Tensor]


@functools.lru_cache(maxsize=64)
def value_of(draw: Draw, at: int, seed: int) -> torch.Tensor:
    """Rows of different sizes, so that statistics of one are seen in another; every fifth row of a
    gradient is zero. Not to be written to.
    """
    shape, generator = draw.spots[at].shape, torch.Generator().manual_seed(10 * at + seed)
    sizes = 10.0 ** torch.randint(-2, 2, (shape[0], *[1] * (len(shape) - 1)), generator=generator)
    if seed:
        sizes[4::5] = 0.0
    return (torch.randn(shape, generator=generator) * sizes).to(draw.dtype)


def built(draw: Draw, places: list[Place]) -> tuple[list[nn.Parameter], Any]:
    """The parameters, and their optimizer or the words in which it is refused."""
    params = [nn.Parameter(place(value_of(draw, i, 0).clone())) for i, place in enumerate(places)]
    try:
        return params, begin(draw.make([(f"w{i}", p) for i, p in enumerate(params)]))
    except ValueError as error:
        return params, str(error)


def stepped(
    params: list[nn.Parameter], opt: Any, draw: Draw, places: list[Place]
) -> dict[str, torch.Tensor]:
    for step in range(STEPS):
        for i, (p, place) in enumerate(zip(params, places, strict=True)):
            p.grad = place(value_of(draw, i, 1 + step).clone())
        opt.step()
    return {
        f"w{i} {key}": t
        for i, p in enumerate(params)
        for key, t in {"": p.detach(), **opt.state[p]}.items()
    }


def same(found: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether this rank holds its part of a whole tensor, cut as torch cuts it for these
    placements; and, where the product is whole, all ranks together the whole.
    """
    if not isinstance(found, DTensor):
        return equal(found, want)
    if found.shape != want.shape:
        return False
    cut = distribute_tensor(want, found.device_mesh, found.placements, src_data_rank=None)
    here = equal(found.to_local(), cut.to_local())
    if not WHOLE:  # its part by its placements on each rank: what torch gathers of that is torch's
        return here
    gathered = found.full_tensor()  # a collective: called whatever the rest says
    strided = any(isinstance(placement, _StridedShard) for placement in found.placements)
    if strided and not equal(cut.full_tensor(), want):  # torch 2.13 gathers some of these wrongly
        return here
    return here and equal(gathered, want)


def everyone(answer: Any) -> list[Any]:
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, answer)
    return answers


def outcome(draw: Draw, meshes: dict[tuple[int, ...], DeviceMesh]) -> tuple[str, str]:
    """("same", ""), ("refused", the words),
    ("alone", the words where one process refuses it too) or ("wrong", what is).
    """
    places: list[Place] = []
    for spot in draw.spots:
        placed = [KINDS[kind](*rest) for kind, *rest in spot.placements]
        places.append(
            functools.partial(
                distribute_tensor,
                device_mesh=meshes[spot.mesh],
                placements=placed,
                src_data_rank=None,
            )
        )
    whole: list[Place] = [lambda t: t for _ in places]
    (params, opt), (others, plain) = built(draw, places), built(draw, whole)
    said = everyone(opt if isinstance(opt, str) else None)
    if None in said and any(said):
        return "wrong", f"ranks disagree: {said}"
    if isinstance(plain, str):
        return ("alone", plain) if said[0] else ("wrong", f"one process refuses it: {plain}")
    if said[0]:
        named = all("parameter 'w" in words for words in said)
        return ("refused", said[0]) if named else ("wrong", f"refused without its name: {said[0]}")
    found, want = stepped(params, opt, draw, places), stepped(others, plain, draw, whole)
    if found.keys() != want.keys():
        return "wrong", f"{sorted(found.keys() ^ want.keys())}"
    differs = [key for key in want if not same(found[key], want[key])]
    return ("wrong", f"{differs}") if differs else ("same", "")


def compare(draws: list[Draw]) -> list[tuple[str, str]]:
    """The outcome of each draw on this rank."""
    meshes: dict[tuple[int, ...], DeviceMesh] = {}
    outcomes = []
    for draw in draws:
        for spot in draw.spots:
            if spot.mesh not in meshes:
                meshes[spot.mesh] = init_device_mesh("cpu", spot.mesh)
        try:
            outcomes.append(outcome(draw, meshes))
        except Exception as error:
            raise AssertionError(f"{draw}: a step raised") from error
    return outcomes


def one_byte_off(draw: Draw) -> str:
    """A comparison that could not fail would prove nothing: the last rank's weights are changed in
    one byte.
    """
    mesh = init_device_mesh("cpu", draw.spots[0].mesh)
    want = value_of(draw, 0, 0)
    found = distribute_tensor(want, mesh, [Shard(0)], src_data_rank=None)
    if dist.get_rank() == dist.get_world_size() - 1:
        found.to_local().view(torch.uint8)[-1] ^= 1
    mine = equal(
        found.to_local(), distribute_tensor(want, mesh, [Shard(0)], src_data_rank=None).to_local()
    )
    return f"{mine} {same(found, want)}"
