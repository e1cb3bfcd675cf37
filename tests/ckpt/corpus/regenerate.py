"""Writes the corpora of the fuzz targets anew:

    python -m tests.ckpt.corpus.regenerate build/fuzz/tests/cpp/fuzz_ckpt [TARGET ...]

Seeds are real files: what torch and safetensors write, and all of tests/ckpt/hostile. Of those,
libFuzzer keeps the smallest set that reaches the same code. Inputs named crash-* were found by
fuzzing once, and stay.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pathlib
import pickle
import shutil
import subprocess
import sys
import tempfile
import zipfile

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

from tests.ckpt.corpus import folders
from tests.ckpt.hostile import CASES
from tests.ckpt.hostile import zstd as hostile_zstd
from tests.support.files.deepspeed import Run, optimizer_states, save

HERE = pathlib.Path(__file__).parent
MOST, BUDGET = 6144, 21_000
"""Bytes of one input, and of all of one target."""
ITEMS = ("tensor_item", "value_item", "any_value")
"""The targets whose inputs are items of a DCP directory."""
FOLDERS = ("folder", "store", "boxes")
FOLDERS_BUDGET = 100_000
"""The targets whose inputs are several files, and the bytes of all of one of them."""
SAFETENSORS = (
    b'{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"__metadata__":{"format":"pt"}}'
)


class Seeds:
    """Inputs by target."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder

    def add(self, data: bytes, *targets: str) -> None:
        for target in targets:
            if not data or len(data) > (folders.MOST if target in FOLDERS else MOST):
                continue
            (self.folder / target).mkdir(exist_ok=True)
            (self.folder / target / hashlib.sha1(data).hexdigest()).write_bytes(data)

    def archive(self, data: bytes, *targets: str) -> None:
        """A zip, and the pickle in it."""
        self.add(data, "zip", *targets)
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                for info in archive.infolist():
                    if info.filename.endswith("data.pkl") and info.file_size <= MOST:
                        self.add(archive.read(info), "pickle", "value", "tree")
        except Exception:  # most of them are broken on purpose
            pass

    def directory(self, path: pathlib.Path) -> None:
        parts = []
        for file in sorted(path.iterdir()):
            if not file.is_file() or file.is_symlink() or file.stat().st_size > 1 << 20:
                continue
            data = file.read_bytes()
            if file.name.endswith(".metadata"):
                self.add(data, "metadata", "pickle")
                parts.append(data)
            elif file.suffix == ".distcp":
                for item in data.split(b"PK\5\6"):
                    self.archive(item + b"PK\5\6" + bytes(18), *ITEMS)
                at = 0
                while (end := data.find(b"PK\5\6", at)) >= 0:
                    self.archive(data[at : end + 22], *ITEMS)
                    at = end + 22
        if parts and len(parts[0]) < 1 << 16:
            first, last = parts[0], parts[-1]
            self.add(len(first).to_bytes(2, "little") + first + last, "join")

    def file(self, path: pathlib.Path) -> None:
        if not path.is_file() or path.stat().st_size > MOST:
            return
        data = path.read_bytes()
        self.add(data, "dialect", "torch", "legacy", "safetensors")
        if data.startswith(b"PK"):
            self.archive(data)
        elif data[8:9] in (b"{", b" ") and data[6:8] == b"\0\0":
            self.header(data[8 : 8 + int.from_bytes(data[:8], "little")])
        elif data.startswith(b"\x80"):
            self.add(data, "pickle")

    def header(self, data: bytes) -> None:
        """Of safetensors, and what we keep in it."""
        self.add(data, "header")
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self.add(json.loads(data)["__metadata__"]["lowbit"].encode(), "convention")


