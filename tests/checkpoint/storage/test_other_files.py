"""What lies in a folder besides a checkpoint outlives every save, `--force` and `force=True`,
on disks and in stores.
"""

import os
import pathlib
import signal
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lowbit import checkpoint
from tests.checkpoint.storage import storage_worker
from tests.checkpoint.storage.storage_files import holds, save
from tests.support.shim import preloaded

pytestmark = pytest.mark.slow

OTHERS = (
    "config.json",
    "meta.pt",
    "notes.metadata",
    "hf/config.json",
    "hf/deep/er.distcp",
    "link",
    ".hidden",
)


def with_others(path) -> None:
    for name in OTHERS:
        place = pathlib.Path(path) / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if name == "link":
            place.symlink_to("/nowhere/at/all")
        else:
            place.write_text(f"years of work: {name}")


def others_are_there(path) -> bool:
    place = pathlib.Path(path)
    files = [name for name in OTHERS if name != "link"]
    kept = all((place / n).read_text() == f"years of work: {n}" for n in files)
    return kept and os.readlink(place / "link") == "/nowhere/at/all"


def own(path) -> list[str]:
    return sorted(
        {p.name for p in pathlib.Path(path).iterdir()} - {n.split("/")[0] for n in OTHERS}
    )


def numbers(path) -> str:
    return checkpoint.inspect(path, digest=True)["digest"]


@pytest.fixture(params=["disk", "memory"])
def run(request, tmp_path):
    if request.param == "disk":
        return str(tmp_path / "run")
    import fsspec

    files = fsspec.filesystem("memory")
    name = f"/others-{tmp_path.name}"
    request.addfinalizer(lambda: files.exists(name) and files.rm(name, recursive=True))
    return f"memory:/{name}/run"


def put(path: str, content: bytes) -> None:
    if "://" in path:
        import fsspec

        fsspec.filesystem("memory").pipe_file(path.removeprefix("memory:/"), content)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        pathlib.Path(path).write_bytes(content)


def get(path: str) -> bytes:
    if "://" in path:
        import fsspec

        return fsspec.filesystem("memory").cat_file(path.removeprefix("memory:/"))
    return pathlib.Path(path).read_bytes()


def test_a_save_keeps_checkpoints_and_files_in_its_folder(run):
    """run/optim in run, and what trainers write beside: the same on a disk and in a store."""
    save(storage_worker.state(0), run)
    save(storage_worker.state(0, 5), f"{run}/optim")
    put(f"{run}/meta.pt", b"of Lightning")
    put(f"{run}/hf/config.json", b"{}")
    for seed in (1, 2):
        save(storage_worker.state(0, seed), run)
        assert holds(run, seed) and holds(f"{run}/optim", 5)
        assert get(f"{run}/meta.pt") == b"of Lightning" and get(f"{run}/hf/config.json") == b"{}"
        assert checkpoint.verify(run)["ok"] and checkpoint.inspect(run)["tensors"]


def test_a_first_save_into_a_folder_that_the_trainer_made(run):
    put(f"{run}/config.json", b"{}")
    save(storage_worker.state(0), run, overwrite=False)
    assert holds(run, 0) and get(f"{run}/config.json") == b"{}" and checkpoint.verify(run)["ok"]
    with pytest.raises(dcp.api.CheckpointException, match="exists; overwrite=True replaces it"):
        save(storage_worker.state(0, 1), run, overwrite=False)
    assert holds(run, 0)


def test_torch_reads_what_was_published_between_other_files(tmp_path):
    path = tmp_path / "run"
    with_others(path)
    for seed in (0, 1, 2):
        save(storage_worker.state(0, seed), path)
        assert others_are_there(path) and holds(path, seed)
        assert own(path) == [".metadata", f"__0_{seed}.distcp", "lowbit.json"]
    state = storage_worker.state(0, 7)
    dcp.load(state, checkpoint_id=path, no_dist=True)
    assert storage_worker.wrong(state, 2) == [] and os.listdir(tmp_path) == ["run"]


