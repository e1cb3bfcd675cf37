"""Arguments that all optimizers share: their checks, with torch's messages,
and the entries of every group.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypedDict, TypeVar

from torch import Tensor, nn
from typing_extensions import Unpack

from lowbit.config.hints import did_you_mean, refuse_keywords, warn_once
from lowbit.config.overrides import check as check_overrides
from lowbit.config.overrides import check_together
from lowbit.config.types import ParamFormat, StateFormat, StateMemory

# Group entries that decide the layout of state. Loading a state dict does not change them.
STRUCTURE = (
    "state_format",
    "param_format",
    "full_precision",
    "overrides",
    "min_numel",
    "rank",
    "decoupled_weight_decay",
    "use_muon",
    "split",
)


class Options(TypedDict, total=False):
    """lowbit's own options, which every optimizer takes;
    `help(lowbit.AdamW)` shows what they mean.
    """

    state_format: StateFormat
    param_format: ParamFormat
    full_precision: bool | Sequence[str]
    seed: int
    overrides: Mapping[str, Mapping[str, Any]] | None
    min_numel: int | None
    state_memory: StateMemory


class AllOptions(Options, total=False):
    """`Options`, plus the torch options that every optimizer takes. For optimizers that torch does
    not have, so that no order of arguments is given.
    """

    foreach: bool | None
    maximize: bool


# In the order that signatures show them.
DEFAULTS: Mapping[str, Any] = {
    "foreach": None,
    "maximize": False,
    "state_format": "8bit",
    "param_format": "auto",
    "full_precision": (),
    "seed": 0,
    "overrides": None,
    "min_numel": None,
    "state_memory": "device",
}

_Init = TypeVar("_Init", bound=Callable[..., None])


def documents_options(
    options: type, defaults: Mapping[str, Any] = DEFAULTS
) -> Callable[[_Init], _Init]:
    """Decorates a constructor that ends in `**options: Unpack[...]`, so that `inspect.signature`
    and `help` list each option with its default.

    Args:
        options: the TypedDict that is unpacked.
        defaults: of the options, in the order that signatures show them;
            those of every optimizer by default.
    """
    kinds = options.__annotations__
    listed = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=getattr(kinds[name], "__forward_arg__", kinds[name]),
        )
        for name, default in defaults.items()
        if name in kinds
    ]

    def shown(init: _Init) -> _Init:
        signature = inspect.signature(init)
        *own, _ = signature.parameters.values()
        every = [*own, *listed]
        init.__signature__ = signature.replace(parameters=every)  # type: ignore[attr-defined]
        return init

    return shown


def group_defaults(
    opt: object,
    lr: float | Tensor,
    *,
    capturable: bool = False,
    differentiable: bool = False,
    fused: bool | None = None,
    **options: Unpack[AllOptions],
) -> dict[str, Any]:
    """Group entries of every lowbit optimizer, and `state_memory`; `check_options` checks values.

    Args:
        opt: the optimizer, for errors.

    Raises:
        TypeError, ValueError: as `check_group` does; or an argument is unknown.
    """
    refuse_keywords(type(opt).__name__, options)
    for name in options:
        if name not in DEFAULTS:
            known = [key for key in inspect.signature(type(opt)).parameters if key != "params"]
            raise TypeError(
                f"{type(opt).__name__}.__init__() got an unexpected keyword argument "
                f"{name!r}{did_you_mean(name, known)}"
            )
    given: dict[str, Any] = {**DEFAULTS, **{name: plain(v) for name, v in options.items()}}
    state_memory = given.pop("state_memory")
    if isinstance(given["full_precision"], str):
        given["full_precision"] = (given["full_precision"],)
    group = {
        "lr": lr,
        "maximize": given.pop("maximize"),
        "foreach": given.pop("foreach"),
        "capturable": capturable,
        "differentiable": differentiable,
        "fused": fused,
        **given,
        "lowbit_version": 1,
    }
    check_group("the optimizer", group)
    return {**group, "state_memory": state_memory}  # not a group entry: the optimizer removes it


def check_group(what: str, group: Mapping[str, Any]) -> None:
    """Checks the options of the optimizer or of one group,
    so that a bad option fails here and not in the first step.

    Args:
        what: the name of the optimizer or group in errors.
        group: the options; any may be missing.

    Raises:
        TypeError: an option has a wrong type.
        ValueError: options contradict each other, or one is not allowed in a group.
    """
    lr = group.get("lr", 0.0)
    if lr is None or isinstance(lr, str):
        raise TypeError(f"lr should be a number or a tensor but is: {lr!r}")
    if "state_memory" in group:
        raise ValueError(
            "state_memory is for a whole optimizer, not for a group of it: pass it to the "
            "optimizer, in torchtitan by optimizer_factory_kwargs_by_name"
        )
    check_seed(group.get("seed", 0))
    full_precision = group.get("full_precision", ())
    patterns = isinstance(full_precision, Sequence) and all(
        isinstance(p, str) for p in full_precision
    )
    if not (isinstance(full_precision, bool) or patterns):
        raise TypeError(
            f"full_precision should be patterns of names, or a bool, but is: {full_precision!r}"
        )
    check_overrides(group.get("overrides") or {})
    check_together(what, group)


def check_shared(group: Mapping[str, Any]) -> None:
    """Checks what every optimizer takes of torch's options, as torch checks it.

    Raises:
        TypeError: the learning rate is not a number, or a flag is not a bool.
        ValueError: it is out of range, or a step is to be differentiable.
        RuntimeError: two implementations are asked for.
    """
    check_flags(group, "maximize", "capturable")
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    if not real("lr", lr) >= 0.0:
        raise ValueError(f"Invalid learning rate: {lr}")
    if group["differentiable"]:
        raise ValueError(
            "differentiable=True is not supported: the state is not differentiable. Use "
            "torch.optim instead"
        )
    if group["fused"] and group["foreach"]:
        raise RuntimeError("`fused` and `foreach` cannot be `True` together.")


def check_seed(seed: Any) -> None:
    """Raises TypeError if a seed is not an int, ValueError if it has more than 64 bits."""
    if not isinstance(seed, Integral):
        raise TypeError(f"seed should be an int but is: {seed!r}")
    if not -(1 << 63) <= int(seed) < 1 << 63:
        raise ValueError(f"seed should fit into a signed 64-bit integer but is: {seed}")


def check_params(name: str, params: Any) -> None:
    """Raises TypeError if a module was given in place of its parameters;
    `name` is the optimizer's.
    """
    if isinstance(params, nn.Module) and not isinstance(params, nn.ParameterList):
        what = type(params).__name__
        raise TypeError(
            f"{name} takes parameters, not a model ({what}): pass lowbit.param_groups(model), "
            "model.named_parameters() or model.parameters()"
        )


def check_model(what: str, model: Any) -> None:
    """Raises TypeError if something else was given in place of a model, such as its parameters;
    `what` is the function's name.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{what} takes the model, not {type(model).__name__}: lowbit.{what}(model)")


