"""Optimizers in the middle of other code: parameters that never step, entries that others keep in
`opt.state`, other default dtypes and devices, and a step that is refused half-way.
"""

import copy

import pytest
import torch
from torch import nn

import lowbit
from tests.support.groups import begin

MAKE = {
    "AdamW": lowbit.AdamW,
    "SGD": lambda ps: lowbit.SGD(ps, lr=0.1, momentum=0.9),
    "Adafactor": lowbit.Adafactor,
    "LAMB": lowbit.LAMB,
    "Schedule-Free": lowbit.ScheduleFreeAdamW,
    "Muon": lambda ps: lowbit.MuonWithAdamW(muon_groups(ps)),
    "APOLLO": lambda ps: lowbit.APOLLO(ps, rank=4),
    "APOLLO, torch's projection": lambda ps: lowbit.APOLLO(ps, rank=4, projection="torch"),
    "Fira": lambda ps: lowbit.Fira(ps, rank=4),
}


def end(opt):
    """Puts a schedule-free optimizer into the mode in which it is saved."""
    if hasattr(opt, "eval"):
        opt.eval()


def muon_groups(named):
    named = list(named)
    return [
        {"params": [(n, p) for n, p in named if (p.dim() == 2) == use], "use_muon": use}
        for use in (True, False)
    ]


def net():
    torch.manual_seed(0)
    return nn.Linear(80, 64, dtype=torch.float32, device="cpu")


