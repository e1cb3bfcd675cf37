"""One device: bfloat16 weights without a float32 copy, 8-bit AdamW, a schedule, and a checkpoint
from which a second run resumes.

python recipes/single_device.py
"""

import pathlib

import torch
from toy import batch, loss_of, make_model

import lowbit

STEPS, PATH = 20, pathlib.Path("out/single.pt")

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = make_model().to(device)
opt = lowbit.AdamW(lowbit.param_groups(model), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=200)

begin = 0
if PATH.exists():
    saved = torch.load(PATH, weights_only=True, map_location="cpu")
    model.load_state_dict(saved["model"])
    opt.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    begin = saved["step"]

for step in range(begin, begin + STEPS):
    loss = loss_of(model, batch(step).to(device))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
    schedule.step()
    if step % 10 == 0:
        print(f"step {step}, loss {loss.item():.3f}", flush=True)

PATH.parent.mkdir(exist_ok=True)
state = {
    "model": model.state_dict(),
    "optimizer": opt.state_dict(),
    "schedule": schedule.state_dict(),
}
torch.save({**state, "step": begin + STEPS}, PATH.with_suffix(".tmp"))
PATH.with_suffix(".tmp").replace(PATH)  # the old checkpoint is whole until the new one is
print(
    f"step {begin + STEPS}, loss {loss.item():.3f}, {opt.stats()['total']['bytes_per_value']:.2f} "
    "bytes per parameter"
)
