"""Saved state of one parameter: which layout it has, and the tensors of it that are wanted here."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowbit import ops, sharding
from lowbit.state.layout import Layout
from lowbit.state.lazy_tensor import LazyTensor
from lowbit.state.moment import is_own_key, moment_of, with_other_formats
from lowbit.state.settings import some
from lowbit.state.slot import Slot, StateTensor

# Keys that mark another library's state dict, and the library.
PEERS = {
    "__bnb_optimizer_quant_state__": "bitsandbytes",
    "qmap1": "bitsandbytes",
    "absmax1": "bitsandbytes",
    "state1": "bitsandbytes",
    "row_var_q": "adafactor-8bit",
    "variance_q": "adafactor-8bit",
    "qconfig": "lpmm",
    "ema_squared": "torchastic",
    "momentum_buffer": "an SGD with momentum",
    "row_var": "torch Adafactor",
}

# The libraries among them whose files `load_optimizer` reads.
_READ = ("bitsandbytes", "adafactor-8bit", "lpmm", "torchao")


def is_lazy(saved: Mapping[str, Any]) -> bool:
    """Whether saved state lies in a checkpoint that is read while it is converted."""
    return any(isinstance(value, LazyTensor) for value in saved.values())


@dataclass(frozen=True)
class SavedTensor:
    """A saved tensor and the local part of it that is needed."""

    value: Tensor | LazyTensor
    p: Tensor
    entry: StateTensor
    what: str

    def all(self) -> Tensor:
        """The whole local part."""
        return self.rows(0, self.entry.local[0] if self.entry.local else 0)

    def rows(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end) of the local part; the whole part if it has no dimensions."""
        e = self.entry
        if isinstance(self.value, LazyTensor):
            if not e.local:
                return self.value.box((), ())
            offset = (e.offset[0] + begin, *e.offset[1:])
            return self.value.box(offset, (end - begin, *e.local[1:]))
        tensor = sharding.take(self.value, self.p, e.shape, e.local, e.offset, e.follows, self.what)
        if tuple(tensor.shape) != e.local:
            raise ValueError(
                f"{self.what} has the local shape {tuple(tensor.shape)}, expected {e.local}"
            )
        return tensor[begin:end] if tensor.ndim else tensor


def _saved_tensor(
    value: Tensor | LazyTensor, p: Tensor, entry: StateTensor, what: str
) -> SavedTensor:
    """The saved value and its local part.
    Raises ValueError if the value has neither the global nor the local shape.
    """
    shape = tuple(value.shape)
    here = not isinstance(value, LazyTensor) and shape == entry.local
    if shape != entry.shape and not here:
        raise ValueError(
            (
                f"{what} has the shape {shape}, which is neither the whole {entry.shape} nor this "
                f"rank's part {entry.local}"
            )
            if sharding.is_sharded(p)
            else f"{what} has the shape {shape}, and here it is {entry.local}: load a checkpoint "
            "of this model, or load this one into the model that it was saved with"
        )
    return SavedTensor(value, p, entry, what)


def with_known_names(lay: Layout, saved: Mapping[str, Any], key: Any) -> Mapping[str, Any]:
    """torch's state under this library's names.

    torch's SGD and Muon, lion-pytorch's Lion and FlashOptim's SGD and Lion count no steps,
    and torch's Adafactor's means have as many dimensions as the parameter.

    Raises:
        ValueError: SGD's or Muon's momentum is not there, and something unknown is.
    """
    rule = lay.rule.removeprefix("cautious_")
    others = "stream" not in saved and all(map(is_own_key, saved))
    if rule == "lion" and others and "exp_avg" in saved and "step" not in saved:
        return {"step": 1.0, **saved}
    if rule in ("sgd", "sgd_momentum", "muon_momentum") and "step" not in saved:
        # With what load_optimizer reads beside it: its codes, and correction bits of the weight.
        own = {key: value for key, value in saved.items() if is_own_key(key) and value is not None}
        if all(moment_of(name) != "momentum_buffer" for name in own):  # before SGD's first step
            kept = (value is not None for name, value in saved.items() if name not in own)
            if lay.slots and "momentum_buffer" not in saved and any(kept):
                raise unknown(saved, key, "it has no momentum_buffer")
            zeros = torch.zeros(lay.part.local, dtype=torch.float32, device="cpu")
            return {"step": 0.0, "momentum_buffer": zeros, **own}
        return {"step": 1.0, **own}
    if "row_var" in saved and "col_var" in saved:
        row, col = saved["row_var"], saved["col_var"]
        return {**saved, "variance_row": row.squeeze(-1), "variance_col": col.squeeze(-2)}
    return saved


