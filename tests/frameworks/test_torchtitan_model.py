"""torchtitan's own Trainer with its own mixture of experts and its own `parallelize` function, on 4
ranks of gloo: expert parallelism beside FSDP2, tensor parallelism inside experts beside FSDP2, and
both kinds at once."""

import importlib.util
import json
import pathlib
import shutil

import pytest

from tests.support.ranks import launch
from tests.support.require import need

WORKER = pathlib.Path(__file__).with_name("titan_model_worker.py")
IMPORTED = ("tests.frameworks.titan_on_a_cpu",)
EXPERTS = ("w1_EFD", "w2_EDF", "w3_EFD")
STRIDED = dict.fromkeys(EXPERTS, "(_StridedShard(dim=0, sf=2), Shard(dim=0))")
ROWS, COLUMNS = "(Shard(dim=0), Shard(dim=1))", "(Shard(dim=0), Shard(dim=2))"
HOME = "(Shard(dim=0), Shard(dim=0))"
# What 4 ranks must have: where expert weights lie, where their codes lie,
# and the meshes of all parameters.
LAYOUTS = {
    "ep": {"placements": STRIDED, "state": STRIDED, "meshes": [["efsdp", "ep"], ["fsdp"]]},
    "tp": {
        "placements": {"w1_EFD": ROWS, "w2_EDF": COLUMNS, "w3_EFD": ROWS},
        "state": {"w1_EFD": ROWS, "w2_EDF": HOME, "w3_EFD": ROWS},
        "meshes": [["fsdp", "tp"]],
    },
    "both": {"placements": STRIDED, "state": STRIDED, "meshes": [["efsdp", "ep"], ["fsdp", "tp"]]},
}
RUNS = {
    4: ["train:ep:ep", "resume:ep:ep", "train:tp:tp", "train:both:both"],
    2: ["replay:ep:ep", "replay:tp:fsdp", "replay:both:fsdp"],
    1: ["replay:ep:fsdp"],
}


def launched(out, ranks):
    found = out / f"{ranks}.json"
    offline = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    launch.run(WORKER, ranks, found, out, *RUNS[ranks], imported=IMPORTED, **offline)
    found = json.loads(found.read_text())
    for name, run in found.items():
        assert "error" not in run, f"{name}: {run['error']}"
    return {(ranks, name): run for name, run in found.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    for package in ("torchtitan", "torchdata"):
        present = importlib.util.find_spec(package) is not None
        need("frameworks", present, f"{package} is not installed: make frameworks")
    out = tmp_path_factory.mktemp("titan")
    yield {name: run for ranks in RUNS for name, run in launched(out, ranks).items()}
    shutil.rmtree(out)  # half a gigabyte of gradients and checkpoints


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bits_are_those_of_one_process(runs, layout):
    """With the gradients of the ranks,
    since sums of the model itself depend on who adds them up.
    """
    run = runs[4, f"train:{layout}:{layout}"]
    for what, expected in LAYOUTS[layout].items():
        assert run[what] == expected, what
    assert len(run["losses"]) == 4 and len(set(run["losses"])) == 4
    assert run["half"] == run["alone half"]
    assert run["end"] == run["alone end"] != run["half"]


def test_a_resumed_run_is_the_uninterrupted_one(runs):
    whole, resumed = runs[4, "train:ep:ep"], runs[4, "resume:ep:ep"]
    assert resumed["half"] == whole["half"] and resumed["end"] == whole["end"]
    assert resumed["losses"] == whole["losses"][2:]


@pytest.mark.parametrize(
    "ranks, layout, now",
    [(2, "ep", "ep"), (2, "tp", "fsdp"), (2, "both", "fsdp"), (1, "ep", "fsdp")],
)
def test_other_layouts_go_on_with_the_same_bits(runs, ranks, layout, now):
    """From torchtitan's checkpoint of 4 ranks, which has state under flat names,
    with the gradients of those ranks.
    """
    run, whole = runs[ranks, f"replay:{layout}:{now}"], runs[4, f"train:{layout}:{layout}"]
    assert run["half"] == whole["half"] and run["end"] == whole["end"]
    # 4 ranks had 4 batches; the pairs of tensor parallelism had 2, as 2 ranks do.
    if layout == "ep":
        assert run["losses"] != whole["losses"][2:], "other ranks, other batches"
