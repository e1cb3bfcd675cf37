"""Parameter groups that know module types."""

from __future__ import annotations

import glob
from typing import Any

from torch import nn

from lowbit import fsdp1
from lowbit.overrides import clean_name

HEAD_NAMES = ("lm_head", "embed_out", "output", "head", "score")


def param_groups(model: nn.Module, **options: Any) -> list[dict[str, Any]]:
    """Named groups for `lowbit.AdamW`: embeddings and output heads keep wide state, everything else the optimizer's format.

    Rare tokens leave their rows of an embedding with gradients of zero for many steps and then a large one, and the head sees the same
    words; both are where 8-bit state costs quality first. Wide are the weights of `nn.Embedding` and `nn.EmbeddingBag`, every weight tied
    to one, and `nn.Linear` heads: those called lm_head, embed_out, output, head or score, and the model's last one if it is as wide as a
    vocabulary (`out_features` is some embedding's `num_embeddings`).

    Args:
        model: before or after `fully_shard`; DDP, FSDP1 and compiled wrappers are seen through.
        options: put into both groups (`lr=...`, `weight_decay=...`).

    Returns:
        One or two groups with `params` and `param_names`, the second with `wide=True`. Parameters that need no gradient are left out. What FSDP1 has
        flattened into one (`use_orig_params=False`) is in the first group, whose `wide` then names the weights in it.
    """
    embeddings = [m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    named = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    linears = [(clean_name(name + ".").rstrip("."), m) for name, m in named]
    heads = [m for name, m in linears if name.rsplit(".", 1)[-1] in HEAD_NAMES]
    if linears and linears[-1][1].out_features in {m.num_embeddings for m in embeddings}:
        heads.append(linears[-1][1])
    wide = {id(m.weight) for m in (*embeddings, *heads)}
    flattened = [glob.escape(name) for name in fsdp1.flattened_weights(model, [*embeddings, *heads])]  # fmt: skip
    groups: list[dict[str, Any]] = [
        {"params": [], "param_names": [], **({"wide": flattened} if flattened else {}), **options},
        {"params": [], "param_names": [], "wide": True, **options},
    ]
    for name, p in model.named_parameters():  # a tied parameter comes once
        if p.requires_grad:
            group = groups[id(p) in wide]
            group["params"].append(p)
            group["param_names"].append(name)
    return [group for group in groups if group["params"]]
