"""Small models that were trained."""

import torch
from torch import nn


def trained(steps, seed=0):
    """A model that torch's AdamW has trained, and the optimizer, with named parameters."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(256, 300), nn.Linear(300, 64))
    opt = torch.optim.AdamW(net.named_parameters(), lr=1e-2)
    for _ in range(steps):
        net(torch.randn(4, 256)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return net, opt


def losses_of_both_modes(model, opt):
    """Steps of a Schedule-Free optimizer, each with its loss and that of an evaluation after it."""
    x, found = torch.randn(4, 32), []
    for _ in range(3):
        opt.train()
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        opt.eval()
        with torch.no_grad():
            found += [loss.item(), model(x).square().mean().item()]
    return found
