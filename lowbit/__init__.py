"""lowbit: low-bit optimizers for PyTorch.

From the same gradients, state and weights are the same bits for any number of ranks, any sharding
and any processor.
README.md shows the first steps; docs/definitions/formats.md defines the bytes.
"""

from importlib.metadata import version as _version

from lowbit import elastic, flat, fsdp1
from lowbit.checkpoint.full_precision import (
    get_fp32_model_state_dict,
    set_fp32_model_state_dict,
    to_master_free,
)
from lowbit.checkpoint.load_optimizer import load_optimizer
from lowbit.compat.bitsandbytes import (
    Adagrad8bit,
    AdEMAMix8bit,
    LAMB8bit,
    LARS8bit,
    Lion8bit,
    RMSprop8bit,
    SGD8bit,
)
from lowbit.compat.names import missing as _missing
from lowbit.compat.torchao import (
    Adam4bit,
    Adam8bit,
    AdamFp8,
    AdamW4bit,
    AdamW8bit,
    AdamWFp8,
)
from lowbit.compat.torchastic import StochasticAccumulator
from lowbit.config.overrides import override
from lowbit.config.presets import catalog, scaled
from lowbit.config.qconfig import qconfig
from lowbit.gradients.accumulate import accumulate
from lowbit.gradients.causal_loss import causal_loss
from lowbit.gradients.clip import clip_grad_norm_, clip_scale
from lowbit.gradients.reproducible import check_reproducible
from lowbit.gradients.step_in_backward import step_in_backward
from lowbit.optim.ema import EMA
from lowbit.optim.optimizer import LowbitOptimizer
from lowbit.optim.param_groups import muon_param_groups, param_groups
from lowbit.optim.report import Stats
from lowbit.optim.rules.adafactor import Adafactor
from lowbit.optim.rules.adagrad import Adagrad
from lowbit.optim.rules.adam import Adam
from lowbit.optim.rules.adamw import AdamW
from lowbit.optim.rules.ademamix import AdEMAMix
from lowbit.optim.rules.apollo import APOLLO
from lowbit.optim.rules.apollo_mini import APOLLOMini
from lowbit.optim.rules.came import CAME
from lowbit.optim.rules.fira import Fira
from lowbit.optim.rules.lamb import LAMB
from lowbit.optim.rules.lars import LARS
from lowbit.optim.rules.lion import Lion
from lowbit.optim.rules.muon import Muon
from lowbit.optim.rules.muon_with_adamw import MuonWithAdamW
from lowbit.optim.rules.rmsprop import RMSprop
from lowbit.optim.rules.schedule_free import ScheduleFreeAdamW
from lowbit.optim.rules.sgd import SGD
from lowbit.planning.estimate import estimate

__version__ = _version("lowbit")
globals()["__getattr__"] = _missing  # a type checker that saw it would take every name for one

__all__ = [
    "APOLLO",
    "CAME",
    "EMA",
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
    "Muon",
    "MuonWithAdamW",
    "RMSprop",
    "RMSprop8bit",
    "SGD8bit",
    "ScheduleFreeAdamW",
    "Stats",
    "StochasticAccumulator",
    "__version__",
    "accumulate",
    "catalog",
    "causal_loss",
    "check_reproducible",
    "clip_grad_norm_",
    "clip_scale",
    "elastic",
    "estimate",
    "flat",
    "fsdp1",
    "get_fp32_model_state_dict",
    "load_optimizer",
    "muon_param_groups",
    "override",
    "param_groups",
    "qconfig",
    "scaled",
    "set_fp32_model_state_dict",
    "step_in_backward",
    "to_master_free",
]
