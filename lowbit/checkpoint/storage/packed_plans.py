"""Plans and results as ranks send them to each other: as rows of plain values. Pickling each item
as an object takes several times as long.

torch gathers the plans of all ranks, and what they wrote, at a coordinator, while everybody waits.
What comes back to a rank is what it sent, or what it sent with other numbers: no item travels
twice.
"""

from __future__ import annotations

import operator
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    ReadItem,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from lowbit.checkpoint.storage.state_samples import Samples
from lowbit.checkpoint.storage.written import Written

# What rows hold of torch's classes. With others, of another version, items are pickled as they are.
_FIELDS = {
    ReadItem: ("type", "dest_index", "dest_offsets", "storage_index", "storage_offsets", "lengths"),
    WriteItem: ("index", "type", "bytes_io_data", "tensor_data"),
    TensorWriteData: ("chunk", "properties", "size"),
    ChunkStorageMetadata: ("offsets", "sizes"),
    MetadataIndex: ("fqn", "offset", "index"),
    WriteResult: ("index", "size_in_bytes", "storage_data"),
    _StorageInfo: ("relative_path", "offset", "length", "transform_descriptors"),
}
_PROPERTIES = tuple(f.name for f in fields(TensorProperties))  # torch 2.15 has strides too
_KNOWN = all(tuple(f.name for f in fields(cls)) == names for cls, names in _FIELDS.items())
_values_of = operator.attrgetter(*_PROPERTIES)
_Rows = list[tuple[Any, ...]]
_SENT: weakref.WeakValueDictionary[str, Items | Results] = weakref.WeakValueDictionary()


class Items(list[Any]):
    """Items that are pickled as rows.

    `key` names those that a rank has sent,
    and `rank` that rank: there they come back without their rows.
    """

    key, rank = "", -1
    seen: tuple[Any, ...] = ()  # as they came
    back = False

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if self.back:
            return _returned, (self.key,)
        return _received, (self.key, self.rank, *rows_of(self))


class Numbered(list[WriteItem]):
    """Some items of a rank with new numbers,
    pickled as their places and numbers: the rank has the rest.
    """

    key = ""
    rows: tuple[tuple[int, int | None], ...] = ()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _numbered, (self.key, self.rows)


class Results(list[WriteResult]):
    """What a rank wrote, pickled as rows. Where it comes back to the process that it was made in,
    it is this list again.

    `groups` goes with it, the names of its parameter groups' parameters,
    and `samples` of its state. `folder` stays here, and lives as long as the save.
    """

    key = ""
    groups: Mapping[str, str]
    samples: Samples
    folder: Any

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if not _KNOWN:
            return list, (list(self),)
        rows = [
            (
                *_index(r.index),
                r.size_in_bytes,
                at.relative_path,
                at.offset,
                at.length,
                digest,
                tiles,
            )
            for r in self
            for at, digest, tiles in (r.storage_data,)
        ]
        return _received_results, (self.key, rows, self.groups, self.samples)


def results(
    written: list[WriteResult], groups: Mapping[str, str], samples: Samples, folder: Any = None
) -> list[WriteResult]:
    """The same results, to be pickled as rows. Each has a `Written`, and no transforms."""
    out = Results(written)
    out.key, out.groups, out.samples = uuid.uuid4().hex, groups, samples
    out.folder = folder
    _SENT[out.key] = out
    return out


def packed(items: list[Any]) -> list[Any]:
    """The same items, to be pickled as rows where they are torch's own."""
    return Items(items) if _packable(items) else items


def sent(items: list[Any], rank: int, here: bool = False) -> list[Any]:
    """A rank's items on their way to the coordinator, `here` where that is this rank itself. They
    must live until they have come back.
    """
    if not _packable(items):
        return items
    out = Items(items)
    out.key, out.rank, out.seen, out.back = uuid.uuid4().hex, rank, tuple(items), here
    _SENT[out.key] = out
    return out


def returned(items: list[Any], rank: int) -> list[Any]:
    """The items that the coordinator has for a rank: only their name, where it is the rank that
    sent them, and they are as they came.
    """
    if not (isinstance(items, Items) and items.key and items.rank == rank):
        return packed(items)
    if len(items) != len(items.seen) or not all(map(operator.is_, items, items.seen)):
        return packed(list(items))
    out = Items(items)
    out.key, out.back = items.key, True
    return out


def numbered(items: list[WriteItem], came: Any) -> list[WriteItem]:
    """The items that the coordinator has for a rank: those that came from there, but for their
    numbers, where it left out others at most.

    `came` is used up: a planner that keeps plans may bring it again in a later save,
    when the rank has let its own go.
    """
    if not (isinstance(came, Items) and came.key):
        return packed(items)
    key, came.key = came.key, ""
    places = {(own.index.fqn, own.index.offset): i for i, own in enumerate(came.seen)}
    rows = []
    for item in items:
        i = places.get((item.index.fqn, item.index.offset))
        if i is None:
            return packed(items)
        own = came.seen[i]
        if not _same(item, own):
            return packed(items)
        rows.append((i, item.index.index))
    out = Numbered(items)
    out.key, out.rows = key, tuple(rows)
    return out


