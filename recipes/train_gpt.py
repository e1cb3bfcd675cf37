"""Train a small byte-level GPT on text files: one process, DDP or FSDP2, CPU or CUDA,
float32 AdamW or lowbit.

    python recipes/train_gpt.py --steps 200
    torchrun --nproc-per-node 2 recipes/train_gpt.py --steps 200 --save out/checkpoint
    torchrun --nproc-per-node 3 recipes/train_gpt.py --steps 300 --resume out/checkpoint
    torchrun --nproc-per-node 2 recipes/train_gpt.py --exact 6 --digest

The last command prints the same digests of weights and state on any number of ranks.

With `--optimizer lowbit` the weights are bfloat16 without a float32 copy; with `--optimizer torch`
everything is float32. A processor without instructions for bfloat16 computes with those weights in
float32 (`--compute`). A run can resume on any number of ranks. The batch of a step depends only on
(seed, step), so it is the same for every number of ranks.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import math
import os
import pathlib
import platform
import sys
import sysconfig
import time

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
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from tqdm import tqdm

import lowbit


def compute_dtype(weights: torch.dtype, device: str) -> torch.dtype:
    """What to multiply such weights in: their own dtype, but float32 for bfloat16 on a processor
    without matrix instructions for it.

    oneDNN's product in bfloat16 takes 6 to 10 times as long as its float32 one where a processor
    has neither AVX512-BF16 nor AMX, or where ONEDNN_MAX_CPU_ISA forbids them.
    """
    if (
        weights != torch.bfloat16
        or device == "cuda"
        or platform.machine() not in ("x86_64", "AMD64")
    ):
        return weights
    allowed = os.environ.get("ONEDNN_MAX_CPU_ISA", "DEFAULT").upper()
    has = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    if has and (
        allowed in ("ALL", "DEFAULT")
        or any(isa in allowed for isa in ("BF16", "FP16", "AVX10", "AMX"))
    ):
        return weights
    if os.environ.get("RANK", "0") == "0":
        print(
            "this processor has no instructions for bfloat16: weights "
            "stay bfloat16, products are float32",
            file=sys.stderr,
        )
    return torch.float32


class Linear(nn.Linear):
    """In the dtype of its input, whatever that of its weights is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class LayerNorm(nn.LayerNorm):
    """In the dtype of its input, whatever that of its weights is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = LayerNorm(width), LayerNorm(width)
        self.qkv, self.proj = Linear(width, 3 * width), Linear(width, width)
        self.up, self.down = Linear(width, 4 * width), Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv.unbind(0), is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class GPT(nn.Module):
    """compute: the dtype of activations and products; None is that of the weights."""

    def __init__(
        self, width: int, depth: int, heads: int, context: int, compute: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.compute = compute
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = LayerNorm(width), Linear(width, 256, bias=False)
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        x = x if self.compute is None else x.to(self.compute)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Text:
    """The bytes of text files. The last twentieth is held out for validation."""

    def __init__(self, files: list[str], context: int, limit: int = 8 << 20) -> None:
        paths = [pathlib.Path(f) for f in files] or sorted(
            pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py")
        )
        content = bytearray()
        for path in paths:
            content += path.read_bytes()
            if len(content) >= limit:
                break
        if len(content) < 40 * context:
            sys.exit(f"{len(content)} bytes of text are too few for a context of {context}")
        whole = torch.frombuffer(content, dtype=torch.uint8)
        cut = len(whole) * 19 // 20
        self.train, self.held_out, self.context = whole[:cut], whole[cut:], context

    def batch(
        self, seed: int, step: int, size: int, rank: int, ranks: int, held_out: bool = False
    ) -> torch.Tensor:
        """This rank's rows of the batch of `step`: int64 [size / ranks, context + 1]."""
        text = self.held_out if held_out else self.train
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(text) - self.context - 1, (size,), generator=generator)
        rows = [text[s : s + self.context + 1] for s in starts[rank::ranks].tolist()]
        return torch.stack(rows).long()


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def loss_over_ranks(loss: torch.Tensor, ranks: int) -> float:
    mean = loss.detach()
    if ranks > 1:
        dist.all_reduce(mean)
        mean /= ranks
    return mean.item()


def whole(t: torch.Tensor) -> torch.Tensor:
    t = t.detach()
    return (t.full_tensor() if isinstance(t, DTensor) else t).cpu()


def digest(model: nn.Module, opt: torch.optim.Optimizer) -> str:
    """SHA-256 of all weights and all optimizer state as whole tensors: the same for every sharding
    of the same state.
    """
    h = hashlib.sha256()
    for name, p in sorted(model.named_parameters()):
        for key, t in sorted({"": p, **opt.state[p]}.items()):
            t = whole(t).contiguous()
            h.update(f"{name} {key} {t.dtype} {tuple(t.shape)}".encode())
            h.update(t.reshape(-1).view(torch.uint8).numpy().tobytes())
    return h.hexdigest()


