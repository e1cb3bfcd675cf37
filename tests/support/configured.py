"""A model whose parameters have the usual names, every optimizer of lowbit,
and what formats it keeps.
"""

import torch
from torch import nn

import lowbit

PRESETS = {entry["name"]: entry for entry in lowbit.catalog()["presets"]}
OPTIMIZERS = [
    cls
    for name in lowbit.__all__
    if isinstance(cls := getattr(lowbit, name), type)
    and issubclass(cls, lowbit.LowbitOptimizer)
    and cls is not lowbit.LowbitOptimizer
]


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "tokens": nn.Embedding(100, 64),
            "body": nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 40)),
            "head": nn.Linear(64, 100, bias=False),
        }
    ).to(dtype)


def train(net, opt, steps=2):
    if hasattr(opt, "train"):  # Schedule-Free begins in eval mode
        opt.train()
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for p in net.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        opt.step()


def formats(opt):
    """The name of each parameter -> the formats of its states."""
    return {
        name: [slot.format for slot in lay.slots] + (["factored"] if lay.factors else [])
        for name, (_, _, lay) in zip(
            (name for group in opt.param_groups for name in group["param_names"]),
            opt.laid_out(),
            strict=True,
        )
    }
