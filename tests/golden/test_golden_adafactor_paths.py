"""Two paths of adafactor-8bit (tests/golden/README.md): Adafactor in a subspace of 0.1.9, and CAME
of 0.4.6 with its uniform 8-bit momentum.

tests/golden/make_adafactor8bit.py has the settings of the runs. What lowbit calls otherwise:

    apollo_eps                  the square of eps1, for matrices that a subspace steps;
                                1e-8 both by default
    scale_weight_decay          decay_by="alpha" (True) or "rho"
    its limiter in a subspace   fira_margin=0.01, which it has there always and elsewhere on demand
"""

import numpy as np
import pytest
import torch

import lowbit
from tests.golden.test_golden_adafactor import uniform
from tests.support.peers import lowrank as reference
from tests.support.peers.golden import (
    F,
    Ours,
    arrays,
    blockwise,
    encoded,
    entries,
    explain,
    follow,
    near_midpoint,
    same_values,
)

FILE = "adafactor8bit"
STEPS = 5


def gradients(i):
    return [g.astype(F) for g in arrays(FILE)[f"g{i}"]]


# 0.1.9 with apollo_rank: the twin's settings

RANK = 8
CASES = {
    "default": {"gap": 2, "weight_decay": 0.1, "decay_by": "alpha"},
    "tensor": {
        "gap": 2,
        "weight_decay": 0.1,
        "decay_by": "rho",
        "tensor": True,
        "relative_step": False,
        "scale_parameter": False,
        "beta2": 0.9,
        "d": 1.5,
        "eps": 1e-4,
        "margin": 0.05,
    },
    "maximize": {"gap": 3, "eps2": 0.5, "relative_step": False},
}


def seed_of(number, refresh):
    for _ in range(refresh):
        number = reference.next_seed(number)
    return number


def twin(case, i, dtype=F):
    shape = arrays(FILE)[f"p{i}"].shape

    def drawn(refresh, _):
        return reference.torch_projection(seed_of(i, refresh), *shape, RANK)

    options = {"margin": 0.01, **CASES[case]}
    return reference.LowRankAdafactor(RANK, drawn, dtype=dtype, **options)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("i", [0, 1])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_twin_meets_the_peer(case, i, dtype):
    golden, rule = arrays(FILE), twin(case, i, dtype)
    p, sign = golden[f"p{i}"], -1 if case == "maximize" else 1
    for g in gradients(i):
        p = rule.step(p, sign * g)
    # five roundings of values up to 4
    assert np.abs(p - golden[f"lowrank_{case}_p{i}"]).max() <= 1e-6
    np.testing.assert_allclose(
        rule.v.reshape(-1), golden[f"lowrank_{case}_v_low{i}"], rtol=2e-5, atol=1e-9
    )
    np.testing.assert_allclose(
        rule.limiter.previous, golden[f"lowrank_{case}_scaled_grad_norm_prev{i}"], rtol=2e-6
    )


def test_seeds_count_from_0():
    golden = arrays(FILE)
    for i in (0, 1):
        assert golden[f"lowrank_default_current_proj_seed{i}"] == seed_of(i, 2)
        assert golden[f"lowrank_default_apollo_seed{i}"] == seed_of(i, 3)


def build(case):
    """The three parameters as the peer has them: its limiter and its apollo_eps are of matrices
    only.
    """
    golden = arrays(FILE)
    params = [torch.nn.Parameter(torch.tensor(golden[f"p{i}"])) for i in range(3)]
    names = {"gap": "update_proj_gap", "margin": "fira_margin"}
    options = {
        names.get(k, k): v for k, v in CASES[case].items() if k not in ("eps", "eps2", "tensor")
    }
    kind = "tensor" if CASES[case].get("tensor") else "channel"
    eps2, inside = CASES[case].get("eps2", 1e-3), CASES[case].get("eps")
    eps1 = None if inside is None else inside**0.5
    matrices = {
        "fira_margin": 0.01,
        **options,
        "params": params[:2],
        "eps": (eps1, eps2),
        "rank": RANK,
    }
    options = {k: v for k, v in options.items() if k != "fira_margin"}
    vector = {"params": params[2:], "eps": (None, eps2)}
    opt = lowbit.Adafactor(
        [matrices, vector],
        projection="torch",
        scale_type=kind,
        state_format="float32",
        maximize=case == "maximize",
        **options,
    )
    return params, opt


@pytest.mark.parametrize("case", CASES)
def test_low_rank_adafactor_of_019(case):
    golden = arrays(FILE)
    params, opt = build(case)
    for t in range(STEPS):
        for i, p in enumerate(params):
            p.grad = torch.tensor(gradients(i)[t])
        opt.step()
    for i, p in enumerate(params):
        off = np.abs(p.detach().numpy() - golden[f"lowrank_{case}_p{i}"]).max()
        assert off <= 2e-6, (i, off)  # two roundings a step of values up to 4
    for i in (0, 1):
        state = opt.state[params[i]]
        np.testing.assert_allclose(
            state["variance"].reshape(-1), golden[f"lowrank_{case}_v_low{i}"], rtol=2e-5, atol=1e-9
        )
        np.testing.assert_allclose(
            state["update_norm"], golden[f"lowrank_{case}_scaled_grad_norm_prev{i}"], rtol=2e-6
        )
        assert "exp_avg" not in state
    np.testing.assert_allclose(
        opt.state[params[2]]["variance"], golden[f"lowrank_{case}_variance2"], rtol=1e-6
    )


