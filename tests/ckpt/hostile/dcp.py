"""A directory of torch.distributed.checkpoint by hand: the plain one,
and the means to make each part of it lie.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .state import ELEMENTS, GROUP, SHAPE
from .write import (
    P2,
    P4,
    Pairs,
    Raw,
    archive,
    build,
    dump,
    floats,
    glob,
    records_of,
    reduce,
    tensor,
)

MODULE = "torch.distributed.checkpoint.metadata"
Offset = tuple[int, ...] | None


def size(shape: object) -> Raw:
    return reduce(glob("torch", "Size"), shape)


def properties(dtype: str, extra: tuple[object, ...] = ()) -> Raw:
    layout = reduce(glob("torch.serialization", "_get_layout"), "torch.strided")
    memory = reduce(glob(MODULE, "_MEM_FORMAT_ENCODING"), 0)
    return build(
        glob(MODULE, "TensorProperties"),
        (glob("torch", dtype), layout, False, memory, False, *extra),
    )


@dataclass
class Tensor:
    """What the metadata says of a tensor."""

    dtype: str
    shape: object
    chunks: list[tuple[object, object]]
    properties: object = None

    def raw(self) -> Raw:
        chunks = [
            build(glob(MODULE, "ChunkStorageMetadata"), {"offsets": size(o), "sizes": size(s)})
            for o, s in self.chunks
        ]
        state = {
            "properties": self.properties or properties(self.dtype),
            "size": size(self.shape),
            "chunks": chunks,
        }
        return build(glob(MODULE, "TensorStorageMetadata"), state)


@dataclass
class Item:
    """An item and where the metadata says that it lies."""

    file: str
    opcodes: bytes
    storages: list[bytes]
    hint: object = 0
    pickle: Callable[[bytes], bytes] | None = None
    """Changes the item's data.pkl."""
    wrap: Callable[[bytes], bytes] | None = None
    """Changes the whole item as it lies in the file; the stored length is that of the result."""
    lie: Callable[[str, int, int], tuple[object, object, object]] | None = None
    """Changes (relative_path, offset, length) in the metadata alone."""
    transforms: list[str] | None = None
    gap: int = 0
    """Bytes of nothing before it."""
    listed: bool = True
    like: tuple[str, Offset] | None = None
    """Lies where another lies."""
    archive: Callable[..., bytes] = archive

    def bytes(self) -> bytes:
        pickle = P2 + self.opcodes + b"."
        if self.pickle is not None:
            pickle = self.pickle(pickle)
        body = self.archive(records_of(pickle, self.storages))
        return body if self.wrap is None else self.wrap(body)


@dataclass
class Directory:
    """A checkpoint directory, to be changed and then written."""

    tensors: dict[object, object] = field(default_factory=dict)
    items: dict[tuple[str, Offset], Item] = field(default_factory=dict)
    paths: dict[object, object] = field(default_factory=dict)
    state_extra: dict[str, object] = field(default_factory=dict)
    """Further or other keys of the Metadata object."""
    storage_extra: list[tuple[object, object]] = field(default_factory=list)
    change: Callable[[bytes], bytes] = lambda pickle: pickle
    protocol: bytes = P4

    def tensor(
        self,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        parts: dict[Offset, tuple[tuple[int, ...], bytes]],
        *path: object,
    ) -> None:
        """A tensor; part number i lies in file number i."""
        self.tensors[name] = Tensor(dtype, shape, [(o, s) for o, (s, _) in parts.items()])
        for i, (offset, (part, data)) in enumerate(parts.items()):
            self.items[name, offset] = Item(f"__{i}_0.distcp", tensor(part, dtype=dtype), [data], i)
        self.paths[name] = tuple(path)

    def value(self, name: str, value: object, *path: object) -> None:
        """A value that is not a tensor."""
        self.tensors[name] = Raw(glob(MODULE, "BytesStorageMetadata") + b")\x81")
        self.items[name, None] = Item("__0_0.distcp", dump(value), [], None)
        if path:
            self.paths[name] = path

    def files(self) -> tuple[dict[str, bytes], dict[tuple[str, Offset], tuple[str, int, int]]]:
        """The data files, and where each item lies."""
        files: dict[str, bytearray] = {}
        places: dict[tuple[str, Offset], tuple[str, int, int]] = {}
        for key, item in self.items.items():
            if item.like is not None:
                continue
            out = files.setdefault(item.file, bytearray())
            out += bytes(item.gap)
            body = item.bytes()
            places[key] = (item.file, len(out), len(body))
            out += body
        for key, item in self.items.items():
            if item.like is not None:
                places[key] = places[item.like]
        return {name: bytes(out) for name, out in files.items()}, places

    def storage(
        self, places: dict[tuple[str, Offset], tuple[str, int, int]]
    ) -> list[tuple[object, object]]:
        """The entries of storage_data."""
        out: list[tuple[object, object]] = []
        for (name, offset), item in self.items.items():
            if not item.listed:
                continue
            index: dict[str, object] = {"fqn": name, "index": item.hint}
            if offset is not None:
                index["offset"] = size(offset)
            path, at, length = places[name, offset]
            if item.lie is not None:
                path, at, length = item.lie(path, at, length)  # type: ignore[assignment]
            info: dict[str, object] = {"relative_path": path, "offset": at, "length": length}
            if item.transforms is not None:
                info["transform_descriptors"] = item.transforms
            out.append(
                (
                    build(glob(MODULE, "MetadataIndex"), index),
                    build(glob("torch.distributed.checkpoint.filesystem", "_StorageInfo"), info),
                )
            )
        return out + self.storage_extra

    def metadata(self, places: dict[tuple[str, Offset], tuple[str, int, int]]) -> bytes:
        tensors = [(k, v.raw() if isinstance(v, Tensor) else v) for k, v in self.tensors.items()]
        meta = {"checkpoint_id": "checkpoint", "save_id": None, "load_id": None, "modules": []}
        state = {
            "state_dict_metadata": Pairs(tensors),
            "planner_data": self.paths,
            "storage_data": Pairs(self.storage(places)),
            "storage_meta": build(glob(MODULE, "StorageMeta"), meta),
            "version": "1.0.0",
            **self.state_extra,
        }
        state = {k: v for k, v in state.items() if v is not ...}
        return self.change(self.protocol + build(glob(MODULE, "Metadata"), state) + b".")

    def write(self, folder: Path, name: str = "checkpoint") -> Path:
        path = folder / name
        path.mkdir(exist_ok=True)
        files, places = self.files()
        for file, body in files.items():
            (path / file).write_bytes(body)
        (path / ".metadata").write_bytes(self.metadata(places))
        return path


