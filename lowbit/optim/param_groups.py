"""Parameter groups that know module types."""

from __future__ import annotations

import glob
from typing import Any

from torch import nn

from lowbit import sharding
from lowbit.config.overrides import clean_name, remember_names

HEAD_NAMES = ("lm_head", "embed_out", "output", "head", "score")


def param_groups(model: nn.Module, **options: Any) -> list[dict[str, Any]]:
    """Named groups for an optimizer: embeddings and output heads keep full-precision state, all else the chosen format.

    Both are where 8-bit state first costs quality. Rows of rare tokens have zero gradients for many steps and then a
    large one, and the head sees the same words. Full precision covers the weights of `nn.Embedding` and
    `nn.EmbeddingBag`, weights tied to them, and `nn.Linear` heads. A head is called lm_head, embed_out, output, head
    or score; or it is the model's last linear layer and as wide as a vocabulary (`out_features` is some embedding's
    `num_embeddings`).

    Args:
        model: before or after `fully_shard`. Wrappers of DDP, FSDP1 and torch.compile are ignored.
        options: added to both groups (`lr=...`, `weight_decay=...`).

    Returns:
        One or two groups with `params` and `param_names`; the second has `full_precision=True`. Parameters that
        require no gradient are left out. A parameter that FSDP1 flattened (`use_orig_params=False`) is in the first
        group, whose `full_precision` then names the weights in it.

    Raises:
        TypeError: `model` is no module, such as `model.parameters()`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"param_groups takes the model, not {type(model).__name__}: lowbit.param_groups(model)"
        )
    embeddings = [m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    named = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    linears = [(clean_name(name + ".").rstrip("."), m) for name, m in named]
    heads = [m for name, m in linears if name.rsplit(".", 1)[-1] in HEAD_NAMES]
    if linears and linears[-1][1].out_features in {m.num_embeddings for m in embeddings}:
        heads.append(linears[-1][1])
    full_precision = {id(m.weight) for m in (*embeddings, *heads)}
    inside = sharding.flattened_weights(model, [*embeddings, *heads], clean_name)
    flattened = [glob.escape(name) for name in inside]
    groups: list[dict[str, Any]] = [
        {
            "params": [],
            "param_names": [],
            **({"full_precision": flattened} if flattened else {}),
            **options,
        },
        {"params": [], "param_names": [], "full_precision": True, **options},
    ]
    for name, p in model.named_parameters():  # a tied parameter comes once
        if p.requires_grad:
            group = groups[id(p) in full_precision]
            group["params"].append(p)
            group["param_names"].append(name)
    for group in groups:
        remember_names(group["params"], group["param_names"])
    return [group for group in groups if group["params"]]
