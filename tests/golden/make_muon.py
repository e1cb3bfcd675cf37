"""Writes muon.npz: what torch.optim.Muon leaves of three matrices after ten steps, in every option.

python tests/golden/make_muon.py
"""

import pathlib

import numpy as np
import torch

SHAPES = ((24, 40), (40, 24), (32, 32))
STEPS = 10
LR = 0.02
CASES = {
    "default": {},
    "momentum": {"nesterov": False, "momentum": 0.9, "weight_decay": 0.0},
    "low": {"momentum": 0.3},
    "original": {"adjust_lr_fn": "original", "ns_steps": 3},
    "moonlight": {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.5},
    "coefficients": {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 8, "eps": 1e-3},
}


def main() -> None:
    generator = torch.Generator().manual_seed(17)
    arrays = {}
    for i, shape in enumerate(SHAPES):
        arrays[f"p{i}"] = torch.randn(shape, generator=generator)
        grads = torch.randn((STEPS, *shape), generator=generator) * 0.1
        arrays[f"g{i}"] = grads.half()
    for name, options in CASES.items():
        params = [torch.nn.Parameter(arrays[f"p{i}"].clone()) for i in range(len(SHAPES))]
        opt = torch.optim.Muon(params, lr=LR, **options)
        for t in range(STEPS):
            for i, p in enumerate(params):
                p.grad = arrays[f"g{i}"][t].float()
            opt.step()
        for i, p in enumerate(params):
            arrays[f"{name}_p{i}"] = p.detach()
            arrays[f"{name}_m{i}"] = opt.state[p]["momentum_buffer"]
    made = {
        key: np.array(value.tolist(), dtype=str(value.dtype)[6:]) for key, value in arrays.items()
    }
    np.savez_compressed(pathlib.Path(__file__).with_name("muon.npz"), **made)


if __name__ == "__main__":
    main()
