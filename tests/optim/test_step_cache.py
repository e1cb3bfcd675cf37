"""Steps that are run again without looking at parameters give the bits of steps that look, and
notice whatever has changed.
"""

import copy
import gc
import sys
import types
import weakref

import pytest
import torch

import lowbit
from lowbit.step import group, objects
from tests.support.require import need

SHAPES = ((64, 96), (33, 300), (5,), (8, 20, 30))


def params(dtype=torch.bfloat16):
    gen = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=gen).to(dtype) * 0.1) for shape in SHAPES
    ]


def give_gradients(ps, step, dtype=None):
    gen = torch.Generator().manual_seed(step)
    for p in ps:
        p.grad = torch.randn(p.shape, generator=gen).to(dtype or p.dtype)


def contents(ps, opt):
    return [
        *(p.detach().clone().contiguous() for p in ps),
        *(
            t.clone()
            for p in ps
            for _, t in sorted(opt.state[p].items())
            if isinstance(t, torch.Tensor)
        ),
    ]


def looking(opt):
    """The same optimizer, every step of which looks."""
    step = opt.step

    def anew(self, *args, **options):
        self.forget_step()
        return step(*args, **options)

    opt.step = types.MethodType(anew, opt)
    return opt


def equal(a, b):
    return len(a) == len(b) and all(
        x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        if x.ndim
        else x == y
        for x, y in zip(a, b, strict=True)
    )


def pair(make=lowbit.AdamW, dtype=torch.bfloat16):
    mine, other = params(dtype), params(dtype)
    return mine, make(mine), other, looking(make(other))


MAKERS = {
    "8bit": lowbit.AdamW,
    "4bit": lambda ps: lowbit.AdamW(ps, state_format="4bit"),
    "rank-1": lambda ps: lowbit.AdamW(ps, state_format="lpmm4"),
    "Adafactor": lowbit.Adafactor,
    "Kahan": lambda ps: lowbit.AdamW(ps, param_format="bfloat16_kahan"),
    "two groups": lambda ps: lowbit.AdamW(
        [{"params": ps[:2], "lr": 1e-2}, {"params": ps[2:], "weight_decay": 0.3}]
    ),
}


@pytest.mark.parametrize("name", MAKERS)
def test_same_bits(name, compared):
    a, mine, b, other = pair(MAKERS[name])
    schedule = torch.optim.lr_scheduler.StepLR(mine, 2), torch.optim.lr_scheduler.StepLR(other, 2)
    for step in range(6):
        give_gradients(a, step)
        give_gradients(b, step)
        mine.step()
        other.step()
        assert mine.kept.cache is not None
        tables = [gradients._table is not None for gradients in mine.kept.cache.gradients]
        assert set(tables) == {objects.module is not None}
        for s in schedule:
            s.step()
    assert equal(contents(a, mine), contents(b, other))


def test_is_run_again_and_not_looked_at(monkeypatch):
    ps = params()
    opt = lowbit.AdamW(ps)
    give_gradients(ps, 0)
    opt.step()
    monkeypatch.setattr(opt, "step_params", None)
    give_gradients(ps, 1)
    opt.step()
    assert [float(opt.state[p]["step"]) for p in ps] == [2.0] * len(ps)


def no_gradient(ps, opt):
    ps[1].grad = None


def another_gradient_dtype(ps, opt):
    for p in ps:
        p.grad_dtype = None
        p.grad = p.grad.float() * 1.01


def transposed_gradient(ps, opt):
    ps[0].grad = ps[0].grad.t().contiguous().t()


def other_memory(ps, opt):
    ps[0].data = ps[0].data.clone()


def strided_memory(ps, opt):
    ps[0].data = ps[0].data.t().contiguous().t()


def stream(ps, opt):
    opt.state[ps[0]]["stream"].fill_(77)


def tensor_key(state):
    return next(key for key, t in state.items() if t.ndim > 0 and key != "shape")


def stream_data(ps, opt):
    opt.state[ps[0]]["stream"].data.fill_(77)  # which raises no version


def state_tensor(ps, opt):
    key = tensor_key(opt.state[ps[0]])
    opt.state[ps[0]][key] = torch.zeros_like(opt.state[ps[0]][key])


def state_in_place(ps, opt):
    opt.state[ps[0]][tensor_key(opt.state[ps[0]])].zero_()


def loaded(ps, opt):
    state = copy.deepcopy(opt.state_dict())
    state["state"][0]["step"].fill_(9)
    opt.load_state_dict(state)


def seed(ps, opt):
    opt.param_groups[0]["seed"] = 5


def maximize(ps, opt):
    opt.param_groups[0]["maximize"] = True


def zero_lr(ps, opt):
    opt.param_groups[0]["lr"] = 0.0


def tensor_lr(ps, opt):
    opt.param_groups[0]["lr"] = torch.tensor(3e-3)


def group_replaced(ps, opt):
    opt.param_groups[0] = {**opt.param_groups[0], "lr": 0.0}


