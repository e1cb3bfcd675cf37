"""Folders that DeepSpeed itself writes, ZeRO's three stages and Universal ones, in lowbit-ckpt: the
numbers that the package reads from them.
"""

import argparse
import importlib.util
import json
import os
import pathlib

import pytest
import torch
import torch.distributed.checkpoint as dcp

import lowbit
from tests.support.files.deepspeed import Run, write_zero
from tests.support.peers.files import run
from tests.support.ranks import launch
from tests.support.require import need

WORKER = pathlib.Path(__file__).with_name("deepspeed_checkpoints_worker.py")
CASES = ["1", "1 bf16", "1 fp16", "2", "2 bf16", "3", "3 bf16", "3 fp16"]
QUIET = {"PYTHONWARNINGS": "ignore", "DS_ACCELERATOR": "cpu"}
# Its first engine imports the compiler of torch, by way of an optimizer that is not used here.
IMPORTED = ("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer")


def launched(out, what, ranks, cases=CASES):
    found = out / f"{what}.json"
    launch.run(WORKER, ranks, found, out, what, *cases, imported=IMPORTED, DS_ACCELERATOR="cpu")
    return json.loads(found.read_text())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Every case, saved on 3 ranks, and as Universal Checkpoints,
    of the package and of the tool.
    """
    present = importlib.util.find_spec("deepspeed") is not None
    need("frameworks", present, "deepspeed is not installed: see docs/bits/frameworks-tested.md")
    out = tmp_path_factory.mktemp("deepspeed")
    check(launched(out, "save", 3))
    for case in CASES:
        step = out / case / "step"
        make_universal(step, out / case / "by_the_package")
        run("convert", step, out / case / "by_the_tool", "--container", "universal")
        run("convert", step, out / case / "made.pt")
    return out


def check(found):
    """What rank 0 found; no rank has failed."""
    for rank, of_rank in enumerate(found):
        for case, value in of_rank.items():
            assert isinstance(value, list), (rank, case, value["error"])
    return found[0]


def make_universal(step, target):
    os.environ.update(QUIET)
    from deepspeed.checkpoint.ds_to_universal import main

    main(
        argparse.Namespace(
            input_folder=str(step),
            output_folder=str(target),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=False,
        )
    )


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_those_of_the_package(saved, case):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    step, universal = saved / case / "step", saved / case / "by_the_package"
    if case == "1 bf16":  # BF16_Optimizer's files are none of ZeRO's to the package's script
        files = (universal / "zero").glob("*/fp32.pt")
        weights = {f.parent.name: torch.load(f, weights_only=True)["param"] for f in files}
    else:
        weights = get_fp32_state_dict_from_zero_checkpoint(str(step.parent), tag="step")
    for folder in (universal, saved / case / "by_the_tool"):
        run("verify", folder)
        assert "the same, by meaning" in run("diff", step, folder).stdout
    made = torch.load(step.parent / "made.pt", weights_only=True)
    # Of stage 1 the package's script leaves frozen parameters out.
    assert made["model"].keys() - weights.keys() <= {"f.weight", "f.bias"} <= made["model"].keys()
    for name, weight in weights.items():
        assert torch.equal(made["model"][name].float(), weight.float()), name
    names = {"a.weight", "a.bias", "b.weight", "scale"}
    assert made["optim"]["state"].keys() == names
    for name in names:
        state = made["optim"]["state"][name]
        for key in ("exp_avg", "exp_avg_sq"):
            theirs = torch.load(universal / "zero" / name / f"{key}.pt", weights_only=True)
            theirs = theirs["param"] if isinstance(theirs, dict) else theirs
            assert torch.equal(state[key].flatten(), theirs.flatten()) and state[key].any()
            assert state[key].shape == weights[name].shape
        assert state["step"] == 3
    groups = made["optim"]["param_groups"]
    assert [set(group["params"]) for group in groups] == [
        {"a.weight", "b.weight"},
        {"a.bias", "scale"},
    ]


@pytest.mark.parametrize("case", CASES)
def test_they_go_to_lowbit_and_back(saved, case, tmp_path):
    step = saved / case / "step"
    run("convert", step, tmp_path / "low.pt", "--to", "lowbit", "--state-format", "float32")
    run("convert", tmp_path / "low.pt", tmp_path / "back.pt", "--to", "torch")
    assert "the same, by meaning" in run("diff", step, tmp_path / "back.pt").stdout
    run("convert", tmp_path / "low.pt", tmp_path / "universal", "--container", "universal")
    assert "the same, by meaning" in run("diff", step, tmp_path / "universal").stdout


def test_deepspeed_resumes_from_both_universal_checkpoints_alike(saved):
    """On 2 ranks, where the folders are of 3."""
    for case, (theirs, ours) in check(launched(saved, "resume", 2)).items():
        assert theirs == ours and len(ours) == 3, case


def test_a_client_optimizer_of_lowbit_takes_its_state_from_the_folders(saved):
    for case, differences in check(launched(saved, "client", 2, ["1", "2", "3"])).items():
        assert differences == [0.0] * 24, case


def test_a_client_optimizer_in_8_bits_goes_on_as_one_process_does(saved):
    """From a folder of 3 ranks, on 2: the two moments of the weight are quantized,
    the bias is too small.
    """
    torch.manual_seed(3)
    of = Run([{"weight": torch.randn(256, 64)}, {"bias": torch.randn(256)}])
    for stage in (1, 3):
        write_zero(saved / f"large {stage}", of, stage, 3)
    for case, (apart, codes) in check(launched(saved, "quantized", 2, ["1", "3"])).items():
        assert (apart, codes) == (0.0, 2), case


def test_parameters_that_were_dealt_out_anew_keep_their_numbers(tmp_path):
    """Under round_robin_gradients the package's param_slice_mappings, and the Universal Checkpoint
    that it makes of them, are of another order.
    """
    need(
        "frameworks",
        importlib.util.find_spec("deepspeed") is not None,
        "deepspeed is not installed",
    )
    losses = check(launched(tmp_path, "save", 3, ["2 one group", "2 dealt out"]))
    made = {}
    for case in losses:
        run("convert", tmp_path / case / "step", tmp_path / case / "made.pt")
        made[case] = torch.load(tmp_path / case / "made.pt", weights_only=True)
    for key in ("exp_avg", "exp_avg_sq", "weight"):
        for name, state in made["2 one group"]["optim"]["state"].items():
            pair = [
                made[case]["model"][name]
                if key == "weight"
                else made[case]["optim"]["state"][name][key]
                for case in made
            ]
            assert torch.equal(*pair) and state["step"] == 3, (name, key)
    run(
        "convert",
        tmp_path / "2 dealt out" / "step",
        tmp_path / "2 dealt out" / "by_the_tool",
        "--container",
        "universal",
    )
    (found,) = check(launched(tmp_path, "goes_on", 2, ["2 dealt out"])).values()
    assert found == pytest.approx(losses["2 one group"], rel=1e-6)


def test_a_dynamic_loss_scale_goes_on(tmp_path):
    """As the engine saved it, over a folder of lowbit's; a new engine begins with another one."""
    need(
        "frameworks",
        importlib.util.find_spec("deepspeed") is not None,
        "deepspeed is not installed",
    )
    cases = ["1 dynamic", "2 dynamic", "3 dynamic"]
    losses = check(launched(tmp_path, "save", 3, cases))
    for case in cases:
        low = tmp_path / case / "low.pt"
        run("convert", tmp_path / case / "step", low, "--to", "lowbit", "--state-format", "float32")
        kept = torch.load(low, weights_only=True)["deepspeed"]["optimizer"]["loss_scaler"]
        assert (kept["cur_scale"], kept["cur_iter"]) == (512.0, 3)
        run("convert", low, low.with_name("by_the_tool"), "--container", "universal")
        make_universal(tmp_path / case / "step", tmp_path / case / "by_the_package")
        run("convert", tmp_path / case / "by_the_package", tmp_path / case / "again.pt")
        again = torch.load(tmp_path / case / "again.pt", weights_only=True)["deepspeed"]
        assert again["optimizer"]["loss_scaler"] == kept
    for case, (new, saved, loaded, on) in check(launched(tmp_path, "scale", 2, cases)).items():
        assert loaded == saved != new, case
        assert on == pytest.approx(losses[case], rel=5e-3), case


