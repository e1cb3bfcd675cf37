"""`lowbit-ckpt verify` of lowbit's own files: what convert would refuse is a finding,
though every byte of it is sound.
"""

import copy
import json
import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp

import lowbit
from tests.support.peers.files import need_tool, run

pytestmark = pytest.mark.slow

need_tool()


@pytest.fixture(scope="module")
def saved():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Linear(96, 64))
    opt = lowbit.AdamW(model.parameters())
    model(torch.randn(2, 64)).sum().backward()
    opt.step()
    return opt.state_dict()


def without_scale(state):
    del state["exp_avg_dynamic8_scale"]


def short_scale(state):
    state["exp_avg_dynamic8_scale"] = state["exp_avg_dynamic8_scale"][:-1].clone()


def wide_codes(state):
    state["exp_avg_dynamic8"] = state["exp_avg_dynamic8"].short()


def another_shape(state):
    state["shape"] = torch.tensor([64, 64])


def without_codes(state):
    del state["exp_avg_dynamic8"]


def without_step(state):
    del state["step"]


def half_a_step(state):
    state["step"].fill_(2.5)


BROKEN = {
    without_step: "has no step",
    half_a_step: "its step: 2.500000 counts no steps",
    without_scale: "exp_avg_dynamic8_scale is missing",
    short_scale: "is not a float32 matrix of 96 rows",
    wide_codes: "is int16, not uint8",
    another_shape: "says [64, 64], which contradicts the codes of",
    without_codes: "exp_avg_dynamic8 is missing",
}


def written(tmp_path, content, container):
    if container == "torch":
        torch.save(content, tmp_path / "a.pt")
        return tmp_path / "a.pt"
    dcp.save(content, checkpoint_id=tmp_path / "a", no_dist=True)
    return tmp_path / "a"


@pytest.mark.parametrize("container", ["torch", "dcp"])
def test_a_sound_one_holds(saved, tmp_path, container):
    run("verify", written(tmp_path, {"optim": saved}, container))


@pytest.mark.parametrize("container", ["torch", "dcp"])
@pytest.mark.parametrize("broken", BROKEN, ids=lambda f: f.__name__)
def test_what_convert_refuses(saved, tmp_path, broken, container):
    content = copy.deepcopy(saved)
    broken(content["state"][0])
    path = written(tmp_path, {"optim": content}, container)
    done = run("verify", path, code=4)
    assert BROKEN[broken] in done.stdout and BROKEN[broken] in done.stderr
    to = "lowbit" if "step" in BROKEN[broken] else "torch"
    assert BROKEN[broken] in run("convert", path, tmp_path / "b.pt", "--to", to, code=3).stderr
    # A part of it is not judged.
    run("verify", path, "--exclude", "optim.state.1.*")


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("of", ["torch", "lowbit"])
def test_one_of_adams_moments_is_missing(saved, tmp_path, of, name):
    """It would be found where it is stepped, far from here. A parameter without any state is one
    that had no gradient.
    """
    content = copy.deepcopy(saved)
    if of == "torch":
        run("convert", written(tmp_path, content, "torch"), tmp_path / "t.pt", "--to", "torch")
        content = torch.load(tmp_path / "t.pt", weights_only=True)
    for key in list(content["state"][2]):
        if key == name or key.startswith(f"{name}_dynamic8"):
            del content["state"][2][key]
    path = written(tmp_path, content, "dcp")
    text = f"parameter 2: has no {name}, which other parameters of its group have"
    assert text in run("verify", path, code=4).stderr
    content["state"][2] = {}
    run("verify", written(tmp_path, content, "torch"))


def test_torch_state_without_a_step(tmp_path):
    model = torch.nn.Linear(5, 7)
    opt = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 5)).sum().backward()
    opt.step()
    content = opt.state_dict()
    run("verify", written(tmp_path, content, "torch"))
    del content["state"][1]["step"]
    path = written(tmp_path, content, "torch")
    assert "parameter 1: has no step" in run("verify", path, code=4).stderr
    assert "has no step" in run("convert", path, tmp_path / "b.pt", "--to", "lowbit", code=3).stderr
    run("verify", path, "--exclude", "state.0.*")
    # A plain number, as old torch keeps it.
    for step, shown in ((-1, "-1.000000"), (float("nan"), "nan"), (float("inf"), "inf")):
        content["state"][1]["step"] = step
        path = written(tmp_path, content, "torch")
        text = f"parameter 1: its step: {shown} counts no steps"
        assert text in run("verify", path, code=4).stderr
        assert text in run("convert", path, tmp_path / "b.pt", "--to", "lowbit", code=3).stderr
    del content["state"][1]["step"]
    # Some keep it once for all parameters, and SGD keeps none.
    content["param_groups"][0]["step"] = 1
    run("verify", written(tmp_path, content, "torch"))
    sgd = torch.optim.SGD(model.parameters(), momentum=0.9)
    sgd.step()
    run("verify", written(tmp_path, sgd.state_dict(), "torch"))


