"""The checkpoint tool against `cp` and torch's converter: time as a ratio to a copy of the same
bytes, and peak memory.

    python -m bench.storage.ckpt           1 GiB of float32 AdamW state on two ranks
    python -m bench.storage.ckpt --gib 0.1 --repeats 2
    python -m bench.storage.ckpt --gib 10  shows that memory does not grow

All contenders alternate in one run, so they see the same machine conditions. Ratios compare best
times, with a warm cache. `cp` does not wait for the disk and the tool does: it syncs before its
output appears. `cp` followed by a sync is therefore measured too, the fair comparison on a slow
disk.
"""

from __future__ import annotations

import argparse
import math
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import torch

# Starts a command from a small process,
# because a child's peak memory includes that of its parent at the fork.
MEASURE = """
import os, sys, time
begin = time.perf_counter()
pid = os.fork()
if pid == 0:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.execvp(sys.argv[1], sys.argv[1:])
_, status, usage = os.wait4(pid, 0)
print(status, time.perf_counter() - begin, usage.ru_utime + usage.ru_stime, usage.ru_maxrss)
"""

TORCH_SAVE = (
    "import sys; from torch.distributed.checkpoint.format_utils import dcp_to_torch_save; "
    "dcp_to_torch_save(sys.argv[1], sys.argv[2])"
)


def make(path: pathlib.Path, gib: float, tool: str) -> None:
    """Writes the AdamW state of transformer layers, as saved by two ranks."""
    import torch.distributed.checkpoint as dcp

    generator = torch.Generator().manual_seed(0)
    left, state, i = int(gib * 2**30), {}, 0
    shapes = [(4096, 1024), (1024, 4096), (3072, 1024), (1024, 1024), (1024,)]
    block = torch.randn(4096 * 1024, generator=generator)
    moments = {}  # shared by parameters of one shape, so 10 GiB on disk need little memory
    for shape in shapes:
        rows = block[: math.prod(shape)].reshape(shape)
        moments[shape] = {"exp_avg": rows * 1e-3, "exp_avg_sq": rows.square() * 1e-6}
    while left > 0:
        shape = shapes[i % len(shapes)]
        state[f"layers.{i // 5}.{i % 5}.weight"] = {"step": torch.tensor(7.0)} | moments[shape]
        left -= 8 * math.prod(shape)
        i += 1
    groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "params": list(state)}]
    whole = path.with_name(path.name + ".whole")
    saved = {"optim": {"state": state, "param_groups": groups}}
    dcp.save(saved, checkpoint_id=whole, no_dist=True)
    subprocess.run([tool, "reshard", whole, path, "--world-size", "2", "--quiet"], check=True)
    shutil.rmtree(whole)


def remove(path: pathlib.Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def measured(command: list[str]) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", MEASURE, *command],
        capture_output=True,
        text=True,
        check=True,
    )
    status, seconds, cpu, peak = done.stdout.split()
    if status != "0":
        raise SystemExit(f"{' '.join(command)}: {done.stderr}")
    return {"seconds": float(seconds), "cpu": float(cpu), "peak_mib": int(peak) / 1024}


def compare(gib: float, repeats: int, folder: str | None, tool: str) -> dict:
    """The best time of each contender, its ratio to `cp`, its CPU time and its peak memory."""
    with tempfile.TemporaryDirectory(prefix="lowbit-bench-", dir=folder) as made:
        source, out = pathlib.Path(made) / "source", pathlib.Path(made) / "out"
        make(source, gib, tool)
        size = sum(f.stat().st_size for f in source.iterdir())
        a, b = str(source), str(out)
        reshard, convert = ([tool, verb, a, b] for verb in ("reshard", "convert"))
        contenders = {
            "cp": ["cp", "-r", "--reflink=never", a, b],
            "cp, then sync": ["sh", "-c", f"cp -r --reflink=never {a} {b} && sync {b}/*"],
            "reshard 2 -> 4": [*reshard, "--world-size", "4"],
            "reshard 2 -> 4, 1 thread": [*reshard, "--world-size", "4", "--threads", "1"],
            "reshard 2 -> 2 (copies)": [*reshard, "--world-size", "2"],
            "reshard 2 -> 1 x 4 (columns)": [*reshard, "--mesh", "1x4"],
            "convert to lowbit 8-bit": [*convert, "--to", "lowbit", "--state-format", "8bit"],
            "dcp_to_torch_save": [sys.executable, "-W", "ignore", "-c", TORCH_SAVE, a, b],
        }
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if 3 * size > free:  # it loads the whole checkpoint
            print(
                "dcp_to_torch_save is skipped: it needs more than the "
                f"{free >> 30} GiB of free memory"
            )
            del contenders["dcp_to_torch_save"]
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
        for _ in range(repeats):
            for name, command in contenders.items():
                remove(out)
                rounds[name].append(measured(command))
    best = {name: min(r["seconds"] for r in runs) for name, runs in rounds.items()}
    rows = {
        name: {
            "best_seconds": round(best[name], 3),
            "to_cp": round(best[name] / best["cp"], 2),
            "to_cp_and_sync": round(best[name] / best["cp, then sync"], 2),
            "cpu_seconds": round(min(r["cpu"] for r in runs), 3),
            "peak_mib": round(max(r["peak_mib"] for r in runs), 1),
        }
        for name, runs in rounds.items()
    }
    return {"bytes": size, "repeats": repeats, "results": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--folder", default=None, help="folder for the data (default: TMPDIR, else /tmp)"
    )
    parser.add_argument("--tool", default=shutil.which("lowbit-ckpt"))
    given = parser.parse_args()
    if not given.tool:
        raise SystemExit("lowbit-ckpt is not on PATH")
    compared = compare(given.gib, given.repeats, given.folder, given.tool)
    print(f"{compared['bytes'] / 2**30:.2f} GiB, best of {given.repeats}")
    for name, row in compared["results"].items():
        print(
            f"{name:<30} {row['best_seconds']:8.3f} s  {row['to_cp']:6.2f} x cp  "
            f"{row['to_cp_and_sync']:6.2f} x cp and sync  {row['cpu_seconds']:7.2f} s cpu  "
            f"{row['peak_mib']:8.1f} MiB"
        )


if __name__ == "__main__":
    main()
