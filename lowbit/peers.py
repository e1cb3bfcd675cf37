"""Names and arguments that people know from bitsandbytes and torchao, for optimizers of the same meaning here.

Where a peer's optimizer differs from what its name says (bitsandbytes' Adam decouples weight decay, its RMSprop and Adagrad leave decay out of the
numerator, its SGD ignores dampening and nesterov, its LAMB and LARS do not run in 8 bits on a GPU), these do what the name says.
"""

from __future__ import annotations

from typing import Any

from lowbit.adam import Adam, AdamW
from lowbit.ademamix import AdEMAMix
from lowbit.presets import PRESETS, scaled
from lowbit.sgd import SGD, Adagrad, Lion, RMSprop
from lowbit.trust import LAMB, LARS


def torchao_options(
    preset: str, block_size: int | None, bf16_stochastic_round: bool | None, given: dict[str, Any]
) -> dict[str, Any]:
    """torchao's two keywords as ours: the block length, and how bfloat16 parameters are rounded (None: stochastically, our default)."""
    made: dict[str, Any] = {"state_format": preset}
    if block_size is not None:
        signed, unsigned = PRESETS[preset]
        made["state_format"] = {
            "exp_avg": scaled(signed, block=block_size),
            "exp_avg_sq": scaled(unsigned, block=block_size),
        }
    if bf16_stochastic_round is False:
        made["param_format"] = "nearest"
    return {**made, **given}


class AdamW8bit(AdamW):
    """`AdamW` by the name that bitsandbytes and torchao give it; `state_format="8bit"` is the default anyway."""


class Adam8bit(Adam):
    """`Adam` by the name that bitsandbytes and torchao give it; unlike bitsandbytes' its weight decay is L2."""


class Lion8bit(Lion):
    """`Lion` with 8-bit momentum, by bitsandbytes' name."""


class SGD8bit(SGD):
    """`SGD` with 8-bit momentum, by bitsandbytes' name."""


class RMSprop8bit(RMSprop):
    """`RMSprop` with 8-bit state, by bitsandbytes' name."""


class Adagrad8bit(Adagrad):
    """`Adagrad` with an 8-bit sum, by bitsandbytes' name."""


class AdEMAMix8bit(AdEMAMix):
    """`AdEMAMix` with 8-bit state, by bitsandbytes' name."""


class LAMB8bit(LAMB):
    """`LAMB` with 8-bit state, by bitsandbytes' name."""


class LARS8bit(LARS):
    """`LARS` with 8-bit momentum, by bitsandbytes' name."""


class AdamW4bit(AdamW):
    """`AdamW` with state_format="4bit", by torchao's name, with its keywords `block_size` and `bf16_stochastic_round`."""

    def __init__(
        self,
        params: Any,
        *args: Any,
        block_size: int | None = None,
        bf16_stochastic_round: bool | None = None,
        **kwargs: Any,
    ) -> None:
        made = torchao_options("4bit", block_size, bf16_stochastic_round, kwargs)
        super().__init__(params, *args, **made)


class Adam4bit(Adam):
    """`Adam` with state_format="4bit", by torchao's name, with its keywords `block_size` and `bf16_stochastic_round`."""

    def __init__(
        self,
        params: Any,
        *args: Any,
        block_size: int | None = None,
        bf16_stochastic_round: bool | None = None,
        **kwargs: Any,
    ) -> None:
        made = torchao_options("4bit", block_size, bf16_stochastic_round, kwargs)
        super().__init__(params, *args, **made)


class AdamWFp8(AdamW):
    """`AdamW` with state_format="fp8", by torchao's name, with its keywords `block_size` and `bf16_stochastic_round`."""

    def __init__(
        self,
        params: Any,
        *args: Any,
        block_size: int | None = None,
        bf16_stochastic_round: bool | None = None,
        **kwargs: Any,
    ) -> None:
        made = torchao_options("fp8", block_size, bf16_stochastic_round, kwargs)
        super().__init__(params, *args, **made)


class AdamFp8(Adam):
    """`Adam` with state_format="fp8", by torchao's name, with its keywords `block_size` and `bf16_stochastic_round`."""

    def __init__(
        self,
        params: Any,
        *args: Any,
        block_size: int | None = None,
        bf16_stochastic_round: bool | None = None,
        **kwargs: Any,
    ) -> None:
        made = torchao_options("fp8", block_size, bf16_stochastic_round, kwargs)
        super().__init__(params, *args, **made)
