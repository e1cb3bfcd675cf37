"""The folder that lowbit.checkpoint.Writer writes: whole or not there after a kill, an error or a
fork, and nothing outside it is touched.
"""

import os
import pathlib
import random
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lowbit import checkpoint
from tests.checkpoint.storage import storage_worker
from tests.checkpoint.storage.storage_files import holds, load, save
from tests.support.ranks import forked

pytestmark = pytest.mark.slow


def test_a_save_that_fails_on_one_rank_fails_on_all_and_changes_nothing(pool, tmp_path):
    path = tmp_path / "run"
    pool.run(2, storage_worker.save, "lowbit", str(path), 0)
    before = checkpoint.inspect(path, digest=True)["digest"]
    for said in pool.run(2, storage_worker.fails_on_one, str(path), 0):
        assert "CheckpointException" in said and "largest file" in said and str(path) in said
    assert checkpoint.inspect(path, digest=True)["digest"] == before
    pool.run(2, storage_worker.save, "lowbit", str(path), 0, 2)
    assert os.listdir(tmp_path) == ["run"]
    for bad, _ in pool.run(2, storage_worker.load, "lowbit", str(path), 0, 2):
        assert bad == []


def killed_saves(folder, moments, ranks=2):
    """Programs that save over and over into one path, killed after each of `moments` seconds: (rank
    that is killed or all, seconds).

    Yields the number of the last save that ended, as the program said,
    and of the save that is in the folder.
    """
    path = pathlib.Path(folder) / "run"
    for number, (who, seconds) in enumerate(moments):
        store = f"{folder}/store{number}"
        started = [
            forked.start(storage_worker.until_killed, store, path, rank, ranks)
            for rank in range(ranks)
        ]
        printed = started[0][1]
        # A save has ended: from here on each moment is one of a save.
        assert printed.readline().strip() == "0"
        time.sleep(seconds)
        for rank in range(ranks) if who == "all" else [who]:
            started[rank][0].kill()
        time.sleep(0.05)
        for process, _ in started:
            process.kill()
        said = printed.read().split()
        for process, _ in started:
            process.join()
        yield int(said[-1]) if said else 0, path


def test_killed_saves_leave_the_last_checkpoint_whole(tmp_path):
    chance = random.Random(0)
    moments = [(chance.choice(["all", 0, 1]), chance.random() * 0.4) for _ in range(2)]
    for last, path in killed_saves(tmp_path, moments):
        checkpoint.verify(path)
        seeds = [seed for seed in (last, last + 1) if holds(path, seed)]
        assert len(seeds) == 1
        partial = [name for name in os.listdir(tmp_path) if "partial" in name]
        assert partial in ([], [".run.partial-saving"])
        if partial:
            with pytest.raises(checkpoint.CheckpointError):
                checkpoint.verify(tmp_path / partial[0])
    save(storage_worker.state(0, 99), path)
    assert holds(path, 99) and not [name for name in os.listdir(tmp_path) if "partial" in name]


def test_two_saves_to_one_name_do_not_mix(tmp_path):
    from lowbit.checkpoint.storage.partial_folder import PartialFolder

    begun, tried = threading.Event(), threading.Event()

    def another() -> None:
        running = PartialFolder(str(tmp_path / "run"), True)
        begun.set()
        tried.wait()
        running.drop()

    thread = threading.Thread(target=another)
    thread.start()
    begun.wait()
    with pytest.raises(
        dcp.api.CheckpointException, match=rf"another save .* process {os.getpid()} "
    ):
        save(storage_worker.state(0), tmp_path / "run")
    tried.set()
    thread.join()
    save(storage_worker.state(0), tmp_path / "run")
    assert holds(tmp_path / "run", 0)


