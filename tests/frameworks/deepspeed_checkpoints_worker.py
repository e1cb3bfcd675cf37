"""What a rank does in test_deepspeed_checkpoints.py of tests/frameworks: DeepSpeed's own saves,
and what it resumes from.

torchrun --nproc-per-node N tests/frameworks/deepspeed_checkpoints_worker.py OUT FOLDER
save|resume|client|quantized|goes_on|scale|from_lowbit CASE...
"""

from __future__ import annotations

import datetime
import json
import pathlib
import sys
import traceback

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

import lowbit
import lowbit.integrations.deepspeed
from lowbit.sharding import whole
from tests.support.ranks.leaving import leave

# It doubles after two steps.
DYNAMIC = {"enabled": True, "loss_scale": 0, "initial_scale_power": 8, "loss_scale_window": 2}
# Case: (ZeRO's stage and options, dtype of the model, further configuration).
CASES = {
    "1": ({"stage": 1}, torch.float32, {}),
    "1 bf16": ({"stage": 1}, torch.bfloat16, {"data_types": {"grad_accum_dtype": "fp32"}}),
    "1 fp16": ({"stage": 1}, torch.float16, {"fp16": {"enabled": True, "loss_scale": 128}}),
    "2": ({"stage": 2}, torch.float32, {}),
    "2 bf16": ({"stage": 2}, torch.bfloat16, {}),
    "3": ({"stage": 3, "sub_group_size": 400}, torch.float32, {}),
    "3 bf16": ({"stage": 3}, torch.bfloat16, {}),
    "3 fp16": ({"stage": 3}, torch.float16, {"fp16": {"enabled": True, "loss_scale": 128}}),
    "1 dynamic": ({"stage": 1}, torch.float16, {"fp16": DYNAMIC}),
    "2 dynamic": ({"stage": 2}, torch.float16, {"fp16": DYNAMIC}),
    "3 dynamic": ({"stage": 3}, torch.float16, {"fp16": DYNAMIC}),
    "2 one group": ({"stage": 2}, torch.float32, {}),
    "2 dealt out": ({"stage": 2, "round_robin_gradients": True}, torch.float32, {}),
}
ONE_GROUP = ("2 one group", "2 dealt out")  # of more parameters than ranks


