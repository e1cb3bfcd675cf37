"""What ranks wrote, and the digests of all of it: lowbit.json."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from lowbit.checkpoint.native import native


class Written(NamedTuple):
    """Where an item lies, and its digests: what a rank tells the coordinator."""

    info: _StorageInfo
    digest: str  # XXH3-128 of a tensor's elements, or of a value's item; "" without a digest
    tiles: tuple[int, int, str]  # cells down and across, and their digests; "" for a single cell


def digests(metadata: Metadata, content: bytes, written: dict[MetadataIndex, Written]) -> bytes:
    """lowbit.json: see docs/reference/ckpt-commands.md.

    Args:
        content: `.metadata`, the metadata's own pickle.
    """
    tensors: dict[str, Any] = {}
    values: dict[str, str] = {}
    for index, item in written.items():
        about = metadata.state_dict_metadata[index.fqn]
        if not item.digest or not _is_text(index.fqn):
            continue
        if not isinstance(about, TensorStorageMetadata):
            values[index.fqn] = item.digest
            continue
        entry = tensors.setdefault(
            index.fqn,
            {
                "dtype": str(about.properties.dtype).removeprefix("torch."),
                "shape": list(about.size),
                "chunks": {},
            },
        )
        key = ",".join(map(str, index.offset or ()))
        entry["chunks"][key] = item.digest
        if item.tiles[2]:
            entry.setdefault("tiles", {})[key] = list(item.tiles)
    whole = {
        "version": 1,
        "tool": "lowbit.checkpoint.Writer",
        "digest": "xxh3-128",
        "metadata": native().digest(content),
        "tensors": tensors,
        "values": values,
    }
    return json.dumps(whole).encode()


def _is_text(name: str) -> bool:
    try:
        name.encode()  # JSON has no lone surrogates
    except UnicodeEncodeError:
        return False
    return True
