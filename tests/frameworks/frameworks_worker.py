"""What a rank does in test_frameworks.py: trains through a framework, saves half way, and continues
from there; the first rank writes digests.

torchrun --nproc-per-node N tests/frameworks/frameworks_worker.py OUT FOLDER train|resume
FRAMEWORK:KIND...
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import sys
import traceback
import warnings
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import lowbit
from tests.support.digests import digest
from tests.support.ranks.leaving import leave

HALF, ALL = 3, 6  # steps


class Net(nn.Module):
    """Quantized and wide parameters, rows that no number of ranks divides."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tok_embeddings, self.up = nn.Embedding(50, 65), nn.Linear(65, 131)
        self.norm, self.output = nn.LayerNorm(131), nn.Linear(131, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.output(self.norm(F.gelu(self.up(self.tok_embeddings(ids)))))


def batch_of(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(50, (4, 9), generator=generator)


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


Digest = dict[str, str]  # of each parameter


def rank() -> int:
    return dist.get_rank()


@contextlib.contextmanager
def sharding_on_a_cpu() -> Iterator[None]:
    """Accelerate, and with it the Trainer, shards on accelerators alone and takes
    DistributedDataParallel on a CPU, whatever the plugin says. Here it is told that the ranks are
    GPUs whose device is the CPU."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    gpus = ("gloo", DistributedType.MULTI_GPU)
    with (
        mock.patch.object(PartialState, "_prepare_backend", lambda *_, **__: gpus),
        mock.patch.dict(os.environ, ACCELERATE_TORCH_DEVICE="cpu"),
    ):
        yield


def sharding(model: nn.Module) -> str:
    """What a model is wrapped in."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    if isinstance(model, FullyShardedDataParallel):
        return "fsdp1"
    if isinstance(model, FSDPModule):
        return "fsdp2"
    return "ddp" if isinstance(model, nn.parallel.DistributedDataParallel) else "none"


def through_accelerate(kind: str, folder: pathlib.Path, resume: bool) -> dict[str, Digest]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    version, plugin = kind.split("_")[0], None
    if version != "ddp":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=int(version[-1]),
            cpu_ram_efficient_loading=False,
            reshard_after_forward=version == "fsdp2" or "FULL_SHARD",
            use_orig_params=kind != "fsdp1_flat",
            state_dict_type="SHARDED_STATE_DICT",
            auto_wrap_policy="size_based_wrap",
            min_num_params=1000,
        )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model: nn.Module = Net(seed=int(resume))
    if version == "fsdp1":
        model = accelerator.prepare(model)
        opt = lowbit.AdamW(lowbit.param_groups(model), lr=1e-2, seed=3)
        lowbit.fsdp1.bind(model, opt, export="fp32")
        prepared = accelerator.prepare(opt)
    else:
        opt = lowbit.AdamW(lowbit.param_groups(model), lr=1e-2, seed=3)
        model, prepared = accelerator.prepare(model, opt)
    assert sharding(model) == version
    out, begin = {}, 0
    if resume:
        accelerator.load_state(str(folder))
        begin = HALF
        out["loaded"] = digest(opt, HALF)
    for step in range(begin, ALL):
        if step == HALF and not resume:
            accelerator.save_state(str(folder))
            out["saved"] = digest(opt, HALF)
        accelerator.backward(loss_of(model, batch_of(step, rank())))
        prepared.step()
        prepared.zero_grad()
    out["end"] = digest(opt, ALL)
    return out


def through_accelerate_at_once(kind: str, folder: pathlib.Path, resume: bool) -> dict[str, str]:
    """What an optimizer says that FSDP1 is put around in one call."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1,
        sync_module_states=False,
        cpu_ram_efficient_loading=False,
        use_orig_params=kind == "fsdp1_orig",
    )
    model = Net()
    opt = lowbit.AdamW(lowbit.param_groups(model))
    try:
        wrapped, _ = Accelerator(fsdp_plugin=plugin).prepare(model, opt)
        lowbit.fsdp1.bind(wrapped, opt)
    except ValueError as error:
        return {"said": str(error)}
    return {"said": "nothing"}


def through_accelerate_on_a_cpu(kind: str, folder: pathlib.Path, resume: bool) -> dict[str, str]:
    """What Accelerate wraps a model in where nobody says that a CPU is a GPU."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=int(kind[-1]), sync_module_states=False, cpu_ram_efficient_loading=False
    )
    with mock.patch.dict(os.environ):
        return {"wrapped": sharding(Accelerator(cpu=True, fsdp_plugin=plugin).prepare(Net()))}


