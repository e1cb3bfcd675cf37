"""Muon under FSDP2, with AdamW for what is not a hidden matrix: momentum in 8 bits. A second run
resumes on any number of ranks.

torchrun --nproc-per-node 2 recipes/muon.py
"""

import gc
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from toy import batch, loss_of, make_model

import lowbit

STEPS, PATH = 20, pathlib.Path("out/muon")

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
if device == "cuda":
    torch.cuda.set_device(rank % torch.cuda.device_count())

model = make_model().to(device)
mesh = init_device_mesh(device, (ranks,))
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
groups = lowbit.muon_param_groups(model)  # after fully_shard
opt = lowbit.MuonWithAdamW(groups, lr=0.02, adamw_lr=2e-3, weight_decay=0.1)

begin = 0
if (PATH / ".metadata").exists():
    weights, state = get_state_dict(model, opt)
    saved = {"model": weights, "optim": state, "step": torch.tensor(0)}
    dcp.load(saved, checkpoint_id=PATH)
    set_state_dict(model, opt, model_state_dict=saved["model"], optim_state_dict=saved["optim"])
    begin = int(saved["step"])

for step in range(begin, begin + STEPS):
    loss = loss_of(model, batch(step, rank, ranks).to(device))
    loss.backward()
    opt.step()
    opt.zero_grad()
    if step % 10 == 0 and rank == 0:
        print(f"step {step}, loss {loss.item():.3f}", flush=True)

weights, state = get_state_dict(model, opt)
saved = {"model": weights, "optim": state, "step": torch.tensor(begin + STEPS)}
# Writer replaces the old checkpoint when all of the new one is written.
dcp.save(saved, storage_writer=lowbit.checkpoint.Writer(PATH))
if rank == 0:
    print(f"step {begin + STEPS}, loss {loss.item():.3f}")
del model, opt, weights, state, loss
gc.collect()  # gloo aborts at exit if a sharded tensor outlives it
dist.destroy_process_group()
