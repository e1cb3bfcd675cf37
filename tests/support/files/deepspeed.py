"""Checkpoints as DeepSpeed 0.19.8 lays them out, ZeRO's and Universal ones, written without the
package: its source says the keys, and tests/frameworks/test_deepspeed_checkpoints.py compares with
what the package itself writes."""

from __future__ import annotations

import contextlib
import enum
import math
import pathlib
import sys
import types
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch

SETTINGS = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}


class ZeroStageEnum(int, enum.Enum):
    disabled, optimizer_states, gradients, weights = range(4)


class LossScaler:
    def __init__(self) -> None:
        self.cur_scale, self.dynamic = 1.0, False


class fragment_address:
    def __init__(self, numel: int, start: int) -> None:
        self.numel, self.start = numel, start


class DynamicLossScaler:
    def __init__(self) -> None:
        self.cur_scale, self.cur_iter, self.last_overflow_iter, self.scale_factor = (
            4096.0,
            41,
            17,
            2.0,
        )
        self.scale_window, self.min_scale, self.delayed_shift, self.cur_hysteresis = 500, 1, 2, 1
        self.consecutive_hysteresis, self.raise_error_at_min_scale, self.dynamic = False, True, True
        self.dtype = torch.float16


CLASSES = {
    ZeroStageEnum: "deepspeed.runtime.zero.config",
    LossScaler: "deepspeed.runtime.fp16.loss_scaler",
    DynamicLossScaler: "deepspeed.runtime.fp16.loss_scaler",
    fragment_address: "deepspeed.utils.tensor_fragment",
}


@contextlib.contextmanager
def named_as_deepspeed():
    """Pickles name the package's modules."""
    modules = set(CLASSES.values())
    parents = {name.rsplit(".", n)[0] for name in modules for n in range(1, name.count(".") + 1)}
    before = {name: sys.modules.get(name) for name in [*modules, *parents]}
    for name in before:
        sys.modules[name] = types.ModuleType(name)
    for cls, name in CLASSES.items():
        setattr(sys.modules[name], cls.__name__, cls)
        cls.__module__ = name
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


@dataclass
class Run:
    """What training has: float32 master weights by group, and Adam's moments of each."""

    groups: list[dict[str, torch.Tensor]]
    frozen: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    step: int = 3
    dtype: torch.dtype = torch.float32
    round_robin: bool = False  # round_robin_gradients of stages 1 and 2
    loss_scaler: Any = field(default_factory=LossScaler)
    client_state: dict[str, Any] = field(default_factory=lambda: {"mine": 5})
    padded_to: int = 1  # elements; parameter_alignment of stages 1 and 2

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.params = {name: p for group in self.groups for name, p in group.items()}
        self.moments = {
            name: {
                "exp_avg": torch.randn(p.shape, generator=generator),
                "exp_avg_sq": torch.rand(p.shape, generator=generator),
            }
            for name, p in self.params.items()
        }

    def tensor(self, name: str, state: str) -> torch.Tensor:
        return self.params[name] if state == "fp32" else self.moments[name][state]

    def laid(self, group: int, stage: int, ranks: int) -> dict[str, int]:
        """The parameters in the order in which they lie in a group's vector,
        and the padding behind each.
        """
        names = list(self.groups[group])
        if stage == 3:
            return dict.fromkeys(names, 0)
        if self.round_robin:
            names = [name for rank in range(ranks) for name in names[rank::ranks]]
        return {
            name: -self.params[name].numel() % self.padded_to if name != names[-1] else 0
            for name in names
        }

    def settings(self, group: int) -> dict[str, Any]:
        return {**SETTINGS, "weight_decay": 0.1 if group == 0 else 0.0}


def small_run(**more: Any) -> Run:
    torch.manual_seed(1)
    return Run(
        [
            {"a.weight": torch.randn(33, 17), "b.weight": torch.randn(7, 3, 11)},
            {"s": torch.randn(()), "a.bias": torch.randn(33)},
        ],
        **{
            "frozen": {"f.weight": torch.randn(5, 9)},
            "buffers": {
                "n.running_mean": torch.randn(33),
                "n.num_batches_tracked": torch.tensor(3),
            },
            **more,
        },
    )


