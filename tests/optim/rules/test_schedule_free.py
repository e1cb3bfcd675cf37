"""Schedule-Free AdamW: the steps of the authors' package, modes that come back to the same bits,
and what is refused.
"""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

import lowbit
from lowbit import ops
from lowbit.checkpoint import native
from lowbit.state.weights import float32_weights
from tests.support.bits import bits, same
from tests.support.paths import GOLDEN
from tests.support.peers.schedule_free import of_the_authors
from tests.support.require import need

STEPS = 12  # of tests/golden/make_schedule_free.py, as the following
CASES = {
    "default": {},
    "warmup": {"warmup_steps": 5, "weight_decay": 0.1},
    "weights": {"r": 1.5, "weight_lr_power": 0.5, "warmup_steps": 8, "betas": (0.95, 0.99)},
    "plain": {"weight_lr_power": 0.0, "betas": (0.7, 0.9), "eps": 1e-3},
    "schedule": {"lr": 0.1, "weight_decay": 0.01},
}
SCHEDULE = [0.01, 0.02, 0.04, 0.1, 0.1, 0.05, 0.02, 0.02, 0.01, 0.005, 0.002, 0.001]
WEIGHTS = [entry["name"] for entry in lowbit.catalog()["param"] if entry["dtype"] != "float16"]


