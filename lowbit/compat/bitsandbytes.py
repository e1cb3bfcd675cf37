"""Names that people know from bitsandbytes, for optimizers of the same meaning here.

Where bitsandbytes' optimizer differs from what its name says (its Adam decouples weight decay, its
RMSprop and Adagrad leave decay out of the numerator, its SGD ignores dampening and nesterov, its
LAMB and LARS do not run in 8 bits on a GPU), these do what the name says. Its Adam8bit and
AdamW8bit are in torchao.py, which has the same names.
"""

from __future__ import annotations

from lowbit.optim.rules.adagrad import Adagrad
from lowbit.optim.rules.ademamix import AdEMAMix
from lowbit.optim.rules.lamb import LAMB
from lowbit.optim.rules.lars import LARS
from lowbit.optim.rules.lion import Lion
from lowbit.optim.rules.rmsprop import RMSprop
from lowbit.optim.rules.sgd import SGD


class Lion8bit(Lion):
    """`Lion` with 8-bit momentum, under bitsandbytes' name."""


class SGD8bit(SGD):
    """`SGD` with 8-bit momentum, under bitsandbytes' name."""


class RMSprop8bit(RMSprop):
    """`RMSprop` with 8-bit state, under bitsandbytes' name."""


class Adagrad8bit(Adagrad):
    """`Adagrad` with an 8-bit sum, under bitsandbytes' name."""


class AdEMAMix8bit(AdEMAMix):
    """`AdEMAMix` with 8-bit state, under bitsandbytes' name; the slow average is bfloat16,
    as `AdEMAMix` says.
    """


class LAMB8bit(LAMB):
    """`LAMB` with 8-bit state, under bitsandbytes' name."""


class LARS8bit(LARS):
    """`LARS` with 8-bit momentum, under bitsandbytes' name."""
