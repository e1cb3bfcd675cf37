"""A training step whose optimizer steps run beside the backward pass, and the same without.

    python -m bench.speed.overlap              one process, and 2 ranks of FSDP2; minutes
    python -m bench.speed.overlap --layers 4 --rounds 5

The model is that of recipes/one_card.py, on the CPU, with AdamW's 8-bit state. On 2 ranks FSDP2
shards it with CPUOffloadPolicy, and each rank has one thread. All ways take turns in one run, and
end with one digest of the weights. Compare ratios, not times.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import lowbit
from bench.pages.page import table

RECIPES = pathlib.Path(__file__).parents[2] / "recipes"
WARM = 3  # turns that are not counted
WAYS: dict[str, dict[str, Any] | None] = {
    "after the backward pass": None,
    "in the backward pass": {},
    "beside the backward pass": {"overlap": True},
}


def made(layers: int) -> Any:
    """The recipe's model, with its layers checkpointed."""
    import transformers

    sys.path.append(str(RECIPES))
    from one_card import SMALL

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SMALL, "num_hidden_layers": layers})
    config._attn_implementation = "sdpa"
    model = transformers.LlamaForCausalLM(config).bfloat16()
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


class Way:
    """A model that is trained in one of the ways."""

    def __init__(self, layers: int, options: dict[str, Any] | None) -> None:
        self.model = made(layers)
        if dist.is_initialized():
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            policy = CPUOffloadPolicy(pin_memory=False)
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=mesh, offload_policy=policy)
            fully_shard(self.model, mesh=mesh, offload_policy=policy)
        self.opt = lowbit.AdamW(lowbit.param_groups(self.model), lr=1e-4)
        if options is not None:
            lowbit.step_in_backward(self.model, self.opt, **options)

    def step(self, ids: Tensor) -> None:
        logits = self.model(input_ids=ids[:, :-1]).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()

    def digest(self) -> str:
        found = hashlib.sha256()
        for p in self.model.parameters():
            local = p.to_local() if hasattr(p, "to_local") else p.detach()
            found.update(local.contiguous().view(torch.uint8).numpy().tobytes())
        return found.hexdigest()[:12]


def measure(args: argparse.Namespace) -> tuple[dict[str, list[float]], set[str]]:
    """Seconds of the steps of each way, and the digests of their weights."""
    ways = {name: Way(args.layers, options) for name, options in WAYS.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(WARM + args.rounds):
        torch.manual_seed(turn)
        ids = torch.randint(0, 8192, (1, args.context + 1))
        for name, way in ways.items():
            if dist.is_initialized():
                dist.barrier()
            begin = time.perf_counter()
            way.step(ids)
            if turn >= WARM:
                times[name].append(time.perf_counter() - begin)
    return times, {way.digest() for way in ways.values()}


def rank(me: int, args: argparse.Namespace, store: str, result: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=me, world_size=2)
    times, digests = measure(args)
    if me == 0:
        torch.save((times, digests), result)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    found = {f"one process, {torch.get_num_threads()} threads": measure(args)}
    with tempfile.TemporaryDirectory() as folder:
        store, result = os.path.join(folder, "store"), os.path.join(folder, "result")
        mp.spawn(rank, (args, store, result), nprocs=2)
        found["2 ranks of FSDP2, one thread each"] = torch.load(result, weights_only=True)
    rows = []
    for name in WAYS:
        cells = [name]
        for times, _ in found.values():
            base = statistics.median(times["after the backward pass"])
            ratios = [
                a / b for a, b in zip(times[name], times["in the backward pass"], strict=True)
            ]
            now = statistics.median(times[name])
            cells.append(f"{now / base:.3f} ({now * 1e3:.0f} ms, {statistics.median(ratios):.3f})")
        rows.append(cells)
    print(table(["a step", *found], rows))
    for place, (_, digests) in found.items():
        print(f"{place}: {len(digests)} digest of the weights")


if __name__ == "__main__":
    main()
