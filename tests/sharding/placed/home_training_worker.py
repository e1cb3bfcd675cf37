"""What else happens to weights whose state lies elsewhere, beside one process;
what a rank does in test_state_home.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import lowbit
from lowbit import fsdp1, sharding
from lowbit.state import weights
from lowbit.step import home
from tests.sharding.placed.home_worker import (
    CASES,
    CUT,
    SHAPES,
    Model,
    built,
    differs,
    kept_of,
    placed,
    same,
    set_grads,
    value_of,
)

NAMES = ("down", "uneven", "square")


def both(place: str, case: str, run: Callable[[Model, Any], None]) -> list[str]:
    """What differs after the same was done here and in one process."""
    runs = []
    for where in (place, "single"):
        model = Model(where, names=NAMES)
        opt = CASES[case](model.named_parameters(), lr=1e-2, seed=5, min_numel=1)
        run(model, opt)
        runs.append((model, opt))
    (model, opt), (plain, want) = runs
    return [f"{case}: {each}" for each in differs(model, opt, kept_of(plain, want))]


def step(model: Model, opt, number: int) -> None:
    set_grads(model, number)
    opt.step()
    opt.zero_grad()


# Cases, each a function of a model and its optimizer


def clipped(model: Model, opt) -> None:
    for number in range(3):
        set_grads(model, number)
        _, divisor = lowbit.clip_scale(model.parameters(), 0.5)
        assert float(divisor) > 1.0
        opt.step(grad_scale=divisor)
    set_grads(model, 3)
    lowbit.clip_grad_norm_(model.parameters(), 0.5)
    opt.step()


def overflowed(model: Model, opt) -> None:
    step(model, opt, 0)
    opt.grad_scale, opt.found_inf = torch.tensor(8.0), torch.tensor(0.0)
    step(model, opt, 1)
    opt.found_inf = torch.tensor(1.0)
    before = [sharding.local(p).clone() for p in model.parameters()]
    step(model, opt, 2)
    assert all(
        torch.equal(a, sharding.local(p)) for a, p in zip(before, model.parameters(), strict=True)
    )
    opt.found_inf = torch.tensor(0.0)
    step(model, opt, 3)


def lacking(model: Model, opt, dtype: torch.dtype = torch.bfloat16) -> None:
    """Odd ranks have no gradient of experts in one step, and no rank has one in another."""
    for number in range(4):
        set_grads(model, number)
        p = model.down
        if dtype != p.dtype:
            wide = p.grad.to(dtype)
            p.grad, p.grad_dtype = None, None
            p.grad = wide
        if number == 1:
            half = value_of("down", number, SHAPES["down"]).clone()
            half = half.to(dtype)
            if isinstance(p, DTensor):
                cut = next(i for i, each in enumerate(p.placements) if each.dim == 2)
                odd = p.device_mesh.get_local_rank(cut) % 2
                p.grad = None if odd else p.grad
                parts = p.device_mesh.size(cut)
            else:
                parts = PARTS
                for i in range(1, parts, 2):
                    half.chunk(parts, 2)[i].zero_()
                p.grad = half
        if number == 2:
            p.grad = None
        opt.step()
        opt.zero_grad()


def lacking_wide(model: Model, opt) -> None:
    """The same where gradients are wider than weights: ranks that give zeros send as many bytes."""
    lacking(model, opt, torch.float32)


PARTS = 2  # into which dimension 2 is cut, for the process that is alone


def raised(model: Model, opt) -> None:
    """A step that raises before it writes runs again."""
    step(model, opt, 0)
    set_grads(model, 1)
    with mock.patch.object(home, "run_phases", side_effect=KeyboardInterrupt):
        try:
            opt.step()
        except KeyboardInterrupt:
            pass
            model.square.grad = None  # it has no home and was stepped
            model.down.grad = model.down.grad.clone()
        else:
            assert not any(lay.home for _, _, lay in opt.laid_out())
            opt.zero_grad()
    opt.step()
    opt.zero_grad()
    step(model, opt, 2)


def probed(model: Model, opt) -> None:
    step(model, opt, 0)
    set_grads(model, 1)
    found = opt.stats(probe=True)
    assert found["total"]["updates"] > 0.5
    opt.step()


def loaded(model: Model, opt) -> None:
    """Its own state dict, and float32 moments as torch's AdamW has them."""
    step(model, opt, 0)
    opt.load_state_dict(opt.state_dict())
    step(model, opt, 1)
    if not isinstance(opt, lowbit.AdamW):
        return
    saved = opt.state_dict()
    for number, (name, p) in enumerate(model.named_parameters()):
        moments = {}
        for key, at in (("exp_avg", 0), ("exp_avg_sq", 1)):
            whole = value_of(name, 50 + at, tuple(p.shape)).float().abs()
            moments[key] = (
                placed(whole, p.device_mesh, p.placements) if isinstance(p, DTensor) else whole
            )
        saved["state"][number] = {"step": torch.tensor(3.0), **moments}
    opt.load_state_dict(saved)
    step(model, opt, 2)


