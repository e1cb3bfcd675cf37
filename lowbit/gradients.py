"""Gradients of micro-batches added up in few bits, where autograd, DDP or FSDP2 has just made them."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lowbit import hooks as places
from lowbit import ops, shard
from lowbit.layout import stream_of

_FORMATS = {
    "stochastic": "bfloat16_stochastic",
    "nearest": "bfloat16",
    "kahan": "bfloat16_kahan",
}
_DTYPES: Mapping[Any, torch.dtype] = {
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16, torch.bfloat16: torch.bfloat16,
    "float32": torch.float32, "fp32": torch.float32, torch.float32: torch.float32,
}  # fmt: skip


def accumulate(
    model: nn.Module,
    dtype: str | torch.dtype = "bf16",
    rounding: str = "stochastic",
    *,
    average: int | None = None,
    seed: int = 0,
    hooks: bool = True,
) -> Accumulator:
    """Adds the gradients of micro-batches into buffers of `dtype` while each backward pass runs, and hands them over as `p.grad`.

        accumulator = lowbit.accumulate(model, average=len(micro_batches))
        for i, micro_batch in enumerate(micro_batches):
            with accumulator.micro(last=i == len(micro_batches) - 1):
                loss(model(micro_batch)).backward()
        opt.step()
        opt.zero_grad()

    An exception inside of `micro` takes the whole step back (`reset`). A `p.grad` that is there when a step's first `micro` begins is added as it is,
    undivided, as torch would; without `micro` it cannot be told from the first gradient, so clear it before. Call it on the model as it is trained: after `fully_shard`, on the `DistributedDataParallel` module, after `.to(device)`. On FSDP2 each micro-batch is
    reduced and its shard added; under DDP all but the last run under `no_sync` and the sum is reduced once.

    Args:
        model: its parameters that require gradients are served; shared ones once.
        dtype: of the buffers: "bf16", or "float32". Where it is not a parameter's own, `p.grad` has it all the same (`p.grad_dtype`); under DDP,
            whose buckets have the parameter's dtype, it is converted.
        rounding: of bf16 buffers: "stochastic" (unbiased), "kahan" (twice the memory until the last micro-batch, and close to float32), or "nearest"
            (what torch does: biased, since small gradients are lost).
        average: the number of micro-batches: each gradient is divided by it in float32 as it is added. None: gradients are summed.
        seed: of the random bits, which are a function of it, the parameter's name, the element's place in the whole parameter and the number of
            additions before: the same for any sharding. Under DDP, where every rank adds gradients of its own, the rank is mixed in.
        hooks: False: nothing happens in the backward pass; call `accumulator.add()` behind each. This is what FSDP1 needs.

    Raises:
        ValueError: FSDP1 with hooks, a parameter that has an accumulator or is stepped in backward already, or an argument out of range.
        RuntimeError: in the first forward or backward pass where `fully_shard` or DDP came after this call, or where a DDP backward pass runs
            outside of `micro`.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype should be 'bf16' or 'float32' but is: {dtype!r}")
    if rounding not in _FORMATS:
        raise ValueError(f"rounding should be one of {', '.join(map(repr, _FORMATS))} but is: {rounding!r}")  # fmt: skip
    if average is not None and not average >= 1:
        raise ValueError(f"average should be the number of micro-batches but is: {average!r}")
    kind = _DTYPES[dtype]
    form = _FORMATS[rounding] if kind == torch.bfloat16 else "float32"
    return Accumulator(model, kind, form, 1.0 if average is None else 1.0 / average, seed, hooks)


