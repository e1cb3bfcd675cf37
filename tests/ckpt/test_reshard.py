"""lowbit-ckpt reshard: layouts of meshes, speed's shortcuts that must not show, and every way in
which a machine can stop it.
"""

import filecmp
import functools
import json
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import zstandard

from tests.ckpt.ckpt_folders import assert_torch_reads, inspect, same, saved
from tests.support.files.systems import mounted
from tests.support.peers.files import TOOL, need_tool, run
from tests.support.require import need
from tests.support.shim import preloaded

pytestmark = pytest.mark.long

need_tool()


def metadata(path: Path):
    return pickle.loads((path / ".metadata").read_bytes())


def boxes(path: Path, name: str) -> dict[int, tuple]:
    """Offsets and sizes of a tensor's chunks by the rank whose file holds them."""
    m = metadata(path)
    files = {tuple(i.offset): s.relative_path for i, s in m.storage_data.items() if i.fqn == name}
    return {
        int(files[tuple(c.offsets)].split("_")[2]): (tuple(c.offsets), tuple(c.sizes))
        for c in m.state_dict_metadata[name].chunks
    }


@pytest.mark.parametrize(
    "mesh, dims", [((2, 2), (0, 1)), ((2, 3), (1, 0)), ((2, 2), (0, 0)), ((3, 2), (0, 1))]
)
def test_meshes_cut_as_dtensor_does(tmp_path, mesh, dims):
    from torch.distributed.tensor import Shard

    state = {
        "w": torch.arange(7 * 11 * 3, dtype=torch.float32).reshape(7, 11, 3),
        "b": torch.arange(10.0),
        "one": torch.tensor(4.0),
        "none": torch.empty(0, 4),
    }
    saved(tmp_path / "a", state)
    text = "x".join(map(str, mesh)), ",".join(map(str, dims))
    run("reshard", tmp_path / "a", tmp_path / "b", "--mesh", text[0], "--dims", text[1])
    assert_torch_reads(tmp_path / "b", state)
    for name in ("w", "b"):
        wanted = {}
        for rank in range(mesh[0] * mesh[1]):
            coordinates = (rank // mesh[1], rank % mesh[1])
            offset, size = [0] * state[name].dim(), list(state[name].shape)
            if any(d >= len(size) and c for d, c in zip(dims, coordinates, strict=True)):
                continue
            for parts, d, c in zip(mesh, dims, coordinates, strict=True):
                if d < len(size):
                    mine, at = Shard.local_shard_size_and_offset(size[d], parts, c)
                    size[d], offset[d] = mine, offset[d] + at
            if all(size):
                wanted[rank] = (tuple(offset), tuple(size))
        assert boxes(tmp_path / "b", name) == wanted
    run("reshard", tmp_path / "b", tmp_path / "c", "--world-size", 3)
    assert_torch_reads(tmp_path / "c", state)


def test_threads_and_memory_change_no_byte(tmp_path):
    state = saved(tmp_path / "a")
    run("reshard", tmp_path / "a", tmp_path / "a3", "--world-size", 3)
    for name, extra in (("b", ["--threads", 1]), ("c", ["--threads", 7, "--memory-limit", "1M"])):
        run("reshard", tmp_path / "a3", tmp_path / name, "--mesh", "2x2", *extra)
    names = sorted(os.listdir(tmp_path / "b"))
    assert "lowbit.json" in names and names == sorted(os.listdir(tmp_path / "c"))
    different = filecmp.cmpfiles(tmp_path / "b", tmp_path / "c", names, shallow=False)[1:]
    # The metadata names its own folder, and the digests have one of it.
    assert different == ([".metadata", "lowbit.json"], [])
    digests = [json.loads((tmp_path / name / "lowbit.json").read_text()) for name in ("b", "c")]
    assert digests[0].pop("metadata") != digests[1].pop("metadata") and digests[0] == digests[1]
    assert_torch_reads(tmp_path / "c", state)


def test_a_dry_run_writes_nothing(tmp_path):
    saved(tmp_path / "a")
    plan = json.loads(
        run(
            "reshard", tmp_path / "a", tmp_path / "b", "--world-size", 4, "--dry-run", "--json"
        ).stdout
    )
    assert os.listdir(tmp_path) == ["a"]
    done = json.loads(
        run("reshard", tmp_path / "a", tmp_path / "b", "--world-size", 4, "--json").stdout
    )
    assert {k: v for k, v in plan.items() if k != "dry_run"} == {
        k: v for k, v in done.items() if k != "dry_run"
    }
    assert 0 < plan["copied"] < plan["chunks"]


def test_globs_choose_what_is_taken(tmp_path):
    saved(tmp_path / "a")
    run(
        "reshard",
        tmp_path / "a",
        tmp_path / "b",
        "--world-size",
        2,
        "--include",
        "model.layers.[0-3].*",
        "--include",
        "optim.*",
        "--exclude",
        "*.param_groups.*",
    )
    names = set(metadata(tmp_path / "b").state_dict_metadata)
    assert names == {f"model.layers.{i}.weight" for i in range(4)} | {
        "optim.state.a.b.weight.step",
        "optim.state.a.b.weight.exp_avg",
    }
    error = run(
        "reshard", tmp_path / "a", tmp_path / "c", "--world-size", 2, "--include", "modle.*", code=2
    )
    assert "modle" in error.stderr and not (tmp_path / "c").exists()


def test_what_was_written_can_be_held_against_its_digests(tmp_path):
    """lowbit.json has a digest of every chunk's row-major bytes,
    of rewritten and of copied ones alike.
    """
    saved(tmp_path / "a")
    run("reshard", tmp_path / "a", tmp_path / "b", "--world-size", 3)
    run("reshard", tmp_path / "b", tmp_path / "c", "--world-size", 3)  # everything copied
    run("reshard", tmp_path / "a", tmp_path / "d", "--world-size", 1)
    run("reshard", tmp_path / "d", tmp_path / "e", "--world-size", 3)  # everything rewritten
    digests = [json.loads((tmp_path / n / "lowbit.json").read_text()) for n in "bce"]
    assert len({said.pop("metadata") for said in digests}) == 3  # which names its own folder
    assert digests[0] == digests[1] == digests[2]
    tensors = digests[0]["tensors"]
    m = metadata(tmp_path / "b")
    for name, entry in tensors.items():
        offsets = {",".join(map(str, c.offsets)) for c in m.state_dict_metadata[name].chunks}
        assert set(entry["chunks"]) == offsets and all(
            len(d) == 32 for d in entry["chunks"].values()
        )
    one = json.loads((tmp_path / "d" / "lowbit.json").read_text())["tensors"]
    assert one["model.layers.0.weight"]["chunks"] == tensors["model.layers.0.weight"]["chunks"]
    assert (
        one["model.layers.8.weight"]["chunks"]["0,0"]
        != tensors["model.layers.8.weight"]["chunks"]["0,0"]
    )


# zstd

compress = zstandard.ZstdCompressor().compress


def pack(path: Path, change=lambda name, frame: frame, transform="stream.zstd/1") -> None:
    """Turns every item into a zstd frame, as torch's ZStandard extension writes them."""
    m = metadata(path)
    whole = {f.name: f.read_bytes() for f in path.glob("*.distcp")}
    parts: dict[str, bytes] = dict.fromkeys(whole, b"")
    for index, info in m.storage_data.items():
        item = whole[info.relative_path][info.offset : info.offset + info.length]
        frame = change(index.fqn, compress(item))
        info.offset, info.length = len(parts[info.relative_path]), len(frame)
        info.transform_descriptors = [transform]
        parts[info.relative_path] += frame
    for name, data in parts.items():
        (path / name).write_bytes(data)
    (path / ".metadata").write_bytes(pickle.dumps(m))


def test_zstd_items(tmp_path, monkeypatch):
    state = saved(tmp_path / "a")
    digest = inspect(tmp_path / "a")["digest"]
    run("reshard", tmp_path / "a", tmp_path / "z", "--world-size", 2)
    pack(tmp_path / "z")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    assert inspect(tmp_path / "z")["digest"] == digest
    for ranks in (1, 2, 3):
        run("reshard", tmp_path / "z", tmp_path / f"to{ranks}", "--world-size", ranks)
        assert_torch_reads(tmp_path / f"to{ranks}", state)
    assert not list(scratch.iterdir())


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda frame: frame[:-5], "cut off"),
        (lambda frame: frame + b"x", "follows"),
        (lambda frame: frame[:40] + bytes([frame[40] ^ 0x55]) + frame[41:], ""),
        (lambda frame: b"PK" + frame[2:], "zstd"),
        (lambda frame: compress(bytes(1 << 26)), "more than"),
        (lambda frame: compress(b"no archive"), "zip"),
    ],
)
def test_broken_zstd_items(tmp_path, change, words):
    saved(tmp_path / "a", {"x": torch.arange(4096.0), "y": torch.ones(3)})
    pack(tmp_path / "a", lambda name, frame: change(frame) if name == "x" else frame)
    error = run("reshard", tmp_path / "a", tmp_path / "b", "--world-size", 2, code=3).stderr
    assert words in error and error.count("\n") == 1 and os.listdir(tmp_path) == ["a"]