def without_filled_in(
    lay: Layout, saved: Mapping[str, Any], live: Mapping[str, Any], key: Any, broadcast: bool
) -> Mapping[str, Any]:
    """Saved state without the optimizer's own tensors of a moment that it has in another format.

    `set_optimizer_state_dict` with `full_state_dict=True` gives `load_state_dict` what was saved,
    and this optimizer's tensors for the keys that were not: both, where the formats differ.

    Args:
        lay: the layout here.
        saved: the saved state.
        live: the optimizer's state of the parameter.
        key: the state dict's name for the parameter, for errors.
        broadcast: whether ranks have what rank 0 sent them.

    Raises:
        ValueError: only rank 0 has a moment that was saved.
    """
    dropped: set[str] = set()
    for own, others in with_other_formats(lay, saved):
        if not others or not all(name in saved for name in own.keys):
            continue
        if not all(same_memory(saved[name], live.get(name)) for name in own.keys):
            continue  # it was saved in this format too
        if broadcast:
            raise ValueError(
                f"state[{key!r}] was saved as {others[0]!r}, and broadcast_from_rank0=True sends "
                f"only what this optimizer keeps, {own.keys[0]!r}: give every rank the whole state "
                "dict and leave broadcast_from_rank0 out, or call lowbit.load_optimizer, which "
                "reads it from a file"
            )
        dropped.update(own.keys)
    return {name: value for name, value in saved.items() if name not in dropped}


