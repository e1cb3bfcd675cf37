"""`python -m bench.quality.ema`: how far an average of weights in each format is from its exact
value. Prints the numbers of docs/loss/ema.md; some minutes on one core.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lowbit

SHAPE = (64, 1024)
STEPS = 10_000
DECAYS = (0.99, 0.999, 0.9999)
MOVE = 1e-4  # standard deviation of a weight's change in one step; weights have 0.02
CODES = ("linear8", "dynamic8", "float8_e4m3")


def weights(steps: int, seed: int) -> Iterator[Tensor]:
    """Weights of a random walk: they move a little every step and never come to rest. Float32;
    the same tensor each time.
    """
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(SHAPE, generator=generator) * 0.02
    for _ in range(steps):
        w += torch.randn(SHAPE, generator=generator) * MOVE
        yield w


class Averages:
    """Something that averages weights: `update(weights)`, `value()`."""

    def __init__(self, update: Callable[[Tensor], None], value: Callable[[], Tensor]) -> None:
        self.update, self.value = update, value


def ours(decay: float, state_format: str) -> Averages:
    p = nn.Parameter(torch.zeros(SHAPE))
    ema = lowbit.EMA([("w", p)], decay, state_format=state_format)

    def update(w: Tensor) -> None:
        p.data = w
        ema.update_parameters()

    return Averages(update, lambda: ema.averages["w"].float())


def torchs(decay: float, dtype: torch.dtype) -> Averages:
    """torch's AveragedModel of a model of that dtype."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(SHAPE, dtype=dtype))])
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))

    def update(w: Tensor) -> None:
        model[0].data = w.to(dtype)
        averaged.update_parameters(model)

    return Averages(update, lambda: averaged.module[0].detach().float())


def coded(decay: float, name: str) -> Averages:
    """Codes of fewer bits, rounded stochastically: momentum of SGD with the weights as its
    gradients and a learning rate of 0.
    """
    p = nn.Parameter(torch.zeros(SHAPE))
    given = lowbit.scaled(name, rounding="stochastic")
    opt = lowbit.SGD([("w", p)], lr=0.0, momentum=decay, dampening=decay, state_format=given)

    def update(w: Tensor) -> None:
        p.grad = w
        opt.step()

    def value() -> Tensor:
        # The step is p = p - lr * buffer.
        q = nn.Parameter(torch.zeros(SHAPE))
        reader = lowbit.SGD([("w", q)], lr=1.0, momentum=1.0, dampening=1.0, state_format=given)
        reader.load_state_dict(
            {**opt.state_dict(), "param_groups": reader.state_dict()["param_groups"]}
        )
        q.grad = torch.zeros(SHAPE)
        reader.step()
        return -q.detach()

    return Averages(update, value)


def contestants(decay: float) -> dict[str, Averages]:
    made = {
        "`AveragedModel`, float32": torchs(decay, torch.float32),
        "`EMA`, float32": ours(decay, "float32"),
        "`EMA`, bfloat16_stochastic": ours(decay, "bfloat16_stochastic"),
        "`AveragedModel`, bfloat16": torchs(decay, torch.bfloat16),
    }
    return made | {f"{name}, stochastic": coded(decay, name) for name in CODES}


def measured(decay: float, steps: int, seed: int = 0) -> dict[str, float]:
    """For each contestant the distance of its average from the one in double, in units of the
    weights' distance from that.
    """
    several, exact = contestants(decay), None
    for w in weights(steps, seed):
        exact = w.double() if exact is None else exact.lerp_(w.double(), 1.0 - decay)
        for each in several.values():
            each.update(w)
    assert exact is not None
    away = (w.double() - exact).norm()
    return {
        name: float((each.value().double() - exact).norm() / away) for name, each in several.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    steps = parser.parse_args().steps
    columns = {decay: measured(decay, steps) for decay in DECAYS}
    print(f"| after {steps:,} updates | " + " | ".join(f"decay {decay}" for decay in DECAYS) + " |")
    print("|---|" + "---|" * len(DECAYS))
    for name in columns[DECAYS[0]]:
        print(f"| {name} | " + " | ".join(f"{columns[d][name]:.4f}" for d in DECAYS) + " |")


if __name__ == "__main__":
    main()