def test_deepspeed_goes_on_with_a_run_of_lowbit_in_8_bits(tmp_path):
    """What it saves at once again has the numbers that lowbit's codes stand for."""
    need(
        "frameworks",
        importlib.util.find_spec("deepspeed") is not None,
        "deepspeed is not installed",
    )
    torch.manual_seed(4)
    net = torch.nn.Linear(64, 256)
    opt = lowbit.AdamW(
        [
            {"params": [("weight", net.weight)], "weight_decay": 0.1},
            {"params": [("bias", net.bias)], "weight_decay": 0.1},
        ],
        lr=1e-2,
    )
    for _ in range(5):
        net(torch.randn(8, 64)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    dcp.save(
        {"model": net.state_dict(), "optim": opt.state_dict()},
        checkpoint_id=tmp_path / "run",
        no_dist=True,
    )
    shown = run(
        "convert", tmp_path / "run", tmp_path / "of lowbit", "--container", "universal"
    ).stdout
    assert "1 x exp_avg " in shown and "dynamic8" in shown
    cases = ["1", "1 bf16", "2", "3", "3 bf16"]
    for case, steps in check(launched(tmp_path, "from_lowbit", 3, cases)).items():
        assert steps == [5, 5], case
        for source in ("of lowbit", "run"):
            said = run(
                "diff", tmp_path / source, tmp_path / f"again {case}", "--exclude", "deepspeed.*"
            ).stdout
            assert "the same, by meaning" in said, case
