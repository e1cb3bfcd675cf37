"""Which bytes lowbit.checkpoint.Reader reads, and by which way: cuts, short rows,
other file systems.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys

import pytest
import torch

from lowbit import checkpoint
from tests.checkpoint.storage import storage_worker
from tests.checkpoint.storage.storage_files import flipped, save
from tests.support.files.systems import mounted

pytestmark = pytest.mark.slow


def test_ranks_read_the_bytes_that_they_need_and_no_more(pool, tmp_path):
    """Cuts of twice and four times as many ranks, by rows and by columns,
    are cuts of the verified parts.
    """
    torch.manual_seed(0)
    path, t = tmp_path / "run", torch.randn(512, 1024)
    save({"w": t}, path)
    for box in (
        [slice(0, 256), slice(None)],
        [slice(128, 256), slice(None)],
        [slice(None), slice(256, 512)],
        [slice(384, 512), slice(512, 1024)],
    ):
        part = torch.zeros_like(t[tuple(box)])
        offset = [s.start or 0 for s in box]
        reader = checkpoint.Reader(path)
        reader.read_metadata()
        read = reader._reader.read_into(
            [("w", offset, list(part.shape), part.data_ptr(), part.nbytes)], 1, True, None
        )
        assert torch.equal(part, t[tuple(box)]) and read == part.nbytes
    part = torch.zeros(3, 5)
    wanted = [("w", [100, 300], [3, 5], part.data_ptr(), part.nbytes)]
    assert reader._reader.read_into(wanted, 1, True, None) == 128 * 256 * 4  # one cell
    assert torch.equal(part, t[100:103, 300:305])
    assert reader._reader.read_into(wanted, 1, False, None) <= 3 * 1024 * 4
    # Ranks that are twice as many read each byte once.
    even = {f"w{i}": torch.randn(64, 512) for i in range(3)}
    save(even, tmp_path / "even")
    total = sum(t.nbytes for t in even.values())
    for ranks in (2, 4):
        for dim in (0, 1):
            assert (
                sum(pool.run(ranks, storage_worker.load_even, str(tmp_path / "even"), dim)) == total
            )


def test_pages_of_another_file_system_are_not_mapped(tmp_path):
    """Where they may come over a network: to lose one would end the program by a signal.
    ramfs stands for these.
    """
    torch.manual_seed(0)
    state = {"w": torch.randn(600, 1024)}
    save(state, tmp_path / "run")
    program = """if True:
        import sys, torch
        from lowbit import checkpoint
        reader, part = checkpoint.Reader(sys.argv[1]), torch.zeros(600, 256)
        reader.read_metadata()
        box = ("w", [0, 256], [600, 256], part.data_ptr(), part.nbytes)
        reader._reader.read_into([box], 1, True, None)
        print(reader._reader.mapped())
        torch.save(part, sys.argv[2])"""
    with mounted(tmp_path / "there", "ramfs") as there:
        shutil.copytree(tmp_path / "run", there.seen / "run")
        done = subprocess.run(
            [
                *there.enter,
                sys.executable,
                "-c",
                program,
                tmp_path / "there" / "run",
                tmp_path / "part.pt",
            ],
            capture_output=True,
            text=True,
        )
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
    assert torch.equal(torch.load(tmp_path / "part.pt"), state["w"][:, 256:512])


def maps(path):
    """Whether pages of files there are mapped: of a disk of this machine,
    by a Linux that tells before they are touched.
    """
    kind = subprocess.check_output(["stat", "--file-system", "--format=%t", path], text=True)
    local = {0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x2FC12FC1, 0x01021994, 0x794C7630}
    version = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    return int(kind, 16) in local and version >= (5, 14)


@pytest.mark.parametrize("verify", [True, False])
def test_short_rows_are_copied_from_mapped_pages(tmp_path, verify):
    """Cuts by columns, of 1 KiB and of 8 bytes a row: a read of each would take longer than its
    bytes.
    """
    if not maps(tmp_path):
        pytest.skip(
            "pages of files in TMPDIR are not mapped: another file system, or Linux before 5.14"
        )
    torch.manual_seed(0)
    state = {"w": torch.randn(600, 1024), "scales": torch.randn(8192, 4)}
    save(state, tmp_path / "run")

    def read(name, offset, shape):
        part = torch.zeros(shape)
        before = reader._reader.mapped()
        read = reader._reader.read_into(
            [(name, offset, shape, part.data_ptr(), part.nbytes)], 1, verify, None
        )
        return part, read, reader._reader.mapped() - before

    reader = checkpoint.Reader(tmp_path / "run")
    reader.read_metadata()
    part, bytes_read, mapped = read("w", [0, 256], [600, 256])
    assert torch.equal(part, state["w"][:, 256:512]) and bytes_read == mapped == part.nbytes
    part, bytes_read, mapped = read("scales", [0, 2], [8192, 2])
    assert torch.equal(part, state["scales"][:, 2:])
    # Of scales a cell has whole rows, which are read as they lie.
    assert (bytes_read, mapped) == ((2 * part.nbytes, 0) if verify else (part.nbytes, part.nbytes))
    if verify:
        flipped(tmp_path / "run", "w", 0.6)
        reader = checkpoint.Reader(tmp_path / "run")
        reader.read_metadata()
        for column, damaged in ((0, False), (256, False), (512, False), (768, True)):
            if damaged:
                with pytest.raises(checkpoint.CheckpointError, match="damaged"):
                    read("w", [0, column], [600, 256])
            else:
                assert torch.equal(
                    read("w", [0, column], [600, 256])[0], state["w"][:, column : column + 256]
                )
    # A page that is gone is an error, and no signal.
    (file,) = (tmp_path / "run").glob("*.distcp")
    os.truncate(file, 100_000)
    with pytest.raises(checkpoint.CheckpointError, match=r"became shorter|changed"):
        read("w", [0, 256], [600, 256])


def test_directories_of_the_tool_are_read_by_parts_too(tmp_path):
    torch.manual_seed(0)
    t = torch.randn(512, 1024)
    save({"w": t}, tmp_path / "run")
    checkpoint.reshard(tmp_path / "run", tmp_path / "two", world_size=2)  # requantized chunks
    checkpoint.reshard(tmp_path / "two", tmp_path / "again", world_size=2)  # and copied
    for i in range(2):
        checkpoint.reshard(tmp_path / "run", tmp_path / "parts", world_size=2, part=(i, 2))
    written = [
        json.loads((tmp_path / name / "lowbit.json").read_text())
        for name in ("two", "again", "parts")
    ]
    assert written[0]["tensors"] == written[1]["tensors"] == written[2]["tensors"]
    for name in ("two", "again", "parts"):
        checkpoint.verify(tmp_path / name)
        for box in ([slice(128, 256), slice(None)], [slice(None), slice(256, 512)]):
            part = torch.zeros_like(t[tuple(box)])
            offset = [s.start or 0 for s in box]
            reader = checkpoint.Reader(tmp_path / name)
            reader.read_metadata()
            wanted = [("w", offset, list(part.shape), part.data_ptr(), part.nbytes)]
            assert reader._reader.read_into(wanted, 1, True, None) == part.nbytes
            assert torch.equal(part, t[tuple(box)])


def test_memory_of_another_size_is_never_written(tmp_path):
    save({"w": torch.ones(4, 4)}, tmp_path / "run")
    reader = checkpoint.Reader(tmp_path / "run")
    reader.read_metadata()
    into = torch.zeros(4, 4, dtype=torch.float16)
    for wanted in (
        ("w", [0, 0], [4, 4], into.data_ptr(), into.nbytes),
        ("w", [0, 0], [4, 5], into.data_ptr(), 80),
        ("w", [2, 0], [4, 4], into.data_ptr(), 64),
    ):
        with pytest.raises(ValueError, match=r"do not hold|not inside"):
            reader._reader.read_into([wanted], 1, True, None)
    assert not into.any()