def test_what_is_of_the_checkpoint_goes(tmp_path):
    """Also what is left of one of torch on more ranks, and of one with an index for each rank."""
    path = tmp_path / "run"
    save(storage_worker.state(0), path)
    for name in ("__3_0.distcp", "__12_7.distcp", "__0.metadata", ".metadata.tmp", ".owner"):
        (path / name).write_bytes(b"old")
    save(storage_worker.state(0, 1), path)
    assert sorted(os.listdir(path)) == [".metadata", "__0_0.distcp", "lowbit.json"]
    for name in ("__3_0.distcp", "__12_7.distcp", "__0.metadata", "config.json"):
        (path / name).write_bytes(b"old")
    save(storage_worker.state(0, 2), path)
    assert sorted(os.listdir(path)) == [".metadata", "__0_8.distcp", "config.json", "lowbit.json"]
    assert holds(path, 2) and checkpoint.verify(path)["ok"]


def test_ranks_save_together_between_other_files(pool, tmp_path):
    path = tmp_path / "run"
    with_others(path)
    for seed in (0, 1):
        pool.run(2, storage_worker.save, "lowbit", str(path), 0, seed)
        assert others_are_there(path) and checkpoint.verify(path)["ok"]
        for bad, _ in pool.run(2, storage_worker.load, "lowbit", str(path), 1, seed):
            assert bad == []
    with_others(f"{path}1")
    for bad, places in pool.run(2, storage_worker.saved_async, str(path), 0):
        assert bad == [[], []] and places == 1
    assert others_are_there(f"{path}1") and len(own(f"{path}1")) == 4


@pytest.mark.parametrize("command", ["reshard", "convert", "convert --part"])
def test_force_keeps_what_is_not_the_checkpoint_s(tmp_path, command):
    save(storage_worker.state(0), tmp_path / "a")
    save(storage_worker.state(0, 1), tmp_path / "b")
    with_others(tmp_path / "b")

    def again(source, target, **options):
        if command == "reshard":
            return checkpoint.reshard(source, target, world_size=3, **options)
        return checkpoint.convert(source, target, container="dcp", world_size=3, **options)

    if command == "convert --part":
        with pytest.raises(checkpoint.CheckpointError, match="leave out force=True"):
            checkpoint.reshard(
                tmp_path / "a", tmp_path / "b", world_size=3, part=(0, 2), force=True
            )
        assert holds(tmp_path / "b", 1) and others_are_there(tmp_path / "b")
        return
    with pytest.raises(checkpoint.CheckpointError, match="exists; force=True replaces it"):
        again(tmp_path / "a", tmp_path / "b")
    for number in (1, 2):
        again(tmp_path / "a", tmp_path / "b", force=True, dry_run=True)
        again(tmp_path / "a", tmp_path / "b", force=True)
        assert others_are_there(tmp_path / "b") and holds(tmp_path / "b", 0)
        assert own(tmp_path / "b") == [
            ".metadata",
            *(f"__{r}_{number}.distcp" for r in range(3)),
            "lowbit.json",
        ]
        assert checkpoint.verify(tmp_path / "b")["ok"]
    again(tmp_path / "a", tmp_path / "b", force=True, manifest=False)
    assert "lowbit.json" not in own(tmp_path / "b") and holds(tmp_path / "b", 0)
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_names_like_a_checkpoint_s_make_none(tmp_path):
    """Nor is a folder without one written to by --force: it may be a slip of the keyboard."""
    save(storage_worker.state(0), tmp_path / "a")
    home = tmp_path / "home"
    home.mkdir()
    for name in ("thesis.txt", "notes.metadata", "x.distcp", "__1.distcp", "__a_0.distcp"):
        (home / name).write_text("years")
    before = sorted(os.listdir(home))
    with pytest.raises(
        checkpoint.CheckpointError, match="something else than a checkpoint"
    ) as caught:
        checkpoint.convert(tmp_path / "a", home, container="dcp", force=True)
    assert "notes.metadata" in caught.value.text and "--force" not in caught.value.text
    assert sorted(os.listdir(home)) == before


