"""Parameter groups that know module types."""

from __future__ import annotations

import fnmatch
import glob
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

from lowbit import sharding
from lowbit.config.arguments import check_model
from lowbit.config.hints import did_you_mean
from lowbit.config.overrides import clean_name, remember_names
from lowbit.config.types import StateFormat
from lowbit.optim import left_out

HEAD_NAMES = ("lm_head", "embed_out", "output", "head", "score")
# What PEFT puts behind the name of a layer that it wraps: `score.modules_to_save.default`.
_PEFT_PARTS = re.compile(r"\.(?:modules_to_save\.[^.]+|original_module|base_layer)$")
# What torch.nn.utils' weight_norm, spectral_norm and pruning put in the place of `weight`.
_STORED = ("weight", "weight_g", "weight_v", "weight_orig")
_Stored: TypeAlias = tuple[nn.Module, str]  # a module, and the name of a tensor in it
_Special: TypeAlias = tuple[list[_Stored], StateFormat | None]


def param_groups(
    model: nn.Module,
    *,
    embeddings: StateFormat | None = None,
    heads: StateFormat | None = None,
    no_decay: bool | Sequence[str] = False,
    **options: Any,
) -> list[dict[str, Any]]:
    """Named groups for an optimizer: embeddings and output heads, and all else.

    Embeddings are the weights of `nn.Embedding` and `nn.EmbeddingBag`, and weights tied to them.
    Heads are `nn.Linear` layers called lm_head, embed_out, output, head or score, also inside a
    wrapper of PEFT; or the model's last linear layer, if it is as wide as a vocabulary
    (`out_features` is some embedding's `num_embeddings`). A weight that is both counts as an
    embedding. Under a parametrization such as weight norm, the parameters that a weight is
    computed from count as that weight. All of them keep the optimizer's `state_format` unless
    said otherwise: 8-bit state changes the loss by less than chance, as no block has values of
    two rows (docs/quality.md). Optimizers with a `rank` step them without a subspace.

    Args:
        model: before or after `fully_shard`. Wrappers of DDP, FSDP1 and torch.compile are ignored.
        embeddings: the `state_format` of embeddings, tied or not, such as "float32"; None (default)
            is the optimizer's.
        heads: that of heads which are not tied to an embedding; None (default) is the optimizer's.
        no_decay: what gets `weight_decay=0.0`. True: biases, all else with fewer than two
            dimensions, and the weights of `nn.LayerNorm` and `nn.RMSNorm`; or patterns of names
            (`fnmatch`), such as ["*.bias", "*norm*"]. False (default): nothing. Dimensions are
            those of the whole parameter, also where FSDP1 shows a flat slice of it.
        options: added to all groups (`lr=...`, `weight_decay=...`).

    Returns:
        Groups with `params` and `param_names`: all else, and one for each format that embeddings
        and heads have; each in two where `no_decay` divides it, what decays first. Parameters that
        require no gradient are left out; `model.named_parameters()` has them, for training that
        unfreezes some later. A parameter that FSDP1 flattened
        (`use_orig_params=False`) is in the first group, whose `full_precision` (float32) or
        `overrides` then name the weights in it. These `overrides` take the place of the
        optimizer's: pass those here.

    Raises:
        TypeError: `model` is not a module, such as `model.parameters()`; `no_decay` is neither a
            bool nor patterns; or an option is nearly the name of an argument, such as `nodecay`.
        ValueError: a pattern of `no_decay` matches no name, or it divides what FSDP1 flattened
            into one parameter.
    """
    check_model("param_groups", model)
    _refuse_misspelt("param_groups", options, ("embeddings", "heads", "no_decay"))
    special = _special(model, embeddings, heads)
    groups = [_flattened(model, special, options)]
    return _grouped(model, groups, special, lambda p: 0, no_decay)


