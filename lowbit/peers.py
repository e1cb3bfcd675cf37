"""Names and arguments that people know from bitsandbytes and torchao, for optimizers of the same meaning here.

Where a peer's optimizer differs from what its name says (bitsandbytes' Adam decouples weight decay, its RMSprop and Adagrad leave decay out of the
numerator, its SGD ignores dampening and nesterov, its LAMB and LARS do not run in 8 bits on a GPU), these do what the name says.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from lowbit.adam import Adam, AdamW
from lowbit.ademamix import AdEMAMix
from lowbit.optim import LowbitOptimizer
from lowbit.presets import PRESETS, scaled
from lowbit.sgd import SGD, Adagrad, Lion, RMSprop
from lowbit.trust import LAMB, LARS

# bitsandbytes' own keywords, and what to write in their place.
_BITSANDBYTES = {
    "optim_bits": 'state_format="8bit" or "float32"',
    "min_8bit_size": "min_numel=",
    "percentile_clipping": "lowbit.clip_grad_norm_ before the step",
    "block_wise": "nothing: scales always cover blocks",
    "is_paged": 'state_memory="managed", or "pinned"',
    "args": "nothing",
}


def _refuse_bitsandbytes(name: str, options: Iterable[str]) -> None:
    """TypeError for keywords of bitsandbytes that have another name here, or none."""
    if found := [key for key in options if key in _BITSANDBYTES]:
        instead = "; ".join(f"in place of {key} write {_BITSANDBYTES[key]}" for key in found)
        raise TypeError(
            f"lowbit.{name} takes the arguments of lowbit, not bitsandbytes' {', '.join(found)}: {instead}"
        )


class _BitsandbytesName(LowbitOptimizer):
    """An optimizer by its name in bitsandbytes."""

    def __init_subclass__(cls) -> None:
        """What editors, trainers and `inspect` see: the arguments of the optimizer itself."""
        _, *own = inspect.signature(super().__init__).parameters.values()
        cls.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]

    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        _refuse_bitsandbytes(type(self).__name__, kwargs)
        super().__init__(params, *args, **kwargs)


class _TorchaoOptions(LowbitOptimizer):
    """torchao's two keywords as ours: the block length, and how bfloat16 parameters are rounded (None: stochastically, our default)."""

    _preset = "8bit"

    def __init_subclass__(cls) -> None:
        """What editors, trainers and `inspect` see: the arguments of the optimizer itself, and the two."""
        _, *own = inspect.signature(super().__init__).parameters.values()
        _, _, _, *two, _ = inspect.signature(_TorchaoOptions.__init__).parameters.values()
        at = [p.name for p in own].index("state_format")
        cls.__signature__ = inspect.Signature([*own[:at], *two, *own[at:]])  # type: ignore[attr-defined]

    def __init__(
        self,
        params: Any,
        *args: Any,
        block_size: int | None = None,
        bf16_stochastic_round: bool | None = None,
        **kwargs: Any,
    ) -> None:
        _refuse_bitsandbytes(type(self).__name__, kwargs)
        made: dict[str, Any] = {"state_format": self._preset}
        if block_size is not None:
            signed, unsigned = (scaled(name, block=block_size) for name in PRESETS[self._preset])
            made["state_format"] = {"exp_avg": signed, "exp_avg_sq": unsigned}
            if kwargs.get("amsgrad") or (len(args) > 4 and args[4]):
                made["state_format"]["max_exp_avg_sq"] = unsigned
        if bf16_stochastic_round is False:
            made["param_format"] = "nearest"
        super().__init__(params, *args, **{**made, **kwargs})


class AdamW8bit(_TorchaoOptions, AdamW):
    """`AdamW` with state_format="8bit", by bitsandbytes' and torchao's name, with torchao's `block_size` and `bf16_stochastic_round`."""

    _preset = "8bit"


class Adam8bit(_TorchaoOptions, Adam):
    """`Adam` with state_format="8bit", by bitsandbytes' and torchao's name, with torchao's `block_size` and `bf16_stochastic_round`. Unlike bitsandbytes' its weight decay is L2."""

    _preset = "8bit"


class AdamW4bit(_TorchaoOptions, AdamW):
    """`AdamW` with state_format="4bit", by torchao's name, with torchao's `block_size` and `bf16_stochastic_round`."""

    _preset = "4bit"


class Adam4bit(_TorchaoOptions, Adam):
    """`Adam` with state_format="4bit", by torchao's name, with torchao's `block_size` and `bf16_stochastic_round`."""

    _preset = "4bit"


class AdamWFp8(_TorchaoOptions, AdamW):
    """`AdamW` with state_format="fp8", by torchao's name, with torchao's `block_size` and `bf16_stochastic_round`."""

    _preset = "fp8"


class AdamFp8(_TorchaoOptions, Adam):
    """`Adam` with state_format="fp8", by torchao's name, with torchao's `block_size` and `bf16_stochastic_round`."""

    _preset = "fp8"


class Lion8bit(_BitsandbytesName, Lion):
    """`Lion` with 8-bit momentum, by bitsandbytes' name."""


class SGD8bit(_BitsandbytesName, SGD):
    """`SGD` with 8-bit momentum, by bitsandbytes' name."""


class RMSprop8bit(_BitsandbytesName, RMSprop):
    """`RMSprop` with 8-bit state, by bitsandbytes' name."""


class Adagrad8bit(_BitsandbytesName, Adagrad):
    """`Adagrad` with 8-bit sum, by bitsandbytes' name."""


class AdEMAMix8bit(_BitsandbytesName, AdEMAMix):
    """`AdEMAMix` with 8-bit state, by bitsandbytes' name."""


class LAMB8bit(_BitsandbytesName, LAMB):
    """`LAMB` with 8-bit state, by bitsandbytes' name."""


class LARS8bit(_BitsandbytesName, LARS):
    """`LARS` with 8-bit momentum, by bitsandbytes' name."""
