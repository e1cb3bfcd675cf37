"""Optimizers that count no steps, keep no moment, or do not save all of their settings: SGD and
Lion of FlashOptim, SGD of lpmm, and lowbit's SGD without momentum."""

import pytest
import torch

import lowbit
from lowbit import ops
from tests.support.peers.files import (
    companded,
    convert,
    flash_file,
    flash_state,
    lpmm_file,
    need_tool,
    run,
    scaled_normal,
    stand_in_for_yacs,
)

pytestmark = pytest.mark.slow

need_tool()
stand_in_for_yacs()
SHAPE = (128, 64)
LION = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
SGD = {"lr": 1e-2, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0}


def flash(name, **group):
    """A file of FlashOptim 0.1.4 that holds one bfloat16 weight's state, and the weight."""
    weight, error = ops.split(torch.randn(SHAPE), "bfloat16_split8")
    moments = {name: companded(scaled_normal(SHAPE, 1), True)} if name else {}
    entry = flash_state(moments, new=True, bits16=True, error=error.to(torch.bfloat16))
    del entry["step"]
    file = flash_file([entry])
    own = {"initial_lr": group["lr"], "master_bytewidth": 3, "quantize": True, "params": [0]}
    file["param_groups"] = [group | own]
    return file, torch.nn.Parameter(weight.reshape(SHAPE))


CASES = [
    ("exp_avg", LION, lambda p, **k: lowbit.Lion(p, **k)),
    ("momentum_buffer", SGD, lambda p, **k: lowbit.SGD(p, momentum=0.9, **k)),
    ("", SGD | {"momentum": 0.0}, lambda p, **k: lowbit.SGD(p, **k)),
]


@pytest.mark.parametrize("way", ["load_optimizer", "convert"])
@pytest.mark.parametrize("name, group, make", CASES, ids=["lion", "sgd", "sgd without momentum"])
def test_codes_and_corrections_of_flashoptim_go_on(tmp_path, name, group, make, way):
    file, p = flash(name, **group)
    moment = {name: lowbit.scaled("companded8", block=32)} if name else "8bit"
    opt = make([p], state_format=moment, param_format="bfloat16_split8")
    if way == "convert":
        opt.load_state_dict(convert(tmp_path, file, "lowbit"))
    else:
        torch.save(file, tmp_path / "flash.pt")
        lowbit.load_optimizer(opt, tmp_path / "flash.pt")
    entry, state = file["state"][0], opt.state[p]
    assert torch.equal(state["param_bfloat16_split8"].float(), entry["error_bits"].float())
    if name:
        assert torch.equal(
            state[f"{name}_companded8"].int() - 127, entry[f"{name}::quantized"].int()
        )
    assert opt.param_groups[0]["weight_decay"] == group["weight_decay"]
    p.grad = torch.ones_like(p)
    opt.step()


@pytest.mark.parametrize(
    "group, warned",
    [
        ({}, ["Nesterov's"]),
        ({"weight_decay": 0.1}, ["Nesterov's", "FlashSGDW"]),
        ({"weight_decay": 0.1, "nesterov": True, "decoupled": True}, []),
        ({"momentum": 0.0}, []),
    ],
)
def test_what_sgd_of_flashoptim_does_not_say_is_warned_of(tmp_path, group, warned):
    file, _ = flash("momentum_buffer", **(SGD | group))
    torch.save(file, tmp_path / "flash.pt")
    said = run("convert", tmp_path / "flash.pt", tmp_path / "out.pt", "--to", "lowbit").stderr
    for word in ("Nesterov's", "FlashSGDW"):
        assert (word in said) == (word in warned)
    made = torch.load(tmp_path / "out.pt")["param_groups"][0]
    assert made["nesterov"] is group.get("nesterov", False)
    assert made["decoupled"] is group.get("decoupled", False)


def plain_sgd(tmp_path):
    """The file of a live SGD without momentum, which keeps a count and no moment."""
    p = torch.nn.Parameter(torch.randn(8, 8))
    opt = lowbit.SGD([p], lr=0.1)
    p.grad = torch.ones_like(p)
    opt.step()
    return opt.state_dict()


@pytest.mark.parametrize("to", ["torch", "flashoptim", "bitsandbytes", "lpmm", "adafactor8bit"])
def test_a_file_without_state_has_its_key(tmp_path, to):
    """Optimizers look it up, and make state of a parameter that has no entry."""
    made = convert(tmp_path, plain_sgd(tmp_path), to)
    assert made["state"] == {}
    if to != "torch":
        return
    opt = torch.optim.SGD([p := torch.nn.Parameter(torch.zeros(8, 8))], lr=1.0)
    opt.load_state_dict(made)
    p.grad = torch.ones_like(p)
    opt.step()
    assert torch.equal(p, torch.full((8, 8), -0.1))


def test_lpmm_without_momentum_has_no_buffers(tmp_path):
    """It has a 0-D tensor for each parameter, of any shape."""
    qstate = {"enable": True, "overhead": {}, "qmap": torch.linspace(-1, 1, 16)}
    entries = [
        {"momentum_buffer": torch.tensor(0.0), "momentum_buffer_qstate": {**qstate, "enable": on}}
        for on in (True, False)
    ]
    file = lpmm_file(entries)
    file["param_groups"] = [{"lr": 0.1, "momentum": 0, "dampening": 0, "weight_decay": 0}]
    file["param_groups"][0] |= {"nesterov": False, "params": [0, 1], "param_names": ["w", "b"]}
    weights = {"w": torch.zeros(128, 64), "b": torch.zeros(64)}
    for to in ("torch", "lowbit"):
        made = convert(tmp_path, {"model": weights, "optimizer": file}, to)["optimizer"]
        assert not any("momentum_buffer" in entry for entry in made["state"].values())
    torch.save(file, tmp_path / "lpmm.pt")
    opt = lowbit.SGD([(name, torch.nn.Parameter(x)) for name, x in weights.items()], lr=1.0)
    lowbit.load_optimizer(opt, tmp_path / "lpmm.pt")
    assert opt.param_groups[0]["lr"] == 0.1
