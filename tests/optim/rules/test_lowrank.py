"""The numpy reference of the low-rank optimizers against what the authors' own code left. The C++
is held against the same arrays by tests/cpp/lowrank/trajectories.cpp.
"""

import numpy as np
import pytest

from tests.support.paths import GOLDEN
from tests.support.peers import lowrank as reference

LOWRANK = GOLDEN / "lowrank.bin"


@pytest.mark.parametrize("case", reference.CASES, ids=lambda c: c[0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_reference_meets_the_peers(case, dtype):
    arrays = reference.golden(LOWRANK)[case[0]]
    p, rule = reference.run(case, arrays, dtype)
    p4, exp_avg, exp_avg_sq, norm = arrays[-4:]
    assert np.abs(p - p4).max() <= 5e-7
    assert np.abs(rule.m - exp_avg).max() <= 1e-6 * np.abs(exp_avg).max()
    assert np.abs(rule.v - exp_avg_sq).max() <= 1e-6 * np.abs(exp_avg_sq).max()
    assert abs(rule.limiter.previous - norm[0]) <= 1e-6 * norm[0]


def test_seeds_of_the_refreshes():
    known = {
        1: 505211975917066638,
        2: 3402314949991714867,
        3: 3251329097462014787,
        12345: 5510110880054540551,
        505211975917066638: 7574884091489552460,
    }
    assert {k: reference.next_seed(k) for k in known} == known


@pytest.mark.parametrize("refresh, seed", [(0, 1), (1, 505211975917066638)])
def test_stored_projections_are_those_of_torch(refresh, seed):
    for name, shape, method, rank, _ in reference.CASES:
        if method == "apollo":
            p = reference.torch_projection(seed, *shape, rank)
            stored = reference.golden(LOWRANK)[name][1 + reference.STEPS + refresh]
            assert np.abs(stored - reference.long_side_first(p, shape)).max() <= 2e-6


def test_stored_singular_vectors_are_those_of_the_first_gradient():
    """To what float32 leaves of them: 1e-7 over the gap between the singular values."""
    _, g, *rest = reference.golden(LOWRANK)["fira"]
    ours, theirs = reference.singular_projection(g.astype(float), 8), rest[3]
    assert np.abs(ours * np.sign((ours * theirs).sum(0)) - theirs).max() <= 2e-5
