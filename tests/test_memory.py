"""What a step, a load and a save allocate: nothing that grows with the model, by torch's allocator and by the process's own peak."""

import ctypes
import gc
import pathlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from memory import held_bytes, peak_bytes
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import lowbit
import lowbit.lowrank

# Per tensor: rows of plans, norms. What rules over elements may allocate, whatever the tensors' sizes.
SMALL = 4096


def named(rows, cols, count, dtype=torch.bfloat16):
    """Parameters with gradients."""
    made = []
    for i in range(count):
        p = nn.Parameter(torch.full((rows, cols), 0.01, dtype=dtype))
        p.grad = torch.full_like(p, 1e-3)
        made.append((f"layer{i}.weight", p))
    return made


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
    "LAMB": lambda p: lowbit.LAMB(p),
    "LARS": lambda p: lowbit.LARS(p),
}
MEASURED = {
    "lpmm4": elementwise(state_format="lpmm4"),
    "factored8": elementwise(state_format="factored8"),
    "Adafactor": lambda p: lowbit.Adafactor(p),
    "CAME": lambda p: lowbit.CAME(p),
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
    """An exact sum is 18 integers of 8 bytes; a row or a column has one, and a mean or a maximum beside it."""
    rows, cols, count = 256, 1024, 4
    assert step_peak(MEASURED[name], rows, cols, count) <= count * (rows + cols) * 160 + SMALL * count  # fmt: skip


@pytest.mark.parametrize("name", LOWRANK)
def test_a_low_rank_step_holds_one_bucket(name, monkeypatch):
    """However many matrices there are: what a bucket made is free before the next begins."""
    monkeypatch.setattr(lowbit.lowrank, "TOGETHER", 2 * 256 * 512)
    few, many = (step_peak(LOWRANK[name], 256, 512, count) for count in (4, 24))
    assert few > 16 * 4  # there is something to free
    assert many <= few + 20 * 64


def test_the_measure_sees_what_grows():
    """torch's own steps of separate operators have temporaries."""
    small, large = (
        step_peak(lambda p: torch.optim.AdamW(p, foreach=True), n, n, 4) for n in (64, 512)
    )
    assert large > 8 * small


def rss(field):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


@pytest.fixture(scope="module", autouse=True)
def mapped():
    """Large blocks are mapped, and unmapped when they are freed: glibc stops doing that in a process that has freed some, such as for tests before these."""
    mmap_threshold = -3  # M_MMAP_THRESHOLD of malloc.h
    ctypes.CDLL(None).mallopt(mmap_threshold, 1 << 17)


def peak_rss(run):
    """Bytes that the process holds at most during `run()`, above what it held before: what C++ and mapped files take too."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or what was freed before is taken again, unseen
    before = rss("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    run()
    return rss("VmHWM") - before


class Net(nn.Module):
    """32 MiB of 8-bit state in 16 matrices."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.layers = nn.ParameterList(p for _, p in named(1024, 1024, 16, dtype))
        for p in self.layers:
            p.grad = torch.full_like(p, 1e-3)


def fresh():
    """A net and its optimizer, whose state lies in memory that was written: pages of zeros exist only when they are."""
    net = Net()
    opt = lowbit.AdamW(net.named_parameters())
    for state in opt.state.values():
        for tensor in state.values():
            tensor.copy_(tensor.clone())
    return net, opt


@pytest.fixture(scope="module", autouse=True)
def freed_memory_goes_back():
    """Every large tensor is mapped by itself: glibc otherwise keeps what is freed once it has seen some, and the peak shows that."""
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with the state of one optimizer, as torch.save and as torch.distributed.checkpoint write it, and its bytes."""
    folder = tmp_path_factory.mktemp("saved")
    net = Net()
    opt = lowbit.AdamW(net.named_parameters())
    opt.step()
    size = held_bytes(*(t for state in opt.state.values() for t in state.values()))
    peaks = {
        "torch.save": peak_rss(lambda: torch.save(opt.state_dict(), folder / "state.pt")),
        "dcp.save": peak_rss(
            lambda: dcp.save(
                {"optim": get_optimizer_state_dict(net, opt)},
                checkpoint_id=folder / "dcp",
                no_dist=True,
            )
        ),
    }
    return folder, size, peaks


@pytest.mark.parametrize("verb", ["torch.save", "dcp.save"])
def test_saving_streams(saved, verb):
    _, size, peaks = saved
    assert peaks[verb] < 0.2 * size, f"{peaks[verb]} bytes above a state of {size}"


@pytest.mark.parametrize(
    "source, wide", [("state.pt", False), ("dcp", False), ("wide.pt", True), ("dcp.load", False)]
)
def test_loading_holds_one_copy(saved, source, wide, tmp_path):
    """The optimizer's own state, which exists before, and less than a fifth of it beside."""
    folder, size, _ = saved
    if wide:  # float32 into 8 bits: four times the bytes are read
        net = Net(torch.float32)
        torch_opt = torch.optim.AdamW(net.named_parameters())
        torch_opt.step()
        folder = tmp_path
        torch.save(torch_opt.state_dict(), folder / source)
        del net, torch_opt
    net, opt = fresh()

    def load():
        if source == "dcp.load":
            state = get_optimizer_state_dict(net, opt)
            dcp.load({"optim": state}, checkpoint_id=folder / "dcp", no_dist=True)
            set_optimizer_state_dict(net, opt, state)
        else:
            lowbit.load_optimizer(opt, folder / source)

    peak = peak_rss(load)
    assert int(float(opt.state[net.layers[0]]["step"])) == 1
    assert peak < 0.2 * size, f"{peak} bytes above a state of {size}"


def test_load_state_dict_holds_the_dict_and_no_third_copy(saved):
    """torch's own way: the dict is whole in memory beside the optimizer's state until it is taken over."""
    folder, size, _ = saved
    _, opt = fresh()
    peak = peak_rss(lambda: opt.load_state_dict(torch.load(folder / "state.pt", weights_only=True)))
    assert peak < 1.2 * size, f"{peak} bytes above a state of {size}"


def test_state_dicts_can_be_swapped():
    """What is here is dropped and not written over: a state dict that another optimizer handed out keeps its numbers."""
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
