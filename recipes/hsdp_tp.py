"""Hybrid sharding with tensor parallelism. Optimizer state follows the parameters,
whatever their placements.

    torchrun --nproc-per-node 8 recipes/hsdp_tp.py

This is 2 replicas of 2 shards, each over 2 tensor-parallel ranks. The number of ranks sets the
number of replicas.
"""

import gc
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from toy import batch, loss_of, make_model

import lowbit

STEPS, SHARDS, TENSOR, PATH = 20, 2, 2, pathlib.Path("out/hsdp_tp")

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
if device == "cuda":
    torch.cuda.set_device(rank % torch.cuda.device_count())

if ranks % (SHARDS * TENSOR):
    raise SystemExit(f"{ranks} ranks: the number of ranks must be a multiple of {SHARDS * TENSOR}")
sizes = (ranks // (SHARDS * TENSOR), SHARDS, TENSOR)
mesh = init_device_mesh(device, sizes, mesh_dim_names=("replicate", "shard", "tensor"))
model = make_model().to(device)
for block in model.blocks:
    parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(block, mesh=mesh["replicate", "shard"])
fully_shard(model, mesh=mesh["replicate", "shard"])
opt = lowbit.AdamW(lowbit.param_groups(model), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)

# All ranks of a tensor-parallel group use the same batch.
data_rank, data_ranks = rank // TENSOR, ranks // TENSOR
for step in range(STEPS):
    loss = loss_of(model, batch(step, data_rank, data_ranks).to(device))
    loss.backward()
    opt.step()
    opt.zero_grad()
    if step % 5 == 0 and rank == 0:
        print(f"step {step}, loss {loss.item():.3f}", flush=True)

weights, state = get_state_dict(model, opt)
saved = {"model": weights, "optim": state}
# Writer replaces the old checkpoint when all of the new one is written.
dcp.save(saved, storage_writer=lowbit.checkpoint.Writer(PATH))
if rank == 0:
    print(f"step {STEPS}, loss {loss.item():.3f}")
del model, opt, weights, state, loss
gc.collect()  # gloo aborts at exit if a sharded tensor outlives it
dist.barrier()
dist.destroy_process_group()
