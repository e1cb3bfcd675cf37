"""Steps beside the backward pass on a GPU: the bits of steps after it, a stream of their own, and a
bound on what waits.

With tests/cuda/test_cuda.py: `LOWBIT_REQUIRE=cuda python -m pytest tests/cuda/test_cuda*.py`. The
bodies also run on the CPU, in tests/gradients/test_beside.py.
"""

import pytest
import torch

import lowbit
from lowbit.optim.one_step import Step
from tests.cuda import beside
from tests.cuda.waiting import CYCLES, not_waited_for
from tests.support.require import gpu, need

pytestmark = pytest.mark.slow

DEVICE = gpu()


@pytest.mark.parametrize("memory", ["device", "pinned"])
@pytest.mark.parametrize("name", beside.MAKERS)
def test_steps_beside_have_the_bits_of_steps_after(name, memory):
    beside.assert_bits(DEVICE, name, memory)


def test_steps_beside_of_parameters_in_the_hosts_memory():
    beside.assert_bits_under_fsdp2(DEVICE)


def test_steps_beside_run_in_a_lane_of_their_own(monkeypatch):
    beside.assert_lanes(DEVICE, monkeypatch)


def test_no_more_memory_waits_for_steps_beside_than_may(monkeypatch):
    beside.assert_memory(DEVICE, monkeypatch)


def test_the_backward_pass_does_not_wait_for_a_step_and_the_end_of_the_step_does(monkeypatch):
    """Of streams: the host waits for neither."""
    need("cuda", torch.cuda.is_available(), "streams are a GPU's")
    launch, slow = Step.launch, [False]

    def sleeping(step):
        if slow[0]:
            slow[0] = False
            torch.cuda._sleep(CYCLES // 2)
        launch(step)

    monkeypatch.setattr(Step, "launch", sleeping)
    net = beside.small(DEVICE)
    opt = lowbit.AdamW(net.named_parameters(), lr=1e-2, state_memory="pinned")
    lowbit.step_in_backward(net, opt, overlap=True)
    beside.train(net, opt, 2, DEVICE)
    loss = net(torch.randn(32, 256, device=DEVICE, dtype=torch.bfloat16)).float().square().mean()
    passed, stepped = torch.cuda.Event(), torch.cuda.Event()
    torch.cuda.synchronize()
    slow[0] = True
    loss.backward()
    passed.record()
    passed.synchronize()
    opt.step()
    stepped.record()
    assert not stepped.query(), "the current stream waits for the slow step"
    torch.cuda.synchronize()
    assert stepped.query()
    loss = net(torch.randn(32, 256, device=DEVICE, dtype=torch.bfloat16)).float().square().mean()
    with not_waited_for():
        loss.backward()
        opt.step()
