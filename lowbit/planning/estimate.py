"""Bytes of weights, gradients, state and checkpoint before training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowbit import sharding
from lowbit.config.overrides import clean_name
from lowbit.config.size import parsed
from lowbit.config.types import StateFormat
from lowbit.optim import left_out
from lowbit.optim.ema import EMA_FORMAT, format_of
from lowbit.optim.named import groups_for, no_optimizer, optimizer_named, optimizer_names
from lowbit.optim.optimizer import LowbitOptimizer
from lowbit.planning.fit import Setting, fit
from lowbit.planning.libraries import COUNT, LIBRARIES, MOMENTS, STEP, Library
from lowbit.planning.models import meta_model
from lowbit.planning.report import Estimate, Footprint
from lowbit.planning.weights import Weight, on_ranks, ranks_and_parts, weights_of
from lowbit.state.layout import Layout
from lowbit.state.memory import is_outside
from lowbit.state.slot import StateTensor


def estimate(
    model: Any,
    optimizer: str | Callable[..., LowbitOptimizer] = "AdamW",
    *,
    ranks: Any = None,
    dtype: torch.dtype | None = None,
    full_precision: bool | Sequence[str] | None = None,
    embeddings: StateFormat | None = None,
    heads: StateFormat | None = None,
    ema: bool | str = False,
    device_memory: str | int | None = None,
    step_in_backward: bool = False,
    waiting: str | int | None = None,
    micro_batch: int = 1,
    context: int | None = None,
    checkpointing: bool = False,
    loss_chunk: int | None = None,
    loss: Callable[[nn.Module], Tensor] | None = None,
    **options: Any,
) -> Estimate:
    """What a run will keep in memory and write to a checkpoint,
    under lowbit and under other libraries, and whether it fits on one card.

    The optimizer's own code decides each parameter's state, on the meta device: nothing is
    allocated or stepped, and the model is left as it is. The other libraries' rows are AdamW,
    whatever `optimizer` is.

    Several ranks are those of `fully_shard`: each parameter is split on dimension 0 as torch.chunk
    does, buffers and parameters without dimensions are whole on every rank. A checkpoint is the
    tensors of the model's and the optimizer's state dicts; files add some hundred bytes for each.

    With `device_memory`, `context` or `loss` the result has `fit`: the peaks of forward, backward
    and step on one card, beside torchao's CPUOffloadOptimizer, bitsandbytes' PagedAdamW8bit and
    FlashOptim, and what would make lowbit fit. A forward and a backward pass are traced on the meta
    device for it; what kernels allocate inside themselves is not seen.

    Args:
        model: a module on any device, meta included, sharded by `fully_shard` or not; or a
            configuration of transformers, or the path of a config.json or of its folder, whose
            model is built on the meta device. Files are read locally and never executed.
        optimizer: the name of a class of lowbit, or the class; "AdamW" by default.
        ranks: the number of ranks, or the DeviceMesh that `fully_shard` gets;
            None (default) takes the model's own, and counts a parameter that is not sharded on
            each rank.
        dtype: of the weights under lowbit, torchao and bitsandbytes, as `model.to(dtype)` casts
            them; None (default) keeps the model's.
        full_precision: the optimizer's, which names what keeps float32 state; None (default)
            names nothing.
        embeddings: of `lowbit.param_groups`: the `state_format` of embeddings, tied to a head or
            not; None (default) is the optimizer's.
        heads: that of output heads; None (default) is the optimizer's.
        ema: True counts the averages of a `lowbit.EMA` too, "float32" those in that format. The
            other libraries' rows then count torch's `AveragedModel`, a copy of the whole model in
            its dtype. False (default) counts none.
        device_memory: of the card, such as "24GiB" or a number of bytes; None (default) compares
            with nothing. 0.5 GiB and 5 % of it are kept for CUDA and the allocator's gaps.
        step_in_backward: whether gradients are freed as by `lowbit.step_in_backward`, and as by the
            others' own ways; False by default.
        waiting: of `step_in_backward(overlap=True)`: the gradients that may wait for their steps,
            such as "256MiB"; None (default) counts none, as without overlap. Rules that reduce
            over ranks, such as Muon, let none wait, and take less than this counts.
        micro_batch, context: sequences of a forward pass, 1 by default, and tokens of each.
        checkpointing: whether transformers recomputes each layer in the backward pass; False by
            default.
        loss_chunk: positions whose logits exist at once, as in `lowbit.causal_loss`; None (default)
            computes all at once.
        loss: for other models than those of transformers: gets the model on the meta device and
            returns the loss of a micro-batch. None by default.
        options: the optimizer's other arguments (`state_format="4bit"`, `rank=128`,
            `momentum=0.9`).

    Returns:
        The footprints by library: `print` it, or take `["lowbit"].state` or `as_dict()`.

    Raises:
        TypeError: the model, the optimizer or an option has a wrong type.
        ValueError: as the optimizer's constructor raises it; or the model is wrapped in FSDP1,
            sharded on another dimension, or trains no parameter; or a configuration's model is
            unknown; or the fit of several ranks is asked for; or a pass cannot be traced.
        FileNotFoundError, ModuleNotFoundError: a path does not exist,
            or transformers is not installed.
    """
    make = _class_of(optimizer)
    if not isinstance(model, nn.Module):
        model, dtype = meta_model(model, dtype), None
    ranks, parts = ranks_and_parts(model, ranks)
    groups = _groups(model, make, embeddings=embeddings, heads=heads)
    if full_precision is not None:
        options["full_precision"] = full_precision
    of_card = {"device_memory": device_memory, "context": context, "loss": loss}
    of_fit = {
        "step_in_backward": step_in_backward,
        "waiting": waiting is not None,
        "micro_batch": micro_batch != 1,
        "checkpointing": checkpointing,
        "loss_chunk": loss_chunk is not None,
    }
    asked = _fit_is_asked(of_card, of_fit, ranks)
    weights = weights_of(model, parts)
    stand_ins = _StandIns(make, groups, options, weights, dtype)
    opt, layouts = stand_ins.laid_out()
    trained = [weight for weight, _ in layouts]
    footprints = {"lowbit": _ours(opt, weights, layouts, dtype, ranks, ema)}
    for name, library in LIBRARIES.items():
        footprints[name] = _theirs(library, weights, trained, dtype, ranks, bool(ema))
    found = None
    if asked:
        queued = 0 if waiting is None else parsed(waiting)
        step = Setting(step_in_backward, micro_batch, context, checkpointing, loss_chunk, queued)
        card = None if device_memory is None else parsed(device_memory)
        held = footprints["lowbit"].weights[0]
        found = fit(model, dtype, step, card, loss, stand_ins.on_card, held, trained)
    parameters = [weight for weight in weights if weight.parameter]
    return Estimate(
        type(opt).__name__,
        ranks,
        sum(w.values for w in parameters),
        sum(w.values for w in trained),
        tuple(sorted({str(w.of(dtype).dtype).removeprefix("torch.") for w in parameters})),
        footprints,
        found,
    )


def _fit_is_asked(of_card: Mapping[str, Any], of_fit: Mapping[str, bool], ranks: int) -> bool:
    """Whether any argument asks for the fit on a card.

    ValueError for arguments that only the fit reads where it is not asked for, and for the fit of
    several ranks.
    """
    asking = [f"{name}=" for name, given in of_card.items() if given is not None]
    details = [f"{name}=" for name, given in of_fit.items() if given]
    if details and not asking:
        raise ValueError(
            f"only the fit of a step depends on {', '.join(details)}: ask for it by device_memory= "
            "or context="
        )
    if asking and ranks > 1:
        raise ValueError(
            f"the fit is that of one card, and the model is on {ranks} ranks: ask for the fit on 1 "
            f"rank, and for the bytes of a rank without {' and '.join(asking)}"
        )
    return bool(asking)


# What is estimated


class _StandIns:
    """Parameters on the meta device in the place of the model's, and the optimizer of them with any
    of its options changed.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        groups: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        weights: Sequence[Weight],
        dtype: torch.dtype | None,
    ) -> None:
        self._make, self._options = make, options
        self._groups: list[dict[str, Any]] = []
        self._weight_of: dict[nn.Parameter, Weight] = {}
        of_parameter = {id(weight.tensor): weight for weight in weights}
        for group in groups:
            chosen = [of_parameter[id(p)] for p in group["params"]]
            made = [nn.Parameter(weight.of(dtype)) for weight in chosen]
            self._groups.append({**group, "params": made})
            self._weight_of |= zip(made, chosen, strict=True)

    def laid_out(self, **changed: Any) -> tuple[LowbitOptimizer, list[tuple[Weight, Layout]]]:
        """The optimizer, and the layout of what it keeps for each weight."""
        opt = self._make([dict(group) for group in self._groups], **{**self._options, **changed})
        if not isinstance(opt, LowbitOptimizer):
            raise TypeError(f"estimate takes an optimizer of lowbit, not {type(opt).__name__}")
        return opt, [(self._weight_of[p], lay) for _, p, lay in opt.laid_out()]

    def on_card(self, changed: Mapping[str, Any]) -> tuple[str, int, int]:
        """The title, and the state's bytes on a card of CUDA and in the host's memory."""
        opt, layouts = self.laid_out(**changed)
        memory = {**self._options, **changed}.get("state_memory", "device")
        sizes = [0, 0]
        for _, lay in layouts:
            sizes[0] += _identity_bytes(lay)
            for entry in lay.entries():
                outside = is_outside(lay, entry, torch.device("cuda"), memory)
                sizes[outside] += _entry_bytes(entry.shape, entry)
        title = _title(opt) + ("" if memory == "device" else f", {memory}")
        return title, sizes[0], sizes[1]