def _same(item: WriteItem, own: WriteItem) -> bool:
    """Whether they differ in their numbers alone. A planner's change makes another object."""
    return (
        type(item) is WriteItem
        and item.type is own.type
        and item.tensor_data is own.tensor_data
        and item.bytes_io_data is None
    )


def _packable(items: list[Any]) -> bool:
    kinds = {type(item) for item in items}
    return _KNOWN and (kinds == {ReadItem} or (kinds == {WriteItem} and all(map(_plain, items))))


def _plain(item: WriteItem) -> bool:
    data = item.tensor_data
    return item.bytes_io_data is None and (
        data is None
        or (type(data) is TensorWriteData and type(data.properties) is TensorProperties)
    )


def _received(key: str, rank: int, kind: str, rows: _Rows, shared: list[Any]) -> list[Any]:
    own = _SENT.get(key)
    if own is not None:
        return own
    items = Items(_reads(rows) if kind == "read" else _writes(rows, shared))
    items.key, items.rank, items.seen = key, rank, tuple(items)
    return items


def _returned(key: str) -> list[Any]:
    return _SENT[key]


def _numbered(key: str, rows: tuple[tuple[int, int | None], ...]) -> list[WriteItem]:
    sent_items = _SENT[key]
    assert isinstance(sent_items, Items)
    out = []
    for place, number in rows:
        own = sent_items.seen[place]
        if own.index.index != number:
            index = MetadataIndex(own.index.fqn, own.index.offset, number)
            own = WriteItem(index, own.type, None, own.tensor_data)
        out.append(own)
    return out


def _received_results(
    key: str, rows: _Rows, groups: Mapping[str, str], samples: Samples
) -> list[WriteResult]:
    own = _SENT.get(key)
    if own is not None:
        return own
    out = Results(
        WriteResult(
            MetadataIndex(name, offset, number),
            size,
            Written(_StorageInfo(path, at, length), digest, tiles),
        )
        for name, offset, number, size, path, at, length, digest, tiles in rows
    )
    out.groups, out.samples = groups, samples
    return out


def rows_of(items: list[Any]) -> tuple[str, _Rows, list[Any]]:
    """Rows, and what they refer to by number."""
    if items and type(items[0]) is WriteItem:
        return ("write", *_write_rows(items))
    return (
        "read",
        [
            (
                item.type is LoadItemType.BYTE_IO,
                *_index(item.dest_index),
                tuple(item.dest_offsets),
                *_index(item.storage_index),
                tuple(item.storage_offsets),
                tuple(item.lengths),
            )
            for item in items
        ],
        [],
    )


def _index(index: MetadataIndex) -> tuple[Any, ...]:
    offset = index.offset
    return index.fqn, None if offset is None else tuple(offset), index.index


def _reads(rows: _Rows) -> Iterable[ReadItem]:
    size = torch.Size
    for value, name, at, number, to, source, start, place, begin, lengths in rows:
        yield ReadItem(
            LoadItemType.BYTE_IO if value else LoadItemType.TENSOR,
            MetadataIndex(name, at, number),
            size(to),
            MetadataIndex(source, start, place),
            size(begin),
            size(lengths),
        )


def _write_rows(items: list[WriteItem]) -> tuple[_Rows, list[Any]]:
    numbers: dict[tuple[Any, ...], int] = {}
    shared: list[TensorProperties] = []
    rows: _Rows = []
    for item in items:
        data = item.tensor_data
        row = (*_index(item.index), item.type.value)
        if data is None:
            rows.append(row)
            continue
        p = data.properties
        number = numbers.setdefault(_values_of(p), len(shared))
        if number == len(shared):
            shared.append(p)
        rows.append(
            (*row, tuple(data.chunk.offsets), tuple(data.chunk.sizes), number, tuple(data.size))
        )
    return rows, shared


def _writes(rows: _Rows, shared: list[TensorProperties]) -> Iterable[WriteItem]:
    size = torch.Size
    values = [_values_of(p) for p in shared]
    kinds = {kind.value: kind for kind in WriteItemType}
    for name, at, number, kind, *more in rows:
        data = None
        if more:
            offsets, sizes, properties, whole = more
            chunk = ChunkStorageMetadata(size(offsets), size(sizes))
            data = TensorWriteData(chunk, TensorProperties(*values[properties]), size(whole))
        yield WriteItem(MetadataIndex(name, at, number), kinds[kind], None, data)