def torchs(seeds: Seeds, folder: pathlib.Path, copier: list[str]) -> None:
    """What torch itself writes: values, tensors, optimizers, directories;
    and what we make of it.
    """
    values = {
        "lr": 0.5,
        "betas": (0.9, 0.999),
        "n": None,
        "on": True,
        "t": "x",
        "b": b"\0\xff",
        "big": 1 << 62,
        "l": [1, [2, {"k": -7}]],
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
    }
    shared = torch.arange(6.0)
    net = torch.nn.Linear(4, 3)
    optimizers = [
        torch.optim.AdamW(net.parameters()),
        torch.optim.SGD(net.parameters(), momentum=0.9),
        torch.optim.Adafactor(net.parameters()),
        torch.optim.AdamW(net.parameters(), amsgrad=True),
    ]
    contents: list[object] = [
        values,
        shared,
        {"a": shared, "b": shared[1:3], "c": shared.view(2, 3).t()},
    ]
    contents += [
        torch.arange(5).to(getattr(torch, d)) for d in ("uint8", "bfloat16", "int64", "bool")
    ]
    contents.append(torch.randn(3).to(torch.float8_e4m3fn))
    contents += [net.state_dict(), torch.nn.Parameter(shared), torch.zeros(0, 4), torch.tensor(2.0)]
    # What is named and not read, and arrays of numpy.
    contents += [
        {"x": x, "w": torch.ones(2)}
        for x in (
            torch.empty(3, device="meta"),
            torch.ones(2, dtype=torch.cfloat).conj(),
            torch.eye(2).to_sparse(),
            torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
            torch.ones(2, 2).max(0),
            np.arange(6, dtype="u4").reshape(2, 3),
            {(1, None): torch.ones(1)},
        )
    ]
    plain = {"set": {1, "a"}, "none": set(), "bytes": bytearray(b"a")}
    seeds.add(pickle.dumps(plain, 5), "pickle", "value", "tree")
    seeds.add(pickle.dumps(plain | {"frozen": frozenset({1})}, 4), "tree")
    for opt in optimizers:
        net(torch.randn(2, 4)).sum().backward()
        opt.step()
        contents.append({"optim": opt.state_dict(), "model": net.state_dict()})
        contents.append(opt.state_dict())
    for stage in (1, 3):  # a rank's file of DeepSpeed
        path = folder / f"rank-of-stage-{stage}.pt"
        save(optimizer_states(Run([{"w": torch.ones(3)}]), stage, 2, 0), path)
        seeds.file(path)
    for i, content in enumerate(contents):
        for zipped in (True, False):
            path = folder / f"{i}-{zipped}.pt"
            torch.save(content, path, _use_new_zipfile_serialization=zipped)
            seeds.file(path)
            if zipped and copier:  # what we write
                for suffix, kind in (
                    (".safetensors", "safetensors"),
                    (".copy.pt", "torch"),
                    (".d", "dcp"),
                ):
                    copy = path.with_suffix(suffix)
                    command = [*copier, path, copy, "--container", kind, "--quiet"]
                    subprocess.run(command, check=False, stderr=subprocess.DEVNULL)
                    if copy.is_dir():
                        seeds.directory(copy)
                    elif copy.exists():
                        seeds.file(copy)
            if zipped:
                seeds.archive(path.read_bytes(), *ITEMS)
    for i, content in enumerate(contents[-2:]):
        dcp.save({"state": content, "values": values}, checkpoint_id=folder / f"d{i}", no_dist=True)
        seeds.directory(folder / f"d{i}")
    dcp.save({"a": {"b": shared}}, checkpoint_id=folder / "small", no_dist=True)
    seeds.directory(folder / "small")
    path = folder / "a.safetensors"
    path.write_bytes(len(SAFETENSORS).to_bytes(8, "little") + SAFETENSORS + bytes(24))
    seeds.file(path)


def in_one_another(seeds: Seeds, folder: pathlib.Path) -> None:
    """Folders, zips in zips, items of any value, frames, and how files of others begin."""
    for text in (*folders.folders(folder), *folders.hostile(folder)):
        seeds.add(text, *FOLDERS)
    for item in folders.items():
        seeds.archive(item, "any_value", "value_item")
    for archive in folders.inner_zips():
        seeds.add(archive, "inner_zip", "zip", "dialect")
    for head in folders.HEADS:
        seeds.add(head, "head")
    for text in (b"", b"a" * 5000, json.dumps(list(range(500))).encode()):
        seeds.add(b"\0" + hostile_zstd.frame(text), "zstd")


def choose(program: str, target: str, given: pathlib.Path, kept: pathlib.Path) -> None:
    """Of what is given, what reaches code that nothing smaller reaches;
    a part of that where it is too much.
    """
    given.mkdir(exist_ok=True)
    kept.mkdir(parents=True)
    most, budget = (folders.MOST, FOLDERS_BUDGET) if target in FOLDERS else (MOST, BUDGET)
    command = [program, "-merge=1", str(kept), str(given), f"-max_len={most}"]
    environment = {**os.environ, "LOWBIT_FUZZ_TARGET": target}
    subprocess.run(command, env=environment, stderr=subprocess.DEVNULL, check=True)
    out = HERE / target
    out.mkdir(exist_ok=True)
    for old in out.iterdir():
        if not old.name.startswith("crash-"):
            old.unlink()
    used = count = 0
    # Names are digests: their order is a draw, the same each time, from large and small.
    for path in sorted(kept.iterdir(), key=lambda p: p.name):
        if used + path.stat().st_size <= budget:
            used += path.stat().st_size
            count += 1
            shutil.copy(path, out / path.name)
    all_kept, all_given = len(list(kept.iterdir())), len(list(given.iterdir()))
    print(f"{target}: {count} of {all_kept}, which do what all {all_given} do", flush=True)


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    program, *more = sys.argv[1:]
    tool = shutil.which("lowbit-ckpt")
    copier = [tool, "convert"] if tool else []
    print(
        "what our writers write is among the seeds"
        if tool
        else "no lowbit-ckpt on PATH: only torch's files"
    )
    targets = more or [
        line.split()[0] for line in subprocess.check_output([program], text=True).splitlines()
    ]
    with tempfile.TemporaryDirectory() as temporary:
        root = pathlib.Path(temporary)
        (root / "seeds").mkdir()
        (root / "torch").mkdir()
        seeds = Seeds(root / "seeds")
        torchs(seeds, root / "torch", copier)
        for name, case in CASES.items():
            folder = root / name
            folder.mkdir()
            path = case.make(folder)
            if path.is_dir() and not path.is_symlink():
                seeds.directory(path)
            else:
                seeds.file(path)
            shutil.rmtree(folder)
        (root / "folders").mkdir()
        in_one_another(seeds, root / "folders")
        for target in targets:
            choose(program, target, root / "seeds" / target, root / "kept" / target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