def test_a_later_version(saved, tmp_path):
    content = copy.deepcopy(saved)
    content["param_groups"][0]["lowbit_version"] = 99
    path = written(tmp_path, {"optim": content}, "torch")
    for command, code in (("verify", 4), ("convert", 3)):
        options = (tmp_path / "b.pt", "--to", "torch") if command == "convert" else ()
        error = run(command, path, *options, code=code).stderr
        assert "lowbit_version 99" in error and "reads 1" in error


def test_two_leaves_at_one_path(tmp_path):
    """Two names of a directory that its paths put into one place, which is the name of neither."""
    torch.save({"a": torch.ones(3), "b": torch.zeros(3)}, tmp_path / "in.pt")
    path = tmp_path / "a"
    run("convert", tmp_path / "in.pt", path, "--container", "dcp")
    metadata = dcp.FileSystemReader(path).read_metadata()
    metadata.planner_data = {"a": ("x",), "b": ("x",)}
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "has the path x for a" in run("verify", path, code=3).stderr


@pytest.fixture
def recorded(tmp_path):
    """A directory with values, and what its lowbit.json says."""
    content = {"w": torch.ones(3), "lr": 0.1, "epoch": 7}
    torch.save(content, tmp_path / "a.pt")
    run("convert", tmp_path / "a.pt", tmp_path / "d", "--container", "dcp")
    path = tmp_path / "d" / "lowbit.json"
    known = json.loads(path.read_text())
    del known["metadata"]  # these tests change that too
    path.write_text(json.dumps(known))
    return path, known


@pytest.mark.parametrize("name", ["lr", "epoch"])
def test_a_value_that_is_gone(recorded, name):
    path, known = recorded
    metadata = dcp.FileSystemReader(path.parent).read_metadata()
    del metadata.state_dict_metadata[name], metadata.planner_data[name]
    for index in [i for i in metadata.storage_data if i.fqn == name]:
        del metadata.storage_data[index]
    (path.parent / ".metadata").write_bytes(pickle.dumps(metadata))
    error = run("verify", path.parent, code=4).stderr
    assert f"names values that the checkpoint does not have, such as {name}" in error
    path.write_text(
        json.dumps(
            known | {"values": {n: known["values"][n] for n in ("lr", "epoch") if n != name}}
        )
    )
    run("verify", path.parent)


def test_a_value_that_lowbit_json_does_not_have(recorded):
    path, known = recorded
    values = dict(known["values"])
    values["rate"] = values.pop("lr")
    path.write_text(json.dumps(known | {"values": values}))
    said = run("verify", path.parent, code=4).stdout
    assert "lr: is not in lowbit.json: it was added later" in said
    assert "lowbit.json: names values that the checkpoint does not have, such as rate" in said
    path.write_text(json.dumps(known | {"values": {}}))
    said = run("verify", path.parent, code=4).stdout
    assert [line.split(":")[0] for line in said.splitlines()] == ["epoch", "lr"]
    run("verify", path.parent, "--include", "w")
    # Of a file without the entry nothing is known of values.
    path.write_text(json.dumps({key: item for key, item in known.items() if key != "values"}))
    run("verify", path.parent)


def test_names_that_take_six_times_as_much_in_json(tmp_path):
    """lowbit.json has more than 16 MiB: what it may have follows the names and the chunks."""
    name = "\1" * 3_000_000
    torch.save({name: torch.ones(3)}, tmp_path / "a.pt")
    run("convert", tmp_path / "a.pt", tmp_path / "d", "--container", "dcp")
    size = (tmp_path / "d" / "lowbit.json").stat().st_size
    assert size > 1 << 24
    run("verify", tmp_path / "d")
    os.truncate(tmp_path / "d" / "lowbit.json", 3 * size)
    said = run("verify", tmp_path / "d", code=3).stderr
    assert f"lowbit.json: has {3 * size} bytes, more than the limit of" in said
    assert "for this checkpoint; remove it to go by the checksums of the items" in said


def test_digests_of_another_kind(recorded):
    path, known = recorded
    for kind in ("md5", "", 3, None):
        path.write_text(json.dumps(known | {"digest": kind}))
        error = run("verify", path.parent, code=3).stderr
        assert "lowbit.json: its digests are not of the kind xxh3-128" in error
    path.write_text(json.dumps({key: item for key, item in known.items() if key != "digest"}))
    run("verify", path.parent)
