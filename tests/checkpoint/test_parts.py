"""One reshard by several processes, as on machines that share a file system:
`lowbit-ckpt reshard --part I/N`, and the same from Python.
"""

import concurrent.futures
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lowbit import checkpoint
from tests.checkpoint.storage import shared_reads_worker
from tests.support.files import megatron
from tests.support.peers.files import TOOL
from tests.support.shim import preloaded

pytestmark = pytest.mark.slow

HIDDEN = ".out.partial-pieces"
SHAPES = [(512, 300), (7, 40), (1000,), (), (64, 64, 9), (0, 4), (3, 5)]


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A directory of two ranks; the working folder is beside it."""
    torch.manual_seed(0)
    state = {f"t{i}": torch.randn(shape) for i, shape in enumerate(SHAPES)}
    state["groups"] = [{"lr": 0.1, "betas": [0.9, 0.999]}]
    dcp.save(state, storage_writer=checkpoint.Writer(tmp_path / "one"), no_dist=True)
    checkpoint.reshard(tmp_path / "one", tmp_path / "source", world_size=2)
    (tmp_path / "parts").mkdir()
    (tmp_path / "whole").mkdir()
    monkeypatch.chdir(tmp_path / "parts")
    return "../source"


def content(folder):
    return {path.name: path.read_bytes() for path in pathlib.Path(folder).iterdir()}


def whole(monkeypatch, source, **options):
    """What one process writes to the same relative path."""
    with monkeypatch.context() as patched:
        patched.chdir("../whole")
        checkpoint.reshard(source, "out", **options)
        return content("out")


@pytest.mark.parametrize(
    "options",
    [
        {"world_size": 5},
        {"mesh": {0: 3, 1: 4}},
        {"world_size": 2},
        {"world_size": 1, "manifest": False},
    ],
)
@pytest.mark.parametrize("parts", [1, 3, 8])
def test_parts_in_any_order_write_the_bytes_of_one_process(source, monkeypatch, options, parts):
    want = whole(monkeypatch, source, **options)
    order = random.Random(parts).sample(range(parts), parts)
    for done, i in enumerate(order, 1):
        report = checkpoint.reshard(source, "out", part=(i, parts), **options)
        assert report["part"] == f"{i}/{parts}" and report["published"] == (done == parts)
        assert report["missing"] == sorted(set(range(parts)) - set(order[:done]))
        assert os.path.exists("out") == (done == parts)
    assert content("out") == want and os.listdir(".") == ["out"]


def test_eight_parts_at_once(source, monkeypatch):
    want = whole(monkeypatch, source, world_size=6)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        reports = list(
            pool.map(
                lambda i: checkpoint.reshard(source, "out", world_size=6, part=(i, 8)), range(8)
            )
        )
    assert any(report["published"] for report in reports)
    assert content("out") == want and os.listdir(".") == ["out"]


def test_eight_processes_at_once_two_of_them_killed(source, monkeypatch):
    """Killed at any moment after the first of them began; again,
    until one was killed before its end.
    """
    want = whole(monkeypatch, source, world_size=6)
    seed = random.randrange(1 << 32)
    chance, killed, attempts = random.Random(seed), 0, 0

    def start(i):
        command = [TOOL, "reshard", source, "out", "--world-size", "6", "--part", f"{i}/8"]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    while killed == 0:
        attempts += 1
        assert attempts <= 50, seed
        parts = [start(i) for i in range(8)]
        while not os.path.exists(HIDDEN) and not os.path.exists("out"):
            time.sleep(0.0005)
        time.sleep(chance.random() * 0.02)
        for i in (2, 5):
            parts[i].kill()
            assert parts[i].wait() in (0, -signal.SIGKILL), seed
            killed += parts[i].returncode != 0
        again = {i: start(i) for i in (2, 5) if parts[i].returncode != 0}
        for i, process in enumerate(parts):
            said = process.communicate()[1]
            assert i in again or (said == b"" and process.returncode == 0), (seed, i, said)
        for process in again.values():
            said, status = process.communicate()[1], process.returncode
            # Killed once it was complete: the others may have published before it began again.
            late = status == 2 and b"out exists: if all parts of this reshard have run" in said
            assert late or (said == b"" and status == 0), (seed, status, said)
        assert content("out") == want and os.listdir(".") == ["out"], seed
        shutil.rmtree("out")


def test_what_a_part_killed_while_it_cleaned_up_left_is_removed_by_the_next(source):
    checkpoint.reshard(source, "out", world_size=2, part=(0, 1))
    os.mkdir(".out.partial-remove")
    pathlib.Path(".out.partial-remove", "plan").write_text("of a part that was killed here")
    with pytest.raises(checkpoint.CheckpointError, match="out exists: if all parts"):
        checkpoint.reshard(source, "out", world_size=2, part=(0, 1))
    assert os.listdir(".") == ["out"]


# Killed by the system when it writes a file's byte of that number.
KILLED = """
import resource, signal, sys
from lowbit import checkpoint
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
checkpoint.reshard("../source", "out", world_size=6, part=(int(sys.argv[1]), 8))
"""


def test_a_part_that_cannot_write_names_its_file_and_what_is_left(source):
    checkpoint.reshard(source, "out", world_size=6, part=(3, 4))

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    command = [TOOL, "reshard", source, "out", "--world-size", "6", "--part", "0/4"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=limited)
    assert ended.returncode == 1 and "what other parts wrote lies in " + HIDDEN in ended.stderr
    assert "out/__0_0.distcp grows beyond" in ended.stderr
    assert not [path for path in os.listdir(HIDDEN) if path.startswith("__")]


def test_killed_parts_are_run_again(source, monkeypatch):
    want = whole(monkeypatch, source, world_size=6)
    sizes = {name: len(bytes_) for name, bytes_ in want.items() if name.endswith(".distcp")}
    killed = 0
    for i in (0, 3):
        ended = subprocess.run(
            [sys.executable, "-c", KILLED, str(i), str(max(sizes.values()) // 3)], check=False
        )
        killed += ended.returncode < 0
    assert killed == 2
    assert [name for name in os.listdir(HIDDEN) if name.startswith("__")]  # what they left
    for i in (5, 3, 1, 0, 7, 6, 2, 4):
        assert not os.path.exists("out")
        if i == 1:  # one that is complete may run again, too
            checkpoint.reshard(source, "out", world_size=6, part=(5, 8))
        report = checkpoint.reshard(source, "out", world_size=6, part=(i, 8))
    assert report["published"] and content("out") == want and os.listdir(".") == ["out"]


def test_a_part_that_was_killed_after_it_published_cleans_up(source):
    for i in range(3):
        checkpoint.reshard(source, "out", world_size=6, part=(i, 4))
    shutil.copytree(HIDDEN, "kept")
    checkpoint.reshard(source, "out", world_size=6, part=(3, 4))
    shutil.rmtree("kept/checkpoint")
    os.rename("kept", HIDDEN)
    before = content("out")
    assert checkpoint.reshard(source, "out", world_size=6, part=(3, 4))["published"]
    assert os.listdir(".") == ["out"] and content("out") == before


def test_parts_of_different_reshards_do_not_mix(source, tmp_path):
    checkpoint.reshard(source, "out", world_size=6, part=(0, 4))
    for change in ({"world_size": 5}, {"include": ["t0"]}, {"part": (1, 5)}, {"manifest": False}):
        options = {"world_size": 6, "part": (1, 4), **change}
        with pytest.raises(checkpoint.CheckpointError, match="another plan"):
            checkpoint.reshard(source, "out", **options)
    file = next((tmp_path / "source").glob("*.distcp"))
    os.utime(file, (1, 1))  # the source was rewritten meanwhile
    with pytest.raises(checkpoint.CheckpointError, match="the source has changed"):
        checkpoint.reshard(source, "out", world_size=6, part=(1, 4))
    with pytest.raises(checkpoint.CheckpointError, match="killed"):
        checkpoint.verify(HIDDEN)
    shutil.rmtree(HIDDEN)
    for i in range(4):
        checkpoint.reshard(source, "out", world_size=6, part=(i, 4))
    checkpoint.verify("out")
    with pytest.raises(checkpoint.CheckpointError, match=r"verify tells.*Parts replace nothing"):
        checkpoint.reshard(source, "out", world_size=6, part=(0, 4))
    with pytest.raises(checkpoint.CheckpointError, match="leave out force=True"):
        checkpoint.reshard(source, "out", world_size=6, part=(0, 4), force=True)
    for bad in ((4, 4), (-1, 4), (0, 0)):
        with pytest.raises(ValueError, match="from 0 to n - 1"):
            checkpoint.reshard(source, "other", world_size=6, part=bad)


def test_a_damaged_source_is_found_by_a_part(source, tmp_path):
    file = max((tmp_path / "source").glob("*.distcp"), key=lambda path: path.stat().st_size)
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 4
    file.write_bytes(damaged)
    failed = 0
    for i in range(4):
        try:
            checkpoint.reshard(source, "out", world_size=6, part=(i, 4))
        except checkpoint.CheckpointError as error:
            failed += 1
            assert file.name in str(error)
    assert failed and not os.path.exists("out")


def test_ranks_of_torchrun(source, pool, monkeypatch):
    want = whole(monkeypatch, source, world_size=4)
    reports = pool.run(2, shared_reads_worker.reshard_part, os.getcwd(), source)
    assert any(report["published"] for report in reports)
    assert content("out") == want


def test_from_the_command_line(source, monkeypatch):
    def run(*arguments):
        return subprocess.run(
            [TOOL, "reshard", source, "out", "--world-size", "4", *arguments],
            capture_output=True,
            text=True,
            check=False,
        )

    first = run("--part", "1/2")
    assert "B in the whole target\n" in first.stdout
    assert first.returncode == 0 and "part 1/2 is written; still to come: 0" in first.stdout
    last = run("--part", "0/2", "--json")
    assert json.loads(last.stdout)["counted"] == "the whole target"
    assert json.loads(last.stdout)["published"] and os.listdir(".") == ["out"]
    for bad in (
        "2/2",
        "1",
        "a/2",
        "1/2/3",
        "/",
    ):
        ended = run("--part", bad)
        assert ended.returncode == 2 and ("I/N" in ended.stderr), (bad, ended.stderr)


ADAM = {"lr": 0.1, "betas": (0.9, 0.95)}


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """A file of torch's AdamW; the working folder is beside it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(96, 200), torch.nn.Linear(200, 64))
    opt = torch.optim.AdamW(model.parameters(), **ADAM)
    for p in model.parameters():
        p.grad = torch.randn(p.shape)
    opt.step()
    torch.save({"model": model.state_dict(), "optim": opt.state_dict()}, tmp_path / "source.pt")
    (tmp_path / "parts").mkdir()
    (tmp_path / "whole").mkdir()
    monkeypatch.chdir(tmp_path / "parts")
    return "../source.pt"


