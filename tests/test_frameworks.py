"""Training through the frameworks that people use, with the real packages: a resumed run is the run that was not interrupted, bit for bit, and the
checkpoint of 2 ranks loads on 1."""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch
from conftest import need
from torch import nn

import lowbit

WORKER = pathlib.Path(__file__).parent / "frameworks_worker.py"
CASES = [
    ("accelerate", "ddp"),
    ("accelerate", "fsdp2"),
    ("transformers", "ddp"),
    ("lightning", "ddp"),
    ("lightning", "model_parallel"),
    ("torchtitan", "eager"),
    ("torchtitan", "late"),
]


def need_package(name):
    present = importlib.util.find_spec(name) is not None
    need("frameworks", present, f"{name} is not installed: pip install lowbit[frameworks]")


def launch(out, ranks, what, cases):
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
            str(WORKER), str(out / f"{ranks}.json"), str(out), what, *(":".join(case) for case in cases),
        ],
        capture_output=True, text=True, env=environment, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((out / f"{ranks}.json").read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What 2 ranks found, training and resuming, and then 1 rank: all cases in the same processes, since importing the packages is what takes time."""
    cases = [case for case in CASES if importlib.util.find_spec(case[0])]
    out = tmp_path_factory.mktemp("frameworks")
    return [launch(out, 2, "train", cases), launch(out, 1, "resume", cases)]


@pytest.mark.parametrize("framework, kind", CASES)
def test_resumes_exactly_and_loads_on_another_number_of_ranks(framework, kind, request):
    need_package(framework)
    two, one = (run[f"{framework}:{kind}"] for run in request.getfixturevalue("runs"))
    assert "error" not in two, two["error"]
    assert two["resumed"]["loaded"] == two["trained"]["saved"]
    assert two["resumed"]["end"] == two["trained"]["end"] != two["trained"]["saved"]
    assert "error" not in one, one["error"]
    assert one["resumed"]["loaded"] == two["trained"]["saved"]
    assert one["resumed"]["end"] != two["trained"]["end"], "one rank sees other batches than two"


@pytest.mark.parametrize(
    "framework, kinds", [("accelerate", ("ddp", "fsdp2")), ("lightning", ("ddp", "model_parallel"))]
)
def test_what_a_framework_wraps_does_not_matter(framework, kinds, request):
    need_package(framework)
    two, _ = request.getfixturevalue("runs")
    first, second = (two[f"{framework}:{kind}"]["trained"]["end"] for kind in kinds)
    assert first == second


def test_unknown_names_are_refused(tmp_path):
    need_package("transformers")
    need_package("torchtitan")
    from transformers import TrainingArguments

    from lowbit.integrations import torchtitan, transformers

    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match="lowbit has no optimizer 'param_groups'"):
        transformers.optimizer(args, "param_groups")
    factory, options = transformers.optimizer(args, "Lion", lr=1e-4, state_format="4bit")
    opt = factory()(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)), **options)
    assert isinstance(opt, lowbit.Lion) and opt.param_groups[0]["lr"] == 1e-4
    with pytest.raises(ValueError, match=re.escape("no optimizer lowbit.Adamw; lowbit.AdamW")):
        torchtitan.LowbitOptimizers._resolve_optimizer_factory("lowbit.Adamw")


# Accelerate puts sharded parameters into the groups of an optimizer that was built for whole ones.


def replaced(model, opt):
    for group in opt.param_groups:
        group["params"] = [nn.Parameter(p.detach().clone()) for p in group["params"]]
    return [p for group in opt.param_groups for p in group["params"]]


def test_replaced_parameters_get_state_and_the_old_ones_are_let_go():
    model = nn.Linear(64, 64)
    opt = lowbit.AdamW(model.named_parameters())
    params = replaced(model, opt)
    assert set(opt.state_dict()["state"]) == {0, 1}
    assert set(opt.state) == set(params)
    params = replaced(model, opt)
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    assert set(opt.state) == set(params) and all(opt.state[p]["step"] == 1 for p in params)


def test_parameters_replaced_after_a_step_are_refused():
    model = nn.Linear(64, 64)
    opt = lowbit.AdamW(model.named_parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    opt.step()
    replaced(model, opt)
    with pytest.raises(RuntimeError, match="was replaced in the optimizer's groups after it had been stepped"):  # fmt: skip
        opt.state_dict()
