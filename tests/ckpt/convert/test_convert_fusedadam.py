"""FusedAdam of Transformer Engine and Apex. It needs a GPU, so its files are put together here,
after transformer_engine 2.20.2 (pytorch/optimizers/fused_adam.py): state_dict() gives float32
moments whatever they are kept in, and steps are in the groups."""

import json

import pytest
import torch
from torch import nn

import lowbit
from tests.support.peers.files import convert, need_tool, run

need_tool()
STEP = 5


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 8))


def fused(net, master=None, **more):
    """What FusedAdam(net.parameters()).state_dict() gives."""
    state = {}
    for i, p in enumerate(net.parameters()):
        generator = torch.Generator().manual_seed(i)
        state[i] = {
            "exp_avg": torch.randn(p.shape, generator=generator),
            "exp_avg_sq": torch.rand(p.shape, generator=generator),
        }
        if master is not None:
            state[i]["master_param"] = torch.zeros(p.shape, dtype=master)
    group = {
        "lr": 0.01,
        "bias_correction": True,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.1,
        "step": STEP,
    }
    return {"state": state, "param_groups": [{**group, "params": list(state), **more}]}


def test_it_goes_on_in_lowbit_and_torch(tmp_path):
    """Steps of the groups become those of the parameters: without them Adam would begin its bias
    correction again.
    """
    net, file = model(), fused(model())
    torch.save(file, tmp_path / "fused.pt")
    said = json.loads(run("inspect", tmp_path / "fused.pt", "--json").stdout)
    assert (said["dialect"], said["algorithm"], said["steps"]) == ("fusedadam", "adam", [STEP])
    opt = lowbit.AdamW(net.named_parameters(), lr=1.0, state_format="float32")
    lowbit.load_optimizer(opt, tmp_path / "fused.pt", model=net)
    torch_opt = torch.optim.AdamW(net.parameters(), lr=1.0)
    torch_opt.load_state_dict(convert(tmp_path, file, "torch"))
    for i, p in enumerate(net.parameters()):
        for state in (opt.state[p], torch_opt.state[p]):
            assert torch.equal(state["exp_avg"], file["state"][i]["exp_avg"])
            assert torch.equal(state["exp_avg_sq"], file["state"][i]["exp_avg_sq"])
            assert float(state["step"]) == STEP
    for one in (opt, torch_opt):
        assert one.param_groups[0]["weight_decay"] == 0.1
        assert tuple(one.param_groups[0]["betas"]) == (0.9, 0.95)


def test_back_again(tmp_path):
    """From torch's AdamW and from lowbit's 8 bits into what FusedAdam loads."""
    file = fused(model())
    for way in (["torch"], ["lowbit", "--state-format", "float32"]):
        back = convert(tmp_path, convert(tmp_path, file, *way), "fusedadam")
        for i, state in file["state"].items():
            assert set(back["state"][i]) == {"exp_avg", "exp_avg_sq"}
            assert all(torch.equal(back["state"][i][key], value) for key, value in state.items())
        group = back["param_groups"][0]
        assert group == {**file["param_groups"][0], "betas": group["betas"]}
        assert tuple(group["betas"]) == (0.9, 0.95) and type(group["step"]) is int
    low = convert(tmp_path, file, "lowbit", "--state-format", "8bit")
    again = convert(tmp_path, low, "fusedadam")
    torch.testing.assert_close(
        again["state"][0]["exp_avg"], file["state"][0]["exp_avg"], rtol=0.1, atol=0.05
    )
    assert again["param_groups"][0]["step"] == STEP


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16])
def test_master_weights_are_not_lost_in_silence(tmp_path, dtype):
    file = fused(model(), master=dtype)
    error = convert(tmp_path, file, "lowbit", code=3)
    assert "master" in error and "--lossy" in error
    assert set(convert(tmp_path, file, "torch", "--lossy")["state"][0]) == {
        "exp_avg",
        "exp_avg_sq",
        "step",
    }


def test_what_no_other_adam_does_is_refused(tmp_path):
    assert "bias_correction=False" in convert(
        tmp_path, fused(model(), bias_correction=False), "torch", code=3
    )
    net = model()
    opt = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 64)).sum().backward()
    opt.step()
    opt.state[next(net.parameters())]["step"] += 1
    assert "counts the steps of a whole group" in convert(
        tmp_path, opt.state_dict(), "fusedadam", code=3
    )
    opt = torch.optim.AdamW(net.parameters(), amsgrad=True)
    opt.step()
    assert "max_exp_avg_sq" in convert(tmp_path, opt.state_dict(), "fusedadam", code=3)
    opt = torch.optim.SGD(net.parameters(), momentum=0.9)
    opt.step()
    convert(tmp_path, opt.state_dict(), "fusedadam", code=3)


def test_settings_of_the_user_stay(tmp_path):
    """Beside those that FusedAdam knows; torch's own switches are left out."""
    net = model()
    opt = torch.optim.AdamW([{"params": net.parameters(), "name": "all", "lr_scale": 0.5}])
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    opt.step()
    opt.param_groups[0]["initial_lr"] = 0.25
    (group,) = convert(tmp_path, opt.state_dict(), "fusedadam")["param_groups"]
    assert group.keys() == fused(net)["param_groups"][0].keys() | {"name", "lr_scale", "initial_lr"}
    assert (group["name"], group["lr_scale"], group["initial_lr"]) == ("all", 0.5, 0.25)
