"""Folders as DeepSpeed writes them, and what lowbit-ckpt makes of one."""

import pathlib

import torch

from tests.support.files.deepspeed import (
    named_as_deepspeed,
    save,
    small_run,
    write_universal,
    write_zero,
)
from tests.support.peers.files import run


def write(kind: str, folder: pathlib.Path, of=None, **more) -> pathlib.Path:
    of = small_run() if of is None else of
    kind, stage = kind.split()
    return (write_zero if kind == "zero" else write_universal)(
        folder, of, int(stage), **{"ranks": 3, **more}
    )


def converted(folder, *options):
    target = folder.parent / "out.pt"
    target.unlink(missing_ok=True)
    run("convert", folder, target, *options)
    return torch.load(target, weights_only=True)


def check_same(made, of):
    """The checkpoint is that of the run: every tensor and number, in its own shape and dtype."""
    for name, p in of.params.items():
        state = made["optim"]["state"][name]
        assert torch.equal(made["model"][name], p) and made["model"][name].dtype == torch.float32
        assert {k: v.shape for k, v in state.items() if k != "step"} == dict.fromkeys(
            of.moments[name], p.shape
        )
        assert all(torch.equal(state[k], v) for k, v in of.moments[name].items())
        assert state["step"] == of.step
    for name, p in {**of.frozen, **of.buffers}.items():
        kept = made["model"][name]
        assert kept.dtype == (p.to(of.dtype).dtype if name in of.frozen else p.dtype)
        assert torch.equal(kept, p.to(kept.dtype)) and kept.shape == p.shape
    for name, owner in of.shared.items():
        assert torch.equal(made["model"][name], {**of.params, **of.frozen}[owner])
    groups = made["optim"]["param_groups"]
    assert [group["params"] for group in groups] == [list(group) for group in of.groups]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert groups[0]["betas"] == (0.9, 0.999)
    assert made["deepspeed"]["mine"] == 5 and made["deepspeed"]["global_steps"] == of.step


KINDS = ["zero 1", "zero 2", "zero 3", "universal 1", "universal 3"]


def edited(path, change):
    """A file with its content changed."""
    with named_as_deepspeed():
        content = torch.load(path, weights_only=False)
    change(content)
    save(content, path)


def optimizer(content):
    return content["optimizer_state_dict"]