def through_trl(kind: str, folder: pathlib.Path, resume: bool) -> dict[str, Digest]:
    return through_transformers(kind, folder, resume, sft=True)


def through_transformers(
    kind: str, folder: pathlib.Path, resume: bool, *, sft: bool = False
) -> dict[str, Digest]:
    """Trainer, or TRL's SFTTrainer, which is one."""
    from accelerate.state import AcceleratorState
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from lowbit.integrations.transformers import ScheduleFreeCallback, optimizer

    AcceleratorState._reset_state(reset_partial_state=True)
    torch.manual_seed(int(resume))
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    version, plugin = kind.split("_")[0], {}
    schedule_free = kind.endswith("schedule_free")
    if version != "ddp":
        plugin = {
            "fsdp": True,
            "fsdp_config": {
                "version": int(version[-1]),
                "state_dict_type": "SHARDED_STATE_DICT"
                if version == "fsdp1"
                else "FULL_STATE_DICT",
                "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
                "use_orig_params": kind != "fsdp1_flat",
                "sync_module_states": False,  # which takes a GPU
            },
        }
    made, own = Trainer, {}
    if sft:
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        from tests.frameworks.launchers import tokenizer

        TrainingArguments, made = SFTConfig, SFTTrainer
        plugin |= {"gradient_checkpointing": False, "bf16": False}  # as Trainer's defaults are
        own["processing_class"] = tokenizer()
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=ALL,
        save_steps=HALF,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        weight_decay=0.1,
        max_grad_norm=0.0,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
        warmup_steps=2,
        dataloader_num_workers=0,
        seed=0,
        lr_scheduler_type="constant" if schedule_free else "linear",
        **plugin,
    )
    data = [{"input_ids": row, "labels": row} for i in range(12) for row in batch_of(i, 0)]
    if sft:
        data = Dataset.from_list([{"input_ids": each["input_ids"].tolist()} for each in data])
    out: dict[str, Digest] = {}

    class Digests(TrainerCallback):
        def on_step_begin(self, args, state, control, *, model, optimizer, **_):
            if state.global_step == HALF:
                opt = getattr(optimizer, "optimizer", optimizer)
                out["loaded" if resume else "saved"] = digest(opt, HALF)

    choice = optimizer(args, "ScheduleFreeAdamW" if schedule_free else "AdamW", seed=3)
    callbacks = [*[ScheduleFreeCallback()] * schedule_free, Digests()]
    trainer = made(
        model, args, train_dataset=data, optimizer_cls_and_kwargs=choice, callbacks=callbacks, **own
    )  # type: ignore[arg-type]
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{HALF}") if resume else None)
    assert sharding(trainer.model_wrapped) == version
    opt = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    out["end"] = digest(opt, ALL)
    assert "model.embed_tokens.weight" in out["end"], out["end"]
    assert len(opt.param_groups) == (1 if kind == "fsdp1_flat" else 2)
    return out


