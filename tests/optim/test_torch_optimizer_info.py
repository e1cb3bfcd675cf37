"""torch keeps, for each of its optimizers, the settings that its own tests run with
(OptimizerInfo). The same here with lowbit's classes: what every optimizer of torch does under them,
and the few things that lowbit does otherwise, each with its reason and words."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.testing._internal.common_optimizers import OptimizerErrorEnum, optim_db

import lowbit

pytestmark = pytest.mark.slow

INFOS = {
    info.optim_cls.__name__: info for info in optim_db if hasattr(lowbit, info.optim_cls.__name__)
}
# (check, optimizer or "", words of the settings or "") -> what is raised instead, and why.
EXPECTED = {
    ("float64", "", ""): (
        "is float64, which lowbit does not support",
        "state and steps are float32",
    ),
    ("complex64", "", ""): (
        "is complex64, which lowbit does not support",
        "kernels are of real numbers",
    ),
}


def test_optimizers_of_torch_that_lowbit_has():
    """A new one in torch's list whose name lowbit has is tested at once."""
    assert set(INFOS) == {"SGD", "RMSprop", "Adagrad", "Adam", "AdamW", "Adafactor", "Muon"}


def build(name, given, options, groups=False):
    """torch's class takes its own arguments; lowbit's in float32, so that both can be compared."""
    made = getattr(lowbit, name)
    given = [{"params": [p]} for p in given] if groups else given
    return made(given, **options)


def params_of(name, dtype=torch.float32, contiguous=True):
    """A matrix and a vector, as torch's tests step them; Muon takes matrices alone."""
    torch.manual_seed(0)
    weight = torch.randn(10, 5) if contiguous else torch.randn(5, 10).t()
    bias = torch.randn(10, 1) if name == "Muon" else torch.randn(10)
    return [nn.Parameter(t.to(dtype)) for t in (weight, bias)]


def loss_of(params):
    x = torch.linspace(-1, 1, 5, dtype=params[0].dtype)
    return (params[0].mv(x) + params[1].reshape(-1)).square().sum()


def train(opt, params, steps):
    for _ in range(steps):
        opt.zero_grad()
        loss_of(params).backward()
        opt.step()


def bits(opt, params):
    return [t.detach().clone() for p in params for t in (p, *opt.state[p].values())]