def test_a_save_goes_on_after_one_that_failed(tmp_path, monkeypatch):
    """Its error, and with it the old writer, are still in somebody's hands."""
    from lowbit.checkpoint.storage.writer import Writer

    with monkeypatch.context() as patched:
        patched.setattr(Writer, "finish", lambda *_, **__: 1 / 0)
        with pytest.raises(dcp.api.CheckpointException, match="division") as kept:
            save(storage_worker.state(0), tmp_path / "run")
    assert os.listdir(tmp_path) == [".run.partial-saving"]
    save(storage_worker.state(0, 1), tmp_path / "run")
    assert os.listdir(tmp_path) == ["run"] and holds(tmp_path / "run", 1) and kept


def test_a_failed_save_stops_no_later_one(tmp_path):
    """Its writer goes on, and its error is still in somebody's hands."""
    kept = checkpoint.Writer(progress=lambda *_: False)
    with pytest.raises(dcp.api.CheckpointException, match="interrupted") as told:
        dcp.save(storage_worker.state(0), checkpoint_id=tmp_path / "run", storage_writer=kept)
    assert os.listdir(tmp_path) == []
    with ThreadPoolExecutor(1) as another:
        another.submit(save, storage_worker.state(0), tmp_path / "run").result()
    assert holds(tmp_path / "run", 0) and told


@pytest.mark.parametrize("failing", [0, 1])
def test_a_save_that_failed_on_one_rank_stops_no_later_one(pool, tmp_path, failing):
    for told, bad in pool.run(
        2, storage_worker.goes_on_after_a_failure, str(tmp_path / "run"), failing
    ):
        assert "interrupted" in told and bad == []
    assert os.listdir(tmp_path) == ["run"]


def test_a_save_that_failed_among_others_holds_no_lock(tmp_path):
    """Another process may save to the name, as the trainer after its daemon of async saves."""
    import fcntl

    from lowbit.checkpoint.storage.partial_folder import OWNER, PartialFolder

    failed = PartialFolder(str(tmp_path / "run"), True)
    failed.fail(alone=False)
    with open(tmp_path / ".run.partial-saving" / OWNER) as owner:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    failed.drop()
    assert os.listdir(tmp_path) == []


def test_ranks_save_to_one_folder(pool, tmp_path):
    path = str(tmp_path / "run")
    for rank, (elsewhere, not_shared) in enumerate(
        pool.run(2, storage_worker.saved_elsewhere, path)
    ):
        assert f"rank 0 saves to {path}-0 and rank 1 to {path}-1" in elsewhere, rank
        assert "one folder that all hosts share" in not_shared, rank
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_a_file_is_never_replaced_by_a_folder(tmp_path):
    (tmp_path / "run").write_text("years of work")
    with pytest.raises(dcp.api.CheckpointException, match="exists and is not a folder"):
        save(storage_worker.state(0), tmp_path / "run")
    assert (tmp_path / "run").read_text() == "years of work" and os.listdir(tmp_path) == ["run"]
    save(storage_worker.state(0), tmp_path / "deep" / "er" / "run")
    save(storage_worker.state(0, 1), tmp_path / "deep" / "er" / "run")
    assert holds(tmp_path / "deep" / "er" / "run", 1)
    with pytest.raises(dcp.api.CheckpointException, match="exists"):
        save(storage_worker.state(0), tmp_path / "deep" / "er" / "run", overwrite=False)


