"""Adafactor with a rank: the numpy twin under every option, what is unused, and what is refused.
test_apollo.py has what it shares with APOLLO.
"""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

import lowbit
from lowbit.step import lowrank
from tests.support.peers import lowrank as reference

RANK, GAP = 6, 3
OPTIONS = [
    {
        "scale_type": kind,
        "relative_step": relative,
        "scale_parameter": scaled,
        "decay_by": by,
        **rest,
    }
    for (kind, relative, scaled, by), rest in zip(
        itertools.product(
            ("channel", "tensor"), (True, False), (True, False), ("lr", "rho", "alpha")
        ),
        itertools.cycle(
            [
                {},
                {"d": None},
                {"beta2": 0.9, "fira_margin": 0.0},
                {"d": 2.0, "fira_margin": 0.05},
                {"eps": (1e-2, 0.3)},
            ]
        ),
        strict=False,
    )
]


def drawn(p, opt):
    """The projections of a matrix as the optimizer draws them."""
    lay = opt.layouts[p]
    return lambda refresh, _: reference.long_side_first(
        lowrank._torch_projection(lay, refresh).numpy(), p.shape
    )


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(map(str, o.values())))
@pytest.mark.parametrize("shape", [(20, 70), (70, 20)], ids=str)
def test_every_option_has_the_twins_steps(options, shape):
    rng = np.random.default_rng(sum(shape))
    value = rng.standard_normal(shape)
    p = nn.Parameter(torch.tensor(value, dtype=torch.float32))
    opt = lowbit.Adafactor(
        [p],
        lr=0.3,
        rank=RANK,
        update_proj_gap=GAP,
        projection="torch",
        weight_decay=0.1,
        state_format="float32",
        **options,
    )
    eps1, eps2 = options.get("eps", (1e-4, 1e-3))
    twin = reference.LowRankAdafactor(
        RANK,
        drawn(p, opt),
        gap=GAP,
        lr=0.3,
        weight_decay=0.1,
        eps=eps1**2,
        eps2=eps2,
        margin=options.get("fira_margin"),
        tensor=options["scale_type"] == "tensor",
        d=options.get("d", 1.0),
        beta2=options.get("beta2"),
        dtype=np.float64,
        **{k: options[k] for k in ("relative_step", "scale_parameter", "decay_by")},
    )
    for t in range(8):
        g = rng.standard_normal(shape) * 10.0 ** -(t % 3)
        p.grad = torch.tensor(g, dtype=torch.float32)
        before = value
        value = twin.step(value, p.grad.double().numpy())
        opt.step()
        step = np.abs(value - before).max()
        off = np.abs(p.detach().double().numpy() - value).max()
        assert off <= 2e-6 * (t + 1) * max(step, 1.0), (t, off)


def test_without_a_rank_it_is_what_it_was():
    """No tensor, no group of a step and no pass more."""
    p = nn.Parameter(torch.randn(40, 70))
    opt = lowbit.Adafactor([p])
    assert sorted(opt.state[p]) == ["step", "stream", "update_norm", "variance_col", "variance_row"]
    for _ in range(3):
        p.grad = torch.randn(40, 70)
        opt.step()
    assert opt.kept.cache is not None


def test_a_new_projection_forgets_the_second_moment():
    """Even a NaN in it: the state of a step that begins a projection is the gradient's own."""
    p = nn.Parameter(torch.randn(30, 20))
    opt = lowbit.Adafactor([p], rank=4, update_proj_gap=2, state_format="float32")
    kept = []
    for factor in (float("nan"), 1.0, 1.0):
        p.grad = torch.ones(30, 20) * factor
        opt.step()
        kept.append(opt.state[p]["variance"].isfinite().all().item())
        p.data.fill_(1.0)
    assert kept == [False, False, True]


def test_state_is_a_second_moment_alone():
    wide, tall, vector = (nn.Parameter(torch.randn(s)) for s in ((64, 512), (512, 64), (5000,)))
    opt = lowbit.Adafactor([wide, tall, vector], rank=16, min_numel=1)
    keys = [
        "shape",
        "step",
        "stream",
        "update_norm",
        "variance_dynamic8_unsigned",
        "variance_dynamic8_unsigned_scale",
    ]
    assert sorted(opt.state[wide]) == sorted(opt.state[tall]) == keys
    assert opt.state[wide]["variance_dynamic8_unsigned"].shape == (16, 512)
    assert opt.state[tall]["variance_dynamic8_unsigned"].shape == (512, 16)
    assert opt.state[vector]["variance"].shape == (5000,)
    none = lowbit.Adafactor([{"params": [tall], "rank": None}, {"params": [wide]}], rank=16)
    assert none.state[tall]["variance_row"].shape == (512,)
    assert "update_norm" in none.state[wide]


def test_seeds_count_parameters_of_two_dimensions_and_a_rank():
    shapes = [(30, 20), (7,), (3, 20), (4, 5, 6), (20, 30)]
    params = [nn.Parameter(torch.zeros(s)) for s in shapes]
    other = nn.Parameter(torch.zeros(30, 30))
    opt = lowbit.Adafactor([{"params": [other], "rank": None}, {"params": params}], rank=4)
    assert [opt.layouts[params[i]].number_of for i in (0, 4)] == [0, 3]
    opt.add_param_group({"params": [nn.Parameter(torch.zeros(9, 9))]})
    assert opt.layouts[opt.param_groups[2]["params"][0]].number_of == 4


