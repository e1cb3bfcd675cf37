"""One stage of a run on a GPU machine: a command with a time limit,
whose failure does not stop the next stage.
"""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import dataclass, field

PATIENCE = 10  # seconds to wait for a killed stage


@dataclass
class Stage:
    """
    Attributes:
        name: the name of the stage and of its log, FOLDER/NAME.log.
        limit: maximum seconds; the remaining time of the whole run may lower it.
        command: the command, or a string with the reason why it cannot run.
        env: variables added to the environment of this process.
        read: extracts further results for the page from the text of the log.
        after: name of a stage that must have passed before this one runs.
        parallel: whether it runs at the same time as the previous stage, which times nothing.
        took: seconds on the last card; a stage that has less than half of them left does not begin.
        cwd: the folder in which it runs; None is the current one.
    """

    name: str
    limit: float
    command: list[str] | str
    env: dict[str, str] = field(default_factory=dict)
    read: Callable[[str], dict] = lambda text: {}
    after: str = ""
    parallel: bool = False
    took: float = 0
    cwd: pathlib.Path | None = None

    def run(self, folder: pathlib.Path, left: float, passed: set[str]) -> dict:
        """Runs the stage. Returns {"name", "status", "seconds", "command", "tail", ...}.

        The status is passed, failed, timed out (and cannot be killed), missing or left out.
        """
        result = {"name": self.name, "seconds": 0.0}
        if isinstance(self.command, str):
            return {**result, "status": "missing", "tail": self.command}
        if self.after and self.after not in passed:
            return {**result, "status": "left out", "tail": f"{self.after} did not pass"}
        limit = min(self.limit, left)
        if limit < max(5, self.took / 2):
            why = f": it took {self.took:.0f} s on the last card" if self.took else ""
            return {**result, "status": "left out", "tail": f"no time left{why}"}
        log, began = folder / f"{self.name}.log", time.perf_counter()
        with open(log, "w") as out:
            try:
                process = subprocess.Popen(
                    self.command,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    cwd=self.cwd,
                    env={**os.environ, "PYTHONUNBUFFERED": "1", **self.env},
                    start_new_session=True,
                )
            except OSError as error:
                return {
                    **result,
                    "status": "failed",
                    "tail": str(error),
                    "command": " ".join(self.command),
                }
            try:
                code = process.wait(limit)
                status = "passed" if code == 0 else "failed"
            except subprocess.TimeoutExpired:
                code, status = None, ended(process)
        text = log.read_text(errors="replace")
        result |= {
            "status": status,
            "code": code,
            "limit": limit,
            "seconds": time.perf_counter() - began,
        }
        return {
            **result,
            "command": " ".join(self.command),
            "tail": text[-3000:],
            **guarded(self.read, text),
        }


def ended(process: subprocess.Popen) -> str:
    """Kills a stage and its children. A process that hangs in a driver does not die and is
    abandoned after PATIENCE.
    """
    os.killpg(process.pid, signal.SIGKILL)  # a session of its own, without other processes
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        return "timed out, and cannot be killed"
    return "timed out"


def guarded(read: Callable[[str], dict], text: str) -> dict:
    """The results that `read` extracts, or its error: a page with a gap is better than none."""
    try:
        return read(text)
    except Exception as error:
        return {"unread": f"{type(error).__name__}: {error}"}


# The output of pytest -v while it runs ("FILE::TEST FAILED [ 3%]"), of pytest-xdist ("[gw0] [ 3%]
# FAILED FILE::TEST"), and of both at the end ("FAILED FILE::TEST").
FAILED = re.compile(r"(\S+::.*?(?= (?:FAILED|ERROR)\b)|(?<=FAILED )\S+::\S+|(?<=ERROR )\S+::\S+)")


GRAPH = "graph"  # in the names of tests that capture one


def junit(path: pathlib.Path) -> Callable[[str], dict]:
    """Reads counts, the names of failed tests, and counts of the tests about graphs. If pytest
    ended before it wrote its report, from its output.
    """

    def read(text: str) -> dict:
        if not path.exists():
            failed = list(dict.fromkeys(name[:200] for name in FAILED.findall(text)))
            return {
                "tests": {"passed": text.count(" PASSED"), "failed": len(failed)},
                "failures": failed[:50],
                "graphs": {
                    "passed": sum(
                        " PASSED" in line and GRAPH in line.split("::")[-1]
                        for line in text.splitlines()
                    ),
                    "failed": sum(GRAPH in name.split("::")[-1] for name in failed),
                },
            }
        suites = list(ET.parse(path).getroot().iter("testsuite"))
        count = {
            key: sum(int(s.get(key, 0)) for s in suites)
            for key in ("tests", "failures", "errors", "skipped")
        }
        failed: list[str] = []
        skipped: dict[str, int] = {}
        graphs = {"passed": 0, "failed": 0}
        for case in ET.parse(path).getroot().iter("testcase"):
            for kind in ("failure", "error"):
                if (found := case.find(kind)) is not None:
                    failed.append(
                        f"{case.get('classname')}::{case.get('name')}: "
                        f"{(found.get('message') or '')[:160]}"
                    )
            bad = any(case.find(kind) is not None for kind in ("failure", "error"))
            if GRAPH in (case.get("name") or "") and case.find("skipped") is None:
                graphs["failed" if bad else "passed"] += 1
            if (found := case.find("skipped")) is not None:
                reason = (found.get("message") or "")[:160]
                skipped[reason] = skipped.get(reason, 0) + 1
        passed = count["tests"] - count["failures"] - count["errors"] - count["skipped"]
        return {
            "tests": {**count, "passed": passed},
            "failures": failed[:50],
            "skipped": skipped,
            "graphs": graphs,
        }

    return read


def sanitizer(path: pathlib.Path) -> Callable[[str], dict]:
    """Reads the last line of the tool and its first errors."""

    def read(text: str) -> dict:
        report = path.read_text(errors="replace") if path.exists() else text
        lines = [
            line.removeprefix("=========").strip()
            for line in report.splitlines()
            if line.startswith("=========")
        ]
        summary = [line for line in lines if "SUMMARY" in line]
        errors = [
            line
            for line in lines
            if line.startswith(("Invalid", "Error", "Warning", "Misaligned", "Race", "Program hit"))
            or ("hazard" in line and "SUMMARY" not in line)  # clean: "0 hazards displayed"
        ]
        return {
            "summary": summary[-1] if summary else "the tool ended before its summary",
            "errors": errors[:20],
            "tests": {"passed": text.count(" PASSED"), "failed": text.count(" FAILED")},
        }

    return read
