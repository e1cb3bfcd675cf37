"""The Adafactor of transformers and fairseq: files as it writes them,
without the package (with it: tests/frameworks).
"""

import json

import pytest
import torch

from tests.support.peers.files import need_tool, run

need_tool()
GROUP = {
    "lr": 1e-3,
    "eps": (1e-30, 1e-3),
    "clip_threshold": 1.0,
    "decay_rate": -0.8,
    "beta1": None,
    "weight_decay": 0.1,
    "scale_parameter": False,
    "relative_step": False,
    "warmup_init": False,
    "params": [0, 1],
}


def content(state=None, **different):
    torch.manual_seed(1)
    first = (
        {"step": 2, "exp_avg_sq_row": torch.rand(3, 96), "exp_avg_sq_col": torch.rand(3, 64)}
        if state is None
        else state
    )
    both = {0: first, 1: {"step": 2, "exp_avg_sq": torch.rand(96)}}
    for of in both.values():
        of["RMS"] = torch.tensor(0.5)
    return {"state": both, "param_groups": [GROUP | different]}


def test_settings_have_lowbit_s_names(tmp_path):
    torch.save(content(initial_lr=0.3), tmp_path / "a.pt")
    said = json.loads(run("inspect", tmp_path / "a.pt", "--json").stdout)
    assert (said["dialect"], said["algorithm"], said["steps"]) == (
        "transformers",
        "adafactor",
        [2.0],
    )
    run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", "lowbit")
    made = torch.load(tmp_path / "b.pt", weights_only=True)
    (group,) = made["param_groups"]
    want = {
        "lr": 1e-3,
        "eps": (1e-30, 1e-3),
        "d": 1.0,
        "beta2_decay": -0.8,
        "beta1": None,
        "weight_decay": 0.1,
        "add_eps": True,
        "decay_by": "alpha",
        "scale_parameter": False,
        "relative_step": False,
        "initial_lr": 0.3,
    }
    assert {key: group[key] for key in want} == want
    assert not {"RMS", "clip_threshold", "warmup_init"} & {*group, *made["state"][0]}
    assert made["state"][0]["variance_row"].shape == (3, 96)


def test_a_relative_step_has_its_bound_whatever_a_schedule_left(tmp_path):
    torch.save(content(relative_step=True, lr=0.0), tmp_path / "a.pt")
    run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", "lowbit")
    assert torch.load(tmp_path / "b.pt", weights_only=True)["param_groups"][0]["lr"] == 1e-2


def test_a_parameter_without_state_has_its_warm_up_before_it(tmp_path):
    made = content(warmup_init=True, relative_step=True, lr=None)
    made["param_groups"][0]["params"] = [0, 1, 2]
    for state in made["state"].values():
        state["step"] = 20_000
    torch.save(made, tmp_path / "a.pt")
    done = run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", "lowbit")
    assert "parameter 2 has made no step, and warmup_init is True" in done.stderr


@pytest.mark.parametrize(
    "state, text",
    [
        ({"step": 2, "exp_avg_sq_row": torch.rand(8)}, "has one of exp_avg_sq_row and"),
        (
            {"step": 2, "exp_avg_sq_row": torch.rand(2, 8), "exp_avg_sq_col": torch.rand(3, 8)},
            "exp_avg_sq_col [3, 8]",
        ),
        ({"step": 2, "exp_avg_sq": torch.rand(2, 8)}, "exp_avg_sq has the shape [2, 8]"),
    ],
)
def test_what_it_does_not_write(state, text, tmp_path):
    torch.save(content(state), tmp_path / "a.pt")
    said = run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", "lowbit", code=3).stderr
    assert "parameter 0" in said and text in said


def test_states_of_a_subspace_are_refused(tmp_path):
    """GaLore's Adafactor is this one with a projection; its states are of smaller matrices."""
    torch.save(content(rank=3, update_proj_gap=200, proj_type="std"), tmp_path / "a.pt")
    said = run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", "lowbit", code=3).stderr
    assert "it is GaLore's, whose states are of gradients in a subspace" in said