def moved_to_a_neighbour(ps, opt):
    opt.param_groups[1]["params"].insert(0, opt.param_groups[0]["params"].pop())


def a_note_in_the_state(ps, opt):
    opt.state["note"] = 1


def weight_decay(ps, opt):
    opt.param_groups[0]["weight_decay"] = 0.5


def state_memory(ps, opt):
    """The same tensor over other memory, as libraries offload state."""
    t = opt.state[ps[0]][tensor_key(opt.state[ps[0]])]
    t.data = torch.zeros_like(t)


def step_memory(ps, opt):
    t = opt.state[ps[0]]["step"]
    t.data = t.data + 5


def swapped_parameter(ps, opt):
    torch.utils.swap_tensors(ps[0], torch.nn.Parameter(ps[0].detach() * 2))
    ps[0].grad = torch.ones_like(ps[0])


def replaced_parameter(ps, opt):
    new = torch.nn.Parameter(ps[0].detach().clone())
    new.grad = ps[0].grad
    opt.state.pop(ps[0])
    opt.param_groups[0]["params"][0] = ps[0] = new


def gradient_memory(ps, opt):
    ps[0].grad.data = ps[0].grad.data * 3


def negated_gradient(ps, opt):
    for p in ps:
        p.grad = torch._neg_view(p.grad)


def hook(ps, opt):
    opt.register_step_pre_hook(
        lambda *_: [setattr(p, "grad", p.grad * 0.5) for p in ps if p.grad is not None] and None
    )


CHANGES = [
    weight_decay,
    state_memory,
    step_memory,
    swapped_parameter,
    replaced_parameter,
    gradient_memory,
    negated_gradient,
    stream_data,
    hook,
    no_gradient,
    another_gradient_dtype,
    transposed_gradient,
    other_memory,
    strided_memory,
    stream,
    state_tensor,
    state_in_place,
    loaded,
    seed,
    maximize,
    zero_lr,
    tensor_lr,
]


CASES = [
    *((name, change) for change in CHANGES for name in ("8bit", "Adafactor")),
    *(
        ("two groups", change)
        for change in (group_replaced, moved_to_a_neighbour, a_note_in_the_state)
    ),
]


@pytest.mark.parametrize("name, change", CASES, ids=lambda x: getattr(x, "__name__", x))
def test_notices(name, change, compared):
    a, mine, b, other = pair(MAKERS[name])
    for step in range(5):
        for ps, opt in ((a, mine), (b, other)):
            give_gradients(ps, step)
            if step == 2:
                change(ps, opt)
            opt.step()
    assert equal(contents(a, mine), contents(b, other))


def calls_of_a_repeated_step(count):
    ps = [torch.nn.Parameter(torch.ones(4, 64)) for _ in range(count)]
    opt = lowbit.AdamW(ps, min_numel=0)
    for _ in range(3):
        for p in ps:
            p.grad = torch.ones_like(p)
        opt.step()
    for p in ps:
        p.grad = torch.ones_like(p)
    seen = []
    sys.setprofile(lambda frame, event, arg: seen.append(event))
    try:
        opt.step()
    finally:
        sys.setprofile(None)
    return sum(event in ("call", "c_call") for event in seen)


def test_python_calls_nothing_for_each_parameter():
    need("tensors", objects.module is not None, "lowbit was built without its module _tensors")
    few, many = calls_of_a_repeated_step(10), calls_of_a_repeated_step(300)
    assert few == many < 200


def test_the_compiled_comparison():
    need("tensors", objects.module is not None, "lowbit was built without its module _tensors")
    a, b, c = object(), object(), object()
    same = objects.module.same
    assert same([a, b, c], [[a], {"x": b, "y": c}, []]) and same([], [])
    for containers in ([[a, b]], [[a, b, c], [a]], [{"x": a, "y": c, "z": b}], [[a, b, a]]):
        assert not same([a, b, c], containers)
    with pytest.raises(TypeError, match="lists and dicts"):
        same([a], [(a,)])
    p = torch.nn.Parameter(torch.ones(4, 3))
    record, take = objects.module.record, objects.module.take
    table = torch.zeros(1, objects.module.COLUMNS, dtype=torch.int64)
    assert not record([p], None, table)  # no gradient
    p.grad = torch.ones(4, 3)
    assert record([p], None, table) and table[0, :3].tolist() == [
        p.data_ptr(),
        p.grad.data_ptr(),
        12,
    ]
    p.grad = torch.full((4, 3), 2.0)
    held = []
    assert take([p], None, table, held) and table[0, 1] == p.grad.data_ptr()
    assert len(held) == 1 and held[0] is p.grad
    assert take([p], [p.grad], table)
    others = (
        torch.ones(4, 3).bfloat16(),
        torch.ones(3, 4).t(),
        torch.ones(4, 3).to_sparse(),
        torch.ones(4, 4),
        None,
    )
    for grad in others:
        assert not take([p], [grad], table)
    assert not take([p.detach()], [p.grad], table)  # another class
    for wrong in (table[:, 1:], table.int(), torch.zeros(2, *table.shape[1:], dtype=torch.int64)):
        with pytest.raises(ValueError, match="int64 CPU tensor"):
            take([p], None, wrong)
    with pytest.raises(ValueError, match="as long as params"):
        take([p], [], table)