def test_a_folder_of_deepspeed_is_not_mixed_with_other_files(tmp_path):
    w = torch.nn.Parameter(torch.randn(4, 5))
    opt = torch.optim.Adam([("w", w)])
    w.grad = torch.randn(4, 5)
    opt.step()
    source = tmp_path / "a.pt"
    torch.save({"model": {"w": w.detach()}, "optim": opt.state_dict()}, source)
    target = tmp_path / "u"
    checkpoint.convert(source, target, container="universal")
    checkpoint.convert(source, target, container="universal", force=True)
    for name in ("zero/notes.txt", "zero/w/more/exp_avg.pt", "config.json", "mp_rank_x.pt"):
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_text("years")
        for container in ("universal", "dcp"):
            with pytest.raises(checkpoint.CheckpointError, match="choose another name") as caught:
                checkpoint.convert(source, target, container=container, force=True)
            assert name.replace("/exp_avg.pt", "/") in caught.value.text
        assert (target / name).read_text() == "years"
        (target / name).unlink()
        if "more" in name:
            (target / name).parent.rmdir()
    checkpoint.convert(source, target, container="dcp", force=True)
    assert sorted(os.listdir(target)) == [".metadata", "__0_0.distcp", "lowbit.json"]
    (target / "config.json").write_text("years")
    with pytest.raises(checkpoint.CheckpointError, match=r"config\.json beside a checkpoint"):
        checkpoint.convert(source, target, container="universal", force=True)
    assert checkpoint.verify(target)["ok"]


