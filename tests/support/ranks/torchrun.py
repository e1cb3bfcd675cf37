"""torchrun, with its options, whose ranks are forks of a process that has imported torch and
lowbit: a start of them takes seconds of a core in each. The script's own folder is not on the path,
so it cannot import what lies there.
"""

import importlib
import sys

from torch.distributed.run import main

from tests.support.ranks.forked import TORCH

if __name__ == "__main__":
    for module in (*TORCH, "lowbit"):
        importlib.import_module(module)
    main(["--run-path", "--start-method", "fork", *sys.argv[1:]])