def check_gradients_of(what: str, parameters: Any) -> None:
    """Raises TypeError if a module was given in place of its parameters;
    `what` is the function's name.
    """
    if isinstance(parameters, nn.Module) and not isinstance(parameters, nn.ParameterList):
        raise TypeError(
            f"{what} takes parameters, not a model ({type(parameters).__name__}): "
            "pass model.parameters()"
        )


def warn_of_typos(group: Mapping[str, Any], known: Iterable[str], warned: set[str]) -> None:
    """Warns of an entry of a group that is nearly named as an option.
    Other unknown entries are the program's own.

    Args:
        group: the entries that were given.
        known: the names of the optimizer's options; those of every optimizer count too.
        warned: the entries that were warned of, which are not again; updated.
    """
    names = list({**dict.fromkeys(known), **DEFAULTS})
    for key in group:
        if key in names or key in ("params", "param_names", "state_memory"):
            continue
        parts = key.rstrip("0123456789").strip("_").split("_")
        inside = any(_has(parts, name.split("_")) for name in names)  # such as no_weight_decay
        meant = "" if inside else did_you_mean(key, names, cutoff=0.8)
        if meant:
            message = (
                f"a parameter group has an entry {key!r}, which is not an option, "
                f"so it has no effect{meant}"
            )
            warn_once(warned, f"entry {key}", message)


def _has(parts: list[str], some: list[str]) -> bool:
    """Whether `some` is a run inside `parts`."""
    return any(parts[i : i + len(some)] == some for i in range(len(parts)))


