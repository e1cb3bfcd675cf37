"""lowbit: low-bit optimizers for PyTorch.

State and weights are the same bits for any number of ranks, any sharding and any processor. See the README for a start and docs/formats.md for what
the bytes mean.
"""

from importlib.metadata import version as _version

from lowbit.adafactor import CAME, Adafactor
from lowbit.groups import param_groups
from lowbit.layout import scaled
from lowbit.load import load_optimizer
from lowbit.ops import catalog
from lowbit.optim import Adam, Adam8bit, AdamW, AdamW8bit, LowbitOptimizer
from lowbit.precise import (
    get_fp32_model_state_dict,
    set_fp32_model_state_dict,
    to_master_free,
)
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
    "__version__",
    "catalog",
    "get_fp32_model_state_dict",
    "load_optimizer",
    "param_groups",
    "scaled",
    "set_fp32_model_state_dict",
    "to_master_free",
]
