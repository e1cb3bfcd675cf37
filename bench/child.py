"""Processes of their own that take turns when told: `Child` here starts one, and `answer` runs in it."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent


class Child:
    """`python -m module *arguments`, which says what it has by lines of JSON."""

    def __init__(self, module: str, *arguments: str) -> None:
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT
        )  # fmt: skip

    def hello(self) -> Any:
        """What it has to say when it is ready. Start all children first, then wait for each."""
        return self.read()

    def read(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                said = json.loads(line)
                if "error" in said:
                    self.close()
                    raise RuntimeError(said["error"])
                return said
        raise RuntimeError(f"a child ended with status {self.process.wait()}")

    def ask(self, what: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self.read()

    def close(self) -> None:
        if self.process.stdin and not self.process.stdin.closed:
            self.process.stdin.close()
        self.process.wait()


def answer(
    start: Callable[[], tuple[dict[str, Any], dict[str, Callable[[], dict[str, Any]]]]],
) -> None:
    """Says what `start` has to say, then answers questions by name until there are no more."""
    try:
        said, answers = start()
        print(json.dumps(said), flush=True)
        for line in sys.stdin:
            print(json.dumps(answers[line.strip()]()), flush=True)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {str(error)[:300]}"}), flush=True)


def peak_rss() -> int:
    """Bytes that this process has held at most, of /proc/self/status; 0 where there is none."""
    return rss("VmHWM")


def rss(field: str = "VmRSS") -> int:
    path = pathlib.Path("/proc/self/status")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), 0)