def _groups(model: nn.Module, make: Callable[..., Any], **formats: Any) -> list[dict[str, Any]]:
    """The optimizer's groups: those of `lowbit.param_groups`,
    for MuonWithAdamW those of `lowbit.muon_param_groups`.
    """
    for name, p in model.named_parameters():
        if sharding.is_flat(p):
            raise ValueError(
                f"parameter {clean_name(name)!r} is a flat shard of FSDP1; estimate takes the "
                "model before FullyShardedDataParallel wraps it"
            )
    with left_out.unrecorded(model):
        groups = groups_for(make)(model, **formats)
    if groups:
        return groups
    raise ValueError("the model has no parameter that requires a gradient")


def _class_of(optimizer: str | Callable[..., LowbitOptimizer]) -> Callable[..., Any]:
    """The optimizer's class; a name is one of `lowbit.__all__`."""
    if callable(optimizer):
        return optimizer
    if not isinstance(optimizer, str):
        raise TypeError(
            f"optimizer should be a class of lowbit or its name, not a {type(optimizer).__name__}"
        )
    cls = optimizer_named(optimizer)
    if cls is None:
        hint = no_optimizer(optimizer)
        if not hint.endswith("?"):
            hint = f"; it has {', '.join(optimizer_names())}"
        raise ValueError(f"lowbit has no optimizer {optimizer!r}{hint}")
    return cls


