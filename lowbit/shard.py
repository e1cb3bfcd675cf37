"""Which part of a parameter is here. The only file that knows torch.distributed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

try:
    from torch.distributed.tensor import DTensor, Replicate, Shard
except ImportError:  # torch built without distributed
    DTensor = ()  # type: ignore[assignment,misc]


# Which rows hold blocks that are cut, as csrc/job.h has it.
CUT_ENDS, CUT_ALL = 1, 2


@dataclass(frozen=True)
class Part:
    """The local part of a tensor: a box of the global shape."""

    shape: tuple[int, ...]  # global
    local: tuple[int, ...]
    offset: tuple[int, ...]
    # Where it is cut: a dimension and the process group that holds its parts, for each mesh dimension that shards.
    cuts: tuple[tuple[int, Any], ...] = ()
    # Of something made from a parameter: the parameter's dimension that each of its own follows, -1 where it follows none.
    follows: tuple[int, ...] = ()
    # Where columns are cut: those with which somebody's part begins, but for 0.
    begins: tuple[int, ...] = ()
    # Elements of the box's first and last row that are not here, of a shard of a flattened parameter.
    front: int = 0
    back: int = 0
    cut: int = 0  # CUT_ENDS or CUT_ALL where blocks are

    @property
    def rows(self) -> int:
        return self.local[0] if self.local else 1

    @property
    def cols(self) -> int:
        return math.prod(self.local[1:])

    @property
    def global_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def global_cols(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def row_offset(self) -> int:
        return self.offset[0] if self.offset else 0

    @property
    def col_offset(self) -> int:
        return self.offset[1] * math.prod(self.shape[2:]) if len(self.shape) > 1 else 0

    @property
    def whole_rows(self) -> bool:
        return self.local[1:] == self.shape[1:]


class Flat:
    """Where the shards of one flattened parameter of FSDP1 lie: rank r of `group` holds its elements [r * size, (r + 1) * size)."""

    def __init__(self, group: Any, rank: int, ranks: int, size: int) -> None:
        self.group, self.rank, self.ranks, self.size = group, rank, ranks, size


class Piece:
    """What is here of an original parameter that is part of a flattened one; it stands for a parameter where state is laid out and stepped.

    Its part is the rows that it touches: state has room for all of their elements, `front` of the first and `back` of the last row lie elsewhere.
    """

    is_meta = False

    def __init__(
        self, owner: Tensor, name: str, shape: Sequence[int], flat: Flat, begin: int, alone: bool
    ) -> None:
        """
        Args:
            owner: what the optimizer was given: this very parameter (`alone`), or the flattened one.
            begin: the parameter's first element in the flattened one.
        """
        self.owner, self.name, self.flat, self.begin, self.alone = owner, name, flat, begin, alone
        self.shape = torch.Size(shape)
        self.numel, self.cols = math.prod(shape), math.prod(shape[1:])
        self.rows = [self.rows_of(rank) for rank in range(flat.ranks)]
        begin, end = self.elements(flat.rank)
        first, last = self.rows[flat.rank]
        front, back = (begin - first * self.cols, last * self.cols - end) if end > begin else (0, 0)
        one = (last - first, *shape[1:]) if shape else ()
        self.part = Part(
            tuple(shape), one, (first, *(0,) * (len(shape) - 1)) if shape else (),
            ((0, flat.group),) if flat.ranks > 1 else (), front=front, back=back,
        )  # fmt: skip

    def elements(self, rank: int) -> tuple[int, int]:
        """Those of the parameter that a rank holds, [begin, end)."""
        at = rank * self.flat.size - self.begin
        begin = min(max(at, 0), self.numel)
        return begin, min(max(at + self.flat.size, begin), self.numel)

    def rows_of(self, rank: int) -> tuple[int, int]:
        """The rows that a rank holds some of, [first, last); an empty run where it holds none."""
        begin, end = self.elements(rank)
        if begin == end:
            return (0, 0)
        return begin // self.cols, -(-end // self.cols)

    @property
    def cut_rows(self) -> list[int]:
        """Rows that several ranks hold, in order."""
        ends = {self.elements(rank)[1] for rank in range(self.flat.ranks)}
        return sorted(end // self.cols for end in ends if end < self.numel and end % self.cols)

    @property
    def holders(self) -> list[int]:
        """Ranks that hold some of it."""
        return [rank for rank, (first, last) in enumerate(self.rows) if last > first]

    def here(self, whole: Tensor) -> Tensor:
        """The elements of the piece in a tensor like its owner, in one dimension."""
        whole = whole.detach().reshape(-1)
        if self.alone:
            return whole
        begin, end = self.elements(self.flat.rank)
        at = self.begin - self.flat.rank * self.flat.size
        return whole[max(at + begin, 0) : max(at + end, 0)]

    @property
    def value(self) -> Tensor:
        """The elements that are here, in one dimension; writes to it are writes to the parameter."""
        return self.here(self.owner)

    @property
    def grad(self) -> Tensor | None:
        return None if self.owner.grad is None else self.here(self.owner.grad)

    @property
    def dtype(self) -> torch.dtype:
        return self.owner.dtype

    @property
    def requires_grad(self) -> bool:
        return self.owner.requires_grad


def is_flat(p: Tensor) -> bool:
    """Whether p is a shard of what FSDP1 (FullyShardedDataParallel) flattened."""
    return bool(getattr(p, "_fsdp_flattened", False) or getattr(p, "_is_flat_param", False))


def is_sharded(t: Any) -> bool:
    """Whether t is a DTensor (replicated ones too), or a piece of a flattened parameter."""
    return isinstance(t, DTensor | Piece)


def local(t: Any) -> Tensor:
    """The local tensor of a DTensor or a piece, t itself otherwise. Writes to it are writes to t."""
    if isinstance(t, Piece):
        return t.value
    if not isinstance(t, DTensor):
        return t
    # to_local() builds an autograd view each time; inside a compiled region it is what the compiler knows.
    return t.to_local() if torch.compiler.is_compiling() else t._local_tensor


def whole(t: Tensor) -> Tensor:
    """All of t; of a DTensor gathered, which every rank must ask for at once."""
    return t.full_tensor() if isinstance(t, DTensor) else t


def gradient(p: Any) -> Tensor:
    """The local part of p's gradient, placed as p is: tensor parallelism leaves sums over ranks undone, and other placements."""
    grad = p.grad
    assert grad is not None
    if not isinstance(grad, DTensor) or not isinstance(p, DTensor):
        return local(grad)
    if grad.device_mesh != p.device_mesh or tuple(grad.placements) != tuple(p.placements):
        grad = grad.redistribute(p.device_mesh, p.placements)
    return local(grad)