def test_compensation_counts_in_the_root_mean_square():
    """Of split weights the float32 values, not their upper halves."""
    start = torch.full((40, 30), 1.00390625 - 2**-9).bfloat16()
    split, wide = nn.Parameter(start.clone()), nn.Parameter(start.float())
    opts = [
        lowbit.Adafactor([split], rank=4, param_format="bfloat16_split16"),
        lowbit.Adafactor([wide], rank=4),
    ]
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        grad = torch.randn(40, 30, generator=generator).bfloat16()
        split.grad, wide.grad = grad, grad.float()
        for opt in opts:
            opt.step()
    joined = lowbit.ops.join(
        split.detach(), opts[0].state[split]["param_bfloat16_split16"], "bfloat16_split16"
    )
    assert torch.allclose(joined, wide, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"rank": 0}, "rank should be"),
        ({"rank": 4, "update_proj_gap": 0}, "update_proj_gap should be"),
        (
            {"rank": 4, "update_proj_gap": 200.0},
            "update_proj_gap should be an int >= 1 but is: 200.0",
        ),
        ({"rank": 4, "update_proj_gap": 1.5}, "update_proj_gap should be"),
        ({"rank": 4, "update_proj_gap": float("inf")}, "update_proj_gap should be"),
        ({"rank": 4, "update_proj_gap": True}, "update_proj_gap should be"),
        ({"rank": 4, "scale_type": "row"}, "scale_type should be"),
        ({"rank": 4, "projection": "svd"}, "projection should be"),
        ({"rank": 4, "beta1": 0.9}, "parameter 0 has rank=4 and beta1=0.9.*take APOLLO"),
        ({"rank": 4, "add_eps": True}, "parameter 0 has rank=4 and add_eps=True"),
        (
            {"rank": 4, "eps": (1e-30, 1e-3)},
            r"parameter 0 has rank=4 and eps\[0\]=1e-30, whose square is 0 in float32",
        ),
        ({"rank": 4, "eps": (0.0, 1e-3)}, r"eps\[0\]=0.0, whose square is 0.*take None"),
    ],
)
def test_what_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        lowbit.Adafactor([nn.Parameter(torch.zeros(20, 20))], **options)


def test_a_group_with_no_whole_gap_is_refused():
    group = {"params": [nn.Parameter(torch.zeros(20, 20))], "update_proj_gap": 2.0}
    with pytest.raises(ValueError, match=r"update_proj_gap should be an int >= 1 but is: 2\.0"):
        lowbit.Adafactor([group], rank=4)


@pytest.mark.parametrize("eps1", [None, 1.1e-19])
def test_a_row_without_gradient_stays_finite(eps1):
    """A NaN there would reach every weight, through the update's norm."""
    p = nn.Parameter(torch.randn(40, 30))
    opt = lowbit.Adafactor([p], rank=4, eps=(eps1, 1e-3))
    p.grad = torch.randn(40, 30)
    p.grad[7] = 0.0
    opt.step()
    assert p.isfinite().all()


@pytest.mark.parametrize("by, decay", [("lr", 2.0), ("rho", 2.0), ("alpha", 8.0)])
def test_a_decay_to_zero_is_refused_before_anything_moves(by, decay):
    """Also the parameters before it, and its own state.
    alpha is rho times eps2 where weights are 0.
    """
    first, p = nn.Parameter(torch.ones(30, 20)), nn.Parameter(torch.zeros(20, 20))
    groups = [{"params": [first], "weight_decay": 0.0}, {"params": [p]}]
    opt = lowbit.Adafactor(
        groups,
        rank=4,
        lr=0.5,
        weight_decay=decay,
        decay_by=by,
        eps=(None, 0.25),
        relative_step=False,
    )
    first.grad, p.grad = torch.ones(30, 20), torch.ones(20, 20)
    kept = [t.clone() for q in (first, p) for t in (q.detach(), *opt.state[q].values())]
    with pytest.raises(
        ValueError, match=rf"weight_decay={decay} by decay_by='{by}' decays every weight to 0"
    ):
        opt.step()
    now = [t for q in (first, p) for t in (q.detach(), *opt.state[q].values())]
    assert all(torch.equal(a, b) for a, b in zip(kept, now, strict=True))


def test_a_gpu_is_refused_at_construction(monkeypatch):
    """On a stand-in: what the optimizer asks is the device of the local tensor."""
    opt = lowbit.Adafactor([nn.Parameter(torch.zeros(20, 20))], rank=4)
    assert opt.work_on(torch.device("cpu")) and opt.work_on(torch.device("meta"))
    with pytest.raises(
        ValueError, match="runs on the CPU only, but a parameter is on cuda:1; take APOLLO"
    ):
        opt.work_on(torch.device("cuda", 1))


def test_a_group_takes_the_place_of_another():
    first, second, third = (
        [nn.Parameter(torch.zeros(*s)) for s in shapes]
        for shapes in ([(20, 20)], [(20,), (30, 20)], [(20, 30)])
    )
    options = {"rank": 4, "projection": "torch"}
    opt = lowbit.Adafactor([{"params": first}, {"params": second}], **options)
    opt.param_groups.pop(0)
    del opt.state[first[0]]
    opt.add_param_group({"params": third})
    assert [opt.layouts[p].number_of for p in (second[1], third[0])] == [0, 1]