def drawn(*shape, seed=0, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def trained(steps=5, dtype=torch.float32, shapes=((32, 256), (70,)), names=True, **options):
    """Parameters and the optimizer in train mode, after some steps."""
    params = [nn.Parameter(drawn(*shape, seed=i).to(dtype)) for i, shape in enumerate(shapes)]
    named = [(f"p{i}", p) for i, p in enumerate(params)]
    opt = lowbit.ScheduleFreeAdamW(named if names else params, **{"lr": 0.02, **options})
    opt.train()
    return params, go_on(params, opt, range(steps))


def go_on(params, opt, steps):
    for t in steps:
        for i, p in enumerate(params):
            p.grad = drawn(*p.shape, seed=100 * t + i + 7, scale=0.1).to(p.dtype)
        opt.step()
    return opt


def precise(params, opt):
    """The weights with all that is kept beside them."""
    return [float32_weights(p.detach(), opt.layouts[p], opt.state[p]) for p in params]


def replayed(golden, name, **options):
    params = [nn.Parameter(torch.from_numpy(golden[f"p{i}"])) for i in range(2)]
    opt = lowbit.ScheduleFreeAdamW(params, **{"lr": 0.02, **CASES[name], **options})
    opt.train()
    for t in range(STEPS):
        if name == "schedule":
            opt.param_groups[0]["lr"] = SCHEDULE[t]
        for i, p in enumerate(params):
            p.grad = torch.from_numpy(golden[f"g{i}"][t]).float()
        opt.step()
        if t == 6:
            opt.eval()
            opt.train()
    return params, opt


# ---- the authors' package ----


@pytest.mark.parametrize("name", CASES)
def test_float32_state_reproduces_the_authors(name):
    golden = np.load(GOLDEN / "schedule_free.npz")
    params, opt = replayed(golden, name, state_format="float32")
    group = opt.param_groups[0]
    found = [group[key] for key in ("k", "weight_sum", "lr_max", "scheduled_lr")]
    np.testing.assert_allclose(found, golden[f"{name}_group"], rtol=1e-14)
    for mode in ("y", "x"):
        for i, p in enumerate(params):
            want = torch.from_numpy(golden[f"{name}_{mode}{i}"])
            torch.testing.assert_close(p.detach(), want, rtol=2e-6, atol=2e-6)
        opt.eval()
    for i, p in enumerate(params):
        for key, letter in (("z", "z"), ("exp_avg_sq", "v")):
            want = torch.from_numpy(golden[f"{name}_{letter}{i}"])
            torch.testing.assert_close(opt.state[p][key], want, rtol=3e-6, atol=2e-6)


def test_eight_bits_stay_near_the_authors():
    golden = np.load(GOLDEN / "schedule_free.npz")
    params, opt = replayed(golden, "warmup", min_numel=0)
    assert "exp_avg_sq_dynamic8_unsigned" in opt.state[params[0]] and "z" in opt.state[params[0]]
    opt.eval()
    want, before = (torch.from_numpy(golden[key]) for key in ("warmup_x0", "p0"))
    assert (params[0] - want).norm() <= 0.02 * (want - before).norm()


def test_the_authors_state_dict_goes_on():
    (p, q), opt = trained(state_format="float32", names=False)
    opt.eval()
    theirs = of_the_authors(opt)
    params = [nn.Parameter(t.detach().clone()) for t in (p, q)]
    other = lowbit.ScheduleFreeAdamW(params, lr=1.0, state_format="float32")
    other.load_state_dict(copy.deepcopy(theirs))
    assert all(float(other.state[t]["step"]) == 5 for t in params)
    opt.train()
    other.train()
    go_on((p, q), opt, range(5, 8))
    go_on(params, other, range(5, 8))
    assert same(bits((p, q), opt), bits(params, other))


# ---- modes ----


@pytest.mark.parametrize("beta1", [0.9, 0.98, 0.3])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_modes_to_and_fro_do_not_drift(weights, beta1):
    """The first time weights may be rounded. From then on x and y have the same bits however often
    they are swapped, but for a few that have correction bits, whose steps are not even: those come
    to rest, and near."""
    info = ops.param_format(weights)
    dtype = getattr(torch, info["dtype"])
    params, opt = trained(3, dtype, betas=(beta1, 0.999), param_format=weights, min_numel=0)
    begun = [p.detach().double() for p in params]
    opt.eval()
    x = [p.detach().double() for p in params]
    opt.train()
    y, first = bits(params, opt), precise(params, opt)
    for i in range(60 if "split" in weights else 20):
        before = bits(params, opt)
        opt.eval()
        opt.train()
        assert ("split" in weights and i < 40) or same(bits(params, opt), before)
    if "split" in weights:
        moved = [((a - b).abs(), a.abs()) for a, b in zip(first, precise(params, opt), strict=True)]
        assert all((d <= 1e-4 * w + 1e-7).all() and (d > 0).float().mean() < 0.01 for d, w in moved)
    else:
        assert same(bits(params, opt), y)
    for a, b, p in zip(begun, x, params, strict=True):
        assert (a - b).abs().max() > 0
        limit = torch.finfo(dtype).eps * (a.abs() + b.abs())  # half a unit of each
        assert ((a - p.detach().double()).abs() <= limit).all()


def test_x_is_the_average():
    params, opt = trained(6, state_format="float32", weight_lr_power=0.0)
    y, z = params[0].detach().double(), opt.state[params[0]]["z"].double()
    opt.eval()
    torch.testing.assert_close(params[0].detach(), ((y - 0.1 * z) / 0.9).float())
    before = params[0].detach().clone()
    opt.eval()
    assert torch.equal(params[0], before)


def test_nothing_moves_before_the_first_step_and_weights_may_come_late():
    params = [nn.Parameter(drawn(32, 256))]
    opt = lowbit.ScheduleFreeAdamW(params, lr=0.02)
    before = params[0].detach().clone()
    opt.train()
    opt.eval()
    assert torch.equal(params[0], before)
    with torch.no_grad():
        # As model.load_state_dict after the optimizer was built.
        params[0].copy_(drawn(32, 256, seed=5))
    late = nn.Parameter(params[0].detach().clone())
    other = lowbit.ScheduleFreeAdamW([late], lr=0.02)
    for p, o in ((params[0], opt), (late, other)):
        o.train()
        go_on([p], o, range(3))
        o.eval()
    assert same(bits(params, opt), bits([late], other))


def test_a_step_in_eval_mode_is_refused():
    params, opt = trained()
    opt.eval()
    before = bits(params, opt)
    with pytest.raises(RuntimeError, match=r"eval mode.*opt\.train\(\)"):
        opt.step()
    assert same(bits(params, opt), before)
    with pytest.raises(RuntimeError, match=r"eval mode"):
        lowbit.ScheduleFreeAdamW([nn.Parameter(torch.ones(3))]).step()


def test_a_checkpoint_in_train_mode_is_refused():
    params, opt = trained()
    with pytest.raises(RuntimeError, match=r"train mode.*opt\.eval\(\)"):
        opt.state_dict()
    opt.eval()
    saved = copy.deepcopy(opt.state_dict())
    again = [nn.Parameter(p.detach().clone()) for p in params]
    other = lowbit.ScheduleFreeAdamW([(f"p{i}", p) for i, p in enumerate(again)])
    other.train()  # nothing was stepped
    other.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="eval mode"):
        other.step()
    for some, o in ((params, opt), (again, other)):
        o.train()
        go_on(some, o, range(5, 9))
    assert same(bits(params, opt), bits(again, other))
    assert opt.param_groups[0]["weight_sum"] == other.param_groups[0]["weight_sum"]


