"""`state_memory`: state outside of a GPU's own memory. Here without one: the option, what goes
where, and that checkpoints know nothing of it. The CPU stands for a GPU where state is placed; on a
GPU tests/cuda/test_cuda.py steps such state, and tests/cpp/cuda/test_cuda_memory.cpp asks for its
memory."""

import copy
import inspect
import io
import math
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.utils._python_dispatch import TorchDispatchMode

import lowbit
from lowbit import ops
from lowbit.state import memory
from tests.state import state_memory_worker
from tests.state.state_memory_worker import OUTSIDE, Outside, digest, net
from tests.support.configured import OPTIMIZERS, model, train
from tests.support.groups import params_for

pytestmark = pytest.mark.slow


@pytest.fixture
def outside(monkeypatch):
    """The CPU has memory of its own now, and another beside it."""
    made = Outside()
    monkeypatch.setattr(memory, "_DEVICES", ("cpu",))
    monkeypatch.setattr(ops, "allocate", made.allocate)
    return made


def trained(steps=2, dtype=torch.bfloat16, make=lowbit.AdamW, **options):
    of = net(dtype)
    opt = make(params_for(make, of), lr=1e-2, **options)
    train(of, opt, steps)
    return of, opt


def content(of, opt):
    """All bits of weights and state."""
    made = {name: digest(p.reshape(-1)) for name, p in of.named_parameters()}
    for name, p in of.named_parameters():
        made |= {f"{name} {key}": digest(t.reshape(-1)) for key, t in opt.state[p].items()}
    return made


# The option


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_every_optimizer_takes_it_and_refuses_other_words(cls):
    known = inspect.signature(cls).parameters
    assert "kwargs" in known or known["state_memory"].kind == inspect.Parameter.KEYWORD_ONLY
    assert "kwargs" in known or known["state_memory"].default == "device"
    for kind in memory.MEMORIES:
        assert cls(params_for(cls, model()), state_memory=kind).state_memory == kind
    assert cls(params_for(cls, model())).state_memory == "device"
    for other in ("cpu", "Pinned", True, None):
        with pytest.raises(
            ValueError, match=r"state_memory should be 'device', 'pinned' or 'managed' but is: "
        ):
            cls(params_for(cls, model()), state_memory=other)


@pytest.mark.parametrize("kind", OUTSIDE)
def test_on_the_cpu_nothing_changes(kind, monkeypatch):
    """So that a recipe for a GPU runs anywhere: state is in memory of the host already."""
    monkeypatch.setattr(ops, "allocate", None)
    assert content(*trained(state_memory=kind)) == content(*trained())


def test_it_is_refused_in_a_group():
    of = net()
    message = "state_memory is for a whole optimizer, not for a group of it"
    with pytest.raises(ValueError, match=message):
        lowbit.AdamW([{"params": of[0].parameters(), "state_memory": "pinned"}])
    with pytest.raises(ValueError, match=message):
        lowbit.AdamW(lowbit.param_groups(of, state_memory="pinned"))
    opt = lowbit.AdamW(of[0].parameters())
    with pytest.raises(ValueError, match=message):
        opt.add_param_group({"params": of[2].parameters(), "state_memory": "device"})
    assert len(opt.param_groups) == 1


def test_copies_and_pickles_keep_it():
    _, opt = trained(state_memory="managed")
    assert copy.deepcopy(opt).state_memory == "managed"
    again = pickle.loads(pickle.dumps(opt))
    assert again.state_memory == "managed" and "state_memory" not in again.param_groups[0]
    old = opt.__getstate__()
    del old["state_memory"]  # pickled before there was such an option
    fresh = lowbit.AdamW.__new__(lowbit.AdamW)
    fresh.__setstate__(old)
    assert fresh.state_memory == "device"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: tests/cuda/test_cuda.py")
def test_without_cuda_the_operator_says_so():
    with pytest.raises(RuntimeError, match="CUDA"):
        ops.allocate([64, 64], torch.uint8, torch.device("cuda", 0), "pinned")
    with pytest.raises(RuntimeError, match="'pinned' or 'managed', not 'device'"):
        ops.allocate([64, 64], torch.uint8, torch.device("cuda", 0), "device")


