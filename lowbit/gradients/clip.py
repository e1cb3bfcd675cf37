"""Gradient clipping by the total norm. Sums are exact,
so the norm has the same bits for any sharding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit import ops, sharding
from lowbit.config.arguments import check_gradients_of
from lowbit.gradients.hooks import warn_of_early_steps

_CHUNK = 1 << 22  # elements whose terms exist at once where no operator computes them
# Separate places for the terms of one word, so that additions do not wait for each other.
_LANES = 4096
_DIGIT = 0xFFFF


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    group: Any = None,
) -> Tensor:
    """Clips gradients in place, like torch.nn.utils.clip_grad_norm_,
    by a norm that no sharding changes.

    The norm is accurate for 16-bit gradients too. Gradients are multiplied by min(1, max_norm /
    (norm + 1e-6)), to within two float32 roundings; 16-bit gradients are rounded once. `clip_scale`
    makes the step itself apply the factor, without the pass over the gradients and without that
    rounding. Gradients that tensor parallelism left as partial sums are added up first, in `grad`.

    Args:
        parameters, max_norm: as in torch.
        norm_type: 2 by default, as in torch; positive, math.inf included.
        error_if_nonfinite: False by default, as in torch.
        foreach: accepted for torch's signature and ignored.
        group: the process group whose ranks have different parameters of one model, such as the
            stages of a pipeline. The norm is that of all of them, and every rank of the group must
            call. None (default) says that this rank's parameters, or its parts of them, are all
            there are. Not the ranks that shard one stage, of which it has to have one each.
            Parameters that several ranks of the group have, such as tied ones, are counted by each:
            pass them on one. A group that supports the CPU adds there, which waits for a GPU.

    Returns:
        The norm of all gradients before clipping: a plain float32 tensor of no dimensions on the
        first gradient's device. (In torch it has the gradients' dtype, and is a DTensor if they
        are.)

    Raises:
        TypeError: `parameters` is a model.
        RuntimeError: error_if_nonfinite is set and the norm is not finite; the message is torch's.
            Only this check waits for the device.
        ValueError: norm_type or max_norm is out of range, `group` has several ranks that shard one
            parameter, or a flat shard of FSDP1 was not bound by `lowbit.fsdp1.bind`.
    """
    check_gradients_of("clip_grad_norm_", parameters)
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    for p in parameters:  # a product of a sum is not the sum of products
        sharding.redistribute_gradient(p)
    norm, divisor = clip_scale(parameters, max_norm, norm_type, error_if_nonfinite, group=group)
    factor = (1.0 / divisor.double()).float()
    scale_grads(parameters, factor)
    return norm


@torch.no_grad()
def clip_scale(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    grad_scale: Tensor | float | None = None,
    group: Any = None,
) -> tuple[Tensor, Tensor]:
    """The norm of all gradients and the divisor that clips them. Gradients do not change;
    `opt.step` divides them:

        norm, scale = lowbit.clip_scale(model.parameters(), 1.0)
        opt.step(grad_scale=scale)

    For float32 gradients the result has the bits of `clip_grad_norm_` and a step.
    16-bit gradients skip one rounding.

    Args:
        parameters, max_norm, norm_type, error_if_nonfinite, group: as in `clip_grad_norm_`.
        grad_scale: the factor that the gradients already carry, such as `scaler.get_scale()`; None
            (default) means 1. The norm is that of the gradients divided by it. The result does not
            include it: `scaler.step(opt, grad_scale=scale)` applies both.

    Returns:
        (norm, scale), float32 of no dimensions on the first gradient's device; scale = max(1,
        (norm + 1e-6) / max_norm).

    Raises:
        TypeError, RuntimeError, ValueError: as in `clip_grad_norm_`; ValueError also where
            `grad_scale` is not one number.
    """
    check_gradients_of("clip_scale", parameters)
    if not float(max_norm) >= 0.0:
        raise ValueError(f"max_norm must be at least 0, not {max_norm}")
    if isinstance(grad_scale, Tensor) and grad_scale.numel() != 1:
        raise ValueError(f"grad_scale should be one number, not {grad_scale.numel()}")
    norm = total_norm(parameters, norm_type, group)
    if isinstance(grad_scale, Tensor):
        norm = norm / grad_scale.to(norm).reshape(())
    elif grad_scale is not None:
        norm = _quotient(norm, grad_scale)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, "
            "so it cannot be clipped. To disable this error and scale the gradients by the "
            "non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    return norm, divisor_for(norm, max_norm)


def divisor_for(norm: Tensor, max_norm: float) -> Tensor:
    """The divisor that clips gradients of this norm: max(1, (norm + 1e-6) / max_norm)."""
    return _quotient(norm + 1e-6, max_norm).clamp(min=1.0)


def _quotient(t: Tensor, by: float) -> Tensor:
    """t / by with the CPU's bits on every device. By a number of the host, torch's CUDA kernels
    multiply with the reciprocal.
    """
    return t / torch.full_like(t, float(by), dtype=torch.float64).to(t.dtype)


def total_norm(
    parameters: Tensor | Iterable[Tensor], norm_type: float = 2.0, group: Any = None
) -> Tensor:
    """The norm of all gradients, float32, with one collective for each mesh dimension that shards
    any parameter, and one for `group`.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    power = float(norm_type)
    if not power > 0.0:
        raise ValueError(f"norm_type must be positive, not {norm_type}")
    warn_of_early_steps(parameters)
    sums = NormSums(power)
    for p in parameters:
        sums.add(p)
    return sums.norm(group)