def model_states(run: Run, stage: int, ranks: int, rank: int = 0) -> dict[str, Any]:
    weights = {**run.params, **run.frozen}
    weights |= {name: weights[owner] for name, owner in run.shared.items()}
    module = {k: torch.zeros(0) if stage == 3 else v.to(run.dtype) for k, v in weights.items()}
    frozen = {name: p.to(run.dtype).reshape(-1) for name, p in run.frozen.items()}
    each = {name: math.ceil(p.numel() / ranks) for name, p in frozen.items()}
    cut = {
        name: torch.cat([p, p.new_zeros(each[name] * ranks - p.numel())])
        .tensor_split(ranks)[rank]
        .clone()
        for name, p in frozen.items()
    }
    return {
        "module": OrderedDict(**module, **run.buffers),
        "buffer_names": list(run.buffers),
        "optimizer": None,
        "param_shapes": [
            OrderedDict((k, run.params[k].shape) for k in run.laid(i, stage, ranks))
            for i in range(len(run.groups))
        ],
        "frozen_param_shapes": OrderedDict((k, p.shape) for k, p in run.frozen.items())
        if stage > 1
        else None,
        "shared_params": run.shared,
        "frozen_param_fragments": OrderedDict(cut if stage == 3 else frozen) if stage > 1 else None,
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": run.step,
        "global_samples": 24,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": {"zero_optimization": {"stage": stage}},
        "ds_version": "0.19.8",
        **run.client_state,
    }