def muon_param_groups(
    model: nn.Module,
    *,
    adamw: Sequence[str] = (),
    embeddings: StateFormat | None = None,
    heads: StateFormat | None = None,
    no_decay: bool | Sequence[str] = False,
    **options: Any,
) -> list[dict[str, Any]]:
    """Named groups for `lowbit.MuonWithAdamW`: hidden matrices are stepped by Muon,
    all else by AdamW.

    A hidden matrix is a weight of two dimensions, or of three if it is a batch of matrices such as
    the experts of a mixture. AdamW steps embeddings and heads, as `param_groups` finds them,
    whatever has "embed" in its name, biases of any shape (names that end in "bias"), the weights of
    `nn.LayerNorm`, `nn.RMSNorm` and convolutions, vectors, and single rows or columns.

    Args:
        model: as in `param_groups`.
        adamw: patterns of names (`fnmatch`) that AdamW steps as well, such as those of routers;
            none by default.
        embeddings: as in `param_groups`.
        heads: as in `param_groups`.
        no_decay: as in `param_groups`.
        options: added to all groups (`lr=...`, `weight_decay=...`).

    Returns:
        Groups with `params`, `param_names` and `use_muon`.

    Raises:
        TypeError: `model` is not a module, such as `model.parameters()`; or an option is nearly the
            name of an argument, such as `nodecay`.
        ValueError: FSDP1 flattened a parameter, or a pattern matches no name.
    """
    check_model("muon_param_groups", model)
    _refuse_misspelt("muon_param_groups", options, ("adamw", "embeddings", "heads", "no_decay"))
    for name, p in model.named_parameters():
        if sharding.is_flat(p):
            raise ValueError(
                f"parameter {clean_name(name)!r} is a flat shard of FSDP1, and Muon needs whole "
                "matrices; use fully_shard"
            )
    convolutions = [m for m in model.modules() if isinstance(m, _ConvNd)]
    other = _ids(_stored([*convolutions, *_norms(model)]))
    other |= {id(p) for m in convolutions for p in m.parameters(False)}
    known = _names(model)
    patterns = _patterns("adamw", adamw, (name for names in known.values() for name in names))

    def stepped_by_adamw(p: Tensor) -> int:
        names = known[id(p)]
        hit = any(fnmatch.fnmatch(name, pattern) for name in names for pattern in patterns)
        named = any("embed" in name or _names_bias(name) for name in names)
        # Dimensions last: a lazy module's parameter has none yet.
        return int(id(p) in other or named or hit or not _is_matrix(p))

    groups = [{"use_muon": use_muon, **options} for use_muon in (True, False)]
    return _grouped(model, groups, _special(model, embeddings, heads), stepped_by_adamw, no_decay)


def _refuse_misspelt(function: str, options: Iterable[str], own: Sequence[str]) -> None:
    """Raises TypeError for an option that is nearly an argument: it would have no effect."""
    for name in options:
        if meant := did_you_mean(name, own, cutoff=0.88):
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{meant}")


def _patterns(option: str, given: Sequence[str], names: Iterable[str]) -> tuple[str, ...]:
    """The patterns of an option, each of which matches one of the names at least."""
    patterns = (given,) if isinstance(given, str) else tuple(given)
    known = list(names)
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            raise ValueError(
                f"{option}={pattern!r} matches the name of no parameter: a pattern is for the "
                "whole name, such as '*.bias' for 'head.bias'"
            )
    return patterns


def _special(
    model: nn.Module, embeddings: StateFormat | None, heads: StateFormat | None
) -> list[_Special]:
    """The embeddings, tied to a head or not, and the heads that are not embeddings, with their
    formats.
    """
    found = _stored(_embeddings(model))
    read = _ids(found)
    return [
        (found, embeddings),
        ([each for each in _stored(_heads(model)) if not _ids([each]) & read], heads),
    ]


def _stored(layers: Iterable[nn.Module]) -> list[_Stored]:
    """Where the layers' weights are stored. A parametrized layer computes its weight anew each time
    that it is read, from parameters elsewhere.
    """
    found: list[_Stored] = []
    for layer in layers:
        if parametrize.is_parametrized(layer, "weight"):
            parts = layer.parametrizations["weight"].modules()  # type: ignore[index, union-attr]
            found += [(part, name) for part in parts for name in _tensors(part)]
        else:
            found += [(layer, name) for name in _STORED if name in _tensors(layer)]
    return found


def _ids(stored: Iterable[_Stored]) -> set[int]:
    return {id(_tensors(module)[name]) for module, name in stored}


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """A module's own parameters, and the plain tensors that FSDP1 puts in the place of those which
    it flattened. No attribute is computed.
    """
    every = {**vars(module), **module._parameters}
    return {name: value for name, value in every.items() if isinstance(value, Tensor)}


def _grouped(
    model: nn.Module,
    groups: Sequence[Mapping[str, Any]],
    special: Sequence[_Special],
    number: Callable[[Tensor], int],
    no_decay: bool | Sequence[str],
) -> list[dict[str, Any]]:
    """Those of `groups`, and of embeddings and heads as the last of them is but for their format,
    that have parameters; `number` says which of `groups` any other parameter is in. Each is two
    where a part of it does not decay.
    """
    exempt = _without_decay(model, no_decay)
    formats: list[StateFormat | None] = []
    place: dict[int, int] = {}
    for stored, chosen in special:
        if chosen not in formats:
            formats.append(chosen)
        place |= dict.fromkeys(_ids(stored), len(groups) + formats.index(chosen))
    own = [{**groups[-1], "rank": None, **_kept(chosen)} for chosen in formats]
    made = [
        {**group, **decay, "params": [], "param_names": []}
        for group in (*groups, *own)
        for decay in ({}, {"weight_decay": 0.0})
    ]
    for name, p in model.named_parameters():  # a tied parameter comes once
        if p.requires_grad:
            index = place[id(p)] if id(p) in place else number(p)
            group = made[2 * index + (id(p) in exempt)]
            group["params"].append(p)
            group["param_names"].append(name)
    left_out.remember(model)
    for group in made:
        remember_names(group["params"], group["param_names"])
    return [group for group in made if group["params"]]


