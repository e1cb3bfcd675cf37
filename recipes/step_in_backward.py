"""One device, no memory for gradients: each parameter is stepped inside the backward pass, as soon
as its gradient is complete.

python recipes/step_in_backward.py
"""

import torch
from toy import batch, loss_of, make_model

import lowbit

STEPS = 40

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = make_model().to(device)
opt = lowbit.AdamW(lowbit.param_groups(model), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=200)
handle = lowbit.step_in_backward(model, opt, max_norm=1.0)  # clips by the previous step's norm

for step in range(STEPS):
    loss = loss_of(model, batch(step).to(device))
    loss.backward()
    opt.step()  # ends the step
    schedule.step()
    if step % 10 == 0:
        print(f"step {step}, loss {loss.item():.3f}, norm {handle.norm.item():.2f}", flush=True)

print(f"step {STEPS}, loss {loss.item():.3f}")
