"""Runs a build and shows how far it is: `python .ci/progress.py LOG COMMAND...`.

What the command prints goes to LOG. Of it, ninja's and make's "[12/97]" is shown: on one line of a
terminal, else at each tenth of the way. Exits as the command does, with the end of LOG where it
failed.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import time

AT = re.compile(r"\[ *(\d+)/(\d+)\]")


def main(log: str, *command: str) -> int:
    terminal, start, tenth = sys.stdout.isatty(), time.monotonic(), 0
    with (
        pathlib.Path(log).open("w") as out,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process,
    ):
        for line in process.stdout:
            out.write(line)
            found = AT.search(line)
            if not found:
                continue
            done, all_ = int(found[1]), max(int(found[2]), 1)
            if 10 * done // all_ < tenth:  # another count begins
                tenth = 0
            seconds = f"{time.monotonic() - start:.0f} s"
            if terminal:
                bar = "#" * (30 * done // all_)
                print(f"\r  [{bar:<30}] {done} of {all_}, {seconds} \033[K", end="", flush=True)
            elif 10 * done // all_ > tenth:
                tenth = 10 * done // all_
                print(f"  {done} of {all_}, {seconds}", flush=True)
    if terminal:
        print("\r\033[K", end="", flush=True)
    if process.returncode != 0:
        print("".join(pathlib.Path(log).read_text().splitlines(keepends=True)[-80:]), end="")
        print(f"*** failed; all that was printed is in {log}: {' '.join(command)}")
    return process.returncode


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
