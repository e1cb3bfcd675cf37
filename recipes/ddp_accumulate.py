"""DDP with gradient accumulation over micro-batches: bfloat16 sums with stochastic rounding,
reduced once per step. Rank 0 saves the state, which is equal on all ranks.

torchrun --nproc-per-node 2 recipes/ddp_accumulate.py
"""

import pathlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from toy import batch, loss_of, make_model

import lowbit

STEPS, MICRO, PATH = 20, 4, pathlib.Path("out/ddp.pt")

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
if device == "cuda":
    torch.cuda.set_device(rank % torch.cuda.device_count())

model = DistributedDataParallel(make_model().to(device))
opt = lowbit.AdamW(lowbit.param_groups(model), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
accumulator = lowbit.accumulate(model, average=MICRO)

for step in range(STEPS):
    for micro in range(MICRO):
        with accumulator.micro(last=micro == MICRO - 1):
            loss = loss_of(model, batch(MICRO * step + micro, rank, ranks).to(device))
            loss.backward()
    opt.step()
    opt.zero_grad()
    if step % 5 == 0 and rank == 0:
        print(f"step {step}, loss {loss.item():.3f}", flush=True)

if rank == 0:
    PATH.parent.mkdir(exist_ok=True)
    saved = {"model": model.module.state_dict(), "optimizer": opt.state_dict()}
    torch.save(saved, PATH.with_suffix(".tmp"))
    PATH.with_suffix(".tmp").replace(PATH)  # an old checkpoint is whole until the new one is
    print(f"step {STEPS}, loss {loss.item():.3f}")
dist.barrier()
dist.destroy_process_group()
