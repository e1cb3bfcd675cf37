"""What is written can be read: one limit of values for every container, in both directions."""

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.ckpt.archives import same
from tests.support.peers.files import need_tool, run

pytestmark = pytest.mark.slow

need_tool()


def nested(depth, inside=1):
    for _ in range(depth):
        inside = (inside,)
    return inside


def refused(source, target, *words):
    error = run("convert", source, target, code=3).stderr
    assert all(word in error for word in words), error
    assert not target.exists()


def test_json_that_would_be_nested_too_deep(tmp_path):
    torch.save({"w": torch.ones(2), "x": nested(60)}, tmp_path / "a.pt")
    refused(
        tmp_path / "a.pt",
        tmp_path / "b.safetensors",
        "b.safetensors: the description of the other values: its JSON would be nested too deep",
        "write a torch.save file or a directory",
    )
    torch.save({"w": torch.ones(2), "x": nested(40)}, tmp_path / "c.pt")
    run("convert", tmp_path / "c.pt", tmp_path / "c.safetensors")
    run("verify", tmp_path / "c.safetensors")


def test_a_path_and_a_value_that_are_too_deep_together(tmp_path):
    """Each is within the limit in a directory, where the path is a name."""
    for depth in (97, 98):
        content = {"w": torch.ones(2), "a": {"b": {"c": nested(depth)}}}
        dcp.save(content, checkpoint_id=tmp_path / str(depth), no_dist=True)
        run("verify", tmp_path / str(depth))
    refused(tmp_path / "98", tmp_path / "a.pt", "a.b.c: would be nested more than 100 deep")
    run("convert", tmp_path / "97", tmp_path / "a.pt")
    run("verify", tmp_path / "a.pt")


def test_a_value_that_is_too_large_is_called_so(tmp_path):
    """In a file that torch wrote a list may be there once and unfold to many."""
    shared = list(range(1000))
    content = {"w": torch.ones(2), "x": [shared] * 600}
    dcp.save(content, checkpoint_id=tmp_path / "a", no_dist=True)
    for target in ("b.pt", "b.safetensors"):
        refused(
            tmp_path / "a",
            tmp_path / target,
            "x: is only kept by a directory, because it is too large to read",
            "unfolds to too many values; save long lists of numbers as tensors",
            "--exclude leaves it out",
        )
    run("reshard", tmp_path / "a", tmp_path / "c", "--world-size", "1")
    run("convert", tmp_path / "c", tmp_path / "d.pt", "--exclude", "x")
    same(torch.load(tmp_path / "d.pt"), {"w": torch.ones(2)})


def test_a_long_list_of_numbers(tmp_path):
    content = {"w": torch.ones(2), "loss": [i / 7 for i in range(750_000)]}
    torch.save(content, tmp_path / "a.pt")
    refused(
        tmp_path / "a.pt",
        tmp_path / "b.safetensors",
        "its JSON would have too many values",
        "write a torch.save file or a directory",
    )
    run("reshard", tmp_path / "a.pt", tmp_path / "b", "--world-size", "1")
    run("convert", tmp_path / "b", tmp_path / "c.pt")
    same(torch.load(tmp_path / "c.pt"), content)
    run("verify", tmp_path / "c.pt")


def test_values_that_are_too_many_together(tmp_path):
    shared = list(range(1000))
    content = {"w": torch.ones(2), **{f"x{i}": [shared] * 500 for i in range(9)}}
    dcp.save(content, checkpoint_id=tmp_path / "a", no_dist=True)
    refused(tmp_path / "a", tmp_path / "b.pt", "the file would have 4", "write a directory")