def base() -> Directory:
    """One weight and its AdamW state, saved by two ranks."""
    d = Directory()
    for key, value in {**GROUP, "params": ["w"]}.items():
        d.value(f"optim.param_groups.0.{key}", value, "optim", "param_groups", 0, key)
    half, bytes_ = (SHAPE[0] // 2, SHAPE[1]), ELEMENTS * 2
    for name, start, path in (
        ("model.w", 0.5, ("model", "w")),
        ("optim.state.w.exp_avg", 0.25, ("optim", "state", "w", "exp_avg")),
        ("optim.state.w.exp_avg_sq", 0.125, ("optim", "state", "w", "exp_avg_sq")),
    ):
        data = floats(ELEMENTS, start)
        parts = {(0, 0): (half, data[:bytes_]), (half[0], 0): (half, data[bytes_:])}
        d.tensor(name, "float32", SHAPE, parts, *path)
    d.tensor(
        "optim.state.w.step",
        "float32",
        (),
        {(): ((), floats(1, 7.0))},
        "optim",
        "state",
        "w",
        "step",
    )
    return d


# Ways to change it.

W, SQ = "model.w", "optim.state.w.exp_avg_sq"
FIRST, SECOND = (W, (0, 0)), (W, (2, 0))
INFO = glob("torch.distributed.checkpoint.filesystem", "_StorageInfo")
INDEX = glob(MODULE, "MetadataIndex")
STEP = ("optim.state.w.step", ())


def made(change: Callable[[Directory], object]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        d = base()
        change(d)
        return d.write(folder)

    return make


def item(key: tuple[str, object], **fields: object) -> Callable[[Path], Path]:
    """The plain directory with fields of one item set."""

    def change(d: Directory) -> None:
        for name, value in fields.items():
            setattr(d.items[key], name, value)  # type: ignore[index]

    return made(change)


def lies(
    key: tuple[str, object] = FIRST,
    *,
    path: object = None,
    at: object = None,
    length: object = None,
) -> Callable[[Path], Path]:
    """The plain directory with another place in one storage entry; a function gets what is true."""

    def tell(truth: object, told: object) -> object:
        return truth if told is None else told(truth) if callable(told) else told

    return item(key, lie=lambda p, a, n: (tell(p, path), tell(a, at), tell(n, length)))


def weight(**fields: object) -> Callable[[Path], Path]:
    """The plain directory with fields of the weight's metadata set."""

    def change(d: Directory) -> None:
        for name, value in fields.items():
            setattr(d.tensors[W], name, value)

    return made(change)


HALF = (2, 8)


def state(**fields: object) -> Callable[[Path], Path]:
    """The plain directory with other or further keys in the Metadata object;
    `...` leaves one out.
    """
    return made(lambda d: d.state_extra.update(fields))
