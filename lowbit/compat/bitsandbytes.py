"""Names that people know from bitsandbytes, for optimizers of the same meaning here.

Where bitsandbytes' optimizer differs from what its name says (its Adam decouples weight decay, its
RMSprop and Adagrad leave decay out of the numerator, its SGD ignores dampening and nesterov, its
LAMB and LARS do not run in 8 bits on a GPU), these do what the name says. Its Adam8bit and
AdamW8bit are in torchao.py, which has the same names.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lowbit.optim.optimizer import LowbitOptimizer
from lowbit.optim.rules.adagrad import Adagrad
from lowbit.optim.rules.ademamix import AdEMAMix
from lowbit.optim.rules.lamb import LAMB
from lowbit.optim.rules.lars import LARS
from lowbit.optim.rules.lion import Lion
from lowbit.optim.rules.rmsprop import RMSprop
from lowbit.optim.rules.sgd import SGD

# bitsandbytes' own keywords and their replacements.
_BITSANDBYTES = {
    "optim_bits": 'state_format="8bit" or "float32"',
    "min_8bit_size": "min_numel=",
    "percentile_clipping": "lowbit.clip_grad_norm_ before the step",
    "block_wise": "nothing: scales always cover blocks",
    "is_paged": 'state_memory="managed", or "pinned"',
    "args": "nothing",
}


def refuse_keywords(name: str, options: Iterable[str]) -> None:
    """Raises TypeError for bitsandbytes' keywords that have another name here, or none."""
    if found := [key for key in options if key in _BITSANDBYTES]:
        instead = "; ".join(f"in place of {key} write {_BITSANDBYTES[key]}" for key in found)
        raise TypeError(
            f"lowbit.{name} takes the arguments of lowbit, not bitsandbytes' "
            f"{', '.join(found)}: {instead}"
        )


class _BitsandbytesName(LowbitOptimizer):
    """An optimizer under its bitsandbytes name."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Sets the signature that editors,
        trainers and `inspect` see: the optimizer's own arguments.
        """
        _, *own = inspect.signature(super().__init__).parameters.values()
        cls.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
        super().__init_subclass__(**keywords)

    if not TYPE_CHECKING:  # a checker goes by the arguments of the optimizer itself

        def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
            refuse_keywords(type(self).__name__, kwargs)
            super().__init__(params, *args, **kwargs)


class Lion8bit(_BitsandbytesName, Lion):
    """`Lion` with 8-bit momentum, under bitsandbytes' name."""


class SGD8bit(_BitsandbytesName, SGD):
    """`SGD` with 8-bit momentum, under bitsandbytes' name."""


class RMSprop8bit(_BitsandbytesName, RMSprop):
    """`RMSprop` with 8-bit state, under bitsandbytes' name."""


class Adagrad8bit(_BitsandbytesName, Adagrad):
    """`Adagrad` with an 8-bit sum, under bitsandbytes' name."""


class AdEMAMix8bit(_BitsandbytesName, AdEMAMix):
    """`AdEMAMix` with 8-bit state, under bitsandbytes' name; the slow average is bfloat16,
    as `AdEMAMix` says.
    """


class LAMB8bit(_BitsandbytesName, LAMB):
    """`LAMB` with 8-bit state, under bitsandbytes' name."""


class LARS8bit(_BitsandbytesName, LARS):
    """`LARS` with 8-bit momentum, under bitsandbytes' name."""