def with_step_of_momentum(lay: Layout, saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Saved state with step 1 where torch's SGD, which counts none, has had its first, the only one
    that is not dampened: `set_optimizer_state_dict` with `full_state_dict=True` filled in step 0.

    All ranks of the parameter's mesh call it, since a rank's own shard may be all zeros.
    """
    momentum, step = saved.get("momentum_buffer"), saved.get("step")
    of_sgd = lay.rule.removeprefix("cautious_") == "sgd_momentum"
    if not of_sgd or step is None or step != 0 or not isinstance(momentum, Tensor):
        return saved
    return {**saved, "step": 1.0} if sharding.has_nonzero(momentum) else saved


def same_memory(a: Any, b: Any) -> bool:
    """Whether two values are one tensor, or the same part of it here."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return False
    a, b = sharding.local(a), sharding.local(b)
    return (a.data_ptr(), a.shape, a.dtype) == (b.data_ptr(), b.shape, b.dtype)


def find_saved(
    p: Tensor, entries: Sequence[StateTensor], saved: Mapping[str, Any], key: Any, cast: str = ""
) -> list[SavedTensor] | None:
    """The local parts of `entries` if the saved state has them in this very format, else None.

    Args:
        cast: the key of a full-precision moment or mean, which may have another float dtype, since
            a copy casts it; "" for none.

    Raises:
        ValueError: a saved tensor has another dtype, or a shape that does not fit.
    """
    if not all(isinstance(saved.get(entry.key), Tensor | LazyTensor) for entry in entries):
        return None
    out = []
    for entry in entries:
        what, value = f"state[{key!r}][{entry.key!r}]", saved[entry.key]
        if value.dtype != entry.dtype:
            if entry.key == cast and value.is_floating_point():
                out.append(_saved_tensor(value, p, entry, what))
                continue
            if any(mark in saved for mark in PEERS):
                raise unknown(saved, key, f"{entry.key} is {value.dtype}, not {entry.dtype}")
            raise ValueError(
                f"{what} is {value.dtype}, not {entry.dtype}: the program that wrote or loaded the "
                "values cast them, and they cannot be recovered; save again without the cast"
            )
        out.append(_saved_tensor(value, p, entry, what))
    return out


def find_source(
    p: Tensor, lay: Layout, slot: Slot, saved: Mapping[str, Any], key: Any
) -> tuple[Slot, list[SavedTensor]]:
    """The saved format of a slot and its tensors: a full-precision or quantized moment of any known
    format.

    Raises:
        ValueError: the saved state has no such moment, or it has a wrong shape.
    """
    for entry in ops.entries("state"):
        first = saved.get(
            slot.name if entry["name"] == "float32" else f"{slot.name}_{entry['name']}"
        )
        if not isinstance(first, Tensor | LazyTensor):
            continue
        if type(first).__module__.startswith("torchao"):
            raise unknown(saved, key, "it holds torchao tensor subclasses", "torchao")
        for source in _ways(slot.name, entry, lay, saved):
            entries = source.entries(lay.part)
            if not source.coded and first.is_floating_point():
                what, e = f"state[{key!r}][{source.key!r}]", entries[0]
                if not sharding.is_sharded(p) and tuple(first.shape) != e.shape:
                    raise ValueError(
                        f"{what} is {first.dtype} {tuple(first.shape)} here, expected floating "
                        f"point {e.shape}"
                    )
                return source, [_saved_tensor(first, p, e, what)]
            kept = find_saved(p, entries, saved, key)
            if kept is not None:
                return source, kept
    raise unknown(saved, key, f"it has no {slot.name}")


def in_other_blocks(lay: Layout, slot: Slot, saved: Mapping[str, Any]) -> bool:
    """Whether a moment is saved in the slot's format, but in blocks of another length."""
    if slot.scale != "block":
        return False
    expected = slot.entries(lay.part)[1]
    scale = saved.get(expected.key)
    if not isinstance(scale, Tensor | LazyTensor):
        return False
    if tuple(scale.shape) in (expected.shape, expected.local):
        return False
    return any(_ways(slot.name, ops.state_format(slot.format), lay, saved))


def _ways(
    name: str, info: Mapping[str, Any], lay: Layout, saved: Mapping[str, Any]
) -> Iterator[Slot]:
    """The slots in which saved state may keep a moment of a format.
    The number of scales gives the block length.
    """
    if not info["scaled"]:
        yield Slot(name, info["name"])
        return
    base = f"{name}_{info['name']}"
    scale = saved.get(base + "_scale")
    if isinstance(scale, Tensor | LazyTensor) and scale.ndim == 2:
        for block in (info["block"], *ops.policy("blocks")):
            slot = Slot(name, info["name"], block, "block")
            if slot.entries(lay.part)[1].shape[1] == scale.shape[1]:
                yield slot
                return
    for kind in ("row", "column", "tensor", "rank1"):
        if any(str(k).startswith(f"{base}_scale_{kind}") for k in saved):
            yield Slot(name, info["name"], 0, kind)


def of_other_programs(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The entries beside lowbit's own state that lowbit did not make, such as the slow weights of
    timm's Lookahead. Those that lie in a checkpoint are left there.
    """
    if "stream" not in saved:
        return {}
    return {
        key: value
        for key, value in saved.items()
        if not is_own_key(key) and not isinstance(value, LazyTensor)
    }


def check_rule(lay: Layout, saved: Mapping[str, Any], key: Any) -> None:
    """Raises ValueError if saved state has a moment that neither the rule nor a variant of it
    keeps: a load would lose it, and step by another rule with the settings of the saved one.
    """
    kept = {moment_of(name) for name in lay.keys} | _moments_of_variants(lay.rule) | {None}
    if lost := {moment_of(name) for name in saved} - kept:
        raise ValueError(
            f"state[{key!r}] keeps {some(sorted(map(str, lost)))}, which the rule here, "
            f"{lay.rule!r}, does not: it is another optimizer's. Build the optimizer that it was "
            "saved with, or start with fresh state"
        )


@functools.cache
def _moments_of_variants(rule: str) -> frozenset[str]:
    """The moments of a rule and of its variants, such as `sgd` and `sgd_momentum`: settings choose
    among them, and a scheduler may change these.
    """

    def base(name: str) -> str:
        return name.removeprefix("cautious_").split("_")[0]

    variants = [other for other in ops.entries("rules") if base(other["name"]) == base(rule)]
    return frozenset(slot["name"] for other in variants for slot in other["slots"])


def lost_compensation(lay: Layout, saved: Mapping[str, Any]) -> str | None:
    """The parameter format of saved correction bits, where a 16-bit weight keeps none here."""
    if lay.compensation or lay.dtype == torch.float32:
        return None
    kept = (str(key) for key in saved if is_own_key(key))
    return next((key.removeprefix("param_") for key in kept if key.startswith("param_")), None)


def _advice_on_own(saved: Mapping[str, Any]) -> str:
    """What to do with state of lowbit's own that lacks something."""
    moments = {moment_of(name) for name in saved} - {None}
    rules = [
        rule["name"]
        for rule in ops.entries("rules")
        if {*(slot["name"] for slot in rule["slots"]), *rule["factors"]} == moments
    ]
    if not moments or not rules:
        return "The checkpoint is incomplete: load another one, or start with fresh state"
    return (
        f"It has the moments of lowbit's {some(rules)}: build the optimizer that it was saved "
        "with. If that is this one, the checkpoint is incomplete: load another one, or start with "
        "fresh state"
    )


def unknown(saved: Mapping[str, Any], key: Any, reason: str, peer: str | None = None) -> ValueError:
    peer = peer or next((name for mark, name in PEERS.items() if mark in saved), None)
    origin = f"; it looks like the state of {peer}" if peer else ""
    whole = {moment_of(name) for name in saved if not str(name).endswith(("_row", "_col"))}
    if any(reason == f"it has no {moment}_row" for moment in whole):
        advice = (
            "That moment is whole there and factored here: lowbit-ckpt convert FILE NEW --to "
            "lowbit --state-format PRESET takes its means; or build the optimizer with another one"
        )
    elif peer is None and "stream" in saved and all(is_own_key(name) for name in saved):
        advice = _advice_on_own(saved)
    elif peer in _READ and not is_lazy(saved):  # a lazy one came through load_optimizer already
        advice = (
            "lowbit.load_optimizer(opt, path) reads the file that torch.save wrote of it. Where a "
            "framework calls load_state_dict, convert that file first: lowbit-ckpt convert FILE "
            "NEW --to lowbit"
        )
    else:
        advice = (
            "Load it with the program that wrote it and save its moments "
            "in float32, or start with fresh state"
        )
    if "stream" in saved and {moment_of(name) for name in saved} - {None} == {"momentum_buffer"}:
        advice += (
            ". Where MuonWithAdamW saved it, put the parameter into a group with use_muon=True"
        )
    return ValueError(
        f"state[{key!r}] is not a layout that can be loaded: {reason}{origin}. It holds "
        f"{sorted(map(str, saved))}. Known are lowbit's own and those of torch's optimizers, such "
        f"as Adam's (step, exp_avg, exp_avg_sq) and SGD's (momentum_buffer). {advice}"
    )
