"""Clipping, accumulation and steps in backward under DDP, FSDP2 and other meshes,
in real processes over gloo.
"""

import json
import subprocess
import sys

import pytest

from tests.gradients import gradients_worker
from tests.support.paths import importing_tests

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two(pool):
    """What each rank found: names and whether they hold."""
    return pool.run(2, gradients_worker.found, 2)


def check(found, *kinds):
    for rank, one in enumerate(found):
        broken = [value for value in one.values() if isinstance(value, str)]
        assert not broken, broken[0]
        names = [name for name in one if not kinds or name.startswith(kinds)]
        wrong = [name for name in names if one[name] is not True]
        assert not wrong, f"rank {rank}: {wrong}"
        assert len(names) >= len(kinds) > 0
    return names


def test_norms_and_clipped_gradients_are_the_same_bits_in_one_collective(two):
    check(two, "norms and gradients", "collectives")


def test_hooks_leave_the_gradients_of_one_micro_batch_alone(two):
    assert len(check(two, "one micro-batch")) == 12


def test_several_micro_batches_are_what_one_process_adds_up(two):
    check(two, "four micro-batches", "every rank has the same", "freed between", "unsynchronised")
    check(two, "float32 gradients of FSDP2", "static graph", "ranks that use different")


def test_an_average_has_the_bits_of_ddp_over_any_number_of_ranks(pool):
    assert pool.run(3, gradients_worker.average_as_ddp, 3) == [True] * 3


def test_steps_in_backward_leave_the_bits_of_ordinary_ones(two):
    check(two, "step in backward", "norm of the step before")


def test_an_infinity_on_one_rank(two):
    check(two, "a shard's infinity", "and no other", "its step", "the scale")


def test_wrong_places_are_refused(two):
    check(
        two,
        "before fully_shard",
        "inside DDP",
        "assign_hooks",
        "DDP outside",
        "no_sync",
        "FSDP1",
        "clip FSDP1",
    )


def test_peak_memory_of_fsdp2():
    """Weights, state and one layer's gradients, and 5 %, by every allocation that torch makes; no
    more than FSDP2 holds where gradients are dropped.
    """
    done = subprocess.run(
        [sys.executable, gradients_worker.__file__],
        capture_output=True,
        text=True,
        timeout=900,
        env=importing_tests(),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    m = json.loads(done.stdout)["memory"]
    print(", ".join(f"{name} {value / 1e6:.3f} MB" for name, value in m.items()))
    assert m["weights and state"] + m["in backward"] < 1.05 * (m["weights and state"] + m["layer"])
    assert m["in backward"] < m["dropped"] + m["layer"]
    assert m["behind"] > 8 * m["in backward"]


def test_two_dimensional_meshes(pool):
    names = check(pool.run(4, gradients_worker.found, 4), "")
    for part in (
        "norms and gradients, hsdp",
        "norms and gradients, mixed",
        "norm over strided shards",
        "four micro-batches, fsdp2",
        "step in backward, fsdp2",
    ):
        assert any(name.startswith(part) for name in names), part
