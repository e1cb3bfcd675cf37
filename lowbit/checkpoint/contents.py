"""What a checkpoint contains, as Checkpoint tells it. Public as names of lowbit.checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Tensor:
    """A tensor of a checkpoint.

    Attributes:
        name: torch's flat name, which is the path joined by dots.
        path: keys and places from the top of the state dict.
        dtype: as torch calls it, such as "float32".
        shape: global, whatever the sharding.
        bytes: of its values as stored.
        cls: the class of a tensor subclass; "" of a plain tensor.
        parts: the tensors that a subclass is made of, by attribute: dtype and shape of each.
    """

    name: str
    path: tuple[str | int, ...]
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    cls: str = ""
    parts: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Codes:
    """How the codes of a state are laid out: each row is a bit stream of whole bytes.

    Attributes:
        format: its name in lowbit's catalog.
        bits: of a code.
        rows: of the matrix of codes.
        cols: values in a row.
        block: values that share a scale.
    """

    format: str
    bits: int
    rows: int
    cols: int
    block: int


@dataclass(frozen=True)
class OwnTensor:
    """One of the tensors that lowbit keeps a state in: codes, scales, a full-precision moment,
    a compensation.

    Attributes:
        key: lowbit's, such as "exp_avg_dynamic8" or "exp_avg_dynamic8_scale".
        dtype: as torch calls it.
        shape: global.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class State:
    """One state of one parameter, in any dialect.

    Attributes:
        name: torch's, such as "exp_avg" or "exp_avg_sq".
        shape: of its values.
        signed: False if no value is negative.
        stored_as: format and blocks, in words.
        bytes: as stored.
        codes: their layout, if they are those of one of lowbit's formats bit for bit; else None.
        own: the tensors that lowbit keeps the state in, if the file holds them.
        place: numbers of the parameter and of the state in the model.
    """

    name: str
    shape: tuple[int, ...]
    signed: bool
    stored_as: str
    bytes: int
    codes: Codes | None
    own: tuple[OwnTensor, ...] = ()
    place: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Param:
    """A parameter that the optimizer keeps state of.

    Attributes:
        name: "" if the checkpoint only numbers its parameters.
        index: in the order of the groups; -1 if the checkpoint only names its parameters.
        shape: None if the checkpoint does not tell it.
        states: its states.
        numbers: values of its state that are plain numbers, such as "step".
    """

    name: str
    index: int
    shape: tuple[int, ...] | None
    states: tuple[State, ...]
    numbers: Mapping[str, Any]


class Group(NamedTuple):
    """A parameter group.

    Attributes:
        settings: without "params".
        params: places in Model.params.
        tensors: settings that the file keeps as tensors of one element: the place in `settings`,
            and the tensor's flat name.
    """

    settings: dict[str, Any]
    params: tuple[int, ...]
    tensors: tuple[tuple[tuple[str | int, ...], str], ...] = ()


@dataclass(frozen=True)
class Model:
    """What the optimizer state of a checkpoint means.

    Attributes:
        dialect: the library that wrote it, such as "torch" or "bitsandbytes".
        algorithm: such as "adam"; "" if it is not known.
        flattened: whether keys are flat, as `flatten_optimizer_state_dict=True` saves them.
        root: the path of the optimizer's state dict.
        params: all parameters, in the order of the groups.
        groups: the parameter groups.
        warnings: oddities that do no harm.
        refusal: why no optimizer of lowbit continues from it; "" where one does.
    """

    dialect: str
    algorithm: str
    flattened: bool
    root: tuple[str | int, ...]
    params: tuple[Param, ...]
    groups: tuple[Group, ...]
    warnings: tuple[str, ...]
    refusal: str = ""
