"""Continues a bitsandbytes run with lowbit: where the block grids agree,
its 8-bit codes are copied and no value changes.

python recipes/from_bitsandbytes.py
"""

import pathlib

import bitsandbytes
import torch
from toy import batch, loss_of, make_model

import lowbit

STEPS, PATH = 20, pathlib.Path("out/bitsandbytes.pt")


def train(model: torch.nn.Module, opt: torch.optim.Optimizer, first: int) -> float:
    for step in range(first, first + STEPS):
        loss = loss_of(model, batch(step))
        loss.backward()
        opt.step()
        opt.zero_grad()
    return loss.item()


model = make_model()
old = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=2e-3, weight_decay=0.1)
print(f"bitsandbytes: step {STEPS}, loss {train(model, old, 0):.3f}", flush=True)
PATH.parent.mkdir(exist_ok=True)
torch.save({"model": model.state_dict(), "optimizer": old.state_dict()}, PATH)

# From here on without bitsandbytes. It saves no names, so `model=` maps the saved numbers to the
# order of `model.parameters()`.
model = make_model()
model.load_state_dict(torch.load(PATH, weights_only=True)["model"])
opt = lowbit.AdamW(model.named_parameters(), lr=2e-3, weight_decay=0.1)
lowbit.load_optimizer(opt, PATH, model=model)
print(f"step {2 * STEPS}, loss {train(model, opt, STEPS):.3f}")