def test_other_transforms_are_refused_by_name(tmp_path):
    saved(tmp_path / "a", {"x": torch.ones(3)})
    pack(tmp_path / "a", transform="stream.lz77/2")
    assert (
        "stream.lz77/2"
        in run("reshard", tmp_path / "a", tmp_path / "b", "--world-size", 2, code=3).stderr
    )


# Damage, and sources that move.


def test_damage_anywhere_in_a_record_is_found(tmp_path):
    """The first byte and the last, of items that are copied, cut by rows, cut by columns,
    and of a value.
    """
    base = torch.arange(64 * 64.0).reshape(64, 64)
    saved(tmp_path / "a", {"x": base.clone(), "lr": 0.5})
    path = tmp_path / "a"
    m = metadata(path)
    info = next(s for i, s in m.storage_data.items() if i.fqn == "x")
    file = path / info.relative_path
    whole = file.read_bytes()
    start = whole.index(base.numpy().tobytes())
    for at in (0, 64 * 64 * 4 - 1):
        file.write_bytes(
            whole[: start + at] + bytes([whole[start + at] ^ 1]) + whole[start + at + 1 :]
        )
        for mesh in ("1", "2", "1x4"):  # copied as it is, by rows, by columns
            error = run("reshard", path, tmp_path / "b", "--mesh", mesh, code=3).stderr
            assert "checksum" in error and "x" in error
    value = next(s for i, s in m.storage_data.items() if i.fqn == "lr")
    at = whole.index(b"G?", value.offset) + 4
    file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    assert "checksum" in run("reshard", path, tmp_path / "b", "--world-size", 2, code=3).stderr
    assert os.listdir(tmp_path) == ["a"]


