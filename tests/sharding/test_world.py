"""Every rule, state format, scale and parameter format leaves the same bytes on 1, 2, 3 and 4 ranks, by rows, by columns and replicated, in real
processes over gloo; sums and maxima over the tensor included."""

import pytest
import world_worker


@pytest.fixture(scope="module")
def alone():
    return world_worker.digests(1)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_any_number_of_ranks_leaves_the_same_bytes(pool, alone, ranks):
    for got in pool.run(ranks, "world_worker", "digests", ranks):
        wrong = [name for name, digest in got.items() if digest != alone[name.partition(",")[0]]]
        assert not wrong, f"{len(wrong)} of {len(got)} differ on {ranks} ranks: {wrong[:10]}"
        assert len(got) > 30
    print(f"{ranks} ranks: {len(got)} digests of weights and state equal those of one process")
