"""Checkpoints looked into, checked, converted and resharded: what `lowbit-ckpt` does, with the same options and the same reports.

Nothing in a file is ever executed, and nothing of a tensor's size is held in memory. The work runs without the GIL; Ctrl-C and an exception of the
progress callback stop it, and nothing is left behind.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

try:
    from lowbit import _checkpoint  # type: ignore[attr-defined]
except ImportError as error:  # built without it
    _missing: str | None = str(error)
    _checkpoint = None
else:
    _missing = None

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Codes",
    "Param",
    "State",
    "Tensor",
    "convert",
    "diff",
    "inspect",
    "reshard",
    "verify",
]

Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]
Progress = Callable[[int, int], bool | None]


class CheckpointError(RuntimeError):
    """What is wrong with a checkpoint, or with writing one.

    Attributes:
        text: one sentence, which names the place too.
        code: the exit code of `lowbit-ckpt`: 1 the machine said no, 2 usage, 3 bad or unsafe input, 4 two things differ that must not.
        file, item, tensor: where, as far as it is known; "" otherwise. A name from a file has what a terminal could obey escaped.
    """

    def __init__(
        self, text: str, code: int = 1, file: str = "", item: str = "", tensor: str = ""
    ) -> None:
        super().__init__(text, code, file, item, tensor)  # all of them, so that it can be pickled
        self.text, self.code, self.file, self.item, self.tensor = text, code, file, item, tensor

    def __str__(self) -> str:
        return self.text


def inspect(
    path: Path, *, include: Sequence[str] = (), exclude: Sequence[str] = (), health: bool = False,
    digest: bool = False, progress: Progress | bool | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What is in a checkpoint: the report of `lowbit-ckpt inspect --json`.

    Args:
        path: a folder of `torch.distributed.checkpoint`, a file of `torch.save` or one of safetensors.
        include, exclude: globs on flat names such as "optim.state.*.exp_avg"; without `include` everything counts.
        health: read everything, for the range of scales, shares of zero and saturated codes, and NaN.
        digest: read everything, for a digest of all tensors that does not depend on how they are sharded.
        progress: called with bytes done and bytes in all, at most ten times a second, in this thread; False, and an exception, stop the work.
            True: a bar on standard error (with tqdm, where that is a terminal).

    Raises:
        CheckpointError: the checkpoint is not sound.
    """
    with _Shown(progress, "inspect") as told:
        text = _module().inspect(
            _bytes(path), include=_names(include), exclude=_names(exclude), health=health, digest=digest, progress=told,
        )  # fmt: skip
    return json.loads(text)


