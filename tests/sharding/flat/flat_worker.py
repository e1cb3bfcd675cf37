"""What a rank does in test_flat_shards.py."""

from __future__ import annotations

import copy
import functools
import pathlib
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

import lowbit
from lowbit import fsdp1, sharding
from tests.sharding.same_bytes import equal
from tests.sharding.wrapped_checkpoint import load
from tests.sharding.wrappers_worker import (
    END,
    MAKE,
    SAVED,
    Model,
    alone,
    build,
    kept_of,
    name_of,
    set_grads,
    unequal,
)
from tests.support.trained import losses_of_both_modes


def train(opt, steps, growth: float = 1.0) -> None:
    for step in steps:
        set_grads(opt, step)
        if growth != 1.0:
            for p in (p for group in opt.param_groups for p in group["params"]):
                if p.grad is not None:
                    p.grad *= growth**step
        opt.step()
        opt.zero_grad()


# State dicts


def float32_view(wrapper: str, name: str, kind: str) -> dict:
    model, opt = build(wrapper, name, export="fp32")
    train(opt, range(SAVED))
    again = MAKE[name](model.named_parameters())
    fsdp1.bind(model, again, export="fp32")
    saved, excused = _through(kind, model, opt)
    again.load_state_dict(_back(kind, model, again, saved))
    after = unequal(again, alone(name)[SAVED])
    train(again, range(SAVED, END))
    return {"loaded": after, "excused": excused, "continued": unequal(again, alone(name)[END])}


def save_alone(folder: str, names: list[str]) -> None:
    for name in names:
        model, opt = build("single", name)
        train(opt, range(SAVED))
        state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, opt)}
        dcp.save(state, checkpoint_id=pathlib.Path(folder) / name)


def read_directly(wrapper: str, folder: str, names: list[str]) -> list[str]:
    """load_optimizer reads the rows that are touched here, by itself."""
    wrong = []
    for name in names:
        model, opt = build(wrapper, name)
        load(wrapper, {"": (model, opt)}, pathlib.Path(folder) / name)
        again = MAKE[name](model.named_parameters())
        fsdp1.bind(model, again)
        lowbit.load_optimizer(again, pathlib.Path(folder) / name)
        wrong += unequal(again, alone(name)[SAVED])
    return wrong


def infinite_gradients(wrapper: str) -> list[str]:
    """A step that a scaler calls off changes and counts nothing, on no rank; stats() and a second
    bind change nothing either.
    """
    model, opt = build(wrapper, "8bit")
    train(opt, range(SAVED))
    set_grads(opt, SAVED)
    opt.grad_scale, opt.found_inf = torch.tensor(2.0), torch.tensor(1.0)
    opt.step()
    del opt.grad_scale, opt.found_inf
    assert str(opt.stats())
    fsdp1.bind(model, opt)
    return unequal(opt, alone("8bit")[SAVED])


def _through(kind: str, model, opt) -> tuple[dict, bool]:
    """The optimizer's state by torch's functions, and whether torch confused its two moments,
    as it does with its own AdamW.
    """
    if kind == "own":
        return copy.deepcopy(opt.state_dict()), False
    with _state_dict_type(kind, model):
        saved = FullyShardedDataParallel.optim_state_dict(model, opt)
    one = next(value for value in saved["state"].values() if "exp_avg" in value)
    aliased = kind == "full" and one["exp_avg"].data_ptr() == one["exp_avg_sq"].data_ptr()
    return saved, aliased


def _back(kind: str, model, opt, saved: dict) -> dict:
    if kind == "own":
        return saved
    with _state_dict_type(kind, model):
        return FullyShardedDataParallel.optim_state_dict_to_load(model, opt, saved)


def _state_dict_type(kind: str, model):
    if kind == "full":
        return FullyShardedDataParallel.state_dict_type(
            model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()
        )
    return FullyShardedDataParallel.state_dict_type(
        model,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(),
        ShardedOptimStateDictConfig(),
    )


def torch_adamw_aliases() -> bool:
    """Whether torch's own AdamW comes out of FULL optim_state_dict with one buffer for both
    moments.
    """
    model = FullyShardedDataParallel(
        Model(torch.float32).a, use_orig_params=True, device_id=torch.device("cpu")
    )
    opt = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.numel() else None
    opt.step()
    return _through("full", model, opt)[1]