def test_notices_new_parameters():
    a, mine, b, other = pair()
    new = [torch.nn.Parameter(torch.ones(64, 64)) for _ in range(2)]
    for step in range(4):
        for ps, opt, p in ((a, mine, new[0]), (b, other, new[1])):
            if step == 2:
                opt.add_param_group({"params": [p]})
                ps.append(p)
            give_gradients(ps, step)
            opt.step()
    assert equal(contents(a, mine), contents(b, other))


def test_found_inf_and_scale():
    a, mine, b, other = pair()
    for step in range(5):
        for ps, opt in ((a, mine), (b, other)):
            give_gradients(ps, step)
            opt.grad_scale, opt.found_inf = torch.tensor(2.0), torch.tensor(float(step == 3))
            opt.step()
    assert equal(contents(a, mine), contents(b, other))
    assert float(mine.state[a[0]]["step"]) == 4


@pytest.mark.parametrize("name", ["8bit", "Adafactor"])
def test_lets_go_of_gradients_and_old_state(name):
    ps = params()
    opt = MAKERS[name](ps)
    for step in range(3):
        give_gradients(ps, step)
        opt.step()
    # A tensor that C++ holds keeps its Python object.
    held = [weakref.ref(p.grad) for p in ps]
    kept = [weakref.ref(t) for p in ps for t in opt.state[p].values()]
    for p in ps:
        p.grad = None
    gc.collect()
    assert all(ref() is None for ref in held)
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    gc.collect()
    assert opt.kept.cache is None
    del opt
    gc.collect()
    assert all(ref() is None for ref in kept)


@pytest.mark.parametrize("kept", [True, False])
def test_a_repeated_step_keeps_its_workspace_unless_it_is_large(kept, monkeypatch):
    if not kept:
        monkeypatch.setattr(group, "KEPT_WORKSPACE", 100)
    a, mine, b, other = pair(MAKERS["Adafactor"])
    places = []
    for step in range(5):
        for ps, opt in ((a, mine), (b, other)):
            give_gradients(ps, step)
            opt.step()
        held = [each._workspace for each in mine.kept.cache.step_groups]
        places.append([h and [t.data_ptr() for t in h[1].values()] for h in held])
    assert equal(contents(a, mine), contents(b, other))
    # The first step prepares, the second one makes what stays.
    assert places[1] == places[2] == places[3] == places[4]
    assert any(place is not None for place in places[1]) == kept


def test_sparse_gradient_is_refused_before_anything_is_written():
    p = torch.nn.Parameter(torch.ones(64, 64))
    opt = lowbit.AdamW([p])
    for _ in range(2):
        p.grad = torch.ones(64, 64)
        opt.step()
    before = p.detach().clone()
    p.grad = torch.ones(64, 64).to_sparse()
    with pytest.raises(RuntimeError):
        opt.step()
    assert torch.equal(p, before) and float(opt.state[p]["step"]) == 2


def test_copies_step_on_their_own():
    ps = params()
    opt = lowbit.AdamW(ps)
    for step in range(2):
        give_gradients(ps, step)
        opt.step()
    twin_ps, twin = copy.deepcopy((ps, opt))
    for step in range(2, 4):
        give_gradients(ps, step)
        opt.step()
        give_gradients(twin_ps, step)
        twin.step()
    assert equal(contents(ps, opt), contents(twin_ps, twin))
    assert ps[0].data_ptr() != twin_ps[0].data_ptr()


def test_gradients_that_must_be_copied_are_not_prepared_for():
    p = torch.nn.Parameter(torch.randn(64, 96))
    opt = lowbit.AdamW([p])
    for _ in range(2):
        p.grad = torch.randn(96, 64).t()
        opt.step()
        assert opt.kept.cache is None


def test_a_step_that_fails_lets_go_of_its_gradients():
    p = torch.nn.Parameter(torch.randn(64, 96))
    opt = lowbit.AdamW([p])
    for _ in range(2):
        p.grad = torch.randn(64, 96)
        opt.step()
    p.grad = torch.randn(64, 96)
    held = weakref.ref(p.grad)
    opt.param_groups[0]["maximize"] = "yes"
    with pytest.raises(RuntimeError):
        opt.step()
    p.grad = None
    gc.collect()
    assert held() is None


def test_modules_may_swap_their_parameters_between_steps():
    model = torch.nn.Linear(96, 64)
    opt = lowbit.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(3, 96)).sum().backward()
        opt.step()
        opt.zero_grad()
    saved = copy.deepcopy(model.state_dict())
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict(saved)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    before = model.weight.detach().clone()
    model(torch.randn(3, 96)).sum().backward()
    opt.step()
    assert not torch.equal(model.weight, before)
    assert float(opt.state[model.weight]["step"]) == 3
