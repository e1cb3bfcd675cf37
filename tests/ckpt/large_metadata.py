"""A directory such as a cluster writes: many ranks, many chunks, little in each.

python tests/ckpt/large_metadata.py FOLDER [RANKS [TENSORS]]
"""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import sys

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

COLS = 8


def write(folder, ranks=1024, tensors=98):
    """FSDP2's cuts of `tensors` tensors [ranks, 8] on that many ranks: ranks * tensors chunks, each
    an item as torch writes it.
    """
    folder = pathlib.Path(folder)
    folder.mkdir()
    archive = io.BytesIO()
    torch.save(torch.arange(COLS, dtype=torch.float32).view(1, COLS), archive)
    item = archive.getvalue()
    step = -(-len(item) // 64) * 64
    (folder / "__0_0.distcp").write_bytes(item.ljust(step, b"\0") * (tensors - 1) + item)
    for rank in range(1, ranks):
        os.link(folder / "__0_0.distcp", folder / f"__{rank}_0.distcp")
    entries, storage, paths = {}, {}, {}
    for t in range(tensors):
        name = f"optim.state.layers.{t // 2}.weight.{'exp_avg' if t % 2 else 'exp_avg_sq'}"
        paths[name] = ("optim", "state", f"layers.{t // 2}.weight", name.rsplit(".", 1)[1])
        offsets = [torch.Size([rank, 0]) for rank in range(ranks)]
        entries[name] = TensorStorageMetadata(
            properties=TensorProperties(dtype=torch.float32),
            size=torch.Size([ranks, COLS]),
            chunks=[ChunkStorageMetadata(offset, torch.Size([1, COLS])) for offset in offsets],
        )
        for rank, offset in enumerate(offsets):
            storage[MetadataIndex(name, offset, rank)] = _StorageInfo(
                f"__{rank}_0.distcp", t * step, len(item)
            )
    metadata = Metadata(entries, paths, storage, StorageMeta(), "1.0.0")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return ranks * tensors


if __name__ == "__main__":
    print(write(sys.argv[1], *map(int, sys.argv[2:])), "chunks")
