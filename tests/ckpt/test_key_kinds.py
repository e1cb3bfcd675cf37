"""What a key is, a number, text or a place in a tuple, stays in a directory,
which keeps every key as text.
"""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import lowbit
from tests.support.peers.files import need_tool, run

need_tool()

TREE = {
    "ema": {0: torch.ones(3), 1: torch.zeros(2), -5: torch.ones(1)},
    "n": {3: "x", 2**40: 1.5},
    "mixed": {1: torch.ones(2), "one": torch.zeros(2), "7": torch.ones(1)},
    "pair": (torch.ones(2), {0: torch.zeros(1)}, "last"),
    "many": [{4: torch.ones(2)}, torch.ones(1)],
    "text": {"0": torch.ones(2), "a.0": {"1": torch.ones(1)}, "a": {1: torch.ones(1)}},
}


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return set(a) == set(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@pytest.fixture
def directory(tmp_path):
    torch.save(TREE, tmp_path / "a.pt")
    run("convert", tmp_path / "a.pt", tmp_path / "d", "--container", "dcp")
    return tmp_path / "d"


@pytest.mark.parametrize("way", ["straight", "reshard", "parts", "safetensors", "no digests"])
def test_the_tree_comes_back(tmp_path, directory, way):
    source = directory
    if way == "reshard":
        run("reshard", directory, tmp_path / "r", "--world-size", "3")
        source = tmp_path / "r"
    elif way == "parts":
        for part in ("1/2", "0/2"):
            run("reshard", directory, tmp_path / "r", "--world-size", "2", "--part", part)
        source = tmp_path / "r"
    elif way == "safetensors":
        run("convert", directory, tmp_path / "s.safetensors")
        source = tmp_path / "s.safetensors"
    elif way == "no digests":
        (directory / "lowbit.json").unlink()
    run("convert", source, tmp_path / "b.pt")
    assert same(TREE, torch.load(tmp_path / "b.pt", weights_only=True))
    done = run("diff", tmp_path / "a.pt", tmp_path / "b.pt")
    assert "the same" in done.stdout
    run("diff", tmp_path / "a.pt", source)


def test_torch_and_reader_load_the_directory(directory):
    for reader in (None, lowbit.checkpoint.Reader(directory)):
        state = {"ema": {0: torch.empty(3), 1: torch.empty(2), -5: torch.empty(1)}}
        dcp.load(state, checkpoint_id=directory, storage_reader=reader, no_dist=True)
        assert same(state["ema"], TREE["ema"])
    paths = lowbit.checkpoint.Reader(directory).read_metadata().planner_data
    assert paths["ema.0"] == ("ema", "0") and paths["many.0.4"] == ("many", 0, "4")
    run("inspect", directory)
    run("verify", directory)


@pytest.mark.parametrize("other", [(), ("--bytes",)], ids=["leaves", "bytes"])
def test_diff_tells_numbers_from_text(tmp_path, directory, other):
    text = {**TREE, "ema": {str(k): v for k, v in TREE["ema"].items()}, "pair": list(TREE["pair"])}
    torch.save(text, tmp_path / "t.pt")
    run("convert", tmp_path / "t.pt", tmp_path / "t.safetensors")
    for first in (tmp_path / "a.pt", directory):
        for second in (tmp_path / "t.pt", tmp_path / "t.safetensors"):
            said = json.loads(run("diff", first, second, "--json", *other, code=4).stdout)
            found = {d["name"]: d["what"] for d in said["differences"]}
            assert set(found) == {"ema", "pair"}, found
            assert found["ema"] == "has numbers for keys in the first and text in the second"
            assert found["pair"] == "is a tuple in the first and a list in the second"
    run("diff", first, second, "--exclude", "ema.*", "--exclude", "pair.*", *other)


def test_a_directory_of_torch_does_not_say(tmp_path):
    """torch's own directories keep no kinds, and nothing is made of that."""
    torch.save(TREE, tmp_path / "a.pt")
    dcp.save(TREE, checkpoint_id=tmp_path / "d", no_dist=True)
    tree = {k: v for k, v in TREE.items() if k != "pair"}  # torch keeps such a tuple as a value
    torch.save(tree, tmp_path / "a.pt")
    run("diff", tmp_path / "a.pt", tmp_path / "d", "--exclude", "pair*")


def test_a_directory_without_numbers_says_so(tmp_path):
    """Which of the two trees was made a directory changes no answer; torch's own say nothing,
    whatever is made of them.
    """
    text, numbers = (
        {"a": {"0": torch.ones(2), "1": torch.ones(1)}},
        {"a": {0: torch.ones(2), 1: torch.ones(1)}},
    )
    for name, tree in (("text", text), ("numbers", numbers)):
        torch.save(tree, tmp_path / f"{name}.pt")
        run("convert", tmp_path / f"{name}.pt", tmp_path / f"{name}.d", "--container", "dcp")
        run("reshard", tmp_path / f"{name}.d", tmp_path / f"{name}.r", "--world-size", "2")
    for end in ("pt", "d", "r"):
        for other in ("pt", "d", "r"):
            run("diff", tmp_path / f"text.{end}", tmp_path / f"numbers.{other}", code=4)
            run("diff", tmp_path / f"numbers.{end}", tmp_path / f"text.{other}", code=4)
            run("diff", tmp_path / f"text.{end}", tmp_path / f"text.{other}")
    dcp.save(numbers, checkpoint_id=tmp_path / "torch", no_dist=True)
    run("reshard", tmp_path / "torch", tmp_path / "again", "--world-size", "2")
    for path in ("torch", "again"):
        for other in ("numbers.pt", "text.d", "numbers.r"):
            run("diff", tmp_path / path, tmp_path / other)


MELTED = {
    "dicts": (
        {"a": {1: {"x": torch.ones(1)}, "1": {"y": torch.ones(1)}}},
        "a: has the keys 1 and '1'",
    ),
    "values": ({"a": {"-3": {"x": 1}, -3: {"y": 2}}}, "a: has the keys -3 and '-3'"),
    "the top": (
        {1: {"x": torch.ones(1)}, "1": {"y": torch.ones(1)}},
        "the checkpoint: has the keys 1 and '1'",
    ),
    "deep": ({"l": [{0: {"x": torch.ones(1)}, "0": {"y": {5: 1}}}]}, "l.0: has the keys 0 and '0'"),
}


@pytest.mark.parametrize("name", MELTED)
def test_a_number_and_its_text_do_not_become_one_dict(tmp_path, name):
    tree, said = MELTED[name]
    torch.save({**tree, "t": torch.ones(1)}, tmp_path / "a.pt")
    for also in ([], ["--dry-run"]):
        error = run(
            "convert", tmp_path / "a.pt", tmp_path / "d", "--container", "dcp", *also, code=3
        ).stderr
        assert said in error and not (tmp_path / "d").exists(), error
    error = run("reshard", tmp_path / "a.pt", tmp_path / "d", "--world-size", "2", code=3).stderr
    assert said in error and not (tmp_path / "d").exists(), error
    torch.save(
        {"a": {1: {"x": torch.ones(1)}, "01": {"y": torch.ones(1)}, "+1": 2}, "b": {"1": 3}},
        tmp_path / "b.pt",
    )
    run("convert", tmp_path / "b.pt", tmp_path / "e", "--container", "dcp")


LIES = {
    "no dict": 3,
    "number for a list": {"numbers": [(("many",), [0])], "tuples": []},
    "half a tuple": {"numbers": [(("ema",), [1])], "tuples": [("ema",)]},
    "another way": {"numbers": {"ema": [0]}, "tuples": []},
    "text": {"numbers": [(("ema",), ["0"])], "tuples": []},
    "paths of numbers": {"numbers": [], "tuples": [(1,)]},
    "a gap": {"numbers": [], "tuples": [("n",)]},
}


@pytest.mark.parametrize("name", LIES)
def test_lies_make_no_other_leaves(tmp_path, directory, name):
    """What is said of keys changes no name and no value; what is not laid out so is refused."""
    metadata = torch.distributed.checkpoint.FileSystemReader(directory).read_metadata()
    metadata.lowbit_keys = LIES[name]
    import pickle

    (directory / ".metadata").write_bytes(pickle.dumps(metadata, 4))
    wrong = name in ("no dict", "another way", "text", "paths of numbers")
    done = run(
        "convert", directory, tmp_path / "b.pt", code=0 if name == "number for a list" else 3
    )
    if wrong:
        assert done.returncode == 3 and "lowbit_keys" in done.stderr
    elif name == "number for a list":
        assert done.returncode == 0
        assert type(torch.load(tmp_path / "b.pt")["many"]) is list
    else:
        assert done.returncode == 3 and not (tmp_path / "b.pt").exists()


TOPS = {
    "list": [torch.arange(3.0), {"a": torch.ones(2), "n": [1, 2]}, 5],
    "tuple": (torch.arange(3.0), {"a": torch.ones(2), "n": [1, 2]}, 5),
}


@pytest.mark.parametrize("way", ["convert", "reshard", "parts"])
@pytest.mark.parametrize("kind", TOPS)
def test_torch_reads_a_directory_of_a_list_as_a_dict(tmp_path, kind, way):
    """It loads dicts alone: the list's places are keys there,
    and a file made of the directory has the list.
    """
    torch.save(TOPS[kind], tmp_path / "a.pt")
    if way == "convert":
        said = run("convert", tmp_path / "a.pt", tmp_path / "d", "--container", "dcp").stderr
    else:
        for part in [("--part", "0/2"), ("--part", "1/2")] if way == "parts" else [()]:
            said = run(
                "reshard", tmp_path / "a.pt", tmp_path / "d", "--world-size", "2", *part
            ).stderr
    assert (
        f"{tmp_path}/a.pt: is a {kind}, not a dict: torch reads the directory as a dict with "
        "the keys '0', '1', ..."
    ) in said
    dcp_to_torch_save(tmp_path / "d", tmp_path / "torch.pt")
    loaded = torch.load(tmp_path / "torch.pt")
    assert same(loaded, {str(i): item for i, item in enumerate(TOPS[kind])})
    run("reshard", tmp_path / "d", tmp_path / "e", "--world-size", "3")
    for directory in ("d", "e"):
        done = run("convert", tmp_path / directory, tmp_path / "b.pt", "--force")
        assert done.stderr == "" and same(torch.load(tmp_path / "b.pt"), TOPS[kind])
        run("diff", tmp_path / "a.pt", tmp_path / directory)
    paths = lowbit.checkpoint.Reader(tmp_path / "d").read_metadata().planner_data
    assert paths["1.n"] == ("1", "n") and paths["0"] == ("0",)
    torch.save({str(i): item for i, item in enumerate(TOPS[kind])}, tmp_path / "dict.pt")
    said = run("diff", tmp_path / "dict.pt", tmp_path / "d", code=4).stdout
    assert said == f"the whole: is a dict in the first and a {kind} in the second\n"


def test_a_directory_of_one_tensor_says_what_reads_it(tmp_path):
    torch.save(torch.ones(3), tmp_path / "a.pt")
    said = run("convert", tmp_path / "a.pt", tmp_path / "d", "--container", "dcp").stderr
    assert "is one value, not a dict" in said and "under the name ''" in said
    into = {"": torch.zeros(3)}
    dcp.load(into, checkpoint_id=tmp_path / "d", no_dist=True)
    assert torch.equal(into[""], torch.ones(3))
    run("convert", tmp_path / "d", tmp_path / "b.pt")
    assert torch.equal(torch.load(tmp_path / "b.pt"), torch.ones(3))
