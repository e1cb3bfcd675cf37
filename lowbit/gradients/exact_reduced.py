"""Where the addends of an exact mean are added up under DDP and FSDP1: in their reductions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowbit import sharding
from lowbit.gradients.exact_sums import Divided, Pass, Sum, Sums, refuse_left_out


class ReducedSums(Sums):
    """Sums whose gradients come to a communication hook of the wrapper."""

    def __init__(self, params: Mapping[Tensor, str], divided: Divided, group: Any) -> None:
        super().__init__(params, divided)
        self.groups = [group] if group.size() > 1 else []
        self._reductions = 0  # of the running micro-batch

    def begin(self, now: Pass | None) -> None:
        super().begin(now)
        self._reductions = 0
        if now is not None and now.passes > 1:
            raise NotImplementedError(
                'rounding="exact" takes several backward passes in one micro only without a '
                "wrapper; under DistributedDataParallel and FSDP1 run each in a micro of its own"
            )

    def end(self) -> None:
        if self._reductions == 0:
            raise RuntimeError(
                "a micro-batch ended without a reduction of its gradients: leave out no_sync(), "
                "which keeps them on the rank, and run the backward pass inside "
                "`with accumulator.micro(...)`"
            )


class BucketSums(ReducedSums):
    """Sums of chunks of parameters under DDP, whose buckets come to a communication hook."""

    def __init__(self, model: Any, params: Mapping[Tensor, str], divided: Divided) -> None:
        super().__init__(params, divided, model.process_group)
        self._model, self._group = model, model.process_group
        self._means: dict[Tensor, Tensor] = {}  # of the last micro-batch
        self._removers.append(sharding.hook_buckets(model, self._reduce))
        self._hook_params(self._hook)

    def _hook(self, p: Tensor) -> None:
        self.of[p].met |= not self.now().idle
        self._count(self.of[p], self.names[p])

    @torch.no_grad()
    def _reduce(self, bucket: Any) -> Tensor:
        """Exchanges a bucket's addends; after the last micro-batch,
        every rank gets the means of all chunks.
        """
        now = self.now()
        self._reductions += 1
        flat: Tensor = bucket.buffer()
        params, views = bucket.parameters(), bucket.gradients()
        if now.idle:
            flat.zero_()
        chunks = sharding.Chunks([view.numel() for view in views], self._group.size())
        rows = chunks.columns(self.exchange(chunks.pack(views), self._group))
        if not now.last:
            for p, part in zip(params, rows, strict=True):
                self.of[p].add(part)
            return flat.zero_()
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i, p in enumerate(params):
            by_dtype.setdefault(self.divided.dtype_of(p), []).append(i)
        for dtype, which in by_dtype.items():
            made = torch.cat([self.of[params[i]].mean(rows[i], dtype) for i in which])
            some = sharding.Chunks([chunks.sizes[i] for i in which], self._group.size())
            means = some.unpack(sharding.gather(made, self._group))
            for i, mean in zip(which, means, strict=True):
                views[i].copy_(mean.view(views[i].shape))
                if dtype != views[i].dtype or self._model.find_unused_parameters:
                    self._means[params[i]] = mean.view(views[i].shape)
        return flat

    def clear(self) -> None:
        super().clear()
        self._means = {}

    def finish(self) -> None:
        """DDP itself sets no gradient that the last micro-batch did not reach,
        nor one of another dtype.
        """
        if self._model.find_unused_parameters:
            for p, any_met in zip(self.of, self._met_anywhere(self.groups), strict=True):
                if not any_met:
                    self._means.pop(p, None)
                    p.grad = None
        for p, mean in self._means.items():
            p.grad = None
            p.grad = mean


class FlatSums(ReducedSums):
    """Sums of the flat shards of FSDP1, whose gradients come to a communication hook."""

    def __init__(
        self,
        model: nn.Module,
        params: Mapping[Tensor, str],
        divided: Divided,
        units: Sequence[sharding.FlatUnit],
    ) -> None:
        super().__init__({}, divided, units[0].group)
        for p, name in params.items():
            if divided.dtype_of(p) != p.dtype:
                raise NotImplementedError(
                    "FSDP1 hands over gradients in the parameters' dtype, "
                    f"{p.dtype} for {name!r}; leave out dtype=, or use fully_shard"
                )
        flat = [p for unit in units for p in unit.params]
        refuse_left_out(params, flat, "FullyShardedDataParallel")
        sharding.hook_flat_gradients(model, units, self._reduce)
        self.of = {unit: Sum(divided) for unit in units}

    def finish(self) -> None:
        for unit, mine in self.of.items():
            if mine.words is not None:
                raise RuntimeError(
                    f"an earlier micro-batch reached {unit.name} and the last one did not, whose "
                    "mean FSDP1 takes from no one then; use fully_shard, or reach every layer in "
                    "the last micro-batch"
                )

    @torch.no_grad()
    def _reduce(self, unit: sharding.FlatUnit, gradient: Tensor, shard: Tensor) -> None:
        now, mine, group = self.now(), self.of[unit], unit.group
        self._reductions += 1
        self._count(mine, unit.name)
        if now.idle:
            gradient.zero_()
        chunks = sharding.Chunks([gradient.numel()], group.size())
        rows = self.exchange(chunks.pack([gradient]), group)
        if not now.last:
            mine.add(rows)
            shard.zero_()
            return
        made = mine.mean(rows, shard.dtype)
        if gradient is shard:  # one rank, or no sharding
            [made] = chunks.unpack(sharding.gather(made, group))
        shard.copy_(made.view(shard.shape))
