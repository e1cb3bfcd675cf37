"""One card, a large model: tunes a decoder of transformers in bfloat16, with gradients released in
the backward pass, 8-bit state in the host's memory, checkpointed layers, and a loss in chunks.

    python recipes/one_card.py                                  # a small model, on whatever is here
    python recipes/one_card.py --model llama-8b --memory 24GiB  # a configuration, or its weights
    python recipes/one_card.py --state card --preset 4bit       # 4-bit state, on the card
    python recipes/one_card.py --optimizer torch                # float32 AdamW, to compare
    python recipes/one_card.py --no-save                        # measures, and keeps nothing

A second run with the same `--out` resumes, and ends with the bits of one that never stopped. The
last line has the tokens a second, and compares the peak with `lowbit.estimate`. `--memory` is a
limit that the process cannot exceed. Text is that of Python's standard library, or of `--text`; a
folder's own tokenizer reads it, and without one its bytes are the tokens.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import pathlib
import resource
import sys
import time
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from train_gpt import Text

import lowbit
from lowbit.config.size import parsed
from lowbit.planning.trace import checkpoint_layers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OPTIMIZERS = ("lowbit", "torch", "torchao", "torchao-offload", "bitsandbytes")
WARM = 2  # steps that come before the speed is measured
M_MMAP_THRESHOLD = -3  # of malloc.h
SMALL = {  # 34 M parameters
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
TINY = {**SMALL, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}


def main() -> None:
    args = arguments()
    plan = estimated(args) if args.memory or args.optimizer == "lowbit" else None
    if args.memory is not None:
        print(plan, flush=True)
        limit_memory(parsed(args.memory))
    if DEVICE.type == "cpu":  # glibc gives freed tensors back to the system from 64 KiB on
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    batches = Batches(args)
    warm_up(args)
    before = forget_peak()
    torch.manual_seed(args.seed)
    model = made(args, configuration(args), pathlib.Path(args.model or ""))
    opt = optimizer(args, model)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: max(0.0, 1 - step / 10_000))
    path = args.out / "run.pt"
    begin = load(path, model, opt, schedule) if args.save and path.exists() else 0
    if begin and DEVICE.type == "cpu":
        forget_peak()  # pages of the mapped file counted as resident; the system takes them back
    speed = train(args, model, opt, schedule, batches, begin)
    peak = peak_memory() - before
    if args.save:
        save(path, model, opt, schedule, begin + args.steps)
    if args.export:
        model.save_pretrained(args.export)  # safetensors, and config.json
    values = {"optimizer": args.optimizer, "tokens_per_second": speed, "peak": peak}
    values["parameters"] = sum(p.numel() for p in model.parameters())
    print(json.dumps({**values, **beside_estimate(args, peak, plan)}), flush=True)


def train(
    args: argparse.Namespace,
    model: nn.Module,
    opt: Any,
    schedule: Any,
    batches: Batches,
    begin: int,
) -> float | None:
    """Takes the steps from `begin` on. Returns the tokens a second, None of too few steps."""
    end, began = begin + args.steps, now()
    for step in range(begin, end):
        if step == begin + WARM:
            began = now()
        loss = lowbit.causal_loss(model, batches(step).to(DEVICE), chunk=args.chunk)
        loss.backward()
        opt.step()
        opt.zero_grad()
        schedule.step()
        if step % 10 == 0 or step == end - 1:
            print(f"step {step}, loss {loss.item():.3f}", flush=True)
    if args.steps <= WARM:
        return None
    tokens = args.micro_batch * args.context * (args.steps - WARM)
    return round(tokens / (now() - began), 1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--model", metavar="PATH", help="a folder of transformers, or a config.json (a small one)")
    add("--memory", metavar="SIZE", help="what the process may use, such as 24GiB (all there is)")
    add("--optimizer", choices=OPTIMIZERS, default="lowbit")
    add("--state", choices=("host", "card"), default="host", help="where lowbit's state lies")
    add("--preset", default="8bit", help="lowbit's state_format (8bit)")
    add("--overlap", metavar="SIZE", help="steps beside the backward pass; so much waits: 256MiB")
    add("--keep-gradients", action="store_true", help="until the step, as other optimizers do")
    add("--steps", type=int, default=20)
    add("--micro-batch", type=int, default=1)
    add("--context", type=int, default=512)
    add("--chunk", type=int, default=512, help="positions whose logits exist at once")
    add("--lr", type=float, default=1e-4)
    add("--seed", type=int, default=0)
    add("--text", nargs="*", default=[], metavar="FILE")
    add("--out", type=pathlib.Path, default=pathlib.Path("out/one_card"))
    add("--export", metavar="FOLDER", help="writes safetensors at the end")
    add("--no-save", dest="save", action="store_false", help="neither resumes nor saves the run")
    args = parser.parse_args()
    args.keep_gradients |= args.optimizer != "lowbit"
    return args


# Model and optimizer


def made(args: argparse.Namespace, config: Any, folder: pathlib.Path | None = None) -> Any:
    """The model with its layers checkpointed: the folder's weights, or random ones."""
    dtype = torch.float32 if args.optimizer == "torch" else torch.bfloat16
    weights = ("*.safetensors", "pytorch_model*.bin")  # .bin is unpickled by torch, tensors alone
    if args.model and folder is not None and any(any(folder.glob(each)) for each in weights):
        load: Any = transformers.AutoModelForCausalLM.from_pretrained
        model = load(folder, dtype=dtype, local_files_only=True).to(DEVICE)
    else:
        with DEVICE:
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.train()
    checkpoint_layers(model, True)
    return model


