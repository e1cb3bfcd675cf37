"""FSDP1: state dicts, what is refused, and what goes by the original parameters. The table of
test_wrappers.py has its steps and checkpoints.
"""

import pytest

from tests.sharding import training_worker
from tests.sharding.flat import flat_worker

pytestmark = pytest.mark.product

WRAPPERS = {"FSDP1 orig": 4, "FSDP1 flat": 3}  # ranks
BOTH = pytest.mark.parametrize("wrapper", WRAPPERS)


@BOTH
@pytest.mark.parametrize("kind", ["full", "sharded", "own"])
def test_the_float32_view_round_trips(pool, wrapper, kind):
    """Codes and scales come back from the moments that torch's own functions gather, and training
    continues with the same bytes.

    Not where torch gives both moments one buffer, which it does with its own AdamW too.
    """
    for found in pool.run(WRAPPERS[wrapper], flat_worker.float32_view, wrapper, "8bit", kind):
        if found["excused"]:
            assert kind == "full" and wrapper == "FSDP1 orig"
            assert all(pool.run(WRAPPERS[wrapper], flat_worker.torch_adamw_aliases))
            continue
        assert found["loaded"] == found["continued"] == []


@BOTH
@pytest.mark.usefixtures("ckpt")
def test_checkpoints_are_read_directly(pool, wrapper):
    folder, names = pool.folder, ["8bit", "4bit", "Adafactor"]
    pool.run(1, flat_worker.save_alone, folder, names)
    for found in pool.run(WRAPPERS[wrapper], flat_worker.read_directly, wrapper, folder, names):
        assert found == []


@BOTH
def test_a_step_that_is_called_off_counts_nowhere(pool, wrapper):
    for found in pool.run(WRAPPERS[wrapper], flat_worker.infinite_gradients, wrapper):
        assert found == []


def test_the_float32_view_is_a_state_dict_of_torch_adamw(pool):
    assert pool.run(2, flat_worker.torch_adamw_takes_it)[0]


@BOTH
def test_a_momentum_that_comes_between_steps(pool, wrapper):
    for found in pool.run(WRAPPERS[wrapper], flat_worker.momentum_later, wrapper):
        assert found == []


@pytest.mark.parametrize("orig", [True, False])
def test_modes_give_up_what_an_evaluation_gathered(pool, orig):
    for alone, found in pool.run(2, flat_worker.modes_after_an_evaluation, orig):
        assert found == pytest.approx(alone, rel=1e-4)


def test_unbound_flat_shards_are_refused_with_one_message(pool):
    for messages in pool.run(2, flat_worker.unbound):
        for message in messages:
            assert "flat shard of FSDP1" in message and "lowbit.fsdp1.bind(model, opt)" in message


def test_what_bind_refuses(pool):
    for found in pool.run(2, flat_worker.bind_refuses):
        assert "are not in this model: build the optimizer" in found["another model"]
        assert (
            "cannot express 'exp_avg_sq_row'" in found["factored"]
            or "variance_row" in found["factored"]
        )
        for rule in ("APOLLO", "Fira"):
            assert (
                "'weight' lies in flat shards, and rank 8 of it needs whole rows; use fully_shard"
                in found[rule]
            )
        assert found["APOLLO without"] == found["APOLLO, wide"] == "nothing was refused"


@BOTH
def test_cuts_inside_a_byte_of_codes_are_in_the_table(pool, wrapper):
    """What is refused where columns are cut is right here: a row's holders have room for all of its
    codes.
    """
    assert any(pool.run(WRAPPERS[wrapper], flat_worker.cuts_inside_bytes, wrapper))


@pytest.mark.parametrize("name", ["8bit", "rank-1", "Adafactor", "CAME"])
def test_parameters_that_lie_on_one_rank_each_are_theirs_alone(pool, name):
    """Nothing is summed over ranks that hold other parameters."""
    assert pool.run(2, flat_worker.one_on_each, name) == [[], []]


# Clipping, in real training


@pytest.mark.parametrize("how", ["in place", "in the step"])
@pytest.mark.parametrize(
    "wrapper, ranks",
    [
        ("FSDP1 orig", 4),
        ("FSDP1 flat", 4),
        ("FSDP1 flat, mixed precision", 2),
        ("FSDP1 orig, no shard", 2),
        ("FSDP1 orig, hybrid", 4),
        ("FSDP1 flat, hybrid", 4),
        ("FSDP2", 4),
    ],
)
def test_clipping(pool, wrapper, ranks, how):
    """Norms, weights and state have the bits of one process."""
    assert pool.run(ranks, training_worker.real, wrapper, how) == [[]] * ranks


# What goes by the original parameters


@BOTH
@pytest.mark.parametrize("name", ["8bit", "LAMB, split16"])
def test_float32_weights(pool, wrapper, name):
    ranks = WRAPPERS[wrapper]
    assert pool.run(ranks, flat_worker.float32_weights, wrapper, name) == [[]] * ranks


@pytest.mark.parametrize("orig", [True, False])
def test_float32_weights_after_an_evaluation(pool, orig):
    """Its root keeps what it gathered."""
    assert pool.run(2, flat_worker.stored_after_an_evaluation, orig) == [0, 0]


def test_to_master_free_is_refused(pool):
    for message in pool.run(2, flat_worker.no_master_free, "FSDP1 orig"):
        assert "FSDP1" in message and "lowbit.set_fp32_model_state_dict" in message


@BOTH
@pytest.mark.parametrize("name", ["8bit", "4bit", "LAMB, split16", "Adafactor"])
def test_the_probe_counts_what_one_process_counts(pool, wrapper, name):
    (want,) = pool.run(1, flat_worker.probed, "single", name)
    several = pool.run(WRAPPERS[wrapper], flat_worker.probed, wrapper, name)
    for key, numbers in want.items():
        for what, number in numbers.items():
            parts = [found[key][what] for found in several]
            together = max(parts) if "max" in what else sum(parts)
            assert together == number, (key, what, parts, number)