@pytest.mark.parametrize("full", [False, True])
def test_a_run_in_train_mode_is_rolled_back_by_torchs_functions(full):
    """With full_state_dict they ask for the state that they replace, which is no checkpoint."""
    model = nn.Linear(64, 96)
    opt = lowbit.ScheduleFreeAdamW(model.named_parameters(), lr=0.02)
    opt.train()
    go_on([*model.parameters()], opt, range(3))
    opt.eval()
    options = StateDictOptions(full_state_dict=full)
    saved, state = copy.deepcopy(get_state_dict(model, opt, options=options))
    opt.train()
    go_on([*model.parameters()], opt, range(3, 5))
    with pytest.raises(RuntimeError, match=r"before the weights are loaded"):
        get_state_dict(model, opt, options=options)
    set_state_dict(model, opt, model_state_dict=saved, optim_state_dict=state, options=options)
    group = opt.param_groups[0]
    assert group["train_mode"] is False and group["k"] == 3
    assert all(torch.equal(saved[key], value) for key, value in model.state_dict().items())


def counted_apart():
    """The named parameters of two groups that stepped 7 times and twice, and their state dict."""
    params, opt = trained()
    late = nn.Parameter(drawn(32, 256, seed=9))
    opt.add_param_group({"params": [("late", late)]})
    go_on([*params, late], opt, range(5, 7))
    opt.eval()
    return [("p0", params[0]), ("p1", params[1]), ("late", late)], opt.state_dict()


APART = r"group 0 has parameters of 2 groups.*differ in k \(7, 2\).*groups that were saved"


def test_groups_that_counted_apart_are_not_joined():
    """One group would begin the average anew, whose next step would replace it by z."""
    named, saved = counted_apart()
    with pytest.raises(ValueError, match=APART):
        lowbit.ScheduleFreeAdamW(named, lr=0.02).load_state_dict(saved)
    several = lowbit.ScheduleFreeAdamW([{"params": named[1:2]}, {"params": named[::2]}], lr=0.02)
    with pytest.raises(ValueError, match="differ in k"):
        several.load_state_dict(saved)
    apart = lowbit.ScheduleFreeAdamW([{"params": [one]} for one in named], lr=0.02)
    apart.load_state_dict(saved)
    assert [group["k"] for group in apart.param_groups] == [7, 7, 2]


def test_groups_of_a_file_that_counted_apart_are_not_joined(tmp_path):
    need("ckpt", native._checkpoint is not None, "lowbit was built without lowbit.checkpoint")
    named, saved = counted_apart()
    torch.save(saved, tmp_path / "opt.pt")
    with pytest.raises(ValueError, match=APART):
        lowbit.load_optimizer(lowbit.ScheduleFreeAdamW(named, lr=0.02), tmp_path / "opt.pt")


def test_a_group_that_comes_later_has_the_mode_of_the_others():
    params, opt = trained()
    late = nn.Parameter(drawn(32, 256, seed=9))
    opt.add_param_group({"params": [("late", late)]})
    assert opt.param_groups[1]["train_mode"] is True
    go_on([*params, late], opt, range(5, 7))
    assert opt.param_groups[1]["k"] == 2 and opt.param_groups[0]["k"] == 7


# ---- state ----


def test_z_has_the_precision_of_the_weights():
    def formats(dtype, **options):
        p = nn.Parameter(drawn(32, 256).to(dtype))
        opt = lowbit.ScheduleFreeAdamW([("w", p)], **options)
        return {slot.name: (slot.format, slot.stochastic) for slot in opt.layouts[p].slots}

    v = ("dynamic8_unsigned", False)
    assert formats(torch.float32) == {"z": ("float32", False), "exp_avg_sq": v}
    assert formats(torch.bfloat16) == {"z": ("bfloat16", True), "exp_avg_sq": v}
    assert formats(torch.bfloat16, param_format="bfloat16_split8")["z"] == ("float32", False)
    assert formats(torch.float16)["z"] == ("float32", False)
    full = {"z": ("float32", False), "exp_avg_sq": ("float32", False)}
    assert formats(torch.bfloat16, full_precision=True) == full
    assert formats(torch.float32, state_format="4bit")["z"] == ("float32", False)
    assert formats(torch.float32, state_format={"exp_avg_sq": "8bit"})["z"] == ("float32", False)
    coded = formats(torch.float32, state_format={"z": "8bit", "exp_avg_sq": "4bit"})
    assert coded == {"z": ("dynamic8", False), "exp_avg_sq": ("power1_4_unsigned", False)}


