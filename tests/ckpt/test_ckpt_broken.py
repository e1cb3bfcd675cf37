"""lowbit-ckpt on broken and hostile directories: one line, exit 3, no output."""

import os
import pickle
import shutil
import signal
import struct
import subprocess
import time

import pytest
import torch

from tests.ckpt.ckpt_folders import inspect, saved, small
from tests.support.peers.files import TOOL, need_tool, run

pytestmark = pytest.mark.slow

need_tool()


@pytest.fixture
def source(tmp_path):
    return small(tmp_path)


def refused(tmp_path, *words):
    for command in (
        ("inspect", tmp_path / "a", "--digest"),
        ("reshard", tmp_path / "a", tmp_path / "out", "--world-size", 2),
    ):
        done = run(*command, code=3)
        assert done.stderr.startswith("lowbit-ckpt: ") and done.stderr.count("\n") == 1, done.stderr
        assert all(word in done.stderr for word in words), done.stderr
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith((".", "out"))) == [], (
        "something was left behind"
    )
    return done.stderr


def edit(tmp_path, change):
    """Lets `change` edit the unpickled metadata."""
    path = tmp_path / "a" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def first(metadata, fqn="x"):
    return next(info for index, info in metadata.storage_data.items() if index.fqn == fqn)


def test_a_callable_in_the_metadata_is_named_and_not_called(source):
    marker = source / "executed"
    path = source / "a" / ".metadata"
    body = path.read_bytes()
    evil = (
        b"\x80\x04cposix\nsystem\n(X"
        + struct.pack("<I", len(f"touch {marker}"))
        + f"touch {marker}".encode()
        + b"tR0"
    )
    path.write_bytes(evil + body[2:])
    refused(source, "posix.system", "allowlist")
    assert not marker.exists()


def test_a_callable_in_a_value_is_shown_as_opaque_and_copied(tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.system, (f"touch {tmp_path / 'executed'}",))

    saved(tmp_path / "a", {"x": torch.ones(3), "lr": Evil()})
    assert inspect(tmp_path / "a")["values"]["lr"] == "<not plain data>"
    run("reshard", tmp_path / "a", tmp_path / "b", "--world-size", 2)
    assert not (tmp_path / "executed").exists()


def test_a_truncated_data_file(source):
    file = next((source / "a").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-100])
    refused(source, file.name, "cut off")


@pytest.mark.parametrize("keep", [0, 1, 100, -1, -50])
def test_a_truncated_metadata(source, keep):
    path = source / "a" / ".metadata"
    path.write_bytes(path.read_bytes()[:keep])
    refused(source, ".metadata")


def test_a_hole_in_the_chunk_map(source):
    run("reshard", source / "a", source / "four", "--world-size", 4)
    shutil.rmtree(source / "a")
    (source / "four").rename(source / "a")

    def drop(metadata):
        entry = metadata.state_dict_metadata["x"]
        gone = entry.chunks.pop(2)
        index = next(i for i in metadata.storage_data if i.fqn == "x" and i.offset == gone.offsets)
        del metadata.storage_data[index]

    edit(source, drop)
    refused(source, "x", "a part is missing")


def test_overlapping_chunks(source):
    def overlap(metadata):
        entry = metadata.state_dict_metadata["x"]
        entry.chunks = [
            type(entry.chunks[0])(torch.Size([o, 0]), torch.Size([n, 64]))
            for o, n in ((0, 40), (30, 24))
        ]
        info = first(metadata)
        metadata.storage_data = {i: s for i, s in metadata.storage_data.items() if i.fqn != "x"}
        for chunk in entry.chunks:
            metadata.storage_data[type(next(iter(metadata.storage_data)))("x", chunk.offsets)] = (
                info
            )

    edit(source, overlap)
    refused(source, "overlap")


@pytest.mark.parametrize(
    "path", ["../secret", "/etc/passwd", "..", "", "a/b", "sub/../__0_0.distcp", "link"]
)
def test_paths_out_of_the_folder(source, path):
    (source / "secret").write_bytes(b"secret" * 1000)
    (source / "a" / "link").symlink_to(source / "secret")
    edit(source, lambda m: setattr(first(m), "relative_path", path))
    error = refused(source)
    assert "leads out" in error or "is a link" in error


@pytest.mark.parametrize(
    "field, value, words",
    [
        ("offset", 10**12, "cut off"),
        ("length", 10**15, "cut off"),
        ("offset", -1, "offset"),
        ("offset", 1, ""),
        ("length", 22, ""),
    ],
)
def test_items_that_are_not_where_they_are_said_to_be(source, field, value, words):
    edit(source, lambda m: setattr(first(m), field, value))
    refused(source, words)


