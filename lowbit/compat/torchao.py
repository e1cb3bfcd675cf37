"""Names and arguments that people know from torchao, for optimizers of the same meaning here."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from lowbit.config.arguments import Options
from lowbit.config.presets import choice, scaled
from lowbit.ops import policy
from lowbit.optim.optimizer import LowbitOptimizer
from lowbit.optim.rules.adam import Adam
from lowbit.optim.rules.adamw import AdamW


class _Options(Options, total=False):
    block_size: int | None
    bf16_stochastic_round: bool | None


class _TorchaoName(LowbitOptimizer):
    """torchao's two keywords for Adam and AdamW.

    Args:
        block_size: the block length of all states; None (default) keeps the preset's. It applies
            to all groups, whether or not they use `amsgrad`.
        bf16_stochastic_round: False rounds bfloat16 parameters to nearest;
            True and None (default) round stochastically.
    """

    _preset = "8bit"
    # The formats of states, signed and not, if `block_size` decides them.
    _blocks: tuple[dict[str, Any], dict[str, Any]] | None = None

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Sets the signature that editors,
        trainers and `inspect` see: its own arguments and torchao's two.
        """
        _, *own = inspect.signature(super().__init__).parameters.values()
        two = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=f"{kind} | None"
            )
            for name, kind in (("block_size", "int"), ("bf16_stochastic_round", "bool"))
        ]
        at = [p.name for p in own].index("state_format")
        own[at:at] = two
        cls.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
        super().__init_subclass__(**keywords)

    if not TYPE_CHECKING:  # a checker goes by the arguments of `_AdamW` and `_Adam`

        def __init__(
            self,
            params: Any,
            *args: Any,
            block_size: int | None = None,
            bf16_stochastic_round: bool | None = None,
            **kwargs: Any,
        ) -> None:
            made: dict[str, Any] = {"state_format": self._preset}
            for theirs, given, ours in (
                ("block_size", block_size, "state_format"),
                ("bf16_stochastic_round", bf16_stochastic_round, "param_format"),
            ):
                if given is not None and ours in kwargs:
                    raise TypeError(
                        f"{theirs}={given!r} and {ours}={kwargs[ours]!r} say the same thing: leave "
                        f"{theirs} out"
                    )
            if block_size is not None:
                if not block_size:  # which `scaled` takes for the format's own
                    least, *_, most = policy("blocks")
                    raise ValueError(
                        f"block_size={block_size!r} should be a power of two from {least} to "
                        f"{most}; leave it out for the preset's"
                    )
                signed, unsigned = (
                    scaled(choice(self._preset, signed=kind)["format"], block=block_size)
                    for kind in (True, False)
                )
                self._blocks = signed, unsigned
                amsgrad = kwargs.get("amsgrad") or (len(args) > 4 and args[4])
                made["state_format"] = self._formats({"amsgrad": amsgrad})
            if bf16_stochastic_round is False:
                made["param_format"] = "nearest"
            super().__init__(params, *args, **{**made, **kwargs})

        def __getstate__(self) -> dict[str, Any]:
            return {**super().__getstate__(), "_blocks": self._blocks}

    def _formats(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """`state_format` of a group by `block_size`: it names exactly the states that there are."""
        assert self._blocks is not None
        signed, unsigned = self._blocks
        made = {"exp_avg": signed, "exp_avg_sq": unsigned}
        return {**made, "max_exp_avg_sq": unsigned} if group["amsgrad"] else made

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict):
            if "block_size" in param_group:
                raise ValueError(
                    f"block_size={param_group['block_size']!r} is for a whole optimizer, not for a "
                    "group of it: give the group state_format={'exp_avg': lowbit.scaled(...), "
                    "'exp_avg_sq': lowbit.scaled(...)}"
                )
            if "bf16_stochastic_round" in param_group:
                raise ValueError(
                    "bf16_stochastic_round is for a whole optimizer, not for a group of it: give "
                    "the group param_format='nearest' or 'auto'"
                )
            if self._blocks is not None and "amsgrad" in param_group:
                param_group.setdefault("state_format", self._formats(param_group))
        super().add_param_group(param_group)

    add_param_group.__doc__ = LowbitOptimizer.add_param_group.__doc__


if TYPE_CHECKING:

    class _AdamW(AdamW):
        def __init__(
            self,
            params: ParamsT,
            lr: float | Tensor = 1e-3,
            betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
            eps: float = 1e-8,
            weight_decay: float = 1e-2,
            amsgrad: bool = False,
            *,
            maximize: bool = False,
            foreach: bool | None = None,
            capturable: bool = False,
            differentiable: bool = False,
            fused: bool | None = None,
            **options: Unpack[_Options],
        ) -> None: ...

    class _Adam(Adam):
        def __init__(
            self,
            params: ParamsT,
            lr: float | Tensor = 1e-3,
            betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
            eps: float = 1e-8,
            weight_decay: float = 0,
            amsgrad: bool = False,
            *,
            foreach: bool | None = None,
            maximize: bool = False,
            capturable: bool = False,
            differentiable: bool = False,
            fused: bool | None = None,
            decoupled_weight_decay: bool = False,
            **options: Unpack[_Options],
        ) -> None: ...
else:
    _AdamW, _Adam = AdamW, Adam


class AdamW8bit(_TorchaoName, _AdamW):
    """`AdamW` with state_format="8bit", under bitsandbytes' and torchao's name.

    It also takes torchao's `block_size` and `bf16_stochastic_round`.
    """

    _preset = "8bit"


class Adam8bit(_TorchaoName, _Adam):
    """`Adam` with state_format="8bit", under bitsandbytes' and torchao's name.

    It also takes torchao's `block_size` and `bf16_stochastic_round`. Its weight decay is L2;
    bitsandbytes' is decoupled.
    """

    _preset = "8bit"


class AdamW4bit(_TorchaoName, _AdamW):
    """`AdamW` with state_format="4bit", under torchao's name.

    It also takes torchao's `block_size` and `bf16_stochastic_round`.
    """

    _preset = "4bit"


class Adam4bit(_TorchaoName, _Adam):
    """`Adam` with state_format="4bit", under torchao's name.

    It also takes torchao's `block_size` and `bf16_stochastic_round`.
    """

    _preset = "4bit"


class AdamWFp8(_TorchaoName, _AdamW):
    """`AdamW` with state_format="fp8", under torchao's name.

    It also takes torchao's `block_size` and `bf16_stochastic_round`.
    """

    _preset = "fp8"


class AdamFp8(_TorchaoName, _Adam):
    """`Adam` with state_format="fp8", under torchao's name.

    It also takes torchao's `block_size` and `bf16_stochastic_round`.
    """

    _preset = "fp8"
