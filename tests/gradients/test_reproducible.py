"""check_reproducible names the first module whose passes differ, and says what usually cures it."""

import os

import pytest
import torch
from torch import nn

import lowbit
from tests.gradients import exact_worker

pytestmark = pytest.mark.slow


class Noise(torch.autograd.Function):
    """A gradient that nothing repeats."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * (1 + int.from_bytes(os.urandom(4), "little") * 2.0**-40)


class Noisy(nn.Module):
    def forward(self, x):
        return Noise.apply(x)


class Moving(nn.Module):
    """An output that depends on earlier passes."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def forward(self, x):
        self.passes += 1
        return x * (1 + self.passes)


def net(middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 8), nn.Dropout(0.5), middle, nn.BatchNorm1d(8), nn.Linear(8, 1)
    )


def found(model: nn.Module, **options) -> lowbit.gradients.reproducible.Reproducibility:
    x = torch.randn(16, 8)
    return lowbit.check_reproducible(model, lambda: model(x).square().mean(), **options)


def test_a_sound_model_is_sound_and_left_alone():
    model = net(nn.GELU())
    before = {name: t.clone() for name, t in model.state_dict().items()}
    ran = []
    assert found(model, others=lambda: ran.append(model(torch.randn(64, 8)).sum().backward()))
    assert ran
    after = model.state_dict()
    assert all(torch.equal(t, after[name]) for name, t in before.items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._backward_hooks for m in model.modules())


def test_gradients_that_are_there_count_in_no_pass():
    model = net(nn.GELU())
    model(torch.randn(16, 8)).sum().backward()
    assert any(p.grad is not None for p in model.parameters())
    assert found(model)


class Atomics(nn.Embedding):
    """Its gradient has other bits each time."""

    def __init__(self) -> None:
        super().__init__(4, 8)
        self.weight.register_hook(lambda g: g + int.from_bytes(os.urandom(4), "little"))


def test_a_parameter_is_named_and_cured_as_its_module():
    model = nn.Sequential(Atomics(), nn.Linear(8, 1))
    result = lowbit.check_reproducible(model, lambda: model(torch.arange(4)).sum())
    assert (result.module, result.differs) == ("0.weight", "gradient")
    assert "atomics" in str(result)


@pytest.mark.parametrize(
    ("middle", "name", "what"), [(Noisy(), "2", "gradient"), (Moving(), "2", "output")]
)
def test_the_first_module_that_differs_is_named(middle, name, what):
    result = found(net(middle))
    assert not result
    assert (result.module, result.differs, result.between) == (name, what, "passes")
    assert "use_deterministic_algorithms" in str(result)


def test_ranks_that_differ(pool):
    texts = pool.run(2, exact_worker.reproducible, "a rank's own noise")
    assert all("the output of '1' differs between ranks" in text for text in texts)
    for wrapper in ("DDP", "FSDP2", "FSDP1"):
        for text in pool.run(2, exact_worker.reproducible, wrapper):
            assert "same bits every time and on every rank" in text


def test_passes_that_differ_on_one_rank_are_reported_on_all(pool):
    texts = pool.run(2, exact_worker.reproducible, "the passes of a rank")
    assert all("the output of '1' differs between passes" in text for text in texts)