class Net(nn.Module):
    """An odd number of weights, so that vectors are padded; frozen ones, a buffer, two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.f, self.b = nn.Linear(17, 33), nn.Linear(33, 33), nn.Linear(33, 7, bias=False)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.register_buffer("shift", torch.arange(7.0))
        # A Universal Checkpoint brings no frozen parameters and no buffers back: DeepSpeed loads
        # neither from it.
        torch.manual_seed(0)
        self.f.requires_grad_(False).reset_parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.f(self.a(x)).relu()) * self.scale + self.shift.to(x.dtype)


def engine_of(case: str, seed: int, universal: bool):
    zero, dtype, more = CASES[case]
    torch.manual_seed(seed)
    net = Net().to(dtype)
    decayed = [net.a.weight, net.b.weight]
    others = [net.a.bias, net.scale]
    # Stage 3 loads the first group's settings into every group.
    groups = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.1 if zero["stage"] == 3 else 0.0},
    ]
    if case in ONE_GROUP:
        groups = [{"params": decayed + others, "weight_decay": 0.1}]
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "gradient_clipping": 0.0,
        **({"checkpoint": {"load_universal": True}} if universal else {}),
        **more,
    }
    return deepspeed.initialize(
        model=net, optimizer=torch.optim.AdamW(groups, lr=1e-2), config=config
    )[0]


def train(engine, steps) -> list[float]:
    """The same batch on all ranks, so that their number does not matter."""
    dtype, losses = next(engine.module.parameters()).dtype, []
    for step in steps:
        x = torch.randn(4, 17, generator=torch.Generator().manual_seed(step)).to(dtype)
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def save(case: str, folder: pathlib.Path) -> list[float]:
    engine = engine_of(case, 0, False)
    train(engine, range(3))
    engine.save_checkpoint(
        str(folder / case),
        tag="step",
        client_state={
            "mine": 5,
            "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
        },
    )
    return train(engine, range(3, 6))


def resume(case: str, folder: pathlib.Path) -> list[list[float]]:
    """From the Universal Checkpoint that DeepSpeed made, and from the one that lowbit-ckpt made."""
    found = []
    for tag in ("by_the_package", "by_the_tool"):
        engine = engine_of(case, 1, True)
        path, client = engine.load_checkpoint(str(folder / case), tag=tag)
        assert path is not None and engine.global_steps == 3 and client["mine"] == 5
        found.append(train(engine, range(3, 6)))
    return found


def scale(case: str, folder: pathlib.Path) -> list:
    """The dynamic loss scale of a new engine, as it was saved, and as the engine has it from
    lowbit-ckpt's folder; and the losses from there.
    """

    def shown(scaler) -> dict:
        return {key: str(value) for key, value in sorted(vars(scaler).items())}

    (first, *_) = sorted((folder / case / "step").glob("*_optim_states.pt"))
    saved = torch.load(first, weights_only=False)["optimizer_state_dict"]["loss_scaler"]
    engine = engine_of(case, 1, True)
    new = shown(engine.optimizer.loss_scaler)
    path, _ = engine.load_checkpoint(str(folder / case), tag="by_the_tool")
    assert path is not None
    loaded = shown(engine.optimizer.loss_scaler)
    return [new, shown(saved), loaded, train(engine, range(3, 6))]


def goes_on(case: str, folder: pathlib.Path) -> list[float]:
    """From the Universal Checkpoint that lowbit-ckpt made of a run whose parameters were dealt out,
    in one where they are not.
    """
    engine = engine_of("2 one group", 1, True)
    path, _ = engine.load_checkpoint(str(folder / case), tag="by_the_tool")
    assert path is not None
    return train(engine, range(3, 6))


def from_lowbit(case: str, folder: pathlib.Path) -> list[int]:
    """What DeepSpeed has of a run of lowbit in 8 bits, saved by itself: its steps,
    also of the optimizer.
    """
    zero, dtype, more = CASES[case]
    net = nn.Linear(64, 256).to(dtype)
    opt = torch.optim.AdamW(
        [{"params": [net.weight], "weight_decay": 0.1}, {"params": [net.bias], "weight_decay": 0.1}]
    )
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "checkpoint": {"load_universal": True},
        **more,
    }
    engine, *_ = deepspeed.initialize(model=net, optimizer=opt, config=config)
    path, _ = engine.load_checkpoint(str(folder), tag="of lowbit")
    assert path is not None
    engine.save_checkpoint(str(folder), tag=f"again {case}")
    return [int(state["step"]) for state in opt.state.values()]


def client(case: str, folder: pathlib.Path) -> list[float]:
    """A client optimizer of lowbit's takes its state from the folders: what differs from the file
    that was converted, in all.
    """
    torch.manual_seed(1)
    net = Net()
    named = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
    opt = lowbit.AdamW(
        [
            {"params": [pair for pair in named if pair[0].endswith("weight")], "weight_decay": 0.1},
            {
                "params": [pair for pair in named if not pair[0].endswith("weight")],
                "weight_decay": 0.0,
            },
        ]
    )
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": CASES[case][0],
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=net, optimizer=opt, config=config)
    lowbit.integrations.deepspeed.bind(engine)
    wanted = torch.load(folder / case / "made.pt", weights_only=True)["optim"]["state"]
    found = []
    for name in ("step", "by_the_package", "by_the_tool"):
        lowbit.load_optimizer(opt, folder / case / name)
        state = lowbit.flat.get_state_dict(opt)["state"]
        found += [
            (whole(state[p][key]) - wanted[p][key]).abs().max().item()
            for p in wanted
            for key in ("exp_avg", "exp_avg_sq")
        ]
    return found


def quantized(case: str, folder: pathlib.Path) -> list[float]:
    """8-bit state taken from the folder and stepped on: the distance from one process that does the
    same, and the number of quantized tensors.
    """

    def net_and_opt():
        torch.manual_seed(2)
        net = nn.Linear(64, 256)
        return net, lowbit.AdamW(
            [
                {"params": [("weight", net.weight)], "weight_decay": 0.1},
                {"params": [("bias", net.bias)], "weight_decay": 0.1},
            ],
            lr=1e-2,
        )

    alone, of_alone = net_and_opt()
    net, opt = net_and_opt()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": CASES[case][0],
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
    }
    engine, *_ = deepspeed.initialize(model=net, optimizer=opt, config=config)
    lowbit.integrations.deepspeed.bind(engine)
    for of in (opt, of_alone):
        lowbit.load_optimizer(of, folder / f"large {case}")
    for step in range(2):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        alone(x).square().mean().backward()
        of_alone.step()
        of_alone.zero_grad()
    with deepspeed.zero.GatheredParameters(list(net.parameters())):
        apart = [
            (a - b).abs().max().item()
            for a, b in zip(net.parameters(), alone.parameters(), strict=True)
        ]
    states = [t for state in of_alone.state.values() for t in state.values()]
    assert all(state["step"] == 5 for state in of_alone.state.values())
    return [max(apart), sum(t.dtype == torch.uint8 for t in states if isinstance(t, torch.Tensor))]


WORK = {
    "save": save,
    "resume": resume,
    "client": client,
    "quantized": quantized,
    "goes_on": goes_on,
    "scale": scale,
    "from_lowbit": from_lowbit,
}


def main() -> None:
    out, folder, what, *cases = sys.argv[1:]
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
        False  # would be compiled; gloo does without
    )
    get_accelerator().__class__.is_fp16_supported = lambda _: True  # the CPU computes it, slowly
    # A rank that waits for one that has failed is to say so soon.
    deepspeed.init_distributed(dist_backend="gloo", timeout=datetime.timedelta(seconds=120))
    torch.set_num_threads(1)
    found = {}
    for case in cases:
        try:
            found[case] = WORK[what](case, pathlib.Path(folder))
        except Exception:
            found[case] = {"error": traceback.format_exc()}
    of_all: list = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, found)
    if dist.get_rank() == 0:
        pathlib.Path(out).write_text(json.dumps(of_all))
    leave()


if __name__ == "__main__":
    main()
