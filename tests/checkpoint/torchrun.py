"""torchrun as a script, so that tests/support/ranks/launch can fork it where torch is imported, and
it can fork its ranks.
"""

from torch.distributed.run import main

if __name__ == "__main__":
    main()