def holders(t: Tensor) -> tuple[Any, ...]:
    """The process groups over which the parts of t are spread, one for each mesh dimension that shards it; none where it is whole here.

    Raises:
        ValueError: t is a flat shard of FSDP1, which does not say over which ranks it is spread.
    """
    if is_flat(t):
        raise ValueError(
            "a parameter is a flat shard of FSDP1 (FullyShardedDataParallel), which does not know the others; "
            "use the wrapped model's own clip_grad_norm_, or fully_shard (FSDP2)"
        )
    if not isinstance(t, DTensor):
        return ()
    return tuple(
        t.device_mesh.get_group(i)
        for i, placement in enumerate(t.placements)
        if hasattr(placement, "dim") and t.device_mesh.size(i) > 1
    )


def is_ddp(module: Any) -> bool:
    """Whether a module is wrapped in DistributedDataParallel."""
    return isinstance(module, torch.nn.parallel.DistributedDataParallel)


def inside_ddp(module: Any) -> bool:
    """Whether the forward pass that is running now is that of a DistributedDataParallel around a module that is not one itself."""
    around = getattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
    return around is not None and around is not module and module in around.modules()


def is_fully_sharded(module: Any) -> bool:
    """Whether fully_shard (FSDP2) was called on any part of a module."""
    return any(hasattr(m, "set_requires_gradient_sync") for m in module.modules())


