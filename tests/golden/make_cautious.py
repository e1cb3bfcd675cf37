"""Writes cautious.npz: what timm's optimizers with caution=True leave of a matrix after ten steps.

pip install --no-deps timm==1.0.31, then python tests/golden/make_cautious.py
"""

import importlib.metadata
import importlib.util
import pathlib
import sys
import types

import numpy as np
import torch

SHAPE, STEPS = (24, 40), 10
CASES = {
    "adamw": ("adamw", "AdamWLegacy", {"lr": 0.02, "weight_decay": 0.1}),
    "adamw_betas": ("adamw", "AdamWLegacy", {"lr": 0.02, "betas": (0.6, 0.9), "eps": 1e-4}),
    "amsgrad": ("adamw", "AdamWLegacy", {"lr": 0.02, "amsgrad": True, "weight_decay": 0.0}),
    "lion": ("lion", "Lion", {"lr": 0.01, "weight_decay": 0.1}),
    "sgd": ("sgdw", "SGDW", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "nesterov": ("sgdw", "SGDW", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
}


def optimizers(name: str) -> types.ModuleType:
    """A module of timm.optim without the rest of timm, which needs torchvision."""
    found = importlib.metadata.distribution("timm").locate_file("timm")
    for package in ("timm", "timm.optim"):
        made = sys.modules.setdefault(package, types.ModuleType(package))
        made.__path__ = [str(found / package.removeprefix("timm").replace(".", "/").strip("/"))]
    return importlib.import_module(f"timm.optim.{name}")


def main() -> None:
    generator = torch.Generator().manual_seed(31)
    start = torch.randn(SHAPE, generator=generator)
    grads = (torch.randn((STEPS, *SHAPE), generator=generator) * 0.1).half()
    arrays = {"p0": start, "g0": grads}
    for name, (module, cls, options) in CASES.items():
        p = torch.nn.Parameter(start.clone())
        opt = getattr(optimizers(module), cls)([p], caution=True, **options)
        for t in range(STEPS):
            p.grad = grads[t].float()
            opt.step()
        arrays[f"{name}_p"] = p.detach()
    made = {k: np.array(v.tolist(), dtype=str(v.dtype)[6:]) for k, v in arrays.items()}
    np.savez_compressed(pathlib.Path(__file__).with_name("cautious.npz"), **made)
    print(f"timm {importlib.metadata.version('timm')}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
