"""What lowbit.EMA refuses, before anything is written."""

import pytest
import torch
from torch import nn

import lowbit


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 40), nn.Linear(40, 8)).bfloat16()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"state_format": "bfloat16"}, "to nearest it stands still"),
        ({"state_format": "8bit"}, "docs/loss/ema.md has what fewer bits do"),
        ({"decay": 1.0}, "Invalid decay value: 1.0"),
        ({"decay": 0.999999999}, "in float32 too"),
        ({"decay": -0.1}, "Invalid decay value: -0.1"),
        ({"decay": float("nan")}, "Invalid decay value: nan"),
        ({"seed": "x"}, "seed should be an int but is: 'x'"),
        ({"seed": 1.5}, "seed should be an int but is: 1.5"),
        ({"seed": 2**64}, "seed should fit into a signed 64-bit integer"),
    ],
)
def test_options_are_checked_at_construction(options, message):
    error = TypeError if "should be an int" in message else ValueError
    with pytest.raises(error, match=message):
        lowbit.EMA(model_of(), **options)


@pytest.mark.parametrize(
    "params, error, message",
    [
        (torch.ones(3), TypeError, "takes the model or its parameters, not Tensor"),
        ([3], TypeError, "not int in a list"),
        (nn.Linear(2, 2).requires_grad_(False), ValueError, "nothing to average"),
        (nn.Linear(2, 2, dtype=torch.float64), ValueError, "'weight' is float64, which is not"),
        (nn.Linear(2, 2, device="meta"), ValueError, "'weight' is on the meta device"),
        ([("w", nn.Parameter(torch.ones(2)))] * 2, ValueError, "two parameters are named 'w'"),
    ],
)
def test_what_cannot_be_averaged_is_refused_at_construction(params, error, message):
    with pytest.raises(error, match=message):
        lowbit.EMA(params)


def test_an_average_that_begins_in_inference_mode_moves():
    model = model_of()
    with torch.inference_mode():
        ema = lowbit.EMA(model)
    for _ in range(2):
        ema.update_parameters()
    with ema.average_parameters():
        model(torch.ones(1, 48, dtype=torch.bfloat16))
    ema.load_state_dict(ema.state_dict())
    assert ema.n_averaged == 2


def test_what_zero_3_has_partitioned_is_refused():
    """partition_parameters.py of DeepSpeed 0.19 keeps the partition in this attribute."""
    model = nn.Linear(2, 2)
    model.weight.ds_tensor = model.weight.detach().clone()
    model.weight.data = torch.empty(0)
    with pytest.raises(ValueError, match="'weight' is partitioned by DeepSpeed's ZeRO-3"):
        lowbit.EMA(model)


def replaced(model):
    model[1].weight = nn.Parameter(model[1].weight.detach().clone())


def assigned(model):
    model.load_state_dict({k: t.clone() for k, t in model.state_dict().items()}, assign=True)


def unfrozen(model):
    model[0].requires_grad_(True)


@pytest.mark.parametrize("updates", [0, 2])
@pytest.mark.parametrize("change", [replaced, assigned, unfrozen])
def test_a_model_that_changed_after_construction_is_refused(change, updates):
    model = model_of()
    model[0].requires_grad_(False)
    ema = lowbit.EMA(model)
    assert list(ema.averages) == ["1.weight", "1.bias"]
    for _ in range(updates):
        ema.update_parameters()
    change(model)
    changed = r"'[01]\.\w+' was replaced, or began to require"
    with pytest.raises(RuntimeError, match=changed):
        ema.update_parameters()
    with pytest.raises(RuntimeError, match=changed), ema.average_parameters():
        pass


def test_an_update_that_a_graph_captures_is_refused(monkeypatch):
    """Its count is an int of Python, and every replay would have that of the capture."""
    ema = lowbit.EMA(model_of())
    before = {name: t.clone() for name, t in ema.averages.items()}
    monkeypatch.setattr("lowbit.optim.ema.capturing", lambda device: True)
    with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
        ema.update_parameters()
    assert ema.n_averaged == 0
    assert all(torch.equal(ema.averages[name], t) for name, t in before.items())


def test_wrappers_leave_no_trace_in_names():
    model = model_of()
    # as torch.compile names it, which takes long to import
    wrapped = nn.ModuleDict({"_orig_mod": model})
    assert list(lowbit.EMA(wrapped).averages) == [name for name, _ in model.named_parameters()]
