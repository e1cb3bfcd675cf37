"""What a rank does in test_deepspeed_layouts.py about PipelineModule: its stages, with ZeRO's stage
1 in each, beside one process.
"""

from __future__ import annotations

import math
import pathlib

import torch
import torch.distributed.checkpoint as dcp
from deepspeed.pipe import PipelineModule
from torch import nn

import lowbit
from lowbit.integrations import deepspeed as integration
from tests.frameworks import deepspeed_exact  # first: it chooses DeepSpeed's accelerator
from tests.support.digests import digest

HALF, ALL, MICROS = 3, 6, 4
# Case: ZeRO's stage, dtype of the model, what else is configured.
CASES = {
    "1": (1, "float32", {}),
    "1 clipped": (1, "float32", {"gradient_clipping": 0.05}),
    # Without the second, sums are rounded to bfloat16 for their way to the other ranks.
    "1 float32 sums": (
        1,
        "bfloat16",
        {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"},
    ),
    "0": (0, "float32", {}),
}


def layers(dtype: str, seed: int = 0) -> list[nn.Module]:
    torch.manual_seed(seed)
    kind = getattr(torch, dtype)
    sizes = [(64, 96), (96, 80), (80, 72), (72, 48)]
    made = [m for a, b in sizes for m in (nn.Linear(a, b, dtype=kind), nn.Tanh())]
    return made[:-1]


def batch(step: int, micro: int, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + micro)
    x, y = torch.randn(4, 64, generator=generator), torch.randn(4, 48, generator=generator)
    return x.to(getattr(torch, dtype)), y.to(getattr(torch, dtype))


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).float().square().mean()


def optimizer(named):
    return lowbit.AdamW(
        [(n, p) for n, p in named if p.requires_grad],
        lr=1e-2,
        seed=3,
        weight_decay=0.1,
        min_numel=1024,
    )


def alone(
    case: str, norms: list[float], folder: pathlib.Path | None = None
) -> list[dict[str, str]]:
    """Half way and in the end: float32 weights, of which the model has a copy in its dtype. With a
    folder it continues from what stages saved there.
    """
    _, dtype, config = CASES[case]
    limit = config.get("gradient_clipping", 0.0)
    model, masters, made = nn.Sequential(*layers(dtype)), nn.Sequential(*layers(dtype)).float(), []
    if folder:
        load_weights(masters, folder)
        model.load_state_dict(masters.state_dict())
    opt = optimizer(masters.named_parameters())
    if folder:
        load_state(opt, folder)
        made.append(digest(opt, HALF))
    for step in range(HALF if folder else 0, ALL):
        sums = [torch.zeros_like(p) for p in masters.parameters()]
        for micro in range(MICROS):
            x, y = batch(step, micro, dtype)
            (loss_of(model(x), y) / MICROS).backward()
            for p, total in zip(model.parameters(), sums, strict=True):
                total.add_(p.grad)
                p.grad = None
        true = math.sqrt(sum(total.double().square().sum().item() for total in sums))
        assert not limit or abs(norms[step] - true) <= 1e-5 * true, f"{norms[step]}, not {true}"
        for p, total in zip(masters.parameters(), sums, strict=True):
            factor = (
                1.0 / ((torch.as_tensor(norms[step]) + 1e-6) / limit).clamp(min=1.0)
                if limit
                else 1.0
            )
            p.grad = total * factor
        opt.step()
        model.load_state_dict(masters.state_dict())
        if step + 1 in (HALF, ALL):
            made.append(digest(opt, step + 1))
    return made


def weights_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in module.named_parameters()}


def save(module: nn.Module, opt, folder: pathlib.Path) -> None:
    """As docs/bits/frameworks-tested.md says: state alone."""
    state = {"state": lowbit.flat.get_state_dict(opt)["state"]}
    dcp.save({"optim": state, "model": weights_of(module)}, checkpoint_id=folder)


def load_weights(module: nn.Module, folder: pathlib.Path) -> None:
    dcp.load({"model": weights_of(module)}, checkpoint_id=folder)


def load_state(opt, folder: pathlib.Path) -> None:
    own = lowbit.flat.get_state_dict(opt)
    saved = {"optim": {"state": own["state"]}}
    dcp.load(saved, checkpoint_id=folder)
    lowbit.flat.set_state_dict(opt, {**own, **saved["optim"]})


def engine_of(case: str, stages: int, seed: int, folder: pathlib.Path | None = None):
    zero, dtype, more = CASES[case]
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICROS,
        "zero_optimization": {"stage": zero},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": dtype == "bfloat16"},
        "gradient_clipping": 0.0,
        **more,
    }
    module = PipelineModule(
        layers(dtype, seed), num_stages=stages, loss_fn=loss_of, partition_method="uniform"
    )
    if folder:
        load_weights(module, folder)
    opt = optimizer(module.named_parameters())
    return integration.initialize(model=module, optimizer=opt, config=config)[0], opt


def train(case: str, stages: int, folder: str) -> dict:
    """What is not as in one process, of this rank's stage.
    `moved` continues from the checkpoint of half way.
    """
    dtype = CASES[case][1]
    place, norms, found = pathlib.Path(folder) / f"{case} {stages}", [], []
    with deepspeed_exact.world():
        engine, opt = engine_of(case, stages, 0)
        for step in range(ALL):
            if step == HALF:
                engine.save_checkpoint(str(place), tag="half")
                save(engine.module, opt, place / "dcp")
            engine.train_batch(iter([batch(step, m, dtype) for m in range(MICROS)]))
            norms.append(engine.get_global_grad_norm() or 0.0)
            if step + 1 in (HALF, ALL):
                found.append(digest(opt, step + 1))
        again, opt = engine_of(case, stages, 1)
        again.load_checkpoint(str(place), tag="half")
        loaded = digest(opt, HALF)
        for step in range(HALF, ALL):
            again.train_batch(iter([batch(step, m, dtype) for m in range(MICROS)]))
        ended = digest(opt, ALL)
        want = [{k: each[k] for k in found[0]} for each in alone(case, norms)]
        return {
            "same": found == want,
            "resumed": [loaded, ended] == want,
            "names": sorted(found[0]),
            "class": type(engine.optimizer).__name__,
        }


def moved(case: str, source: int, stages: int | None, folder: str) -> bool:
    """Whether the DCP checkpoint that so many stages saved half way resumes with others, or in one
    process, as that would have.
    """
    place, dtype = pathlib.Path(folder) / f"{case} {source}" / "dcp", CASES[case][1]
    want = alone(case, [0.0] * ALL)
    if stages is None:
        return alone(case, [0.0] * ALL, place) == want
    with deepspeed_exact.world():
        engine, opt = engine_of(case, stages, 1, place)
        load_state(opt, place)
        found = [digest(opt, HALF)]
        for step in range(HALF, ALL):
            engine.train_batch(iter([batch(step, m, dtype) for m in range(MICROS)]))
        found.append(digest(opt, ALL))
        return found == [{k: each[k] for k in found[0]} for each in want]
