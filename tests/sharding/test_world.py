"""Every rule, state format, scale and parameter format leaves the same bytes on 1, 2, 3 and 4
ranks, by rows, by columns and replicated, in real processes over gloo; sums and maxima over the
tensor included. Each rank compares what it holds with its part of what one process has."""

import pytest

from tests.sharding import world_worker

pytestmark = pytest.mark.long


@pytest.mark.parametrize("ranks, least", [(2, 100), (3, 60), (4, 60)])
def test_any_number_of_ranks_leaves_the_same_bytes(pool, ranks, least):
    for count, wrong in pool.run(ranks, world_worker.compare, ranks):
        assert not wrong, f"{len(wrong)} of {count} cases differ on {ranks} ranks: {wrong[:10]}"
        assert count > least
    print(f"{ranks} ranks: weights and state of {count} cases are the bytes of one process")


def test_a_byte_that_differs_is_seen(pool):
    assert pool.run(2, world_worker.one_byte_off) == [
        [],
        ["AdamW dynamic8 nearest: p0 exp_avg_dynamic8"],
    ]
