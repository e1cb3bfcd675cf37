"""A checkpoint opened for reading, and what is in it. Public as names of lowbit.checkpoint, which says what is wrong with one."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lowbit.checkpoint.errors import CheckpointError
from lowbit.checkpoint.object_store import Opened, StorageOptions
from lowbit.checkpoint.paths import Path

try:
    from lowbit import _checkpoint  # type: ignore[attr-defined]
except ImportError as error:  # built without it
    _missing: str | None = str(error)
    _checkpoint = None
else:
    _missing = None


def module() -> Any:
    """The C++ module; ImportError where lowbit was built without it."""
    if _checkpoint is None:
        raise ImportError(
            f"lowbit was built without its checkpoint module ({_missing}). Install its libraries, and build again: sudo apt-get install "
            "libcli11-dev nlohmann-json3-dev libfmt-dev libdeflate-dev libxxhash-dev libzstd-dev && "
            "pip install --no-build-isolation --force-reinstall --no-deps ."
        )
    return _checkpoint


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
class OwnTensor:
    """One of the tensors that lowbit keeps a state in: codes, scales, a full-precision moment, a compensation."""

    key: str  # lowbit's: "exp_avg_dynamic8", "exp_avg_dynamic8_scale", ...
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class State:
    """One state of one parameter, whoever wrote it."""

    name: str  # torch's: "exp_avg", "exp_avg_sq", ...
    shape: tuple[int, ...]
    signed: bool
    stored_as: str  # for people
    bytes: int
    codes: Codes | None  # where they are lowbit's own bit for bit
    own: tuple[OwnTensor, ...] = ()  # where the file holds the very tensors that lowbit keeps
    place: tuple[int, int] = (0, 0)  # in the model


@dataclass(frozen=True)
class Param:
    """A parameter that the optimizer keeps state of."""

    name: str  # "" where the checkpoint only numbers its parameters
    index: int  # in the order of the groups; -1 where it only names them
    shape: tuple[int, ...] | None
    states: tuple[State, ...]
    numbers: Mapping[str, Any]  # "step", ...


class Group(NamedTuple):
    """A parameter group."""

    settings: dict[str, Any]  # without "params"
    params: tuple[int, ...]  # places in Model.params
    # Settings that the file keeps as tensors of one element: where in `settings`, and the tensor's flat name.
    tensors: tuple[tuple[tuple[str | int, ...], str], ...] = ()


@dataclass(frozen=True)
class Model:
    """What the optimizer state of a checkpoint means."""

    dialect: str
    algorithm: str
    flattened: bool
    root: tuple[str | int, ...]  # where the optimizer's state dict lies
    params: tuple[Param, ...]
    groups: tuple[Group, ...]
    warnings: tuple[str, ...]


class Checkpoint:
    """A checkpoint that is read piece by piece. Only what is asked for is read, into memory of the caller's.

    Opening it reads and checks its structure; bytes are checked against their checksums while they are read. Several threads may use one, one
    of them reads at a time.
    """

    def __init__(
        self, path: Path, storage_options: StorageOptions = None, optimizer: str | None = None
    ) -> None:
        self.path = os.fsdecode(path)
        self._opened = Opened(path, storage_options)  # as long as the reader may read
        self._reader = module().Reader(self._opened.name, optimizer)
        self.container: str = self._reader.container()
        self.tensors: dict[str, Tensor] = {}
        self._number: dict[str, int] = {}
        for i, said in enumerate(self._reader.tensors()):
            tensor = Tensor(**said)
            self.tensors[tensor.name] = tensor
            self._number[tensor.name] = i
        # Values that are no tensors, by flat name; dtypes and devices are text.
        self.values: dict[str, Any] = self._reader.values()
        self._model: Model | None = None

    @classmethod
    def open(
        cls, path: Path, storage_options: StorageOptions = None, optimizer: str | None = None
    ) -> Checkpoint:
        """The checkpoint at `path`: a folder of `torch.distributed.checkpoint`, a file of `torch.save` or one of safetensors.

        Args:
            path: a path, or a URL that fsspec knows.
            storage_options: what fsspec opens a URL with.
            optimizer: the one of `optimizers` that `model` means; needed only where there are several.
        """
        return cls(path, storage_options, optimizer)

    @property
    def optimizers(self) -> list[str]:
        """Where optimizer state dicts lie, by flat names: "optim"; "" is the top."""
        return self._reader.optimizers()

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
            CheckpointError: it is written in none that is known, or in two equally; or there are several optimizers, and `optimizer=` chose none.
        """
        if self._model is None:
            said = self._read_model()
            for i, param in enumerate(said["params"]):
                for j, state in enumerate(param["states"]):
                    codes = state["codes"]
                    state["codes"] = None if codes is None else Codes(**codes)
                    state["own"] = tuple(OwnTensor(**tensor) for tensor in state["own"])
                    state["place"] = (i, j)
                param["states"] = tuple(State(**state) for state in param["states"])
            said["params"] = tuple(Param(**param) for param in said["params"])
            said["groups"] = tuple(Group(**group) for group in said["groups"])
            said["warnings"] = tuple(said["warnings"])
            self._model = Model(**said)
        return self._model

    def _read_model(self) -> Any:
        try:
            return self._reader.model()
        except CheckpointError as error:
            if error.file or error.text.startswith(self.path):
                raise
            raise CheckpointError(f"{self.path}: {error}", error.code) from None

    @property
    def params(self) -> tuple[Param, ...]:
        """`model.params`."""
        return self.model.params

    def read_state(self, state: State, first: int = 0, count: int | None = None) -> bytearray:
        """Float32 values [first, first + count) of a state in row-major order, dequantized; all of them by default."""
        total = math.prod(state.shape)
        end = total if count is None else first + count
        if not 0 <= first <= end <= total:
            raise ValueError(f"values {first}..{end} are not inside the {total} of {state.name}")
        _ = self.model
        return self._reader.read_state(*state.place, first, end - first)

    def read_state_box(
        self, state: State, offset: Sequence[int], shape: Sequence[int]
    ) -> bytearray:
        """The box of `shape` at `offset` of a state's values, float32, dequantized."""
        _ = self.model
        return self._reader.read_state_box(*state.place, list(offset), list(shape))

    def read_own_box(
        self, state: State, tensor: OwnTensor, offset: Sequence[int], shape: Sequence[int]
    ) -> bytearray:
        """The box of `shape` at `offset` of one of `state.own`, in its dtype and row-major."""
        _ = self.model
        number = state.own.index(tensor)
        return self._reader.read_own(*state.place, number, list(offset), list(shape))

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
