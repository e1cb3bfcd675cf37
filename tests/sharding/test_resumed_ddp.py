"""A run under DistributedDataParallel that is stopped and resumed. From three ranks on, torch adds
the ranks' gradients in another order after the first step: docs/bits/frameworks-tested.md.
"""

import pytest

from tests.sharding import resumed_ddp_worker


@pytest.mark.parametrize(
    "ranks, find_unused, same", [(2, False, True), (3, True, True), (3, False, False)]
)
def test_a_resumed_run_is_the_uninterrupted_one_while_buckets_stay(pool, ranks, find_unused, same):
    for found in pool.run(ranks, resumed_ddp_worker.resumed, find_unused):
        assert found == {"loaded": True, "end": same}
