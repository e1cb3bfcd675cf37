"""A sharded parameter whose gradient only some ranks have is stepped with zeros by the others,
under rules that reduce anything and among experts, which are batches of matrices: one small
collective, and none elsewhere."""

import pytest

from tests.gradients import presence_worker

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_one_rank_has_a_gradient_of_all_step_with_the_bits_of_one_process(pool, ranks):
    for found in pool.run(ranks, presence_worker.found, ranks):
        wrong = [name for name, same in found.items() if not same]
        assert not wrong, wrong
        assert len(found) >= 4


def test_one_collective_more_where_a_rule_reduces_or_experts_are_cut_and_none_elsewhere(pool):
    for counts in pool.run(2, presence_worker.collectives):
        for name in ("LAMB", "Adafactor", "tensor scales"):
            alone = counts[f"{name}, alone"]
            # and one before the first step, in which ranks compare names
            assert counts[name] == [n + 1 + (i == 0) for i, n in enumerate(alone)], (name, counts)
        free = {name: steps for name, steps in counts.items() if name.endswith("free")}
        experts = {name: steps for name, steps in counts.items() if name.endswith("experts")}
        assert len(experts) == 4 and all(s == [2, 1, 1, 1] for s in experts.values()), experts
        assert len(free) == 5 and not any(n for steps in free.values() for n in steps), free


def test_a_probe_asks_too(pool):
    assert pool.run(2, presence_worker.probed) == [[True, True], [True, True]]


def test_steps_in_the_backward_pass_agree_too(pool):
    for equal in pool.run(2, presence_worker.in_backward):
        assert len(equal) == 6 and all(equal.values()), equal


def test_a_probe_between_steps_changes_no_bit(pool):
    assert pool.run(2, presence_worker.probe_between) == [[True, True]] * 2


def test_convolutions_are_no_experts(pool):
    assert pool.run(2, presence_worker.convolutions) == [(0, True)] * 2
