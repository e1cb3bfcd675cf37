"""Folders of DeepSpeed's own Muon under ZeRO, stages 1 and 2 (0.19.8: runtime/zero/stage_1_and_2.py
and runtime/bf16_optimizer.py). A rank's momentum is of whole parameters, all that have a slice
there; where the optimizer is offloaded, and under BF16_Optimizer, it is of the slices.
"""

import itertools
import json
from typing import Any

import pytest
import torch
from torch import nn

import lowbit
from tests.ckpt.deepspeed.folders import converted, edited, optimizer
from tests.support.files.deepspeed import Run, rank_file, touched, write_zero
from tests.support.peers.files import need_tool, run

pytestmark = pytest.mark.slow

need_tool()

OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
MUON = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "ns_method": "gram"}
ADAM = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.1}


def matrices(**more: Any) -> Run:
    torch.manual_seed(4)
    shapes = {"l1": (16, 12), "l2": (10, 16), "l3": (6, 10), "l4": (3, 1)}
    return Run([{k: torch.randn(s) for k, s in shapes.items()}, {"bias": torch.randn(6)}], **more)


def two_readings() -> Run:
    """On 2 ranks with parameters aligned to 8 elements, whole parameters are as many elements as
    the slices with what lies between them.
    """
    torch.manual_seed(5)
    shapes = {"a": (1, 4), "b": (2, 3), "c": (1, 3)}
    return Run(
        [{k: torch.randn(s) for k, s in shapes.items()}, {"bias": torch.randn(6)}], padded_to=8
    )


def write_muon(folder, of, stage, ranks, *, whole, prefix="", zero=None, **optimizer_config):
    """Group 0 is Muon's, and its momentum is what the run calls exp_avg; group 1 is AdamW's."""
    write_zero(folder, of, stage, ranks, prefix)
    config = {
        "zero_optimization": {"stage": stage, **(zero or {})},
        "optimizer": {"type": "Muon", "params": optimizer_config},
    }
    for rank in range(ranks):

        def change(content, rank=rank):
            content["ds_config"] = config
            base = optimizer(content)["base_optimizer_state"]
            momentum = base["state"][0]["exp_avg"]
            parts = [of.moments[k]["exp_avg"].reshape(-1) for k in touched(of, 0, ranks, rank)]
            if whole:
                momentum = torch.cat(parts) if parts else None
            base["state"][0] = {} if momentum is None else {"momentum_buffer": momentum}
            base["param_groups"] = [
                {"use_muon": True, "name": "muon-params", **MUON, "params": [0]},
                {"use_muon": False, "name": "adam-params", **ADAM, "params": [1]},
            ]

        edited(folder / rank_file(rank, prefix), change)
    edited(folder / "mp_rank_00_model_states.pt", lambda c: c.update(ds_config=config))
    return folder


def check_momentum(made, of):
    for name in of.groups[0]:
        kept = made["optim"]["state"][name]
        assert torch.equal(kept["momentum_buffer"], of.moments[name]["exp_avg"]), name
        assert torch.equal(made["model"][name], of.params[name])
    assert torch.equal(made["optim"]["state"]["bias"]["exp_avg"], of.moments["bias"]["exp_avg"])


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "more", [{}, {"round_robin": True}, {"padded_to": 16}, {"round_robin": True, "padded_to": 16}]
)
def test_momentum_is_of_whole_parameters(tmp_path, ranks, more):
    of = matrices(**more)
    folder = write_muon(tmp_path / "step", of, 2, ranks, whole=True)
    check_momentum(converted(folder), of)


def test_it_goes_on_in_lowbit(tmp_path):
    of = matrices()
    folder = write_muon(tmp_path / "step", of, 1, 2, whole=True)
    params = {name: nn.Parameter(torch.zeros_like(p)) for name, p in of.params.items()}
    groups = [
        {"params": [(name, params[name]) for name in group], "use_muon": i == 0}
        for i, group in enumerate(of.groups)
    ]
    live = lowbit.MuonWithAdamW(groups, lr=1.0, state_format="float32")
    lowbit.load_optimizer(live, folder)
    for name in of.groups[0]:
        momentum = live.state[params[name]]["momentum_buffer"]
        assert torch.equal(momentum, of.moments[name]["exp_avg"])
    assert (live.param_groups[0]["lr"], live.param_groups[1]["eps"]) == (0.02, 1e-10)


@pytest.mark.parametrize("zero", [OFFLOADED, {"cpu_offload": True}])
@pytest.mark.parametrize("of", [matrices, two_readings])
def test_momentum_of_an_offloaded_optimizer_is_of_slices(tmp_path, zero, of):
    made = of()
    folder = write_muon(tmp_path / "step", made, 2, 2, whole=False, zero=zero)
    check_momentum(converted(folder), made)


@pytest.mark.parametrize("of", [matrices, two_readings])
def test_momentum_of_the_bf16_optimizer_is_of_slices(tmp_path, of):
    """It keeps the padding of the master weights, and does not say a stage."""
    made = of()
    folder = write_muon(tmp_path / "step", made, 1, 2, whole=False, prefix="bf16_")

    def change(content):
        kept = optimizer(content)
        del kept["zero_stage"]
        masters = kept["single_partition_of_fp32_groups"]
        for i, padding in enumerate(kept["group_paddings"]):
            masters[i] = torch.cat([masters[i], torch.zeros(padding)])

    for rank in range(2):
        edited(folder / rank_file(rank, "bf16_"), change)
    check_momentum(converted(folder), made)