class NormSums:
    """Sums over gradients, separate for each combination of process groups that shard the
    gradients.

    Args:
        power: of the norm; math.inf for the largest magnitude.
    """

    def __init__(self, power: float) -> None:
        self.power = power
        self.parts: dict[tuple[Any, ...], list[Tensor]] = {}  # local sums, by process groups
        self.device: torch.device | None = None

    def expect(self, p: Tensor) -> None:
        """Counts p even if it has no gradient here: all ranks must run the same collectives."""
        found = self.parts.setdefault(sharding.process_groups(p), [])
        if not found:
            found.append(self._none(sharding.local(p).device))

    def add(self, p: Tensor) -> None:
        """Adds p's gradient, if it has one."""
        self.expect(p)
        if p.grad is None:
            return
        found = self.parts[sharding.process_groups(p)]
        grad = sharding.dense_gradient(p)
        self.device = self.device or grad.device
        found.append(self._measured(grad.detach()))

    def _none(self, device: torch.device) -> Tensor:
        if self.power == math.inf:
            return torch.zeros(1, dtype=torch.int32, device=device)
        return torch.zeros(ops.power_words(), dtype=torch.int64, device=device)

    def _measured(self, grad: Tensor) -> Tensor:
        if not grad.numel():
            return self._none(grad.device)
        if grad.is_complex():  # the square of a magnitude is the sum of those of both parts
            two = self.power == 2.0
            grad = torch.view_as_real(grad.resolve_conj()) if two else grad.abs()
        if self.power == math.inf:
            # Exact, and NaN if any element is.
            absmax = torch.linalg.vector_norm(grad, math.inf).float()
            return (absmax.view(torch.int32) & 0x7FFFFFFF).reshape(1)
        served = grad.device.type == "cpu" and grad.dtype != torch.float64
        if served and self.power in (1.0, 2.0):
            return ops.exact_powers([grad.contiguous()], int(self.power))
        return exact_terms(grad, self.power)

    def norm(self, group: Any = None) -> Tensor:
        """The norm over all ranks that share a parameter, and over those of a group that have
        others. It clears the sums.
        """
        if group is not None:
            _check_group(group, self.parts)
        largest = self.power == math.inf
        joined = {}
        for groups, found in self.parts.items():
            together = torch.stack([t.to(found[0].device) for t in found])
            joined[groups] = together.amax(0) if largest else together.sum(0)
        wanted = [
            (tensor, group, "max" if largest else "sum")
            for groups, tensor in joined.items()
            for group in groups
        ]
        if wanted:
            sharding.reduce_over(wanted)
        first = next(iter(joined.values()), None)
        device = self.device or (torch.device("cpu") if first is None else first.device)
        self.parts, self.device = {}, None
        home = device
        if group is not None:
            # By the group alone: parameters may lie on another device on another rank,
            # or it has none, and all meet on one backend.
            there = sharding.host_device([group], sharding.device_of(group))
            device = device if device.type == there.type else there
            home = home if joined else device
        all_of_them = torch.stack([t.to(device) for t in joined.values()] or [self._none(device)])
        total = all_of_them.amax(0) if largest else all_of_them.sum(0)
        if group is not None:
            sharding.reduce_over([(total, group, "max" if largest else "sum")])
            total = total.to(home)
        return total.view(torch.float32).reshape(()) if largest else root(total, self.power)


def _check_group(group: Any, parts: Iterable[tuple[Any, ...]]) -> None:
    """Raises ValueError if two ranks of a group shard a parameter: both have its whole sum by then,
    and it would count twice.
    """
    for shards in (each for groups in parts for each in groups):
        if len(both := sharding.ranks_in_both(group, shards)) > 1:
            raise ValueError(
                f"group= has ranks {both[0]} and {both[1]}, which shard one parameter: each has "
                "the sum of all its parts, and the norm would count it "
                'twice. Pass a group with one rank of each stage, such as mesh.get_group("stages")'
            )


