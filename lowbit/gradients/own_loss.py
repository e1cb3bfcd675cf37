"""Whether a model's own loss is that of its head alone: what its forward pass does besides."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import _disable_current_modes

_F = TypeVar("_F", bound=Callable[..., Any])
_LENGTH = 4  # tokens of the comparison
# what was found, and of what: a model's parts and configuration may change
_found: weakref.WeakKeyDictionary[nn.Module, tuple[Any, str | None]] = weakref.WeakKeyDictionary()


# An older torch ends its graph at `difference`.
IN_GRAPH = TorchVersion(torch.__version__) >= "2.13"


def _constant(function: _F) -> _F:
    """Has torch.compile call a function while it traces, and take the result as it is.

    torch.compiler's decorators would import the compiler with this module, which takes seconds.
    """
    if not IN_GRAPH:
        return cast(_F, torch._disable_dynamo(function))
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant
def difference(model: Any, head: Any) -> str | None:
    """What the forward pass of a model of transformers does besides calling its base model and its
    head and taking the mean cross-entropy of the next token; None if nothing.

    Its class's forward pass runs once for each model and configuration, on the CPU, in a copy
    whose base model and head are stand-ins with fixed results. No layer runs, so no parameter is
    read, no hook is called, no random number is drawn, and every rank finds the same.
    """
    settings = getattr(model.config, "to_json_string", lambda: "")()
    now = type(model).forward, id(model.base_model), id(head), settings
    of, known = _found.get(model, (None, None))
    if of == now:
        return known
    try:
        # modes of tracers, which count or replace tensors, and a default device end here
        with _disable_current_modes(), torch.device("cpu"), torch.no_grad():
            known = _compared(model, head)
    except Exception as error:  # of a model's own code, which may raise anything
        reason = " ".join(str(error).split())[:100]
        return f"needs more than both ({type(error).__name__}: {reason})"
    _found[model] = now, known
    return known


def _compared(model: Any, head: Any) -> str | None:
    base = model.base_model
    if base is model:
        return "has no base model of its own"
    words = getattr(head, "out_features", None) or head.weight.shape[0]
    width = getattr(head, "in_features", None) or head.weight.shape[1]
    generator = torch.Generator().manual_seed(0)

    def drawn(most: int, size: int) -> Tensor:  # small integers, which every dtype holds
        return torch.randint(-most, most + 1, (1, _LENGTH, size), generator=generator).float()

    hidden, logits = drawn(8, width), drawn(100, words)
    first, last = _StandIn(base, _Output([hidden])), _StandIn(head, logits)
    ids = torch.arange(_LENGTH)[None]
    copied = _with(model, {base: first, head: last})
    own = type(model).forward(copied, input_ids=ids, labels=ids, use_cache=False)
    if last.given is None:
        return "does not call its head"
    if not torch.equal(last.given.float(), hidden):
        return "changes hidden states before the head"
    if own.logits is not None and not torch.equal(own.logits.float(), logits):
        return "changes logits after the head, as soft caps and scales do"
    loss = nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
    if not torch.isclose(own.loss.float(), loss, rtol=1e-4):
        return "has another loss than the mean cross-entropy of the next token"
    return None


def _with(module: nn.Module, others: dict[nn.Module, Any]) -> nn.Module:
    """A copy of a module with others in the place of some modules inside; it shares the rest."""
    copied = copy.copy(module)
    inside: dict[str, Any] = dict(module._modules)
    for name, child in inside.items():
        if child in others:
            inside[name] = others[child]
        elif child is not None and any(each in others for each in child.modules()):
            inside[name] = _with(child, others)
    copied.__dict__["_modules"] = inside
    return copied


class _Output(tuple[Tensor, ...]):
    """What a base model returns: hidden states, and nothing else."""

    def __getattr__(self, name: str) -> Tensor | None:
        return self[0] if name == "last_hidden_state" else None


class _StandIn:
    """Has a fixed result, and the attributes of the module that it stands in for. A module inside
    of that has the same result: OPT calls its base model's decoder.
    """

    def __init__(self, module: nn.Module, result: Any) -> None:
        self.module, self.result = module, result
        self.given: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.given = args[0] if args else None
        return self.result

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.module, name)
        return _StandIn(value, self.result) if isinstance(value, nn.Module) else value
