"""What one GPU shows beside bench.speed.step: kernels of a step, the bus, Muon, and training.

python -m bench.gpu.card kernels muon              some measurements, as tables in Markdown
python -m bench.gpu.card --json FILE bus           also as JSON, rewritten after each table
python -m bench.gpu.card --device cpu --tiny       all of them in seconds, for a rehearsal
python -m bench.gpu.card profiled                  one step of each kernel that ncu is to see
"""

from __future__ import annotations

import argparse
import gc
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import lowbit
from bench.contestants import ours
from bench.measuring import clock
from bench.measuring.workload import LLAMA_1B, MANY, QUARTER
from bench.pages.page import table
from bench.speed.step import Params, short

Table = dict[str, Any]  # title, head, rows
# What `train` compares, of bench/speed/training.py.
TRAINED = (
    "torch fused, float32",
    "torch fused, bf16 nearest",
    "lowbit 8-bit, bf16 stochastic",
    "lowbit 4-bit, bf16 stochastic",
)


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
    """Copies between host and GPU, one way and both, beside steps over state of the host."""
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
    yield offloaded(card)


def offloaded(card: Card) -> Table:
    """A backward pass and a step with state in the host's memory, in the ways of lowbit and beside
    torchao's CPUOffloadOptimizer, which steps there; and the memory of the GPU.
    """
    layers, width, batch = (4, 64, 8) if card.tiny else (16, 4096, 2048)

    def own(memory: Any, **released: Any) -> Callable[[Any], Any]:
        def make(net: Any) -> Any:
            opt = lowbit.AdamW(net.named_parameters(), state_memory=memory)
            if released:
                lowbit.step_in_backward(net, opt, **released)
            return opt

        return make

    def torchao(net: Any) -> Any:
        from torchao.optim import CPUOffloadOptimizer

        return CPUOffloadOptimizer(net.parameters(), torch.optim.AdamW, offload_gradients=True)

    ways: dict[str, Callable[[Any], Any]] = {
        "lowbit, state on the GPU": own("device"),
        "lowbit, pinned state": own("pinned"),
        "lowbit, pinned state, in the backward pass": own("pinned", overlap=False),
        "lowbit, pinned state, beside the backward pass": own("pinned", overlap=True),
    }
    if card.device == "cuda":  # torchao asserts CUDA or XPU
        ways["torchao CPUOffloadOptimizer, gradients offloaded"] = torchao
    rows = []
    for name, make in ways.items():
        before = active(card)  # hooks keep the models of earlier ways
        made = [torch.nn.Linear(width, width, bias=False) for _ in range(layers)]
        net = torch.nn.Sequential(*made).to(card.device, torch.bfloat16)
        x = torch.randn(batch, width, device=card.device, dtype=torch.bfloat16)
        try:
            seconds, peak = offloaded_step(card, net, x, make)
            rows.append([name, f"{seconds * 1e3:.2f}", f"{(peak - before) / 2**30:.2f}"])
        except Exception as error:  # a line of the table, since the others are worth knowing
            rows.append([name, short(error), ""])
        del made, net, x
    head = ["", "ms", "peak GiB of the GPU"]
    title = f"State in the host's memory: a backward pass and a step, {layers * width**2:,} values"
    return {"title": title, "head": head, "rows": rows}


def offloaded_step(
    card: Card, net: Any, x: torch.Tensor, make: Callable[[Any], Any]
) -> tuple[float, int]:
    """Seconds of a backward pass and a step, and the most bytes that tensors had on the GPU."""
    opt = make(net)

    def run() -> None:
        net(x).float().square().mean().backward()
        opt.step()
        opt.zero_grad()

    run()
    if card.device != "cuda":
        return card.seconds(run), 0
    torch.cuda.reset_peak_memory_stats()
    seconds = card.seconds(run)
    return seconds, int(torch.cuda.memory_stats()["active_bytes.all.peak"])


def active(card: Card) -> int:
    """Bytes of the GPU that tensors have, with those that another stream still reads."""
    gc.collect()
    if card.device != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # polls the events of what other streams used
    return int(torch.cuda.memory_stats()["active_bytes.all.current"])


def muon(card: Card) -> Iterator[Table]:
    """A step of Muon over matrices of a few layers, beside torch.optim.Muon, at last compiled."""
    layer = [shape for shape in LLAMA_1B.layer if len(shape) == 2]
    shapes = [(16, 32), (32, 16)] if card.tiny else layer * 4
    params = Params(shapes, card.device).of(torch.bfloat16)
    ways: dict[str, Callable[[], Callable[[], object]]] = {
        "torch.optim.Muon": lambda: torch.optim.Muon(params).step,
        "lowbit.Muon, torch": lambda: lowbit.Muon(params, orthogonalize="torch").step,
        "lowbit.Muon, exact": lambda: lowbit.Muon(params, orthogonalize="exact").step,
    }
    if not card.tiny:  # a compilation takes longer than all the others together
        ways["torch.optim.Muon, compiled"] = lambda: torch.compile(torch.optim.Muon(params).step)
    rows = []
    for name, make in ways.items():
        try:
            rows.append([name, f"{card.seconds(make()) * 1e3:.2f}"])
        except Exception as error:  # a line of the table, since the others are worth knowing
            rows.append([name, short(error)])
        yield {"title": f"Muon, {len(shapes)} matrices", "head": ["", "ms"], "rows": rows}


def train(card: Card) -> Iterator[Table]:
    """A GPT of 124 M parameters on random bytes: the same data and start for each optimizer."""
    from bench.measuring.recipe import load_recipe
    from bench.speed import training

    recipe = load_recipe()
    small, whole = (32, 1, 2, 16, 3), (768, 12, 16, 512, 60)
    width, depth, batch, context, steps = small if card.tiny else whole
    data = torch.Generator().manual_seed(1)
    ids = torch.randint(64, (batch * steps, context + 1), generator=data).square_() % 256
    rows = []
    for name in TRAINED:
        dtype, make = training.TRAINED[name]
        before = active(card)  # what earlier rows left
        torch.manual_seed(0)
        model = recipe.GPT(width, depth, max(1, width // 64), context).to(card.device, dtype)
        named = list(model.named_parameters())
        opt = make(lowbit, named)
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
        peak = torch.cuda.max_memory_allocated() - before if card.device == "cuda" else 0
        last = float(torch.stack(losses[-max(1, steps // 6) :]).mean())
        rows.append([name, f"{tokens:,.0f}", f"{peak / 2**30:.2f}", f"{last:.4f}"])
        title = f"Training {sum(p.numel() for p in model.parameters()):,} parameters"
        head = ["optimizer", "tokens a second", "peak GiB", "loss at the end"]
        yield {"title": title, "head": head, "rows": rows}
        del model, named, opt, loss, losses


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
    parser.add_argument(
        "measurements", nargs="*", choices=[*names, []], metavar="NAME", help=", ".join(names)
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    given = parser.parse_args()
    found: dict[str, Table] = {}  # by title: a table that grows is yielded again
    for name in given.measurements or names:
        for made in MEASUREMENTS[name](Card(given.device, given.tiny)):
            found[made["title"]] = made
            print(f"### {made['title']}\n\n{table(made['head'], made['rows'])}\n", flush=True)
            if given.json:
                given.json.write_text(json.dumps({"tables": list(found.values())}, indent=1) + "\n")


if __name__ == "__main__":
    main()
