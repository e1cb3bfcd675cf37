"""Runs commands, one for each line of its input, and tells exit code, time and memory of each.

In a small process of its own, since the kernel counts what the parent held at the moment of the
start as the child's: measured from a test runner with torch in it, everything would have used
hundreds of megabytes.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time

SECONDS = 60
"""When what never ends is stopped, which is judged a crash: long, since a machine may have other
things to do, or a slow disk.
"""


def run(command: list[str], cwd: str) -> dict:
    """The report of one command."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        start = time.monotonic()
        child = subprocess.Popen(command, cwd=cwd, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(child.pid, signal.SIGKILL))
        signal.alarm(SECONDS)
        _, status, used = os.wait4(child.pid, 0)
        signal.alarm(0)
        child.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - start
        out.seek(0)
        err.seek(0)
        return {
            "code": child.returncode,
            "seconds": seconds,
            "cpu": used.ru_utime + used.ru_stime,
            "bytes": used.ru_maxrss * 1024,
            "out": out.read(1 << 20).decode(errors="backslashreplace"),
            "err": err.read(1 << 20).decode(errors="backslashreplace"),
        }


def main() -> None:
    # Only the brake: what runs wild must not take the machine with it. Children inherit it.
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        told = json.loads(line)
        print(json.dumps(run(told["command"], told["cwd"])), flush=True)


if __name__ == "__main__":
    main()
