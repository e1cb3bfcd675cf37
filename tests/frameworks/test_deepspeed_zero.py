"""DeepSpeed's ZeRO with lowbit as the client optimizer, by the real package: the bits of one
process, trained, stopped and resumed on 2 ranks.
"""

import importlib.util
import json
import pathlib
from types import SimpleNamespace

import pytest
import torch

import lowbit
from lowbit.integrations import deepspeed as integration
from tests.support.ranks import launch
from tests.support.require import need

WORKER = pathlib.Path(__file__).with_name("deepspeed_worker.py")
# Its first engine imports the compiler of torch, by way of an optimizer that is not used here.
IMPORTED = ("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer")
CASES = ["1", "1 bf16", "2", "2 bf16", "2 offload", "3", "3 bf16"]


def launched(out, what):
    found = out / f"{what}.json"
    launch.run(WORKER, 2, found, out, what, *CASES, imported=IMPORTED, DS_ACCELERATOR="cpu")
    return json.loads(found.read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    out = tmp_path_factory.mktemp("deepspeed")
    return launched(out, "train"), launched(out, "resume")


@pytest.mark.parametrize("case", CASES)
def test_the_bits_of_one_process_before_and_after_a_resume(case, request):
    present = importlib.util.find_spec("deepspeed") is not None
    need("frameworks", present, "deepspeed is not installed: see docs/bits/frameworks-tested.md")
    trained, resumed = (run[case] for run in request.getfixturevalue("runs"))
    assert "error" not in trained, trained["error"]
    assert trained["plain"] == [trained["saved"], trained["end"]]
    assert trained["saved"] != trained["end"]
    assert "error" not in resumed, resumed["error"]
    assert resumed == {"loaded": trained["saved"], "end": trained["end"]}


# Without the package


def test_an_engine_of_another_optimizer_is_refused():
    engine = SimpleNamespace(optimizer=torch.optim.SGD([torch.zeros(1)]))
    with pytest.raises(TypeError, match="the engine's optimizer is SGD"):
        integration.bind(engine)


def test_without_partitions_there_is_nothing_to_do():
    opt = lowbit.AdamW([torch.zeros(64, 64, requires_grad=True)])
    integration.bind(SimpleNamespace(optimizer=opt))
    assert opt.flat_shards == {}


@pytest.mark.parametrize(
    "what, message",
    [
        ({"swap_optimizer": True}, "NVMe offload.*offload to the CPU"),
        ({"zenflow": True}, "ZenFlow and SuperOffload"),
        ({"backup_optimizer": object()}, "partial offload.*ratio to 1"),
        ({"elastic_checkpoint": True}, "elastic checkpoints.*lowbit.flat.get_state_dict"),
        ({"has_moe_layers": True}, "mixture-of-experts.*FSDP2"),
    ],
)
def test_what_cannot_be_served_is_refused_when_it_is_bound(what, message, monkeypatch):
    opt = lowbit.AdamW([torch.zeros(64, 64, requires_grad=True)])
    zero = SimpleNamespace(optimizer=opt, **what)
    monkeypatch.setattr(integration, "_slices", lambda _: [object()])
    with pytest.raises(ValueError, match=f"does not support DeepSpeed's {message}"):
        integration.bind(SimpleNamespace(optimizer=zero))


def ranks_by(**sizes: int) -> SimpleNamespace:
    """An `mpu` that counts ranks under these names."""
    return SimpleNamespace(**{f"get_{k}_world_size": lambda n=n: n for k, n in sizes.items()})


@pytest.mark.parametrize(
    "what, message",
    [
        ({"has_moe_layers": True}, "mixture-of-experts.*FSDP2"),
        (
            {"load_universal_checkpoint": lambda: True},
            "loading of Universal Checkpoints.*lowbit.load_optimizer",
        ),
        ({"mpu": ranks_by(tensor_model_parallel=2)}, "tensor parallelism under ZeRO"),
        ({"mpu": ranks_by(slice_parallel=2)}, "tensor parallelism under ZeRO"),
        ({"mpu": ranks_by(model_parallel=2)}, "tensor parallelism under ZeRO"),
    ],
)
def test_what_only_the_engine_knows_is_refused_too(what, message, monkeypatch):
    """As under stage 3 and BF16_Optimizer."""
    opt = lowbit.AdamW([torch.zeros(64, 64, requires_grad=True)])
    monkeypatch.setattr(integration, "_slices", lambda _: [object()])
    with pytest.raises(ValueError, match=f"does not support DeepSpeed's {message}"):
        integration.bind(SimpleNamespace(optimizer=SimpleNamespace(optimizer=opt), **what))


def test_stages_of_a_pipeline_are_not_taken_for_tensor_parallelism():
    pipeline = ranks_by(tensor_model_parallel=1, slice_parallel=1, model_parallel=2)
    zero = SimpleNamespace(mpu=pipeline, model_parallel_world_size=2)  # what stage 1 records
    assert integration._refused(SimpleNamespace(mpu=pipeline), zero) is None