def test_nothing_outside_is_touched(tmp_path):
    """Links and files where a save writes its folder, or inside it."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "thesis.txt").write_text("years of work")
    (outside / ".owner").write_text("host 1\n")
    partial = tmp_path / ".run.partial-saving"

    def link_of_owner():
        partial.mkdir()
        (partial / ".owner").symlink_to(outside / "thesis.txt")

    for make, said in (
        (lambda: partial.symlink_to(outside), "blocks this one; remove it"),
        (lambda: partial.write_text("a file"), "blocks this one; remove it"),
        (link_of_owner, "symbolic links"),
    ):
        make()
        with pytest.raises(dcp.api.CheckpointException, match=said) as caught:
            save({"w": torch.ones(3)}, tmp_path / "run")
        assert "CheckpointError" in str(caught.value) and str(partial) in str(caught.value)
        assert (outside / "thesis.txt").read_text() == "years of work"
        if partial.is_dir() and not partial.is_symlink():
            shutil.rmtree(partial)
        else:
            partial.unlink()
    partial.mkdir()
    (partial / "link").symlink_to(outside)
    save({"w": torch.ones(3)}, tmp_path / "run")
    assert sorted(os.listdir(outside)) == [".owner", "thesis.txt"] and not partial.exists()


def test_a_folder_that_another_save_took_is_left_to_it(tmp_path):
    from lowbit.checkpoint.storage.partial_folder import PartialFolder

    first = PartialFolder(str(tmp_path / "run"), True)
    shutil.rmtree(first.temporary)  # as one does that found it before it had an owner
    (tmp_path / ".run.partial-saving").mkdir()
    (tmp_path / ".run.partial-saving" / ".owner").write_text("another")
    with pytest.raises(checkpoint.CheckpointError, match="another save"):
        first.publish({}, b"", b"")
    first.drop()
    assert os.listdir(tmp_path) == [".run.partial-saving"]


def test_a_fork_removes_nothing(tmp_path):
    from lowbit.checkpoint.storage.partial_folder import PartialFolder

    folder = PartialFolder(str(tmp_path / "run"), True)
    child = os.fork()
    if child == 0:
        folder.drop()
        os._exit(0)
    os.waitpid(child, 0)
    assert os.listdir(folder.temporary) == [".owner"]
    folder.drop()
    assert os.listdir(tmp_path) == []


def test_a_fork_does_not_keep_the_lock(tmp_path):
    """A worker of a data loader that outlives the program that saves."""
    from lowbit.checkpoint.storage.partial_folder import OWNER, PartialFolder

    here, there = os.pipe()
    told, tell = os.pipe()
    saving = os.fork()
    if saving == 0:
        try:
            folder = PartialFolder(str(tmp_path / "run"), True)
            if os.fork() == 0:
                os.write(there, b"1")
                os.read(told, 1)  # it lives on
            elif folder.temporary:
                os.read(here, 1)
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    os.waitpid(saving, 0)
    assert os.path.exists(tmp_path / ".run.partial-saving" / OWNER)
    try:
        save({"w": torch.ones(3)}, tmp_path / "run")
    finally:
        os.write(tell, b"1")
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize("name", ["x" * 239, "y" * 240, "z" * 255, "ä" * 127, "日" * 85])
def test_names_of_any_length(tmp_path, name):
    """The longest names that a file system has leave no room for what is added while they are
    written.
    """
    state = {"w": torch.arange(4.0)}
    for _ in range(2):
        save(state, tmp_path / name)
        assert os.listdir(tmp_path) == [name]
    got = {"w": torch.zeros(4)}
    load(got, tmp_path / name)
    assert torch.equal(got["w"], state["w"])
    checkpoint.reshard(tmp_path / name, tmp_path / (name[:-1] + "2"), world_size=2)
    checkpoint.convert(tmp_path / name, tmp_path / (name[:-1] + "3"), container="torch")
    assert len(os.listdir(tmp_path)) == 3


def test_paths_as_people_write_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = {"w": torch.ones(3)}
    for given in ("rel", "./rel2///", b"bytes", "a/../a/deep", pathlib.Path("p")):
        dcp.save(state, checkpoint_id=given, storage_writer=checkpoint.Writer(), no_dist=True)
        dcp.load(state, checkpoint_id=given, storage_reader=checkpoint.Reader(), no_dist=True)
    assert sorted(os.listdir(tmp_path)) == ["a", "bytes", "p", "rel", "rel2"]
    for given in (".", "..", "/", "rel/."):
        with pytest.raises(dcp.api.CheckpointException, match="does not name a folder"):
            save(state, given)
