"""What `stats()` prints, shows in a notebook and logs: every number against one that is found the
slow way.
"""

import math
import re

import pytest
import torch
from torch import nn

import lowbit
from lowbit import ops
from lowbit.optim.codes import ends_of, unpack
from lowbit.optim.report import COMPONENTS
from lowbit.state.quantize import dequantize_slot


class Model(nn.Module):
    def __init__(self, blocks=3):
        super().__init__()
        self.head = nn.Linear(64, 80, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(64, 64 + 16 * (i % 2)) for i in range(blocks))


def trained(blocks=3, dtype=torch.bfloat16, **options):
    torch.manual_seed(0)
    model = Model(blocks).to(dtype)
    opt = lowbit.AdamW(model.named_parameters(), **options)
    for seed in range(2):
        set_grads(model, seed)
        opt.step()
    set_grads(model, 2)
    return model, opt


def set_grads(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        size = torch.exp(3 * torch.randn(p.shape, generator=generator))
        p.grad = (size * torch.randn(p.shape, generator=generator)).to(p.dtype)
        p.grad[..., :5] = 0


def decoded(opt, p, state=None):
    """State name -> (format, codes or None, float32 values)."""
    lay, state, made = opt.layouts[p], state or opt.state[p], {}
    for slot in lay.slots:
        tensors = [state[e.key].clone() for e in slot.entries(lay.part)]
        codes = (
            unpack(tensors[0], ops.state_format(slot.format)["bits"], lay.part.cols)
            if slot.coded
            else None
        )
        made[slot.name] = (slot.format, codes, dequantize_slot(tensors, lay, slot))
    return made


def reference(model, opt, probe):
    """The total, from dequantized state and, with `probe`,
    from torch's AdamW and the step that is then made.
    """
    params = dict(model.named_parameters())
    before = {n: (p.detach().float(), decoded(opt, p)) for n, p in params.items()}
    counts = {}
    for _, states in before.values():
        for state, (format, codes, values) in states.items():
            if codes is not None:
                ends = torch.isin(codes, ends_of(format)) & (values != 0)
                found = counts.setdefault(state, [0, 0, 0])
                for i, n in enumerate((int(ends.sum()), int((values == 0).sum()), values.numel())):
                    found[i] += n
    made = {
        "values": sum(p.numel() for p in params.values()),
        "bytes": sum(t.nbytes for p in params.values() for t in (p, *opt.state[p].values())),
        **{f"saturated/{state}": n[0] / n[2] for state, n in counts.items()},
        **{f"zero/{state}": n[1] / n[2] for state, n in counts.items()},
    }
    if not probe:
        return made
    updates = lost = 0
    errors = {}
    group = opt.param_groups[0]
    exact = {}
    for name, p in params.items():
        copy = nn.Parameter(before[name][0].clone())
        torchs = torch.optim.AdamW(
            [copy], lr=group["lr"], weight_decay=group["weight_decay"], foreach=False
        )
        states = {
            state: values.reshape(p.shape).clone()
            for state, (_, _, values) in before[name][1].items()
        }
        torchs.state[copy] = {"step": torch.tensor(2.0), **states}
        copy.grad = p.grad.float()
        torchs.step()
        exact[name] = copy.detach(), torchs.state[copy]
    opt.step()
    for name, p in params.items():
        moved = exact[name][0] != before[name][0]
        same = p.detach().float() == before[name][0]
        updates, lost = updates + int(moved.sum()), lost + int((moved & same).sum())
        for state, (_, _, values) in decoded(opt, p).items():
            want = exact[name][1][state].double()
            sums = errors.setdefault(state, [0.0, 0.0])
            sums[0] += float((values.reshape(p.shape).double() - want).square().sum())
            sums[1] += float(want.square().sum())
    made["updates"], made["lost_updates"] = updates / made["values"], lost / updates
    made.update({f"rms_error/{s}": math.sqrt(a / b) for s, (a, b) in errors.items()})
    return made


@pytest.mark.filterwarnings("ignore:.*rounded to nearest", "ignore:rounding to nearest")
@pytest.mark.parametrize("probe", [False, True])
@pytest.mark.parametrize("name", ["8bit", "4bit", "3bit", "lpmm4", "log8"])
def test_the_summary_and_the_scalars(name, probe):
    model, opt = trained(state_format=name, param_format="nearest")
    stats = opt.stats(probe=probe)
    want = reference(model, opt, probe)
    scalars = stats.scalars()
    assert all(type(value) is float for value in scalars.values())
    for key, value in want.items():
        slack = (
            {"abs": 2e-3}
            if "updates" in key
            else {"rel": 1e-3, "abs": 1e-7}
            if "rms" in key
            else {"rel": 1e-12}
        )
        assert scalars[f"lowbit/{key}"] == pytest.approx(value, **slack), key
    summary, table = str(stats).split("\n\n")
    assert len(summary.splitlines()) <= 10 and len(table.splitlines()) <= 21
    text = re.sub(r"\s+", " ", summary)
    assert f"parameters 7 tensors of {want['values']:,} values" in text
    assert f"{want['bytes'] / 1024:,.1f} KiB, {want['bytes'] / want['values']:.3f} for each" in text
    for key in ("saturated", "zero"):
        each = [
            f"{state} {100 * want[f'{key}/{state}']:.2f}%" for state in ("exp_avg", "exp_avg_sq")
        ]
        assert f"{key} {', '.join(each)}" in text
    if probe:
        assert f"lost updates {100 * scalars['lowbit/lost_updates']:.2f}%" in text
        each = [
            f"{state} {100 * scalars[f'lowbit/rms_error/{state}']:.2f}%"
            for state in ("exp_avg", "exp_avg_sq")
        ]
        assert f"rms error {', '.join(each)}" in text
    else:
        assert "lost updates not counted" in text
    assert sum(line.startswith((" ", "worst")) for line in summary.splitlines()) == 3


def test_the_names_of_scalars_stay():
    _, opt = trained()
    always = {"values", "bytes", "bytes_per_value", *(f"bytes/{key}" for key in COMPONENTS)}
    always |= {
        f"{key}/{s}" for key in ("saturated", "zero", "used") for s in ("exp_avg", "exp_avg_sq")
    }
    assert set(opt.stats().scalars()) == {f"lowbit/{key}" for key in always}
    probed = {f"{key}/{s}" for key in ("rms_error", "max_error") for s in ("exp_avg", "exp_avg_sq")}
    probed |= {"updates", "lost_updates"}
    assert set(opt.stats(probe=True).scalars()) == {f"lowbit/{key}" for key in always | probed}
    assert all(
        key in lowbit.Stats.scalars.__doc__
        for key in ("lowbit/values", "lowbit/lost_updates", "lowbit/saturated/STATE")
    )


def test_the_worst_tensors_are_named():
    model, opt = trained()
    weights = [model.head.weight, *(block.weight for block in model.blocks)]
    for share, p in zip((0.75, 0.0, 1.0, 0.5), weights, strict=True):
        opt.state[p]["exp_avg_dynamic8_scale"][: round(share * p.shape[0])] = 0
    summary = str(opt.stats()).split("\n\n")[0].splitlines()
    worst = [line[14:] for line in summary[-3:]]
    assert worst[0] == "blocks.1.weight: 100.00% of exp_avg zero"
    assert [line.split(":")[0] for line in worst[1:]] == ["head.weight", "blocks.2.weight"]


def test_like_tensors_share_a_row():
    _, opt = trained(overrides=lowbit.override("blocks.2.*", state_format="4bit"))
    stats = opt.stats()
    rows = {line.split()[0]: line.split() for line in str(stats).split("\n\n")[1].splitlines()[1:]}
    assert list(rows) == ["head.weight", "blocks.*.weight", "blocks.*.bias", "blocks.2.weight"]
    values = [stats["parameters"][f"blocks.{i}.weight"]["values"] for i in (0, 1)]
    shares = [
        stats["parameters"][f"blocks.{i}.weight"]["states"]["exp_avg"]["saturated"] for i in (0, 1)
    ]
    mean = (values[0] * shares[0] + values[1] * shares[1]) / sum(values)
    assert rows["blocks.*.weight"][1:3] == ["2", f"{sum(values):,}"]
    assert rows["blocks.*.weight"][4:6] == ["dynamic8", f"{100 * mean:.2f}%"]
    assert rows["blocks.*.bias"][1] == "3"


def test_many_groups_are_joined():
    params = [(f"layer_{i}.weight", nn.Parameter(torch.ones(100 + i, 50))) for i in range(40)]
    stats = lowbit.AdamW(params).stats()
    lines = str(stats).split("\n\n")[1].splitlines()
    assert len(lines) == 21 and lines[-1].split()[:3] == ["(21", "more)", "21"]
    assert lines[-1].split()[3] == f"{sum((100 + i) * 50 for i in range(21)):,}"
    assert lines[1].split()[0] == "layer_21.weight" and "layer_0.weight" in stats.table()
    assert len(stats.table().splitlines()) == 1 + 80 + 2


def test_a_notebook_gets_html_with_escaped_names():
    p = nn.Parameter(torch.ones(64, 64))
    stats = lowbit.AdamW([("<img src=x>&'", p)]).stats()
    made = stats._repr_html_()
    assert "<img" not in made and "&lt;img src=x&gt;&amp;&#x27;" in made
    assert set(re.findall(r"</?(\w+)", made)) == {"div", "table", "tr", "td", "th"}
    assert "src=" not in re.sub(r"&lt;.*?&gt;", "", made) and "href" not in made
    for text in ("4,096", "saturated", "dynamic8"):
        assert text in made


def test_an_optimizer_without_values_prints():
    assert "0 values" in str(lowbit.AdamW([nn.Parameter(torch.ones(0, 20))]).stats())