def in_backward(model: Model, opt) -> None:
    lowbit.step_in_backward(model, opt)
    for number in range(3):
        forward(model, number).backward()
        opt.step()
        opt.zero_grad()


def accumulated(model: Model, opt) -> None:
    accumulator = lowbit.accumulate(model, "float32", average=2)
    for number in range(2):
        for i in range(2):
            with accumulator.micro(last=i == 1):
                forward(model, 2 * number + i).backward()
        opt.step()
        opt.zero_grad()


def forward(model: Model, number: int) -> torch.Tensor:
    """A loss whose gradients are those of `set_grads`."""
    total = torch.zeros(())
    for name, p in model.named_parameters():
        whole = value_of(name, number, tuple(p.shape))
        grad = (
            placed(whole, p.device_mesh, p.placements).to_local()
            if isinstance(p, DTensor)
            else whole
        )
        here = p.to_local() if isinstance(p, DTensor) else p
        total = total + (here * grad).sum().float()
    return total


def averaged(model: Model, opt) -> None:
    ema = lowbit.EMA(model, decay=0.5)
    for number in range(3):
        step(model, opt, number)
        ema.update_parameters()
    with ema.average_parameters():
        pass
    ema.copy_to()


def repeated(model: Model, opt) -> None:
    """Steps after the first are repeated from the cache, weights away from their state among them;
    with other settings, and if a gradient is gone.
    """
    step(model, opt, 0)
    with mock.patch.object(opt, "step_params", side_effect=AssertionError("not repeated")):
        step(model, opt, 1)
        opt.param_groups[0]["lr"] = 3e-2
        step(model, opt, 2)
    set_grads(model, 3)
    model.down.grad = None
    opt.step()
    opt.lay_out_again()
    assert opt.kept.cache is None  # it would keep weights that were replaced
    opt.init_state()
    step(model, opt, 4)


def in_modes(model: Model, opt) -> None:
    """Weights and averages change places a row at a time, where all are too many."""
    sizes = []
    with (
        mock.patch.object(weights, "_AT_ONCE", 300),
        mock.patch.object(weights, "_mix", wraps=weights._mix) as mix,
    ):
        for number in range(3):
            opt.train()
            step(model, opt, number)
            opt.eval()
        sizes = [call.args[0].numel() for call in mix.call_args_list]
    longest = max(sharding.local(p)[0].numel() for p in model.parameters())
    assert sizes and max(sizes) <= max(300, longest), sizes


AROUND = {
    "AdamW": (
        clipped,
        overflowed,
        lacking,
        lacking_wide,
        raised,
        probed,
        loaded,
        in_backward,
        accumulated,
        averaged,
        repeated,
    ),
    "LAMB": (clipped, overflowed, lacking, raised, in_backward, repeated),
    "Schedule-Free": (in_modes,),
    "Schedule-Free, split8": (in_modes,),
    "lpmm4": (lacking, loaded),
    "split8": (clipped, raised, probed, loaded, averaged),
    "Kahan, Adafactor": (clipped, lacking, accumulated),
}


def around(place: str) -> list[str]:
    """What differs from one process after each of them."""
    wrong = []
    for case, several in AROUND.items():
        for run in several:
            wrong += [f"{run.__name__}, {each}" for each in both(place, case, run)]
    return wrong


