"""A load that fails on one rank fails on all, so that they fall back together; and one checkpoint
is loaded by all of them.
"""

import pytest

import lowbit
from tests.checkpoint import failed_rank_worker

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ckpt")]

SHARED = {"exp_avg": lowbit.scaled("dynamic8", scale="tensor")}


@pytest.mark.parametrize("formats", [None, SHARED], ids=["blocks", "a scale of all ranks"])
def test_all_ranks_resume_from_one_checkpoint(pool, tmp_path, formats):
    resumed = pool.run(2, failed_rank_worker.resumed, str(tmp_path), formats)
    for rank, (step, told, steps) in enumerate(resumed):
        assert (step, steps) == (1, 1.0), (rank, told)
        ((cause, said),) = told
        assert cause == "damaged"
        assert ("__1_0.distcp" if rank else "rank 1 failed to load its part") in said


def test_all_ranks_of_two_meshes_hear_of_it(pool):
    """Also the rank that shares no mesh with the one that failed."""
    for rank, (first, *others) in enumerate(pool.run(3, failed_rank_worker.of_two_meshes)):
        assert first == "loaded"
        assert others == ["no memory" if rank == 2 else "rank 2 failed"] * 2, rank


def test_ranks_load_one_checkpoint(pool, tmp_path):
    for said in pool.run(2, failed_rank_worker.of_two_checkpoints, str(tmp_path)):
        assert f"rank 0 loads {tmp_path}/step-1 and rank 1 loads {tmp_path}/step-2" in said
