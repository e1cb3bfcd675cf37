"""A large model on one GPU: `recipes/one_card.py` with 8 B parameters inside 24 GiB, and the same
model under the optimizers of others, each in a process of its own.

python -m bench.gpu.large                       some minutes; a table in Markdown
python -m bench.gpu.large --json FILE           also as JSON, rewritten after each run
python -m bench.gpu.large --device cpu --tiny   a small model, for a rehearsal
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from bench import ROOT
from bench.pages.page import table

LIMIT = "24GiB"  # of lowbit's runs; the others run without one, and their peak says what they need
LLAMA_8B = {  # Llama 3.1
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
TINY = {
    **LLAMA_8B,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# Options of the recipe, by what the table calls them.
RUNS: Mapping[str, Sequence[str]] = {
    "lowbit, pinned 8-bit state, in the backward pass": ["--memory", LIMIT],
    "lowbit, the same, beside the backward pass": ["--memory", LIMIT, "--overlap", "256MiB"],
    "lowbit, 4-bit state on the card": ["--memory", LIMIT, "--state", "card", "--preset", "4bit"],
    "bitsandbytes PagedAdamW8bit": ["--optimizer", "bitsandbytes"],
    "torchao CPUOffloadOptimizer": ["--optimizer", "torchao-offload"],
}
REHEARSED = ("lowbit, the same, beside the backward pass", "bitsandbytes PagedAdamW8bit")
SECONDS = 100  # of one run at most


def run(config: pathlib.Path, options: Sequence[str], device: str, tiny: bool) -> dict[str, Any]:
    """What the recipe's last line says, or {"error": why there is none}."""
    recipe = ROOT / "recipes" / "one_card.py"
    size = ["--context", "64", "--steps", "3"] if tiny else ["--context", "4096", "--steps", "10"]
    command = [sys.executable, str(recipe), "--model", str(config), "--no-save", *size, *options]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else None
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {"error": f"stopped after {SECONDS} s"}
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        print(done.stderr[-2000:], file=sys.stderr, flush=True)
        return {"error": lines[-1][:200] if lines else f"exit status {done.returncode}"}
    said = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(json.loads(said[-1])) if said else {"error": "it printed no result"}


def row(name: str, found: Mapping[str, Any]) -> list[str]:
    """A line of the table."""
    if "error" in found:
        return [name, found["error"].replace("|", "/"), "", ""]
    ratio, speed = found.get("ratio"), found["tokens_per_second"]
    peak = f"{found['peak'] / 2**30:.2f}"
    return [name, f"{speed:,.0f}" if speed else "", peak, f"{ratio:.3f}" if ratio else ""]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    given = parser.parse_args()
    head = ["optimizer", "tokens a second", "peak GiB", "peak to estimate"]
    runs: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        config = pathlib.Path(folder) / "config.json"
        config.write_text(json.dumps(TINY if given.tiny else LLAMA_8B))
        for name, options in RUNS.items():
            if given.tiny and name not in REHEARSED:
                continue
            runs[name] = run(config, options, given.device, given.tiny)
            model = "A small model" if given.tiny else "8 B parameters"
            title = f"{model} on one card, lowbit inside {LIMIT}"
            rows = [row(*each) for each in runs.items()]
            print(f"### {title}\n\n{table(head, rows)}\n", flush=True)
            if given.json:
                made = {"tables": [{"title": title, "head": head, "rows": rows}], "large": runs}
                given.json.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
