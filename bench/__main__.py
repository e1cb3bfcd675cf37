"""All benchmarks in one command: the step against baselines, cost by size, training steps,
checkpoints, start-up.

    python -m bench                     all sections, about 12 minutes on two cores; prints the
                                        summary
    python -m bench --quick             smaller sizes, at most 3 minutes
    python -m bench --tiny              smoke test
    python -m bench --only step growth  some sections
    python -m bench --record            saves the result: bench/results/NAME.json, docs/bench-
                                        NAME.md and its pictures. NAME is cpu or cuda; with --quick
                                        it is quick, the table of docs/speed/bench.md
    python -m bench --page FILE.json    measures nothing: rewrites the pages of a saved result

Compare ratios between two runs, never times. docs/speed/bench.md has the details.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import time

import torch

from bench import ROOT
from bench.measuring import machine, settings
from bench.pages import page, plots
from bench.speed import growth, start, step, training
from bench.storage import checkpoint

SECTIONS = {
    "step": step,
    "growth": growth,
    "training": training,
    "checkpoint": checkpoint,
    "start": start,
}
MARKS = ("<!-- python -m bench --quick --record -->", "<!-- end -->")


def measure(chosen: settings.Settings, only: list[str], file: pathlib.Path | None = None) -> dict:
    """Runs the sections. A failed one is listed under "failed" and the others continue; `file`
    always has the results so far.
    """
    began = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - began:6.1f} s] {text}", file=sys.stderr, flush=True)

    result: dict = {
        "machine": machine.describe(chosen.device),
        "device": chosen.device,
        "settings": chosen.name,
        "failed": {},
        "seconds": {},
    }

    def keep_so_far() -> None:
        result["seconds"]["all"] = time.perf_counter() - began
        write(file, json.dumps(result, indent=1))

    for name in only:
        at = time.perf_counter()
        try:
            for found in SECTIONS[name].run(chosen, say):
                result[name] = found
                keep_so_far()
        except Exception as error:
            result["failed"][name] = f"{type(error).__name__}: {str(error)[:500]}"
            say(f"{name} failed: {result['failed'][name]}")
        result["seconds"][name] = time.perf_counter() - at
        keep_so_far()
    return result


def write(file: pathlib.Path | None, text: str) -> None:
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        # A process killed while writing leaves the previous file.
        part = file.with_name(file.name + ".part")
        part.write_text(text + "\n")
        part.replace(file)


def keep(result: dict, root: pathlib.Path = ROOT) -> None:
    """Writes the files of --record and --page under `root`."""
    quick = result["settings"] == "quick" and result["device"] == "cpu"
    name = "quick" if quick else result["device"]
    results, docs = root / "bench" / "results", root / "docs"
    pages, drawn = docs / "speed", docs / "pictures"
    for folder in (results, pages, drawn):
        folder.mkdir(parents=True, exist_ok=True)
    (results / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    if quick:
        measuring = pages / "bench.md"
        measuring.write_text(page.quoted(measuring.read_text(), MARKS, page.summary(result)))
        return
    pictures = plots.draw(result, drawn, f"bench-{name}")
    command = f"python -m bench{' --device cuda' * (name == 'cuda')} --record"
    (pages / f"bench-{name}.md").write_text(page.page(result, command, pictures))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", dest="size", action="store_const", const="quick", default="full")
    size.add_argument("--tiny", dest="size", action="store_const", const="tiny")
    parser.add_argument("--threads", type=int, nargs="+", help="default: 1 2")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(SECTIONS),
        default=list(SECTIONS),
        metavar="SECTION",
        help=", ".join(SECTIONS),
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the result")
    parser.add_argument("--markdown", type=pathlib.Path, metavar="FILE", help="write the page")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--page", type=pathlib.Path, metavar="FILE")
    given = parser.parse_args()
    if given.page:
        keep(json.loads(given.page.read_text()))
        return 0
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.exit(
            2,
            "python -m bench --device cuda: torch sees no GPU "
            "(torch.cuda.is_available() is False)\n",
        )
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    result = measure(
        settings.chosen(given.size, given.device, given.threads), given.only, given.json
    )
    write(given.markdown, page.page(result, "python -m bench"))
    if given.record:
        keep(result)
    if result.get("step"):
        print(page.summary(result))
    for name, reason in result["failed"].items():
        print(f"{name} failed: {reason}", file=sys.stderr)
    print(f"{result['seconds']['all']:.0f} seconds", file=sys.stderr)
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