def test_the_configuration_tells_two_readings_apart(tmp_path):
    """And without it the folder is refused; where one rank's length fits one reading alone, that
    rank tells.
    """
    for i, zero in enumerate([{}, {"offload_optimizer": {"device": "none"}}]):
        of = two_readings()
        folder = write_muon(tmp_path / f"step{i}", of, 2, 2, whole=True, zero=zero)
        check_momentum(converted(folder), of)
    for rank in range(2):
        edited(folder / rank_file(rank), lambda c: c.update(ds_config="ds.json"))
    error = run("verify", folder, code=3).stderr
    assert len(error.splitlines()) == 1 and "offload_optimizer" in error and "a dict" in error
    of = matrices()
    folder = write_muon(tmp_path / "told", of, 2, 2, whole=True)
    edited(folder / rank_file(0), lambda c: c.update(ds_config="ds.json"))
    check_momentum(converted(folder), of)


@pytest.mark.parametrize("longer", [-1, 1])
def test_momentum_of_another_length_is_refused(tmp_path, longer):
    folder = write_muon(tmp_path / "step", matrices(), 2, 2, whole=True)

    def change(content):
        kept = optimizer(content)["base_optimizer_state"]["state"][0]
        kept["momentum_buffer"] = torch.zeros(kept["momentum_buffer"].numel() + longer)

    edited(folder / rank_file(1), change)
    error = run("verify", folder, code=3).stderr
    assert "momentum_buffer of group 0 has the shape" in error and rank_file(1) in error
    assert "208 elements" in error and "223 elements" in error, error


def test_ranks_of_two_runs_are_refused(tmp_path):
    of = matrices()
    whole = write_muon(tmp_path / "whole", of, 2, 2, whole=True)
    sliced = write_muon(tmp_path / "sliced", of, 2, 2, whole=False, zero=OFFLOADED)
    (sliced / rank_file(1)).replace(whole / rank_file(1))
    assert "are the files of one save?" in run("verify", whole, code=3).stderr


@pytest.mark.parametrize(
    ("adam", "decay", "mode"),
    itertools.product(["FusedAdam", "inline"], [0.1, 0.0], [None, True, False]),
)
def test_adams_weight_decay_is_as_it_ran(tmp_path, adam, decay, mode):
    """`adam_w_mode` of the type Muon is that of the groups which Adam steps, by DeepSpeed's Adam or
    by Muon's own lines; Muon's decay is always decoupled.
    """
    said = {} if mode is None else {"adam_w_mode": mode}
    folder = write_muon(tmp_path / "step", matrices(), 2, 2, whole=True, **said)

    def change(content):
        group = optimizer(content)["base_optimizer_state"]["param_groups"][1]
        group["weight_decay"] = decay
        if adam == "FusedAdam":
            group.update(bias_correction=True, step=3)

    for rank in range(2):
        edited(folder / rank_file(rank), change)
    groups = json.loads(run("inspect", folder, "--json").stdout)["groups"]
    assert "decoupled_weight_decay" not in groups[0]["settings"]
    coupled = mode is False
    assert groups[1]["settings"].get("decoupled_weight_decay", True) is not coupled
    kept = converted(folder, "--to", "torch")["optim"]["param_groups"]
    assert "decoupled_weight_decay" not in kept[0]
    assert kept[1].get("decoupled_weight_decay", True) is not coupled
    (tmp_path / "out.pt").unlink()
    for to in ("lowbit", "muon"):
        target = tmp_path / f"{to}.pt"
        done = run("convert", folder, target, "--to", to)
        warned = "weight decay is part of the gradient" in done.stdout + done.stderr
        assert warned is (coupled and decay > 0)


def test_torchs_adam_beside_muon_says_its_decay(tmp_path):
    folder = write_muon(tmp_path / "step", matrices(), 2, 2, whole=True, adam_w_mode=False)

    def change(content):
        group = optimizer(content)["base_optimizer_state"]["param_groups"][1]
        group["decoupled_weight_decay"] = False

    for rank in range(2):
        edited(folder / rank_file(rank), change)
    kept = converted(folder, "--to", "torch")["optim"]["param_groups"]
    assert kept[1]["decoupled_weight_decay"] is False


@pytest.mark.parametrize("decay", [0.1, 0.0])
def test_a_decay_that_no_file_tells_is_warned_of(tmp_path, decay):
    folder = write_muon(tmp_path / "step", matrices(), 2, 2, whole=True)
    edited(folder / "mp_rank_00_model_states.pt", lambda c: c.update(ds_config="ds.json"))

    def change(content):
        optimizer(content)["base_optimizer_state"]["param_groups"][1]["weight_decay"] = decay

    edited(folder / rank_file(0), change)
    assert ("adam_w_mode" in run("inspect", folder).stdout) is (decay > 0)
