"""An exponential moving average of a model's weights, in bfloat16, rounded stochastically so that
small updates are kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lowbit import sharding
from lowbit.config.arguments import check_seed
from lowbit.config.overrides import clean_name
from lowbit.optim.averaged import averaged, by_device, version
from lowbit.step.numbers import capturing
from lowbit.step.versions import raise_versions, versioned

FORMATS = {"bfloat16_stochastic": torch.bfloat16, "float32": torch.float32}
EMA_FORMAT = "bfloat16_stochastic"  # by default
# In a state dict. DCP compares no dtypes, so each format has a name of its own.
_KEYS = {"bfloat16_stochastic": "average_bfloat16", "float32": "average_float32"}


class EMA:
    """An exponential moving average of weights, a replacement for
    `torch.optim.swa_utils.AveragedModel`.

    An average in bfloat16 that is rounded to nearest stands still: with decay 0.999 it loses every
    update but those whose weight is hundreds of its steps away. This one is rounded stochastically,
    so that its expected value is the float32 average, in 2 bytes for each parameter. Its parts lie
    where the weights' parts lie, and it has the same bits on any number of ranks.

        ema = lowbit.EMA(model, decay=0.999)
        for batch in batches:
            ...
            opt.step()
            ema.update_parameters()
        with ema.average_parameters():
            evaluate(model)

    The first update copies the weights; each later one computes average * decay + weight * (1 -
    decay) in float32, and rounds once. Parameters that require no gradient are left out: they are
    their own average. Buffers are left out too, as AveragedModel leaves them by default;
    `torch.optim.swa_utils.update_bn` recomputes those of batch norm.

    Args:
        params: the model, after `fully_shard` and on its device; or, if no parameter is a DTensor,
            parameters or (name, parameter) pairs. Parameters are float32, bfloat16 or float16.
            Random bits follow names, or numbers where parameters have no names.
        decay: the share of the average that an update keeps, in [0, 1); 0.999 by default.
            `ema.decay` may be set between updates, by a schedule.
        state_format: "bfloat16_stochastic" (default, 2 bytes for each parameter) or "float32" (4
            bytes).
        warmup: True keeps at most (1 + n) / (10 + n) in the update after n others, so that the
            first weights are forgotten sooner; False by default.
        seed: of the random bits, an int; 0 by default.

    Attributes:
        averages: name -> average, placed like its parameter: a tensor, or a DTensor.
        n_averaged: the number of updates so far.
        decay: as above.

    Raises:
        TypeError: `params` is nothing of the above, or `seed` is not an int.
        ValueError: the format, the decay or the seed is none of the above; there is nothing to
            average; a parameter has another dtype, is on the meta device, a flat shard of FSDP1 or
            partitioned by ZeRO-3; or two have the same name.
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]],
        decay: float = 0.999,
        *,
        state_format: str = EMA_FORMAT,
        warmup: bool = False,
        seed: int = 0,
    ) -> None:
        dtype = format_of(state_format)
        check_seed(seed)
        self.model = params if isinstance(params, nn.Module) else None
        self.state_format, self.decay, self.warmup, self.seed = state_format, decay, warmup, seed
        _float32_decay(decay)  # raises
        with torch.inference_mode(False):  # whose tensors cannot be updated outside it
            # On the CPU, as loads write it in place.
            self._count = torch.zeros((), dtype=torch.int64, device="cpu")
            self._members = averaged(params, dtype, state_format)
            self._groups = by_device(self._members)
        self.averages: dict[str, Tensor] = {each.name: each.average for each in self._members}
        self._kept: list[Tensor] | None = None  # the weights, in average_parameters
        self._versions: list[int] = []

    @property
    def n_averaged(self) -> int:
        """The number of updates so far."""
        return int(self._count)

    # Updates

    @torch.no_grad()
    def update_parameters(self) -> None:
        """Moves the average toward the weights; call it after `opt.step()`.

        Raises:
            RuntimeError: it is called within `average_parameters` or while a CUDA graph is
                captured; or the model's parameters are others than at construction, or are on
                another device.
            ValueError: `decay` was set to a number that is not in [0, 1).
        """
        self._refuse_within("update_parameters")
        self._check_params()
        if any(capturing(group.device) for group in self._groups):
            raise RuntimeError(
                "update_parameters was called while a CUDA graph is captured: replays would not "
                "count updates, and would draw the same random bits; call it after each replay"
            )
        keep = _float32_decay(self.next_decay())
        if self.n_averaged == 0:
            for each in self._members:
                sharding.local(each.average).zero_()  # weights may not have been numbers before
        # The rule of SGD on the average: decoupled decay leaves `keep` of it,
        # and the gradient is minus the weight.
        hyper = [1.0 - keep, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0]
        for group in self._groups:
            group.update(hyper, self.seed, self.n_averaged)
        self._count += 1

    def next_decay(self) -> float:
        """The share of the average that the next update keeps: 0 for the first, then `decay`,
        or less by `warmup`.
        """
        n = self.n_averaged
        if n == 0:
            return 0.0
        return min(self.decay, (1 + n) / (10 + n)) if self.warmup else self.decay

    # The averages as weights

    @contextlib.contextmanager
    def average_parameters(self) -> Iterator[None]:
        """A context in which the model's weights are the averages;
        afterwards they have their own bits again.

        Weights of the average's dtype change places with it, which takes the memory of one
        parameter. Others, such as float32 weights beside a bfloat16 average, are copied meanwhile.

        Raises:
            RuntimeError: contexts are nested; the model's parameters are others than at
                construction; or the weights were written within.
        """
        self._refuse_within("average_parameters")
        self._check_params()
        self._kept = []
        try:
            self._put_in()
            yield
        finally:
            try:
                written = self._take_out()
            except BaseException:  # Ctrl-C: it continues with the weight where it stopped
                self._take_out()
                raise
        if written is not None:
            raise RuntimeError(
                f"parameter {written!r} was written within average_parameters: the weights are "
                "again what they were before it, and an average of their dtype now has what was "
                "written. Load or step weights outside of it"
            )

    @torch.no_grad()
    def copy_to(self) -> None:
        """Overwrites the model's weights with the averages.

        With split or Kahan weights, build a new optimizer afterwards: it keeps correction bits
        of the weights of before.

        Raises:
            RuntimeError: as `average_parameters` does.
        """
        self._refuse_within("copy_to")
        self._check_params()
        for each in self._members:
            sharding.local(each.p).copy_(sharding.local(each.average))
        self._weights_changed()

    @torch.no_grad()
    def _put_in(self) -> None:
        assert self._kept is not None
        for each in self._members:
            weight, average = sharding.local(each.p).detach(), sharding.local(each.average)
            mine = weight.clone()
            self._kept.append(mine)  # before it is overwritten: Ctrl-C may come between
            weight.copy_(average)
            if weight.dtype == average.dtype:
                average.copy_(mine)
                self._kept[-1] = average
        self._weights_changed()
        self._versions = [version(each.p) for each in self._members]

    @torch.no_grad()
    def _take_out(self) -> str | None:
        """Restores weights and averages. Returns the name of a parameter that was written
        meanwhile, or None.

        If it raises, the next call continues where it stopped.
        """
        kept = self._kept or []
        written = next(
            (
                m.name
                for m, at in zip(self._members, self._versions, strict=False)
                if version(m.p) != at
            ),
            None,
        )
        while kept:  # backwards, since of tied weights the first copy is the weight
            each, mine = self._members[len(kept) - 1], kept[-1]
            weight, average = sharding.local(each.p).detach(), sharding.local(each.average)
            if mine is average:
                kept[-1] = mine = average.clone()
                average.copy_(weight)
            weight.copy_(mine)
            kept.pop()
        self._kept, self._versions = None, []
        self._weights_changed()
        return written

    def _weights_changed(self) -> None:
        raise_versions(versioned(each.p for each in self._members))
        if self.model is not None:
            sharding.reshard(self.model)  # FSDP2 may hold the gathered weights of before

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The averages by name and the number of updates, for `torch.save` and
        `torch.distributed.checkpoint`.

        Returns:
            {"average_bfloat16": {name: tensor}, "n_averaged": int64 tensor}; the key is
            "average_float32" if they are float32. The tensors are the EMA's own, so that loads may
            write into them.

        Raises:
            RuntimeError: it is called within `average_parameters`.
        """
        self._refuse_within("state_dict")
        return {_KEYS[self.state_format]: dict(self.averages), "n_averaged": self._count}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a `state_dict()`, of either format and any sharding; `decay`,
        `warmup` and `seed` stay as they are.

        It also takes the state dict of torch's AveragedModel.

        Raises:
            RuntimeError: it is called within `average_parameters`.
            ValueError: the state dict is of another kind, has other names, a tensor of another
                shape or of integers, or an invalid number of updates.
        """
        self._refuse_within("load_state_dict")
        found, own = _saved(state_dict)
        count = _count(state_dict["n_averaged"])
        missing = sorted(set(self.averages) - set(found))
        more = sorted(set(found) - set(self.averages)) if own else []
        if missing or more:
            what = (
                f"lacks {missing[0]!r}"
                if missing
                else f"has {more[0]!r}, which is not averaged here"
            )
            raise ValueError(
                f"the state dict {what}, and {len(missing) + len(more) - 1} other names differ; "
                "build the EMA of the model that it was saved for"
            )
        taken = []
        for each in self._members:
            part, what = each.lay.part, f"the average of {each.name!r}"
            _check_floating(found[each.name], what)
            dims = tuple(range(len(part.shape)))
            taken.append(
                sharding.take(
                    found[each.name], each.average, part.shape, part.local, part.offset, dims, what
                )
            )
        for each, value in zip(self._members, taken, strict=True):
            sharding.local(each.average).copy_(value)
        self._count.fill_(count)

    # Mistakes

    def _refuse_within(self, what: str) -> None:
        if self._kept is not None:
            raise RuntimeError(
                f"{what} was called within average_parameters, where averages and weights have "
                "changed places; call it outside"
            )

    def _check_params(self) -> None:
        """Raises RuntimeError if the model has other parameters to average than at construction."""
        if self.model is None:
            return
        sharding.reshard(self.model)  # gathered weights are other parameters
        here = {id(each.p): each.name for each in self._members}
        now = {id(p): (name, p.requires_grad) for name, p in self.model.named_parameters()}
        strange = [name for key, (name, trained) in now.items() if trained and key not in here]
        strange += [name for key, name in here.items() if key not in now]
        if strange:
            raise RuntimeError(
                f"parameter {clean_name(strange[0])!r} was replaced, or began to require a "
                "gradient, after the EMA was built: wrap, shard and unfreeze the model first, "
                "then build the EMA"
            )


