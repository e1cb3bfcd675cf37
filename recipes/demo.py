"""The demonstration of `make run`: trains a GPT on real text on 2 ranks, with float32 AdamW and with lowbit. Then it inspects the checkpoint, reshards it
to 3 ranks, and resumes on 3 ranks and on 1 without losing a bit. It ends with a table and a picture, out/loss.png.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).parent
OUT = pathlib.Path("out")
STEPS, MORE = 240, 40  # steps on 2 ranks, then more after the reshard


def say(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}", flush=True)


def run(command: list[str]) -> str:
    """Runs a command and returns its standard output; its progress goes to the terminal. Exits with its message if it fails."""
    print("$ " + " ".join(command).replace(sys.executable, "python"), flush=True)
    # The ranks share the cores. Setting the number of threads also silences torchrun's warning.
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode != 0:
        print(done.stdout)
        sys.exit(f"the command failed with exit code {done.returncode}")
    return done.stdout


def train(ranks: int, *options: str) -> dict:
    """Runs the recipe on `ranks` ranks and returns the summary it prints."""
    launch = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        if ranks > 1
        else ["-W", "ignore"]
    )
    output = run([sys.executable, *launch, str(HERE / "train_gpt.py"), "--digest", *options])
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
            {"color": "#c2410c", "lw": 1.3},
        ),
        ("resumed", "resharded from 2 to 3 ranks and resumed", {"color": "#1d4ed8", "lw": 1.3}),
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
    start = time.perf_counter()
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    tool = shutil.which("lowbit-ckpt")
    if tool is None:
        sys.exit(
            "lowbit-ckpt is not built: the output of `make run` above names the libraries it needs"
        )

    say("1. Float32 AdamW on 2 ranks, for comparison")
    plain = train(2, "--optimizer", "torch", "--steps", str(STEPS), "--metrics", "out/torch.jsonl")
    say("2. lowbit on 2 ranks: 8-bit state, bfloat16 weights without a master copy")
    schedule = ("--schedule", str(STEPS))
    ours = train(
        2, "--steps", str(STEPS), "--metrics", "out/lowbit.jsonl", "--save", "out/two", *schedule
    )
    say("3. The contents of the checkpoint")
    lines = run([tool, "inspect", "out/two"]).rstrip().splitlines()
    print(
        "\n".join(
            lines
            if len(lines) <= 40
            else [*lines[:22], f"    ... {len(lines) - 34} more lines ...", *lines[-12:]]
        )
    )
    say("4. Reshard from 2 ranks to 3 without converting values")
    print(run([tool, "reshard", "out/two", "out/three", "--world-size", "3"]), end="")
    before, after = (
        json.loads(run([tool, "inspect", path, "--json", "--digest"]))["digest"]
        for path in ("out/two", "out/three")
    )
    say("5. Resume on 3 ranks, and load on 1 and on 2")
    more = ("--steps", str(STEPS + MORE), *schedule)
    three = train(3, "--resume", "out/three", "--metrics", "out/resumed.jsonl", *more)
    again = ("--resume", "out/three", "--steps", str(STEPS), *schedule)
    one, two = train(1, *again), train(2, *again)
    draw(OUT / "loss.png")

    bytes_of = {
        "float32 AdamW": plain["bytes_per_parameter"],
        "lowbit": ours["bytes_per_parameter"],
    }
    say(
        f"{ours['parameters']:,} parameters, {STEPS} steps, {time.perf_counter() - start:.0f} s in total"
    )
    print(f"{'bytes per parameter':<22}{'weights':>9}{'gradient':>10}{'state':>8}{'sum':>8}")
    for name, b in bytes_of.items():
        print(
            f"  {name:<20}{b['weights']:>9.2f}{b['gradient']:>10.2f}{b['state']:>8.2f}{sum(b.values()):>8.2f}"
        )
    print(
        "  (lowbit keeps the state of embeddings and head in float32: a large share of a small model)"
    )
    print(f"{'loss':<22}{'last 20':>9}{'held out':>10}")
    print(f"  {'float32 AdamW':<20}{plain['train_loss']:>9.4f}{plain['held_out_loss']:>10.4f}")
    print(f"  {'lowbit':<20}{ours['train_loss']:>9.4f}{ours['held_out_loss']:>10.4f}")
    print(
        f"  {f'resumed, {MORE} more':<20}{three['train_loss']:>9.4f}{three['held_out_loss']:>10.4f}"
    )
    print("digest of weights and state")
    rows = {
        "2 ranks, trained": ours["digest"],
        "3 ranks, loaded": three["digest_loaded"],
        "1 rank, loaded": one["digest_loaded"],
        "2 ranks, loaded": two["digest_loaded"],
    }
    for name, digest in rows.items():
        print(f"  {name:<20}{digest}")
    print("digest of the files, by lowbit-ckpt")
    print(f"  {'2 ranks':<20}{before}\n  {'3 ranks':<20}{after}")
    print("picture: out/loss.png")
    if len(set(rows.values())) != 1 or before != after:
        sys.exit("the digests differ: this must not happen, please report it")


if __name__ == "__main__":
    main()
