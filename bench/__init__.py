"""The benchmarks. The rooms `measuring`, `contestants` and `pages` serve `speed`, `storage`, `gpu`
and `quality`. Recorded results are in `results`.
"""

import pathlib

ROOT = pathlib.Path(__file__).parent.parent  # of the repository
