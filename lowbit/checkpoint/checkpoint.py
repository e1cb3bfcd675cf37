"""A checkpoint opened for reading. Public as lowbit.checkpoint.Checkpoint."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from lowbit.checkpoint.contents import Codes, Group, Model, OwnTensor, Param, State, Tensor
from lowbit.checkpoint.errors import CheckpointError
from lowbit.checkpoint.native import native
from lowbit.checkpoint.object_store import Opened, StorageOptions
from lowbit.checkpoint.paths import Path


class Checkpoint:
    """A checkpoint that is read piece by piece. Only what is asked for is read,
    into memory of the caller's.

    Opening it reads and checks its structure. Bytes are checked against their checksums while they
    are read. Several threads may use one; one of them reads at a time.

    Args:
        path: a path, or a URL that fsspec knows: a folder of `torch.distributed.checkpoint` or of
            DeepSpeed, or a file of `torch.save` or safetensors.
        storage_options: keyword arguments that fsspec opens a URL with.
        optimizer: the one of `optimizers` that `model` means; needed only if there are several.

    Attributes:
        path: as given, as text.
        container: "dcp", "torch", "safetensors", ...
        tensors: all tensors, by flat name.
        values: plain values, by flat name; dtypes and devices are text.

    Raises:
        CheckpointError: code 1 for I/O, 2 for usage, 3 for a bad checkpoint.
        ImportError: lowbit was built without its checkpoint module,
            or a URL needs a package that is not installed.
        ValueError: the URL is open with other `storage_options`.
    """

    def __init__(
        self, path: Path, storage_options: StorageOptions = None, optimizer: str | None = None
    ) -> None:
        self.path = os.fsdecode(path)
        self._opened = Opened(path, storage_options)  # as long as the reader may read
        self._reader = native().Reader(self._opened.name, optimizer)
        self.container: str = self._reader.container()
        self.tensors: dict[str, Tensor] = {}
        self._number: dict[str, int] = {}
        for i, fields in enumerate(self._reader.tensors()):
            tensor = Tensor(**fields)
            self.tensors[tensor.name] = tensor
            self._number[tensor.name] = i
        self.values: dict[str, Any] = self._reader.values()
        self._model: Model | None = None

    @property
    def optimizers(self) -> list[str]:
        """Flat names of the optimizer state dicts, such as "optim"; "" is the top."""
        return self._reader.optimizers()

    @property
    def opaque(self) -> list[str]:
        """Flat names of objects that are neither tensors nor plain data;
        nothing of them is read.
        """
        return self._reader.opaque()

    def read(
        self,
        name: str,
        begin: int | None = None,
        end: int | None = None,
        *,
        part: str | None = None,
    ) -> bytearray:
        """Reads rows [begin, end) of a tensor; all of it by default.

        Args:
            name: its flat name, a key of `tensors`.
            begin: the first row; 0 by default.
            end: the row behind the last; the number of rows by default.
            part: of a tensor subclass, which of its tensors: a key of `parts`.

        Returns:
            A bytearray of prod(shape) * itemsize bytes, row-major, where shape is that of the rows.

        Raises:
            KeyError: there is no tensor of that name, or no such part.
            ValueError: the rows are not inside the tensor, or it has no dimension.
            CheckpointError: the bytes cannot be read, a checksum does not hold, or it is a tensor
                subclass and no `part` is given.
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
        """Reads the box of `shape` at `offset` of a tensor.

        Returns:
            A bytearray of prod(shape) * itemsize bytes, row-major.

        Raises:
            KeyError: there is no tensor of that name, or no such part.
            ValueError: the box is not inside the tensor.
            CheckpointError: as for `read`.
        """
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
            CheckpointError: no dialect fits, or two fit equally; or there are several optimizers,
                and `optimizer=` chose none.
        """
        if self._model is None:
            model_report = self._read_model()
            for i, param in enumerate(model_report["params"]):
                for j, state in enumerate(param["states"]):
                    codes = state["codes"]
                    state["codes"] = None if codes is None else Codes(**codes)
                    state["own"] = tuple(OwnTensor(**tensor) for tensor in state["own"])
                    state["place"] = (i, j)
                param["states"] = tuple(State(**state) for state in param["states"])
            model_report["params"] = tuple(Param(**param) for param in model_report["params"])
            model_report["groups"] = tuple(Group(**group) for group in model_report["groups"])
            model_report["warnings"] = tuple(model_report["warnings"])
            self._model = Model(**model_report)
        return self._model

    def tell_shapes(self, shapes: Mapping[int, Sequence[int]]) -> None:
        """Tells the shapes of parameters whose `shape` is None, without which their states cannot
        be read. `model` is read anew then: what was taken from it before is out of date.

        Args:
            shapes: by places in `params`.

        Raises:
            IndexError: there is no parameter at such a place.
            ValueError: a dimension is negative, or there are too many elements to count.
        """
        count = len(self.params)
        for number, shape in shapes.items():
            if not 0 <= number < count:
                raise IndexError(f"there is no parameter {number}: the checkpoint has {count}")
            if any(size < 0 for size in shape) or math.prod(shape) >= 2**63:
                raise ValueError(f"parameter {number} cannot have the shape {tuple(shape)}")
        for number, shape in shapes.items():
            self._reader.tell_shape(number, list(shape))
        self._model = None

    def _read_model(self) -> Any:
        try:
            return self._reader.model()
        except CheckpointError as error:
            if error.file or error.text.startswith(self.path):
                raise
            raise CheckpointError(f"{self.path}: {error}", error.code, cause=error.cause) from None

    @property
    def params(self) -> tuple[Param, ...]:
        """`model.params`."""
        return self.model.params

    def read_state(self, state: State, first: int = 0, count: int | None = None) -> bytearray:
        """Reads values [first, first + count) of a state in row-major order, dequantized; all of
        them by default.

        Returns:
            A bytearray of 4 * count bytes: float32.

        Raises:
            ValueError: the values are not inside the state.
            CheckpointError: they cannot be read, a checksum does not hold,
                or the state's values cannot be recovered.
        """
        total = math.prod(state.shape)
        end = total if count is None else first + count
        if not 0 <= first <= end <= total:
            raise ValueError(f"values {first}..{end} are not inside the {total} of {state.name}")
        _ = self.model
        return self._reader.read_state(*state.place, first, end - first)

    def read_state_box(
        self, state: State, offset: Sequence[int], shape: Sequence[int]
    ) -> bytearray:
        """Reads the box of `shape` at `offset` of a state's values, dequantized.

        Returns:
            A bytearray of prod(shape) * 4 bytes: float32, row-major.

        Raises:
            ValueError: the box is not inside the state.
            CheckpointError: as for `read_state`.
        """
        _ = self.model
        return self._reader.read_state_box(*state.place, list(offset), list(shape))

    def read_own_box(
        self, state: State, tensor: OwnTensor, offset: Sequence[int], shape: Sequence[int]
    ) -> bytearray:
        """Reads the box of `shape` at `offset` of one of `state.own`.

        Returns:
            A bytearray of prod(shape) * itemsize bytes, row-major, in the dtype of `tensor`.

        Raises:
            ValueError: `tensor` is not in `state.own`, or the box is not inside it.
            CheckpointError: the bytes cannot be read, or a checksum does not hold.
        """
        _ = self.model
        number = state.own.index(tensor)
        return self._reader.read_own(*state.place, number, list(offset), list(shape))

    def read_codes(self, state: State, begin: int, end: int, *, scales: bool = False) -> bytearray:
        """Reads rows [begin, end) of a state's codes, or of its scales.

        Returns:
            A bytearray, row-major. Codes are uint8 of shape [end - begin, ceil(cols * bits / 8)].
            Scales have ceil(cols / block) entries in a row, in the dtype and number of the format.

        Raises:
            ValueError: the state has no codes of lowbit's formats, or no scales,
                or the rows are not inside.
            CheckpointError: the bytes cannot be read, or a checksum does not hold.
        """
        _ = self.model
        return self._reader.read_codes(*state.place, begin, end, scales)

    def finish(self) -> None:
        """Checks the checksums of what was read in part, and that no file has changed.

        Raises:
            CheckpointError: a checksum does not hold or a file has changed,
                so what was read is not to be trusted.
        """
        self._reader.finish()