# What goes where


@pytest.mark.parametrize("kind", OUTSIDE)
@pytest.mark.parametrize(
    "options, large",
    [
        ({}, ["exp_avg_dynamic8", "exp_avg_sq_dynamic8_unsigned"]),
        ({"state_format": "4bit"}, ["exp_avg_dynamic4", "exp_avg_sq_power1_4_unsigned"]),
        ({"state_format": "float32"}, ["exp_avg", "exp_avg_sq"]),
        ({"state_format": "lpmm4"}, ["exp_avg_dynamic4", "exp_avg_sq_power1_4_unsigned"]),
        ({"state_format": "factored8"}, ["exp_avg_dynamic8"]),
        (
            {"param_format": "bfloat16_kahan"},
            ["exp_avg_dynamic8", "exp_avg_sq_dynamic8_unsigned", "param_bfloat16_kahan"],
        ),
        (
            {"param_format": "bfloat16_split8"},
            ["exp_avg_dynamic8", "exp_avg_sq_dynamic8_unsigned", "param_bfloat16_split8"],
        ),
    ],
    ids=str,
)
def test_what_lies_outside(outside, kind, options, large):
    of, opt = trained(state_memory=kind, **options)
    keys = {
        key
        for values in opt.state.values()
        for key, t in values.items()
        if outside.kind_of(t) == kind
    }
    assert keys == set(large)
    outside.check(opt, kind)
    assert content(of, opt) == content(*trained(**options))


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_every_optimizer_steps_the_same_bits(outside, cls):
    options = {"momentum": 0.9} if "momentum" in inspect.signature(cls).parameters else {}
    here, there = (trained(make=cls, state_memory=kind, **options) for kind in ("device", "pinned"))
    assert content(*here) == content(*there)
    kept = [t for values in there[1].state.values() for t in values.values()]
    some = any(outside.kind_of(t) == "pinned" for t in kept)
    large = any(
        key in lay.large and math.prod(entry.local) * entry.dtype.itemsize >= 1 << 16
        for _, _, lay in there[1].laid_out()
        for entry in lay.entries()
        for key in [entry.key]
    )
    assert some == large


def test_state_that_is_made_later(outside):
    """For new groups, for parameters that had none,
    and where it is decided again whether codes are kept.
    """
    of = net()
    opt = lowbit.AdamW(of[0].named_parameters(), state_memory="pinned")
    opt.add_param_group({"params": list(of[2].named_parameters("2"))})
    outside.check(opt, "pinned")
    opt.override_quantize_enable(of[2], "weight", False)
    outside.check(opt, "pinned")
    assert outside.kind_of(opt.state[of[2].weight]["exp_avg"]) == "pinned"
    opt.state.clear()
    opt.init_state()
    outside.check(opt, "pinned")


