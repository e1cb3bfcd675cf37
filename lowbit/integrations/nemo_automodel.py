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
        Warns of each override that no parameter gets, and of weight decay that is lost.
        """
        matched: set[int] = set()
        parts = getattr(model, "parts", [model])
        made = [self._build_optimizer(self._groups(part, matched)) for part in parts]
        for opt in made:
            _scale_by_first(opt)
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
        split by the first override whose pattern is found in a name. The first group decays, if
        any does: Automodel's scheduler takes its base values from there.

        Numbers of such overrides are added to `matched`.
        """
        rules = [(re.compile(each.pattern), each) for each in self.param_group_overrides]
        made: list[dict[str, Any]] = []
        special = {key: self.options[key] for key in OF_GROUPS if key in self.options}

        def decays(group: dict[str, Any]) -> bool:
            return "weight_decay" not in group  # which `no_decay` writes

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
                    wd_mult = rule.wd_mult if decays(group) else 0.0
                    own |= {"lr_mult": rule.lr_mult, "wd_mult": wd_mult}
                chosen = split.setdefault(number, own)
                chosen["params"].append(p)
                chosen["param_names"].append(name)
            made += [split[number] for number in sorted(split)]
        if not made:
            raise ValueError("a part of the model has no parameter that requires a gradient")
        first = next(filter(decays, made), made[0])
        return [first, *(group for group in made if group is not first)]


def _scale_by_first(opt: LowbitOptimizer) -> None:
    """Scales the multipliers of overrides by their groups' own learning rate and weight decay.

    Automodel's scheduler gives a group the scheduled value times its multiplier. The base of the
    schedule is the first group's value, and a multiplier that is there already stays as it is.
    """
    first = opt.param_groups[0]
    for group in opt.param_groups:
        for key, mult in (("lr", "lr_mult"), ("weight_decay", "wd_mult")):
            if mult in group and first[key]:
                group[mult] *= group[key] / first[key]
        if group["weight_decay"] and not first["weight_decay"]:
            warnings.warn(
                f"weight_decay is 0 and adamw_weight_decay {group['weight_decay']}: Automodel's "
                "scheduler multiplies the former for all groups, so that none decays. Without "
                "decay for Muon, set weight_decay and an override's wd_mult: 0 for its matrices",
                stacklevel=outside(),
            )
            return
