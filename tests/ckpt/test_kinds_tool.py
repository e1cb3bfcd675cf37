"""lowbit-ckpt on every kind of checkpoint of tests/support/kinds: inspected, verified,
resharded, and read back by torch.
"""

import json
import shutil
import subprocess

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.support.kinds.catalog import KINDS, flat, merged_metadata, of, same
from tests.support.require import need
from tests.support.selection import WHOLE

pytestmark = pytest.mark.product

TOOL = shutil.which("lowbit-ckpt") or ""
need(
    "ckpt",
    bool(TOOL),
    "lowbit-ckpt is not on PATH: run make where its libraries are installed",
    module=True,
)

DIRECTORIES = of(container="dcp")
FILES = of(container=("torch", "legacy", "safetensors"))


def run(*arguments, code=0):
    done = subprocess.run([TOOL, *map(str, arguments)], capture_output=True, text=True, timeout=600)
    assert done.returncode == code, f"{arguments}: exit {done.returncode}, {done.stderr}"
    return done


def bits_equal(a, b):
    """The same keys, dtypes, shapes, bits and values of two directories as torch has read them;
    says what differs.
    """
    assert a.keys() == b.keys()
    for key, x in a.items():
        y = b[key]
        if isinstance(x, torch.Tensor):
            assert (x.dtype, x.shape) == (y.dtype, y.shape), key
            x, y = (t.contiguous().reshape(-1).view(torch.uint8) for t in (x, y))
            assert torch.equal(x, y), key
        else:
            assert x == y, key


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


# Reshard

ALL_TO = (1, 2, 3, 4, 7)
TO = {1: (4,), 2: (3,), 4: (1, 2, 7)}
TO_ALL = ("fsdp2_nested", "hsdp")  # hsdp is not of 1 rank


def targets(kind, world):
    """A third of the product, in which each two of a kind, its ranks and the ranks after meet."""
    return ALL_TO if WHOLE or kind in TO_ALL else TO[world]


@pytest.mark.parametrize("kind, world", DIRECTORIES)
def test_reshard_keeps_every_bit(made, tmp_path, kind, world):
    """torch loads what was resharded: the same bits of every tensor and the same values,
    and the same meaning.
    """
    source = made(kind, world)
    by_torch = KINDS[kind].dialect != "torchao"  # it cannot read a torchao item into bytes
    held = flat(source) if by_torch else {}
    for ranks in targets(kind, world):
        run("reshard", source, tmp_path / str(ranks), "--world-size", ranks)
        if by_torch:
            bits_equal(held, flat(tmp_path / str(ranks)))
    assert same(KINDS[kind].held(tmp_path / str(ranks)), KINDS[kind].meaning())


def test_every_pair_is_resharded():
    cells = [(kind, world, to) for kind, world in DIRECTORIES for to in targets(kind, world)]
    kinds = {kind for kind, _ in DIRECTORIES}
    assert {(world, to) for _, world, to in cells} == {(w, to) for w in TO for to in ALL_TO}
    assert {(kind, to) for kind, _, to in cells} == {(kind, to) for kind in kinds for to in ALL_TO}
    assert {(kind, world) for kind, world, _ in cells} == {*DIRECTORIES}
    assert WHOLE or len(cells) < 0.4 * len(DIRECTORIES) * len(ALL_TO)
