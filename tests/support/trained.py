"""A small model that torch's AdamW has trained, for checkpoints of it."""

import torch
from torch import nn


def trained(steps, seed=0):
    """The model and its optimizer, with named parameters."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(256, 300), nn.Linear(300, 64))
    opt = torch.optim.AdamW(net.named_parameters(), lr=1e-2)
    for _ in range(steps):
        net(torch.randn(4, 256)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return net, opt