class Seen(TorchDispatchMode):
    """The operators that are called."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.lowbit.allocate.default:
            self.calls.append(args)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", memory.MEMORIES)
def test_parameters_that_say_they_are_on_a_gpu(kind):
    """torch's fake tensors: which operator is called, with what,
    and that its tensors are the GPU's to all that sees them.
    """
    with FakeTensorMode(), Seen() as seen:
        p = nn.Parameter(torch.empty(512, 1000, dtype=torch.bfloat16, device="cuda:1"))
        small = nn.Parameter(torch.empty(100, 100, dtype=torch.bfloat16, device="cuda:1"))
        # codes would take torch with CUDA: the code of zero is encoded on the device
        opt = lowbit.AdamW([("p", p), ("small", small)], state_format="bfloat16", state_memory=kind)
    expected = [] if kind == "device" else [([512, 1000], "bfloat16", 1, kind)] * 2
    assert [(list(size), *rest) for size, *rest in seen.calls] == expected
    for q in (p, small):
        for key, t in opt.state[q].items():
            assert t.device == torch.device("cpu" if key in ("stream", "shape") else "cuda:1"), key


# Checkpoints


def saved(of, opt):
    file = io.BytesIO()
    torch.save({"model": of.state_dict(), "optimizer": opt.state_dict()}, file)
    return file.getvalue()


def test_checkpoints_are_the_same_bytes(outside):
    assert saved(*trained(state_memory="pinned")) == saved(*trained())


def test_loading_goes_on_from_one_to_the_other(outside):
    """Either way round, from a state dict, and from a file into existing state."""
    goal = content(*trained(4))
    for before, after in (("device", "pinned"), ("pinned", "device"), ("managed", "pinned")):
        of, opt = trained(2, state_memory=before)
        loaded = torch.load(io.BytesIO(saved(of, opt)), weights_only=True)
        other = net()
        other.load_state_dict(loaded["model"])
        fresh = lowbit.AdamW(other.named_parameters(), lr=1e-2, state_memory=after)
        fresh.load_state_dict(loaded["optimizer"])
        if after != "device":
            outside.check(fresh, after)
        assert fresh.state_memory == after
        for step in (2, 3):
            generator = torch.Generator().manual_seed(step)
            for p in other.parameters():
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            fresh.step()
        assert content(other, fresh) == goal


def test_float_moments_of_torch_are_encoded_there(outside):
    of, plain = net(), net()
    torchs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    train(plain, torchs)
    opt = lowbit.AdamW(of.parameters(), state_memory="managed")
    opt.load_state_dict(torchs.state_dict())
    outside.check(opt, "managed")
    ordinary = lowbit.AdamW(of.parameters())
    ordinary.load_state_dict(torchs.state_dict())
    assert content(of, opt) == content(of, ordinary)


def tensors(opt):
    return [t for values in opt.state.values() for t in values.values() if t.ndim > 1]


@pytest.mark.usefixtures("ckpt")
def test_files_are_read_into_the_state_that_is_there(outside, tmp_path):
    of, opt = trained()
    torch.save(opt.state_dict(), tmp_path / "opt.pt")
    fresh = lowbit.AdamW(of.named_parameters(), lr=1e-2, state_memory="pinned")
    before, taken = tensors(fresh), len(outside.taken)
    lowbit.load_optimizer(fresh, tmp_path / "opt.pt")
    assert len(outside.taken) == taken, "nothing is taken beside what is there"
    assert all(a is b for a, b in zip(before, tensors(fresh), strict=True))
    outside.check(fresh, "pinned")
    assert content(of, fresh) == content(of, opt)


def test_dcp_saves_it_and_loads_in_place(outside, tmp_path):
    of, opt = trained(state_memory="pinned")
    dcp.save({"optim": get_optimizer_state_dict(of, opt)}, checkpoint_id=tmp_path, no_dist=True)
    fresh = lowbit.AdamW(of.named_parameters(), state_memory="managed")
    before, taken = tensors(fresh), len(outside.taken)
    state = {"optim": get_optimizer_state_dict(of, fresh)}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(of, fresh, state["optim"])
    assert len(outside.taken) == taken, "nothing is taken beside what is there"
    assert all(a is b for a, b in zip(before, tensors(fresh), strict=True))
    assert fresh.param_groups[0]["lr"] == 1e-2 and fresh.state_memory == "managed"
    outside.check(fresh, "managed")
    assert content(of, fresh) == content(of, opt)


def test_shards_of_it_are_saved_and_loaded_on_other_numbers_of_ranks(pool, tmp_path):
    """FSDP2: two ranks with pinned state, then three with ordinary, then two with managed; weights
    and state are those of one process.
    """
    for ranks, kind, begin, end in ((2, "pinned", 0, 2), (3, "device", 2, 4), (2, "managed", 4, 6)):
        got = pool.run(ranks, state_memory_worker.go_on, str(tmp_path), kind, begin, end)
        assert got[0] == content(*trained(end)), (ranks, kind)


def test_a_dtype_that_no_format_has():
    with pytest.raises(RuntimeError, match="no tensors of dtype 'float64'"):
        torch.ops.lowbit.allocate([4], "float64", 0, "pinned")