def torch_adamw_takes_it() -> bool:
    model, opt = build("FSDP1 orig", "8bit", export="fp32", dtype=torch.float32)
    for step in range(3):
        set_grads(opt, step)
        opt.step()
    saved = opt.state_dict()
    other = torch.optim.AdamW(model.parameters())
    other.load_state_dict(saved)
    return all(
        torch.equal(other.state[p]["exp_avg"], saved["state"][i]["exp_avg"])
        and other.state[p]["exp_avg"].numel() == p.numel()
        for i, p in enumerate(model.parameters())
        if i in saved["state"] and p in other.state
    ) and any(other.state[p]["exp_avg"].any() for p in other.state)


def unbound() -> list[str]:
    said = []
    for orig in (True, False):
        model = FullyShardedDataParallel(
            nn.Linear(64, 80), use_orig_params=orig, device_id=torch.device("cpu")
        )
        opt = lowbit.AdamW(model.named_parameters())
        model(torch.ones(2, 64)).sum().backward()
        clip = functools.partial(lowbit.clip_grad_norm_, model.parameters(), 1.0)
        for act in (opt.step, lambda o=opt: o.load_state_dict(o.state_dict()), clip):
            try:
                act()
            except ValueError as error:
                said.append(str(error))
            else:
                said.append("nothing was refused")
    return said


def bind_refuses() -> dict[str, str]:
    def message(make, model=None, **binding) -> str:
        own = FullyShardedDataParallel(
            nn.Linear(96, 80), use_orig_params=True, device_id=torch.device("cpu")
        )
        try:
            fsdp1.bind(model or own, make(own.named_parameters()), **binding)
        except ValueError as error:
            return str(error)
        return "nothing was refused"

    return {
        "another model": message(lowbit.AdamW, nn.Linear(4, 4)),
        "factored": message(lowbit.Adafactor, export="fp32"),
        "APOLLO": message(lambda p: lowbit.APOLLO(p, rank=8)),
        "Fira": message(lambda p: lowbit.Fira(p, rank=8)),
        "APOLLO without": message(lambda p: lowbit.APOLLO(p, rank=None)),
        "APOLLO, wide": message(lambda p: lowbit.APOLLO(p, rank=8, full_precision=["*weight"])),
    }


def cuts_inside_bytes(wrapper: str) -> bool:
    """Whether this rank's part of a parameter with 4-bit state begins in the middle of a byte of
    codes.
    """
    _, opt = build(wrapper, "4bit")
    coded = [lay for _, _, lay in opt.laid_out() if any(slot.coded for slot in lay.slots)]
    return any(lay.part.front * 4 % 8 for lay in coded)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Parameter(torch.randn(64, 128).bfloat16()) for _ in range(2))


def one_on_each(name: str) -> list[str]:
    """What is not equal where two parameters of one size are flattened together over two ranks."""
    wrong = []
    single = Two()
    alone_opt = MAKE[name](single.named_parameters())
    train(alone_opt, range(3), 10.0)  # which CAME clips
    for orig in (True, False):
        model = FullyShardedDataParallel(Two(), use_orig_params=orig, device_id=torch.device("cpu"))
        opt = MAKE[name](model.named_parameters())
        fsdp1.bind(model, opt)
        assert all(len(p.holding_ranks) == 1 for _, p, _, _ in opt.members())
        train(opt, range(3), 10.0)
        wrong += unequal(opt, kept_of(single, alone_opt))
    return wrong


def momentum_later(wrapper: str) -> list[str]:
    """What is not equal where a group takes a momentum between steps,
    whose codes have blocks that are cut.
    """
    models = [build(kind, "8bit")[0] for kind in ("single", wrapper)]
    opts = [lowbit.SGD(model.named_parameters(), lr=1e-2, seed=5) for model in models]
    fsdp1.bind(models[1], opts[1])
    for opt in opts:
        train(opt, range(2))
        for group in opt.param_groups:
            group["momentum"] = 0.9
        train(opt, range(2, 5))
    return unequal(opts[1], kept_of(models[0], opts[0]))


