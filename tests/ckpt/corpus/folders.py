"""Seeds of the fuzz targets that take several files in one input, as tools/fuzz/entries.h lays them
out: small checkpoint folders of every program, and formats inside of one another."""

from __future__ import annotations

import io
import json
import os
import pathlib
import zipfile
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

from lowbit.checkpoint import Writer
from tests.ckpt.hostile import CASES
from tests.support.files import megatron
from tests.support.files.deepspeed import Run, write_universal, write_zero

MOST = 40_000
"""Bytes of a folder in one input."""


def text_of(path: pathlib.Path) -> bytes:
    """A folder as one input; empty where it is too large."""
    out = b""
    for file in sorted(path.rglob("*")):
        name = os.fsencode(file.relative_to(path))
        if file.is_symlink():
            target = pathlib.Path(os.readlink(file))  # a folder of this run is no seed
            to = target.name if target.is_absolute() and target.parts[1] != "dev" else str(target)
            out += b"\n@@ " + name + b" -> " + os.fsencode(to) + b"\n"
        elif file.is_file() and file.stat().st_size < MOST:
            out += b"\n@@ " + name + b"\n" + file.read_bytes()
    return out if len(out) < MOST else b""


def by_lowbit(folder: pathlib.Path, state: dict[str, object]) -> bytes:
    """With lowbit.json, which has the digests, but not that of `.metadata`, with which hardly a
    change of that would come any further.
    """
    dcp.save(state, storage_writer=Writer(folder), no_dist=True)
    digests = json.loads((folder / "lowbit.json").read_text())
    del digests["metadata"]
    (folder / "lowbit.json").write_text(json.dumps(digests))
    return text_of(folder)


def linked(text: bytes) -> Iterator[bytes]:
    """A directory whose file is a link."""
    for to in (b"real", b"/dev/zero", b"__0_0.distcp", b"../real"):
        link = b"\n@@ __0_0.distcp -> " + to + b"\n\n@@ real\n"
        yield text.replace(b"\n@@ __0_0.distcp\n", link)


def folders(folder: pathlib.Path) -> Iterator[bytes]:
    run = Run([{"w": torch.ones(3, 2)}, {"b": torch.ones(3)}], buffers={"n": torch.ones(2)})
    frozen = Run([{"w": torch.ones(3, 2)}], frozen={"f": torch.ones(3)}, padded_to=4)
    for name, one in (("plain", run), ("frozen", frozen)):
        for stage in (1, 3):
            yield text_of(write_zero(folder / f"zero-{name}-{stage}", one, stage, 2))
            yield text_of(write_universal(folder / f"universal-{name}-{stage}", one, stage))
    content = megatron.tensors(of=["fc1.bias"])
    optimizer = {"optimizer": {"param_groups": list(megatron.groups().values())}}
    yield text_of(megatron.write(folder / "megatron", content, optimizer))
    net = torch.nn.Linear(3, 2)
    adam = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    adam.step()
    state = {"model": net.state_dict(), "optim": adam.state_dict(), "n": {"array": np.ones(2)}}
    dcp.save(state, checkpoint_id=folder / "torch", no_dist=True)
    yield text_of(folder / "torch")
    yield by_lowbit(folder / "lowbit", state)
    yield from linked(by_lowbit(folder / "small", {"w": torch.ones(3)}))
    tiled = {"a": torch.arange(4096, dtype=torch.uint8).reshape(64, 64), "b": torch.ones(2)}
    yield by_lowbit(folder / "tiled", tiled)


def hostile(folder: pathlib.Path) -> Iterator[bytes]:
    for name, case in CASES.items():
        (folder / name).mkdir()
        path = case.make(folder / name)
        if path.is_dir() and not path.is_symlink():
            yield text_of(path)


def items() -> Iterator[bytes]:
    """What values of a DCP directory may hold."""
    for value in (
        {"array": np.arange(3.0), "number": np.float32(2), "text": np.array(["a", "b"])},
        [torch.ones(2), {"t": torch.arange(3)}, (1, "x", None)],
        io.BytesIO(b"some bytes"),
        {1: {2.5: [True, b"\0"]}},
    ):
        out = io.BytesIO()
        torch.save(value, out)
        yield out.getvalue()


def inner_zips() -> Iterator[bytes]:
    """As stable-baselines writes them."""
    for name in ("policy.pth", "folder/optimizer.pth"):
        inner, outer = io.BytesIO(), io.BytesIO()
        torch.save({"w": torch.ones(2), "lr": 0.5}, inner)
        with zipfile.ZipFile(outer, "w") as archive:
            archive.writestr("data", "{}")
            archive.writestr(name, inner.getvalue())
        yield outer.getvalue()


HEADS = [
    b"optimizer.npz\nweights.npz\n\nPK\3\4",
    b"optimizer.npz\n\nPK\3\4",
    b"a.msgpack\nb\n\n\x82\xa6params\x81\xa1w",
    b"x\n\n\x83\xa5state\xc0",
    b"step_1\n_METADATA\nmanifest.ocdbt\n\n",
    b"checkpoint\nmodel.index\nmodel.data-00000-of-00001\n\n\0\0",
    b"iter_0000001\nlatest_checkpointed_iteration.txt\n\n",
    b"mp_rank_00_model_states.pt\nzero_pp_rank_0_mp_rank_00_optim_states.pt\n\n\x80\2",
    b"bf16_zero_pp_rank_12_mp_rank_03_optim_states.pt\n.x.partial-abcdef\n\nGGUF",
    b"[a-c!]*?.[!x]\nb.y\n\n\x1f\x8b",
    b"m.tar\n\nsys_info" + bytes(249) + b"ustar" + bytes(250),
]
