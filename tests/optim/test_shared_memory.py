"""Parameters that share memory: each step is one after the other, as torch's are, whatever the
number of threads, and none is lost.
"""

import pytest
import torch
from torch import nn

import lowbit


def of(values):
    p = nn.Parameter(torch.empty(0))
    p.data = values
    return p


# Parameters in the memory of one matrix [160, 300].
SHARED = {
    "whole": lambda w: [of(w), of(w)],
    "transposed": lambda w: [of(w), of(w.t())],
    "part": lambda w: [of(w[:100]), of(w[30:]), of(w[99:110])],
    "columns": lambda w: [of(w[:, :160]), of(w[:, 160:]), of(w)],
    "twice": lambda w: [of(w)] * 2,
}
MAKE = {
    "SGD": lambda ps: lowbit.SGD(ps, lr=0.5),
    "AdamW": lambda ps: lowbit.AdamW(ps, lr=1e-2),
    "measured": lambda ps: lowbit.AdamW(ps, lr=1e-2, state_format="lpmm4"),
    "Muon": lambda ps: lowbit.Muon(ps, lr=1e-2),
}


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def give(params, number):
    generator = torch.Generator().manual_seed(number)
    for p in dict.fromkeys(params):
        p.grad = torch.randn(p.shape, generator=generator)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("kind", SHARED)
def test_each_steps_after_those_before_it(kind, name):
    torch.manual_seed(0)
    w, own = torch.randn(160, 300), torch.randn(64, 96)
    shared, apart = ([*SHARED[kind](w.clone()), of(own.clone())] for _ in range(2))
    opt = MAKE[name](shared)
    alone = {p: MAKE[name]([p]) for p in apart}
    for step in range(2):
        give(shared, step), give(apart, step)
        opt.step()
        for p in apart:
            alone[p].step()
    for p, q in zip(shared, apart, strict=True):
        assert torch.equal(p, q)
        state = alone[q].state[q]
        keys = state.keys() - {"stream"}
        assert all(torch.equal(opt.state[p][key], state[key]) for key in keys)


def test_a_weight_that_is_tied_between_steps():
    """The repeated step notices."""
    made = []
    for cls in (lowbit.SGD, torch.optim.SGD):
        a, b = nn.Parameter(torch.ones(64, 64)), nn.Parameter(torch.zeros(64, 64))
        opt = cls([a, b], lr=0.5)
        for step in range(5):
            give([a, b], step)
            opt.step()
            if step == 2:
                b.data = a.data
        made.append(a)
    torch.testing.assert_close(*made)


def test_parameters_that_share_memory_step_in_the_backward_pass():
    a = nn.Parameter(torch.ones(64, 64))
    model = nn.ParameterList([a, of(a.data.t())])
    opt = lowbit.SGD(model.parameters(), lr=0.5)
    lowbit.step_in_backward(model, opt)
    sum((i + 1) * 2 * p.sum() for i, p in enumerate(model)).backward()
    assert torch.equal(a, torch.full((64, 64), 1 - 0.5 * 6))


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("shards", [True, False])
def test_a_sharded_parameter_that_is_listed_twice(shards, one_rank):
    """All ranks decide alike, also those without a shard: by the list, not by addresses."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    placement = [Shard(0) if shards else Replicate()]
    p = nn.Parameter(distribute_tensor(torch.ones(64, 64), one_rank, placement))
    opt = lowbit.SGD([p, p], lr=0.5)
    for _ in range(3):
        p.sum().backward()
        opt.step()
        opt.zero_grad()
    assert torch.equal(p.to_local(), torch.full((64, 64), 1 - 3 * 2 * 0.5))
