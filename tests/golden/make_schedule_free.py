"""Writes schedule_free.npz: what AdamWScheduleFree of the package schedulefree leaves after twelve
steps, in every option.

pip install schedulefree==1.4.1, then python tests/golden/make_schedule_free.py
"""

import importlib.metadata
import pathlib

import numpy as np
import schedulefree
import torch

SHAPES = ((24, 40), (70,))
STEPS = 12
CASES = {
    "default": {},
    "warmup": {"warmup_steps": 5, "weight_decay": 0.1},
    "weights": {"r": 1.5, "weight_lr_power": 0.5, "warmup_steps": 8, "betas": (0.95, 0.99)},
    "plain": {"weight_lr_power": 0.0, "betas": (0.7, 0.9), "eps": 1e-3, "foreach": False},
    "schedule": {"lr": 0.1, "weight_decay": 0.01},  # the learning rate of SCHEDULE
}
SCHEDULE = [0.01, 0.02, 0.04, 0.1, 0.1, 0.05, 0.02, 0.02, 0.01, 0.005, 0.002, 0.001]


def main() -> None:
    generator = torch.Generator().manual_seed(29)
    arrays = {}
    for i, shape in enumerate(SHAPES):
        arrays[f"p{i}"] = torch.randn(shape, generator=generator)
        arrays[f"g{i}"] = (torch.randn((STEPS, *shape), generator=generator) * 0.1).half()
    for name, options in CASES.items():
        params = [torch.nn.Parameter(arrays[f"p{i}"].clone()) for i in range(len(SHAPES))]
        opt = schedulefree.AdamWScheduleFree(params, **{"lr": 0.02, **options})
        opt.train()
        for t in range(STEPS):
            if name == "schedule":
                opt.param_groups[0]["lr"] = SCHEDULE[t]
            for i, p in enumerate(params):
                p.grad = arrays[f"g{i}"][t].float()
            opt.step()
            if t == 6:  # to and fro
                opt.eval()
                opt.train()
        for i, p in enumerate(params):
            arrays[f"{name}_y{i}"] = p.detach().clone()
            arrays[f"{name}_z{i}"] = opt.state[p]["z"]
            arrays[f"{name}_v{i}"] = opt.state[p]["exp_avg_sq"]
        group = opt.param_groups[0]
        entries = [group[key] for key in ("k", "weight_sum", "lr_max", "scheduled_lr")]
        arrays[f"{name}_group"] = torch.tensor(entries, dtype=torch.float64)
        opt.eval()
        for i, p in enumerate(params):
            arrays[f"{name}_x{i}"] = p.detach()
    made = {k: np.array(v.tolist(), dtype=str(v.dtype)[6:]) for k, v in arrays.items()}
    np.savez_compressed(pathlib.Path(__file__).with_name("schedule_free.npz"), **made)
    print(f"schedulefree {importlib.metadata.version('schedulefree')}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
