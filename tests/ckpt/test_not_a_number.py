"""NaN in tensors: `diff` takes it for a difference wherever only one file has it, and `verify`
finds it in weights and in every state.
"""

import re

import pytest
import torch

import lowbit
from lowbit import checkpoint
from lowbit.checkpoint import native
from tests.support.require import need

need(
    "ckpt",
    native._checkpoint is not None,
    "lowbit was built without its checkpoint module",
    module=True,
)
NAN, INF = float("nan"), float("inf")


def weights(**changed):
    content = {"w": torch.linspace(-1, 1, 1000), "count": torch.arange(4)}
    return {"model": content | changed}


def adamw(path, value=None, of="exp_avg"):
    net = torch.nn.Linear(16, 8)
    opt = torch.optim.AdamW(net.parameters())
    torch.manual_seed(0)
    net(torch.randn(4, 16)).square().mean().backward()
    opt.step()
    if value is not None:
        opt.state[net.weight][of][0, 3] = value
    torch.save({"model": net.state_dict(), "optimizer": opt.state_dict()}, path)


@pytest.mark.parametrize("tolerance", [0.0, 0.5])
@pytest.mark.parametrize("value, other", [(NAN, 0.25), (0.25, NAN), (NAN, INF), (-INF, NAN)])
def test_one_that_only_one_file_has_differs(tmp_path, value, other, tolerance):
    """It does not hide the other differences either."""
    for name, x in (("a.pt", value), ("b.pt", other)):
        w = torch.linspace(-1, 1, 1000)
        w[7] = x
        torch.save(weights(w=w if name == "a.pt" else w * (1 + 1e-3)), tmp_path / name)
    report = checkpoint.diff(tmp_path / "a.pt", tmp_path / "b.pt", tolerance=tolerance)
    (entry,) = report["differences"]
    assert not report["same"] and entry["name"] == "model.w" and entry["count"] == 1000


def test_one_that_both_have_does_not(tmp_path):
    w = torch.linspace(-1, 1, 1000)
    w[7] = NAN
    for name in ("a.pt", "b.pt"):
        torch.save(weights(w=w), tmp_path / name)
    assert checkpoint.diff(tmp_path / "a.pt", tmp_path / "b.pt")["same"]


@pytest.mark.parametrize("of", ["exp_avg", "exp_avg_sq"])
def test_one_in_a_moment_differs(tmp_path, of):
    torch.manual_seed(1)
    adamw(tmp_path / "a.pt")
    torch.manual_seed(1)
    adamw(tmp_path / "b.pt", NAN, of)
    report = checkpoint.diff(tmp_path / "a.pt", tmp_path / "b.pt")
    assert [d["name"].split(".")[-1] for d in report["differences"]] == [of]


def test_weights_hold_none_and_may_hold_infinities(tmp_path):
    path = tmp_path / "w.pt"
    torch.save(weights(mask=torch.tensor([0.0, -INF])), path)
    report = checkpoint.verify(path)
    assert report["ok"] and "1 of 2 values are not finite" in str(report["warnings"])
    torch.save(weights(mask=torch.tensor([NAN, -INF])), path)
    report = checkpoint.verify(path)
    assert not report["ok"] and "2 of 2 values are not finite" in str(report["findings"])


@pytest.mark.parametrize(
    "optimizer, key",
    [
        (torch.optim.Adadelta, "acc_delta"),
        (torch.optim.Adamax, "exp_inf"),
        (torch.optim.Rprop, "prev"),
        (torch.optim.ASGD, "ax"),
    ],
)
def test_states_of_every_optimizer_are_finite(tmp_path, optimizer, key):
    p = torch.nn.Parameter(torch.ones(8, 8))
    opt = optimizer([p])
    p.grad = torch.ones_like(p)
    opt.step()
    path = tmp_path / "s.pt"
    torch.save(opt.state_dict(), path)
    assert checkpoint.verify(path)["ok"]
    opt.state[p][key][1, 2] = NAN
    torch.save(opt.state_dict(), path)
    report = checkpoint.verify(path)
    assert not report["ok"] and key in str(report["findings"])


def test_cames_confidence_is_not_negative(tmp_path):
    p = torch.nn.Parameter(torch.ones(64, 64))
    opt = lowbit.CAME([p], lr=1e-3)
    p.grad = torch.ones_like(p)
    opt.step()
    path = tmp_path / "c.pt"
    torch.save(opt.state_dict(), path)
    assert checkpoint.verify(path)["ok"]
    opt.state[p]["exp_avg_res_row"].fill_(-1)
    torch.save(opt.state_dict(), path)
    report = checkpoint.verify(path)
    assert not report["ok"] and "are negative" in str(report["findings"])


BYTES = [name for name in dir(torch) if re.fullmatch(r"float8_\w+", name)]


@pytest.mark.parametrize("name", BYTES)
def test_verify_finds_one_in_8_bits(tmp_path, name):
    dtype = getattr(torch, name)
    for code in range(256):
        w = torch.tensor([1, code, 2], dtype=torch.uint8).view(dtype)
        torch.save({"w": w}, tmp_path / "a")
        report = checkpoint.verify(tmp_path / "a")
        said = str(report["findings"] + report["warnings"])
        finite = bool(torch.isfinite(w[1].float()))
        assert ("1 of 3 values are not finite, the first at [1]" in said) != finite, (code, said)
        assert report["ok"] != bool(torch.isnan(w[1].float()))


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("value", [complex(NAN, 0), complex(0, NAN)], ids=["real", "imaginary"])
def test_verify_finds_one_in_a_complex_number(tmp_path, dtype, value):
    w = torch.ones(2, 5, dtype=torch.complex64)
    torch.save({"w": w.to(dtype)}, tmp_path / "a")
    assert checkpoint.verify(tmp_path / "a")["ok"]
    w[1, 3] = w[1, 4] = value
    torch.save({"w": w.to(dtype)}, tmp_path / "a")
    assert "2 of 10 values are not finite, the first at [1, 3]" in str(
        checkpoint.verify(tmp_path / "a")["findings"]
    )


def test_an_infinite_difference_is_said_in_words(tmp_path):
    for name, value in (("a", 1.0), ("b", NAN)):
        torch.save(weights(w=torch.tensor([0.5, value])), tmp_path / name)
    (entry,) = checkpoint.diff(tmp_path / "a", tmp_path / "b")["differences"]
    assert entry["max"] == entry["relative"] == "infinite"
