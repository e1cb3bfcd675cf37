"""lowbit: low-bit optimizers for PyTorch.

State and weights are the same bits for any number of ranks, any sharding and any processor. See the README for a start and docs/formats.md for what
the bytes mean.
"""

from importlib.metadata import version as _version

from lowbit.adafactor import CAME, Adafactor
from lowbit.groups import param_groups
from lowbit.load import load_optimizer
from lowbit.optim import Adam, Adam8bit, AdamW, AdamW8bit, LowbitOptimizer
from lowbit.overrides import override
from lowbit.presets import catalog, scaled
from lowbit.qconfig import qconfig
from lowbit.stats import Stats
from lowbit.trust import LAMB, LARS

__version__ = _version("lowbit")

__all__ = [
    "CAME",
    "LAMB",
    "LARS",
    "Adafactor",
    "Adam",
    "Adam8bit",
    "AdamW",
    "AdamW8bit",
    "LowbitOptimizer",
    "Stats",
    "__version__",
    "catalog",
    "load_optimizer",
    "override",
    "param_groups",
    "qconfig",
    "scaled",
]
