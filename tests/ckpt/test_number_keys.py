"""The keys of an optimizer's state are numbers; a directory keeps them as text,
and a file made of it must not.
"""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.peers.files import need_tool, run

need_tool()


def optimizer():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 12))
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


def stepped():
    model, opt = optimizer()
    model(torch.randn(3, 5)).sum().backward()
    opt.step()
    return opt


def check(path, wanted):
    """torch's optimizer finds all of its state in the file."""
    content = torch.load(path)
    content = content.get("optim", content)
    assert list(content["state"]) == [0, 1, 2, 3]
    _, opt = optimizer()
    opt.load_state_dict(content)
    before, after = wanted.state_dict()["state"], opt.state_dict()["state"]
    for i in before:
        assert torch.equal(before[i]["exp_avg"], after[i]["exp_avg"])


@pytest.mark.parametrize("key", [None, "optim"])
@pytest.mark.parametrize("to", [(), ("--to", "torch")], ids=["as it is", "torch"])
def test_numbers_stay_numbers(tmp_path, key, to):
    opt = stepped()
    content = opt.state_dict()
    torch.save({key: content} if key else content, tmp_path / "o.pt")
    run("convert", tmp_path / "o.pt", tmp_path / "d", "--container", "dcp")
    run("convert", tmp_path / "d", tmp_path / "o2.pt", *to)
    check(tmp_path / "o2.pt", opt)
    run("convert", tmp_path / "d", tmp_path / "o.safetensors", *to)
    run("convert", tmp_path / "o.safetensors", tmp_path / "o3.pt", *to)
    check(tmp_path / "o3.pt", opt)


def test_a_directory_of_torch(tmp_path):
    opt = stepped()
    dcp.save({"optim": opt.state_dict()}, checkpoint_id=tmp_path / "d", no_dist=True)
    run("convert", tmp_path / "d", tmp_path / "o.pt")
    check(tmp_path / "o.pt", opt)


def test_text_in_a_file_is_told_and_mended(tmp_path):
    """What others make of a directory, torch's own dcp_to_torch_save among them."""
    opt = stepped()
    content = opt.state_dict()
    torch.save(content, tmp_path / "o.pt")
    text = {**content, "state": {str(k): v for k, v in content["state"].items()}}
    torch.save(text, tmp_path / "t.pt")
    error = run("diff", tmp_path / "o.pt", tmp_path / "t.pt", code=4)
    assert "state: has text for keys in the second" in error.stdout
    report = json.loads(run("convert", tmp_path / "t.pt", tmp_path / "m.pt", "--json").stdout)
    assert any("4 parameters had their state under text" in w for w in report["warnings"])
    check(tmp_path / "m.pt", opt)
    run("diff", tmp_path / "o.pt", tmp_path / "m.pt")


def test_names_of_digits_stay_text(tmp_path):
    """Where the groups say text, the parameters are called so."""
    state = {
        "0": {"step": torch.tensor(1.0), "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}
    }
    content = {"state": state, "param_groups": [{"lr": 1e-3, "params": ["0"]}]}
    torch.save(content, tmp_path / "o.pt")
    run("convert", tmp_path / "o.pt", tmp_path / "d", "--container", "dcp")
    run("convert", tmp_path / "d", tmp_path / "o2.pt")
    assert list(torch.load(tmp_path / "o2.pt")["state"]) == ["0"]
