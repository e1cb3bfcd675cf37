"""The metadata that dcp.save returns on ranks that did not write it."""

import copy
import dataclasses
import pickle

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from lowbit.checkpoint.storage.announced_metadata import Received, announce


def metadata():
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
    tensor = TensorStorageMetadata(TensorProperties(torch.uint8), torch.Size([4]), [chunk])
    return Metadata(
        {"a": tensor, "b": BytesStorageMetadata()},
        {"a": ("a",), "b": ("b",)},
        {"x": 1},
        StorageMeta(checkpoint_id="run", save_id="7"),
        "1.0.0",
    )


def received():
    sender = metadata()
    announce(sender, pickle.dumps(sender))
    there = pickle.dumps(sender)
    assert (
        type(sender) is Metadata
        and sender == metadata()
        and pickle.dumps(sender) == pickle.dumps(metadata())
    )
    return pickle.loads(there)


def test_it_is_not_built_before_somebody_looks():
    came = received()
    assert isinstance(came, Metadata) and type(came) is Received
    assert pickle.loads(pickle.dumps(came)).version == "1.0.0"
    assert type(came) is Received  # on its way once more it was not built either
    assert came.state_dict_metadata["a"].size == (4,)
    assert type(came) is Metadata and came == metadata()


@pytest.mark.parametrize(
    "look",
    [
        lambda m: m == metadata(),
        lambda m: metadata() == m,
        lambda m: repr(m) == repr(metadata()),
        lambda m: copy.deepcopy(m) == metadata(),
        lambda m: dataclasses.asdict(m) == dataclasses.asdict(metadata()),
        lambda m: dataclasses.replace(m, version="2").version == "2",
        lambda m: [getattr(m, f.name) for f in dataclasses.fields(m)]
        == [getattr(metadata(), f.name) for f in dataclasses.fields(Metadata)],
    ],
)
def test_whoever_looks_finds_torchs_own(look):
    assert look(received())


def test_an_attribute_that_is_set_stays():
    came = received()
    came.version = "3"
    assert came.version == "3" and came == dataclasses.replace(metadata(), version="3")