@pytest.mark.parametrize("scale", ["block", "row", "column", "tensor", "rank1"])
def test_modes_with_z_in_codes(scale):
    spec = lowbit.scaled("linear8", scale=scale)
    params, opt = trained(3, shapes=((40, 300), (6, 5, 160)), state_format={"z": spec}, min_numel=0)
    y = [p.detach().clone() for p in params]
    opt.eval()
    assert all((p - q).abs().max() > 0 for p, q in zip(params, y, strict=True))
    opt.train()
    for p, q in zip(params, y, strict=True):
        torch.testing.assert_close(p.detach(), q, rtol=1e-6, atol=1e-6)


def test_large_parameters_are_swapped_piece_by_piece(monkeypatch):
    from lowbit.state import weights

    (p,), opt = trained(3, torch.bfloat16, shapes=((40, 300),), param_format="bfloat16_split8")
    other = copy.deepcopy((p, opt))
    opt.eval()
    monkeypatch.setattr(weights, "_AT_ONCE", 1000)
    other[1].eval()
    assert same(bits([p], opt), bits([other[1].param_groups[0]["params"][0]], other[1]))


# ---- steps of other kinds ----


def test_lr_as_a_tensor_and_zero():
    params, opt = trained(lr=0.02)
    others, with_tensor = trained(lr=torch.tensor(0.02, dtype=torch.float64))
    assert same(bits(params, opt), bits(others, with_tensor))
    before, group = [p.detach().clone() for p in params], dict(opt.param_groups[0])
    opt.param_groups[0]["lr"] = 0.0
    go_on(params, opt, [5])
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    assert (
        opt.param_groups[0]["k"] == group["k"]
        and opt.param_groups[0]["weight_sum"] == group["weight_sum"]
    )


def test_a_step_that_overflowed_does_not_count():
    params, opt = trained()
    others, skipping = trained()
    skipping.found_inf = torch.tensor(1.0)
    go_on(others, skipping, [33])
    del skipping.found_inf
    assert skipping.param_groups[0]["k"] == 5
    go_on(params, opt, [5])
    go_on(others, skipping, [5])
    assert same(bits(params, opt), bits(others, skipping))


def test_a_closure_and_a_compiled_step():
    params, opt = trained()
    others, compiled = trained()
    for p in params:
        p.grad = None
    for t in range(5, 8):

        def closure(t=t):
            assert torch.is_grad_enabled()
            for i, p in enumerate(params):
                p.grad = drawn(*p.shape, seed=100 * t + i + 7, scale=0.1)
            return 3.0

        assert opt.step(closure) == 3.0
    step = torch.compile(compiled.step, backend="eager")
    for t in range(5, 8):
        for i, p in enumerate(others):
            p.grad = drawn(*p.shape, seed=100 * t + i + 7, scale=0.1)
        step()
    assert same(bits(params, opt), bits(others, compiled))


@pytest.mark.parametrize(
    "bad, words",
    [
        ({"betas": (0.0, 0.999)}, r"betas\[0\] is 0.*average"),
        ({"warmup_steps": -1}, "Invalid warmup_steps value: -1"),
        ({"r": -0.5}, "Invalid r value"),
        ({"lr": -1.0}, "Invalid learning rate"),
        ({"lr": torch.empty((), device="meta")}, "lr is a tensor on meta"),
    ],
)
def test_bad_arguments(bad, words):
    with pytest.raises((ValueError, RuntimeError), match=words):
        lowbit.ScheduleFreeAdamW([nn.Parameter(torch.ones(3))], **bad)


def test_the_mean_of_many_steps_is_near_float32():
    """bfloat16 weights and 8-bit state find the minimum of a quadratic as closely as their rounding
    allows.
    """
    target = drawn(32, 256, seed=3)
    found = {}
    for name, dtype, options in (
        ("float32", torch.float32, {"state_format": "float32"}),
        ("8bit", torch.float32, {}),
        ("bfloat16", torch.bfloat16, {}),
    ):
        p = nn.Parameter(torch.zeros(32, 256, dtype=dtype))
        opt = lowbit.ScheduleFreeAdamW([p], lr=0.05, min_numel=0, **options)
        opt.train()
        for t in range(300):
            noise = drawn(32, 256, seed=t, scale=0.3)
            p.grad = (p.detach().float() - target + noise).to(dtype)
            opt.step()
        opt.eval()
        found[name] = (p.detach().float() - target).square().mean().sqrt()
    assert found["8bit"] <= 1.05 * found["float32"]
    assert found["bfloat16"] <= 1.1 * found["float32"]
