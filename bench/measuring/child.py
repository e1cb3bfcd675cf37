"""Child processes that run on request: `Child` starts one, and `answer` runs in it."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from bench import ROOT


class Child:
    """`python -m module *arguments`, which answers with lines of JSON."""

    def __init__(self, module: str, *arguments: str) -> None:
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            cwd=ROOT,
        )

    def hello(self) -> Any:
        """Waits until the child is ready and returns its greeting. Start all children first,
        then wait for each.
        """
        return self.read()

    def read(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                reply = json.loads(line)
                if "error" in reply:
                    self.close()
                    raise RuntimeError(reply["error"])
                return reply
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
    """Prints the greeting of `start`, then answers requests by name until standard input ends."""
    try:
        greeting, answers = start()
        print(json.dumps(greeting), flush=True)
        for line in sys.stdin:
            print(json.dumps(answers[line.strip()]()), flush=True)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {str(error)[:300]}"}), flush=True)


def peak_rss() -> int:
    """The peak memory of this process in bytes, from /proc/self/status; 0 without that file."""
    return rss("VmHWM")


def rss(field: str = "VmRSS") -> int:
    path = pathlib.Path("/proc/self/status")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), 0)
