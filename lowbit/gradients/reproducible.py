"""Whether a model's own forward and backward pass has the same bits every time, after others,
and on every rank.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowbit import sharding

# (module, "output" or "gradient", digest), in the order of the passes
Trace = list[tuple[str, str, str]]

_CURES: list[tuple[tuple[type, ...], str]] = [
    (
        (nn.Embedding, nn.EmbeddingBag),
        "a GPU adds up its gradient by atomics: torch.use_deterministic_algorithms(True)",
    ),
    (
        (nn.modules.conv._ConvNd,),
        (
            "cuDNN chooses by measuring: torch.backends.cudnn.deterministic "
            "= True and benchmark = False"
        ),
    ),
    (
        (nn.modules.batchnorm._BatchNorm,),
        "its statistics are those of the local batch: use a norm over each sample alone",
    ),
    (
        (nn.RNNBase,),
        "cuDNN needs CUBLAS_WORKSPACE_CONFIG=:16:8 and torch.use_deterministic_algorithms(True)",
    ),
]
_CURE = (
    "try torch.use_deterministic_algorithms(True), and the same number of threads everywhere "
    "(torch.set_num_threads)"
)
_RANKS = (
    "the ranks differ: they need the same weights, the same number of threads and processors of "
    "one kind, whose products torch computes in one order"
)


@dataclass(frozen=True)
class Reproducibility:
    """What `check_reproducible` found. True where everything had the same bits."""

    # The first module that differs, in the order of the passes, or parameter; "" is the model.
    module: str | None
    differs: str | None  # "output", "gradient" or "loss"
    between: str | None  # "passes" or "ranks"
    cure: str | None

    def __bool__(self) -> bool:
        return self.module is None

    def __str__(self) -> str:
        if self:
            return "the forward and backward pass has the same bits every time and on every rank"
        return (
            f"the {self.differs} of {self.module or 'the model'!r} differs "
            f"between {self.between}; {self.cure}"
        )


def check_reproducible(
    model: nn.Module,
    run: Callable[[], Tensor],
    *,
    others: Callable[[], Any] | None = None,
    seed: int = 0,
) -> Reproducibility:
    """Runs one micro-batch twice, with work of another kind between,
    and compares everything that modules compute.

    Training has the same bits on any number of ranks only if this does:
    `lowbit.accumulate(rounding="exact")` adds gradients exactly, and cannot repair a gradient that
    was different before. Call it on every rank, with the same micro-batch, on the model as it is
    trained. Weights stay as they are; buffers are put back, and gradients are cleared.

    Args:
        model: the model.
        run: the forward pass of a micro-batch. It returns the loss,
            and is called with torch's generators seeded.
        others: other work between the two passes, such as the passes of a larger batch; it may move
            what an allocator or an autotuner chooses. By default none.
        seed: of torch's generators during a pass; 0 by default.

    Returns:
        What differed first, the same on every rank. It is true if nothing did.
    """
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    model.zero_grad(set_to_none=True)  # the first pass would add to what is there
    traces = []
    for turn in range(2):
        try:
            with torch.random.fork_rng(_devices()), _traced(model) as trace:
                torch.manual_seed(seed)
                loss = run()
                loss.backward()
                trace.append(("", "loss", _digest(loss)))
                for name, p in model.named_parameters():
                    if p.grad is not None:
                        trace.append((name, "gradient", _digest(sharding.local(p.grad))))
            traces.append(trace)
            if turn == 0 and others is not None:
                others()
        finally:
            _put_back(model, buffers)
    found = _first(model, traces[0], traces[1], "passes")
    # A shard's gradients are its own; everything else is compared.
    mine = [entry for entry in traces[0] if not _is_shard(model, entry[0])]
    every = sharding.gathered_objects((found, mine))  # also by a rank whose passes differ
    differ = [found for found, _ in every]
    differ += [_first(model, every[0][1], theirs, "ranks") for _, theirs in every[1:]]
    sound = Reproducibility(None, None, None, None)
    return next((found for found in differ if found is not None), sound)


def _put_back(model: nn.Module, buffers: list[tuple[Tensor, Tensor]]) -> None:
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)


def _first(model: nn.Module, a: Trace, b: Trace, between: str) -> Reproducibility | None:
    if a == b:
        return None
    pairs = zip(a, b, strict=False)
    at = next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(a), len(b)))
    name, differs, _ = (a if at < len(a) else b)[at]
    modules = dict(model.named_modules())
    module = modules.get(name, modules.get(name.rpartition(".")[0]))  # or a parameter's
    cure = next((text for kinds, text in _CURES if isinstance(module, kinds)), _CURE)
    return Reproducibility(name, differs, between, _RANKS if between == "ranks" else cure)


def _is_shard(model: nn.Module, name: str) -> bool:
    p = dict(model.named_parameters()).get(name)
    return p is not None and (sharding.is_sharded(p) or sharding.is_flat(p))


@contextmanager
def _traced(model: nn.Module) -> Iterator[Trace]:
    """What the modules without submodules compute meanwhile."""
    trace: Trace = []
    handles = []

    def output(name: str) -> Callable[..., None]:
        return lambda _m, _i, out: trace.append((name, "output", _digest(out)))

    def inputs(name: str) -> Callable[..., None]:
        """By hooks on the tensors: a hook on the module would not let it write to them."""

        def watch(_: nn.Module, given: Any) -> None:
            for t in torch.utils._pytree.tree_leaves(given):
                if isinstance(t, Tensor) and t.requires_grad:
                    t.register_hook(lambda g: trace.append((name, "gradient", _digest(g))))

        return watch

    for name, module in model.named_modules():
        if next(module.children(), None) is None:
            handles.append(module.register_forward_hook(output(name)))
            handles.append(module.register_forward_pre_hook(inputs(name)))
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()


def _digest(value: Any) -> str:
    """Of every tensor in a result, by their bytes."""
    h = hashlib.blake2b(digest_size=8)
    for t in torch.utils._pytree.tree_leaves(value):
        if isinstance(t, Tensor):
            plain = sharding.local(t).detach().cpu().contiguous()
            h.update(f"{plain.dtype} {tuple(plain.shape)}".encode())
            h.update(ctypes.string_at(plain.data_ptr(), plain.nbytes))  # numpy may be missing
    return h.hexdigest()


def _devices() -> list[int]:
    return list(range(torch.accelerator.device_count()))  # manual_seed seeds all of them
