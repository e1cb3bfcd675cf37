"""Pipeline parallelism, by recipes/pipeline.py: any schedule and number of stages gives the bits of one process where micro-batches are added in the same
order, and a checkpoint goes on with any other number of stages."""

import pytest

ONE = ("GPipe", 1, 1)  # schedule, ranks, stages
PIPELINES = [
    ("1F1B", 2, 2), ("GPipe", 4, 4), ("Interleaved1F1B", 2, 4), ("InterleavedZeroBubble", 2, 4), ("ZBVZeroBubble", 2, 4), ("LoopedBFS", 2, 4),
]  # fmt: skip
# It takes the last micro-batch first, and bfloat16 gradients are rounded at each sum.
OTHER_SUMS = {"LoopedBFS"}


def everything(pool, function, schedule, ranks, stages, folder):
    """What all ranks have together, at two times."""
    several = pool.run(ranks, "pipeline_worker", function, schedule, stages, folder)
    first, second = ({k: v for parts in several for k, v in parts[i].items()} for i in range(2))
    assert sum(len(parts[0]) for parts in several) == len(first), "ranks have different parameters"
    return first, second


@pytest.fixture(scope="module")
def alone(pool):
    folder = f"{pool.folder}/alone"
    return folder, *everything(pool, "trained", *ONE, folder)


@pytest.mark.parametrize("schedule, ranks, stages", PIPELINES)
def test_stages_have_the_bits_of_one_process(pool, alone, schedule, ranks, stages):
    saved_alone, half, whole = alone
    folder = f"{pool.folder}/{schedule}"
    saved, end = everything(pool, "trained", schedule, ranks, stages, folder)
    assert saved.keys() == half.keys()
    assert (saved == half and end == whole) == (schedule not in OTHER_SUMS)
    # what one process saved, by stages; and what stages saved, in one process
    loaded, after = everything(pool, "resumed", schedule, ranks, stages, saved_alone)
    assert loaded == half and (after == whole) == (schedule not in OTHER_SUMS)
    loaded, after = everything(pool, "resumed", *ONE, folder)
    assert loaded == saved and (after == end) == (schedule not in OTHER_SUMS)
