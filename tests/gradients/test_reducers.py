"""Hooks on gradients beside reducers of which they cannot know are refused: without that each rank
would step alone, and nothing would say so.
"""

import importlib.util

import pytest

from tests.gradients import reducers_worker

pytestmark = pytest.mark.slow

FSDP = "torch.distributed._composable.replicate_with_fsdp"


@pytest.mark.parametrize("use", ["steps", "steps beside", "sums", "exact"])
def test_composable_ddp_is_refused(pool, use):
    for when in ("the model", "a part", "later", "around"):
        [said] = pool.run(1, reducers_worker.under_replicate, use, when)
        kind = "RuntimeError" if when in ("later", "around") else "ValueError"
        assert said.startswith(f"{kind}: torch.distributed._composable.replicate"), (when, said)
        assert "wrap it in DistributedDataParallel or fully_shard instead" in said


@pytest.mark.skipif(importlib.util.find_spec(FSDP) is None, reason="torch has no such module")
@pytest.mark.parametrize("use", ["steps", "sums"])
def test_replicate_with_fsdp_is_served(pool, use):
    assert pool.run(2, reducers_worker.with_fsdp, use) == [True, True]


def test_parameters_that_ddp_reduces_late_are_stepped_and_not_added_up(pool):
    for use in ("sums", "exact", "added"):
        [said] = pool.run(1, reducers_worker.delayed, use)
        assert "'module.1.weight', 'module.1.bias': lowbit.accumulate does not support" in said
    assert pool.run(1, reducers_worker.delayed, "steps") == [""]


def test_exact_means_need_the_communication_hook(pool):
    [said] = pool.run(1, reducers_worker.hooked)
    assert "needs the communication hook of DistributedDataParallel for itself" in said


def test_uneven_inputs_under_join(pool):
    """A rank that has no more inputs repeats torch's collectives, and not lowbit's."""
    assert pool.run(2, reducers_worker.joined, False) == [["", "", ""]] * 2
    for unused, rounding, instead in (
        (True, "stochastic", "leave out one of the two"),
        (False, "exact", "accumulator.indices() does, with micro(index="),
    ):
        for inside, after, agree in pool.run(2, reducers_worker.joined, unused, rounding):
            assert instead in inside and "join() does not repeat on a rank" in inside
            assert inside == after and agree == ""


def test_a_model_is_freed_after_exact_means(pool):
    assert pool.run(1, reducers_worker.freed) == [True]


def test_gradients_in_buckets_are_copied_before_the_next_pass(pool):
    for buckets in (25, 1e-5):  # one for all, and one for each parameter
        assert pool.run(1, reducers_worker.added_in_views, buckets) == [True]


@pytest.mark.parametrize("kind", ["plain", "small buckets", "views", "static"])
def test_reentrant_checkpoints_step_after_the_reducer(pool, kind):
    """A nested backward pass ends before the reducer has the gradients of all layers."""
    options = {
        "plain": {},
        "small buckets": {"bucket_cap_mb": 1e-4},
        "views": {"gradient_as_bucket_view": True},
        "static": {"static_graph": True},
    }[kind]
    assert pool.run(2, reducers_worker.checkpointed, options) == [[], []]
