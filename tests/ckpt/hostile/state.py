"""The checkpoint that the inputs start from, whole and plausible: one weight and its AdamW state,
as torch.save writes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .case import PROOF
from .write import P2, Raw, Record, archive, dump, floats, glob, records_of, reduce, tensor

SHAPE = (4, 8)
ELEMENTS = 32

GROUP: dict[str, object] = {
    "lr": 0.001,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.01,
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}


def live(how: str = "posix") -> Raw:
    """A value that runs a command when it is unpickled."""
    return reduce(glob(how, "system"), f"touch {PROOF}")


@dataclass
class Save:
    """A file of torch.save, to be changed and then written."""

    tensors: dict[str, object] = field(
        default_factory=lambda: {
            "weight": tensor(SHAPE, "0"),
            "step": tensor((), "1"),
            "exp_avg": tensor(SHAPE, "2"),
            "exp_avg_sq": tensor(SHAPE, "3"),
        }
    )
    storages: dict[str, bytes] = field(
        default_factory=lambda: {
            "0": floats(ELEMENTS),
            "1": floats(1, 7.0),
            "2": floats(ELEMENTS, 0.25),
            "3": floats(ELEMENTS, 0.125),
        }
    )
    extra: dict[str, object] = field(default_factory=dict)
    """Further keys of the outer dict."""

    def value(self) -> dict[str, object]:
        state = {key: value for key, value in self.tensors.items() if key != "weight"}
        optim = {"state": {0: state}, "param_groups": [{**GROUP, "params": [0]}]}
        return {"model": {"w": self.tensors["weight"]}, "optim": optim, **self.extra}

    def pickle(self) -> bytes:
        return P2 + dump(self.value()) + b"."

    def records(self) -> list[Record]:
        return records_of(self.pickle(), self.storages)

    def bytes(self, **how) -> bytes:
        return archive(self.records(), **how)


def put(folder: Path, data: bytes, name: str = "checkpoint.pt") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def saved(change: Callable[[Save], object], **how) -> Callable[[Path], Path]:
    """A function that writes the plain file after `change`."""

    def make(folder: Path) -> Path:
        save = Save()
        change(save)
        return put(folder, save.bytes(**how))

    return make
