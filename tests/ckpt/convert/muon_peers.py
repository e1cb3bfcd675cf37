"""Files of the Muons that are on no package index: Keller Jordan's (github.com/KellerJordan/Muon,
commit 00ba60d3), Moonlight's (MoonshotAI/Moonlight, examples/toy_train.py, commit abaa96ec) and
Dion's (microsoft/dion, dion/muon.py, commit 0c205499).

The stand-ins below keep what those keep: the keys of state and groups, and the recurrences of the
moments. They change no weights.
"""

from typing import Any

import torch

SHAPES = {"up.weight": (96, 64), "down.weight": (64, 96), "small.weight": (8, 12)}  # Muon's
OTHERS = {"tokens.weight": (100, 64), "norm.weight": (64,)}  # AdamW's
NAMES = [*SHAPES, *OTHERS]
MU, BETAS = 0.9, (0.8, 0.95)
STEPS = 4


def grad(name: str, step: int) -> torch.Tensor:
    shape = {**SHAPES, **OTHERS}[name]
    seed = 100 * step + NAMES.index(name)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 1e-2


def moments(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """AdamW's."""
    m, v = torch.zeros_like(grad(name, 0)), torch.zeros_like(grad(name, 0))
    for t in range(STEPS):
        m.lerp_(grad(name, t), 1 - BETAS[0])
        v.lerp_(grad(name, t).square(), 1 - BETAS[1])
    return m, v


def average(name: str) -> torch.Tensor:
    """A running average of the gradients."""
    m = torch.zeros_like(grad(name, 0))
    for t in range(STEPS):
        m.lerp_(grad(name, t), 1 - MU)
    return m


def total(name: str) -> torch.Tensor:
    """A decaying sum of them."""
    m = torch.zeros_like(grad(name, 0))
    for t in range(STEPS):
        m.mul_(MU).add_(grad(name, t))
    return m


def numbered(*groups: dict[str, Any]) -> list[dict[str, Any]]:
    at = 0
    for group in groups:
        group["params"] = list(range(at, at + group["params"]))
        at = group["params"][-1] + 1
    return list(groups)


def keller() -> dict[str, Any]:
    """SingleDeviceMuonWithAuxAdam."""
    state: dict[int, Any] = {i: {"momentum_buffer": average(name)} for i, name in enumerate(SHAPES)}
    for i, name in enumerate(OTHERS, len(SHAPES)):
        m, v = moments(name)
        state[i] = {"exp_avg": m, "exp_avg_sq": v, "step": STEPS}
    muon = {
        "params": len(SHAPES),
        "use_muon": True,
        "lr": 0.02,
        "momentum": MU,
        "weight_decay": 0.01,
    }
    adam = {
        "params": len(OTHERS),
        "use_muon": False,
        "lr": 3e-4,
        "betas": BETAS,
        "eps": 1e-10,
        "weight_decay": 0.02,
    }
    return {"state": state, "param_groups": numbered(muon, adam)}


def moonlight() -> dict[str, Any]:
    state: dict[int, Any] = {
        i: {"use_muon": True, "momentum_buffer": total(name)} for i, name in enumerate(SHAPES)
    }
    for i, name in enumerate(OTHERS, len(SHAPES)):
        m, v = moments(name)
        state[i] = {"use_muon": False, "step": STEPS, "moment1": m, "moment2": v}
    group = {
        "params": len(NAMES),
        "lr": 1e-3,
        "wd": 0.1,
        "momentum": MU,
        "nesterov": True,
        "ns_steps": 5,
        "adamw_betas": BETAS,
        "adamw_eps": 1e-8,
    }
    return {"state": state, "param_groups": numbered(group)}


def dion(adjust_lr: str | None = "rms_norm") -> dict[str, Any]:
    state: dict[int, Any] = {i: {"momentum": total(name)} for i, name in enumerate(SHAPES)}
    for i, name in enumerate(OTHERS, len(SHAPES)):
        m, v = moments(name)
        state[i] = {"momentum": m, "variance": v}
    shared = {
        "mu": MU,
        "beta1": BETAS[0],
        "beta2": BETAS[1],
        "weight_decay": 0.01,
        "step": STEPS,
        "epsilon": 1e-8,
        "nesterov": False,
        "flatten": False,
        "adjust_lr": adjust_lr,
    }
    muon = {"params": len(SHAPES), "lr": 0.01, "algorithm": "muon", **shared}
    adamw = {"params": len(OTHERS), "lr": 3e-4, "algorithm": "adamw", **shared}
    return {"state": state, "param_groups": numbered(muon, adamw)}
