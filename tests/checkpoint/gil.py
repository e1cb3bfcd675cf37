"""Whether work in C++ lets other threads of Python run."""

import sys
import threading
import time

STEPS = 10


def steps_during(work, times):
    """How often this thread runs, up to STEPS, while another one does `work(i)` for i < times,
    one after the other.

    Work that keeps the GIL would not release it between two calls either.
    """
    finished, seen = threading.Event(), 0

    def again():
        for i in range(times):
            if seen >= STEPS:
                break
            work(i)
        finished.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # no thread is asked to give the GIL up: it must do so itself
    try:
        worker = threading.Thread(target=again)
        worker.start()
        while not finished.is_set():
            seen += 1
            time.sleep(0.0005)
        worker.join()
    finally:
        sys.setswitchinterval(interval)
    return seen