# Bytes


def _identity_bytes(lay: Layout) -> int:
    """The step count, and what a layout keeps to know its parameter again."""
    return STEP + sum(t.numel() * t.element_size() for t in lay.identity(0).values())


def _entry_bytes(shape: Sequence[int], entry: StateTensor) -> int:
    return math.prod(shape) * entry.dtype.itemsize


def _ours(
    opt: LowbitOptimizer,
    weights: Sequence[Weight],
    layouts: Sequence[tuple[Weight, Layout]],
    dtype: torch.dtype | None,
    ranks: int,
    ema: bool | str,
) -> Footprint:
    def local(rank: int) -> int:
        total = 0
        for weight, lay in layouts:
            here = lay.at_rows(*weight.rows(rank, ranks))
            total += sum(_entry_bytes(entry.local, entry) for entry in here.entries())
            total += _identity_bytes(lay)
        return total

    trained = [weight for weight, _ in layouts]
    state = on_ranks(trained, ranks, local)
    whole = sum(
        sum(_entry_bytes(entry.shape, entry) for entry in lay.entries()) + _identity_bytes(lay)
        for _, lay in layouts
    )
    held, grads, saved = _model(weights, trained, dtype, ranks)
    note, wide = "", [group["full_precision"] is True for group in opt.param_groups]
    if any(wide):
        which = "all parameters" if all(wide) else "embeddings or heads"
        note = f"{which} keep float32 state, as asked"
    averages, kept = _averages(trained, ranks, ema) if ema else ((), 0)
    return Footprint(_title(opt), held, grads, state, saved + whole + kept, note, averages)


