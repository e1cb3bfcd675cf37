"""State in float64: compared as float64, kept as float64 by torch,
and reported where another target rounds it.
"""

import json

import pytest
import torch

from tests.support.peers.files import need_tool, run

pytestmark = pytest.mark.slow

need_tool()

OTHERS = ["lowbit", "bitsandbytes", "torchao", "flashoptim", "lpmm", "adafactor8bit"]


def saved(path, scale=1.0, dtype=torch.float64):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(64, 256, dtype=dtype)) for _ in range(2)]
    opt = torch.optim.AdamW(params, lr=1e-3)
    for p in params:
        p.grad = torch.randn_like(p) * scale
    opt.step()
    content = {"model": dict(enumerate(p.detach() for p in params)), "optim": opt.state_dict()}
    torch.save(content, path)
    return content["optim"]["state"]


def states(*arguments):
    return json.loads(run("convert", *arguments, "--json").stdout)["states"]


def test_torch_keeps_it(tmp_path):
    before = saved(tmp_path / "a.pt")
    rows = states(tmp_path / "a.pt", tmp_path / "b.pt", "--to", "torch", "--keep")
    assert {(row["from"], row["to"], row["exact"]) for row in rows} == {
        ("float64", "float64", True)
    }
    after = torch.load(tmp_path / "b.pt")["optim"]["state"]
    for i in before:
        for name in ("exp_avg", "exp_avg_sq"):
            assert after[i][name].dtype == torch.float64
            assert torch.equal(after[i][name], before[i][name])


@pytest.mark.parametrize("to", OTHERS)
def test_no_other_target_is_exact(tmp_path, to):
    saved(tmp_path / "a.pt")
    options = {"flashoptim": ("--state-format", "float32")}.get(to, ())
    rows = states(tmp_path / "a.pt", tmp_path / "b.pt", "--to", to, *options)
    assert len(rows) == 4
    for row in rows:
        assert row["from"] == "float64" and not row["exact"]
        assert 0 < row["relative_error"] < 1
    error = run(
        "convert", tmp_path / "a.pt", tmp_path / "c.pt", "--to", to, "--keep", *options, code=4
    ).stderr
    assert "float64" in error and ("would be rounded" in error or "without rounding" in error)
    assert not (tmp_path / "c.pt").exists()


def test_float32_state_of_lowbit(tmp_path):
    before = saved(tmp_path / "a.pt")
    rows = states(
        tmp_path / "a.pt", tmp_path / "b.pt", "--to", "lowbit", "--state-format", "float32"
    )
    assert {row["to"] for row in rows} == {"float32"} and not any(row["exact"] for row in rows)
    after = torch.load(tmp_path / "b.pt")["optim"]["state"]
    for row in rows:
        i, name = int(row["param"].split()[-1]), row["state"]
        error = (after[i][name].double() - before[i][name]).abs()
        assert row["max_error"] == pytest.approx(error.max().item())
        relative = error.norm() / before[i][name].norm()
        assert row["relative_error"] == pytest.approx(relative.item())


def test_beyond_float32_is_an_infinite_error(tmp_path):
    saved(tmp_path / "a.pt", scale=1e30)  # squares of 1e57
    rows = states(
        tmp_path / "a.pt", tmp_path / "b.pt", "--to", "lowbit", "--state-format", "float32"
    )
    assert {row["max_error"] for row in rows if row["state"] == "exp_avg_sq"} == {"infinite"}


@pytest.mark.parametrize(
    "first, second", [(1e300, 2e300), (1e-300, 2e-300), (1.0, 1.0 + 2**-40), (1e39, 2e39)]
)
def test_diff_tells_doubles_apart(tmp_path, first, second):
    def content(x):
        state = {"step": torch.tensor(1.0), "exp_avg": torch.full((3, 5), x, dtype=torch.float64)}
        state["exp_avg_sq"] = torch.ones(3, 5, dtype=torch.float64)
        optim = {"state": {0: state}, "param_groups": [{"lr": 1e-3, "params": [0]}]}
        return {"optim": optim, "extra": torch.full((2,), x, dtype=torch.float64)}

    for name, x in (("a", first), ("b", second)):
        torch.save(content(x), tmp_path / f"{name}.pt")
    run("diff", tmp_path / "a.pt", tmp_path / "a.pt")
    report = json.loads(run("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--json", code=4).stdout)
    assert report["by"] == "meaning"
    found = {d["name"]: d for d in report["differences"]}
    assert set(found) == {"parameter 0.exp_avg", "extra"}
    for d in found.values():
        assert d["relative"] == pytest.approx((second - first) / second, rel=1e-6)


def test_health_of_large_numbers(tmp_path):
    saved(tmp_path / "a.pt", scale=1e100)
    report = json.loads(run("inspect", tmp_path / "a.pt", "--health", "--json").stdout)
    for state in report["states"]:
        health = state["health"]
        assert health["infinite"] == 0
        assert 0 < health["rms"] <= health["most"]
