"""Writes state_dicts.pt: state dicts of torchao's CPUOffloadOptimizer, and of AdamW in its place.

pip install torchao==0.18.0, then python tests/golden/cpu_offload/make.py

The class asks for a GPU. Here its streams, events and pinned memory are replaced by ones that do
nothing, and the weights are on the CPU: its own code makes the optimizers and the state dicts.
"""

import contextlib
import copy
import pathlib
from unittest import mock

import torch


class NoStream:
    def wait_stream(self, other):
        pass

    def record_event(self):
        return self

    def synchronize(self):
        pass


@contextlib.contextmanager
def no_gpu():
    from torchao.optim import cpu_offload

    plain = torch.empty_like
    with (
        mock.patch.object(cpu_offload, "get_available_devices", lambda: ["cpu", "cuda"]),
        mock.patch.object(torch.cuda, "Stream", NoStream),
        mock.patch.object(torch.cuda, "current_stream", NoStream),
        mock.patch.object(torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
        mock.patch.object(torch, "empty_like", lambda t, pin_memory=False, **k: plain(t, **k)),
    ):
        yield


def model() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(12, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 16, bias=False)
    )


def groups(net: torch.nn.Module) -> list[dict]:
    return [
        {"params": [net[0].weight, net[2].weight], "weight_decay": 0.1},
        {"params": [net[0].bias, net[1].weight, net[1].bias], "weight_decay": 0.0},
    ]


def trained(net, optimizer) -> dict:
    torch.manual_seed(3)
    for _ in range(2):
        net(torch.randn(5, 12)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return copy.deepcopy(optimizer.state_dict())


def main() -> None:
    from torchao.optim import CPUOffloadOptimizer

    out = {}
    with no_gpu():
        net = model()
        all_small = {"minimal_size": 4, "lr": 0.01}
        out["groups"] = trained(net, CPUOffloadOptimizer(groups(net), **all_small))
        net = model()
        out["mixed"] = trained(net, CPUOffloadOptimizer(net.parameters(), minimal_size=64, lr=0.01))
        out["model"] = copy.deepcopy(net.state_dict())
        net = model()
        out["mixed_groups"] = trained(net, CPUOffloadOptimizer(groups(net), minimal_size=64))
    net = model()
    out["plain_groups"] = trained(net, torch.optim.AdamW(groups(net), lr=0.01, fused=True))
    net = model()
    out["plain"] = trained(net, torch.optim.AdamW(net.parameters(), lr=0.01, fused=True))
    torch.save(out, pathlib.Path(__file__).with_name("state_dicts.pt"))


if __name__ == "__main__":
    main()
