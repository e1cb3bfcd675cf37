"""Operators that steps call leave nothing behind: up to torch 2.13 the stable ABI never frees a
string argument.
"""

import ctypes
import gc
import itertools
import re

import pytest
import torch
from torch import nn

import lowbit
from lowbit import ops

pytestmark = pytest.mark.slow

ONCE = {"allocate", "set_isa"}  # called when state is created or by hand, never in a step
CALLS = 100


def test_only_operators_outside_of_steps_take_text():
    schemas = {
        s.name: str(s) for s in torch._C._jit_get_all_schemas() if s.name.startswith("lowbit::")
    }
    assert {"lowbit::step", "lowbit::accumulate", "lowbit::quantize"} <= set(schemas)
    takes = {name for name, s in schemas.items() if re.search(r"\bstr\b", s.split("->")[0])}
    assert takes == {f"lowbit::{name}" for name in ONCE}


class MallInfo(ctypes.Structure):
    _fields_ = [  # noqa: RUF012
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def live_bytes():
    """What malloc has given out and not got back."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("mallinfo2 came with glibc 2.33")
    libc.mallinfo2.restype = MallInfo
    gc.collect()
    info = libc.mallinfo2()
    return info.uordblks + info.hblkhd


def growth(call, rounds=3):
    """Bytes that stay behind for each call; the least of several rounds,
    since other threads and caches come and go.
    """
    for _ in range(CALLS):
        call()
    seen = [live_bytes()]
    for _ in range(rounds):
        for _ in range(CALLS):
            call()
        seen.append(live_bytes())
    return min(after - before for before, after in itertools.pairwise(seen)) / CALLS


def codes():
    x = torch.randn(4, 64)
    packed, scales = ops.quantize(x, "dynamic8_unsigned", 64)
    return lambda: (
        ops.quantize(x, "dynamic8_unsigned", 64),
        ops.dequantize(packed, scales, "dynamic8_unsigned", 64, 64),
    )


def stored():
    x = torch.randn(64)
    p, extra = ops.split(x, "bfloat16_split8")
    return lambda: (ops.split(x, "bfloat16_split8"), ops.join(p, extra, "bfloat16_split8"))


def accumulated():
    held, grad = torch.zeros(8, dtype=torch.bfloat16), torch.ones(8)
    plan = torch.tensor([[1, 8, 8, 0, 0, 0]])
    return lambda: ops.accumulate([held], [], [grad], plan, "bfloat16_stochastic")


def model():
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).bfloat16()


def micro_batches():
    net, x = model(), torch.randn(4, 32).bfloat16()
    held = lowbit.accumulate(net)

    def call():
        for last in (False, True):
            with held.micro(last=last):
                net(x).float().square().mean().backward()
        net.zero_grad()

    return call


def in_backward():
    net, x = model(), torch.randn(4, 32).bfloat16()
    opt = lowbit.AdamW(net.named_parameters(), min_numel=64)
    lowbit.step_in_backward(net, opt)

    def call():
        net(x).float().square().mean().backward()
        opt.step()

    return call


def changing_sets():
    """Which no prepared step serves, with rules that ask for a workspace."""
    net = model()
    opt = lowbit.Adafactor(net.named_parameters(), beta1=0.9, min_numel=64)
    turn = [0]

    def call():
        turn[0] += 1
        for i, p in enumerate(net.parameters()):
            p.grad = None if i == turn[0] % 2 else torch.ones_like(p)
        opt.step()

    return call


def low_rank():
    net = nn.Linear(32, 32, bias=False)
    opt = lowbit.APOLLO(net.named_parameters(), rank=4, min_numel=64)

    def call():
        net.weight.grad = torch.ones_like(net.weight)
        opt.step()

    return call


@pytest.mark.parametrize(
    "make", [codes, stored, accumulated, micro_batches, in_backward, changing_sets, low_rank]
)
def test_nothing_stays_behind_a_call(make):
    torch.manual_seed(0)
    assert growth(make()) < 12