def rank() -> int:
    """This process's number among all, 0 where there is one."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def part(p: Any, what: str) -> Part:
    """The local part of a parameter. `what` names it in errors.

    Raises:
        ValueError: the placement is one that state cannot follow yet, with the placement and what to do.
    """
    shape = tuple(p.shape)
    if isinstance(p, Piece):
        return p.part
    if is_flat(p):
        raise ValueError(
            f"{what} is a flat shard of FSDP1 (FullyShardedDataParallel), which hides the shapes that state is laid out by: call "
            "lowbit.fsdp1.bind(model, opt) before the first step (with Accelerate, between prepare(model) and prepare(opt))"
        )
    if not isinstance(p, DTensor):
        return Part(shape, shape, (0,) * len(shape))
    for placement in p.placements:
        dim = getattr(placement, "dim", None)
        if placement.is_partial():
            raise ValueError(
                f"{what} has the placement {placement}; a parameter must be sharded or replicated"
            )
        if dim is not None and dim > 1:
            raise ValueError(
                f"{what} is sharded on dimension {dim}; state follows dimensions 0 and 1"
            )
    local_shape, offset, begins = list(shape), [0] * len(shape), ()
    for dim in {placement.dim for placement in p.placements if hasattr(placement, "dim")}:
        (offset[dim], local_shape[dim]), starts = _held(p, dim, what)
        if dim == 1:
            inner = math.prod(shape[2:])
            begins = tuple(start * inner for start in starts)
    if p._local_tensor.shape != torch.Size(local_shape) and not p.is_meta:
        raise ValueError(
            f"{what} has {tuple(p._local_tensor.shape)} here, and {tuple(local_shape)} by its placements {p.placements}"
        )
    cuts = tuple(
        (placement.dim, p.device_mesh.get_group(i))
        for i, placement in enumerate(p.placements)
        if hasattr(placement, "dim") and p.device_mesh.size(i) > 1
    )
    return Part(shape, tuple(local_shape), tuple(offset), cuts, begins=begins)


Runs = list[tuple[int, int]]  # of indices, [begin, end)


def _held(p: Tensor, dim: int, what: str) -> tuple[tuple[int, int], tuple[int, ...]]:
    """What is here of a DTensor's dimension, (offset, length), and where the other parts of it begin, but for 0."""
    assert isinstance(p, DTensor)
    mesh, mine = p.device_mesh, [(0, p.shape[dim])]
    everyone: list[Runs] = [mine]
    for i, placement in enumerate(p.placements):
        if getattr(placement, "dim", None) == dim:
            several = [_shards(runs, placement, mesh.size(i)) for runs in everyone]
            mine = several[everyone.index(mine)][mesh.get_local_rank(i)]
            everyone = [runs for shards in several for runs in shards]
    if any(len(runs) > 1 for runs in everyone):
        raise ValueError(
            f"{what} has the placements {p.placements} over {tuple(mesh.shape)}, by which a part is several runs of dimension {dim}; "
            "FSDP over tensor parallelism makes such placements only in pairs that give one run"
        )
    starts = {begin for runs in everyone for begin, end in runs if begin > 0}
    begin, end = mine[0] if mine else (p.shape[dim], p.shape[dim])
    return (begin, end - begin), tuple(sorted(starts))


def _shards(runs: Runs, placement: Any, count: int) -> list[Runs]:
    """The parts of one mesh dimension: of _StridedShard each takes one of every piece."""
    pieces = _chunks(runs, getattr(placement, "split_factor", 1))
    several = [_chunks(piece, count) for piece in pieces]
    return [_joined([run for parts in several for run in parts[i]]) for i in range(count)]


