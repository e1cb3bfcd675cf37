"""A pass that raised on every rank leaves a model under DDP or FSDP2 that runs the step again, with
the bits of a run in which nothing was raised.
"""

import pytest

from tests.gradients import recover_worker
from tests.gradients.recover_worker import BOTH

pytestmark = pytest.mark.long

# With every rule but AdamW, which is tested at all places: no gradients yet, and some.
WITH_RULES = ("loss", "inside of a block")


def check(answers, count):
    for found in answers:
        wrong = [name for name, holds in found.items() if not holds]
        assert not wrong, wrong
        assert len(found) == count


@pytest.mark.parametrize("kind", ["ddp", "ddp view", "ddp unused", "ddp static", "fsdp2"])
def test_an_accumulated_step_is_run_again_with_the_same_bits(pool, kind):
    check(pool.run(2, recover_worker.run_again, kind), 8)


def test_hsdp_runs_a_step_again_with_the_same_bits(pool):
    check(pool.run(4, recover_worker.run_again, "hsdp"), 8)


@pytest.mark.parametrize("kind", ["tp x fsdp", "ep x fsdp"])
def test_two_kinds_of_parallelism_run_a_step_again_with_the_same_bits(pool, kind):
    check(pool.run(4, recover_worker.run_again, kind, BOTH), 4)


@pytest.mark.parametrize("rule", ["LAMB", "Adafactor", "APOLLO", "split8"])
def test_other_rules_run_a_step_again_with_the_same_bits(pool, rule):
    check(pool.run(2, recover_worker.run_again, f"fsdp2, {rule}", BOTH, WITH_RULES), 2)


def test_rules_that_reduce_run_a_step_again_where_experts_are_sharded(pool):
    check(pool.run(4, recover_worker.run_again, "ep x fsdp, LAMB", BOTH, WITH_RULES), 2)


@pytest.mark.parametrize("kind, count", [("ddp", 4), ("fsdp2", 6)])
def test_steps_in_backward_go_on(pool, kind, count):
    check(pool.run(2, recover_worker.in_backward, kind), count)


def test_three_ranks_whose_sums_depend_on_the_buckets(pool):
    check(pool.run(3, recover_worker.run_again, "ddp"), 8)


def test_fsdp1_keeps_what_a_backward_pass_left_under_any_optimizer(pool):
    """As docs/bits/gradients-details.md says. If torch mends it, say so there."""
    for original in (True, False):
        for ours in (True, False):
            for found in pool.run(2, recover_worker.fsdp1, original, ours):
                assert found == {
                    "forward": True,
                    "loss": True,
                    "between blocks": False,
                    "inside of a block": False,
                }


def test_what_torch_cannot_bring_back_is_said(pool):
    for said in pool.run(2, recover_worker.first_static_pass):
        assert "static_graph=True" in said and "first backward pass" in said, said
    for said in pool.run(2, recover_worker.without_reset):
        assert "FSDPModule.reset_iter_state" in said and "2.13" in said, said


def test_a_run_that_raises_nothing_waits_for_nobody_more(pool):
    assert pool.run(2, recover_worker.collectives, "ddp") == [0, 0]
