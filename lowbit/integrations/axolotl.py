"""axolotl: a plugin that trains with an optimizer of lowbit, named in the YAML file.

plugins:
  - lowbit.integrations.axolotl.LowbitPlugin
lowbit_optimizer: AdamW
lowbit_options: {state_format: 4bit}
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

import lowbit
from lowbit.integrations.transformers import ScheduleFreeCallback, build, optimizer
from lowbit.optim.optimizer import LowbitOptimizer

TORCHS = ("adamw_torch", "adamw_torch_fused")  # what `optimizer:` may say beside the plugin
# Settings of groups that axolotl makes for other optimizers, and of options that it gives them.
UNREAD = ("lr_groups", "embedding_lr", "embedding_lr_scale", "loraplus_lr_ratio", "optim_args")


class LowbitArgs(BaseModel):
    """The entries that the plugin adds to axolotl's YAML file.

    Attributes:
        lowbit_optimizer: a class of lowbit; "AdamW" by default.
        lowbit_options: further arguments of that class, and `embeddings` and `heads` of
            `lowbit.param_groups`; none by default.
    """

    lowbit_optimizer: str = "AdamW"
    lowbit_options: dict[str, Any] | None = None


class LowbitPlugin(BasePlugin):
    """Gives axolotl's trainer an optimizer of lowbit, as
    `lowbit.integrations.transformers.optimizer` makes it.

    Learning rate, weight decay, betas, epsilon and the schedule are those of the YAML file.
    Leave out `optimizer:`.
    """

    def get_input_args(self) -> str:
        """The class that adds the plugin's entries to the file."""
        return f"{LowbitArgs.__module__}.{LowbitArgs.__name__}"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Sets the trainer's `optimizer_cls_and_kwargs`, and adds `ScheduleFreeCallback` where the
        optimizer needs it.

        Raises:
            ValueError: the file chooses another optimizer too, or has settings of groups or options
                that this one does not read; or as `optimizer` raises it.
        """
        if trainer.optimizer_cls_and_kwargs is not None or cfg.optimizer not in (None, *TORCHS):
            raise ValueError(
                f"the file has optimizer: {cfg.optimizer} beside LowbitPlugin, which chooses "
                f"{cfg.lowbit_optimizer}; leave out one of the two"
            )
        if unread := [name for name in UNREAD if getattr(trainer.args, name, None) is not None]:
            instead = (
                "put an optimizer's options in lowbit_options"
                if unread[0] == "optim_args"
                else "its groups are Trainer's"
            )
            raise ValueError(
                f"the file has {unread[0]}, which LowbitPlugin does not read: {instead}"
            )
        name = cfg.lowbit_optimizer or "AdamW"
        _, given = optimizer(trainer.args, name, **dict(cfg.lowbit_options or {}))
        trainer.optimizer_cls_and_kwargs = (lambda: _build, given)
        if issubclass(given["cls"], lowbit.ScheduleFreeAdamW):
            trainer.add_callback(ScheduleFreeCallback())


def _build(model: Any, *_: Any, **options: Any) -> LowbitOptimizer:
    """The optimizer of a model; axolotl also passes its training arguments,
    and transformers' Trainer does not.
    """
    return build(model, **options)
