"""One stage of a run on a machine that may be had once: a command with a time limit, whose failure does not stop the next."""

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

PATIENCE = 10  # seconds for a killed stage to be gone


@dataclass
class Stage:
    """
    Attributes:
        name: of its log, FOLDER/NAME.log.
        limit: seconds, less where the whole run has less left.
        command: what runs; a string says why nothing can.
        env: beside the process's own environment.
        read: what else the page shows, from the log's text.
        after: name of a stage that must have passed, or nothing can be learnt from this one.
        beside: whether it runs at the same time as the stage before it, which times nothing.
    """

    name: str
    limit: float
    command: list[str] | str
    env: dict[str, str] = field(default_factory=dict)
    read: Callable[[str], dict] = lambda text: {}
    after: str = ""
    beside: bool = False

    def run(self, folder: pathlib.Path, left: float, passed: set[str]) -> dict:
        """{"name", "status", "seconds", "command", "tail", ...}; status is passed, failed, timed out (and cannot be killed), missing or left out."""
        said = {"name": self.name, "seconds": 0.0}
        if isinstance(self.command, str):
            return {**said, "status": "missing", "tail": self.command}
        if self.after and self.after not in passed:
            return {**said, "status": "left out", "tail": f"{self.after} did not pass"}
        limit = min(self.limit, left)
        if limit < 5:
            return {**said, "status": "left out", "tail": "no time left"}
        log, began = folder / f"{self.name}.log", time.perf_counter()
        with open(log, "w") as out:
            try:
                process = subprocess.Popen(
                    self.command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONUNBUFFERED": "1", **self.env}, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                return {
                    **said,
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
        said |= {
            "status": status,
            "code": code,
            "limit": limit,
            "seconds": time.perf_counter() - began,
        }
        return {
            **said,
            "command": " ".join(self.command),
            "tail": text[-3000:],
            **guarded(self.read, text),
        }


def ended(process: subprocess.Popen) -> str:
    """Kills a stage and its children; who hangs inside of a driver does not die, and is not waited for."""
    os.killpg(process.pid, signal.SIGKILL)  # its own session: nobody else is in it
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        return "timed out, and cannot be killed"
    return "timed out"


def guarded(read: Callable[[str], dict], text: str) -> dict:
    """A page with a hole is better than none."""
    try:
        return read(text)
    except Exception as error:
        return {"unread": f"{type(error).__name__}: {error}"}


# As pytest -v says it while it runs ("FILE::TEST FAILED [ 3%]"), pytest-xdist ("[gw0] [ 3%] FAILED FILE::TEST"), and both in the end ("FAILED FILE::TEST").
FAILED = re.compile(r"(\S+::.*?(?= (?:FAILED|ERROR)\b)|(?<=FAILED )\S+::\S+|(?<=ERROR )\S+::\S+)")


GRAPH = "graph"  # in the names of tests that capture one


def junit(path: pathlib.Path) -> Callable[[str], dict]:
    """Counts and the names of failed tests, and counts of those that have to do with graphs; where pytest did not live to write its report, of what it
    printed."""

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
                        f"{case.get('classname')}::{case.get('name')}: {(found.get('message') or '')[:160]}"
                    )
            bad = any(case.find(kind) is not None for kind in ("failure", "error"))
            if GRAPH in (case.get("name") or "") and case.find("skipped") is None:
                graphs["failed" if bad else "passed"] += 1
            if (found := case.find("skipped")) is not None:
                reason = (found.get("message") or "")[:160]
                skipped[reason] = skipped.get(reason, 0) + 1
        passed = count["tests"] - count["failures"] - count["errors"] - count["skipped"]
        return {"tests": {**count, "passed": passed}, "failures": failed[:50], "skipped": skipped, "graphs": graphs}  # fmt: skip

    return read


def sanitizer(path: pathlib.Path) -> Callable[[str], dict]:
    """The tool's own last line, and the first of its complaints."""

    def read(text: str) -> dict:
        said = path.read_text(errors="replace") if path.exists() else text
        lines = [
            line.removeprefix("=========").strip()
            for line in said.splitlines()
            if line.startswith("=========")
        ]
        summary = [line for line in lines if "SUMMARY" in line]
        errors = [
            line
            for line in lines
            if line.startswith(("Invalid", "Error", "Warning", "Misaligned", "Race", "Program hit"))
            or "hazard" in line
        ]
        return {"summary": summary[-1] if summary else "the tool did not live to sum up", "errors": errors[:20],
                "tests": {"passed": text.count(" PASSED"), "failed": text.count(" FAILED")}}  # fmt: skip

    return read
