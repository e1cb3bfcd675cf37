"""Pipeline parallelism, by recipes/pipeline.py: any schedule and number of stages gives the bits of
one process where micro-batches are added in the same order, clipped by the norm of all stages, and
a checkpoint continues with any other number of stages."""

import pytest

from tests.sharding import pipeline_worker
from tests.sharding.pipeline_worker import RULES

pytestmark = pytest.mark.long

# Name: schedule, ranks, stages, ranks that share a stage, rules.
PIPELINES = {
    "one process": ("GPipe", 1, 1, 1, [*RULES]),
    "1F1B": ("1F1B", 2, 2, 1, [*RULES]),
    "GPipe": ("GPipe", 4, 4, 1, ["8bit", "Adafactor"]),
    "Interleaved1F1B": ("Interleaved1F1B", 2, 4, 1, ["8bit", "4bit", "LAMB"]),
    "InterleavedZeroBubble": ("InterleavedZeroBubble", 2, 4, 1, ["8bit"]),
    "ZBVZeroBubble": ("ZBVZeroBubble", 2, 4, 1, ["8bit"]),
    "LoopedBFS": ("LoopedBFS", 2, 4, 1, ["8bit"]),
    "FSDP2 1F1B": ("1F1B", 4, 2, 2, ["8bit", "4bit", "Adafactor"]),
    "FSDP2 Interleaved1F1B": ("Interleaved1F1B", 4, 4, 2, ["8bit"]),
}
# It takes the last micro-batch first, and bfloat16 gradients are rounded at each sum.
OTHER_SUMS = {"LoopedBFS"}
# Whose checkpoint each continues from, beside that of one process. One whose tensors are not
# sharded holds those of one process in other files, so 8-bit AdamW alone continues from it.
FROM = {
    "1F1B": "GPipe",
    "GPipe": "1F1B",
    "Interleaved1F1B": "FSDP2 1F1B",
    "FSDP2 1F1B": "1F1B",
    "FSDP2 Interleaved1F1B": "GPipe",
}


def everything(pool, function, name, rules, folder):
    """What all ranks have together half way and in the end, by rule, and the norms."""
    schedule, ranks, stages, shards, _ = PIPELINES[name]
    several = pool.run(ranks, function, rules, schedule, stages, shards, folder)
    made = {}
    for rule in rules:
        parts = [found[rule] for found in several]
        assert all(norms == parts[0][2] for _, _, norms in parts), "ranks clip by different norms"
        half, end = ({k: v for part in parts for k, v in part[i].items()} for i in range(2))
        held = sum(len(part[0]) for part in parts)
        assert len(half) * shards == held, "stages have the same parameters"
        made[rule] = half, end, parts[0][2]
    return made


@pytest.fixture(scope="module")
def trained(pool):
    """What a pipeline has half way, which it saves, and in the end."""
    kept = {}

    def run(name):
        if name not in kept:
            folder = f"{pool.folder}/{name}"
            kept[name] = everything(pool, pipeline_worker.trained, name, PIPELINES[name][4], folder)
        return kept[name]

    return run


@pytest.mark.parametrize("name", [name for name in PIPELINES if name != "one process"])
def test_stages_have_the_bits_of_one_process(trained, name):
    alone, found = trained("one process"), trained(name)
    assert alone["8bit"][0] != alone["8bit"][1]
    for rule, each in found.items():
        assert (each == alone[rule]) == (name not in OTHER_SUMS), rule


@pytest.mark.parametrize("name", [name for name in PIPELINES if name != "one process"])
def test_stages_go_on_from_other_stages(pool, trained, name):
    rules = PIPELINES[name][4]
    for source in ("one process", *([FROM[name]] if name in FROM else [])):
        both = [rule for rule in rules if rule in PIPELINES[source][4]]
        if source != "one process" and PIPELINES[source][3] == 1:
            both = ["8bit"]
        want = trained(source)
        found = everything(pool, pipeline_worker.resumed, name, both, f"{pool.folder}/{source}")
        for rule in both:
            assert found[rule][0] == want[rule][0], f"loaded {rule} of {source}"
            assert (found[rule] == want[rule]) == (name not in OTHER_SUMS), f"{rule} from {source}"


def test_one_process_goes_on_from_stages(pool, trained):
    for name in PIPELINES:
        want = trained(name)
        folder = f"{pool.folder}/{name}"
        found = everything(pool, pipeline_worker.resumed, "one process", ["8bit"], folder)
        assert found["8bit"][0] == want["8bit"][0], name
        assert (found["8bit"] == want["8bit"]) == (name not in OTHER_SUMS), name


def test_the_norm_of_a_group_is_that_of_all_its_parameters(pool):
    assert pool.run(2, pipeline_worker.norms) == [[], []]


def test_a_group_of_ranks_that_shard_a_parameter_is_refused(pool):
    for said in pool.run(2, pipeline_worker.counted_twice):
        assert "group= has ranks 0 and 1, which shard one parameter" in said


def test_groups_of_another_stage_are_refused(pool):
    """torch.distributed.checkpoint keeps one rank's groups where stages save nested names."""
    said = pool.run(2, pipeline_worker.nested, pool.folder)
    for how in ("torch", "lowbit"):
        assert "loaded" in (said[0][how], said[1][how])  # the rank whose groups were kept
        other = said[said[0][how] == "loaded"][how]
        assert "param_groups" in other and "stages of a pipeline" in other, other
        for rank in said:  # Writer says it at the save, on every rank
            assert (
                "ranks 0 and 1 have other parameters in optim.param_groups"
                in rank[f"{how}, Writer"]
            )