@pytest.mark.parametrize("store", [False, True])
def test_files_that_stay_behind_are_named(tmp_path, store):
    """reshard and convert write the checkpoint alone: Lightning takes its folder for one by
    meta.pt.
    """
    source = tmp_path / "a"
    save(storage_worker.state(0), source)
    assert checkpoint.reshard(source, tmp_path / "none", world_size=2)["warnings"] == []
    for name in ("meta.pt", "config.json", "hf/x"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(b"of a trainer")
    given = source
    if store:
        import fsspec

        given = f"memory://behind-{tmp_path.name}/a"
        fsspec.filesystem("memory").put(str(source), given, recursive=True)
    said = [
        (
            "config.json, hf and meta.pt beside the checkpoint: not copied to the target; "
            "Lightning resumes only where its meta.pt lies too: copy that"
        )
    ]
    for number, options in enumerate(({}, {"dry_run": True})):
        assert (
            checkpoint.reshard(given, tmp_path / f"b{number}", world_size=2, **options)["warnings"]
            == said
        )
        assert (
            checkpoint.convert(given, tmp_path / f"c{number}", container="dcp", **options)[
                "warnings"
            ]
            == said
        )
        assert checkpoint.convert(given, tmp_path / f"{number}.pt", **options)["warnings"] == said
    assert not (tmp_path / "b0" / "meta.pt").exists()
    (source / "meta.pt").unlink()
    if not store:
        (line,) = checkpoint.reshard(given, tmp_path / "d", world_size=2)["warnings"]
        assert line == "config.json and hf beside the checkpoint: not copied to the target"


def test_files_that_stay_in_the_target_are_named(tmp_path):
    """--force replaces the checkpoint between them. Those of Megatron-Core would become part of the
    new one.
    """
    source, target = tmp_path / "a", tmp_path / "b"
    save(storage_worker.state(0), source)
    save(storage_worker.state(1), target)
    (target / "config.json").write_text("{}")
    (line,) = checkpoint.reshard(source, target, world_size=2, force=True)["warnings"]
    assert line == f"{target}: config.json stays beside the new checkpoint"
    (target / "hf").mkdir()
    (line,) = checkpoint.convert(source, target, force=True, dry_run=True)["warnings"]
    assert line == f"{target}: config.json and hf/ stay beside the new checkpoint"
    (target / "common.pt").write_bytes(b"")
    (target / "metadata.json").write_text("{}")
    for make in (checkpoint.reshard, checkpoint.convert):
        options = {"world_size": 2, "force": True}
        with pytest.raises(checkpoint.CheckpointError, match="of Megatron-Core") as caught:
            make(source, target, **options)
        assert caught.value.code == 2
    assert checkpoint.verify(target)["ok"]


def test_a_folder_is_not_named_like_a_file(tmp_path):
    save(storage_worker.state(0), tmp_path / "a")
    with pytest.raises(checkpoint.CheckpointError, match="is the name of a file") as caught:
        checkpoint.reshard(tmp_path / "a", tmp_path / "x.pt", world_size=2)
    assert caught.value.code == 2 and os.listdir(tmp_path) == ["a"]


def test_a_checkpoint_is_not_written_into_its_source(tmp_path):
    save(storage_worker.state(0), tmp_path / "a")
    for target in (tmp_path / "a" / "sub", tmp_path / "a" / "x" / ".." / "sub"):
        (tmp_path / "a" / "x").mkdir(exist_ok=True)
        with pytest.raises(checkpoint.CheckpointError, match="lies in the source"):
            checkpoint.reshard(tmp_path / "a", target, world_size=2)
        with pytest.raises(checkpoint.CheckpointError, match="lies in the source"):
            checkpoint.reshard(tmp_path / "a", target, world_size=2, part=(0, 2))
    assert "sub" not in os.listdir(tmp_path / "a")


# Kills


@pytest.fixture(scope="module")
def killed_at(tmp_path_factory):
    """Saves once in a process that is killed before its n-th change of a folder's names, on a file
    system with or without renameat2's flags.
    """
    folder = tmp_path_factory.mktemp("shim")
    code = """
        #define _GNU_SOURCE
        #include <errno.h>
        #include <signal.h>
        #include <stdlib.h>
        #include <string.h>
        #include <sys/syscall.h>
        #include <unistd.h>
        static void count(const char* a) {
          static int calls;
          const int at = atoi(getenv("KILL_AT"));
          if (at > 0 && strstr(a, "/run") && ++calls == at) kill(getpid(), SIGKILL);
        }
        int renameat2(int a, const char* b, int c, const char* d, unsigned e) {
          if (getenv("WITHOUT_FLAGS")) return errno = EINVAL, -1;
          count(d);
          return syscall(SYS_renameat2, a, b, c, d, e);
        }
        int rename(const char* a, const char* b) { return count(b), syscall(SYS_rename, a, b); }
        int unlink(const char* a) { return count(a), syscall(SYS_unlink, a); }
        """
    shim = preloaded(folder, code)
    program = (
        "import os, sys\n"
        "from tests.checkpoint.storage import storage_files, storage_worker\n"
        "storage_files.save(storage_worker.state(0, 9), sys.argv[1] + '-warm')\n"
        "for number in range(1, 100):\n"
        "    if os.fork() == 0:\n"
        "        os.environ['KILL_AT'] = str(number)\n"
        "        try:\n"
        "            storage_files.save(storage_worker.state(0, number), sys.argv[1])\n"
        "            os._exit(0)\n"
        "        finally:\n"
        "            os._exit(1)\n"
        "    print(number, os.wait()[1], flush=True)\n"
        "    sys.stdin.readline()\n"
    )

    def each(path, **more):
        """Yields the number of a save and whether it was killed, one after another."""
        with subprocess.Popen(
            [sys.executable, "-c", program, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                **shim,
                "KILL_AT": "0",
                "PYTHONPATH": os.pathsep.join(sys.path),
                **more,
            },
        ) as process:
            while line := process.stdout.readline():
                number, end = map(int, line.split())
                assert end in (0, signal.SIGKILL)
                yield number, end != 0
                if end == 0:
                    break
                process.stdin.write("\n")
                process.stdin.flush()
            process.kill()

    return each


@pytest.mark.parametrize("more", [{}, {"WITHOUT_FLAGS": "1"}], ids=["renameat2", "NFS"])
def test_a_kill_between_any_two_steps_leaves_one_checkpoint_and_all_other_files(
    tmp_path, killed_at, more
):
    path = tmp_path / "run"
    with_others(path)
    save(storage_worker.state(0), path)
    last, steps = 0, 0
    for number, killed in killed_at(path, **more):
        steps += killed
        assert others_are_there(path)
        assert checkpoint.verify(path)["ok"]
        assert holds(path, number) or (killed and holds(path, last))
        last = number if holds(path, number) else last
        save(storage_worker.state(0, last), path)
        assert own(path)[0] == ".metadata" and len(own(path)) == 3
    assert last == number and steps >= 4
    assert sorted(os.listdir(tmp_path)) == ["run", "run-warm"]