# The words of csrc/core/exact_sum.h in torch operators, for every device. They are integers,
# so any order of addition works.


def exact_terms(grad: Tensor, power: float) -> Tensor:
    """`ops.exact_powers` of one tensor, for any device and any positive power."""
    total = torch.zeros(ops.power_words(), dtype=torch.int64, device=grad.device)
    flat = grad.reshape(-1)
    for begin in range(0, flat.numel(), _CHUNK):
        some = flat[begin : begin + _CHUNK]
        x = some.float().abs()
        if power == 2.0:
            x = x * x
        elif power != 1.0:
            x = x.double().pow(power).float()
        bits = x.view(torch.int32)
        exponent = bits >> 23
        position = (exponent - 1).clamp(min=0)
        mantissa = (bits & 0x7FFFFF) | ((exponent > 0).to(torch.int32) << 23)
        beyond = exponent == 255
        terms = (mantissa.long() << (position & 15)).masked_fill(beyond, 0)
        lanes = torch.arange(some.numel(), device=grad.device) % _LANES
        place = (position >> 4).long().clamp(max=15) * _LANES + lanes
        words = torch.zeros(16 * _LANES, dtype=torch.int64, device=grad.device)
        words = words.index_add_(0, place, terms).view(16, _LANES).sum(1)
        nans = some.isnan().sum()
        counts = torch.stack([torch.zeros_like(nans), beyond.sum() - nans, nans])
        total = carried(total + torch.cat([words, counts]))
    return total


def carried(words: Tensor) -> Tensor:
    """The same sum with its carries propagated: every word but the last gets room for more
    additions.
    """
    counts = words[-2:]
    word = torch.cat([words[:-2], words.new_zeros(3)])
    last = word[16]
    low = word[:16]
    made = torch.zeros_like(word)
    made[:16] = low & _DIGIT
    made[1:17] += (low >> 16) & _DIGIT
    made[2:18] += (low >> 32) & _DIGIT
    made[3:19] += low >> 48
    made[16] += last + (made[17] << 16) + (made[18] << 32)
    return torch.cat([made[:17], counts])


def root(words: Tensor, power: float) -> Tensor:
    """The norm of a sum of terms: computed in double, accurate but for its last few bits,
    and rounded to float32.
    """
    if words.device.type == "cpu" and not torch.compiler.is_compiling():
        return torch.tensor(_root_here(words.tolist(), power), dtype=torch.float32, device="cpu")
    infinities, nans = words[-2], words[-1]
    pairs = words[:16].view(8, 2)
    digits = list((pairs[:, 0] + (pairs[:, 1] << 16)).unbind())  # of 32 bits
    digits.append(words[16])
    for i in range(8):  # canonical: equal sums have equal digits
        digits[i + 1] = digits[i + 1] + (digits[i] >> 32)
        digits[i] = digits[i] & 0xFFFFFFFF
    total = digits[8].double() * 2.0**107
    for i in range(7, -1, -1):
        total = total + digits[i].double() * 2.0 ** (32 * i - 149)
    if power == 2.0:
        total = total.sqrt()
    elif power != 1.0:
        total = total.pow(1.0 / power)
    norm = total.float()
    norm = torch.where(infinities > 0, math.inf, norm)
    return torch.where(nans > 0, math.nan, norm)


def _root_here(words: list[int], power: float) -> float:
    """`root` of Python integers: the same operations in the same order,
    about a hundred times as fast as on tensors.
    """
    if words[-1] or words[-2]:
        return math.nan if words[-1] else math.inf
    digits = [words[i] + (words[i + 1] << 16) for i in range(0, 16, 2)] + [words[16]]
    for i in range(8):
        digits[i + 1] += digits[i] >> 32
        digits[i] &= 0xFFFFFFFF
    total = digits[8] * 2.0**107
    for i in range(7, -1, -1):
        total += digits[i] * 2.0 ** (32 * i - 149)
    if power == 2.0:
        return math.sqrt(total)
    return total if power == 1.0 else total ** (1.0 / power)


def scale_grads(parameters: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies every gradient in place, in float32, by a float32 tensor of no dimensions."""
    full_precision: dict[torch.device, list[Tensor]] = {}
    for p in parameters:
        if p.grad is None:
            continue
        grad = sharding.local(p.grad)
        if grad.dtype == torch.float32:
            full_precision.setdefault(grad.device, []).append(grad)
        else:  # torch would first round a factor without dimensions to 16 bits
            by = factor.to(grad.device)
            grad.mul_(by if grad.dim() == 0 else by.reshape(1))
    for device, grads in full_precision.items():
        torch._foreach_mul_(grads, factor.to(device))