def flat_parts(run: Run, group: int, state: str, stage: int, ranks: int) -> list[torch.Tensor]:
    """A group's flat vector, by ranks. Stage 3 cuts every parameter; the others the vector,
    padded at its end.
    """
    laid = run.laid(group, stage, ranks)
    tensors = [
        torch.cat([run.tensor(name, state).reshape(-1), torch.zeros(padding)])
        for name, padding in laid.items()
    ]
    if stage == 3:
        cut = []
        for t in tensors:
            each = math.ceil(t.numel() / ranks)
            cut.append(torch.cat([t, t.new_zeros(each * ranks - t.numel())]).tensor_split(ranks))
        return [torch.cat([parts[rank] for parts in cut]) for rank in range(ranks)]
    flat = torch.cat(tensors)
    padded = torch.cat([flat, flat.new_zeros(-flat.numel() % (2 * ranks))])
    return [part.clone() for part in padded.split(padded.numel() // ranks)]


def touched(run: Run, group: int, ranks: int, rank: int) -> list[str]:
    """The parameters of which a rank of stages 1 and 2 has a slice, in the order in which they
    lie. DeepSpeed's own Muon keeps the momentum of all their elements there.
    """
    laid = run.laid(group, 1, ranks)
    total = sum(run.params[name].numel() + padding for name, padding in laid.items())
    each = (total + -total % (2 * ranks)) // ranks
    here, at = [], 0
    for name, padding in laid.items():
        if at < (rank + 1) * each and at + run.params[name].numel() > rank * each:
            here.append(name)
        at += run.params[name].numel() + padding
    return here


def slice_mappings(run: Run, ranks: int, rank: int) -> list[OrderedDict]:
    """As DeepSpeed 0.19.8 tells them: wrong under round_robin_gradients, of the parameters before
    they were dealt out; right with paddings.
    """
    out = []
    for i, group in enumerate(run.groups):
        laid = run.laid(i, 1, ranks)
        total = sum(run.params[name].numel() + padding for name, padding in laid.items())
        each = (total + -total % (2 * ranks)) // ranks
        begin, here, at = rank * each, OrderedDict(), 0
        for name in laid if any(laid.values()) else group:
            first, last = max(at, begin), min(at + run.params[name].numel(), begin + each)
            if first < last:
                here[name] = fragment_address(numel=last - first, start=first - begin)
            at += run.params[name].numel() + laid[name]
        out.append(OrderedDict((name, here[name]) for name in group if name in here))
    return out


def optimizer_states(run: Run, stage: int, ranks: int, rank: int) -> dict[str, Any]:
    state: dict[int, dict[str, torch.Tensor]] = {}
    masters, groups, paddings = [], [], []
    for i in range(len(run.groups)):
        state[i] = {"step": torch.tensor(float(run.step))}
        for key in ("exp_avg", "exp_avg_sq"):
            state[i][key] = flat_parts(run, i, key, stage, ranks)[rank]
        master = flat_parts(run, i, "fp32", stage, ranks)[rank]
        laid = run.laid(i, stage, ranks)
        total = sum(run.params[k].numel() + v for k, v in laid.items())
        behind = (rank + 1) * master.numel() - total
        strip = min(max(behind, 0), master.numel()) if stage < 3 else 0
        masters.append(master[: master.numel() - strip].clone())
        paddings.append(strip)
        groups.append({**run.settings(i), "params": [i]})
    base = {"state": state, "param_groups": groups}
    common = {
        "loss_scaler": run.loss_scaler,
        "dynamic_loss_scale": run.loss_scaler.dynamic,
        "overflow": False,
        "zero_stage": ZeroStageEnum(stage),
    }
    if stage == 3:
        of_rank = {
            **common,
            "partition_count": ranks,
            "optimizer_state_dict": base,
            "fp32_flat_groups": masters,
        }
    else:
        of_rank = {
            **common,
            "clip_grad": 1.0,
            "base_optimizer_state": base,
            "single_partition_of_fp32_groups": masters,
            "group_paddings": paddings,
            "param_alignment_paddings": [
                list(run.laid(i, stage, ranks).values()) for i in range(len(groups))
            ],
            "partition_count": [ranks] * len(groups),
            "ds_version": "0.19.8",
            "param_slice_mappings": slice_mappings(run, ranks, rank),
        }
    return {
        "optimizer_state_dict": of_rank,
        "ds_config": {"zero_optimization": {"stage": stage}},
        "ds_version": "0.19.8",
    }


def save(value: Any, path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with named_as_deepspeed():
        torch.save(value, path)


def rank_file(rank: int, prefix: str = "") -> str:
    return f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def write_zero(
    folder: pathlib.Path, run: Run, stage: int, ranks: int, prefix: str = ""
) -> pathlib.Path:
    for rank in range(ranks):
        save(optimizer_states(run, stage, ranks, rank), folder / rank_file(rank, prefix))
        name = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
        if stage == 3 or rank == 0:
            save(model_states(run, stage, ranks, rank), folder / f"{name}_model_states.pt")
    return folder


def write_universal(folder: pathlib.Path, run: Run, stage: int, ranks: int = 2) -> pathlib.Path:
    """As ds_to_universal makes it out of that stage: shapes and steps are in other places in
    stage 3.
    """
    of_rank = optimizer_states(run, stage, ranks, 0)["optimizer_state_dict"]
    if stage == 3:
        of_rank["param_groups"] = of_rank["optimizer_state_dict"]["param_groups"]
        for rank in range(ranks):
            save(
                model_states(run, 3, ranks, rank),
                folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt",
            )
    else:
        base = of_rank.pop("base_optimizer_state")
        of_rank = {
            k: v
            for k, v in of_rank.items()
            if k not in ("param_slice_mappings", "single_partition_of_fp32_groups")
        }
        of_rank["param_groups"] = base["param_groups"]
        save(model_states(run, stage, ranks), folder / "mp_rank_00_model_states.pt")
        for name, value in {
            **run.frozen,
            **run.buffers,
            **{k: {**run.params, **run.frozen}[v] for k, v in run.shared.items()},
        }.items():
            save({"param": value.float()}, folder / "zero" / name / "fp32.pt")
    for name in run.params:
        for state in ("fp32", "exp_avg", "exp_avg_sq"):
            t = run.tensor(name, state)
            save(
                t.reshape(-1) if stage == 3 else {"cat_dim": 0, "param": t},
                folder / "zero" / name / f"{state}.pt",
            )
        if stage < 3:
            save(torch.tensor(float(run.step)), folder / "zero" / name / "step.pt")
    save(of_rank, folder / "zero" / "optimizer_state.pt")
    return folder
