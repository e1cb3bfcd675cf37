"""`lowbit-ckpt diff` of tensors that are not floating-point numbers: counters, masks and bytes
beside the model and the optimizer.
"""

import importlib.util

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import lowbit
from lowbit import checkpoint
from lowbit.checkpoint import native
from tests.support.paths import ROOT
from tests.support.require import need

need(
    "ckpt",
    native._checkpoint is not None,
    "lowbit was built without its checkpoint module",
    module=True,
)

DTYPES = [
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


@pytest.fixture(scope="module")
def elastic():
    """What recipes/elastic.py saves, but for the ranks: `elastic(step)`."""
    path = ROOT / "recipes/elastic.py"
    spec = importlib.util.spec_from_file_location("elastic_recipe", path)
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).bfloat16()
    opt = lowbit.AdamW(lowbit.param_groups(model), lr=3e-3)
    model(torch.randn(4, 64).bfloat16()).square().mean().backward()
    opt.step()
    return lambda step: recipe.saved(model, opt, step)


def save(path, content):
    dcp.save(content, checkpoint_id=path, no_dist=True)
    return path


@pytest.mark.parametrize("bytes", [False, True])
def test_a_checkpoint_of_the_elastic_recipe_equals_itself(elastic, tmp_path, bytes):
    path = save(tmp_path / "a", elastic(8))
    report = checkpoint.diff(path, path, bytes=bytes)
    assert report["same"] and report["differences"] == []
    assert report["by"] == ("bytes" if bytes else "meaning")
    other = save(tmp_path / "b", elastic(12))
    names = [entry["name"] for entry in checkpoint.diff(path, other, bytes=bytes)["differences"]]
    assert names == ["progress.step"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_by_its_bits(tmp_path, dtype):
    """Beside a model whose numbers are compared as numbers.
    Integers beyond 2^53 are not rounded.
    """
    values = torch.arange(12).remainder(2).to(dtype)
    model = {"w": torch.randn(3, 5).bfloat16()}
    first = save(tmp_path / "a", {"model": model, "extra": values})
    assert checkpoint.diff(first, first)["same"]
    changed = values.clone()
    changed[7] = changed[6]
    second = save(tmp_path / "b", {"model": model, "extra": changed})
    (entry,) = checkpoint.diff(first, second)["differences"]
    assert entry["name"] == "extra" and (entry["count"], entry["first"]) == (1, [7])


def test_a_difference_in_the_last_element_of_every_piece(tmp_path):
    """16 pieces of 2 MiB, which one comparison for each element would take many minutes for."""
    piece = 1 << 18
    values = torch.zeros(16 * piece, dtype=torch.int64)
    first = save(tmp_path / "a", {"seen": values})
    values[piece - 1 :: piece] = 1
    second = save(tmp_path / "b", {"seen": values})
    (entry,) = checkpoint.diff(first, second)["differences"]
    assert (entry["count"], entry["first"]) == (16, [piece - 1])


def test_large_integers_that_are_one_apart(tmp_path):
    paths = [save(tmp_path / str(i), {"seen": torch.tensor((1 << 60) + i)}) for i in range(2)]
    (entry,) = checkpoint.diff(*paths)["differences"]
    assert entry["name"] == "seen" and entry["what"].startswith("1 of 1 elements differ")


def test_an_integer_and_a_number_are_told_apart(tmp_path):
    paths = [
        save(tmp_path / str(i), {"step": t})
        for i, t in enumerate([torch.tensor(3), torch.tensor(3.0)])
    ]
    (entry,) = checkpoint.diff(*paths)["differences"]
    assert entry["what"] == "is int64 in the first, float32 in the second"
