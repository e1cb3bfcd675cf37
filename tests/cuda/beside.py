"""Steps beside the backward pass: what holds on a GPU (tests/cuda/test_cuda_beside.py) and on the
CPU (tests/gradients/test_beside.py).
"""

import functools
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import lowbit
from lowbit.gradients import beside
from lowbit.optim.one_step import Step
from tests.cuda.waiting import CYCLES
from tests.support.memory import peak_bytes

MAKERS = {
    "AdamW": (lowbit.AdamW, {}),
    "AdamW 4 bit, Kahan": (
        lowbit.AdamW,
        {"state_format": "4bit", "param_format": "bfloat16_kahan"},
    ),
    "Lion": (lowbit.Lion, {}),
    "LAMB": (lowbit.LAMB, {}),  # several passes, which stay in the hook
    "APOLLO": (lowbit.APOLLO, {"rank": 8}),
}
WAYS = {
    "after": None,
    "in the hook": {},
    "beside": {"overlap": True},
    "beside, one waits": {"overlap": True, "waiting": 1},
}
LAYERS, WIDTH = 12, 512


class Cpu:
    """Steps run on a thread."""

    type = "cpu"

    def lane(self):
        """What runs the step that is launched now."""
        return threading.get_ident()

    def late(self, monkeypatch):
        """Steps run as late as they may: when something waits for them."""

        class Last:
            in_order = False

            def __call__(self, step):
                return functools.partial(beside._launched, step)

            def join(self):
                pass

        monkeypatch.setattr(beside, "Thread", Last)

    def peak(self, run):
        """The most bytes of tensors during `run()` above those before."""
        return peak_bytes(run)


class Gpu:
    """Steps run on a second stream."""

    type = "cuda"

    def lane(self):
        return torch.cuda.current_stream().cuda_stream

    def late(self, monkeypatch):
        launch = Step.launch

        def slow(step):
            if self.lane() != torch.cuda.default_stream().cuda_stream:
                torch.cuda._sleep(CYCLES // 50)
            launch(step)

        monkeypatch.setattr(Step, "launch", slow)

    def peak(self, run):
        """Bytes of a gradient count until the last stream that takes it has: not those that are
        `allocated`, which torch counts until Python lets go.
        """
        key = "active_bytes.all"
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # polls the events of what other streams used
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()[f"{key}.current"]
        run()
        torch.cuda.synchronize()
        return torch.cuda.memory_stats()[f"{key}.peak"] - before


def of(device):
    return Gpu() if device == "cuda" else Cpu()


def small(device):
    torch.manual_seed(0)
    layers = (nn.Linear(256, 1024), nn.LayerNorm(1024), nn.Linear(1024, 333))
    return nn.Sequential(*layers).to(device, torch.bfloat16)


def deep(device):
    torch.manual_seed(0)
    made = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
    return nn.Sequential(*made).to(device, torch.bfloat16)


def train(net, opt, steps, device, width=256):
    for step in range(steps):
        x = torch.randn(32, width, generator=torch.Generator().manual_seed(step))
        net(x.to(device, torch.bfloat16)).float().square().mean().backward()
        opt.step()
        opt.zero_grad()


def content(net, opt):
    """Weights and state, on the CPU, by name."""

    def here(t):
        t = t.detach()
        return (t.full_tensor() if hasattr(t, "full_tensor") else t).cpu().clone()

    made = {name: here(p) for name, p in net.named_parameters()}
    for name, p in net.named_parameters():
        made |= {f"{name} {key}": here(t) for key, t in opt.state[p].items()}
    return made


def assert_bits(device, name, memory, wrap=lambda net: net):
    """All ways of a step end with the same bits."""
    make, options = MAKERS[name]
    wanted = None
    for way, given in WAYS.items():
        net = wrap(small(device))
        opt = make(net.named_parameters(), lr=1e-2, state_memory=memory, **options)
        if given is not None:
            lowbit.step_in_backward(net, opt, **given)
        train(net, opt, 5, device)
        found = content(net, opt)
        wanted = wanted or found
        assert found.keys() == wanted.keys()
        for key, t in found.items():
            assert torch.equal(t, wanted[key]), f"{way}: {key}"


def assert_bits_under_fsdp2(device):
    """Parameters in the host's memory, whose steps run on a thread."""
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh(device, (1,))
        policy = CPUOffloadPolicy(pin_memory=device == "cuda")

        def wrap(net):
            for layer in net:
                fully_shard(layer, mesh=mesh, offload_policy=policy)
            return fully_shard(net, mesh=mesh, offload_policy=policy)

        assert_bits(device, "AdamW", "device", wrap)
    finally:
        dist.destroy_process_group()


def assert_lanes(device, monkeypatch):
    """Every parameter's step runs in one lane, which is not the training loop's."""
    machine, seen, launch = of(device), [], Step.launch

    def noted(step):
        seen.append(machine.lane())
        launch(step)

    monkeypatch.setattr(Step, "launch", noted)
    net = small(device)
    opt = lowbit.AdamW(net.named_parameters(), lr=1e-2, state_memory="pinned")
    lowbit.step_in_backward(net, opt, overlap=True)
    train(net, opt, 2, device)
    beside_it = [lane for lane in seen if lane != machine.lane()]
    assert len(beside_it) == 2 * len(list(net.parameters())) and len(set(beside_it)) == 1


def assert_memory(device, monkeypatch):
    """What waits is bounded, however late steps run."""
    machine = of(device)
    machine.late(monkeypatch)
    layer = 2 * WIDTH * WIDTH

    def peak(**options):
        net = deep(device)
        opt = lowbit.AdamW(net.named_parameters(), lr=1e-2, state_memory="pinned")
        lowbit.step_in_backward(net, opt, **options)
        train(net, opt, 1, device, WIDTH)
        return machine.peak(lambda: train(net, opt, 1, device, WIDTH))

    alone = peak()
    slack = layer // 4
    for waiting in (1, 3):
        more = peak(overlap=True, waiting=waiting * layer) - alone
        assert waiting * layer - slack <= more <= waiting * layer + slack, f"{waiting} layers wait"
    assert peak(overlap=True) - alone >= (LAYERS - 2) * layer, "steps are late: it is the bound"
