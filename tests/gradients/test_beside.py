"""Steps beside the backward pass: what runs where, what waits, and what is refused."""

import threading
import types

import pytest
import torch
from torch import nn

import lowbit
from lowbit.gradients import beside, hooks
from lowbit.optim.one_step import Step
from tests.gradients.test_gradients import Net, tokens

CPU = torch.device("cpu")


def made(**options):
    net = Net()
    opt = lowbit.AdamW([(n, p) for n, p in net.named_parameters() if p.requires_grad], lr=1e-2)
    return net, opt, lowbit.step_in_backward(net, opt, overlap=True, **options)


@pytest.fixture
def launches(monkeypatch):
    """Steps launch when `go` is set; says on which threads they did, and what to do before."""
    seen = types.SimpleNamespace(go=threading.Event(), threads=[], before=lambda: None)
    launch = Step.launch

    def waiting(step):
        assert seen.go.wait(60)
        seen.threads.append(threading.current_thread())
        seen.before()
        launch(step)

    monkeypatch.setattr(Step, "launch", waiting)
    yield seen
    seen.go.set()


def test_the_backward_pass_goes_on_while_steps_wait(launches):
    net, opt, _ = made()
    before = net.one.weight.detach().clone()
    net(tokens(0)).backward()  # ends, though no step can
    assert not launches.threads and torch.equal(net.one.weight, before)
    assert all(p.grad is None for p in net.parameters())
    launches.go.set()
    opt.step()
    assert threading.main_thread() not in launches.threads[:-1] and len(launches.threads) > 2
    assert len(set(launches.threads[:-1])) == 1, "one thread, one step after the other"
    assert not torch.equal(net.one.weight, before)


def test_a_state_dict_has_whole_steps(launches):
    net, opt, _ = made()
    net(tokens(0)).backward()
    threading.Timer(0.1, launches.go.set).start()
    opt.state_dict()
    used = [net.embed.weight, net.one.weight, net.one.bias, net.head.weight]
    assert [float(opt.state[p]["step"]) for p in used] == [1.0] * 4


def test_what_fails_beside_is_raised_by_the_step(launches):
    def broken():
        raise MemoryError("no room")

    net, opt, released = made()
    launches.before = broken
    launches.go.set()
    with pytest.raises(MemoryError, match="no room"):
        net(tokens(0)).backward()
        opt.step()
    launches.before = lambda: None
    released.reset()
    opt.zero_grad()
    before = net.one.weight.detach().clone()
    net(tokens(1)).backward()
    opt.step()
    assert not torch.equal(net.one.weight, before)


class Fake:
    """A step that ends when it is told to."""

    def __init__(self):
        self.may, self.ended = threading.Event(), False

    def launch(self):
        assert self.may.wait(60)
        self.ended = True


def test_no_more_gradients_wait_than_may():
    waiting = beside.Beside(100)
    steps = [Fake() for _ in range(4)]
    waiting.start(CPU, 60, lambda: steps[0])
    waiting.start(CPU, 40, lambda: steps[1])  # just fits
    assert not steps[0].ended
    threading.Timer(0.1, steps[0].may.set).start()
    waiting.start(CPU, 60, lambda: steps[2])
    assert steps[0].ended and not steps[1].ended
    for step in steps:
        step.may.set()
    waiting.start(CPU, 1000, lambda: steps[3])  # larger than the limit: alone
    assert steps[1].ended and steps[2].ended
    waiting.wait()
    assert steps[3].ended


def test_all_steps_end_before_a_failure_is_raised():
    waiting = beside.Beside(100)
    bad, good = Fake(), Fake()
    bad.launch = lambda: 1 // 0
    threading.Timer(0.1, good.may.set).start()
    waiting.start(CPU, 1, lambda: bad)
    waiting.start(CPU, 1, lambda: good)
    with pytest.raises(ZeroDivisionError):
        waiting.wait()
    assert good.ended
    waiting.wait()  # it was raised once


class Streams:
    """torch's interface to the streams of a device; writes down what they are asked."""

    def __init__(self):
        self.log, self.now = [], "main"
        outer = self

        class Stream:
            def __init__(self, device):
                self.device = device

            def wait_stream(self, other):
                outer.log.append(f"side waits for {other.name}")

            def record_event(self):
                outer.log.append("event")
                return len(outer.log)

        self.Stream = Stream

    def current_stream(self, device):
        wait = lambda event: self.log.append(f"{self.now} waits")  # noqa: E731
        return types.SimpleNamespace(name=self.now, wait_event=wait)

    def stream(self, stream):
        return torch.no_grad()


def test_on_a_gpu_the_side_stream_waits_for_the_gradient_and_its_stream_for_the_step(monkeypatch):
    streams = Streams()
    monkeypatch.setattr(torch, "get_device_module", lambda device: streams)
    waiting = beside.Beside(100)

    def step(number):
        streams.log.append(f"gather {number}")
        return types.SimpleNamespace(launch=lambda: streams.log.append(f"launch {number}"))

    waiting.start(torch.device("cuda", 0), 60, lambda: step(1))
    waiting.start(torch.device("cuda", 0), 60, lambda: step(2))
    one = ["side waits for main", "gather 1", "launch 1", "event"]
    two = ["side waits for main", "gather 2", "launch 2", "event"]
    assert streams.log == [*one, "main waits", *two], "the first gradient is freed before"
    waiting.wait()
    assert streams.log[-1] == "main waits"


def test_places_without_a_backward_pass_beside_are_refused():
    net, opt = Net(), None
    opt = lowbit.AdamW(net.parameters(), lr=1e-2)
    with pytest.raises(ValueError, match='bytes or "24GiB", not'):
        lowbit.step_in_backward(net, opt, overlap=True, waiting="much")


def test_a_gradient_that_is_copied_to_the_cpu_is_waited_for():
    """As under FSDP2's CPUOffloadPolicy with pinned memory, before torch 2.13."""
    p = nn.Parameter(torch.zeros(3))
    asked = []
    event = types.SimpleNamespace(synchronize=lambda: asked.append(True))

    class Record:  # of FSDP2
        grad_offload_event = None

    record = Record()
    hooks.wait_for_copy(p)
    hooks.offloaded[p] = hooks.weakref.ref(record)
    hooks.wait_for_copy(p)
    assert not asked
    record.grad_offload_event = event
    hooks.wait_for_copy(p)
    assert asked == [True]
    del record
    hooks.wait_for_copy(p)
