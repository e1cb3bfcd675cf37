"""lowbit: low-bit optimizers for PyTorch.

State and weights are the same bits for any number of ranks, any sharding and any processor. See the README for a start and docs/formats.md for what
the bytes mean.
"""

from importlib.metadata import version as _version

from lowbit.adafactor import CAME, Adafactor
from lowbit.apollo import APOLLO, APOLLOMini, Fira
from lowbit.groups import param_groups
from lowbit.layout import scaled
from lowbit.load import load_optimizer
from lowbit.ops import catalog
from lowbit.optim import Adam, Adam8bit, AdamW, AdamW8bit, LowbitOptimizer
from lowbit.trust import LAMB, LARS

__version__ = _version("lowbit")

__all__ = [
    "APOLLO",
    "CAME",
    "LAMB",
    "LARS",
    "APOLLOMini",
    "Adafactor",
    "Adam",
    "Adam8bit",
    "AdamW",
    "AdamW8bit",
    "Fira",
    "LowbitOptimizer",
    "__version__",
    "catalog",
    "load_optimizer",
    "param_groups",
    "scaled",
]
