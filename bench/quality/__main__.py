"""The effect of low-bit state on quality: a small and a larger GPT on real text, each contestant
with several seeds, in pairs with float32 AdamW.

    python -m bench.quality                 # runs what is missing, the most useful first; stop it
                                              at any time
    python -m bench.quality --minutes 60    # no new run after an hour
    python -m bench.quality --study "10 M" --only "Muon, 8bit"
    python -m bench.quality --list          # finished and missing runs, and how long the missing
                                              takes
    python -m bench.quality.zero_gradients  # a minute: the section of that name
    python -m bench.quality --page          # docs/quality.md, its pictures and the table of
                                              docs/presets.md, from what is there

Each finished run is a line of bench/results/quality.jsonl, as runs.py describes; studies.py says
what is compared.
"""

from __future__ import annotations

import argparse
import time

from bench.quality import page as quality_page
from bench.quality.runs import Lines, Runner, comparable, missing, read
from bench.quality.studies import CONTESTANTS, STUDIES, Run


def listed(lines: Lines, todo: list[Run]) -> None:
    for line in lines:
        print(
            {
                k: line[k]
                for k in ("study", "run", "lr", "seed", "steps", "held_out_loss", "seconds")
            }
        )
    per_step: dict[str, list[float]] = {}
    for line in lines:
        per_step.setdefault(line["study"], []).append(line["seconds"] / line["steps"])
    for run in todo:
        known = per_step.get(run.study) or per_step.get(STUDIES[run.study].tuned_in or "")
        takes = f"some {min(known) * run.steps:.0f} s" if known else "unknown time"
        print(
            f"missing: {run.study}: {run.name}, rate {run.lr:g}, seed {run.seed}, {run.steps} "
            f"steps, {takes}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--study",
        nargs="+",
        choices=list(STUDIES),
        metavar="STUDY",
        help=f"of {'; '.join(STUDIES)}",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(CONTESTANTS),
        metavar="CONTESTANT",
        help=f"of {'; '.join(CONTESTANTS)}",
    )
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--page", action="store_true")
    args = parser.parse_args()
    if args.page:
        quality_page.write(comparable(read()))
        return
    runner = Runner()
    if args.list:
        listed(runner.lines(), missing(runner.lines(), args.study, args.only))
        return
    end = time.perf_counter() + args.minutes * 60
    while time.perf_counter() < end and (todo := missing(runner.lines(), args.study, args.only)):
        line = runner.run(todo[0])
        print(
            f"{line['date']} {todo[0].study}: {todo[0].name}, rate {todo[0].lr:g}, seed "
            f"{todo[0].seed}: {line['held_out_loss']}, {line['seconds']} s",
            flush=True,
        )
    print("`python -m bench.quality --page` writes the page")


if __name__ == "__main__":
    main()
