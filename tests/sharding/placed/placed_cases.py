"""Every rule, state format, scale, preset and parameter format of the catalog, for tests that place
one parameter; and products of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

import lowbit
from lowbit import ops

PRESETS = [preset["name"] for preset in lowbit.catalog()["presets"]]
Make = Callable[..., Any]


def formats() -> Iterator[tuple[str, Make]]:
    """Every state format with every scale, in the moment that fits its sign."""
    for i, entry in enumerate(ops.catalog()["state"]):
        slot = "exp_avg" if entry["signed"] else "exp_avg_sq"
        scales = ["block"] if entry["scaled"] else ["none"]
        scales += ["row", "column", "tensor", "rank1"] if entry["cross_tile"] else []
        for scale in scales:
            block = {"block": 32 << i % 7} if scale == "block" else {}
            spec = (
                lowbit.scaled(entry["name"], scale=scale, **block)
                if entry["scaled"]
                else entry["name"]
            )
            yield (
                f"{entry['name']} {scale}",
                functools.partial(lowbit.AdamW, state_format={slot: spec}),
            )


def muon_with_adamw(params: list[Any], **options: Any) -> Any:
    """Matrices and batches of them by Muon, everything else by AdamW."""
    groups = [{"params": [each], "use_muon": each[1].dim() in (2, 3)} for each in params]
    return lowbit.MuonWithAdamW(groups, **options)


def rules() -> Iterator[tuple[str, Make]]:
    for cls in vars(lowbit).values():
        if (
            isinstance(cls, type)
            and issubclass(cls, lowbit.LowbitOptimizer)
            and cls is not lowbit.LowbitOptimizer
        ):
            yield cls.__name__, muon_with_adamw if cls is lowbit.MuonWithAdamW else cls
    yield "SGD momentum", functools.partial(lowbit.SGD, momentum=0.9)
    yield "RMSprop centered", functools.partial(lowbit.RMSprop, centered=True, momentum=0.9)
    yield (
        "Adafactor momentum",
        functools.partial(lowbit.Adafactor, beta1=0.9, beta2=0.99, relative_step=False),
    )
    yield "AdamW full precision", functools.partial(lowbit.AdamW, full_precision=True)
    yield "AdamW amsgrad", functools.partial(lowbit.AdamW, amsgrad=True)
    yield "APOLLO rank 4", functools.partial(lowbit.APOLLO, rank=4)
    yield "Fira rank 4", functools.partial(lowbit.Fira, rank=4)
    for name in PRESETS:
        yield f"AdamW {name}", functools.partial(lowbit.AdamW, state_format=name)
    for entry in ops.catalog()["param"]:
        yield (
            f"weights {entry['name']}",
            functools.partial(lowbit.AdamW, param_format=entry["name"]),
        )


CASES = {**dict(formats()), **dict(rules())}


@functools.cache
def dtype_of(case: str) -> torch.dtype:
    """The dtype of the weights that a case steps."""
    for entry in ops.catalog()["param"]:
        if case == f"weights {entry['name']}":
            return getattr(torch, entry["dtype"])
    return torch.bfloat16


# Products: any rule x any state x any parameter format.
RULES: dict[str, Make] = {
    "Adam amsgrad": functools.partial(lowbit.Adam, amsgrad=True),
    "AdamW": lowbit.AdamW,
    "AdamW cautious": functools.partial(lowbit.AdamW, cautious=True),
    "SGD": functools.partial(lowbit.SGD, momentum=0.9, nesterov=True),
    "Lion": functools.partial(lowbit.Lion, weight_decay=0.1),
    "Lion cautious": functools.partial(lowbit.Lion, cautious=True),
    "RMSprop": functools.partial(lowbit.RMSprop, centered=True, momentum=0.9),
    "Adagrad": functools.partial(lowbit.Adagrad, lr_decay=0.1),
    "AdEMAMix": lowbit.AdEMAMix,
    "Schedule-Free": functools.partial(lowbit.ScheduleFreeAdamW, weight_decay=0.1, warmup_steps=3),
    "Adafactor": functools.partial(lowbit.Adafactor, weight_decay=0.1),
    "Adafactor momentum": functools.partial(lowbit.Adafactor, beta1=0.9, fira_margin=0.01),
    "Adafactor full": functools.partial(lowbit.Adafactor, beta1=0.9, factored=False),
    "Adafactor rank 4": functools.partial(lowbit.Adafactor, rank=4, update_proj_gap=1),
    "CAME": functools.partial(lowbit.CAME, weight_decay=0.1),
    "LAMB": functools.partial(lowbit.LAMB, weight_decay=0.1),
    "LARS": functools.partial(lowbit.LARS, weight_decay=0.1),
    "APOLLO": functools.partial(lowbit.APOLLO, rank=4, update_proj_gap=1),
    "APOLLO torch": functools.partial(lowbit.APOLLO, rank=4, projection="torch"),
    "APOLLO-Mini": lowbit.APOLLOMini,
    "Fira": functools.partial(lowbit.Fira, rank=4),
    "Muon": lowbit.Muon,
    "NorMuon": functools.partial(lowbit.Muon, normuon_beta2=0.95),
    "Muon with AdamW": muon_with_adamw,
}
SCALES = ("row", "column", "tensor", "rank1")
STATES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "full precision": {"full_precision": True},
    **{name: {"state_format": name} for name in PRESETS},
    **{
        f"dynamic8 {scale}": {
            "state_format": lowbit.scaled("dynamic8", scale=scale, rounding="stochastic")
        }
        for scale in SCALES
    },
    **{
        f"linear4 {scale}": {"state_format": lowbit.scaled("linear4", scale=scale)}
        for scale in SCALES
    },
    **{
        f"dynamic8 block {block}": {"state_format": lowbit.scaled("dynamic8", block=block)}
        for block in (32, 2048)
    },
}
PARAMS: dict[str, torch.dtype] = {
    entry["name"]: getattr(torch, entry["dtype"]) for entry in ops.catalog()["param"]
}
