"""lowbit: low-bit optimizers for PyTorch.

State and weights are the same bits for any number of ranks, any sharding and any processor. See the README for a start and docs/formats.md for what
the bytes mean.
"""

from importlib.metadata import version as _version

from lowbit import elastic, fsdp1
from lowbit.adafactor import CAME, Adafactor
from lowbit.adam import Adam, AdamW
from lowbit.ademamix import AdEMAMix
from lowbit.apollo import APOLLO, APOLLOMini, Fira
from lowbit.clip import clip_grad_norm_, clip_scale
from lowbit.gradients import accumulate
from lowbit.groups import param_groups
from lowbit.load import load_optimizer
from lowbit.optim import LowbitOptimizer
from lowbit.overrides import override
from lowbit.peers import (
    Adagrad8bit,
    Adam4bit,
    Adam8bit,
    AdamFp8,
    AdamW4bit,
    AdamW8bit,
    AdamWFp8,
    AdEMAMix8bit,
    LAMB8bit,
    LARS8bit,
    Lion8bit,
    RMSprop8bit,
    SGD8bit,
)
from lowbit.precise import (
    get_fp32_model_state_dict,
    set_fp32_model_state_dict,
    to_master_free,
)
from lowbit.presets import catalog, scaled
from lowbit.qconfig import qconfig
from lowbit.release import step_in_backward
from lowbit.sgd import SGD, Adagrad, Lion, RMSprop
from lowbit.stats import Stats
from lowbit.torchastic import StochasticAccumulator
from lowbit.trust import LAMB, LARS

__version__ = _version("lowbit")

__all__ = [
    "APOLLO",
    "CAME",
    "LAMB",
    "LARS",
    "SGD",
    "APOLLOMini",
    "AdEMAMix",
    "AdEMAMix8bit",
    "Adafactor",
    "Adagrad",
    "Adagrad8bit",
    "Adam",
    "Adam4bit",
    "Adam8bit",
    "AdamFp8",
    "AdamW",
    "AdamW4bit",
    "AdamW8bit",
    "AdamWFp8",
    "Fira",
    "LAMB8bit",
    "LARS8bit",
    "Lion",
    "Lion8bit",
    "LowbitOptimizer",
    "RMSprop",
    "RMSprop8bit",
    "SGD8bit",
    "Stats",
    "StochasticAccumulator",
    "__version__",
    "accumulate",
    "catalog",
    "clip_grad_norm_",
    "clip_scale",
    "elastic",
    "fsdp1",
    "get_fp32_model_state_dict",
    "load_optimizer",
    "override",
    "param_groups",
    "qconfig",
    "scaled",
    "set_fp32_model_state_dict",
    "step_in_backward",
    "to_master_free",
]
