"""A small network in bfloat16, its gradients, and its training."""

import torch
from torch import nn


def model(dtype=torch.bfloat16, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(96, 128), nn.GELU(), nn.Linear(128, 40)).to(dtype)


def set_grads(net, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in net.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def train(net, opt, steps=5, first=0):
    for step in range(first, first + steps):
        set_grads(net, step)
        opt.step()


def bits(opt):
    out = []
    for group in opt.param_groups:
        for p in group["params"]:
            out += [p.detach().clone(), *(t.clone() for _, t in sorted(opt.state[p].items()))]
    return out
