"""A save's metadata as it comes to the ranks that did not write it: bytes, which become objects
only where somebody asks.

torch sends the metadata of the whole checkpoint to all ranks and returns it from `dcp.save`, where
it is hardly ever read. As objects it has some twenty for each tensor and rank, and each rank
would build them all.
"""

from __future__ import annotations

import pickle
from dataclasses import fields
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata


def announce(metadata: Metadata, content: bytes) -> None:
    """Has the next pickle of the metadata, which goes to all ranks, carry `content`,
    the metadata's own pickle, as it is.
    """
    metadata.__dict__["_content"] = content
    metadata.__class__ = _Announced


class _Announced(Metadata):
    """Metadata that has its own pickle at hand. Pickled once, it is plain metadata again."""

    def __reduce__(self) -> tuple[type, tuple[bytes]]:
        content = self.__dict__.pop("_content")
        self.__class__ = Metadata  # type: ignore[assignment]
        return Received, (content,)


class Received(Metadata):
    """Metadata that becomes torch's own in the moment in which an attribute of it is read or
    set.
    """

    def __init__(self, content: bytes) -> None:
        self.__dict__["_content"] = content

    def opened(self) -> Metadata:
        content = self.__dict__.pop("_content", None)
        if content is not None:
            self.__class__ = Metadata  # type: ignore[assignment]
            self.__dict__.update(pickle.loads(content).__dict__)
        return self

    def __eq__(self, other: object) -> bool:
        return self.opened() == other

    def __repr__(self) -> str:
        return repr(self.opened())

    def __reduce__(self) -> tuple[type, tuple[bytes]]:
        return Received, (self.__dict__["_content"],)


def _attribute(name: str) -> property:
    def read(self: Received) -> Any:
        return getattr(self.opened(), name)

    def write(self: Received, value: Any) -> None:
        setattr(self.opened(), name, value)

    return property(read, write)


for _field in fields(Metadata):
    setattr(Received, _field.name, _attribute(_field.name))
