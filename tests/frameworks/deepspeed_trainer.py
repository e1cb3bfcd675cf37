"""What a rank does in test_deepspeed_layouts.py about Trainer, which calls deepspeed.initialize and
loads a checkpoint right after it: whole, and resumed.
"""

from __future__ import annotations

import os
import pathlib
from unittest import mock

import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType

import lowbit
from lowbit.integrations.transformers import optimizer
from tests.frameworks import (
    deepspeed_exact,  # first: it chooses DeepSpeed's accelerator
    launchers,
)
from tests.support.digests import digest

STEPS = launchers.ARGUMENTS["max_steps"]


def train(stage: int, folder: str) -> dict:
    """Digests of weights and state at the end, whole and resumed after half the steps, and the
    dtypes of state.
    """
    # Accelerate takes DeepSpeed for accelerators alone, so the ranks are called GPUs whose device
    # is the CPU.
    gpus = ("gloo", DistributedType.MULTI_GPU)
    settings = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_TORCH_DEVICE": "cpu",
        "RANK": str(dist.get_rank()),
        "LOCAL_RANK": str(dist.get_rank()),
        "WORLD_SIZE": str(dist.get_world_size()),
    }
    with (
        deepspeed_exact.world(),
        mock.patch.object(PartialState, "_prepare_backend", lambda *_, **__: gpus),
        mock.patch.dict(os.environ, settings),
    ):
        try:
            whole, opt = _trained(stage, pathlib.Path(folder), None)
            resumed, _ = _trained(stage, pathlib.Path(folder), f"checkpoint-{STEPS // 2}")
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
        with opt.whole_groups():
            kept = [t for _, p, _, _ in opt.members() for t in opt.state_of(p).values()]
        return {"same": whole == resumed, "dtypes": sorted({str(t.dtype) for t in kept})}


def _trained(stage: int, folder: pathlib.Path, resumed: str | None):
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": "auto"},
    }
    options = {"save_strategy": "steps", "save_steps": STEPS // 2, "bf16": True}
    args = launchers.arguments(folder, deepspeed=config, **options)
    choice = optimizer(args, "AdamW", seed=3)
    trainer = launchers.trainer(folder, args=args, optimizer_cls_and_kwargs=choice)
    trainer.train(resume_from_checkpoint=str(folder / resumed) if resumed else None)
    opt = trainer.deepspeed.optimizer.optimizer
    assert isinstance(opt, lowbit.AdamW)
    with opt.whole_groups():
        return digest(opt, STEPS), opt