def float32_views() -> list[str]:
    """What differs of the float32 weights that correction bits give, and after they were stored."""
    views = []
    for place in ("2", "single"):
        model, opt = built(place, "split8")
        step(model, opt, 0)
        view = lowbit.get_fp32_model_state_dict(model, opt)
        lowbit.set_fp32_model_state_dict(model, opt, {k: t * 1.5 for k, t in view.items()})
        views.append(
            {
                **view,
                **{
                    f"{k}, stored": t
                    for k, t in lowbit.get_fp32_model_state_dict(model, opt).items()
                },
            }
        )
    return [name for name, want in views[1].items() if not same(views[0][name], want)]


def across_functions() -> list[str]:
    """lowbit.fsdp1's functions, which take any wrapper: saved under one cut of experts,
    set under another.
    """
    wrong = []
    for case in ("AdamW", "lpmm4", "Kahan"):
        model, opt = built("EP x TP", case)
        step(model, opt, 0)
        state = fsdp1.get_state_dict(opt)
        plain, want = built("single", case)
        step(plain, want, 0)
        other, again = built("4", case)
        set_weights(other, plain)
        fsdp1.set_state_dict(again, state)
        wrong += differs(other, again, kept_of(plain, want))
    return wrong


def set_weights(model: Model, source: Model) -> None:
    for name, p in model.named_parameters():
        whole = dict(source.named_parameters())[name].detach()
        sharding.local(p.detach()).copy_(sharding.local(placed(whole, p.device_mesh, p.placements)))


def fully_sharded() -> list[str]:
    """FSDP2 over tensor parallelism inside experts: what differs after steps on gradients that it
    has reduced.
    """
    runs = []
    for sharded in (True, False):
        model = Experts()
        if sharded:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            for name, p in list(model.named_parameters()):
                dim = 2 if name in CUT else 0
                setattr(model, name, nn.Parameter(placed(p.detach(), mesh["tp"], [Shard(dim)])))
            fully_shard(model, mesh=mesh["dp"])
        opt = lowbit.AdamW(model.named_parameters(), lr=1e-2, seed=5, min_numel=1)
        for number in range(3):
            model(number).backward()
            opt.step()
            opt.zero_grad()
        runs.append((model, opt))
    (model, opt), (plain, want) = runs
    assert opt.layouts[model.down].home
    return differs(model, opt, kept_of(plain, want))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("down", "deep", "square"):
            self.register_parameter(name, nn.Parameter(value_of(name, -1, SHAPES[name]).clone()))

    def forward(self, number: int) -> torch.Tensor:
        total = torch.zeros(())
        for name, p in self.named_parameters():
            whole = value_of(name, number, SHAPES[name])
            if isinstance(p, DTensor):
                whole, p = placed(whole, p.device_mesh, p.placements).to_local(), p.to_local()
            total = total + (p * whole).sum().float()
        return total


def exchanged(count: int) -> tuple[int, int, int]:
    """Of a step of `count` parameters: all-to-alls, bytes that this rank sends to others in them,
    and all-reduces.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shape = SHAPES["down"]
    params = [
        (f"w{i}", nn.Parameter(placed(value_of(f"w{i}", 0, shape), mesh, [Shard(2)])))
        for i in range(count)
    ]
    opt = lowbit.AdamW(params, lr=1e-2, min_numel=1)
    for name, p in params:
        p.grad = placed(value_of(name, 1, shape), mesh, p.placements)
    opt.step()
    sent: list[int] = []
    real, reduce = dist.all_to_all_single, mock.Mock(side_effect=dist.all_reduce)

    def counted(received: Any, joined: Any, sizes: Any, counts: list[int], **options: Any) -> Any:
        sent.append(sum(counts) - counts[dist.get_rank()])
        return real(received, joined, sizes, counts, **options)

    with (
        mock.patch.object(dist, "all_to_all_single", counted),
        mock.patch.object(dist, "all_reduce", reduce),
    ):
        opt.step()
    return len(sent), sum(sent), reduce.call_count
