"""Schedule-Free AdamW's checkpoints, of the package schedulefree and lowbit's own: the copy of the
weights keeps its precision.
"""

import pytest
import torch
from torch import nn

import lowbit
from tests.support.peers.files import convert, need_tool, same
from tests.support.peers.schedule_free import of_the_authors

need_tool()
SHAPES = [(64, 128), (70,)]


def trained(dtype=torch.float32, **options):
    params = [
        nn.Parameter(torch.randn(s, generator=torch.Generator().manual_seed(i)).to(dtype))
        for i, s in enumerate(SHAPES)
    ]
    opt = lowbit.ScheduleFreeAdamW(params, lr=0.02, warmup_steps=2, **options)
    opt.train()
    for t in range(4):
        for i, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * t + i)).to(
                dtype
            )
        opt.step()
    opt.eval()
    return params, opt


@pytest.mark.parametrize("way", ["tool", "live"])
def test_the_authors_file_goes_on(tmp_path, way):
    params, opt = trained(state_format="float32")
    file = of_the_authors(opt)
    other = lowbit.ScheduleFreeAdamW(params, lr=1.0)
    if way == "tool":
        other.load_state_dict(convert(tmp_path, file, "lowbit"))
    else:
        torch.save(file, tmp_path / "file.pt")
        lowbit.load_optimizer(other, tmp_path / "file.pt")
    group, kept = other.param_groups[0], other.state[params[0]]
    assert group["k"] == 4 and group["lr"] == 0.02 and group["warmup_steps"] == 2
    assert group["weight_sum"] == opt.param_groups[0]["weight_sum"]
    assert float(kept["step"]) == 4 and torch.equal(kept["z"], opt.state[params[0]]["z"])
    assert "exp_avg_sq_dynamic8_unsigned" in kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_formats_of_lowbit(tmp_path, dtype):
    params, opt = trained(dtype)
    made = convert(tmp_path, opt.state_dict(), "lowbit", "--state-format", "4bit")
    ours, theirs = made["state"][0], opt.state[params[0]]
    key = "z" if dtype == torch.float32 else "z_bfloat16"
    assert torch.equal(ours[key], theirs[key]) and "exp_avg_sq_power1_4_unsigned" in ours
    again = lowbit.ScheduleFreeAdamW(params, state_format="4bit")
    again.load_state_dict(made)
    assert torch.equal(again.state[params[0]][key], theirs[key])
    kept = convert(tmp_path, opt.state_dict(), "lowbit", "--keep")
    same(kept["state"], opt.state_dict()["state"])