def test_metadata_that_disagrees_with_the_items(source):
    before = (source / "a" / ".metadata").read_bytes()
    edit(
        source, lambda m: m.state_dict_metadata["x"].properties.__setattr__("dtype", torch.float16)
    )
    refused(source, "float32", "float16")
    (source / "a" / ".metadata").write_bytes(before)

    def reshape(metadata):
        entry = metadata.state_dict_metadata["x"]
        entry.size = torch.Size([32, 128])
        entry.chunks = [type(entry.chunks[0])(torch.Size([0, 0]), torch.Size([32, 128]))]

    edit(source, reshape)
    refused(source, "[64, 64]", "[32, 128]")


def test_every_flipped_byte_of_the_data_is_noticed_or_harmless(source):
    """Flips bytes all over the data file: each is refused, or leaves every value as it was."""
    file = next((source / "a").glob("*.distcp"))
    whole, digest = file.read_bytes(), inspect(source / "a")["digest"]
    refusals = 0
    for at in range(0, len(whole), 211):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        done = subprocess.run(
            [TOOL, "inspect", source / "a", "--digest"], capture_output=True, text=True
        )
        assert done.returncode in (0, 3), (at, done.stderr)
        refusals += done.returncode == 3
        assert done.returncode == 3 or digest in done.stdout, at
    assert refusals > len(whole) // 211 * 0.8  # tensor bytes are most of the file
    file.write_bytes(whole)
    assert inspect(source / "a")["digest"] == digest


def test_a_save_that_did_not_finish(source):
    (source / "a" / ".metadata").unlink()
    refused(source, "did not finish")


@pytest.mark.parametrize(
    "body, word",
    [
        (b"\x80\x04r\x00\x00\x00\x08.", "empty stack"),
        (b"\x80\x04Nr\xff\xff\xff\x7f.", "memo"),
        (b"\x80\x04" + b"(" * 5_000_000 + b".", "deep"),
        (b"\x80\x04B\xff\xff\xff\xff.", "ends inside"),
        (b"\x80\x04\x8a\xff" + b"\x01" * 255 + b".", "expected a Metadata"),
        (b"\x80\x04N0.", "opcode"),
        (b"\x80\x04NN.", "exactly one"),
        (b"\x80\x04N.N.", "behind its STOP"),
        (b"\x80\x04}(K\x01u.", "without a value"),
        (b"\x80\x04h\x05.", "memo"),
        (b"\x80\x04i" + b"os\nsystem\n.", "opcode"),
        (b"\x80\x04\x82\x01.", "opcode"),
        (b"\x80\x04N.", "Metadata"),
    ],
)
def test_pickle_bombs_and_tricks(source, body, word):
    (source / "a" / ".metadata").write_bytes(body)
    refused(source, word)


def test_a_damaged_item_is_said_with_its_path(source):
    """Of two folders with files of the same names, the message says which."""
    run("reshard", source / "a", source / "b", "--world-size", 3)
    file = source / "b" / "__1_0.distcp"
    whole = file.read_bytes()
    for at in range(len(whole) // 2, len(whole)):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        error = run("verify", source / "b", code=3).stderr
        if "checksum" in error:
            break
    assert error.startswith(f"lowbit-ckpt: {file}: ") and "the file is damaged" in error
    run("reshard", source / "a", source / "whole", "--world-size", 3)
    for pair in (("whole", "b"), ("b", "whole")):
        assert run("diff", *(source / name for name in pair), code=3).stderr == error
    file.write_bytes(whole[:100])
    cut = run("diff", source / "whole", source / "b", code=3).stderr
    assert cut.startswith(f"lowbit-ckpt: {file}: ") and "cut off" in cut


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_what_may_not_be_read_is_no_damage(source):
    os.chmod(source, 0o700)
    for path in (source, source / "a", source / "nothing"):
        try:
            done = subprocess.run(
                [TOOL, "verify", path], user=65534, capture_output=True, text=True
            )
        except PermissionError:
            pytest.skip("another user may not run lowbit-ckpt here")
        assert done.returncode == 1 and "Permission denied" in done.stderr


def test_a_killed_reshard_leaves_the_old_folder_whole(tmp_path):
    saved(
        tmp_path / "a",
        {"x": torch.zeros(64 << 20, dtype=torch.uint8).reshape(8192, -1), "y": torch.ones(4)},
    )
    run("reshard", tmp_path / "a", tmp_path / "b", "--world-size", 2)
    before = inspect(tmp_path / "b")["digest"]
    for delay in (0.0, 0.01, 0.03):
        for target, force in ((tmp_path / "new", []), (tmp_path / "b", ["--force"])):
            process = subprocess.Popen(
                [TOOL, "reshard", tmp_path / "a", target, "--world-size", "3", *force],
                stdout=subprocess.DEVNULL,
            )
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
            process.wait()
            shutil.rmtree(tmp_path / "new") if (tmp_path / "new" / ".metadata").exists() else None
            assert not (tmp_path / "new").exists()
            assert inspect(tmp_path / "b")["digest"] == before