def modes_after_an_evaluation(orig: bool) -> tuple[list[float], list[float]]:
    """Losses of one process, and of FSDP1, whose root keeps what it gathered in an evaluation."""

    def losses(shard: bool) -> list[float]:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 8))
        if shard:
            cpu = torch.device("cpu")
            model[0] = FullyShardedDataParallel(model[0], use_orig_params=orig, device_id=cpu)
            model = FullyShardedDataParallel(model, use_orig_params=orig, device_id=cpu)
        opt = lowbit.ScheduleFreeAdamW(model.named_parameters(), lr=0.05, state_format="float32")
        if shard:
            fsdp1.bind(model, opt)
        return losses_of_both_modes(model, opt)

    return losses(False), losses(True)


# Float32 weights


def float32_weights(wrapper: str, name: str) -> list[str]:
    """What differs from one process: what is got,
    and weights and state after float32 weights were set.
    """
    alone_model, alone_opt = build("single", name)
    model, opt = build(wrapper, name)
    train(alone_opt, range(5))
    train(opt, range(5))
    want = lowbit.get_fp32_model_state_dict(alone_model, alone_opt)
    got = lowbit.get_fp32_model_state_dict(model, opt)
    wrong = [
        key
        for key in want.keys() | got.keys()
        if key not in want or key not in got or not equal(got[key], want[key])
    ]
    alone_model, alone_opt = build("single", name, seed=1)
    given = {key: value * 1.001 for key, value in want.items()}
    lowbit.set_fp32_model_state_dict(alone_model, alone_opt, given)
    for part in (given, {key: value * 1.001 for key, value in got.items()}):
        model, opt = build(wrapper, name, seed=1)
        lowbit.set_fp32_model_state_dict(model, opt, part)
        wrong += unequal(opt, kept_of(alone_model, alone_opt))
    return wrong


def stored_after_an_evaluation(orig: bool) -> float:
    """The norm of what a pass makes of weights of 0 that were stored after another pass."""
    cpu = torch.device("cpu")
    model = FullyShardedDataParallel(nn.Linear(96, 80), use_orig_params=orig, device_id=cpu)
    opt = lowbit.AdamW(model.named_parameters())
    fsdp1.bind(model, opt)
    weights = lowbit.get_fp32_model_state_dict(model, opt)
    x = torch.ones(2, 96)
    with torch.no_grad():
        assert model(x).norm() > 0
        zeros = {key: torch.zeros_like(value) for key, value in weights.items()}
        lowbit.set_fp32_model_state_dict(model, opt, zeros)
        return model(x).norm().item()


def no_master_free(wrapper: str) -> str:
    own = FullyShardedDataParallel(
        nn.Linear(96, 80), use_orig_params=True, device_id=torch.device("cpu")
    )
    try:
        lowbit.to_master_free(own, lowbit.AdamW)
    except ValueError as error:
        assert all(p.dtype == torch.float32 for p in own.parameters())
        return str(error)
    return "nothing was refused"


# stats(probe=True)


def probed(wrapper: str, name: str) -> dict[str, dict[str, float]]:
    """For each parameter how many values of its part here are what; the largest error;
    and that the probe changed nothing.
    """
    _, opt = build(wrapper, name)
    train(opt, range(SAVED))
    set_grads(opt, SAVED)
    stats = opt.stats(probe=True)
    assert unequal(opt, alone(name)[SAVED]) == []
    opt.step()  # and that nothing waits for anybody
    found = {}
    members = {name_of(p, own): p for _, p, own, _ in opt.members()}
    for key, entry in stats["parameters"].items():
        count = sharding.local(members[key]).numel()
        assert entry["values"] == count
        made = {"values": count, "probed": count * ("lost" in entry)}
        for share in ("lost", "updates"):
            made[share] = round(entry.get(share, 0) * count)
        for state, kept in entry["states"].items():
            for share in ("zero", "saturated"):
                made[f"{state} {share}"] = round(kept.get(share, 0) * count)
            made[f"{state} max_error"] = kept.get("max_error", 0)
        found[key] = made
    return found
