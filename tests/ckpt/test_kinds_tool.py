"""lowbit-ckpt on every kind of checkpoint of tests/support/kinds: inspected and verified."""

import json

import pytest
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.support.kinds.catalog import KINDS, merged_metadata, of
from tests.support.peers.files import need_tool, run

pytestmark = pytest.mark.long

need_tool()

DIRECTORIES = of(container="dcp")
FILES = of(container=("torch", "legacy", "safetensors"))


# Inspect


def tensors(path):
    return {t["name"]: t for t in json.loads(run("inspect", path, "--json").stdout)["tensors"]}


@pytest.mark.parametrize("kind, world", DIRECTORIES)
def test_inspect_of_directories(made, kind, world):
    path = made(kind, world)
    held = merged_metadata(path).state_dict_metadata
    held = {k: v for k, v in held.items() if isinstance(v, TensorStorageMetadata)}
    said = tensors(path)
    assert held and held.keys() <= said.keys()
    for name, t in held.items():
        assert said[name]["shape"] == list(t.size)
        assert said[name]["dtype"] == str(t.properties.dtype).removeprefix("torch.")


@pytest.mark.parametrize("kind, world", FILES)
def test_inspect_of_files(made, kind, world):
    said = tensors(made(kind, world))
    shapes = {tuple(t["shape"]) for t in said.values()}
    assert {
        shape for shape in KINDS[kind].params.values() if kind != "optimizer_file"
    } <= shapes or KINDS[kind].dialect == "lpmm"


@pytest.mark.parametrize("kind", ["fsdp2_nested", "lowbit_4bit", "raw", "adafactor"])
def test_the_digest_is_the_same_for_every_world(made, kind):
    found = {
        json.loads(run("inspect", made(kind, world), "--json", "--digest").stdout)["digest"]
        for world in (1, 2, 4)
    }
    assert len(found) == 1


# Verify


@pytest.mark.parametrize("kind, world", DIRECTORIES)
def test_verify_of_directories(made, kind, world):
    run("verify", made(kind, world))


@pytest.mark.parametrize("kind, world", FILES)
def test_verify_of_files(made, kind, world):
    run("verify", made(kind, world))
