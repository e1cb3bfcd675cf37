"""State whose numbers the tool does not know: the compensation of a 16-bit weight, codes of a shape
that no tensor tells, moments of a dtype that lowbit does not write.
"""

import numpy as np
import pytest
import torch

import lowbit
from lowbit import checkpoint
from tests.support.peers.files import need_tool, run

pytestmark = pytest.mark.slow

need_tool()
TARGETS = ("torch", "lowbit", "bitsandbytes", "torchao", "flashoptim", "lpmm", "adafactor8bit")


def trained(param_format, cls=lowbit.AdamW):
    torch.manual_seed(0)
    dtype = torch.float32 if param_format == "float32" else torch.bfloat16
    model = torch.nn.Sequential(torch.nn.Linear(64, 80, dtype=dtype))
    opt = cls(model.named_parameters(), lr=1e-2, param_format=param_format)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    opt.step()
    return model, opt


def compensated(kind):
    model, opt = trained(f"bfloat16_{kind}")
    return {"model": model.state_dict(), "optim": opt.state_dict()}


def shapeless(_):
    """Four bits alone do not tell how many columns a matrix has."""
    model = torch.nn.Linear(65, 80, bias=False)
    opt = lowbit.AdamW(model.named_parameters(), state_format="4bit", min_numel=0)
    model.weight.grad = torch.ones_like(model.weight)
    opt.step()
    state = opt.state_dict()
    del state["state"][0]["shape"]
    return {"optim": state}


def odd(_):
    _, opt = trained("float32")
    state = opt.state_dict()
    for entry in state["state"].values():
        for key in [key for key in entry if key.startswith("exp_avg_dynamic8")]:
            del entry[key]
        entry["exp_avg"] = torch.ones(80, 64, dtype=torch.float16)
    return {"optim": state}


KINDS = {
    "kahan": compensated,
    "split8": compensated,
    "split16": compensated,
    "shapeless": shapeless,
    "odd": odd,
}


@pytest.fixture(scope="module", params=KINDS)
def path(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("unknown") / f"{request.param}.pt"
    torch.save(KINDS[request.param](request.param), path)
    return path


def unknown(content):
    """Places of tensors of the first parameter's state, whose numbers are not known."""
    entry = content["optim"]["state"][0]
    return [k for k in entry if k.startswith("param_") or k == "exp_avg" or "4" in k]


def test_the_same_and_another(path, tmp_path):
    assert checkpoint.diff(path, path)["same"]
    assert "the same" in run("diff", path, path).stdout
    content = torch.load(path, weights_only=False)
    keys = unknown(content)
    assert keys
    for key in keys:
        other = torch.load(path, weights_only=False)
        tensor = other["optim"]["state"][0][key]
        tensor.view(-1).view(torch.uint8)[5] ^= 1
        torch.save(other, tmp_path / "other.pt")
        (found,) = checkpoint.diff(path, tmp_path / "other.pt")["differences"]
        assert found["name"].endswith(key) and found["what"].startswith("1 of "), (key, found)
        first = np.unravel_index(5 // tensor.element_size(), tensor.shape)
        assert found["count"] == 1 and tuple(found["first"]) == first
    # Known in one alone.
    other = torch.load(path, weights_only=False)
    for key in keys:
        del other["optim"]["state"][0][key]
    state = "exp_avg" if "exp_avg" in "".join(keys) else keys[0]
    other["optim"]["state"][0][state] = torch.zeros(80, 64)
    torch.save(other, tmp_path / "other.pt")
    assert not checkpoint.diff(path, tmp_path / "other.pt")["same"]


def test_health_leaves_them_out(path, tmp_path):
    report = checkpoint.inspect(path, health=True)
    without = [s for s in report["states"] if "health" not in s]
    assert without and len(without) < len(report["states"]) + (path.stem == "shapeless")
    said = run("inspect", path, "--health").stdout
    for state in without:
        assert f"{state['parameter']}.{state['state']}" in said
    run("inspect", path, "--html", tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size > 1000
    run("inspect", path, "--digest")


@pytest.mark.parametrize("to", TARGETS)
def test_conversions_end_with_a_file_or_one_line(path, tmp_path, to):
    for options in ((), ("--lossy",)):
        target = tmp_path / f"{to}{len(options)}.pt"
        try:
            checkpoint.convert(path, target, to=to, lossy=bool(options))
        except checkpoint.CheckpointError as error:
            assert error.code in (2, 3) and not target.exists(), error
        else:
            assert checkpoint.verify(target, opaque=True)["ok"]
