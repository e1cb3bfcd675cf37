"""What one GPU shows beside the steps of bench.step: kernels of a step, the bus, Muon, and training.

python -m bench.card kernels muon              some measurements, as tables in Markdown
python -m bench.card --json FILE bus           also as JSON, written anew after each table
python -m bench.card --device cpu --tiny       all of them in seconds, for a rehearsal
python -m bench.card profiled                  one step of each kernel that is worth a profile, for ncu
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import lowbit
from bench import clock, ours
from bench.page import table
from bench.step import Params
from bench.workload import MANY, QUARTER, Shapes

Table = dict[str, Any]  # title, head, rows
# The matrices of a layer of Llama-3.2-1B.
LAYER: Shapes = [(2048, 2048), (512, 2048), (512, 2048), (2048, 2048), (8192, 2048), (8192, 2048), (2048, 8192)]  # fmt: skip


class Card:
    """A device, and how much is measured on it."""

    def __init__(self, device: str, tiny: bool) -> None:
        self.device, self.tiny = device, tiny

    def seconds(self, run: Callable[[], object]) -> float:
        """The least time of several runs, after one to warm up."""
        run()
        return min(clock.seconds(run, self.device) for _ in range(2 if self.tiny else 5))

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def kernels(card: Card) -> Iterator[Table]:
    """Time of each kernel in one step, by torch's profiler, and of the host."""
    from torch.profiler import ProfilerActivity, profile

    cuda = card.device == "cuda"
    for workload in (MANY, QUARTER):
        shapes, _ = workload.shapes(1 << 14 if card.tiny else 1 << 28)
        rows = []
        for kind in (ours.Eight, ours.Factored, ours.FactoredAdamW, ours.Came, ours.Logarithmic):
            entry = kind()
            entry.prepare(Params(shapes, card.device).of(entry.dtype))
            host = []
            for _ in range(3 if card.tiny else 12):
                card.wait()
                began = time.perf_counter()
                entry.step()
                host.append(time.perf_counter() - began)
            card.wait()
            rows.append([entry.name, "the host", "1", f"{statistics.median(host) * 1e6:,.0f}"])
            activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
            with profile(activities=[activity], acc_events=True) as seen:
                entry.step()
                card.wait()
            for e in sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total):
                if cuda and e.self_device_time_total > 0:
                    called = e.key.replace("void ", "").replace("lowbit::cuda::", "")[:60]
                    rows.append(["", called, str(e.count), f"{e.self_device_time_total:,.1f}"])
            del entry
        head = ["step", "kernel", "launches", "microseconds"]
        yield {"title": f"One step over {workload.name}", "head": head, "rows": rows}