def check_betas(betas: Sequence[float | Tensor], count: int = 2) -> None:
    """Raises TypeError unless there are `count` betas, and ValueError unless each is in [0, 1)."""
    many = isinstance(betas, Sequence) and not isinstance(betas, str)
    if not (many or getattr(betas, "shape", None) == (count,)) or len(betas) != count:
        raise TypeError(f"betas should be {count} numbers but is: {betas!r}")
    for i, beta in enumerate(betas):
        if not 0.0 <= real(f"betas[{i}]", beta) < 1.0:
            raise ValueError(f"Invalid beta parameter at index {i}: {beta}")


def check_tensors(
    lr: float | Tensor, betas: Sequence[float | Tensor], foreach: bool | None, capturable: bool
) -> None:
    """Raises ValueError, with torch's messages,
    where torch's Adam rejects a tensor as learning rate or beta.
    """
    tensors = [isinstance(beta, Tensor) for beta in betas]
    if any(tensors) and not all(tensors):
        raise ValueError("betas must be either both floats or both Tensors")
    if not foreach or capturable:
        return
    for name, tensor in [("lr", isinstance(lr, Tensor)), ("betas[0]", any(tensors))]:
        if tensor:
            raise ValueError(
                f"{name} as a Tensor is not supported for capturable=False and foreach=True"
            )


def check_least(least: float = 0.0, **values: float) -> None:
    """Raises ValueError unless every value is at least `least`."""
    for name, value in values.items():
        if not real(name, value) >= least:
            raise ValueError(f"Invalid {name} value: {value}")


def check_above(**values: float) -> None:
    """Raises ValueError unless every value is above 0."""
    for name, value in values.items():
        if not real(name, value) > 0.0:
            raise ValueError(f"Invalid {name} value: {value}")


def check_nesterov(group: Mapping[str, Any]) -> None:
    """Raises ValueError, with torch's message, unless Nesterov momentum comes with a momentum and
    zero dampening.
    """
    dampening = real("dampening", group["dampening"])
    if group["nesterov"] and (group["momentum"] <= 0 or dampening != 0):
        raise ValueError("Nesterov momentum requires a momentum and zero dampening")


def check_flags(group: Mapping[str, Any], *names: str) -> None:
    """Raises TypeError unless each of these options is true or false: the text "false" would be
    true. None is false, as in torch.
    """
    for name in names:
        value = group[name]
        one = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if not (
            one is None
            or (isinstance(one, Real) and one in (0, 1))
            or type(one).__name__ in ("bool", "bool_")  # NumPy's
        ):
            raise TypeError(f"{name} should be True or False but is: {value!r}")


def real(name: str, value: Any) -> float:
    """A number, or a tensor of one, as a float.

    Raises:
        TypeError: it is not a number, such as "1e-8", which YAML reads as a string.
    """
    if isinstance(value, Tensor):
        one = value.numel() == 1
    else:  # NumPy's numbers, and its arrays of one without a dimension
        one = isinstance(value, Real) or (
            getattr(value, "shape", None) == () and isinstance(value.item(), Real)
        )
    if not one:
        raise TypeError(f"{name} should be a number but is: {value!r}")
    return float(value)


def pair(name: str, values: Any, optional: Sequence[int] = ()) -> Sequence[Any]:
    """Two numbers; those at `optional` may be None.

    Raises:
        TypeError: they are not.
    """
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != 2:
        raise TypeError(f"{name} should be 2 numbers but is: {values!r}")
    for i, value in enumerate(values):
        if not (value is None and i in optional):
            real(f"{name}[{i}]", value)
    return values


def plain(value: Any) -> Any:
    """A setting with NumPy's numbers, texts and arrays as Python's, alone or in a pair: a state
    dict must load with `weights_only=True`, which takes none of NumPy's. All else stays.
    """
    if type(value) in (tuple, list):
        made = [plain(one) for one in value]
        return value if all(map(operator.is_, made, value)) else type(value)(made)
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        made = value.tolist()
        return tuple(made) if isinstance(made, list) else made
    return value


def number(lr: float | Tensor) -> float:
    """The learning rate in `hyper`: 0 for a tensor,
    which the operator takes as a separate argument.
    """
    return 0.0 if isinstance(lr, Tensor) else lr