def footprint(model: nn.Module, opt: torch.optim.Optimizer) -> dict[str, float]:
    """Bytes per parameter of weights, gradients (of the weights' dtype) and optimizer state,
    over all ranks.
    """
    params = list(model.parameters())
    count = sum(p.numel() for p in params)
    weights = sum(p.numel() * p.element_size() for p in params)
    tensors = [
        t
        for p in params
        for key, t in opt.state[p].items()
        if key not in ("step", "stream", "shape")
    ]
    state = sum(t.numel() * t.element_size() for t in tensors)
    return {"weights": weights / count, "gradient": weights / count, "state": state / count}


def state_dicts(model: nn.Module, opt: torch.optim.Optimizer, step: int) -> dict:
    return {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, opt),
        "progress": {"step": torch.tensor(step)},
    }


def save(model: nn.Module, opt: torch.optim.Optimizer, step: int, folder: str) -> None:
    dcp.save(state_dicts(model, opt, step), checkpoint_id=folder, no_dist=not dist.is_initialized())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("files", nargs="*", help="text files (default: Python's standard library)")
    parser.add_argument("--optimizer", choices=["lowbit", "torch"], default="lowbit")
    parser.add_argument(
        "--rule", default="AdamW", help="lowbit's optimizer: AdamW, Adafactor, CAME, Lion, ..."
    )
    parser.add_argument(
        "--state-format", default="8bit", help="8bit, 4bit, fp8, log8, factored4, ..."
    )
    parser.add_argument(
        "--param-format",
        default="auto",
        help="auto (stochastic rounding), nearest, bfloat16_kahan, ...",
    )
    parser.add_argument(
        "--options",
        type=json.loads,
        default={},
        help='further arguments of the rule as JSON, such as {"state_memory": "pinned"}',
    )
    parser.add_argument(
        "--compute",
        choices=["auto", "bfloat16", "float32"],
        default="auto",
        help=(
            "the dtype of products; auto: that of the weights, or float32 where the processor has "
            "no instructions for bfloat16"
        ),
    )
    parser.add_argument(
        "--parallel", choices=["fsdp", "ddp"], default="fsdp", help="with more than one rank"
    )
    parser.add_argument(
        "--steps", type=int, default=200, help="total steps, including those before a resume"
    )
    parser.add_argument(
        "--schedule", type=int, help="steps of the learning rate schedule (default: --steps)"
    )
    parser.add_argument("--batch", type=int, default=24, help="sequences per step, over all ranks")
    parser.add_argument(
        "--exact",
        type=int,
        metavar="M",
        help=(
            "cut each batch into M micro-batches, deal them to the ranks and add their gradients "
            "without rounding: the weights then have the same bits on any number of ranks"
        ),
    )
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--save", metavar="DIR", help="write a checkpoint at the end")
    parser.add_argument(
        "--save-step", type=int, metavar="N", help="write it after step N instead, and continue"
    )
    parser.add_argument(
        "--resume", metavar="DIR", help="start from a checkpoint of any number of ranks"
    )
    parser.add_argument(
        "--metrics",
        metavar="FILE",
        help="write one JSON line per step and a final summary line",
    )
    parser.add_argument("--plot", metavar="PNG", help="plot the loss")
    parser.add_argument(
        "--digest", action="store_true", help="add digests of weights and state to the summary"
    )
    args = parser.parse_args()
    if args.save_step is not None and args.save is None:
        parser.error("--save-step needs --save")
    if args.exact is not None and (args.exact < 1 or args.batch % args.exact != 0):
        parser.error(
            f"--exact {args.exact}: the batch of {args.batch} sequences must be a multiple of it"
        )
    return args