def test_convert_in_parts_writes_the_bytes_of_one_process(trained, monkeypatch):
    options = {
        "container": "dcp",
        "to": "lowbit",
        "state_format": "8bit",
        "world_size": 5,
        "weights": "bfloat16_stochastic",
        "seed": 3,
    }
    with monkeypatch.context() as patched:
        patched.chdir("../whole")
        checkpoint.convert(trained, "out", **options)
        want = content("out")
    for done, i in enumerate((2, 0, 1), 1):
        report = checkpoint.convert(trained, "out", part=(i, 3), **options)
        assert report["part"] == f"{i}/3" and report["published"] == (done == 3)
        assert any(0 < state.get("relative_error", 0) < 1 for state in report["states"])
    assert content("out") == want and os.listdir(".") == ["out"]
    checkpoint.verify("out")


def test_parts_of_different_conversions_do_not_mix(trained):
    options = {
        "container": "dcp",
        "to": "lowbit",
        "state_format": "8bit",
        "weights": "bfloat16_stochastic",
    }
    checkpoint.convert(trained, "out", part=(0, 2), **options)
    for change in ({"seed": 1}, {"full_precision": ["1.weight"]}, {"world_size": 2}):
        with pytest.raises(checkpoint.CheckpointError, match=r"another plan|matches no parameter"):
            checkpoint.convert(trained, "out", part=(1, 2), **{**options, **change})
    assert checkpoint.convert(trained, "out", part=(1, 2), **options)["published"]