def same(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


# The checks: each takes the optimizer's name and torch's settings


def goes_the_right_way(name, options, **kind):
    params = params_of(name, **kind)
    opt, before = build(name, params, options), float(loss_of(params))
    train(opt, params, 20)
    after = float(loss_of(params))
    assert after > before if options.get("maximize") else after < before


def weights_that_are_strided_otherwise(name, options):
    goes_the_right_way(name, options, contiguous=False)


def float16(name, options):
    goes_the_right_way(name, options, dtype=torch.float16)


def bfloat16(name, options):
    goes_the_right_way(name, options, dtype=torch.bfloat16)


def float64(name, options):
    goes_the_right_way(name, options, dtype=torch.float64)


def complex64(name, options):
    params = [nn.Parameter(p.detach().to(torch.complex64)) for p in params_of(name)]
    build(name, params, options)


def a_learning_rate_in_a_tensor(name, options):
    """Of no dimension and of one, beside a float."""
    ends = []
    for kind in (float, torch.tensor, lambda lr: torch.tensor([lr])):
        params = params_of(name)
        opt = build(name, params, {**options, "lr": kind(0.015625)})
        train(opt, params, 5)
        ends.append(bits(opt, params))
    assert same(ends[0], ends[1]) and same(ends[0], ends[2])


def a_step_without_gradients_is_none(name, options):
    params = params_of(name)
    opt = build(name, params, options)
    before = bits(opt, params)
    opt.step()
    opt.zero_grad()
    opt.step()
    assert same(bits(opt, params), before)


def zero_gradients_decay_at_most(name, options):
    params = params_of(name)
    opt = build(name, params, options)
    before = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.zeros_like(p)
    opt.step()
    decays = opt.param_groups[0]["weight_decay"] != 0
    assert same(before, [p.detach() for p in params]) is not decays


def weight_decay_of_a_group(name, options):
    params = params_of(name)
    options = {key: value for key, value in options.items() if key != "weight_decay"}
    groups = [{"params": [params[0]], "weight_decay": 0.5}, {"params": [params[1]]}]
    opt = getattr(lowbit, name)(groups, weight_decay=0.0, **options)
    before = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.zeros_like(p)
    opt.step()
    assert not torch.equal(params[0], before[0]) and torch.equal(params[1], before[1])


def learning_rate_of_a_group(name, options):
    params = params_of(name)
    groups = [{"params": [params[0]]}, {"params": [params[1]], "lr": 0.0}]
    opt = getattr(lowbit, name)(groups, **options)
    before = [p.detach().clone() for p in params]
    train(opt, params, 2)
    assert not torch.equal(params[0], before[0]) and torch.equal(params[1], before[1])


def a_state_dict_gives_the_same_bits(name, options):
    """Into another optimizer, through a copy, and through a file of weights only;
    with groups and without.
    """
    for groups in (False, True):
        params = params_of(name)
        opt = build(name, params, options, groups)
        train(opt, params, 3)
        file = io.BytesIO()
        torch.save(opt.state_dict(), file)
        file.seek(0)
        for state in (copy.deepcopy(opt.state_dict()), torch.load(file, weights_only=True)):
            others = [nn.Parameter(p.detach().clone()) for p in params]
            again = build(name, others, options, groups)
            again.load_state_dict(state)
            assert same(bits(again, others), bits(opt, params))
            ends = []
            for each, of in ((copy.deepcopy((opt, params))), (again, others)):
                train(each, of, 2)
                ends.append(bits(each, of))
            assert same(*ends)


def an_older_state_dict(name, options):
    """Without the flags that torch added later."""
    params = params_of(name)
    opt = build(name, params, options)
    train(opt, params, 2)
    older = copy.deepcopy(opt.state_dict())
    for group in older["param_groups"]:
        for flag in INFOS[name].not_og_supported_flags:
            group.pop(flag, None)
    opt.load_state_dict(older)
    train(opt, params, 2)


def a_step_that_is_no_tensor(name, options):
    params = params_of(name)
    opt = build(name, params, options)
    train(opt, params, 3)
    state = copy.deepcopy(opt.state_dict())
    for each in state["state"].values():
        each["step"] = each["step"].item()
    opt.load_state_dict(state)
    train(opt, params, 1)
    assert all(float(each["step"]) == 4 for each in opt.state.values())


def copies_step_on(name, options):
    params = params_of(name)
    opt = build(name, params, options)
    train(opt, params, 2)
    public = {key for key in vars(opt) if not key.startswith("_")}
    for again, others in (copy.deepcopy((opt, params)), pickle.loads(pickle.dumps((opt, params)))):
        assert {key for key in vars(again) if not key.startswith("_")} == public
        before = bits(opt, params)
        train(again, others, 2)
        assert same(before, bits(opt, params)), "a copy is another optimizer"


def hooks_are_called(name, options):
    params, called = params_of(name), []
    opt = build(name, params, options)
    handles = [
        opt.register_step_pre_hook(lambda *_: called.append("pre")),
        opt.register_step_post_hook(lambda *_: called.append("post")),
        register_optimizer_step_pre_hook(lambda *_: called.append("all pre")),
        register_optimizer_step_post_hook(lambda *_: called.append("all post")),
        opt.register_state_dict_pre_hook(lambda *_: called.append("saves")),
        opt.register_state_dict_post_hook(lambda *_: called.append("saved")),
        opt.register_load_state_dict_pre_hook(lambda *_: called.append("loads")),
        opt.register_load_state_dict_post_hook(lambda *_: called.append("loaded")),
    ]
    train(opt, params, 1)
    opt.load_state_dict(opt.state_dict())
    assert sorted(called[:4]) == ["all post", "all pre", "post", "pre"]
    assert called[4:] == ["saves", "saved", "loads", "loaded"]
    for handle in handles:
        handle.remove()
    train(opt, params, 1)
    assert len(called) == 8


def printing_and_state(name, options):
    params = params_of(name)
    opt = build(name, params, options)
    train(opt, params, 1)
    assert repr(opt).startswith(f"{name} (") and "lr" in repr(opt)
    assert all(opt.state[p] for p in params)


def flags_change_no_bits(name, options):
    """`foreach`, `fused` and `differentiable=False`: one implementation whatever they say."""
    flags = [{}] + [
        {flag: value}
        for flag in INFOS[name].supported_impls
        if flag != "differentiable"
        for value in (False, None)
    ]
    ends = []
    for flag in flags:
        params = params_of(name)
        opt = build(name, params, {**options, **flag})
        train(opt, params, 3)
        ends.append(bits(opt, params))
    assert all(same(ends[0], end) for end in ends)


CHECKS = [
    goes_the_right_way,
    weights_that_are_strided_otherwise,
    float16,
    bfloat16,
    float64,
    complex64,
    a_learning_rate_in_a_tensor,
    a_step_without_gradients_is_none,
    zero_gradients_decay_at_most,
    weight_decay_of_a_group,
    learning_rate_of_a_group,
    a_state_dict_gives_the_same_bits,
    an_older_state_dict,
    a_step_that_is_no_tensor,
    copies_step_on,
    hooks_are_called,
    printing_and_state,
    flags_change_no_bits,
]


def expected(check, name, desc):
    for key in ((check, name, desc), (check, name, ""), (check, "", "")):
        if key in EXPECTED:
            return EXPECTED[key][0]
    return None


@pytest.mark.parametrize("name", INFOS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_settings_of_torchs_tests(check, name):
    cases = INFOS[name].optim_inputs_func(device="cpu")
    assert len(cases) >= 4
    for case in cases:
        options, words = copy.deepcopy(case.kwargs), expected(check.__name__, name, case.desc)
        if words is None:
            check(name, options)
            continue
        with pytest.raises((ValueError, TypeError, RuntimeError), match=words):
            check(name, options)


@pytest.mark.parametrize("name", ["Muon"])
def test_errors_of_muon_are_torchs(name):
    """Of the others: test_torch_cases.py. Batches of matrices are served; torch refuses them."""
    seen = []
    for case in INFOS[name].optim_error_inputs_func(device="cpu", dtype=torch.float32):
        given = case.optimizer_error_input
        seen.append(given.desc)
        if given.desc == "only support 2D parameters":
            getattr(lowbit, name)(given.params, **given.kwargs)
        elif case.error_on is OptimizerErrorEnum.STEP_ERROR:
            with pytest.raises(ValueError, match="is complex64, which lowbit does not support"):
                getattr(lowbit, name)(given.params, **given.kwargs)
        elif issubclass(case.error_type, Warning):
            with pytest.warns(case.error_type, match=case.error_regex):
                getattr(lowbit, name)(given.params, **given.kwargs)
        else:
            with pytest.raises(case.error_type, match=case.error_regex):
                getattr(lowbit, name)(given.params, **given.kwargs)
    assert len(seen) >= 6
