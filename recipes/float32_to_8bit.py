"""Continues a float32 run of torch's AdamW in 8 bits, with bfloat16 weights without a float32 copy:
16 bytes per parameter become 6.

python recipes/float32_to_8bit.py
"""

import pathlib

import torch
from toy import batch, loss_of, make_model

import lowbit

STEPS, PATH = 20, pathlib.Path("out/float32.pt")


def train(model: torch.nn.Module, opt: torch.optim.Optimizer, first: int) -> float:
    for step in range(first, first + STEPS):
        loss = loss_of(model, batch(step))
        loss.backward()
        opt.step()
        opt.zero_grad()
    return loss.item()


model = make_model(torch.float32)
old = torch.optim.AdamW(model.named_parameters(), lr=2e-3, weight_decay=0.1)
print(f"float32: step {STEPS}, loss {train(model, old, 0):.3f}", flush=True)
PATH.parent.mkdir(exist_ok=True)
torch.save({"model": model.state_dict(), "optimizer": old.state_dict()}, PATH)

# From here on in 8 bits. Parameters are matched by name. torch saves names only if it was given
# them; otherwise `model=` maps the saved numbers to the order of `model.parameters()`. A
# torch.distributed.checkpoint directory loads the same way, into any sharding.
model = make_model(torch.bfloat16)
model.load_state_dict(torch.load(PATH, weights_only=True)["model"])
opt = lowbit.AdamW(lowbit.param_groups(model), lr=2e-3, weight_decay=0.1)
lowbit.load_optimizer(opt, PATH, model=model)
print(f"step {2 * STEPS}, loss {train(model, opt, STEPS):.3f}")
