"""Makes megatron_core.tar.xz: directories that Megatron-Core 0.16.1 wrote on two gloo ranks.

Needs a Python with torch, megatron-core 0.16.1, numpy and psutil, and no GPU: "cuda" is mapped to
the CPU. Optimizer, buffers, sharded state dicts and files are the package's own. Run for each row
of RUNS, once for each rank:

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29533 STORE=/tmp/store python
    make_megatron.py small/plain_tp2 plain 2 bf16 tar cJf megatron_core.tar.xz small
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

RUNS = (
    "small/plain_tp2 plain 2 bf16",
    "small/reshardable_tp2 fully_reshardable 2 bf16",
)


def map_cuda_to_cpu():
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.cuda = lambda self, *_, **__: self
    kind = torch.Tensor.type

    def named(self, *a, **k):
        return kind(self, *a, **k) if a or k else kind(self).replace("torch.", "torch.cuda.")

    torch.Tensor.type = named

    def on_cpu(make):
        def made(*a, **k):
            return make(
                *a, **(k | {"device": "cpu"} if str(k.get("device")).startswith("cuda") else k)
            )

        return made

    for name in ("tensor", "zeros", "empty", "ones", "full"):
        setattr(torch, name, on_cpu(getattr(torch, name)))


def main():
    out, sharding, parallel = sys.argv[1], sys.argv[2], int(sys.argv[3])
    bf16 = sys.argv[4:] == ["bf16"]
    map_cuda_to_cpu()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", init_method="file://" + os.environ["STORE"], rank=rank, world_size=world
    )
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import MegatronModule

    parallel_state.initialize_model_parallel(parallel, 1)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if bf16 else torch.float32
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        use_cpu_initialization=True,
        tensor_model_parallel_size=parallel,
        params_dtype=dtype,
        bf16=bf16,
        pipeline_dtype=torch.float32,
        gradient_accumulation_fusion=False,
    )

    def init(t):
        return nn.init.normal_(t, std=0.1)

    class Net(MegatronModule):
        def __init__(self):
            super().__init__(config)
            both = {"config": config, "init_method": init}
            self.embedding = tensor_parallel.VocabParallelEmbedding(96, 16, **both)
            self.fc1 = tensor_parallel.ColumnParallelLinear(
                16, 48, bias=True, gather_output=False, **both
            )
            self.fc2 = tensor_parallel.RowParallelLinear(
                48, 16, bias=True, input_is_parallel=True, skip_bias_add=False, **both
            )
            self.norm = nn.LayerNorm(16, dtype=dtype)

        def forward(self, x):
            return self.norm(self.fc2(nn.functional.gelu(self.fc1(self.embedding(x))[0]))[0])

    distributed = sharding != "plain"
    net = Net()
    ddp = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=distributed, grad_reduce_in_fp32=True
        ),
        net,
    )
    opt = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            weight_decay=0.1,
            clip_grad=1.0,
            bf16=bf16,
            params_dtype=dtype,
            use_distributed_optimizer=distributed,
        ),
        [ddp],
    )
    for step in range(3):
        ddp.zero_grad_buffer()
        opt.zero_grad()
        seed = step * 10 + parallel_state.get_data_parallel_rank()
        x = torch.randint(0, 96, (4, 8), generator=torch.Generator().manual_seed(seed))
        ddp(x).float().square().mul(torch.arange(16.0)).mean().backward()
        ddp.finish_grad_sync()
        opt.step()
    weights = net.sharded_state_dict()
    more = {"metadata": {"distrib_optim_sharding_type": sharding}} if distributed else {}
    saved = {
        "model": weights,
        "optimizer": opt.sharded_state_dict(weights, **more),
        "iteration": 3,
        "args": argparse.Namespace(lr=1e-2),
    }
    if rank == 0:
        os.makedirs(out, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(saved, out, async_sharded_save=False)
    dist.barrier()


if __name__ == "__main__":
    main()
