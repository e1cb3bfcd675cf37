"""torchrun, with its options, whose ranks are forks of a process that has imported torch and
lowbit: a start of them takes seconds of a core in each. Scripts lie in the current folder, or
import nothing beside them.
"""

import importlib
import os
import sys

from torch.distributed.run import main

from tests.support.ranks.forked import PRELOADED

if __name__ == "__main__":
    sys.path[0] = os.getcwd()  # not this file's folder
    for module in (*PRELOADED, "lowbit"):
        importlib.import_module(module)
    main(["--run-path", "--start-method", "fork", *sys.argv[1:]])
