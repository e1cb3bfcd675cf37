"""The Adafactor of transformers, as a Trainer's `optim="adafactor"` trains with it, continues in
lowbit.Adafactor: the numbers of its state exactly, and the next steps to rounding."""

import importlib.util

import pytest
import torch
from torch import nn

import lowbit
from tests.support.peers.files import run
from tests.support.require import need

CASES = {
    "a schedule's steps": {"lr": 3e-3, "relative_step": False, "scale_parameter": False},
    "scaled": {"lr": 3e-3, "relative_step": False, "scale_parameter": True, "weight_decay": 0.1},
    "relative": {"relative_step": True, "scale_parameter": True, "weight_decay": 0.1},
    "others": {
        "lr": 3e-3,
        "relative_step": False,
        "scale_parameter": False,
        "decay_rate": -0.7,
        "clip_threshold": 1.5,
        "eps": (1e-12, 1e-2),
    },
}


def model(seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv1d(3, 8, 3), nn.Flatten(), nn.Linear(48, 24), nn.Tanh(), nn.Linear(24, 5)
    )
    net.register_parameter("gain", nn.Parameter(torch.tensor(1.5)))
    return net


def loss(net, step):
    x = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(step))
    return (net(x) * net.gain).square().mean()


def trained(steps=5, seed=0, **options):
    present = importlib.util.find_spec("transformers") is not None
    need("frameworks", present, "transformers is not installed: make frameworks")
    from transformers.optimization import Adafactor

    net = model(seed)
    opt = Adafactor(net.parameters(), **options)
    go_on(net, opt, range(steps))
    return net, opt


def go_on(net, opt, steps):
    for step in steps:
        opt.zero_grad()
        loss(net, step).backward()
        opt.step()


def apart(a, b):
    return max(
        (p - q).norm().item() / q.norm().item()
        for p, q in zip(a.parameters(), b.parameters(), strict=True)
    )


@pytest.mark.parametrize("way", ["converted", "loaded"])
@pytest.mark.parametrize("case", CASES)
def test_it_goes_on(case, way, tmp_path):
    net, opt = trained(**CASES[case])
    torch.save(opt.state_dict(), tmp_path / "optimizer.pt")
    mine = model()
    mine.load_state_dict(net.state_dict())
    low = lowbit.Adafactor(mine.parameters(), lr=0.5)
    if way == "converted":
        done = run("convert", tmp_path / "optimizer.pt", tmp_path / "low.pt", "--to", "lowbit")
        assert (
            "transformers to lowbit" in done.stdout and "left out" not in done.stdout + done.stderr
        )
        low.load_state_dict(torch.load(tmp_path / "low.pt", weights_only=True))
    else:
        lowbit.load_optimizer(low, tmp_path / "optimizer.pt")
    for p, q in zip(net.parameters(), mine.parameters(), strict=True):
        theirs, ours = opt.state[p], low.state[q]
        assert float(ours["step"]) == theirs["step"] == 5
        pairs = (
            [("variance", "exp_avg_sq")]
            if p.ndim < 2
            else [("variance_row", "exp_avg_sq_row"), ("variance_col", "exp_avg_sq_col")]
        )
        for name, key in pairs:
            assert torch.equal(ours[name], theirs[key]) and theirs[key].any()
    for steps in (range(5, 6), range(6, 12)):
        go_on(net, opt, steps)
        go_on(mine, low, steps)
        assert apart(mine, net) < 2e-6


@pytest.mark.parametrize(
    "options, text",
    [
        ({"beta1": 0.9}, "beta1 is given: its exp_avg is a mean of updates"),
        ({"clip_threshold": 0.5}, "clip_threshold is 0.5"),
        ({"warmup_init": True}, "warmup_init is True and parameter 0 has made 5 steps"),
    ],
)
def test_options_without_an_equal_are_refused_by_name(options, text, tmp_path):
    net, opt = trained(**options)
    torch.save(opt.state_dict(), tmp_path / "a.pt")
    for more in ((), ("--lossy",)):
        said = run(
            "convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", "lowbit", *more, code=3
        ).stderr
        assert "a.pt: its Adafactor of transformers cannot continue in lowbit: " + text in said
    with pytest.raises(ValueError, match=text):
        lowbit.load_optimizer(lowbit.Adafactor(net.parameters()), tmp_path / "a.pt")
    assert not (tmp_path / "b.pt").exists()
    run("inspect", tmp_path / "a.pt")


def test_after_its_warm_up_steps_are_alike(tmp_path):
    net, opt = trained(warmup_init=True)
    for state in opt.state.values():
        state["step"] = 9999
    torch.save(opt.state_dict(), tmp_path / "a.pt")
    mine = model()
    mine.load_state_dict(net.state_dict())
    low = lowbit.Adafactor(mine.parameters())
    lowbit.load_optimizer(low, tmp_path / "a.pt")
    go_on(net, opt, range(3))
    go_on(mine, low, range(3))
    assert apart(mine, net) < 1e-6
