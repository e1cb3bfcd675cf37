"""Steps beside the backward pass: what runs where, what waits, and what is refused."""

import concurrent.futures
import copy
import threading
import types

import pytest
import torch
from torch import nn

import lowbit
from lowbit import sharding
from lowbit.gradients import beside, hooks
from lowbit.optim.one_step import Step
from tests.cuda import beside as both
from tests.gradients.test_gradients import Net, tokens

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


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


def broken():
    raise MemoryError("no room")


def failed(launches):
    """As `made`, after a backward pass whose steps beside it have failed."""
    net, opt, released = made()
    launches.before = broken
    net(tokens(0)).backward()
    launches.go.set()
    return net, opt, released


def test_what_fails_beside_is_raised_until_the_step_is_discarded(launches):
    net, opt, released = failed(launches)
    for ask in (opt.state_dict, opt.step, opt.step, lambda: net(tokens(0))):
        with pytest.raises(MemoryError, match="no room"):
            ask()
    launches.before = lambda: None
    released.reset()
    opt.zero_grad()
    before = net.one.weight.detach().clone()
    net(tokens(1)).backward()
    opt.step()
    assert not torch.equal(net.one.weight, before)


def test_statistics_and_loads_wait(launches):
    net, opt, _ = made()
    state = copy.deepcopy(opt.state_dict())
    for ask in (opt.stats, lambda: opt.load_state_dict(state)):
        launches.go.clear()
        net(tokens(0)).backward()
        threading.Timer(0.1, launches.go.set).start()
        ask()
        assert launches.go.is_set()
        opt.step()
    assert float(opt.state[net.one.weight]["step"]) == 0.0


def test_an_interrupt_leaves_the_step_in_flight(launches, monkeypatch):
    result, interrupts = concurrent.futures.Future.result, [KeyboardInterrupt]

    def interrupted(future):
        if interrupts:
            raise interrupts.pop()
        return result(future)

    monkeypatch.setattr(concurrent.futures.Future, "result", interrupted)
    net, opt, _ = made()
    net(tokens(0)).backward()
    with pytest.raises(KeyboardInterrupt):
        opt.step()
    threading.Timer(0.1, launches.go.set).start()
    opt.state_dict()
    assert float(opt.state[net.one.weight]["step"]) == 1.0


@pytest.mark.parametrize("name", both.MAKERS)
def test_the_bits_of_steps_after_the_backward_pass(name):
    both.assert_bits("cpu", name, "pinned")


def test_the_same_for_parameters_that_fsdp2_keeps_on_the_cpu():
    both.assert_bits_under_fsdp2("cpu")


def test_steps_run_in_a_lane_of_their_own(monkeypatch):
    both.assert_lanes("cpu", monkeypatch)


def test_no_more_memory_waits_than_may(monkeypatch):
    both.assert_memory("cpu", monkeypatch)


class Fake:
    """A step that ends when it is told to."""

    def __init__(self, size):
        self.may, self.ended = threading.Event(), False
        grad = torch.empty(size, dtype=torch.uint8)
        self.step_groups = [types.SimpleNamespace(grads=[grad])]

    def launch(self):
        assert self.may.wait(60)
        self.ended = True


def test_no_more_gradients_wait_than_may():
    waiting = beside.Beside(100)
    steps = [Fake(size) for size in (60, 40, 60, 1000)]
    waiting.start(CPU, steps[0])
    waiting.start(CPU, steps[1])  # just fits
    assert not steps[0].ended
    threading.Timer(0.1, steps[0].may.set).start()
    waiting.start(CPU, steps[2])
    assert steps[0].ended and not steps[1].ended
    for step in steps:
        step.may.set()
    waiting.start(CPU, steps[3])  # larger than the limit: alone
    assert steps[1].ended and steps[2].ended
    waiting.wait()
    assert steps[3].ended


def test_all_steps_end_before_a_failure_is_raised():
    waiting = beside.Beside(100)
    bad, good = Fake(1), Fake(1)
    bad.launch = lambda: 1 // 0
    threading.Timer(0.1, good.may.set).start()
    waiting.start(CPU, bad)
    waiting.start(CPU, good)
    with pytest.raises(ZeroDivisionError):
        waiting.wait()
    assert good.ended
    with pytest.raises(ZeroDivisionError):
        waiting.wait()
    waiting.discard()
    waiting.wait()