def format_of(state_format: Any) -> torch.dtype:
    """The dtype of averages in a format of EMA. Raises ValueError for any other name."""
    if isinstance(state_format, str) and state_format in FORMATS:
        return FORMATS[state_format]
    why = (
        "to nearest it stands still"
        if state_format == "bfloat16"
        else "docs/loss/ema.md has what fewer bits do to an average"
    )
    raise ValueError(
        f"state_format={state_format!r}: an average is kept in {' or '.join(FORMATS)}; {why}"
    )


def _float32_decay(decay: Any) -> float:
    """The decay as the operator has it, in float32, so that it and 1 minus it add up to 1.

    Raises:
        ValueError: it is not in [0, 1), or so near to 1 that float32 makes it 1.
    """
    rounded = float(torch.tensor(float(decay), dtype=torch.float32, device="cpu"))
    if not 0.0 <= rounded < 1.0:
        raise ValueError(
            f"Invalid decay value: {decay}; it is a number from 0 to less than 1, in float32 too"
        )
    return rounded


def _saved(state_dict: Mapping[str, Any]) -> tuple[dict[str, Tensor], bool]:
    """The averages in a state dict by name, and whether it is EMA's own."""
    if "n_averaged" in state_dict:
        for key in _KEYS.values():
            if key in state_dict:
                return {clean_name(name): t for name, t in state_dict[key].items()}, True
        # AveragedModel is a wrapper, and what is in it has its prefix.
        inside = {clean_name(k): t for k, t in state_dict.items() if clean_name(k) != k}
        if inside:
            return inside, False
    keys = ", ".join(sorted(map(str, state_dict))[:5])
    raise ValueError(
        f"this is not a state dict of EMA or AveragedModel, but has {keys or 'nothing'}"
    )


def _count(saved: Any) -> int:
    """The number of updates in a state dict."""
    try:
        count = int(saved)
    except (TypeError, ValueError, ArithmeticError, RuntimeError):  # the last is torch's
        count = -1
    if count < 0 or count != saved:
        raise ValueError(f"n_averaged is {saved!r}; it counts updates, so it is an integer from 0")
    return count


def _check_floating(saved: Any, what: str) -> None:
    if isinstance(saved, Tensor) and saved.is_floating_point():
        return
    kind = (
        str(saved.dtype).removeprefix("torch.")
        if isinstance(saved, Tensor)
        else type(saved).__name__
    )
    raise ValueError(f"{what} is {kind} in the state dict; averages are tensors of floating point")
