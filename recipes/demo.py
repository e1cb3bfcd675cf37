"""The demonstration of `make run`: one training, whatever its ranks.

It trains a GPT on real text on 2 ranks, with float32 AdamW and with lowbit. Then it inspects the
checkpoint, reshards it to 3 ranks and resumes there; and it trains from the start on 1 rank and
on 3. All end with the same bits. It closes with a table and a picture, out/loss.png.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import torch

HERE = pathlib.Path(__file__).parent
OUT = pathlib.Path("out")
STEPS, MORE = 24, 12  # steps on 2 ranks, then more after the reshard
MICRO_BATCHES = "6"  # of a step, over all ranks: their gradients are added without rounding


class Stages:
    """Headings, and the seconds that each stage took."""

    def __init__(self) -> None:
        self.start = self.last = time.perf_counter()
        self.number = 0

    def begin(self, text: str) -> None:
        self.end()
        self.number += 1
        heading(f"{self.number}. {text}")

    def end(self) -> None:
        now = time.perf_counter()
        if self.number:
            print(f"   {now - self.last:.1f} s", flush=True)
        self.last = now


def heading(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}", flush=True)


def run(command: list[str]) -> str:
    """Runs a command and returns its standard output; its progress goes to the terminal.
    Exits with its message if it fails.
    """
    print("$ " + " ".join(command).replace(sys.executable, "python"), flush=True)
    # The ranks share the cores. Setting the number of threads also silences torchrun's warning.
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        output, _ = process.communicate()
    except KeyboardInterrupt:
        # The terminal has told torchrun too, and torchrun ends its ranks;
        # subprocess.run would kill it before it has.
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
        print("\nstopped")
        sys.exit(130)
    if process.returncode != 0:
        print(output)
        sys.exit(f"the command failed with exit code {process.returncode}")
    return output


def train(ranks: int, *options: str) -> dict:
    """Runs the recipe on `ranks` ranks and returns the summary it prints."""
    launch = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        if ranks > 1
        else ["-W", "ignore"]
    )
    # 3 ranks need 3 GPUs, so all of it runs on the CPU where there are fewer.
    device = "cuda" if torch.cuda.device_count() >= 3 else "cpu"
    recipe = [str(HERE / "train_gpt.py"), "--device", device, "--digest"]
    output = run([sys.executable, *launch, *recipe, *options])
    return json.loads(output.strip().splitlines()[-1])


def losses(path: pathlib.Path) -> list[dict]:
    return [line for line in map(json.loads, path.read_text().splitlines()) if "loss" in line]


def draw(path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.2))
    for name, label, style in (
        (
            "torch",
            "torch AdamW, everything float32: 16 bytes per parameter",
            {"color": "#888", "lw": 3},
        ),
        (
            "lowbit",
            "lowbit AdamW, bfloat16 weights without a master copy, 8-bit state",
            {"color": "#c2410c", "lw": 1.6},
        ),
        (
            "resumed",
            f"the same, resharded from 2 to 3 ranks at step {STEPS} and resumed: the same bits",
            {"color": "#1d4ed8", "lw": 1, "ls": "--"},
        ),
    ):
        lines = losses(OUT / f"{name}.jsonl")
        axes.plot(
            [line["step"] for line in lines], [line["loss"] for line in lines], label=label, **style
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per byte")
    axes.set_title("A small GPT on Python's standard library, 2 ranks, FSDP2")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    stages = Stages()
    tool = shutil.which("lowbit-ckpt")
    if tool is None:
        sys.exit(
            "lowbit-ckpt is not built: the output of `make run` above names the libraries it needs"
        )
    OUT.mkdir(exist_ok=True)
    for folder in ("two", "three"):  # of an earlier run
        shutil.rmtree(OUT / folder, ignore_errors=True)
    # The learning rate falls until step STEPS, where the checkpoint is written; then a run that
    # continues is compared with one that was resumed.
    whole = ("--steps", str(STEPS + MORE), "--schedule", str(STEPS))
    exact = ("--exact", MICRO_BATCHES, *whole)

    stages.begin("Float32 AdamW on 2 ranks, for comparison")
    plain = train(2, "--optimizer", "torch", "--metrics", "out/torch.jsonl", *whole)
    stages.begin("lowbit on 2 ranks: 8-bit state, bfloat16 weights without a master copy")
    saved = ("--save", "out/two", "--save-step", str(STEPS))
    ours = train(2, *exact, "--metrics", "out/lowbit.jsonl", *saved)
    stages.begin("The contents of the checkpoint")
    lines = run([tool, "inspect", "out/two"]).rstrip().splitlines()
    left = f"    ... {len(lines) - 34} more lines ..."
    print("\n".join(lines if len(lines) <= 40 else [*lines[:22], left, *lines[-12:]]))
    stages.begin("Reshard from 2 ranks to 3 without converting values")
    print(run([tool, "reshard", "out/two", "out/three", "--world-size", "3"]), end="")
    files = [
        json.loads(run([tool, "inspect", path, "--json", "--digest"]))["digest"]
        for path in ("out/two", "out/three")
    ]
    stages.begin("Resume on 3 ranks")
    three = train(3, *exact, "--resume", "out/three", "--metrics", "out/resumed.jsonl")
    stages.begin("The same training from the start, on 1 rank and on 3")
    others = {f"{ranks} from the start": train(ranks, *exact) for ranks in (1, 3)}
    draw(OUT / "loss.png")
    stages.end()

    heading(
        f"{ours['parameters']:,} parameters, {time.perf_counter() - stages.start:.0f} s in total"
    )
    print(f"{'bytes per parameter':<22}{'weights':>9}{'gradient':>10}{'state':>8}{'sum':>8}")
    for name, summary in {"float32 AdamW": plain, "lowbit": ours}.items():
        b = summary["bytes_per_parameter"]
        print(
            f"  {name:<20}{b['weights']:>9.2f}{b['gradient']:>10.2f}{b['state']:>8.2f}"
            f"{sum(b.values()):>8.2f}"
        )
    print(f"{f'loss, {STEPS + MORE} steps':<22}{'last 20':>9}{'held out':>10}")
    resumed = f"resumed at {STEPS}"
    for name, summary in {"float32 AdamW": plain, "lowbit": ours, resumed: three}.items():
        print(f"  {name:<20}{summary['train_loss']:>9.4f}{summary['held_out_loss']:>10.4f}")
    print("picture: out/loss.png")
    ended = {"2": ours, "2, then 3": three, **others}
    digests = {name: summary["digest"][:12] for name, summary in ended.items()}
    print(f"{'ranks':<22}SHA-256 of weights and state after {STEPS + MORE} steps")
    for name, digest in digests.items():
        print(f"  {name:<20}{digest}...")
    handed_on = ours["digest_saved"] == three["digest_loaded"] and len(set(files)) == 1
    if len(set(digests.values())) != 1 or not handed_on:
        print(
            f"  saved {ours['digest_saved']}, loaded {three['digest_loaded']}; files: "
            f"{', '.join(files)}"
        )
        sys.exit("the bits differ: this must not happen, please report it")
    heading(
        "One training, one result: the same weights and state on 1, 2 "
        "and 3 ranks, and across the reshard."
    )


if __name__ == "__main__":
    main()
