"""What a step, a load and a save allocate: nothing that grows with the model, by torch's allocator
and by the process's own peak.
"""

import json
import pathlib
import subprocess
import sys

import pytest
import torch

import lowbit
import lowbit.step.lowrank
from tests.support.groups import begin
from tests.support.memory import named, peak_bytes
from tests.support.paths import importing_tests

pytestmark = pytest.mark.long

# Per tensor: rows of plans, norms. What rules over elements may allocate,
# whatever the tensors' sizes.
SMALL = 4096


def step_peak(make, rows, cols, count):
    """Bytes that a later step allocates at most."""
    opt = make(named(rows, cols, count))
    for _ in range(2):
        opt.step()

    def step():
        torch.empty(16)  # so that there is something to record
        opt.step()

    return peak_bytes(step)


def elementwise(**options):
    return lambda params: lowbit.AdamW(params, **options)


ELEMENTWISE = {
    "8bit": elementwise(),
    "4bit": elementwise(state_format="4bit"),
    "fp8": elementwise(state_format="fp8"),
    "log8": elementwise(state_format="log8"),
    "float32": elementwise(state_format="float32"),
    "kahan": elementwise(param_format="bfloat16_kahan"),
    "split": elementwise(param_format="bfloat16_split8"),
    "Lion": lambda p: lowbit.Lion(p),
    "SGD": lambda p: lowbit.SGD(p, momentum=0.9),
    "RMSprop": lambda p: lowbit.RMSprop(p),
    "Adagrad": lambda p: lowbit.Adagrad(p),
    "AdEMAMix": lambda p: lowbit.AdEMAMix(p),
    "Schedule-Free": lambda p: begin(lowbit.ScheduleFreeAdamW(p)),
    "LAMB": lambda p: lowbit.LAMB(p),
    "LARS": lambda p: lowbit.LARS(p),
}
MEASURED = {
    "lpmm4": elementwise(state_format="lpmm4"),
    "factored8": elementwise(state_format="factored8"),
    "Adafactor": lambda p: lowbit.Adafactor(p),
    "CAME": lambda p: lowbit.CAME(p),
    "cautious": elementwise(cautious=True),
}
LOWRANK = {
    "APOLLO": lambda p: lowbit.APOLLO(p, rank=16),
    "APOLLOMini": lambda p: lowbit.APOLLOMini(p),
    "Fira": lambda p: lowbit.Fira(p, rank=16),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_step_allocates_nothing_that_grows(name):
    small, large = (step_peak(ELEMENTWISE[name], n, n, 4) for n in (64, 512))
    assert large == small <= SMALL


@pytest.mark.parametrize("name", MEASURED)
def test_a_step_that_measures_holds_numbers_of_rows_and_columns(name):
    """An exact sum is 18 integers of 8 bytes; a row or a column has one,
    and a mean or a maximum beside it.
    """
    rows, cols, count = 256, 1024, 4
    assert (
        step_peak(MEASURED[name], rows, cols, count) <= count * (rows + cols) * 160 + SMALL * count
    )


@pytest.mark.parametrize("name", LOWRANK)
def test_a_low_rank_step_holds_one_bucket(name, monkeypatch):
    """However many matrices there are: what a bucket made is free before the next begins."""
    monkeypatch.setattr(lowbit.step.buckets, "BUCKET_NUMEL", 2 * 256 * 512)
    few, many = (step_peak(LOWRANK[name], 256, 512, count) for count in (4, 24))
    assert few > 16 * 4  # there is something to free
    assert many <= few + 20 * 64


def test_the_measure_sees_what_grows():
    """torch's own steps of separate operators have temporaries."""
    small, large = (
        step_peak(lambda p: torch.optim.AdamW(p, foreach=True), n, n, 4) for n in (64, 512)
    )
    assert large > 8 * small


def measured(verb, folder):
    """What memory_worker.py read in a process of its own: the bytes of the state, and the most that
    `verb` held above what was there before it.
    """
    worker = pathlib.Path(__file__).with_name("memory_worker.py")
    done = subprocess.run(
        [sys.executable, worker, verb, folder],
        capture_output=True,
        text=True,
        check=False,
        env=importing_tests(),
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with the state of one optimizer, as torch.save and as torch.distributed.checkpoint
    write it, and what writing took.
    """
    folder = tmp_path_factory.mktemp("saved")
    return folder, {verb: measured(verb, folder) for verb in ("torch.save", "dcp.save")}


@pytest.mark.parametrize("verb", ["torch.save", "dcp.save"])
def test_saving_streams(saved, verb):
    _, saves = saved
    size, peak = saves[verb]
    assert peak < 0.2 * size, f"{peak} bytes above a state of {size}"


@pytest.mark.usefixtures("ckpt")
@pytest.mark.parametrize("verb", ["state.pt", "dcp", "wide.pt", "dcp.load"])
def test_loading_holds_one_copy(saved, verb):
    """The optimizer's own state, which exists before, and less than a fifth of it beside."""
    size, peak = measured(verb, saved[0])
    assert peak < 0.2 * size, f"{peak} bytes above a state of {size}"


def test_load_state_dict_holds_the_dict_and_no_third_copy(saved):
    """torch's own way: the dict is whole in memory beside the optimizer's state until it is taken
    over.
    """
    size, peak = measured("load_state_dict", saved[0])
    assert 0.9 * size < peak < 1.2 * size, f"{peak} bytes above a state of {size}"


def test_state_dicts_can_be_swapped():
    """The optimizer's own state is dropped and not overwritten: a state dict that another optimizer
    handed out keeps its numbers.
    """
    made = []
    for steps in (1, 3):
        opt = lowbit.AdamW(named(64, 128, 3))
        for _ in range(steps):
            opt.step()
        made.append(opt)
    given = [opt.state_dict() for opt in made]
    kept = [
        {key: {k: t.clone() for k, t in state.items()} for key, state in d["state"].items()}
        for d in given
    ]
    made[0].load_state_dict(given[1])
    made[1].load_state_dict(given[0])
    for opt, expected in zip(made, reversed(kept), strict=True):
        for key, state in opt.state_dict()["state"].items():
            assert all(torch.equal(t, expected[key][k]) for k, t in state.items())