class _Original(NamedTuple):
    """A parameter as the model's author knows it."""

    names: tuple[str, ...]  # of a tied parameter, all
    shape: Sequence[int]
    scales: bool  # it is the weight of a normalization layer


def _originals(model: nn.Module) -> dict[int, list[_Original]]:
    """What each parameter of a model holds, by the parameter's id: itself, or what FSDP1 put into
    it.
    """
    norms = _stored(_norms(model))
    scales = _ids(norms)
    inside = set(sharding.flattened_weights(model, norms, clean_name))
    names = _names(model)
    found = {
        id(p): [_Original(tuple(names[id(p)]), _shape(p), id(p) in scales)]
        for p in model.parameters()
    }
    flat: dict[int, list[_Original]] = {}
    for each in sharding.flat_slices_of(model, clean_name):
        known = each.name in inside or id(each.tensor) in scales
        original = _Original((each.name, *each.also), each.shape, known)
        flat.setdefault(id(each.tensor), []).append(original)
    return found | flat


def _names(model: nn.Module) -> dict[int, list[str]]:
    """All names of each parameter, by the parameter's id."""
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(clean_name(name))
    return names


def _without_decay(model: nn.Module, no_decay: bool | Sequence[str]) -> set[int]:
    """The ids of the parameters that get no weight decay. What FSDP1 shows of a parameter is a
    vector, whatever the parameter is: its own names and shape decide.
    """
    if not no_decay:
        return set()
    if no_decay is not True and not isinstance(no_decay, Iterable):
        raise TypeError(f"no_decay is a bool or patterns of names, not {no_decay!r}")
    originals = _originals(model)
    names = [name for held in originals.values() for each in held for name in each.names]
    patterns = () if no_decay is True else _patterns("no_decay", no_decay, names)

    def is_exempt(each: _Original) -> bool:
        if no_decay is True:
            return len(each.shape) < 2 or each.scales or any(map(_names_bias, each.names))
        return any(fnmatch.fnmatch(name, pattern) for name in each.names for pattern in patterns)

    exempt = set()
    for p in model.parameters():
        held = originals[id(p)]
        without = [each.names[0] for each in held if is_exempt(each)]
        if p.requires_grad and 0 < len(without) < len(held):
            other = next(each.names[0] for each in held if not is_exempt(each))
            raise ValueError(
                f"FSDP1 flattened {without[0]!r}, which is not to decay, and {other!r}, which is, "
                "into one parameter: wrap with use_orig_params=True"
            )
        if without:
            exempt.add(id(p))
    return exempt


def _flattened(
    model: nn.Module, special: Sequence[_Special], options: dict[str, Any]
) -> dict[str, Any]:
    """The options of a group, with those of the weights inside what FSDP1 flattened.

    Float32 is named by `full_precision`, which leaves the optimizer's own `overrides` in force.
    """
    inside = {
        glob.escape(name): chosen
        for stored, chosen in special
        for name in sharding.flattened_weights(model, stored, clean_name)
        if chosen is not None
    }
    made = dict(options)
    wide = [name for name, chosen in inside.items() if chosen == "float32"]
    named = options.get("full_precision") or ()
    if wide and named is not True:
        made["full_precision"] = [*([named] if isinstance(named, str) else named), *wide]
    others = {name: _kept(chosen) for name, chosen in inside.items() if chosen != "float32"}
    if others:
        made["overrides"] = {**(options.get("overrides") or {}), **others}
    return made


def _kept(state_format: StateFormat | None) -> dict[str, Any]:
    """The options of a group or an override that keep this format."""
    if state_format is None:
        return {}
    return {"full_precision": True} if state_format == "float32" else {"state_format": state_format}


def _shape(p: Tensor) -> Sequence[int]:
    """DeepSpeed's ZeRO 3 leaves an empty vector of a parameter, with the shape beside it."""
    shape: Sequence[int] = getattr(p, "ds_shape", p.shape)
    return shape


def _is_matrix(p: Tensor) -> bool:
    shape = _shape(p)
    return len(shape) in (2, 3) and min(shape) > 1


def _names_bias(name: str) -> bool:
    """Whether this is a bias, which has two dimensions where experts have one each."""
    return name.endswith("bias")


def _embeddings(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]


def _norms(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, (nn.LayerNorm, nn.RMSNorm))]


def _heads(model: nn.Module) -> list[nn.Module]:
    """The linear layers that are output heads, by their names or their width."""
    named = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    linears = [(_PEFT_PARTS.sub("", clean_name(name + ".").rstrip(".")), m) for name, m in named]
    heads: list[nn.Module] = [m for name, m in linears if name.rsplit(".", 1)[-1] in HEAD_NAMES]
    widths = {m.num_embeddings for m in _embeddings(model)}
    if linears and linears[-1][1].out_features in widths:
        heads.append(linears[-1][1])
    return heads
