"""Runs a command and tells its exit code, time and memory.

In a process of its own, since the kernel counts what the parent held at the moment of the start as the child's: measured
from a test runner with torch in it, everything would have used hundreds of megabytes.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import time

SECONDS = 20
ADDRESSES = 16 << 30


def limit() -> None:
    """Not the judgement, only the brake: what runs wild must not take the machine with it."""
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    start = time.monotonic()
    # Wall time counts another process's turn as well; a stop is there for what never ends.
    child = subprocess.Popen(
        sys.argv[1:],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=limit,
    )
    signal.signal(signal.SIGALRM, lambda *_: os.kill(child.pid, signal.SIGKILL))
    signal.alarm(SECONDS)
    out, err = child.communicate()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    report = {
        "code": child.returncode,
        "seconds": time.monotonic() - start,
        "cpu": used.ru_utime + used.ru_stime,
        "bytes": used.ru_maxrss * 1024,
        "out": out.decode(errors="backslashreplace"),
        "err": err.decode(errors="backslashreplace"),
    }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
