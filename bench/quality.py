"""The effect of low-bit state on quality: a small GPT on real text with each kind of state, several seeds each.

    python -m bench.quality                  # all runs, about 30 minutes on one core; saved runs are not repeated
    python -m bench.quality --only 4bit log8 --seeds 0 1

Runs recipes/train_gpt.py and writes bench/results/quality.json, docs/quality.md and docs/quality.png. Muon's runs are those
of `python -m bench.muon_quality`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results" / "quality.json"
STEPS = 200
# By name: arguments of the recipe. Each rule has its usual learning rate for this model, not tuned per format.
RUNS = {
    "float32 AdamW (torch)": ["--optimizer", "torch"],
    "bfloat16 weights to nearest, 8bit": ["--param-format", "nearest"],
    "8bit": ["--state-format", "8bit"],
    "4bit": ["--state-format", "4bit"],
    "fp8": ["--state-format", "fp8"],
    "log8": ["--state-format", "log8"],
    "factored4": ["--state-format", "factored4"],
    "Kahan, 8bit": ["--param-format", "bfloat16_kahan"],
    "Adafactor, 8-bit momentum": [
        "--rule", "Adafactor", "--lr", "1e-2",
        "--options", '{"beta1": 0.9, "decay_by": "rho", "weight_decay": 0.01}',
    ],
    "APOLLO, rank 32, 8bit": ["--rule", "APOLLO", "--lr", "1e-2", "--options", '{"rank": 32}'],
}  # fmt: skip


def run(name: str, seed: int, steps: int) -> dict:
    """Runs the recipe and returns its curve and summary."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = pathlib.Path(folder) / "metrics.jsonl"
        command = [sys.executable, str(ROOT / "recipes" / "train_gpt.py"), *RUNS[name]]
        command += ["--steps", str(steps), "--seed", str(seed), "--metrics", str(metrics)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = [line["loss"] for line in lines[:-1]]
    curve = [round(statistics.fmean(losses[i : i + 10]), 4) for i in range(0, len(losses), 10)]
    summary = lines[-1]
    return {
        "held_out_loss": summary["held_out_loss"],
        "bytes_per_parameter": summary["bytes_per_parameter"],
        "curve": curve,
    }


def page(results: dict) -> str:
    """The table as Markdown."""
    lines = [
        "# Quality",
        "",
        f"A byte-level GPT ({results['parameters']}) on the text of Python's standard library, {results['steps']} steps, validation loss in nats per byte; "
        "`python -m bench.quality` writes this page.",
        "",
        f"{results['machine']}, {results['date']}.",
        "",
        "| run | mean | spread | seeds | weights, gradient and state, bytes per parameter |",
        "|---|---|---|---|---|",
    ]
    for name in RUNS:
        runs = list(results["runs"].get(name, {}).values())
        if not runs:
            continue
        losses = [r["held_out_loss"] for r in runs]
        size = sum(runs[0]["bytes_per_parameter"].values())
        each = ", ".join(f"{x:.3f}" for x in losses)
        lines.append(
            f"| {name} | {statistics.fmean(losses):.3f} | {max(losses) - min(losses):.3f} | {each} | {size:.2f} |"
        )
    lines += [
        "",
        "AdamW runs at a learning rate of 2e-3, Adafactor and APOLLO at 1e-2, none of them tuned. Compare the formats of one",
        "rule, not rules. The spread is the largest minus the smallest of the seeds.",
    ]
    return "\n".join([*lines, "", "![Held-out loss of each run](quality.png)", ""])


def plot(results: dict, path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name in RUNS if results["runs"].get(name)]
    losses = [[r["held_out_loss"] for r in results["runs"][name].values()] for name in names]
    order = sorted(range(len(names)), key=lambda i: statistics.fmean(losses[i]), reverse=True)
    figure, axis = pyplot.subplots(figsize=(9, 4.8))
    if "float32 AdamW (torch)" in names:
        seeds = losses[names.index("float32 AdamW (torch)")]
        axis.axvspan(min(seeds), max(seeds), color="#ddd", label="seeds of float32 AdamW")
    for row, i in enumerate(order):
        mean = statistics.fmean(losses[i])
        axis.plot(losses[i], [row] * len(losses[i]), "o", ms=7, mfc="none", color="tab:blue")
        axis.plot(mean, row, "|", ms=18, mew=2.5, color="tab:blue")
        axis.annotate(
            f"{mean:.3f}", (mean, row), (0, 10), textcoords="offset points", ha="center", fontsize=8
        )
    axis.set_yticks(range(len(order)), [names[i] for i in order])
    axis.set_ylim(-0.6, len(order) - 0.1)
    axis.set_xlabel("held-out loss: a circle for each seed, a bar for their mean; less is better")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="lower left", frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def write_page() -> None:
    """docs/quality.md from what was saved: these runs, and those of bench.muon_quality with their picture."""
    from bench import muon_page, muon_quality  # imported here: they train in this process

    parts, lines = [page(json.loads(RESULTS.read_text()))], muon_quality.read()
    if lines:
        parts.append(muon_page.section(lines))
        muon_page.plot(lines, ROOT / "docs" / "quality-muon.png")
    (ROOT / "docs" / "quality.md").write_text("\n".join(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", metavar="RUN", help=f"of {', '.join(RUNS)}")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--again", action="store_true", help="repeat saved runs")
    args = parser.parse_args()
    results = {"runs": {}}
    if RESULTS.exists() and args.steps == STEPS:
        results = json.loads(RESULTS.read_text())
    for seed in args.seeds:
        for name in args.only or RUNS:
            saved = results["runs"].setdefault(name, {})
            if str(seed) in saved and not args.again:
                continue
            saved[str(seed)] = run(name, seed, args.steps)
            print(f"{name}, seed {seed}: {saved[str(seed)]['held_out_loss']:.4f}", flush=True)
            results |= {
                "steps": args.steps,
                "parameters": "0.9 M parameters, width 128, depth 4",
                "machine": f"{platform.machine()} CPU",
                "date": datetime.date.today().isoformat(),
            }
            if args.steps == STEPS:
                RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    if args.steps == STEPS:
        plot(results, ROOT / "docs" / "quality.png")
        write_page()


if __name__ == "__main__":
    main()