def through_lightning(kind: str, folder: pathlib.Path, resume: bool) -> dict[str, Digest]:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    ranks = int(os.environ["WORLD_SIZE"])
    out: dict[str, Digest] = {}

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(seed=int(resume))

        def configure_model(self) -> None:
            if kind == "model_parallel" and not hasattr(self.net.up.weight, "placements"):
                for part in (self.net.up, self.net.output, self.net):
                    fully_shard(part, mesh=self.device_mesh["data_parallel"])

        def configure_optimizers(self):  # type: ignore[no-untyped-def]
            model = self.trainer.model  # as the strategy has wrapped it
            opt = lowbit.AdamW(lowbit.param_groups(model), lr=1e-2, seed=3)
            if kind.startswith("fsdp1"):
                lowbit.fsdp1.bind(model, opt, export="fp32")
            return opt

        def on_train_batch_start(self, batch: int, number: int) -> None:
            if self.global_step == HALF:
                out["loaded" if resume else "saved"] = digest(self.optimizers().optimizer, HALF)
                if not resume:
                    self.trainer.save_checkpoint(folder / "lightning.ckpt")

        def training_step(self, batch: int, number: int) -> torch.Tensor:
            # a resumed loader starts from the beginning
            return loss_of(self.net, batch_of(self.global_step, rank()))

    class OnCPU(FSDPStrategy):
        """Trainer refuses FSDPStrategy on a CPU, but none that is derived from it; and
        FullyShardedDataParallel must be told that the device is one.
        """

        def _setup_model(self, model: nn.Module) -> nn.Module:
            return FullyShardedDataParallel(
                model,
                device_id=self.root_device,
                sharding_strategy=self.sharding_strategy,
                **self.kwargs,
            )

    policy = ModuleWrapPolicy({nn.Linear, nn.Embedding})
    sharded = {
        "process_group_backend": "gloo",
        "state_dict_type": "sharded",
        "auto_wrap_policy": policy,
    }
    strategies = {
        "ddp": lambda: DDPStrategy(process_group_backend="gloo"),
        # By itself it takes all ranks for tensor parallelism.
        "model_parallel": lambda: ModelParallelStrategy(
            data_parallel_size=ranks, tensor_parallel_size=1, process_group_backend="gloo"
        ),  # type: ignore[arg-type]
        "fsdp1_orig": lambda: OnCPU(use_orig_params=True, **sharded),
        "fsdp1_flat": lambda: OnCPU(use_orig_params=False, **sharded),
    }
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategies[kind](),
        max_steps=ALL,
        logger=False,
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    data = torch.utils.data.DataLoader(range(ALL), batch_size=None)  # type: ignore[arg-type]
    module = Module()
    trainer.fit(module, data, ckpt_path=folder / "lightning.ckpt" if resume else None)
    out["end"] = digest(trainer.optimizers[0], ALL)
    return out


def through_torchtitan(kind: str, folder: pathlib.Path, resume: bool) -> dict[str, Digest]:
    """Its optimizer container and its checkpoint contract: state by a zero-lr step, flat names,
    DCP.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torchtitan.components.checkpointer.dcp import ModelWrapper

    from lowbit.integrations import torchtitan

    with torch.device("meta"):
        model: nn.Module = Net()
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    for part in (model.up, model.output, model):
        fully_shard(part, mesh=mesh)  # type: ignore[arg-type]
    float32 = torchtitan.EMBEDDINGS_AND_HEADS
    config = torchtitan.adamw(lr=1e-2, seed=3, full_precision=float32)
    if kind == "late":  # before the weights exist: state is made by the container's own step
        container = config.build(model_parts=[model])
        assert all(not opt.state for opt in container.optimizers)
    model.to_empty(device="cpu")
    torch.manual_seed(int(resume))
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    if kind != "late":
        container = config.build(model_parts=[model])
    (opt,) = container.optimizers
    assert {g["full_precision"] for g in opt.param_groups} == {True, ()}
    assert opt.param_groups[0]["fused"]
    out, begin = {}, 0
    states = {"model": ModelWrapper([model]), "optimizer": container}
    if resume:
        dcp.load(states, checkpoint_id=folder)
        out["loaded"], begin = digest(opt, HALF), HALF
    for step in range(begin, ALL):
        if step == HALF and not resume:
            dcp.save(states, checkpoint_id=folder)
            out["saved"] = digest(opt, HALF)
        loss_of(model, batch_of(step, rank())).backward()
        container.step()
        container.zero_grad()
    out["end"] = digest(opt, ALL)
    return out


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    out, folder, what, *cases = sys.argv[1:]
    dist.init_process_group("gloo")  # every framework takes the one that is there
    result = {}
    for case in cases:
        framework, kind = case.split(":")
        run, path = globals()[f"through_{framework}"], pathlib.Path(folder, framework, kind)
        path.mkdir(parents=True, exist_ok=True)
        runs = {"trained": False, "resumed": True} if what == "train" else {"resumed": True}
        patched = kind.startswith("fsdp") and framework != "lightning" and "cpu" not in framework
        try:
            with sharding_on_a_cpu() if patched else contextlib.nullcontext():
                result[case] = {name: run(kind, path, resume) for name, resume in runs.items()}
        except BaseException:  # torch's CheckpointException is not an Exception
            result[case] = {"error": traceback.format_exc()}
    if rank() == 0:
        pathlib.Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
    leave()