def configuration(args: argparse.Namespace) -> Any:
    if args.model is None:
        return transformers.LlamaConfig.from_dict(SMALL)
    return transformers.AutoConfig.from_pretrained(args.model, local_files_only=True)


def state_memory(args: argparse.Namespace) -> Any:
    return "pinned" if args.state == "host" else "device"


def optimizer(args: argparse.Namespace, model: nn.Module) -> Any:
    if args.optimizer == "torch":
        return torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    if args.optimizer == "torchao":
        from torchao.optim import AdamW8bit

        return AdamW8bit(model.parameters(), lr=args.lr, bf16_stochastic_round=True)
    if args.optimizer == "torchao-offload":
        from torchao.optim import CPUOffloadOptimizer

        adamw = torch.optim.AdamW
        return CPUOffloadOptimizer(model.parameters(), adamw, offload_gradients=True, lr=args.lr)
    if args.optimizer == "bitsandbytes":
        from bitsandbytes.optim import PagedAdamW8bit

        return PagedAdamW8bit(model.parameters(), lr=args.lr)
    opt = lowbit.AdamW(
        lowbit.param_groups(model),
        lr=args.lr,
        state_format=args.preset,
        state_memory=state_memory(args),
        seed=args.seed,
    )
    if not args.keep_gradients:
        beside = {} if args.overlap is None else {"overlap": True, "waiting": args.overlap}
        lowbit.step_in_backward(model, opt, **beside)
    return opt


class Batches:
    """The tokens of a step: int64 [micro_batch, context], the same whenever they are asked for."""

    def __init__(self, args: argparse.Namespace) -> None:
        vocabulary = configuration(args).vocab_size
        self.size, self.seed = args.micro_batch, args.seed
        text = Text(args.text, args.context)
        if args.model and (pathlib.Path(args.model) / "tokenizer.json").exists():
            load = transformers.AutoTokenizer.from_pretrained
            tokenizer = load(args.model, local_files_only=True)
            words = tokenizer(bytes(text.train).decode(errors="replace"))["input_ids"]
            text.train = torch.tensor(words)
        elif vocabulary < 256:
            sys.exit(f"the vocabulary of {vocabulary} cannot hold bytes: give a folder a tokenizer")
        self.text = text

    def __call__(self, step: int) -> Tensor:
        return self.text.batch(self.seed, step, self.size, 0, 1)[:, :-1]


# Saved runs


def save(path: pathlib.Path, model: nn.Module, opt: Any, schedule: Any, step: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "optimizer": opt.state_dict()}
    torch.save({**state, "schedule": schedule.state_dict(), "step": step}, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)  # the old one is whole until the new one is


def load(path: pathlib.Path, model: nn.Module, opt: Any, schedule: Any) -> int:
    saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    model.load_state_dict(saved["model"])
    opt.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    return int(saved["step"])


# Time and memory


def now() -> float:
    """Seconds, once the GPU has done what it was given."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def warm_up(args: argparse.Namespace) -> None:
    """Runs a step of a tiny model, so that what libraries load once is not taken for the run's."""
    model = made(args, transformers.LlamaConfig.from_dict(TINY))
    opt = optimizer(args, model)
    lowbit.causal_loss(model, torch.zeros(1, 64, dtype=torch.int64, device=DEVICE)).backward()
    opt.step()


def estimated(args: argparse.Namespace) -> Any:
    """The plan of this run under lowbit, and of its peers."""
    return lowbit.estimate(
        configuration(args),
        dtype=torch.bfloat16,
        device_memory=args.memory,
        state_format=args.preset,
        state_memory=state_memory(args),
        step_in_backward=not args.keep_gradients,
        waiting=None if args.keep_gradients else args.overlap,
        micro_batch=args.micro_batch,
        context=args.context,
        checkpointing=True,
        loss_chunk=args.chunk,
    )


def limit_memory(size: int) -> None:
    """Lets this process have no more than `size` bytes of the GPU, or of new memory on a CPU."""
    if DEVICE.type == "cuda":
        whole = torch.cuda.get_device_properties(DEVICE).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, size / whole))
        return
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + size, hard))


def forget_peak() -> int:
    """Begins the measurement of the peak, and returns the bytes in use."""
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM becomes VmRSS
    return status("VmRSS")


def peak_memory() -> int:
    return torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else status("VmHWM")


def status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def beside_estimate(args: argparse.Namespace, peak: int, estimate: Any) -> dict[str, float]:
    """The estimated peak of lowbit, and the measured one as a multiple of it."""
    if args.optimizer != "lowbit":
        return {}
    plan = estimate.fit.plans["lowbit"]
    expected = plan.peak + (plan.host if DEVICE.type == "cpu" else 0)  # a CPU's state is at home
    return {"estimate": expected, "ratio": round(peak / expected, 3)}


if __name__ == "__main__":
    main()