def test_a_fork_gets_a_thread_of_its_own(monkeypatch):
    launch, steps = beside.Thread(), [Fake(1), Fake(1)]
    for step in steps:
        step.may.set()
    launch(steps[0])()
    launch._worker.shutdown()  # a fork has the object and no thread
    monkeypatch.setattr(beside.os, "getpid", lambda: -5)
    launch(steps[1])()
    assert all(step.ended for step in steps)


class Streams:
    """torch's interface to the streams of a device; writes down what they are asked."""

    def __init__(self):
        self.log, self.now = [], "reduction"
        outer = self

        class Stream:
            def __init__(self, device):
                self.device, self.name = device, "side"

            def wait_stream(self, other):
                outer.log.append(f"{self.name} waits for {other.name}")

            def record_event(self):
                outer.log.append("event")
                return types.SimpleNamespace(synchronize=lambda: outer.log.append("host waits"))

        self.Stream = Stream

    def current_stream(self, device):
        stream = self.Stream(device)
        stream.name = self.now
        return stream

    def stream(self, stream):
        return torch.no_grad()


class OfGpu:
    """A tensor of a GPU, as far as it is asked."""

    def __init__(self, name, size, log, device=GPU):
        self.nbytes, self.device = size, device
        self.record_stream = lambda stream: log.append(f"{name} kept for {stream.name}")


def test_on_a_gpu_who_waits_for_whom(monkeypatch):
    """The side stream waits for the reduction's, whose memory is kept for it; the host only above
    the limit; and in the end the stream of the training loop, not that of the hooks.
    """
    streams = Streams()
    log = streams.log
    monkeypatch.setattr(torch, "get_device_module", lambda device: streams)
    monkeypatch.setattr(beside, "capturing", lambda device: streams.now == "graph")
    waiting = beside.Beside(100)

    def start(number):
        grad = OfGpu(f"gradient {number}", 60, log)
        rate = OfGpu("rate", 4, log, CPU)
        waiting.start(
            GPU,
            types.SimpleNamespace(
                step_groups=[types.SimpleNamespace(grads=[grad])],
                taken=lambda: [grad, rate],
                launch=lambda: log.append(f"launch {number}"),
            ),
        )

    start(1)
    start(2)
    one, two = (
        [f"gradient {n} kept for side", "side waits for reduction", f"launch {n}", "event"]
        for n in (1, 2)
    )
    assert log == [*one, "host waits", *two]
    del log[:]
    streams.now = "main"
    waiting.wait()
    assert log == ["main waits for side"]
    streams.now = "graph"
    waiting.wait()
    assert log == ["main waits for side"], "a capture that waits for another stream is broken"
    streams.now = "main"
    start(3)
    assert log[1:] == ["gradient 3 kept for side", "side waits for main", "launch 3", "event"]


def test_places_without_a_backward_pass_beside_are_refused(monkeypatch):
    net = Net()
    opt = lowbit.AdamW(net.parameters(), lr=1e-2)
    monkeypatch.setattr(sharding, "is_ddp", lambda model: True)
    with pytest.raises(ValueError, match="nothing to run beside under DistributedDataParallel"):
        lowbit.step_in_backward(net, opt, overlap=True)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="give overlap=True"):
        lowbit.step_in_backward(net, opt, waiting="1MiB")
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


def test_what_failed_beside_keeps_nothing_of_what_is_removed(launches):
    net, opt, released = failed(launches)
    with pytest.raises(MemoryError, match="no room"):
        released.remove()
    launches.before = lambda: None
    opt.zero_grad()
    net(tokens(1)).backward()
    opt.step()  # in the loop, as without
    lowbit.step_in_backward(net, opt, overlap=True).remove()


def test_two_models_of_one_optimizer_are_both_waited_for(launches):
    """Whichever failed, and also when the other's handle is removed."""
    x, one, two = torch.ones(8), nn.Linear(8, 8), nn.Linear(8, 8)
    named = nn.ModuleList([one, two]).named_parameters()
    opt = lowbit.AdamW(named, lr=1e-2)
    first, second = (lowbit.step_in_backward(m, opt, overlap=True) for m in (one, two))
    before = one.weight.detach().clone()
    (one(x) + two(x)).sum().backward()
    threading.Timer(0.1, launches.go.set).start()
    opt.step()
    assert float(opt.state[one.weight]["step"]) == float(opt.state[two.weight]["step"]) == 1.0
    assert not torch.equal(before, one.weight)
    launches.before = broken
    one(x).sum().backward()
    second.remove()
    for ask in (opt.state_dict, opt.step, lambda: one(x)):
        with pytest.raises(MemoryError, match="no room"):
            ask()
    first.reset()
    opt.step()