def set_gradients(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("dtype", ["uint8", "int8", "float64", "complex64", "float8_e4m3fn"])
@pytest.mark.parametrize("name", MAKE)
def test_frozen_parameters_of_any_dtype(name, dtype):
    """Quantized weights below an adapter, for one."""
    frozen = nn.Parameter(torch.zeros(8, 8, dtype=getattr(torch, dtype)), requires_grad=False)
    model = net()
    opt = begin(MAKE[name]([("frozen", frozen), *model.named_parameters()]))
    for step in range(2):
        set_gradients(model.parameters(), step)
        opt.step()
    end(opt)
    assert frozen not in opt.state or not opt.state[frozen]
    saved = copy.deepcopy(opt.state_dict())
    opt.load_state_dict(saved)
    set_gradients(model.parameters(), 2)
    begin(opt)
    opt.step()
    assert opt.stats()


def test_one_that_is_trained_later_is_refused():
    frozen = nn.Parameter(torch.zeros(8, 8, dtype=torch.float64), requires_grad=False)
    opt = lowbit.AdamW([("frozen", frozen), *net().named_parameters()])
    frozen.requires_grad_(True)
    frozen.grad = torch.ones_like(frozen)
    with pytest.raises(
        ValueError, match="parameter 'frozen' is float64, which lowbit does not support"
    ):
        opt.step()


def test_a_format_that_does_not_fit_waits_until_the_parameter_is_trained():
    frozen = nn.Parameter(torch.zeros(8, 8), requires_grad=False)
    model = net().bfloat16()
    named = [("frozen", frozen), *model.named_parameters()]
    opt = lowbit.AdamW(named, param_format="bfloat16_kahan")
    frozen.requires_grad_(True)
    frozen.grad = torch.ones_like(frozen)
    with pytest.raises(ValueError, match="'frozen' is float32, but param_format='bfloat16_kahan'"):
        opt.step()
    frozen.data, frozen.grad = frozen.data.bfloat16(), None
    frozen.grad = torch.ones_like(frozen)
    opt.step()
    assert "param_bfloat16_kahan" in opt.state[frozen]


def test_entries_of_others_are_loaded():
    """As torch's optimizers do: timm's Lookahead keeps its slow weights there."""
    model = net()
    opt = lowbit.AdamW(model.named_parameters())
    set_gradients(model.parameters(), 0)
    opt.step()
    slow = model.weight.detach().clone()
    kept = {"slow_buffer": slow, "step_size": 0.5, "param_ema": slow.clone(), "note": {"a": 1}}
    opt.state[model.weight].update(kept)
    opt.state["calls"] = torch.ones(3)
    saved = copy.deepcopy(opt.state_dict())
    again = lowbit.AdamW(net().named_parameters())
    again.load_state_dict(saved)
    weight, bias = again.param_groups[0]["params"]
    for key, value in kept.items():
        found = again.state[weight][key]
        assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value
    again.load_state_dict(opt.state_dict())
    assert again.state[weight]["slow_buffer"] is not slow
    assert again.state[bias].keys() == opt.state[model.bias].keys()
    assert torch.equal(again.state["calls"], torch.ones(3))
    set_gradients([weight, bias], 1)
    again.step()
    assert float(again.state[weight]["step"]) == 2.0


def test_state_of_another_rule_is_not():
    model = net()
    mixed = lowbit.AdEMAMix(model.named_parameters())
    set_gradients(model.parameters(), 0)
    mixed.step()
    opt = lowbit.AdamW(model.named_parameters())
    before = copy.deepcopy(opt.state_dict()["state"])
    with pytest.raises(ValueError, match="keeps 'exp_avg_slow', which the rule here, 'adamw'"):
        opt.load_state_dict({**opt.state_dict(), "state": mixed.state_dict()["state"]})
    torch.testing.assert_close(opt.state_dict()["state"], before, rtol=0, atol=0)


@pytest.mark.parametrize("gradient", ["sparse", "float64"])
@pytest.mark.parametrize("name", ["Muon", "APOLLO", "Fira"])
def test_a_refused_gradient_of_a_matrix_leaves_all_as_it_was(name, gradient):
    model = net()
    opt = MAKE[name](model.named_parameters())
    set_gradients(model.parameters(), 0)
    opt.step()
    before = copy.deepcopy((model.state_dict(), opt.state_dict()["state"]))
    set_gradients(model.parameters(), 1)
    if gradient == "float64":
        model.weight.grad_dtype = None
    wrong = model.weight.grad.to_sparse() if gradient == "sparse" else model.weight.grad.double()
    model.weight.grad = None
    model.weight.grad = wrong
    with pytest.raises(RuntimeError, match=r"dense gradients|must be float32, bfloat16 or float16"):
        opt.step()
    for was, now in zip(before, (model.state_dict(), opt.state_dict()["state"]), strict=True):
        torch.testing.assert_close(now, was, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("default", ["float64", "bfloat16", "meta"])
@pytest.mark.parametrize("name", MAKE)
def test_other_defaults_of_torch(name, default):
    """`torch.set_default_dtype` and `set_default_device`, which programs leave set."""
    made = []
    for change in (False, True):
        try:
            if change and default == "meta":
                torch.set_default_device("meta")
            elif change:
                torch.set_default_dtype(getattr(torch, default))
            model = net()
            opt = begin(MAKE[name](model.named_parameters()))
            for step in range(3):
                set_gradients(model.parameters(), step)
                lowbit.clip_grad_norm_(model.parameters(), 0.5)
                opt.step(grad_scale=2.0)
            end(opt)
            opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        finally:
            torch.set_default_device(None)
            torch.set_default_dtype(torch.float32)
        made.append((model.state_dict(), opt.state_dict()["state"]))
    torch.testing.assert_close(made[0], made[1], rtol=0, atol=0)


def test_a_layer_that_is_called_module():
    """Its weight has the name of the model's own once DistributedDataParallel's prefix is gone."""
    model = net()
    model.module = net()
    with pytest.raises(ValueError, match=r"'weight' and .* have one name without"):
        lowbit.AdamW(model.named_parameters())
    lowbit.AdamW(model.parameters())


def test_full_precision_by_overrides_leaves_the_subspace():
    model = net()
    by_name = lowbit.APOLLO(model.named_parameters(), rank=4, full_precision=["weight"])
    wanted = {key: value.shape for key, value in by_name.state[model.weight].items()}
    assert wanted["exp_avg"] == model.weight.shape
    override = lowbit.override("weight", full_precision=True)
    opt = lowbit.APOLLO(model.named_parameters(), rank=4, overrides=override)
    assert {key: value.shape for key, value in opt.state[model.weight].items()} == wanted


def test_adagrads_state_in_shared_memory():
    model = net()
    opt = lowbit.Adagrad(model.named_parameters())
    opt.state["calls"] = 3
    opt.share_memory()
    set_gradients(model.parameters(), 0)
    opt.step()
    for p in model.parameters():
        assert opt.state[p]["step"].is_shared()
        assert all(t.is_shared() for key, t in opt.state[p].items() if key.startswith("sum"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "int64"])
@pytest.mark.parametrize("name", MAKE)
def test_a_learning_rate_in_any_dtype(name, dtype):
    """As torch's optimizers take it, and live: a schedule writes into the tensor."""
    made = []
    for kind in (torch.float32, getattr(torch, dtype)):
        model = net()
        opt = begin(MAKE[name](model.named_parameters()))
        rates = [torch.tensor(1, dtype=kind) for _ in opt.param_groups]
        for group, rate in zip(opt.param_groups, rates, strict=True):
            group["lr"] = rate
        for step in range(3):
            set_gradients(model.parameters(), step)
            opt.step()
            for rate in rates:
                rate.fill_(step)
        made.append(model.state_dict())
    torch.testing.assert_close(made[0], made[1], rtol=0, atol=0)