# CAME of 0.4.6

UNIFORM = entries("uniform8")


def unclear(stored):
    """Where a code is undecided: the update that is averaged is divided by means,
    whose float32 sums have other orders.
    """
    return near_midpoint(stored.z, UNIFORM, ulps=16)


SCALED = lowbit.scaled("uniform8", block=256)


def test_what_the_codes_mean():
    np.testing.assert_array_equal(UNIFORM, (np.arange(256) - 128).astype(F) / 128)


class CameTwin:
    """CAME in float32 numpy: the update takes the momentum and the means before they are stored."""

    def __init__(
        self, p0, stores, *, lr=1e-3, decay=0.0, betas=(0.9, 0.999, 0.9999), eps=(1e-30, 1e-16)
    ):
        self.p, self.stores, self.lr, self.decay, self.betas, self.eps = (
            p0.copy(),
            stores,
            lr,
            decay,
            betas,
            eps,
        )
        rows, cols = p0.shape
        self.kept = [np.zeros((rows, 1), F), np.zeros((1, cols), F)] * 2
        self.stored = [None]
        self.m = np.zeros_like(p0)

    def mean(self, k, x, weight):
        row, col = (
            a + F(weight) * (x.mean(axis, keepdims=True) - a)
            for a, axis in zip(self.kept[k : k + 2], (1, 0), strict=True)
        )
        self.kept[k : k + 2] = [row, col]
        return row / row.mean() * col

    def step(self, g):
        u = g / np.sqrt(self.mean(0, g * g + F(self.eps[0]), 1 - self.betas[1]))
        u = u / max(F(1), np.sqrt((u * u).mean()))
        m = self.m + F(1 - self.betas[0]) * (u - self.m)
        w = self.mean(2, (u - m) ** 2 + F(self.eps[1]), 1 - self.betas[2])
        self.p = self.p * F(1 - self.lr * self.decay) - F(self.lr) * m / np.sqrt(w)
        self.stored = [self.stores(m)]
        self.m = self.stored[0].value
        self.kept = [self.store(x) for x in self.kept]

    def store(self, x):
        return x


class Adaptive(CameTwin):
    def store(self, x):
        return encoded("log8", 2048)(x).value


MEANS = ("exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_res_row", "exp_avg_res_col")


@pytest.mark.parametrize("case, kind, decay", [("uf8", CameTwin, 0.0), ("uf8_al8", Adaptive, 0.1)])
def test_came_of_046(case, kind, decay):
    golden = arrays(FILE)
    outside = dict.fromkeys(MEANS, encoded("log8", 2048)) if kind is Adaptive else {}
    ours = Ours(
        lowbit.CAME,
        golden["p0"],
        outside=outside,
        lr=1e-3,
        weight_decay=decay,
        state_format={"exp_avg": SCALED},
    )
    peer = kind(golden["p0"], uniform(8), decay=decay)
    slots = [("exp_avg", "uniform8", unclear)]
    carried, undecided = follow(case, ours, peer, gradients(0), slots)
    left = golden[f"came_{case}_p0"]
    same_values(f"{case} (re-derived)", peer.p, left, undecided)
    same_values(case, ours.values, left, undecided | carried)
    theirs = golden[f"came_{case}_m_q0"].astype(int)
    codes = ours.codes("exp_avg", "uniform8")
    explain(
        case, codes != theirs, {"midpoint": unclear(peer.stored[0]), "carried": undecided | carried}
    )
    assert np.abs(codes - theirs).max() <= 1
    np.testing.assert_allclose(
        ours.scale("exp_avg", "uniform8"), golden[f"came_{case}_m_scale0"], rtol=1e-6
    )
    keys = {"exp_avg_sq": "var", "exp_avg_res": "conf"}
    for name in MEANS:
        x, side = name.rsplit("_", 1)
        theirs = f"came_{case}_" + (f"{side}_var" if keys[x] == "var" else f"conf_{side}")
        if kind is Adaptive:
            here = ours.codes(name)
            assert (here != golden[f"{theirs}_q0"][0][: here.size]).sum() <= 1
        else:
            # one code of a column of 16
            np.testing.assert_allclose(
                ours.state[name], golden[f"{theirs}0"].reshape(-1), rtol=1e-4
            )


def test_a_positive_extreme_shrinks():
    """As the peer's does: its largest code is 127/128. linear8 keeps both signs."""
    x = torch.tensor([[1.0, -1.0, 0.5, 0.0]])
    codes, scales = lowbit.ops.quantize(x, "uniform8", 256)
    back = lowbit.ops.dequantize(codes, scales, "uniform8", 256, 4)
    assert back.tolist() == [[127 / 128, -1.0, 0.5, 0.0]]
    store = blockwise(UNIFORM, 256)(x.numpy()).codes
    assert codes.reshape(-1).tolist() == store.reshape(-1).tolist() == [255, 0, 192, 128]