class Accumulator:
    """What `accumulate` returns."""

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        format: str,
        scale: float,
        seed: int,
        hooks: bool,
    ) -> None:
        self.model, self.dtype, self.format, self.scale = model, dtype, format, scale
        self._ddp = hooks and shard.is_ddp(model)  # behind it, gradients are like any
        self.seed = seed ^ (shard.rank() << 32) if self._ddp else seed
        self._params: dict[Tensor, _Param] = {}
        self._micro = ""  # "", "more" or "last": what `micro` says of the pass that is running
        self._begun = False  # whether a step's first `micro` was entered
        self._handles: list[Any] = []
        if hooks:
            places.check_model(model, "lowbit.accumulate")
        for i, (name, p) in enumerate(model.named_parameters()):
            if p.requires_grad:
                places.check_free(p, name, "lowbit.accumulate", hooks)
                self._params[p] = _Param(p, name, i)
        for q in self._params:
            self._attach(q, hooks)
        self._check_place = functools.partial(
            places.check_place,
            what="lowbit.accumulate",
            names={held.name: p for p, held in self._params.items()},
        )
        if hooks:
            check = model.register_forward_pre_hook(self._check_place, prepend=True)
            self._handles.append(check)

    def _attach(self, p: Tensor, hooks: bool) -> None:
        places.accumulators[p] = weakref.ref(self)
        if hooks:
            self._handles.append(p.register_post_accumulate_grad_hook(self._hook))
        if p.dtype != self.dtype and self._any_dtype(p):
            p.grad_dtype = None  # any

    def _any_dtype(self, p: Tensor) -> bool:
        """Whether p.grad may have another dtype than p."""
        return not self._ddp and not shard.is_flat(p) and hasattr(p, "grad_dtype")

    # Where micro-batches begin and end

    @contextlib.contextmanager
    def micro(self, last: bool) -> Iterator[None]:
        """Around the forward and backward pass of one micro-batch; behind the last, every `p.grad` is the sum, or the average. An exception resets."""
        if self._micro:
            raise RuntimeError("micro-batches do not nest: leave one `accumulator.micro` before entering the next")  # fmt: skip
        self._check_place(self.model)
        enqueued = getattr(self.model, "_static_graph_delay_allreduce_enqueued", True)
        if not last and getattr(self.model, "static_graph", False) and not enqueued:
            raise RuntimeError(
                "DistributedDataParallel(static_graph=True) does not let its first backward pass go unreduced; begin with one micro-batch in "
                "`with accumulator.micro(last=True)`"
            )
        self._micro = "last" if last else "more"
        try:
            if not self._begun:
                self._move_aside()
            with self.model.no_sync() if self._ddp and not last else contextlib.nullcontext():  # type: ignore[operator]
                yield
            if last:
                self.finish()
        except BaseException:
            self.reset()
            raise
        finally:
            self._micro = ""

    def finish(self) -> None:
        """Hands over what there is as `p.grad`. `micro(last=True)` does it by itself; parameters that no micro-batch used keep what they have."""
        if self._ddp and self._micro != "last":
            raise RuntimeError("under DistributedDataParallel the last micro-batch reduces the sum: run it in `with accumulator.micro(last=True)`")  # fmt: skip
        with torch.no_grad():
            if self._ddp:
                self._reduce_left()
            else:
                self._hand_over()
        self._begun = False
        for held in self._params.values():
            held.settled = held.added

    def reset(self) -> None:
        """Takes back what was added since the last step, the counts too that random bits depend on, so that the step can be run again. `micro` does it by
        itself where an exception leaves it. What a last micro-batch has put into `p.grad` already is for `zero_grad()` to clear."""
        self._begun = False
        for held in self._params.values():
            held.clear()
            held.added = held.settled

    @torch.no_grad()
    def _move_aside(self) -> None:
        """Makes gradients from before the step the beginning of the sums: once the first of the step are added to them, both would be divided."""
        self._begun = True
        for p, held in self._params.items():
            if p.grad is None or held.buffer is not None:
                continue
            grad = shard.dense_gradient(p).detach().contiguous()
            held.buffer = grad.to(self.dtype, copy=self._in_bucket(grad))
            if ops.param_format(self.format)["extra"]:
                held.beside = [torch.zeros_like(held.buffer)]
            p.grad = None

    def _in_bucket(self, grad: Tensor) -> bool:
        """Whether a gradient lies in a bucket of DDP, which is written to again."""
        return self._ddp and grad.untyped_storage().nbytes() > grad.numel() * grad.element_size()

    def _reduce_left(self) -> None:
        """Under DDP: what the last micro-batch had no gradient for here, so that the reducer took zeros for it."""
        if getattr(self.model, "find_unused_parameters", False):
            group: Any = self.model.process_group
            params = list(self._params)
            left = torch.tensor(
                [self._params[p].buffer is not None for p in params], device="cpu"
            ).int()
            left = left.to(shard.local(params[0]).device)
            shard.reduce_over([(left, group, "max")])  # what any rank has, all add
            for p, any_has in zip(params, left.tolist(), strict=True):
                if any_has:
                    buffer = self._params[p].buffer
                    mine = (
                        torch.zeros_like(p) if buffer is None else buffer.to(p.dtype).view(p.shape)
                    )
                    shard.average_over(mine, group)
                    p.grad = mine if p.grad is None else p.grad.add_(mine)
        for held in self._params.values():
            held.clear()
        for stepper in {places.stepper_of(p) for p in self._params} - {None}:
            stepper._reduced()  # it has waited for this

    @torch.no_grad()
    def add(self) -> None:
        """Takes every `p.grad` that there is into the buffers; behind a backward pass, with hooks=False."""
        for p in self._params:
            if p.grad is not None:
                self._take(p)
                p.grad = None

    def remove(self) -> None:
        """Takes the hooks off; what has been added is lost."""
        for handle in self._handles:
            handle.remove()
        for p, held in self._params.items():
            held.clear()
            places.accumulators.pop(p, None)
            if self._any_dtype(p) and p.grad_dtype is None and p.grad is None:
                p.grad_dtype = p.dtype
        self._handles = []

    def state_dict(self) -> dict[str, Any]:
        """Additions so far, which random bits depend on, by name. Save it between steps: buffers are not part of it."""
        return {"added": {held.name: held.added for held in self._params.values()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken."""
        for held in self._params.values():
            held.added = held.settled = int(state_dict["added"][held.name])

    # In the backward pass

    @torch.no_grad()
    def _hook(self, p: Tensor) -> None:
        if p.grad is None:
            return
        if self._ddp and not self._micro:
            raise RuntimeError(
                "a backward pass under DistributedDataParallel outside of `with accumulator.micro(last=...)`: its reducer would run for every "
                "micro-batch, or reduce what was taken from it"
            )
        held = self._params[p]
        if self._micro != "last":
            self._take(p)
            p.grad = None
        elif (
            held.buffer is not None
            or self.scale != 1.0
            or (self._any_dtype(p) and shard.local(p.grad).dtype != self.dtype)
        ):  # else it is the only one, and stays as it is
            self._take(p)
            p.grad = None
            p.grad = self._handed(p)
            held.clear()

    def _take(self, p: Tensor) -> None:
        held, grad = self._params[p], shard.dense_gradient(p)
        if grad.device.type not in ("cpu", "cuda"):
            raise NotImplementedError(
                f"lowbit.accumulate runs on the CPU and CUDA, and the gradient of {held.name!r} is on {grad.device}"
            )
        grad = grad.detach().contiguous()
        if held.buffer is None:
            if ops.param_format(self.format)["extra"]:
                held.beside = [torch.zeros_like(grad, dtype=torch.bfloat16)]
            if self.scale == 1.0 and grad.dtype == self.dtype:  # as it is
                held.buffer = grad.clone() if self._in_bucket(grad) else grad
                held.added += 1
                return
            held.buffer = torch.zeros_like(grad, dtype=self.dtype)
        row = [*held.place, held.stream, held.added & 0xFFFFFFFF]
        ops.accumulate(
            [held.buffer], held.beside, [grad], torch.tensor([row], device="cpu"), self.format,
            scale=self.scale, seed=self.seed,
        )  # fmt: skip
        held.added += 1

    def _handed(self, p: Tensor) -> Tensor:
        """The buffer as the gradient of p."""
        buffer = self._params[p].buffer
        assert buffer is not None
        if not self._any_dtype(p):
            buffer = buffer.to(p.dtype)
        return shard.like(p, buffer.view(shard.local(p).shape), p.shape)

    def _hand_over(self) -> None:
        for p, held in self._params.items():
            if held.buffer is not None:
                p.grad = None
                p.grad = self._handed(p)
                held.clear()


class _Param:
    """What is held of one parameter's gradient."""

    def __init__(self, p: Tensor, name: str, index: int) -> None:
        self.name = name
        self.stream = stream_of(name.removeprefix("module."), index)
        self.added = 0
        self.settled = 0  # of them, those of steps that are over
        self.buffer: Tensor | None = None
        self.beside: list[Tensor] = []
        self.place = _place(p, name)

    def clear(self) -> None:
        self.buffer, self.beside = None, []


def _place(p: Tensor, name: str) -> list[int]:
    """Rows, columns, global columns and first element of the part that is here."""
    if shard.is_flat(p):  # which part is not known: the random bits are this rank's own
        return [1, p.numel(), p.numel(), shard.rank() << 40]
    part = shard.part(p, f"parameter {name!r}")
    first = part.row_offset * part.global_cols + part.col_offset
    if part.whole_rows:
        return [1, part.rows * part.cols, part.rows * part.cols, first]
    return [part.rows, part.cols, part.global_cols, first]
