"""Parameter groups that know module types."""

from __future__ import annotations

import fnmatch
import glob
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from lowbit import sharding
from lowbit.config.overrides import clean_name, remember_names

HEAD_NAMES = ("lm_head", "embed_out", "output", "head", "score")


def param_groups(model: nn.Module, **options: Any) -> list[dict[str, Any]]:
    """Named groups for an optimizer: embeddings and output heads keep full-precision state,
    all else the chosen format.

    Both are where 8-bit state first costs quality. Rows of rare tokens have zero gradients for many
    steps and then a large one, and the head sees the same words. Full precision covers the weights
    of `nn.Embedding` and `nn.EmbeddingBag`, weights tied to them, and `nn.Linear` heads. A head is
    called lm_head, embed_out, output, head or score; or it is the model's last linear layer and as
    wide as a vocabulary (`out_features` is some embedding's `num_embeddings`).

    Args:
        model: before or after `fully_shard`. Wrappers of DDP, FSDP1 and torch.compile are ignored.
        options: added to both groups (`lr=...`, `weight_decay=...`).

    Returns:
        One or two groups with `params` and `param_names`; the second has `full_precision=True`.
        Parameters that require no gradient are left out. A parameter that FSDP1 flattened
        (`use_orig_params=False`) is in the first group, whose `full_precision` then names the
        weights in it.

    Raises:
        TypeError: `model` is no module, such as `model.parameters()`.
    """
    _check_model(model, "param_groups")
    embeddings, heads = _embeddings(model), _heads(model)
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


def muon_param_groups(
    model: nn.Module, *, adamw: Sequence[str] = (), **options: Any
) -> list[dict[str, Any]]:
    """Named groups for `lowbit.MuonWithAdamW`: hidden matrices are stepped by Muon,
    all else by AdamW.

    A hidden matrix is a weight of two dimensions, or of three if it is a batch of matrices such as
    the experts of a mixture. AdamW steps embeddings and heads, as `param_groups` finds them and
    with full-precision state, whatever has "embed" in its name, vectors and single rows or columns,
    and the weights of convolutions.

    Args:
        model: as in `param_groups`.
        adamw: patterns of names (`fnmatch`) that AdamW steps as well, such as those of routers;
            none by default.
        options: added to all groups (`lr=...`, `weight_decay=...`).

    Returns:
        Up to three groups with `params`, `param_names` and `use_muon`.

    Raises:
        TypeError: `model` is no module, such as `model.parameters()`.
        ValueError: FSDP1 flattened a parameter, or a pattern matches no name.
    """
    _check_model(model, "muon_param_groups")
    full_precision = {id(m.weight) for m in (*_embeddings(model), *_heads(model))}
    other = {id(p) for m in model.modules() if isinstance(m, _ConvNd) for p in m.parameters(False)}
    patterns = (adamw,) if isinstance(adamw, str) else tuple(adamw)
    groups: list[dict[str, Any]] = [
        {"params": [], "param_names": [], "use_muon": True, **options},
        {"params": [], "param_names": [], "use_muon": False, **options},
        {"params": [], "param_names": [], "use_muon": False, "full_precision": True, **options},
    ]
    unmatched = set(patterns)
    for name, p in model.named_parameters():
        if sharding.is_flat(p):
            raise ValueError(
                f"parameter {clean_name(name)!r} is a flat shard of FSDP1, and Muon needs whole "
                "matrices; use fully_shard"
            )
        known = clean_name(name)
        hits = {pattern for pattern in patterns if fnmatch.fnmatch(known, pattern)}
        unmatched -= hits
        if not p.requires_grad:
            continue
        hidden = _is_matrix(p) and id(p) not in other and "embed" not in known and not hits
        number = 2 if id(p) in full_precision else 0 if hidden else 1
        groups[number]["params"].append(p)
        groups[number]["param_names"].append(name)
    if unmatched:
        raise ValueError(f"adamw={min(unmatched)!r} matches the name of no parameter")
    for group in groups:
        remember_names(group["params"], group["param_names"])
    return [group for group in groups if group["params"]]


def _is_matrix(p: Tensor) -> bool:
    return p.dim() in (2, 3) and min(p.shape) > 1


def _check_model(model: Any, what: str) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{what} takes the model, not {type(model).__name__}: lowbit.{what}(model)")


def _embeddings(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]


def _heads(model: nn.Module) -> list[nn.Module]:
    """The linear layers that are output heads, by their names or their width."""
    named = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    linears = [(clean_name(name + ".").rstrip("."), m) for name, m in named]
    heads: list[nn.Module] = [m for name, m in linears if name.rsplit(".", 1)[-1] in HEAD_NAMES]
    widths = {m.num_embeddings for m in _embeddings(model)}
    if linears and linears[-1][1].out_features in widths:
        heads.append(linears[-1][1])
    return heads