def _chunks(runs: Runs, count: int) -> list[Runs]:
    """torch.chunk of a list of runs, with empty parts at the end."""
    size = -(-sum(end - begin for begin, end in runs) // count)
    made: list[Runs] = [[] for _ in range(count)]
    at = 0
    for begin, end in runs:
        while begin < end:
            take = min(end - begin, size - at % size)
            made[at // size].append((begin, begin + take))
            begin, at = begin + take, at + take
    return made


def _joined(runs: Runs) -> Runs:
    made: Runs = []
    for begin, end in runs:
        if made and made[-1][1] == begin:
            made[-1] = (made[-1][0], end)
        else:
            made.append((begin, end))
    return made


def like(
    p: Tensor, value: Tensor, shape: Sequence[int], dims: Sequence[int] | None = None
) -> Tensor:
    """`value`, the local part of a state tensor of global `shape`, placed as p is: plain beside a plain parameter, else a DTensor.

    Args:
        dims: the dimension of p that each of the tensor's own follows; the same ones by default. Over a mesh dimension that shards another one
            the tensor is replicated.
    """
    if not isinstance(p, DTensor):
        return value
    follows = range(len(shape)) if dims is None else dims
    return DTensor.from_local(
        value,
        p.device_mesh,
        _placements(p, follows),
        run_check=False,
        shape=torch.Size(shape),
        stride=_strides(shape),
    )


def _placements(p: Tensor, dims: Sequence[int]) -> list[Any]:
    placements: list[Any] = []
    for placement in p.placements:  # type: ignore[attr-defined]
        dim = getattr(placement, "dim", None)
        if dim is None:
            placements.append(placement)
        elif dim not in dims:
            placements.append(Replicate())
        elif hasattr(placement, "split_factor"):
            at = list(dims).index(dim)
            placements.append(type(placement)(at, split_factor=placement.split_factor))
        else:
            placements.append(Shard(list(dims).index(dim)))
    return placements


def take(
    value: Tensor,
    p: Tensor,
    shape: Sequence[int],
    local: Sequence[int],
    offset: Sequence[int],
    dims: Sequence[int],
    what: str,
) -> Tensor:
    """The part here of a loaded state tensor of global `shape`: `value` may be placed as p is, placed otherwise, whole, or that part.

    Args:
        local, offset: of the part here. dims: as in `like`.
    """
    if isinstance(value, DTensor):
        wanted = _placements(p, dims) if isinstance(p, DTensor) else None
        if isinstance(p, DTensor) and value.device_mesh == p.device_mesh:
            strided = any(hasattr(x, "split_factor") for x in (*value.placements, *p.placements))
            if list(value.placements) == wanted:
                return value.to_local()
            if not strided:  # which torch does not redistribute everywhere
                return value.redistribute(p.device_mesh, wanted).to_local()
        value = value.full_tensor()
    if tuple(value.shape) == tuple(local):
        return value
    if tuple(value.shape) != tuple(shape):
        raise ValueError(
            f"{what} has the shape {tuple(value.shape)}, which is neither the whole {tuple(shape)} nor this rank's part {tuple(local)}"
        )
    for dim, (start, length) in enumerate(zip(offset, local, strict=True)):
        value = value.narrow(dim, start, length)
    return value


def reduce_over(wanted: Sequence[tuple[Tensor, Any, str]]) -> None:
    """All-reduces tensors in place: (tensor, process group, "sum" or "max") each, one collective for each group, operation and dtype.

    Integers only, so that the result does not depend on the order in which ranks are met.
    """
    import torch.distributed as dist

    together: dict[Any, list[Tensor]] = {}
    for tensor, group, operation in wanted:
        if tensor.numel():
            together.setdefault((group, operation, tensor.dtype), []).append(tensor)
    for (group, operation, _), tensors in together.items():
        alone = len(tensors) == 1 and tensors[0].is_contiguous()
        joined = tensors[0] if alone else torch.cat([t.reshape(-1) for t in tensors])
        dist.all_reduce(joined, getattr(dist.ReduceOp, operation.upper()), group)
        if not alone:
            pieces = joined.split([t.numel() for t in tensors])
            for tensor, piece in zip(tensors, pieces, strict=True):
                tensor.copy_(piece.reshape(tensor.shape))


def average_over(t: Tensor, group: Any) -> None:
    """Averages a gradient over a process group in place, as DistributedDataParallel does: each rank's part of it is taken first."""
    import torch.distributed as dist

    t.div_(group.size())
    dist.all_reduce(t, group=group)


# Between the pieces of flattened parameters and DTensors of the original ones


@dataclass(frozen=True)
class Spread:
    """How a state tensor lies over the holders of a parameter."""

    shape: tuple[int, ...]  # of the whole parameter
    local: tuple[int, ...]
    row: int | None  # bytes of each row of the parameter; None where all holders have all of it
    bits: int  # of each element of the parameter, 0 where a row's numbers belong to all of it


def flat_of(group: Any, size: int) -> Flat:
    """The shards of `size` elements over a process group."""
    import torch.distributed as dist

    return Flat(group, dist.get_rank(group), dist.get_world_size(group), size)


def to_chunks(p: Piece, spreads: Sequence[Spread], tensors: Sequence[Tensor]) -> list[Tensor]:
    """State tensors of a piece as DTensors that are sharded on dimension 0 (replicated ones where all holders have all of them). A collective."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    ranks, rank = p.flat.ranks, p.flat.rank
    count = -(-p.shape[0] // ranks) if p.shape else 0
    chunks = [(min(r * count, p.shape[0]), min((r + 1) * count, p.shape[0])) for r in range(ranks)] if p.shape else []  # fmt: skip
    first_holder = p.holders[0] if p.holders else 0

    def shared(i: int, k: int) -> tuple[int, int]:
        """Rows of rank i's piece in rank k's chunk."""
        begin, end = max(p.rows[i][0], chunks[k][0]), min(p.rows[i][1], chunks[k][1])
        return begin, max(begin, end)

    device = p.owner.device
    own = [_own_bytes(p, s, t) for s, t in zip(spreads, tensors, strict=True)]
    sent: list[Tensor] = []
    out, into = [], []
    for k in range(ranks):
        parts = []
        for spread, bytes_ in zip(spreads, own, strict=True):
            if spread.row is None:
                parts.append(bytes_ if rank == first_holder else bytes_[:0])
            else:
                begin, end = shared(rank, k)
                at = p.rows[rank][0]
                parts.append(bytes_[(begin - at) * spread.row : (end - at) * spread.row])
        sent += parts
        out.append(sum(part.numel() for part in parts))
        into.append(
            sum(
                (b.numel() if k == first_holder else 0)
                if s.row is None
                else (shared(k, rank)[1] - shared(k, rank)[0]) * s.row
                for s, b in zip(spreads, own, strict=True)
            )
        )
    received = torch.empty(sum(into), dtype=torch.uint8, device=device)
    dist.all_to_all_single(received, torch.cat(sent), into, out, group=p.flat.group)
    mesh = DeviceMesh.from_group(p.flat.group, device.type)
    made: list[Tensor] = []
    at, mine = 0, (chunks[rank] if chunks else (0, 0))
    buffers = [
        torch.zeros(b.numel() if s.row is None else (mine[1] - mine[0]) * s.row, dtype=torch.uint8, device=device)
        for s, b in zip(spreads, own, strict=True)
    ]  # fmt: skip
    for k in range(ranks):
        for spread, buffer in zip(spreads, buffers, strict=True):
            if spread.row is None:
                begin, size = 0, buffer.numel() if k == first_holder else 0
            else:
                rows = shared(k, rank)
                begin, size = (rows[0] - mine[0]) * spread.row, (rows[1] - rows[0]) * spread.row
            buffer[begin : begin + size] |= received[at : at + size]  # what is not theirs is zero
            at += size
    for spread, tensor, buffer in zip(spreads, tensors, buffers, strict=True):
        whole = spread.row is None
        local = spread.shape if whole else (mine[1] - mine[0], *spread.shape[1:])
        value = buffer.view(tensor.dtype).reshape(local)
        made.append(
            DTensor.from_local(
                value, mesh, [Replicate() if whole else Shard(0)], run_check=False,
                shape=torch.Size(spread.shape), stride=_strides(spread.shape),
            )
        )  # fmt: skip
    return made


def _own_bytes(p: Piece, spread: Spread, tensor: Tensor) -> Tensor:
    """The bytes of a state tensor, zero where they are another holder's."""
    bytes_ = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if spread.row is None or not bytes_.numel() or not (p.part.front or p.part.back):
        return bytes_
    bytes_ = bytes_.clone()
    rows = bytes_.view(-1, spread.row)
    if not spread.bits:  # a row's numbers are those of who has its beginning
        rows[: 1 if p.part.front else 0] = 0
        return bytes_
    before, behind = p.part.front * spread.bits, (p.cols - p.part.back) * spread.bits
    rows[0, : before // 8] = 0
    if before % 8:
        rows[0, before // 8] &= 0xFF << before % 8 & 0xFF
    rows[-1, -(-behind // 8) :] = 0
    if behind % 8:
        rows[-1, behind // 8] &= (1 << behind % 8) - 1
    return bytes_


def complete(p: Piece, values: Sequence[Tensor]) -> list[Tensor]:
    """The rows that a piece touches, in float32, from the elements that are here; what others hold of them comes from there. A collective where
    rows are cut."""
    made = []
    for value in values:
        rows = torch.zeros((p.part.rows, p.cols), dtype=torch.float32, device=value.device)
        flat = rows.view(-1)
        flat[p.part.front : flat.numel() - p.part.back] = value.reshape(-1)
        made.append(rows)
    cut, mine = p.cut_rows, range(*p.rows[p.flat.rank])
    if cut:
        bits = torch.zeros(
            (len(values), len(cut), p.cols), dtype=torch.int32, device=p.owner.device
        )
        here = [(k, r - mine.start) for k, r in enumerate(cut) if r in mine]
        for i, rows in enumerate(made):
            for k, r in here:
                bits[i, k] = rows[r].view(torch.int32)
        reduce_over([(bits, p.flat.group, "sum")])  # each from one
        for i, rows in enumerate(made):
            for k, r in here:
                rows[r] = bits[i, k].view(torch.float32)
    return [rows.reshape(p.part.local) for rows in made]


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    stride: list[int] = []
    run = 1
    for size in reversed(shape):
        stride.insert(0, run)
        run *= size
    return tuple(stride)