def big(path: Path, mib: int) -> None:
    saved(path, {f"x{i}": torch.randn(1024, 256) for i in range(mib)})


def partials(folder: Path) -> list[str]:
    return [n for n in os.listdir(folder) if ".partial-" in n]


def start(*arguments) -> subprocess.Popen:
    # A shell that runs the tests in the background ignores Ctrl-C, and so would they.
    heeds = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(
        [TOOL, *map(str, arguments)], stderr=subprocess.PIPE, text=True, preexec_fn=heeds
    )


def stopped(folder: Path, *more: object) -> subprocess.Popen:
    """A reshard from a/ to b/ that is stopped before it has written half. Where the machine left
    this process waiting for so long that it was not, another.
    """
    size = sum(file.stat().st_size for file in (folder / "a").iterdir())
    for _ in range(100):
        process = start("reshard", folder / "a", folder / "b", "--world-size", 3, *more)
        while not partials(folder) and process.poll() is None:
            time.sleep(0.0005)
        if process.returncode is None:
            os.kill(process.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        found = [file for name in partials(folder) for file in (folder / name).iterdir()]
        if found and sum(file.stat().st_size for file in found) < size // 2:
            return process
        process.send_signal(signal.SIGCONT)
        error = process.communicate()[1]
        assert process.returncode == 0, error
        shutil.rmtree(folder / "b")
    raise AssertionError("100 times it was not seen in the middle of its work")


def test_a_source_that_changes_meanwhile_is_noticed(tmp_path):
    big(tmp_path / "a", 64)
    file = next((tmp_path / "a").glob("*.distcp"))
    process = stopped(tmp_path, "--threads", 1)
    with file.open("r+b") as f:  # the last bytes: not read yet, and no tensor's
        f.seek(-1, os.SEEK_END)
        last = f.read(1)
        f.seek(-1, os.SEEK_END)
        f.write(last)
    process.send_signal(signal.SIGCONT)
    error = process.communicate()[1]
    assert process.returncode == 3 and "changed" in error, error
    assert sorted(os.listdir(tmp_path)) == ["a"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(tmp_path, number):
    big(tmp_path / "a", 64)
    process = stopped(tmp_path)
    process.send_signal(number)
    process.send_signal(signal.SIGCONT)
    error = process.communicate()[1]
    assert process.returncode == 1 and "interrupted" in error, error
    assert os.listdir(tmp_path) == ["a"]


def test_an_interrupted_part_says_what_it_leaves(tmp_path):
    big(tmp_path / "a", 64)
    process = stopped(tmp_path, "--part", "0/1")
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    error = process.communicate()[1]
    pieces = tmp_path / ".b.partial-pieces"
    assert process.returncode == 1 and f"interrupted; what parts wrote lies in {pieces}" in error
    assert "nothing was left" not in error and pieces.is_dir()
    run("reshard", tmp_path / "a", tmp_path / "b", "--world-size", 3, "--part", "0/1")
    run("verify", tmp_path / "b")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_killed_at_any_moment(tmp_path):
    big(tmp_path / "a", 24)
    before = {f.name: f.read_bytes() for f in (tmp_path / "a").iterdir()}
    begin = time.monotonic()
    run("reshard", tmp_path / "a", tmp_path / "whole", "--world-size", 3)
    duration = time.monotonic() - begin
    moments = random.Random(5)
    for _ in range(20):
        process = start("reshard", tmp_path / "a", tmp_path / "b", "--world-size", 3)
        time.sleep(moments.uniform(0, duration))
        process.kill()
        process.communicate()
        for left in partials(tmp_path):
            assert "killed" in run("inspect", tmp_path / left, code=3).stderr
            shutil.rmtree(tmp_path / left)
        if (tmp_path / "b").exists():
            for file in (tmp_path / "whole").glob("*.distcp"):
                assert (tmp_path / "b" / file.name).read_bytes() == file.read_bytes()
            shutil.rmtree(tmp_path / "b")
    assert {f.name: f.read_bytes() for f in (tmp_path / "a").iterdir()} == before


def test_a_limit_of_files_is_one_clear_error(tmp_path):
    big(tmp_path / "a", 8)
    limit = 1 << 20

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    done = subprocess.run(
        [TOOL, "reshard", tmp_path / "a", tmp_path / "b", "--world-size", "2"],
        capture_output=True,
        text=True,
        preexec_fn=limited,
    )
    assert done.returncode == 1 and "largest file" in done.stderr and done.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == ["a"]


def test_a_full_disk_is_one_clear_error(tmp_path):
    big(tmp_path / "a", 8)
    target = tmp_path / "disk" / "b"
    with mounted(tmp_path / "disk", "tmpfs", "4m") as disk:
        done = subprocess.run(
            [*disk.enter, TOOL, "reshard", tmp_path / "a", target, "--world-size", "2"],
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 1 and "disk is full" in done.stderr
        assert done.stderr.count("\n") == 1
        assert str(target) in done.stderr and ".partial" not in done.stderr
        assert os.listdir(disk.seen) == []


def test_only_checkpoints_are_replaced_and_never_the_source(tmp_path):
    saved(tmp_path / "a", {"x": torch.ones(4)})
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years")
    error = run("reshard", tmp_path / "a", tmp_path / "home", "--world-size", 2, "--force", code=2)
    assert "something else" in error.stderr and (tmp_path / "home" / "thesis.txt").exists()
    for target in (tmp_path / "a", tmp_path / "home" / ".." / "a"):
        error = run("reshard", tmp_path / "a", target, "--world-size", 2, "--force", code=2)
        assert "source" in error.stderr
    assert_torch_reads(tmp_path / "a", {"x": torch.ones(4)})


def test_file_systems_that_cannot_exchange_folders(tmp_path):
    """renameat2 that always says EINVAL, as NFS does, in front of libc's."""
    shim = preloaded(
        tmp_path,
        "#include <errno.h>\nint renameat2(int a, const char* b, int c, const char* d, unsigned e) "
        "{ errno = EINVAL; return -1; }\n",
    )
    saved(tmp_path / "a", {"x": torch.arange(8.0)})
    for ranks, force in ((2, []), (3, ["--force"])):
        subprocess.run(
            [TOOL, "reshard", tmp_path / "a", tmp_path / "b", "--world-size", str(ranks), *force],
            check=True,
            env=os.environ | shim,
        )
        assert inspect(tmp_path / "b")["files"] == ranks
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "shim.c", "shim.so"]


def test_file_systems_without_links(tmp_path):
    """Nor any flag of renameat2: some of FUSE, and shares of Windows."""
    shim = preloaded(
        tmp_path,
        "#include <errno.h>\nint renameat2(int a, const char* b, int c, const char* d, unsigned e) "
        "{ errno = EINVAL; return -1; }\n"
        "int link(const char* a, const char* b) { errno = EPERM; return -1; }\n",
    )
    env = os.environ | shim
    state = {"x": torch.arange(8.0)}
    saved(tmp_path / "a", state)
    one = [TOOL, "convert", tmp_path / "a", tmp_path / "b.pt"]
    subprocess.run(one, check=True, env=env)
    assert torch.equal(torch.load(tmp_path / "b.pt")["x"], state["x"])
    again = subprocess.run(one, env=env, capture_output=True, text=True)
    assert again.returncode == 2 and "--force" in again.stderr
    subprocess.run([*one, "--force"], check=True, env=env)
    for part in ("0/2", "1/2"):
        cut = ["reshard", tmp_path / "a", tmp_path / "c", "--world-size", "2", "--part", part]
        subprocess.run([TOOL, *cut], check=True, env=env)
    assert_torch_reads(tmp_path / "c", state)
    assert sorted(os.listdir(tmp_path)) == ["a", "b.pt", "c", "shim.c", "shim.so"]


# Size.


def measured(*arguments) -> tuple[float, int]:
    """Processor seconds and peak memory.
    A small process starts the tool: a child's peak counts what its parent had.
    """
    program = (
        "import os, sys; _, s, u = os.wait4(os.spawnv(os.P_NOWAIT, sys.argv[1], sys.argv[1:]), 0); "
        "print(s, u.ru_utime + u.ru_stime, u.ru_maxrss)"
    )
    words = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, TOOL, *map(str, arguments), "--quiet"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert words[0] == "0"
    return float(words[1]), int(words[2]) << 10


def test_many_chunks_in_little_time_and_memory(tmp_path):
    """48,000 chunks: nothing is quadratic, and little is kept of each."""
    state = {f"x{i}": torch.full((32, 2), float(i)) for i in range(1500)}
    saved(tmp_path / "a", state)
    run("reshard", tmp_path / "a", tmp_path / "b", "--world-size", 32)
    assert (
        sum(len(t.chunks) for t in metadata(tmp_path / "b").state_dict_metadata.values()) == 48_000
    )
    for ranks, name in ((3, "c"), (32, "d")):
        seconds, peak = measured("reshard", tmp_path / "b", tmp_path / name, "--world-size", ranks)
        assert seconds < 10 and peak < 128 << 20  # 64 MiB, and the limit of buffers
    assert_torch_reads(tmp_path / "c", state)


def test_transposed_items_stay_right(tmp_path):
    state = {"t": torch.arange(500 * 700.0).reshape(500, 700).t()}
    saved(tmp_path / "a", state)
    for mesh in ("1", "3", "2x2"):
        run("reshard", tmp_path / "a", tmp_path / mesh, "--mesh", mesh)
        target = {"t": torch.zeros(700, 500)}
        dcp.load(target, checkpoint_id=tmp_path / mesh, no_dist=True)
        assert same(target["t"], state["t"])


# Quantized state of torchao: blocks move, bits stay.


@pytest.mark.parametrize("bits", ["8bit", "4bit", "fp8"])
def test_torchao_state_is_cut_between_blocks(tmp_path, bits):
    need("torchao", bool(find_spec("torchao")), "torchao is not installed")
    from torchao.optim.subclass_4bit import OptimState4bit
    from torchao.optim.subclass_8bit import OptimState8bit
    from torchao.optim.subclass_fp8 import OptimStateFp8

    kind = {"8bit": OptimState8bit, "4bit": OptimState4bit, "fp8": OptimStateFp8}[bits]
    shape, block = (24, 96), 256
    state = kind.zeros(shape, block_size=block) if bits == "fp8" else kind.zeros(shape, True, block)
    state.copy_(torch.randn(shape))
    wanted = state.dequantize()
    saved(tmp_path / "a", {"exp_avg": state, "step": torch.tensor(3.0)})

    def read(path):
        target = torch.zeros(shape)
        dcp.load({"exp_avg": target}, checkpoint_id=path, no_dist=True)
        return target

    for source, ranks in (("a", 3), ("3", 1), ("3", 9)):
        # 24 rows of 96: every 8 rows are 3 blocks
        target = tmp_path / f"{source}to{ranks}"
        if ranks == 9:
            error = run("reshard", tmp_path / source, target, "--world-size", 9, code=3).stderr
            assert "exp_avg" in error and "row 3 " in error and "0 and 8" in error
            continue
        run("reshard", tmp_path / source, target, "--world-size", ranks)
        assert torch.equal(read(target), wanted)
        if ranks == 3:
            target.rename(tmp_path / "3")
        else:
            whole = {
                "exp_avg": kind.zeros(shape, block_size=block)
                if bits == "fp8"
                else kind.zeros(shape, True, block)
            }
            dcp.load(whole, checkpoint_id=target, no_dist=True)
            assert torch.equal(
                whole["exp_avg"].codes.view(torch.uint8), state.codes.view(torch.uint8)
            )
            assert torch.equal(whole["exp_avg"].scale, state.scale)
    run("reshard", tmp_path / "a", tmp_path / "same", "--world-size", 1)
    assert torch.equal(read(tmp_path / "same"), wanted)
    error = run("reshard", tmp_path / "a", tmp_path / "columns", "--mesh", "1x2", code=3).stderr
    assert "dimension 0" in error


@pytest.mark.parametrize("bits, block", [("8bit", 256), ("4bit", 128), ("fp8", 256)])
def test_torchao_state_is_requantized_inside_blocks_when_asked(tmp_path, bits, block):
    """Three ranks cut inside blocks; the parts are what torchao makes of the same numbers on a rank
    of that size.
    """
    need("torchao", bool(find_spec("torchao")), "torchao is not installed")
    from torchao.optim.subclass_4bit import OptimState4bit
    from torchao.optim.subclass_8bit import OptimState8bit
    from torchao.optim.subclass_fp8 import OptimStateFp8

    kind = {"8bit": OptimState8bit, "4bit": OptimState4bit, "fp8": OptimStateFp8}[bits]

    def zeros(shape):
        return (
            kind.zeros(shape, block_size=block) if bits == "fp8" else kind.zeros(shape, True, block)
        )

    shape = (290, block // 2)  # 97, 97 and 96 rows: 48.5, 48.5 and 48 blocks
    state = zeros(shape)
    state.copy_(torch.randn(shape))
    numbers = state.dequantize()
    saved(tmp_path / "a", {"exp_avg": state, "step": torch.tensor(3.0)})
    refused = run("reshard", tmp_path / "a", tmp_path / "b", "--world-size", 3, code=3)
    assert "--requantize" in refused.stderr and not (tmp_path / "b").exists()
    done = run("reshard", tmp_path / "a", tmp_path / "b", "--world-size", 3, "--requantize")
    assert "2 chunks" in done.stderr  # the third begins at a block
    run("verify", tmp_path / "b")

    got = torch.zeros(shape)
    dcp.load({"exp_avg": got}, checkpoint_id=tmp_path / "b", no_dist=True)
    assert torch.equal(got, numbers)  # parts that are not a multiple of a block are plain
    # And together again: what was plain gets codes, what has codes keeps its meaning.
    run("reshard", tmp_path / "b", tmp_path / "c", "--world-size", 1, code=3)
    run("reshard", tmp_path / "b", tmp_path / "c", "--world-size", 1, "--requantize")
    whole, wanted = zeros(shape), zeros(shape)
    wanted.copy_(got)
    dcp.load({"exp_avg": whole}, checkpoint_id=tmp_path / "c", no_dist=True)
    assert torch.equal(whole.codes.view(torch.uint8), wanted.codes.view(torch.uint8))
    assert torch.equal(whole.scale, wanted.scale)