def test_parts_of_different_groups_do_not_mix(tmp_path):
    """Whose weight decay is whose changes no name and no shape."""
    source = megatron.write(
        tmp_path / "m",
        megatron.tensors(),
        {"param_groups": megatron.groups(weight_decay=0.0, step=4)},
    )
    options = {"container": "dcp", "to": "torch"}
    checkpoint.convert(source, tmp_path / "out", part=(0, 2), group=["1=*.bias"], **options)
    with pytest.raises(checkpoint.CheckpointError, match="another plan"):
        checkpoint.convert(source, tmp_path / "out", part=(1, 2), group=["1=embedding*"], **options)


def test_what_cannot_be_converted_in_parts_is_refused(trained):
    for target, container in (("out.pt", ""), ("out", "universal")):
        with pytest.raises(
            checkpoint.CheckpointError, match=r"part= is for directories.*container='dcp'"
        ):
            checkpoint.convert(trained, target, part=(0, 2), container=container)
    with pytest.raises(checkpoint.CheckpointError, match="leave out force=True"):
        checkpoint.convert(trained, "out", part=(0, 2), container="dcp", force=True)
    with pytest.raises(checkpoint.CheckpointError, match="object store has none"):
        checkpoint.convert(trained, "memory://out", part=(0, 2), container="dcp")
    command = [TOOL, "convert", trained, "out", "--container", "dcp", "--part"]
    first = subprocess.run([*command, "1/2"], capture_output=True, text=True, check=False)
    assert first.returncode == 0 and "part 1/2 is written; still to come: 0" in first.stdout
    last = subprocess.run([*command, "0/2", "--json"], capture_output=True, text=True, check=False)
    assert json.loads(last.stdout)["published"] and os.listdir(".") == ["out"]
    wrong = subprocess.run([*command, "2"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2 and "I/N" in wrong.stderr


def test_parts_of_an_older_reshard_are_refused(source):
    """A run of an older version that was killed while it removed the folder left parts without
    their plan.
    """
    for i in range(3):
        checkpoint.reshard(source, "out", world_size=6, part=(i, 4))
    for gone in ("plan", "checkpoint"):
        shutil.copytree(HIDDEN, "kept")
        kept = pathlib.Path(HIDDEN, gone)
        shutil.rmtree(kept) if kept.is_dir() else kept.unlink()
        with pytest.raises(
            checkpoint.CheckpointError, match=r"of an older reshard.*remove that folder"
        ):
            checkpoint.reshard(source, "out", world_size=6, part=(3, 4))
        assert not os.path.exists("out")
        shutil.rmtree(HIDDEN)
        os.rename("kept", HIDDEN)
    assert checkpoint.reshard(source, "out", world_size=6, part=(3, 4))["published"]


def test_nothing_is_published_with_a_file_or_a_digest_missing(source):
    for i in range(3):
        checkpoint.reshard(source, "out", world_size=6, part=(i, 4))
    first = pathlib.Path(HIDDEN, "checkpoint", "__0_0.distcp")
    said = pathlib.Path(HIDDEN, "part-0")

    def less(path):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    def no_digest(path):
        content = json.loads(path.read_text())
        content["chunks"][0][2] = ""
        path.write_text(json.dumps(content))

    def a_chunk_less(path):
        content = json.loads(path.read_text())
        path.write_text(json.dumps({**content, "chunks": content["chunks"][1:]}))

    for path, damage in (
        (first, os.unlink),
        (first, less),
        (said, no_digest),
        (said, a_chunk_less),
    ):
        before = path.read_bytes()
        damage(path)
        for _ in range(2):
            with pytest.raises(
                checkpoint.CheckpointError, match=r"not complete.*remove that folder"
            ):
                checkpoint.reshard(source, "out", world_size=6, part=(3, 4))
        assert not os.path.exists("out")
        path.write_bytes(before)
    assert checkpoint.reshard(source, "out", world_size=6, part=(3, 4))["published"]
    checkpoint.verify("out")


def test_a_kill_while_the_folder_is_removed_leaves_no_parts(source, tmp_path):
    """At its third file."""
    environment = os.environ | preloaded(
        tmp_path,
        """
        #include <signal.h>
        #include <sys/syscall.h>
        #include <unistd.h>
        int unlinkat(int folder, const char* name, int flags) {
          static int calls;
          if (++calls == 3) kill(getpid(), SIGKILL);
          return syscall(SYS_unlinkat, folder, name, flags);
        }
        """,
    )
    for i in range(4):
        ended = subprocess.run(
            [TOOL, "reshard", source, "out", "--world-size", "6", "--part", f"{i}/4"],
            env=environment,
            check=False,
        )
        assert ended.returncode == (-9 if i == 3 else 0)
    checkpoint.verify("out")
    assert not os.path.exists(HIDDEN)
    shutil.rmtree("out")
    for i in range(2):
        checkpoint.reshard(source, "out", world_size=3, part=(i, 2))
    checkpoint.verify("out")


def test_parts_are_no_more_open_than_their_source(source, tmp_path):
    os.chmod(tmp_path / "source", 0o700)
    for path in (tmp_path / "source").iterdir():
        os.chmod(path, 0o600)
    checkpoint.reshard(source, "out", world_size=6, part=(0, 2))
    paths = [pathlib.Path(HIDDEN), *pathlib.Path(HIDDEN).rglob("*")]
    assert len(paths) > 4
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o700, 0o600}
    checkpoint.reshard(source, "out", world_size=6, part=(1, 2))
    assert os.stat("out").st_mode & 0o777 == 0o700


def test_what_is_not_on_the_disk_is_not_published(source, tmp_path):
    environment = os.environ | preloaded(
        tmp_path,
        """
        #define _GNU_SOURCE
        #include <errno.h>
        #include <fcntl.h>
        #include <sys/syscall.h>
        #include <unistd.h>
        int fsync(int file) {
          if (faccessat(file, ".metadata", F_OK, 0) == 0) return errno = EIO, -1;
          return syscall(SYS_fsync, file);
        }
        """,
    )
    command = [TOOL, "reshard", source, "out", "--world-size", "6", "--part", "0/1"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and "cannot sync" in ended.stderr
    assert os.listdir(".") == [HIDDEN]
    assert checkpoint.reshard(source, "out", world_size=6, part=(0, 1))["published"]
