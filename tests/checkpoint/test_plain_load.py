"""A converted directory in plain `dcp.load`: it needs an optimizer with the same tensors,
which `convert` says.
"""

import copy
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import lowbit
from tests.support.peers.files import need_tool, run

need_tool()
PATTERN = "1.*"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Linear(96, 64))
    opt = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 64)).square().sum().backward()
    opt.step()
    path = tmp_path_factory.mktemp("trained") / "d"
    weights, state = get_state_dict(model, opt)
    save({"model": weights, "optim": state}, path)
    return model, opt, path


def save(state, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path, no_dist=True)


def load(model, path, **options):
    opt = lowbit.AdamW(model.named_parameters(), state_format="dynamic8", **options)
    weights, state = get_state_dict(model, opt)
    content = {"model": weights, "optim": state}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(content, checkpoint_id=path, no_dist=True)
    set_state_dict(model, opt, model_state_dict=content["model"], optim_state_dict=content["optim"])
    return opt


def converted(trained, tmp_path, *more):
    _, _, path = trained
    done = run(
        "convert", path, tmp_path / "e", "--to", "lowbit", "--state-format", "dynamic8", *more
    )
    return tmp_path / "e", done.stdout


@pytest.mark.parametrize("pattern", [None, PATTERN])
def test_the_same_tensors_load(trained, tmp_path, pattern):
    model, old, _ = trained
    path, said = converted(trained, tmp_path, *(["--full-precision", pattern] if pattern else []))
    assert "plain dcp.load needs the same state_format" in said
    assert (f"full_precision=['{pattern}']" if pattern else "no full_precision") in said
    assert "lowbit.load_optimizer loads it into any" in said
    opt = load(copy.deepcopy(model), path, **({"full_precision": [pattern]} if pattern else {}))
    states = dict(zip(opt.state_dict()["state"], opt.state.values(), strict=True))
    assert len(states) == 4
    whole = [s["exp_avg"] for s in opt.state.values() if "exp_avg" in s]
    wanted = [old.state[p]["exp_avg"] for p in model.parameters()]
    assert len(whole) == (3 if pattern else 2)
    for got in whole:
        assert any(got.shape == w.shape and torch.equal(got, w) for w in wanted)
    assert all(s["step"] == 1 for s in opt.state.values())


def test_other_tensors_do_not(trained, tmp_path):
    model, _, _ = trained
    path, _ = converted(trained, tmp_path, "--full-precision", PATTERN)
    with pytest.raises(dcp.api.CheckpointException):
        load(copy.deepcopy(model), path)
    opt = lowbit.AdamW(model.named_parameters(), state_format="dynamic8")
    lowbit.load_optimizer(opt, path)
    assert all(s["step"] == 1 for s in opt.state.values())


def test_a_file_needs_no_such_line(trained, tmp_path):
    _, _, path = trained
    assert "dcp.load" not in run("convert", path, tmp_path / "e.pt", "--to", "lowbit").stdout
    assert "dcp.load" not in run("convert", path, tmp_path / "f").stdout


@pytest.mark.parametrize("name", ["APOLLO", "Fira", "Adafactor"])
def test_state_of_a_subspace_is_that_of_the_file(tmp_path, name):
    """A key more would be missing in a checkpoint that torch's DCP loads later."""

    def make():
        p = torch.nn.Parameter(torch.ones(64, 128))
        return p, getattr(lowbit, name)([("w", p)], rank=4, state_format="8bit")

    p, opt = make()
    p.grad = torch.randn(64, 128)
    opt.step()
    torch.save({"optim": opt.state_dict(), "model": {"w": p.detach()}}, tmp_path / "a.pt")
    other, loaded = make()
    lowbit.load_optimizer(loaded, tmp_path / "a.pt")
    assert list(loaded.state[other]) == list(opt.state[p])
    for key, value in opt.state[p].items():
        assert torch.equal(loaded.state[other][key], value), key