def main() -> None:
    args = arguments()
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    device = torch.device(
        args.device, int(os.environ.get("LOCAL_RANK", "0")) if args.device == "cuda" else None
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)  # a mesh shards on the current device
    if ranks > 1:
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    torch.manual_seed(args.seed)
    text = Text(args.files, args.context)
    weights = torch.bfloat16 if args.optimizer == "lowbit" else torch.float32
    compute = (
        compute_dtype(weights, args.device)
        if args.compute == "auto"
        else getattr(torch, args.compute)
    )
    model: nn.Module = GPT(args.width, args.depth, args.heads, args.context, compute)
    model.to(device, weights)
    forward = model
    if ranks > 1 and args.parallel == "fsdp":
        mesh = init_device_mesh(args.device, (ranks,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif ranks > 1:
        forward = nn.parallel.DistributedDataParallel(model)
    options = {"lr": args.lr, "weight_decay": args.weight_decay}
    if args.optimizer == "lowbit":
        if args.rule in ("Adam", "AdamW"):
            options["betas"] = (0.9, 0.95)
        opt: torch.optim.Optimizer = getattr(lowbit, args.rule)(
            lowbit.param_groups(model),
            seed=args.seed,
            state_format=args.state_format,
            param_format=args.param_format,
            **{**options, **args.options},
        )
    else:
        opt = torch.optim.AdamW(model.named_parameters(), betas=(0.9, 0.95), **options)

    accumulator = None
    if args.exact is not None:
        accumulator = lowbit.accumulate(
            forward, rounding="exact", average=args.exact, seed=args.seed
        )
    begin = 0
    summary: dict[str, object] = {"optimizer": args.optimizer, "ranks": ranks}
    if args.resume:
        saved = state_dicts(model, opt, 0)
        dcp.load(saved, checkpoint_id=args.resume, no_dist=ranks == 1)
        set_model_state_dict(model, saved["model"])
        set_optimizer_state_dict(model, opt, saved["optim"])
        begin = int(saved["progress"]["step"])
        if accumulator is not None:
            accumulator.load_state_dict({"steps": begin})
        if args.digest:
            summary["digest_loaded"] = digest(model, opt)
    schedule = args.schedule or args.steps
    save_step = args.steps if args.save_step is None else args.save_step
    if args.save_step is not None and not begin < save_step <= args.steps:
        sys.exit(f"--save-step {save_step} is not among the steps {begin + 1} to {args.steps}")

    lines = []
    seconds = 0.0
    steps = range(begin, args.steps)
    for step in tqdm(steps, desc=args.optimizer, disable=rank != 0 or not sys.stderr.isatty()):
        start = time.perf_counter()
        warm, done = min(1.0, (step + 1) / 20), step / max(schedule, 1)
        for group in opt.param_groups:
            group["lr"] = args.lr * warm * (0.1 + 0.45 * (1 + math.cos(math.pi * min(done, 1.0))))
        if accumulator is None:
            loss = loss_of(forward, text.batch(args.seed, step, args.batch, rank, ranks).to(device))
            loss.backward()
        else:
            for index in accumulator.indices():
                rows = text.batch(args.seed, step, args.batch, index or 0, args.exact).to(device)
                with accumulator.micro(index=index):
                    loss = loss_of(forward, rows)
                    loss.backward()
                    accumulator.log(loss)
        opt.step()
        opt.zero_grad()
        mean = loss_over_ranks(loss, ranks) if accumulator is None else accumulator.loss()
        lines.append({"step": step + 1, "loss": mean})
        seconds += time.perf_counter() - start
        if args.save and step + 1 == save_step:
            save(model, opt, step + 1, args.save)
            if args.digest:
                summary["digest_saved"] = digest(model, opt)
    if args.save and not len(steps):
        save(model, opt, args.steps, args.save)
    summary["seconds_per_step"] = seconds / max(len(steps), 1)

    rows = max(24, ranks)  # in all, not on each rank: any number of ranks sees the same text
    with torch.no_grad():
        held_out = [text.batch(1, i, rows, rank, ranks, held_out=True).to(device) for i in range(4)]
        losses = torch.stack([loss_of(forward, ids) * len(ids) / rows for ids in held_out]).mean()
    if ranks > 1:
        dist.all_reduce(losses)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # after a forward without backward the root still has unsharded parameters
            module.reshard()
    summary["step"] = args.steps
    summary["train_loss"] = sum(line["loss"] for line in lines[-20:]) / max(len(lines[-20:]), 1)
    summary["held_out_loss"] = losses.item()
    summary["bytes_per_parameter"] = footprint(model, opt)
    summary["parameters"] = sum(p.numel() for p in model.parameters())
    if args.digest:
        summary["digest"] = digest(model, opt)
    if rank == 0:
        if args.metrics:
            path = pathlib.Path(args.metrics)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, summary]))
        if args.plot:
            plot(lines, args.plot, args.optimizer)
        print(json.dumps(summary))


def plot(lines: list[dict], path: str, label: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.figure(figsize=(7, 4))
    pyplot.plot([line["step"] for line in lines], [line["loss"] for line in lines], label=label)
    pyplot.xlabel("step")
    pyplot.ylabel("loss, nats per byte")
    pyplot.legend()
    pyplot.tight_layout()
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    pyplot.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        gc.collect()  # gloo aborts at exit if a sharded tensor outlives it
        dist.barrier()
        dist.destroy_process_group()
