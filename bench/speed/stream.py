"""A process that saturates memory, as the forward and backward pass of training does: STREAM's
triad over arrays far larger than the caches.

python -m bench.speed.stream MIB      the command of such a process: three arrays of that size
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time
from types import TracebackType

from bench import ROOT


class Streams:
    """Some such processes, stopped until `go`. They end with the `with` block."""

    def __init__(self, count: int, mib: int = 128) -> None:
        self.count, self.mib = count, mib
        self.children: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Streams:
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        command = [sys.executable, "-m", "bench.speed.stream", str(self.mib)]
        self.children = [
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT)
            for _ in range(self.count)
        ]
        for child in self.children:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
        self.stop()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for child in self.children:
            child.kill()
            child.wait()
            counter(child.pid).unlink(missing_ok=True)

    def go(self) -> None:
        for child in self.children:
            child.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        for child in self.children:
            child.send_signal(signal.SIGSTOP)

    def alone(self, seconds: float = 1.0) -> float:
        """GB/s of all streams together, with nothing of ours beside them."""
        self.go()
        begin, start = self.moved(), time.perf_counter()
        time.sleep(seconds)
        speed = (self.moved() - begin) / (time.perf_counter() - start) / 1e9
        self.stop()
        return speed

    def moved(self) -> int:
        """Bytes that all streams have moved, as they last wrote them."""
        return sum(int(counter(child.pid).read_text()) for child in self.children)


def counter(pid: int) -> pathlib.Path:
    return pathlib.Path("/dev/shm" if os.path.isdir("/dev/shm") else "/tmp") / f"bench-stream-{pid}"


def main() -> None:
    import numpy

    size = int(sys.argv[1]) << 20
    a, b, c = (numpy.ones(size // 8) for _ in range(3))
    path, parent, moved = counter(os.getpid()), os.getppid(), 0
    part = 1 << 14  # values of a piece, so that the product stays in the nearest cache
    product = numpy.empty(part)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)

    def tell(count: int) -> None:  # in place and of one width: a reader never finds an empty file
        os.pwrite(file, b"%020d" % count, 0)

    tell(0)
    print("ready", flush=True)
    try:
        while os.getppid() == parent:  # a stream does not outlive the bench
            for i in range(0, len(a), part):
                numpy.multiply(c[i : i + part], 3.0, out=product[: len(c[i : i + part])])
                numpy.add(b[i : i + part], product[: len(c[i : i + part])], out=a[i : i + part])
                if i % (1 << 20) == 0:
                    tell(moved + i * 24)
            moved += 24 * len(a)  # two arrays read, one written, as STREAM counts
    finally:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