def _title(opt: LowbitOptimizer) -> str:
    formats = {str(f) for g in opt.param_groups for f in [g["state_format"]] if isinstance(f, str)}
    return ", ".join([f"lowbit {type(opt).__name__}", *sorted(formats)])


def _theirs(
    library: Library,
    weights: Sequence[Weight],
    trained: Sequence[Weight],
    dtype: torch.dtype | None,
    ranks: int,
    ema: bool,
) -> Footprint:
    cast = library.dtype or dtype
    bfloat16 = any(w.of(cast).dtype == torch.bfloat16 for w in trained)
    quantized = [w for w in trained if not (w.embedding and library.float32_embeddings)]

    def kept(weight: Weight, rank: int) -> int:
        values = weight.here(rank, ranks)
        if weight.embedding and library.float32_embeddings:
            return MOMENTS * 4 * values
        return library.state(values, weight.of(cast).element_size())

    def local(rank: int) -> int:
        coded = any(library.codebooks(w.here(rank, ranks)) for w in quantized)
        return sum(kept(w, rank) for w in trained) + (library.shared if coded else 0)

    state = on_ranks(trained, ranks, local)
    # A checkpoint has once what every rank holds: whole parameters' state, and step counts.
    once = sum(library.step_bytes if w.split else kept(w, 0) for w in trained)
    held, grads, saved = _model(weights, trained, cast, ranks)
    note = library.note(bfloat16) if ranks > 1 else ""
    averages = tuple(copied + COUNT for copied in held) if ema else ()  # torch's AveragedModel
    checkpoint = saved + sum(state) - (ranks - 1) * once + (saved + COUNT if ema else 0)
    return Footprint(library.title, held, grads, state, checkpoint, note, averages)


def _averages(
    trained: Sequence[Weight], ranks: int, ema: bool | str
) -> tuple[tuple[int, ...], int]:
    """What `lowbit.EMA` keeps on each rank, and what it adds to a checkpoint."""
    size = format_of(EMA_FORMAT if ema is True else ema).itemsize
    beside = COUNT + STEP * len(trained)
    held = on_ranks(
        trained, ranks, lambda rank: sum(w.here(rank, ranks) for w in trained) * size + beside
    )
    return held, sum(w.values for w in trained) * size + COUNT


def _model(
    weights: Sequence[Weight],
    trained: Sequence[Weight],
    dtype: torch.dtype | None,
    ranks: int,
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Weights and gradients of each rank, and the weights of a checkpoint."""
    sizes: Mapping[int, int] = {id(w): w.of(dtype).element_size() for w in weights}

    def held(of: Sequence[Weight]) -> tuple[int, ...]:
        return on_ranks(of, ranks, lambda rank: sum(w.here(rank, ranks) * sizes[id(w)] for w in of))

    saved = sum(w.values * sizes[id(w)] for w in weights if w.saved)
    return held(weights), held(trained), saved
