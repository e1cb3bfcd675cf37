"""DeepSpeed's ZeRO beside one process where ranks and micro-batches have different data: offload,
clipping, overflows, other rules and formats, other layouts of a checkpoint, pipelines, and the
bytes of state. The processes stay, so that DeepSpeed is imported once by each."""

import importlib.util

import pytest

from tests.support.ranks.pool import Pool
from tests.support.require import need

present = importlib.util.find_spec("deepspeed") is not None
need(
    "frameworks",
    present,
    "deepspeed is not installed: see docs/bits/frameworks-tested.md",
    module=True,
)

# Only ranks import them, and DeepSpeed.
EXACT, PIPELINE = "tests.frameworks.deepspeed_exact", "tests.frameworks.deepspeed_pipeline"
TRAINER = "tests.frameworks.deepspeed_trainer"
READERS = {"1": "_of_stages_1_and_2", "2": "_of_stages_1_and_2", "3": "_of_stage_3"}
# By number of ranks.
CASES = {
    2: [
        "1",
        "2",
        "3",
        "1 offload",
        "2 offload",
        "3 offload",
        "1 float32 sums",
        "1 float16",
        "2 float16",
        "3 float16",
        "2 float16 offload",
        "1 Adafactor",
        "3 Adafactor",
        "2 Lion",
        "1 LAMB",
        "3 LAMB",
        "2 CAME",
        "1 lpmm4",
        "3 factored8",
    ],
    3: ["2 offload", "3 LAMB", "1 Adafactor"],
    4: ["1 float32 sums", "3 float16", "2 CAME"],
}
# What saved 3 steps on 2 ranks, and what continues with it, by number of ranks.
LOADS = {
    1: [("1", "2"), ("2", "3"), ("3", "1"), ("1", "alone"), ("2", "alone"), ("3", "alone")],
    2: [
        ("1", "FSDP2"),
        ("2", "FSDP2"),
        ("3", "FSDP2"),
        ("FSDP2", "1"),
        ("FSDP2", "2"),
        ("FSDP2", "3"),
    ],
    3: [
        ("1", "1"),
        ("1", "3"),
        ("2", "2"),
        ("2", "1"),
        ("3", "3"),
        ("3", "2"),
        ("FSDP2", "1"),
        ("FSDP2", "3"),
    ],
    4: [("1", "3"), ("2", "2"), ("3", "1")],
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """Processes of their own, which import DeepSpeed: it changes what others would use. Its engines
    keep their process groups, whose threads cost less than to import it anew.
    """
    of_this_file = Pool(str(tmp_path_factory.mktemp("deepspeed")), most_threads=400)
    yield of_this_file
    of_this_file.close()


@pytest.fixture(scope="module")
def trained(pool):
    """Case -> what each rank found, on 2 ranks."""
    return pool.run(2, f"{EXACT}:train", CASES[2], pool.folder)


@pytest.mark.parametrize("ranks", CASES)
def test_six_steps_have_the_bits_of_one_process(pool, trained, ranks):
    several = (
        trained if ranks == 2 else pool.run(ranks, f"{EXACT}:train", CASES[ranks], pool.folder)
    )
    for found in several:
        assert list(found) == CASES[ranks]
        assert not [case for case, each in found.items() if each["same"] != [True, True]]


def test_every_record_of_zero_was_read(trained):
    for found in trained:
        for case, each in found.items():
            sums = case in ("1 float32 sums", "1 LAMB")
            assert each["reader"] == ("_of_bf16_optimizer" if sums else READERS[case[0]]), case
            assert each["devices"] == ["cpu"]


@pytest.mark.parametrize("ranks", LOADS)
def test_checkpoints_go_on_under_other_layouts(pool, trained, ranks):
    """State and weights when loaded and after 2 steps."""
    pool.run(2, f"{EXACT}:save_sharded", pool.folder)
    assert pool.run(ranks, f"{EXACT}:resume", LOADS[ranks], pool.folder) == [[]] * ranks


def test_what_cannot_be_served_is_refused_by_initialize(pool):
    for said in pool.run(2, f"{EXACT}:refused"):
        assert said.keys() == {"Kahan", "split8", "APOLLO", "Muon"}
        for name in ("Kahan", "split8"):
            assert "ZeRO keeps float32 weights" in said[name] and name.lower() in said[name]
        for name in ("APOLLO", "Muon"):
            assert "fully_shard" in said[name]


@pytest.mark.parametrize(
    "case, ranks, kind",
    [
        ("1", 2, "DeepSpeedZeroOptimizer"),
        ("1", 4, "DeepSpeedZeroOptimizer"),
        ("1 clipped", 2, "DeepSpeedZeroOptimizer"),
        ("1 float32 sums", 4, "BF16_Optimizer"),
        ("0", 2, "AdamW"),
    ],
)
def test_stages_of_a_pipeline_have_the_bits_of_one_process(pool, case, ranks, kind):
    several = pool.run(ranks, f"{PIPELINE}:train", case, 2, pool.folder)
    names = [name for found in several for name in found["names"]]
    assert len({*names}) == 8 and len(names) == 8 * ranks // 2
    for found in several:
        assert found["same"] and found["resumed"] and found["class"] == kind
    if case in ("1", "0"):
        for ranks, stages in ((1, None), (4, 4), (4, 2)) if case == "1" else ((1, None),):
            assert all(pool.run(ranks, f"{PIPELINE}:moved", case, 2, stages, pool.folder))


@pytest.mark.parametrize("stage", [1, 3])
def test_trainer_binds_before_it_loads(pool, stage, tmp_path):
    """It calls deepspeed.initialize itself, and no callback runs between that and the load."""
    for found in pool.run(2, f"{TRAINER}:train", stage, str(tmp_path)):
        assert found["same"]
        assert "torch.uint8" in found["dtypes"]


def test_offloaded_state_takes_a_quarter_of_deepspeed_cpu_adams(pool):
    for found in pool.run(2, f"{EXACT}:state_bytes"):
        assert 8.0 <= found["DeepSpeedCPUAdam"] < 8.001
        assert 2.0 < found["AdamW"] < 2.04  # codes, and the scales of blocks of 256
