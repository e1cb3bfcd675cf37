r"""Fault-tolerant training: saves every few steps and, whenever it is killed, resumes from the last
complete checkpoint, on any number of ranks.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 recipes/elastic.py \
        --folder out/elastic --steps 40
    torchrun --standalone --nproc-per-node 3 --max-restarts 3 recipes/elastic.py \
        --folder out/elastic --steps 80

The second command resumes on 3 ranks. The first start and every restart use the same command. If a
rank dies, torchrun stops the others and restarts all of them. If a rank hangs, the others give up
after --timeout seconds.
"""

from __future__ import annotations

import argparse
import gc
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lowbit
from lowbit import elastic


def saved(model: nn.Module, opt: torch.optim.Optimizer, step: int) -> dict:
    return {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, opt),
        "progress": {"step": torch.tensor(step)},
    }


def batch(step: int, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows of the batch of `step`. They depend on the step alone,
    so a restart sees the same batch.
    """
    g = torch.Generator().manual_seed(step)
    x = torch.randn(24, 64, generator=g)
    return x[rank::ranks], x.cumsum(1).tanh()[rank::ranks]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--folder", required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--timeout", type=int, default=60, help="seconds to wait for another rank")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    timeout = timedelta(seconds=args.timeout)
    # torchrun's store survives restarts, with the addresses of dead ranks,
    # so each start needs its own keys.
    store, rank, ranks = next(dist.rendezvous("env://", timeout=timeout))
    store = dist.PrefixStore(f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    dist.init_process_group(
        "nccl" if cuda else "gloo", store=store, rank=rank, world_size=ranks, timeout=timeout
    )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)  # a mesh shards on the current device
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device).bfloat16()
    fully_shard(model, mesh=init_device_mesh(device.type, (ranks,)))
    opt = lowbit.AdamW(lowbit.param_groups(model), lr=3e-3)

    begin = 0
    # One rank chooses: folders of a shared file system may look different from two hosts.
    chosen = [elastic.latest(args.folder) if rank == 0 else None]
    dist.broadcast_object_list(chosen, device=device)
    if (newest := chosen[0]) is not None:
        content = saved(model, opt, 0)
        dcp.load(content, checkpoint_id=newest)
        set_model_state_dict(model, content["model"])
        set_optimizer_state_dict(model, opt, content["optim"])
        begin = int(content["progress"]["step"])
        if rank == 0:
            print(f"resuming from {newest}", flush=True)
    dist.barrier()  # no rank writes before every rank has looked

    for step in range(begin, args.steps):
        x, y = batch(step, rank, ranks)
        loss = F.mse_loss(model(x.to(device).bfloat16()).float(), y.to(device))
        loss.backward()
        opt.step()
        opt.zero_grad()
        if (step + 1) % args.every == 0 or step + 1 == args.steps:
            folder = elastic.step_folder(args.folder, step + 1)
            dcp.save(saved(model, opt, step + 1), checkpoint_id=folder)
        if rank == 0:
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
    gc.collect()  # gloo aborts at exit if a sharded tensor outlives it
    dist.barrier()
    dist.destroy_process_group()
