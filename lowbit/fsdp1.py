"""FSDP1 (FullyShardedDataParallel): binds its flat shards to the original parameters,
and saves state as FSDP2 does.
"""

from __future__ import annotations

import weakref

from torch import Tensor, nn

from lowbit import flat, sharding
from lowbit.config.overrides import clean_name
from lowbit.flat import get_state_dict, set_state_dict
from lowbit.optim.optimizer import LowbitOptimizer

__all__ = ["bind", "get_state_dict", "set_state_dict"]


def bind(model: nn.Module, opt: LowbitOptimizer, *, export: str | None = None) -> None:
    """Binds an optimizer over FSDP1's flat shards to the original parameters.

    State then follows the original parameters' shapes, and state and weights are the bits of a
    single process. Call it on every rank after wrapping the model and building the optimizer,
    before the first step or load, and before Accelerate's `prepare(opt)`:

        model = FullyShardedDataParallel(model, use_orig_params=True)
        opt = lowbit.AdamW(model.named_parameters())
        lowbit.fsdp1.bind(model, opt)

    With `use_orig_params=False`, options apply by the original names too. A flattened parameter's
    state then holds one entry per original name. All of them step when torch gives the flattened
    parameter a gradient.

    Args:
        model: the module that FSDP1 wrapped, or one that contains such modules.
        opt: the optimizer of its parameters.
        export: "fp32" makes `opt.state_dict()` return float32 moments in the shape of the flat
            shards, and of parameters that FSDP1 leaves alone, and `load_state_dict` take them.
            torch's `FSDP.optim_state_dict` and `torch.distributed.checkpoint.state_dict` then
            work. Loading quantizes the moments again, which restores the same values in all
            formats but `log8`, `log8_signed` and `log16` (docs/bits/sharding-details.md). None
            (default) keeps the quantized state dict.

    Raises:
        ValueError: some or all of the optimizer's parameters are not in `model`;
            or `export` cannot express the state.
        TypeError: the optimizer is not one of lowbit's, or is inside a wrapper.
        RuntimeError: the optimizer was stepped before its parameters became flat shards.
    """
    flat.check_own(opt)
    slices: dict[Tensor, list[sharding.FlatSlice]] = {}
    for each in sharding.flat_slices_of(model, clean_name):
        slices.setdefault(each.tensor, []).append(each)
    wanted = [p for group in opt.param_groups for p in group["params"]]
    if slices and not any(p in slices for p in wanted):
        raise ValueError(
            f"none of the optimizer's {len(wanted)} parameters is in this model; "
            "use_orig_params=False replaces them by flattened ones, so build the optimizer from "
            "the wrapped model"
        )
    flattened = [p for p in wanted if sharding.is_flat(p)]
    if missing := sum(p not in slices for p in flattened):
        raise ValueError(
            f"{missing} of the optimizer's {len(flattened)} flat shards are not in this model: "
            "build the optimizer from the parameters of the wrapped model"
        )
    for p, several in slices.items():  # all of the model's: clipping may need every one
        sharding.flats[p] = several[0].flat
    if slices:
        flat.bind(opt, [each for p in wanted for each in slices.get(p, ())], export=export)
        opt.wrapped = weakref.ref(model)
