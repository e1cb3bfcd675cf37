"""Writes adafactor8bit.npz: what adafactor-8bit leaves on a CPU in two of its paths, the low-rank
one of 0.1.9 and CAME of 0.4.6.

The two versions exclude each other, so one run for each,
the second of which adds to the first one's arrays:

    pip install --no-deps --target 019 adafactor8bit==0.1.9; PYTHONPATH=019 python
    tests/golden/make_adafactor8bit.py pip install --no-deps --target 046 adafactor8bit==0.4.6;
    PYTHONPATH=046 python tests/golden/make_adafactor8bit.py
"""

import importlib.metadata
import pathlib

import adafactor8bit
import numpy as np
import torch

HERE = pathlib.Path(__file__).parent
FILE = HERE / "adafactor8bit.npz"
SHAPES = ((16, 256), (96, 64), (40,))  # the seeds of the matrices are 0 and 1
STEPS = 5
RANK, GAP = 8, 2
# 0.1.9, in float32: its quantized states lose what they hold (test_golden_adafactor.py)
LOW_RANK = {
    "default": {"weight_decay": 0.1},
    "tensor": {
        "apollo_scale_type": "tensor",
        "relative_step": False,
        "scale_parameter": False,
        "beta2": 0.9,
        "scale_weight_decay": False,
        "weight_decay": 0.1,
        "d": 1.5,
        "apollo_eps": 1e-4,
        "fira_margin": 0.05,
    },
    "maximize": {
        "maximize": True,
        "d": 1.0,
        "eps": (None, 0.5),
        "relative_step": False,
        "apollo_update_proj_gap": 3,
    },
}
CAME = {  # 0.4.6, by its preset of that name; uf8 is its default
    "uf8": {"v_quant_type": "fp32"},
    "uf8_al8": {"v_quant_type": "al8", "weight_decay": 0.1},
}
PRESET = {
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "beta2_decay": None,
    "beta3": 0.9999,
    "factored": True,
    "relative_step": False,
    "scale_parameter": False,
    "scale_weight_decay": False,
    "d": 1.0,
    "eps_came": 1e-16,
}
LOW_RANK_STATE = ("v_low", "scaled_grad_norm_prev", "current_proj_seed", "apollo_seed", "variance")
MEANS = ("row_var", "col_var", "conf_row", "conf_col")
PARTS = ("", "_q", "_scale", "_min_log")
CAME_STATE = ("m_q", "m_scale", *(x + part for x in MEANS for part in PARTS))


def numbers(x):
    if not isinstance(x, torch.Tensor):
        return np.array(x)
    return np.array(x.detach().tolist(), dtype=str(x.dtype)[6:])


def run(name, params, gradients, options, keys, arrays):
    opt = adafactor8bit.Adafactor8Bit(params, use_cuda_kernel=False, **options)
    for t in range(STEPS):
        for p, g in zip(params, gradients, strict=True):
            p.grad = g[t].float()
        opt.step()
    for i, p in enumerate(params):
        arrays[f"{name}_p{i}"] = numbers(p)
        for key in keys:
            if opt.state[p].get(key) is not None:
                arrays[f"{name}_{key}{i}"] = numbers(opt.state[p][key])


def main() -> None:
    version = importlib.metadata.version("adafactor8bit")
    arrays = dict(np.load(FILE)) if FILE.exists() else {}
    generator = torch.Generator().manual_seed(37)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    gradients = []
    for shape in SHAPES:
        gradients.append((torch.randn((STEPS, *shape), generator=generator) * 0.1).half())
    for i, (p, g) in enumerate(zip(values, gradients, strict=True)):
        arrays[f"p{i}"], arrays[f"g{i}"] = numbers(p), numbers(g)
    if version == "0.1.9":
        for name, options in LOW_RANK.items():
            params = [torch.nn.Parameter(p.clone()) for p in values]
            given = {"lr": 1e-2, "apollo_rank": RANK, "apollo_update_proj_gap": GAP, **options}
            run(
                f"lowrank_{name}",
                params,
                gradients,
                {**given, "quantize": False},
                LOW_RANK_STATE,
                arrays,
            )
    else:
        assert version == "0.4.6"
        for name, options in CAME.items():  # of the first alone: 4096 elements, rows of one block
            params = [torch.nn.Parameter(values[0].clone())]
            run(f"came_{name}", params, gradients[:1], {**PRESET, **options}, CAME_STATE, arrays)
    np.savez_compressed(FILE, **arrays)
    print(f"adafactor8bit {version}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
