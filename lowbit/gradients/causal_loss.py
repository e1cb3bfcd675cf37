"""The loss of a causal language model, in chunks of positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowbit import sharding
from lowbit.gradients.own_loss import difference

IGNORED = -100  # the label of positions without a loss, as in torch.nn.functional.cross_entropy


def causal_loss(
    model: Any, input_ids: Tensor, labels: Tensor | None = None, *, chunk: int | None = 512
) -> Tensor:
    """The mean cross-entropy of the next token, without all logits at once.

    Logits of a context of 4,096 and a vocabulary of 128,256 take 2 GiB in float32, and autograd
    keeps more than one copy. This computes them for `chunk` positions, adds their loss, frees them,
    and computes them again in the backward pass. The number is that of the model's own loss but
    for the order of additions.

    The model's forward pass does not run. At the first call a copy of it runs on the CPU, with
    stand-ins for the base model and the head, and shows what else it does: soft caps and scales of
    logits, layers between the two, labels that are not shifted. All of these are refused, and so is
    a loss of routers that the configuration asks for. A loss that layers add in a way of their own,
    and a forward pass that replaced the one of the model's class, go unseen.

    Args:
        model: a causal language model of transformers, in no wrapper: its parts are called, and a
            wrapper's forward pass would not run. Compute the loss inside the wrapped module then.
        input_ids: [batch, context], int64.
        labels: as `input_ids`, which they are by default; shifted here, and -100 is left out.
        chunk: positions whose logits exist at once; 512 by default. None computes all at once.

    Returns:
        The loss: float32, of no dimensions. NaN without a label, as torch's.

    Raises:
        ValueError: chunk is not positive; the model is not one of transformers, or in a wrapper
            (DDP, FSDP, PEFT); or its own loss is not that of its head alone.
    """
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1, not {chunk}")
    if (reason := refusal(model)) is not None:
        raise ValueError(f"causal_loss {reason}")
    labels = input_ids if labels is None else labels
    head = model.get_output_embeddings()
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


# What a causal language model of transformers has, and no other module all of.
_CALLED = ("base_model", "config", "get_output_embeddings")


def is_wrapped(model: Any) -> bool:
    """Whether something has to happen in the model's own forward pass."""
    inside = hasattr(model, "module") or hasattr(model, "peft_config")
    return inside or sharding.is_fsdp_module(model)


def refusal(model: Any) -> str | None:
    """Why `causal_loss` does not have the model's own loss; None if it has."""
    if is_wrapped(model):
        return (
            "calls the parts of a model, so that the forward pass of this "
            f"{type(model).__name__} would not run, nor its reduction: wrap a module whose forward "
            "returns lowbit.causal_loss(self.model, input_ids)"
        )
    if not all(hasattr(model, name) for name in _CALLED):
        return (
            f"takes a causal language model of transformers, not {type(model).__name__}: use the "
            "model's own loss"
        )
    head = model.get_output_embeddings()
    if head is None:
        return "takes a causal language model, and this one has no output embeddings"
    if any(getattr(each, "output_router_logits", False) for each in _configs(model)):
        return (
            "leaves out the loss of the model's router (output_router_logits=True): use the "
            "model's own loss"
        )
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    if (other := difference(model, head)) is not None:
        return (
            "calls a model's base model and its head alone, and the forward pass of "
            f"{type(model).__name__} {other}: use the model's own loss"
        )
    return None


def _configs(model: Any) -> list[Any]:
    """The model's configuration, and those inside, such as that of its text."""
    return [model.config, *(v for v in vars(model.config).values() if hasattr(v, "model_type"))]


def _sum(head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = head(hidden).float()
    return nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED)
