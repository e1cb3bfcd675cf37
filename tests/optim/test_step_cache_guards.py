"""What a repeated step refuses, holds and checks: its memory, its table, its numbers, and the
versions that autograd compares.
"""

import gc
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import lowbit
from lowbit import ops
from lowbit.step import objects
from tests.optim.test_step_cache import looking
from tests.support.require import need

SHAPES = ((64, 96), (33, 300), (5,))


def params():
    gen = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=gen)) for shape in SHAPES]


def give_gradients(ps, step):
    gen = torch.Generator().manual_seed(step)
    for p in ps:
        p.grad = torch.randn(p.shape, generator=gen)


def no_memory(ps):
    ps[0].grad = torch._efficientzerotensor(ps[0].shape, dtype=ps[0].dtype)


def negated_parameter(ps):
    ps[0].data = torch._neg_view(-ps[0].data)


def same_length(ps):
    ps[0].data = ps[0].data.view(96, 64)


REFUSED = {no_memory: "contiguous", negated_parameter: "negation", same_length: "convert the model"}


@pytest.mark.parametrize("change", REFUSED, ids=lambda x: x.__name__)
def test_refuses_what_a_looking_step_refuses(change, compared):
    for looks in (False, True):
        ps = params()
        opt = lowbit.AdamW(ps)
        if looks:
            looking(opt)
        for step in range(3):
            give_gradients(ps, step)
            if step == 2:
                before = [p.detach().clone() for p in ps]
                change(ps)
                with pytest.raises(RuntimeError, match=REFUSED[change]):
                    opt.step()
            else:
                opt.step()
        assert all(map(torch.equal, ps[1:], before[1:]))
        assert [float(opt.state[p]["step"]) for p in ps] == [2.0] * len(ps)


def test_holds_the_gradients_until_the_operators_are_done(compared, monkeypatch):
    ps = params()
    opt = lowbit.AdamW(ps)
    for step in range(2):
        give_gradients(ps, step)
        opt.step()
    give_gradients(ps, 2)
    held = [weakref.ref(p.grad) for p in ps]
    bind = opt.kept.cache.bind

    def lose(options):  # as another thread may while operators run
        for p in ps:
            p.grad = None
        gc.collect()
        assert all(ref() is not None for ref in held)
        bind(options)

    monkeypatch.setattr(opt.kept.cache, "bind", lose)
    opt.step()
    gc.collect()
    assert all(ref() is None for ref in held)
    assert [float(opt.state[p]["step"]) for p in ps] == [3.0] * len(ps)


def test_a_stream_that_cannot_be_watched_is_not_repeated():
    ps = params()
    opt = lowbit.AdamW(ps)
    opt.state[ps[-1]]["stream"] = opt.state[ps[-1]]["stream"].float()
    for step in range(2):
        give_gradients(ps, step)
        opt.step()
        assert opt.kept.cache is None
    assert [float(opt.state[p]["step"]) for p in ps] == [2.0] * len(ps)


def test_a_step_of_any_number_has_its_own_coefficients():
    moved = []
    for steps in ((-2.0, -2.0), (5.0, -2.0)):  # the first of a call prepares, and the next may copy
        ps = [torch.nn.Parameter(torch.ones(64)) for _ in range(2)]
        opt = lowbit.Lion(ps, lr=0.25, min_numel=0)
        for p, count in zip(ps, steps, strict=True):
            opt.state[p]["step"].fill_(count)
            p.grad = torch.ones_like(p)
        opt.step()
        moved.append([p.detach().clone() for p in ps])
    assert torch.equal(moved[0][0], moved[1][1]) and torch.equal(moved[0][1], moved[1][1])
    assert not torch.equal(moved[0][0], torch.ones(64))


def test_the_table_is_checked():
    need("tensors", objects.module is not None, "lowbit was built without its module _tensors")
    p = torch.nn.Parameter(torch.ones(64, 96))
    opt = lowbit.AdamW([p])
    p.grad = torch.ones_like(p)
    opt.step()
    (number,), (gradients,) = opt.kept.cache.ids, opt.kept.cache.gradients
    for column, message in ((0, "no address"), (1, "no address"), (2, "0 elements")):
        table = gradients._table.clone()
        table[0, column] = 0
        with pytest.raises(RuntimeError, match=message):
            ops.step_take_table(number, table)


def test_a_torch_with_another_capsule_has_no_table():
    need("tensors", objects.module is not None, "lowbit was built without its module _tensors")
    other = type("Tensor", (), {"__dlpack_c_exchange_api__": object()})
    assert objects.module.open(other) is False
    assert objects.module.open(torch.Tensor) is True


OVERWRITE = {
    "AdamW": lowbit.AdamW,
    "Muon": lambda ps: lowbit.Muon(ps, lr=1e-3),
    "APOLLO": lambda ps: lowbit.APOLLO(ps, rank=4),
}


@pytest.mark.parametrize("name", OVERWRITE)
def test_backward_after_a_step_that_overwrote_its_weights_is_refused(name):
    first, second = (torch.nn.Parameter(torch.randn(64, 64)) for _ in range(2))
    opt = OVERWRITE[name]([first, second])
    for _ in range(3):  # looks, repeats
        y = (torch.ones(2, 64) @ first @ second).sum()
        y.backward(retain_graph=True)
        opt.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()
        opt.zero_grad()


def test_inference_tensors_step():
    with torch.inference_mode():
        p = torch.ones(64, 64)
        p.grad = torch.ones(64, 64)
        opt = lowbit.AdamW([p])
    for _ in range(3):
        opt.step()
    assert float(opt.state[p]["step"]) == 3


def test_fake_tensors_step_and_are_not_repeated():
    with FakeTensorMode():
        p = torch.nn.Parameter(torch.randn(64, 96))
        opt = lowbit.AdamW([p])
        for _ in range(3):
            p.grad = torch.ones_like(p)
            opt.step()
            assert opt.kept.cache is None
    assert opt.state[p]["exp_avg_dynamic8"].shape == (64, 96)
