"""Cases of torch's own optimizer tests, with lowbit's classes in place of torch's."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)
from torch.testing._internal.common_optimizers import OptimizerErrorEnum, optim_db

import lowbit

pytestmark = pytest.mark.slow

NAMES = ["SGD", "RMSprop", "Adagrad", "Adam", "AdamW", "Adafactor"]
INFOS = {info.optim_cls.__name__: info for info in optim_db}
SCHEDULERS = {
    "step": lambda opt: StepLR(opt, gamma=0.9, step_size=3),
    "exponential": lambda opt: ExponentialLR(opt, gamma=0.97),
    "linear": lambda opt: LinearLR(opt, start_factor=0.4, total_iters=4),
    "cosine": lambda opt: CosineAnnealingLR(opt, T_max=20),
    "plateau": lambda opt: ReduceLROnPlateau(opt, threshold=1.0, patience=1),
    "one cycle": lambda opt: OneCycleLR(opt, 0.05, total_steps=30, cycle_momentum=False),
}


def kwargs_of(name):
    """The settings of torch's cases for an optimizer."""
    return [copy.deepcopy(case.kwargs) for case in INFOS[name].optim_inputs_func(device="cpu")]


def norm_net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(4, 2, 1, stride=2), nn.BatchNorm2d(2))


@pytest.mark.parametrize("from_named", [True, False])
@pytest.mark.parametrize("to_named", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_state_dicts_with_and_without_names(name, from_named, to_named):
    """Either loads into the other, steps, and has the names in the end that one of them had."""

    def make(net, named, options):
        return getattr(lowbit, name)(
            net.named_parameters() if named else net.parameters(), **options
        )

    def advance(net, opt):
        opt.zero_grad()
        net(torch.ones(1, 4, 16, 16)).sum().backward()
        opt.step()

    for options in kwargs_of(name):
        net = norm_net()
        first = make(net, from_named, options)
        for _ in range(3):
            advance(net, first)
        saved = copy.deepcopy(first.state_dict())
        second = make(net, to_named, options)
        second.load_state_dict(saved)
        advance(net, second)
        group = second.state_dict()["param_groups"][0]
        names = [known for known, _ in net.named_parameters()]
        assert group.get("param_names") == (names if from_named or to_named else None), options
        second.load_state_dict(copy.deepcopy(second.state_dict()))
        advance(net, second)
        assert all(float(state["step"]) == 5 for state in second.state.values())


@pytest.mark.parametrize("schedule", SCHEDULERS)
@pytest.mark.parametrize("name", NAMES)
def test_schedulers_with_a_tensor_for_a_learning_rate(name, schedule):
    """The same steps as with a number, which are torch's."""
    results = []
    for kind, make in (
        (float, getattr(torch.optim, name)),
        (float, getattr(lowbit, name)),
        (torch.tensor, getattr(lowbit, name)),
    ):
        torch.manual_seed(0)
        weight, bias = nn.Parameter(torch.randn(10, 5)), nn.Parameter(torch.randn(10))
        x = torch.randn(5)
        own = {} if make.__module__.startswith("torch.") else {"state_format": "float32"}
        opt = make(
            [{"params": [weight]}, {"params": [bias], "lr": kind(0.02)}], lr=kind(0.01), **own
        )
        scheduler = SCHEDULERS[schedule](opt)
        seen = []
        for _ in range(20):
            opt.zero_grad()
            loss = (weight.mv(x) + bias).square().sum()
            loss.backward()
            opt.step()
            scheduler.step(loss) if schedule == "plateau" else scheduler.step()
            seen.append(loss.item())
        assert all(
            isinstance(g["lr"], torch.Tensor) == (kind is torch.tensor) for g in opt.param_groups
        )
        assert seen[-1] < seen[0]
        results.append((weight.detach(), bias.detach(), [float(g["lr"]) for g in opt.param_groups]))
    torchs, plain, tensor = results
    torch.testing.assert_close(plain[:2], torchs[:2], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(tensor[:2], plain[:2], rtol=1e-5, atol=1e-6)
    assert tensor[2] == pytest.approx(plain[2], rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_cases_with_every_scheduler_of_torchs_go_down(name):
    """torch's settings, a learning rate in a tensor among them, with torch's schedulers."""
    for schedulers in INFOS[name].scheduler_inputs:
        for options in kwargs_of(name):
            torch.manual_seed(0)
            weight, bias = nn.Parameter(torch.randn(10, 5)), nn.Parameter(torch.randn(10))
            x = torch.randn(5)
            opt = getattr(lowbit, name)([weight, bias], **options)
            made = [scheduler(opt) for scheduler in schedulers]

            def closure(opt=opt, weight=weight, bias=bias, x=x):
                opt.zero_grad()
                loss = (weight.mv(x) + bias).square().sum()
                loss.backward()
                return loss

            before = closure().item()
            for _ in range(20):
                loss = opt.step(closure)
                for scheduler in made:
                    scheduler.step(loss) if isinstance(
                        scheduler, ReduceLROnPlateau
                    ) else scheduler.step()
            after = closure().item()
            assert after > before if options.get("maximize") else after < before, options


@pytest.mark.parametrize("name", NAMES)
def test_errors_are_torchs(name):
    """What torch refuses is refused, in its words. A complex parameter is refused earlier,
    where the optimizer is built.
    """
    seen = 0
    for case in INFOS[name].optim_error_inputs_func(device="cpu", dtype=torch.float32):
        given = case.optimizer_error_input
        make = lambda given=given: getattr(lowbit, name)(given.params, **given.kwargs)  # noqa: E731
        if case.error_on is OptimizerErrorEnum.STEP_ERROR:
            assert "complex" in case.error_regex
            with pytest.raises(ValueError, match="is complex64, which lowbit does not support"):
                make()
        elif issubclass(case.error_type, Warning):
            with pytest.warns(case.error_type, match=case.error_regex):
                make()
        else:
            with warnings.catch_warnings(), pytest.raises(case.error_type, match=case.error_regex):
                make()
        seen += 1
    assert seen >= 6


@pytest.mark.parametrize("name", NAMES)
def test_float16_parameters_are_served(name):
    """torch's settings on float16 parameters: finite steps,
    and the same whatever `foreach` and `fused` say.
    """
    for options in kwargs_of(name):
        ends = []
        for flag in ({}, {"foreach": False}, {"foreach": None}):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 1)).half()
            empty = nn.Parameter(torch.empty(0, dtype=torch.float16))
            empty.grad = torch.empty_like(empty)
            opt = getattr(lowbit, name)([*net.parameters(), empty], **{**options, **flag})
            for _ in range(7):
                opt.zero_grad(set_to_none=False)
                net(torch.full((3, 2), 0.3, dtype=torch.float16)).float().sum().backward()
                opt.step()
            assert all(p.isfinite().all() for p in net.parameters()), options
            ends.append([p.detach().clone() for p in net.parameters()])
        assert all(torch.equal(p, q) for end in ends[1:] for p, q in zip(ends[0], end, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_that_requires_no_gradient_is_stepped_where_it_has_one(name):
    ends = []
    for library in (lowbit, torch.optim):
        torch.manual_seed(0)
        p = torch.randn(64, 80)
        opt = getattr(library, name)([p], lr=1e-2)
        for _ in range(2):
            p.grad = torch.randn(64, 80)
            opt.step()
        ends.append(p)
        assert library is torch.optim or opt.state[p]["step"] == 2
    assert (ends[0] - ends[1]).abs().max() < 2e-3  # state in 8 bits
    p = torch.randn(64, 80)
    getattr(lowbit, name)([p]).step()  # without one it stays
