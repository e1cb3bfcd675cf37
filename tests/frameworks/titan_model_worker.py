"""What a rank does in test_torchtitan_model.py: torchtitan's own Trainer trains its own DeepSeek-V3
on gloo, with lowbit's container.

torchrun --nproc-per-node N tests/frameworks/titan_model_worker.py OUT FOLDER RUN:TRAINED:LAYOUT...

TRAINED is the layout that a checkpoint was made under. RUN is
  train    saves half way. Rank 0 also steps a whole model beside it, without a mesh and without
           torchtitan's Trainer, with the same gradients;
  resume   continues from the checkpoint, with gradients of its own;
  replay   continues from the checkpoint, with the gradients of the run that made it.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import pathlib
import sys
import traceback
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

import tests.frameworks.titan_on_a_cpu  # noqa: F401  before torchtitan
from lowbit.sharding import whole
from tests.support.digests import digest, part_of
from tests.support.ranks.leaving import leave

HALF, ALL = 2, 4  # steps
SEQUENCES, LENGTH = 4, 32  # of all ranks in a step; tokens
# FSDP2 takes the ranks that tensor parallelism leaves; "ep" shards experts over two of them first,
# and "tp" the inside of every expert. With both, torchtitan cuts no expert inside: experts lie over
# all 4 ranks, and the rest has tensor parallelism beside FSDP2.
LAYOUTS = {
    "fsdp": {},
    "ep": {"expert_parallel_degree": 2},
    "tp": {"tensor_parallel_degree": 2},
    "both": {"expert_parallel_degree": 2, "tensor_parallel_degree": 2},
}


def smaller(model: Any) -> Any:
    """The configuration of a DeepSeek-V3 in a quarter of each size, or less, with two layers, one
    dense and one of experts. Every weight of experts keeps quantized state.
    """
    from torchtitan.models.common.rope import ComplexRoPE
    from torchtitan.models.deepseek_v3 import _build_dsv3_layers

    dim = 64
    layers = _build_dsv3_layers(
        n_layers=2,
        n_dense_layers=1,
        dim=dim,
        n_heads=4,
        q_lora_rank=0,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        mscale=0.7,
        dense_hidden_dim=128,
        moe_hidden_dim=64,
        num_experts=8,
        num_shared_experts=2,
        router_top_k=3,
        router_score_func="softmax",
        attn_backend="flex",
        moe_comm_backend="standard",
        non_blocking_capacity_factor=None,
        rope=ComplexRoPE.Config(dim=16, max_seq_len=LENGTH, scaling="none"),
    )
    return dataclasses.replace(
        model,
        dim=dim,
        tok_embeddings=dataclasses.replace(model.tok_embeddings, embedding_dim=dim),
        norm=dataclasses.replace(model.norm, normalized_shape=dim),
        lm_head=dataclasses.replace(model.lm_head, in_features=dim),
        layers=layers,
    )


def configuration(folder: pathlib.Path, layout: str) -> Any:
    """torchtitan's `deepseek_v3_debugmodel`, smaller, and lowbit's optimizer."""
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel

    from lowbit.integrations import torchtitan
    from tests.frameworks.torchtitan_parts import Batches, Words

    config = deepseek_v3_debugmodel()
    spec = config.model_spec
    spec.model = smaller(spec.model)
    for layer in spec.model.layers:  # FlexAttention has no backward pass on a CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    theirs = spec.parallelize_fn

    def parallelize(model: nn.Module, **options: Any) -> nn.Module:
        theirs(model, **options)
        for module in model.modules():
            if isinstance(module, FSDPModule):  # gloo has no reduction that multiplies
                module.set_force_sum_reduction_for_comms(True)
        return model

    spec.parallelize_fn = parallelize
    config.dump_folder = str(folder)
    config.tokenizer, config.dataloader = Words.Config(), Batches.Config()
    config.metrics = MetricsProcessor.Config(log_freq=1, disable_color_printing=True)
    config.loss.num_chunks = 2
    config.optimizer = torchtitan.adamw(lr=8e-4, seed=3)
    config.training = TrainingConfig(
        local_batch_size=1,
        global_batch_size=SEQUENCES,
        seq_len=LENGTH,
        steps=ALL,
        disable_cuda_graphs=True,
    )
    # Its other two backends take parameters that FSDP2 of torch 2.13 refuses.
    config.parallelism = ParallelismConfig(spmd_backend="partial_dtensor", **LAYOUTS[layout])
    config.checkpoint = CheckpointManager.Config(
        enable=True, interval=HALF, last_save_model_only=False
    )
    return config


def members(opt: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    return {
        name: p
        for group in opt.param_groups
        for name, p in zip(group["param_names"], group["params"], strict=True)
    }


class Alone:
    """The model in one process, which has no gradients but those that it is given."""

    def __init__(self, config: Any, weights: dict[str, torch.Tensor]) -> None:
        self.model = config.model_spec.model.build()
        self.container = config.optimizer.build(model_parts=[self.model])
        self.schedulers = config.lr_scheduler.build(optimizers=self.container, training_steps=ALL)
        (self.opt,) = self.container.optimizers
        self.params = members(self.opt)
        with torch.no_grad():
            for name, p in self.params.items():
                p.copy_(weights[name])

    def step(self, gradients: dict[str, torch.Tensor]) -> None:
        for name, p in self.params.items():
            p.grad = gradients[name].clone()
        self.container.step()
        self.schedulers.step()


def trained(run: str, layout: str, folder: pathlib.Path) -> dict[str, Any]:
    from torchtitan.trainer import Trainer

    config = configuration(folder, layout)
    if run != "train":
        config.checkpoint.load_step, config.checkpoint.load_only = HALF, True
    trainer = Trainer(config)
    (opt,) = trainer.optimizers.optimizers
    params, out = members(opt), {"losses": []}
    experts = {n.rsplit(".", 1)[1]: p for n, p in params.items() if "inner_experts" in n}
    out["placements"] = {n: str(p.placements) for n, p in experts.items()}
    kept = {n: opt.state[p].get("exp_avg_dynamic8") for n, p in experts.items()}
    out["state"] = {n: str(t.placements) for n, t in kept.items() if t is not None}
    out["meshes"] = sorted({p.device_mesh.mesh_dim_names for p in params.values()})
    alone: list[Alone] = []

    def before_the_optimizer(*_: Any) -> None:
        step, file = trainer.step, folder / f"gradients-{trainer.step}.pt"
        if step == HALF + 1:
            out["half"] = digest(opt, HALF)
        if run == "train":
            found = {n: whole(p.grad) for n, p in params.items()}
            weights = {n: whole(p.detach()) for n, p in params.items()} if step == 1 else {}
            if dist.get_rank() > 0:
                return
            if step == 1:
                alone.append(Alone(config, weights))
            if step == HALF + 1:
                out["alone half"] = digest(alone[0].opt, HALF)
            if step > HALF:
                torch.save(found, file)
            alone[0].step(found)
        elif run == "replay":
            saved = torch.load(file)
            for name, p in params.items():
                p.grad.to_local().copy_(part_of(saved[name], p.grad))

    opt.register_step_pre_hook(before_the_optimizer)
    log = trainer.metrics_processor.log
    trainer.metrics_processor.log = lambda step, loss, *rest, **more: (
        out["losses"].append(loss),
        log(step, loss, *rest, **more),
    )
    try:
        trainer.train()
        out["end"] = digest(opt, ALL)
        if alone:
            out["alone end"] = digest(alone[0].opt, ALL)
    finally:
        trainer.close()
        gc.enable()  # which torchtitan turns off
    return out


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    path, root, *runs = sys.argv[1:]
    dist.init_process_group("gloo")
    torch.autograd.set_multithreading_enabled(False)  # as torchtitan's init_distributed does
    results = {}
    for name in runs:
        run, saved_as, layout = name.split(":")
        folder = pathlib.Path(root, saved_as)
        folder.mkdir(exist_ok=True)
        try:
            results[name] = trained(run, layout, folder)
        except BaseException:  # torch's CheckpointException is not an Exception
            results[name] = {"error": traceback.format_exc()}
            break  # the ranks may no longer be at the same place
        gc.collect()
    if dist.get_rank() == 0:
        pathlib.Path(path).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
    leave()