def verify(
    path: Path, *, include: Sequence[str] = (), exclude: Sequence[str] = (), finite: bool = True,
    opaque: bool = False, threads: int = 1, progress: Progress | bool | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Whether a checkpoint is whole: structure, checksums, coverage, values.

    Args:
        finite: also look at values: NaN, infinity, second moments below 0.
        opaque: let values pass that are no plain data; torch would run what they name.
        threads: that read.
        path, include, exclude, progress: as for `inspect`.

    Returns:
        The report of `lowbit-ckpt verify --json`. "ok" says whether the values are sound; "findings" name file, item and tensor of what is not.

    Raises:
        CheckpointError: the structure is not sound, or a checksum does not hold.
    """
    with _Shown(progress, "verify") as told:
        text = _module().verify(
            _bytes(path), include=_names(include), exclude=_names(exclude), finite=finite, opaque=opaque, threads=threads, progress=told,
        )  # fmt: skip
    return json.loads(text)


def convert(
    source: Path, target: Path, *, to: str = "", container: str = "", state_format: str = "",
    block: int = 0, keep: bool = False, wide: Sequence[str] = (), weights: str = "", seed: int = 0,
    model: Path = "", from_dialect: str = "", lossy: bool = False, include: Sequence[str] = (),
    exclude: Sequence[str] = (), dry_run: bool = False, world_size: int | None = None, mesh: Mapping[int, int] | None = None,
    force: bool = False, manifest: bool = True, threads: int = 1, memory_limit: int = 64 << 20,
    progress: Progress | bool | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Writes a checkpoint in the words of another optimizer.

    Args:
        to: the dialect: "torch", "lowbit", "bitsandbytes", ...; "" keeps the source's.
        container: "dcp", "torch" or "safetensors"; "" follows the target's name, else the source.
        state_format, block: how state is kept where the dialect has a choice: "8bit", "4bit", "float32", ...
        keep: refuse rather than requantize.
        wide: globs on names of parameters whose state stays float32.
        weights, seed: round float32 weights too, such as to "bfloat16_stochastic", with that seed.
        model: a checkpoint with the weights, where names or shapes are needed.
        from_dialect: whose state the source is, where its names fit two; "" is the one that is surest.
        lossy: leave out what the target cannot keep, with a warning.
        world_size, mesh: of a directory; by default as many ranks as the source has.
        target, dry_run, force, manifest, threads, memory_limit: as for `reshard`.
        include, exclude, progress: as for `inspect`.

    Returns:
        The report of `lowbit-ckpt convert --json`: for each state whether its bits stayed, else the errors of requantizing it.

    Raises:
        CheckpointError: the source is not sound, or the target cannot say what the source does.
    """
    with _Shown(progress, "convert") as told:
        text = _module().convert(
            _bytes(source), _bytes(target), to=to, from_=from_dialect, container=container, state_format=state_format, block=block, keep=keep,
            wide=_names(wide), include=_names(include), exclude=_names(exclude), dry_run=dry_run, lossy=lossy, weights=weights,
            seed=seed, model=_bytes(model), progress=told,
            writing=_writing(world_size, {} if world_size is None and mesh is None else mesh, force, manifest, threads, memory_limit),
        )  # fmt: skip
    return json.loads(text)


def reshard(
    source: Path, target: Path, *, world_size: int | None = None,
    mesh: Mapping[int, int] | None = None, requantize: bool = False, include: Sequence[str] = (),
    exclude: Sequence[str] = (), dry_run: bool = False, force: bool = False, manifest: bool = True,
    threads: int = 1, memory_limit: int = 64 << 20, progress: Progress | bool | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Writes a checkpoint for another number of ranks; values stay as they are.

    Args:
        target: the folder to write; it appears whole or not at all.
        world_size: number of ranks, cut as FSDP2 cuts: `mesh={0: world_size}`.
        mesh: instead, parts along each tensor dimension, such as `{0: 4, 1: 2}` for FSDP over 4 and tensor parallelism over 2.
        requantize: make new codes where a cut falls inside a block of torchao's quantized state; otherwise that is an error.
        dry_run: only the plan.
        force: replace the target where it exists.
        manifest: leave digests of what was written, for `verify`.
        threads, memory_limit: that read and write, and their buffers in bytes, all together.
        include, exclude, progress: as for `inspect`.

    Returns:
        The report of `lowbit-ckpt reshard --json`.

    Raises:
        CheckpointError: the source is not sound, or the target cannot be written.
    """
    if world_size is None and mesh is None:
        raise TypeError("reshard needs world_size= or mesh=")
    with _Shown(progress, "reshard") as told:
        text = _module().reshard(
            _bytes(source), _bytes(target), include=_names(include), exclude=_names(exclude), dry_run=dry_run, requantize=requantize,
            progress=told, writing=_writing(world_size, mesh, force, manifest, threads, memory_limit),
        )  # fmt: skip
    return json.loads(text)


def diff(
    a: Path, b: Path, *, bytes: bool = False, tolerance: float = 0.0, include: Sequence[str] = (),
    exclude: Sequence[str] = (), progress: Progress | bool | None = None,
) -> dict[str, Any]:  # fmt: skip
    """How two checkpoints differ.

    Args:
        bytes: compare what lies in the files; by default what it means, decoded.
        tolerance: of a difference, relative to the 2-norm of the larger of two tensors.
        include, exclude, progress: as for `inspect`.

    Returns:
        The report of `lowbit-ckpt diff --json`: "same", and the "differences" by name with the first element that differs.
    """
    with _Shown(progress, "diff") as told:
        text = _module().diff(
            _bytes(a), _bytes(b), include=_names(include), exclude=_names(exclude), bytes=bytes, tolerance=tolerance, progress=told,
        )  # fmt: skip
    return json.loads(text)


@dataclass(frozen=True)
class Tensor:
    """A tensor of a checkpoint."""

    name: str  # torch's flat name: the path joined by dots
    path: tuple[str | int, ...]
    dtype: str  # "float32", as torch calls it
    shape: tuple[int, ...]
    bytes: int
    cls: str = ""  # of a tensor subclass; what it is made of is in `parts`
    parts: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)  # dtype, shape


@dataclass(frozen=True)
class Codes:
    """How the codes of a state lie: `rows` rows of `cols` values, each row a bit stream of whole bytes, a scale to each `block`."""

    format: str  # of lowbit's catalog
    bits: int
    rows: int
    cols: int
    block: int


@dataclass(frozen=True)
class State:
    """One state of one parameter, whoever wrote it."""

    name: str  # torch's: "exp_avg", "exp_avg_sq", ...
    shape: tuple[int, ...]
    signed: bool
    stored_as: str  # for people
    bytes: int
    codes: Codes | None  # where they are lowbit's own bit for bit
    place: tuple[int, int] = (0, 0)  # in the model


@dataclass(frozen=True)
class Param:
    """A parameter that the optimizer keeps state of."""

    name: str  # "" where the checkpoint only numbers its parameters
    index: int  # in the order of the groups; -1 where it only names them
    shape: tuple[int, ...] | None
    states: tuple[State, ...]
    numbers: Mapping[str, Any]  # "step", ...


@dataclass(frozen=True)
class Model:
    """What the optimizer state of a checkpoint means."""

    dialect: str
    algorithm: str
    flattened: bool
    root: tuple[str | int, ...]  # where the optimizer's state dict lies
    params: tuple[Param, ...]
    groups: tuple[tuple[dict[str, Any], tuple[int, ...]], ...]  # settings, numbers of parameters
    warnings: tuple[str, ...]


class Checkpoint:
    """A checkpoint that is read piece by piece. Only what is asked for is read, into memory of the caller's.

    Opening it reads and checks its structure; bytes are checked against their checksums while they are read. Several threads may use one, one
    of them reads at a time.
    """

    def __init__(self, path: Path) -> None:
        self.path = os.fsdecode(path)
        self._reader = _module().Reader(_bytes(path))
        self.container: str = self._reader.container()
        self.tensors: dict[str, Tensor] = {}
        self._number: dict[str, int] = {}
        for i, (name, where, dtype, shape, size, cls, parts) in enumerate(self._reader.tensors()):
            made = {part: (kind, dims) for part, kind, dims in parts}
            self.tensors[name] = Tensor(name, where, dtype, shape, size, cls, made)
            self._number[name] = i
        # Values that are no tensors, by flat name; dtypes and devices are text.
        self.values: dict[str, Any] = {name: value for name, _, value in self._reader.values()}
        self._model: Model | None = None

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """The checkpoint at `path`: a folder of `torch.distributed.checkpoint`, a file of `torch.save` or one of safetensors."""
        return cls(path)

    @property
    def opaque(self) -> list[str]:
        """Names of what is neither a tensor nor plain data; it is never looked into."""
        return self._reader.opaque()

    def read(
        self,
        name: str,
        begin: int | None = None,
        end: int | None = None,
        *,
        part: str | None = None,
    ) -> bytearray:
        """Rows [begin, end) of a tensor, in its dtype and row-major; all of it by default.

        Args:
            part: of a tensor subclass, which of its tensors.
        """
        shape = self._shape(name, part)
        if begin is None and end is None:
            return self.read_box(name, (0,) * len(shape), shape, part=part)
        if not shape:
            raise ValueError(f"{name} has no rows")
        first, last = begin or 0, shape[0] if end is None else end
        return self.read_box(
            name, (first, *(0 for _ in shape[1:])), (last - first, *shape[1:]), part=part
        )

    def read_box(
        self, name: str, offset: Sequence[int], shape: Sequence[int], *, part: str | None = None
    ) -> bytearray:
        """The box of `shape` at `offset`, in the tensor's dtype and row-major."""
        self._shape(name, part)
        number = -1 if part is None else list(self.tensors[name].parts).index(part)
        return self._reader.read(self._number[name], number, list(offset), list(shape))

    def _shape(self, name: str, part: str | None) -> tuple[int, ...]:
        if name not in self.tensors:
            raise KeyError(f"{self.path} has no tensor {name!r}")
        if part is None:
            return self.tensors[name].shape
        if part not in self.tensors[name].parts:
            raise KeyError(f"{name} is not made of a {part!r}")
        return self.tensors[name].parts[part][1]

    @property
    def model(self) -> Model:
        """What the optimizer state means, by the dialect that it is written in.

        Raises:
            CheckpointError: it is written in none that is known, or in two equally.
        """
        if self._model is None:
            said = self._reader.model()
            params = []
            for i, p in enumerate(said["params"]):
                states = tuple(
                    State(
                        s["name"], s["shape"], s["signed"], s["stored_as"], s["bytes"],
                        Codes(**s["codes"]) if s["codes"] else None, (i, j),
                    )
                    for j, s in enumerate(p["states"])
                )  # fmt: skip
                params.append(Param(p["name"], p["index"], p["shape"], states, p["numbers"]))
            groups = tuple((g["settings"], tuple(g["params"])) for g in said["groups"])
            self._model = Model(
                said["dialect"], said["algorithm"], said["flattened"], said["root"], tuple(params), groups, tuple(said["warnings"]),
            )  # fmt: skip
        return self._model

    @property
    def params(self) -> tuple[Param, ...]:
        """`model.params`."""
        return self.model.params

    def read_state(self, state: State, first: int = 0, count: int | None = None) -> bytearray:
        """Float32 values [first, first + count) of a state in row-major order, decoded; all of them by default."""
        total = math.prod(state.shape)
        end = total if count is None else first + count
        if not 0 <= first <= end <= total:
            raise ValueError(f"values {first}..{end} are not inside the {total} of {state.name}")
        _ = self.model
        return self._reader.read_state(*state.place, first, end - first)

    def read_state_box(
        self, state: State, offset: Sequence[int], shape: Sequence[int]
    ) -> bytearray:
        """The box of `shape` at `offset` of a state's values, float32, decoded."""
        _ = self.model
        return self._reader.read_state_box(*state.place, list(offset), list(shape))

    def read_codes(self, state: State, begin: int, end: int, *, scales: bool = False) -> bytearray:
        """Rows [begin, end) of a state's codes, or of its scales, as `state.codes` says they lie."""
        _ = self.model
        return self._reader.read_codes(*state.place, begin, end, scales)

    def finish(self) -> None:
        """Holds the checksums of what was read in part, and that no file changed since.

        Raises:
            CheckpointError: one does not hold: what was read is not to be trusted.
        """
        self._reader.finish()


class _Shown:
    """A progress callback out of what callers give; for True a bar that goes when the work is done."""

    def __init__(self, progress: Progress | bool | None, label: str) -> None:
        self.progress, self.label, self.bar = progress, label, None

    def __enter__(self) -> Progress | None:
        if self.progress is None or self.progress is False:
            return None
        if self.progress is not True:
            return self.progress
        try:
            from tqdm.auto import tqdm
        except ImportError as error:
            raise ImportError(
                "progress=True draws with tqdm: pip install tqdm, or give a callback"
            ) from error
        self.bar = tqdm(desc=self.label, unit="B", unit_scale=True, disable=None, leave=False)
        return self._update

    def _update(self, done: int, total: int) -> None:
        assert self.bar is not None
        self.bar.total = total
        self.bar.update(done - self.bar.n)

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()


def _module() -> Any:
    if _checkpoint is None:
        raise ImportError(
            f"lowbit was built without its checkpoint module ({_missing}). Install its libraries and pybind11, and build again: sudo apt-get install "
            "libcli11-dev nlohmann-json3-dev libfmt-dev libdeflate-dev libxxhash-dev libzstd-dev && pip install pybind11 && "
            "pip install --no-build-isolation --force-reinstall --no-deps ."
        )
    return _checkpoint


def _bytes(path: Path) -> bytes:
    return os.fsencode(path)  # a file's name need not be text


def _names(names: Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _writing(
    world_size: int | None, mesh: Mapping[int, int] | None, force: bool, manifest: bool, threads: int, memory_limit: int
) -> Any:  # fmt: skip
    if world_size is not None and mesh is not None:
        raise TypeError("give world_size= or mesh=, not both")
    parts = {0: 1 if world_size is None else world_size} if mesh is None else dict(mesh)
    if any(n < 1 for n in parts.values()) or any(d < 0 for d in parts):
        raise ValueError(f"a tensor is cut into one part or more along each dimension, not {parts}")
    return _module().Writing(
        replace=force, manifest=manifest, threads=threads, memory=memory_limit, parts=list(parts.values()), dims=list(parts),
    )  # fmt: skip