def bus(card: Card) -> Iterator[Table]:
    """Copies between the host and the GPU, one way and both at once, beside steps over state that lies in the host's memory."""
    count = 1 << 14 if card.tiny else 1 << 28
    rows = []
    if card.device == "cuda":
        host = [torch.empty(2 * count, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        there = [torch.empty(2 * count, dtype=torch.uint8, device="cuda") for _ in range(2)]
        side = torch.cuda.Stream()

        def both() -> None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                host[1].copy_(there[1], non_blocking=True)
            there[0].copy_(host[0], non_blocking=True)
            torch.cuda.current_stream().wait_stream(side)

        ways: tuple[tuple[str, Callable[[], object]], ...] = (
            ("copy to the GPU", lambda: there[0].copy_(host[0], non_blocking=True)),
            ("copy from the GPU", lambda: host[0].copy_(there[0], non_blocking=True)),
            ("both at once", both),
        )
        for name, run in ways:
            seconds = card.seconds(run)
            rows.append([name, f"{seconds * 1e3:.2f}", f"{2 * count / seconds / 1e9:.1f}"])
        del host, there
    shape = (1 << (count.bit_length() - 1) // 2,) * 2
    for memory in ("device", "pinned", "managed"):
        p = torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16, device=card.device))
        p.grad = torch.full_like(p, 1e-3)
        opt = lowbit.AdamW([p], state_memory=memory)
        seconds = card.seconds(opt.step)
        rate = f"{2 * count / seconds / 1e9:.1f}"
        rows.append([f"step, {memory} state", f"{seconds * 1e3:.2f}", rate])
        del opt
    head = ["", "ms", "GB/s of codes in each direction"]
    yield {"title": f"The bus, 8-bit state of {count:,} values", "head": head, "rows": rows}


def muon(card: Card) -> Iterator[Table]:
    """A step of Muon over the matrices of a few layers, beside torch.optim.Muon, compiled and not."""
    shapes = [(16, 32), (32, 16)] if card.tiny else LAYER * 4
    params = Params(shapes, card.device).of(torch.bfloat16)
    rows = []

    def add(name: str, make: Callable[[], Callable[[], object]]) -> None:
        try:
            rows.append([name, f"{card.seconds(make()) * 1e3:.2f}"])
        except Exception as error:  # a line of the table, since the others are worth knowing
            rows.append([name, f"{type(error).__name__}: {str(error)[:100]}"])

    add("torch.optim.Muon", lambda: torch.optim.Muon(params).step)
    for way in ("torch", "exact"):
        add(f"lowbit.Muon, {way}", lambda way=way: lowbit.Muon(params, orthogonalize=way).step)
    if not card.tiny:
        add("torch.optim.Muon, compiled", lambda: torch.compile(torch.optim.Muon(params).step))
    yield {"title": f"Muon, {len(shapes)} matrices", "head": ["", "ms"], "rows": rows}


def train(card: Card) -> Iterator[Table]:
    """A GPT of 124 M parameters on random bytes of a fixed kind: the same data and start for each optimizer."""
    from bench.training import load_recipe

    recipe = load_recipe()
    width, depth, batch, context, steps = (32, 1, 2, 16, 3) if card.tiny else (768, 12, 16, 512, 60)
    data = torch.Generator().manual_seed(1)
    ids = torch.randint(64, (batch * steps, context + 1), generator=data).square_() % 256
    rows = []
    for name, dtype, make in (
        ("torch fused, float32", torch.float32, lambda named: torch.optim.AdamW([p for _, p in named], fused=True)),
        ("torch fused, bf16 nearest", torch.bfloat16, lambda named: torch.optim.AdamW([p for _, p in named], fused=True)),
        ("lowbit 8-bit, bf16 stochastic", torch.bfloat16, lowbit.AdamW),
        ("lowbit 4-bit, bf16 stochastic", torch.bfloat16, lambda named: lowbit.AdamW(named, state_format="4bit")),
    ):  # fmt: skip
        torch.manual_seed(0)
        model = recipe.GPT(width, depth, max(1, width // 64), context).to(card.device, dtype)
        named = list(model.named_parameters())
        opt = make(named)
        if card.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        losses = []
        for step in range(steps):
            if step == steps // 3:  # what came before warmed up
                card.wait()
                began = time.perf_counter()
            loss = recipe.loss_of(model, ids[step * batch : (step + 1) * batch].to(card.device))
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.detach())
        card.wait()
        tokens = batch * context * (steps - steps // 3) / (time.perf_counter() - began)
        peak = torch.cuda.max_memory_allocated() / 2**30 if card.device == "cuda" else 0.0
        last = float(torch.stack(losses[-max(1, steps // 6) :]).mean())
        rows.append([name, f"{tokens:,.0f}", f"{peak:.2f}", f"{last:.4f}"])
        del model, named, opt, loss, losses
    count = sum(p.numel() for p in recipe.GPT(width, depth, 1, context).parameters())
    head = ["optimizer", "tokens a second", "peak GiB", "loss at the end"]
    yield {"title": f"Training {count:,} parameters", "head": head, "rows": rows}


def profiled(card: Card) -> Iterator[Table]:
    """One step of each kernel that is worth a profile."""
    shape = (32, 512) if card.tiny else (1 << 13, 1 << 13)
    params = Params([shape], card.device)
    for kind in (ours.Eight, ours.Four, ours.Logarithmic, ours.Factored):
        entry = kind()
        entry.prepare(params.of(entry.dtype))
        del entry
    yield {"title": "Profiled", "head": ["steps"], "rows": [["4"]]}


MEASUREMENTS = {f.__name__: f for f in (kernels, bus, muon, train, profiled)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(MEASUREMENTS)
    parser.add_argument("measurements", nargs="*", choices=[*names, []], metavar="NAME", help=", ".join(names))  # fmt: skip
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    given = parser.parse_args()
    found: list[Table] = []
    for name in given.measurements or names:
        for made in MEASUREMENTS[name](Card(given.device, given.tiny)):
            found.append(made)
            print(f"### {made['title']}\n\n{table(made['head'], made['rows'])}\n", flush=True)
            if given.json:
                given.json.write_text(json.dumps({"tables": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
