"""A float32 run with torch's AdamW goes on in 8 bits, with bfloat16 weights that have no float32 copy: 16 bytes a parameter become 6.

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

# From here on in 8 bits. Parameters are found by their names, which torch keeps where it is given them; without, their order must be the old one, as
# that of `lowbit.AdamW(model.named_parameters())` is. A directory of torch.distributed.checkpoint loads the same way, into any sharding.
model = make_model(torch.bfloat16)
model.load_state_dict(torch.load(PATH, weights_only=True)["model"])
opt = lowbit.AdamW(lowbit.param_groups(model), lr=2e-3, weight_decay=0.1)
lowbit.load_optimizer(opt, PATH, model=model)
print(f"step {2 * STEPS}, loss {train(model, opt, STEPS):.3f}")
