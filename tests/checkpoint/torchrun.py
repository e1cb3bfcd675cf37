"""torchrun as a script, so that it can be forked where torch is imported (tests/support/ranks/launch)
and fork its ranks from there.
"""

from torch.distributed.run import main

if __name__ == "__main__":
    main()
