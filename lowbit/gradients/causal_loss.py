"""The loss of a causal language model, in chunks of positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowbit import sharding

IGNORED = -100  # the label of positions without a loss, as in torch.nn.functional.cross_entropy
# What a configuration says of models that change their logits after the head; None, 0 and 1 do not.
_CHANGES = (
    "final_logit_softcapping",
    "logits_scaling",
    "logit_scale",
    "lm_head_multiplier",
    "output_multiplier_scale",
)


def causal_loss(
    model: Any, input_ids: Tensor, labels: Tensor | None = None, *, chunk: int | None = 512
) -> Tensor:
    """The mean cross-entropy of the next token, without all logits at once.

    Logits of a context of 4,096 and a vocabulary of 128,256 take 2 GiB in float32, and autograd
    keeps more than one copy. This computes them for `chunk` positions, adds their loss, frees them,
    and computes them again in the backward pass. The number is that of the model's own loss but
    for the order of additions.

    Args:
        model: a causal language model of transformers, in no wrapper: its parts are called, and a
            wrapper's forward pass would not run. Compute the loss inside the wrapped module then.
        input_ids: [batch, context], int64.
        labels: as `input_ids`, which they are by default; shifted here, and -100 is left out.
        chunk: positions whose logits exist at once; 512 by default. None computes all at once.

    Returns:
        The loss: float32, of no dimensions. NaN without a label, as torch's.

    Raises:
        ValueError: chunk is not positive; the model is in a wrapper (DDP, FSDP, PEFT); or its loss
            or logits are not those of its head alone.
    """
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1, not {chunk}")
    labels = input_ids if labels is None else labels
    if is_wrapped(model):
        raise ValueError(
            f"causal_loss calls the parts of a model, so that the forward pass of this "
            f"{type(model).__name__} would not run, nor its reduction: wrap a module whose forward "
            "returns lowbit.causal_loss(self.model, input_ids)"
        )
    head = model.get_output_embeddings()
    _check(model.config, head)
    hidden = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
    hidden, labels = hidden[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    size = len(labels) if chunk is None else chunk
    total = hidden.new_zeros((), dtype=torch.float32)
    for part, targets in zip(hidden.split(size), labels.split(size), strict=True):
        if chunk is None:
            total = total + _sum(head, part, targets)
        else:
            # its random state cannot matter: a head has no dropout
            total = total + checkpoint(
                _sum, head, part, targets, use_reentrant=False, preserve_rng_state=False
            )
    return total / (labels != IGNORED).sum()


def is_wrapped(model: Any) -> bool:
    """Whether something has to happen in the model's own forward pass."""
    inside = hasattr(model, "module") or hasattr(model, "peft_config")
    return inside or sharding.is_fsdp_module(model)


def comes_in_chunks(model: Any) -> bool:
    """Whether `causal_loss` has the model's own loss."""
    try:
        _check(model.config, model.get_output_embeddings())
    except ValueError:
        return False
    return True


def _sum(head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = head(hidden).float()
    return nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED)


def _check(config: Any, head: Any) -> None:
    if head is None:
        raise ValueError("the model has no output embeddings, so it is not a causal language model")
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            "the model adds a loss of its router (output_router_logits=True), which a loss in "
            "chunks would leave out: use the model's own loss"
        )
    for name in _CHANGES:
        if getattr(config, name, None) not in (None, 0, 1):
            raise ValueError(
                f"the model changes its logits after the head ({name}={getattr(config, name)}), "
                "which a loss in chunks would leave out: use the model's own loss"
            )
