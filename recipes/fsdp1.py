"""FSDP1 (FullyShardedDataParallel): bind the optimizer to the original parameters, save in FSDP2's
layout, and resume under any wrapper.

torchrun --nproc-per-node 2 recipes/fsdp1.py
"""

import functools
import gc
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from toy import batch, loss_of, make_model
from train_gpt import Block

import lowbit

STEPS, PATH = 20, pathlib.Path("out/fsdp1")

cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)

model = FullyShardedDataParallel(
    make_model(),
    auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    use_orig_params=True,
    device_id=device,
)
opt = lowbit.AdamW(model.named_parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
lowbit.fsdp1.bind(model, opt)

begin = 0
if (PATH / ".metadata").exists():
    weights = {"model": get_model_state_dict(model)}
    state = {"optim": lowbit.fsdp1.get_state_dict(opt), "step": torch.tensor(0)}
    dcp.load(weights, checkpoint_id=PATH)  # separately: docs/bits/sharding-details.md explains why
    dcp.load(state, checkpoint_id=PATH)
    set_model_state_dict(model, weights["model"])
    lowbit.fsdp1.set_state_dict(opt, state["optim"])
    begin = int(state["step"])

for step in range(begin, begin + STEPS):
    loss = loss_of(model, batch(step, rank, ranks).to(device))
    loss.backward()
    lowbit.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
    if step % 10 == 0 and rank == 0:
        print(f"step {step}, loss {loss.item():.3f}", flush=True)

saved = {
    "model": get_model_state_dict(model),
    "optim": lowbit.fsdp1.get_state_dict(opt),
    "step": torch.tensor(begin + STEPS),
}
# Writer replaces the old checkpoint when all of the new one is written.
dcp.save(saved, storage_writer=lowbit.checkpoint.Writer(PATH))
if rank == 0:
    print(f"step {begin + STEPS}, loss {loss.item():.3f}")
del model, opt, saved, loss
gc.collect()  # gloo aborts at exit if a sharded tensor outlives it
dist.destroy_process_group()
