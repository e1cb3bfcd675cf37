"""The optimizer step alone: lowbit beside torch's fused AdamW, torchao, bitsandbytes, and a copy of the same bytes.

    python -m bench.step                      one tensor of 64 M, 1,000 of 64 k, at 1 and 2 threads
    python -m bench.step --json out/step.json --markdown bench/results/step.md
    python -m bench.step --quick              does it run? some seconds, no peers

All contenders of a case take their steps in turn, round by round, in one process; the table gives medians and the ratio to torch's fused float32
step of the same rounds. Times of two runs are not to be compared, ratios are.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version

import torch

import lowbit

STEP_BYTES = (
    10.06  # read and written by an 8-bit step on bfloat16 weights and gradients, per parameter
)


@dataclass
class Contender:
    name: str
    step: Callable[[], object]
    state_bytes: float | None = None  # per parameter
    weight_bytes: float = 0


def parameters(
    count: int, shape: tuple[int, int], dtype: torch.dtype, device: str
) -> list[torch.nn.Parameter]:
    params = []
    for _ in range(count):
        p = torch.nn.Parameter(torch.randn(shape, device=device).mul_(0.02).to(dtype))
        p.grad = torch.randn(shape, device=device).mul_(1e-3).to(dtype)
        params.append(p)
    return params


def optimizer(
    name: str, dtype: torch.dtype, make: Callable, count: int, shape: tuple[int, int], device: str
) -> Contender:
    params = parameters(count, shape, dtype, device)
    opt = make(params)
    opt.step()
    numel = sum(p.numel() for p in params)
    tensors = [
        t
        for p in params
        for key, t in opt.state[p].items()
        if isinstance(t, torch.Tensor) and t.ndim > 0 and "qmap" not in key
    ]
    state = sum(tensor_bytes(t) for t in tensors) / numel
    if any("__bnb_optimizer_quant_state__" in opt.state[p] for p in params):
        state = float("nan")
    return Contender(name, opt.step, state, 2.0 * params[0].element_size())


def tensor_bytes(t: torch.Tensor) -> int:
    codes = getattr(t, "codes", None)  # torchao's subclasses
    return (
        codes.numel() * codes.element_size() + t.scale.numel() * 4
        if codes is not None
        else t.numel() * t.element_size()
    )


def copy(count: int, shape: tuple[int, int], device: str) -> Contender:
    """copy_ of half of STEP_BYTES for each parameter: as much is read and written as an 8-bit step moves."""
    size = int(count * shape[0] * shape[1] * STEP_BYTES / 2)
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    return Contender("copy of the same bytes", lambda: target.copy_(source))


def contenders(
    count: int, shape: tuple[int, int], device: str, peers: bool
) -> tuple[list[Contender], list[str]]:
    bf16, f32 = torch.bfloat16, torch.float32
    case = (count, shape, device)
    found = [
        optimizer(
            "torch AdamW fused, float32", f32, lambda p: torch.optim.AdamW(p, fused=True), *case
        ),
        optimizer("lowbit 8-bit, bfloat16 stochastic", bf16, lambda p: lowbit.AdamW(p), *case),
        optimizer("lowbit 8-bit, float32", f32, lambda p: lowbit.AdamW(p), *case),
        optimizer(
            "torch AdamW fused, bfloat16", bf16, lambda p: torch.optim.AdamW(p, fused=True), *case
        ),
        copy(*case),
    ]
    missing = []
    if peers:
        for package, label, make in (
            ("torchao", "torchao AdamW8bit, bfloat16 stochastic", torchao_adamw),
            ("bitsandbytes", "bitsandbytes AdamW8bit, bfloat16", bitsandbytes_adamw),
        ):
            if importlib.util.find_spec(package) is None:
                missing.append(f"{package}: not installed")
                continue
            try:
                found.append(optimizer(label, bf16, make, *case))
            except Exception as error:
                missing.append(
                    f"{package}: does not run here: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
                )
    return found, missing


def torchao_adamw(params: list) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(params, bf16_stochastic_round=True)


def bitsandbytes_adamw(params: list) -> torch.optim.Optimizer:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(params)


def clock(run: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(
    entries: list[Contender], rounds: int, budget: float, device: str
) -> dict[str, list[float]]:
    """Seconds of each step. A contender that has used up its seconds sits out the later rounds."""
    times: dict[str, list[float]] = {c.name: [] for c in entries}
    for c in entries:
        clock(c.step, device)
    for number in range(rounds):
        for c in entries:
            if number < 2 or sum(times[c.name]) < budget:
                times[c.name].append(clock(c.step, device))
    return times


def machine(device: str) -> dict[str, str | int]:
    cpu = platform.processor()
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        fields = dict(
            line.split(":", 1)
            for line in info.read_text().split("\n\n")[0].splitlines()
            if ":" in line
        )
        fields = {key.strip(): value.strip() for key, value in fields.items()}
        cpu = f"{fields.get('model name', cpu)} (family {fields.get('cpu family')}, model {fields.get('model')})"
    versions = {}
    for package in ("torch", "lowbit", "torchao", "bitsandbytes"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    gpu = {"gpu": torch.cuda.get_device_name()} if device == "cuda" else {}
    return {"date": date.today().isoformat(), "cpu": cpu, "cores": torch.multiprocessing.cpu_count(), "isa": lowbit.catalog()["isa"],
            "python": platform.python_version(), **gpu, **versions}  # fmt: skip


def table(results: list[dict]) -> str:
    lines = []
    for r in results:
        lines += [
            "",
            f"### {r['case']}, {r['threads']} thread{'s' if r['threads'] > 1 else ''}",
            "",
        ]
        lines += [
            "| step | ns per parameter | to torch fused float32 | to the copy | state B/param | weight + gradient + state |"
        ]
        lines += ["|---|---|---|---|---|---|"]
        for row in r["rows"]:
            state = "" if row["state_bytes"] is None else f"{row['state_bytes']:.2f}"
            total = (
                ""
                if row["state_bytes"] is None
                else f"{row['state_bytes'] + row['weight_bytes']:.2f}"
            )
            lines.append(
                f"| {row['name']} | {row['ns_per_parameter']:.2f} | {row['to_torch']:.2f} | {row['to_copy']:.2f} | {state} | {total} |"
            )
        lines += [f"- {m}" for m in r["missing"]]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="The optimizer step alone, beside peers and a copy of the same bytes."
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--seconds", type=float, default=20, help="of steps, for each contender and case"
    )
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, two rounds, no peers: does it run?"
    )
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--markdown", metavar="FILE")
    args = parser.parse_args()
    cases = [("one tensor of 64 M", 1, (8192, 8192)), ("1,000 tensors of 64 k", 1000, (256, 256))]
    if args.quick:
        cases = [("one tensor of 256 k", 1, (512, 512)), ("20 tensors of 16 k", 20, (128, 128))]
        args.rounds, args.no_peers = 2, True
    results = []
    for case, count, shape in cases:
        entries, missing = contenders(count, shape, args.device, not args.no_peers)
        numel = count * shape[0] * shape[1]
        for threads in args.threads:
            torch.set_num_threads(threads)
            print(f"{case}, {threads} threads ...", file=sys.stderr, flush=True)
            times = measure(entries, args.rounds, args.seconds, args.device)
            medians = {name: statistics.median(t) for name, t in times.items()}
            rows = [
                {
                    "name": c.name,
                    "ns_per_parameter": medians[c.name] / numel * 1e9,
                    "best_ns_per_parameter": min(times[c.name]) / numel * 1e9,
                    "rounds": len(times[c.name]),
                    "to_torch": medians[c.name] / medians[entries[0].name],
                    "to_copy": medians[c.name] / medians["copy of the same bytes"],
                    "state_bytes": c.state_bytes,
                    "weight_bytes": c.weight_bytes,
                }
                for c in entries
            ]
            results.append({"case": case, "threads": threads, "rows": rows, "missing": missing})
        del entries
    report = {"machine": machine(args.device), "results": results}
    text = (
        "# The optimizer step\n\n"
        + ", ".join(f"{k} {v}" for k, v in report["machine"].items())
        + "\n"
        + table(results)
    )
    print(text)
    for path, content in ((args.json, json.dumps(report, indent=1)), (args.markdown, text)):
        if path:
            pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
            pathlib.Path(path).write_text(content + "\n")


if __name__ == "__main__":
    main()
