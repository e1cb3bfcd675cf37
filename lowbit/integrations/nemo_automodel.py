"""NeMo Automodel: an optimizer of lowbit, named in the YAML file.

optimizer:
  _target_: lowbit.integrations.nemo_automodel.LowbitConfig
  optimizer: AdamW
  lr: 1.0e-5
  options: {state_format: 4bit}
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from nemo_automodel.components.optim.optimizer import OptimizerConfig
from torch import nn

from lowbit.config.hints import outside
from lowbit.config.overrides import clean_name
from lowbit.optim.named import groups_for, no_optimizer, optimizer_named
from lowbit.optim.optimizer import LowbitOptimizer

# The options that are those of `lowbit.param_groups` and `lowbit.muon_param_groups`.
OF_GROUPS = ("embeddings", "heads", "no_decay")


@dataclass
class LowbitConfig(OptimizerConfig):
    """Builds an optimizer of lowbit for each part of a model, with names, and groups as
    `lowbit.param_groups` makes them.

    `_target_: lowbit.AdamW` works too, but Automodel passes that class parameters without names:
    random bits then go by position.

    Attributes:
        optimizer: a class of lowbit; "AdamW" by default.
        lr: learning rate; 1e-4 by default, as Automodel's other optimizers have.
        weight_decay: 0.01 by default.
        options: further arguments of that class (`betas`, `state_format`), and `embeddings`,
            `heads` and `no_decay` of `lowbit.param_groups`; none by default.
        param_group_overrides: Automodel's, patterns with `lr_mult` and `wd_mult` for its scheduler.
    """

    supports_megatron_fsdp_sharding: ClassVar[bool] = False

    optimizer: str = "AdamW"
    lr: float = 1e-4
    weight_decay: float = 0.01
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        cls = optimizer_named(self.optimizer)
        if cls is None:
            raise ValueError(
                f"lowbit has no optimizer {self.optimizer!r}{no_optimizer(self.optimizer)}"
            )
        self._cls: Callable[..., LowbitOptimizer] = cls

    def build(
        self, model: Any, *, device_mesh: Any = None, is_peft: bool = False
    ) -> list[LowbitOptimizer]:
        """One optimizer for each of `model.parts`, or for the model.
        Warns of each override that no parameter gets.
        """
        matched: set[int] = set()
        parts = getattr(model, "parts", [model])
        made = [self._build_optimizer(self._groups(part, matched)) for part in parts]
        for number, rule in enumerate(self.param_group_overrides):
            if number not in matched:
                warnings.warn(
                    f"the pattern {rule.pattern!r} of param_group_overrides matches no parameter "
                    "of this rank that an earlier pattern leaves",
                    stacklevel=outside(),
                )
        return made

    def _build_optimizer(self, params: Any, *, foreach: bool | None = None) -> LowbitOptimizer:
        options: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in self.options.items()
            if key not in OF_GROUPS
        }
        return self._cls(params, lr=self.lr, weight_decay=self.weight_decay, **options)

    def _groups(self, part: nn.Module, matched: set[int]) -> list[dict[str, Any]]:
        """The groups of `lowbit.param_groups`, or for MuonWithAdamW of `lowbit.muon_param_groups`,
        split by the first override whose pattern is found in a name.

        Numbers of such overrides are added to `matched`.
        """
        rules = [(re.compile(each.pattern), each) for each in self.param_group_overrides]
        made: list[dict[str, Any]] = []
        special = {key: self.options[key] for key in OF_GROUPS if key in self.options}
        for group in groups_for(self._cls)(part, **special):
            split: dict[int, dict[str, Any]] = {}
            for name, p in zip(group["param_names"], group["params"], strict=True):
                number = next(
                    (i for i, (regex, _) in enumerate(rules) if regex.search(clean_name(name))), -1
                )
                own = {**group, "params": [], "param_names": []}
                if number >= 0:
                    matched.add(number)
                    rule = rules[number][1]
                    own |= {"lr_mult": rule.lr_mult, "wd_mult": rule.wd_mult}
                chosen = split.setdefault(number, own)
                chosen["params"].append(p)
                chosen["param_names"].append(name)
            made += [split[number] for number in sorted(split)]
        if not made:
            raise ValueError("a part of the model has no parameter that requires a gradient")
        return made
