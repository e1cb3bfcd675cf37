"""lowbit.checkpoint.Writer and Reader in the place of torch's FileSystemWriter and FileSystemReader."""

import json
import os
import pathlib
import pickle
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings

import pytest
import storage_worker
import torch
import torch.distributed.checkpoint as dcp
from file_systems import mounted

from lowbit import checkpoint

warnings.filterwarnings("ignore", message="torch.distributed is disabled")
WORKER = pathlib.Path(storage_worker.__file__)


def save(state, path, **options):
    dcp.save(state, storage_writer=checkpoint.Writer(path, **options), no_dist=True)


def load(state, path, **options):
    reader = checkpoint.Reader(path, **options)
    dcp.load(state, storage_reader=reader, no_dist=True)
    return reader


@pytest.fixture(scope="module", params=["lowbit", "torch"])
def written(request, pool, tmp_path_factory):
    """A directory of two ranks, and whose it is."""
    path = str(tmp_path_factory.mktemp("written") / "run")
    pool.run(2, "storage_worker", "save", request.param, path, 0)
    return request.param, path


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_any_layout_loads_what_two_ranks_saved(pool, written, ranks, dim):
    kind, path = written
    for bad, _ in pool.run(ranks, "storage_worker", "load", "lowbit", path, dim):
        assert bad == []
    if kind == "lowbit" and ranks in (2, 3):
        for bad, _ in pool.run(ranks, "storage_worker", "load", "torch", path, dim):
            assert bad == []


def test_the_tool_reads_what_a_save_wrote(written):
    kind, path = written
    checkpoint.verify(path)
    if kind == "lowbit":
        recorded = json.loads((pathlib.Path(path) / "lowbit.json").read_text())
        assert set(recorded["tensors"]) == {f"model.{name}" for name in storage_worker.tensors()}
        assert {"step", "dtype"} <= set(recorded["values"])


def test_ranks_read_the_bytes_that_they_need_and_no_more(pool, tmp_path):
    """Cuts of twice and four times as many ranks, by rows and by columns, are cuts of the verified parts."""
    torch.manual_seed(0)
    path, t = tmp_path / "run", torch.randn(512, 1024)
    save({"w": t}, path)
    for box in ([slice(0, 256), slice(None)], [slice(128, 256), slice(None)], [slice(None), slice(256, 512)], [slice(384, 512), slice(512, 1024)]):  # fmt: skip
        part = torch.zeros_like(t[tuple(box)])
        offset = [s.start or 0 for s in box]
        reader = checkpoint.Reader(path)
        reader.read_metadata()
        read = reader._reader.read_into([("w", offset, list(part.shape), part.data_ptr(), part.nbytes)], 1, True, None)  # fmt: skip
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
            assert sum(pool.run(ranks, "storage_worker", "load_even", str(tmp_path / "even"), dim)) == total  # fmt: skip


def test_pages_of_another_file_system_are_not_mapped(tmp_path):
    """Where they may come over a network: to lose one would end the program by a signal. ramfs stands for these."""
    torch.manual_seed(0)
    state = {"w": torch.randn(600, 1024)}
    save(state, tmp_path / "run")
    program = """if True:
        import sys, torch
        from lowbit import checkpoint
        reader, part = checkpoint.Reader(sys.argv[1]), torch.zeros(600, 256)
        reader.read_metadata()
        reader._reader.read_into([("w", [0, 256], [600, 256], part.data_ptr(), part.nbytes)], 1, True, None)
        print(reader._reader.mapped())
        torch.save(part, sys.argv[2])"""
    with mounted(tmp_path / "there", "ramfs") as there:
        shutil.copytree(tmp_path / "run", there.seen / "run")
        done = subprocess.run([*there.enter, sys.executable, "-c", program, tmp_path / "there" / "run", tmp_path / "part.pt"], capture_output=True, text=True)  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
    assert torch.equal(torch.load(tmp_path / "part.pt"), state["w"][:, 256:512])


def maps(path):
    """Whether pages of files there are mapped: of a disk of this machine, by a Linux that tells before they are touched."""
    kind = subprocess.check_output(["stat", "--file-system", "--format=%t", path], text=True)
    local = {0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x2FC12FC1, 0x01021994, 0x794C7630}
    version = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    return int(kind, 16) in local and version >= (5, 14)


@pytest.mark.parametrize("verify", [True, False])
def test_short_rows_are_copied_from_mapped_pages(tmp_path, verify):
    """Cuts by columns, of 1 KiB and of 8 bytes a row: a read of each would take longer than its bytes."""
    if not maps(tmp_path):
        pytest.skip("pages of files in TMPDIR are not mapped: another file system, or Linux before 5.14")  # fmt: skip
    torch.manual_seed(0)
    state = {"w": torch.randn(600, 1024), "scales": torch.randn(8192, 4)}
    save(state, tmp_path / "run")

    def read(name, offset, shape):
        part = torch.zeros(shape)
        before = reader._reader.mapped()
        read = reader._reader.read_into([(name, offset, shape, part.data_ptr(), part.nbytes)], 1, verify, None)  # fmt: skip
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
                assert torch.equal(read("w", [0, column], [600, 256])[0], state["w"][:, column : column + 256])  # fmt: skip
    # A page that is gone is an error, and no signal.
    (file,) = (tmp_path / "run").glob("*.distcp")
    os.truncate(file, 100_000)
    with pytest.raises(checkpoint.CheckpointError, match=r"became shorter|changed"):
        read("w", [0, 256], [600, 256])


def test_directories_of_the_tool_are_read_by_parts_too(tmp_path):
    torch.manual_seed(0)
    t = torch.randn(512, 1024)
    save({"w": t}, tmp_path / "run")
    checkpoint.reshard(tmp_path / "run", tmp_path / "two", world_size=2)  # chunks made anew
    checkpoint.reshard(tmp_path / "two", tmp_path / "again", world_size=2)  # and copied
    for i in range(2):
        checkpoint.reshard(tmp_path / "run", tmp_path / "parts", world_size=2, part=(i, 2))
    written = [json.loads((tmp_path / name / "lowbit.json").read_text()) for name in ("two", "again", "parts")]  # fmt: skip
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


def flipped(path, name, at=0.5):
    """Flips one bit of a tensor's values, in the file where they lie. Returns the file's name."""
    values = bytes(checkpoint.Checkpoint(path).read(name))
    for file in sorted(path.glob("*.distcp")):
        content = bytearray(file.read_bytes())
        if content.count(values) == 1:
            content[content.index(values) + int(at * (len(values) - 1))] ^= 16
            file.write_bytes(content)
            return file.name
    raise AssertionError("the values lie in no file")


def saved(folder, digests):
    """A directory of one rank, with or without lowbit.json."""
    path = folder / "run"
    save(storage_worker.state(0), path)
    if not digests:
        (path / "lowbit.json").unlink()
    return path


@pytest.mark.parametrize("name", ["model.0.float32", "model.3.uint8", "model.4.bfloat16", "model.5.float32"])  # fmt: skip
@pytest.mark.parametrize("digests", [True, False])
def test_a_flipped_bit_is_found_by_load(tmp_path, name, digests):
    path = saved(tmp_path, digests)
    file = flipped(path, name, random.Random(name).random())
    with pytest.raises(dcp.api.CheckpointException) as caught:
        load(storage_worker.state(0, 3), path)
    assert file in str(caught.value) and name in str(caught.value)
    assert "damaged" in str(caught.value)


@pytest.mark.parametrize("digests", [True, False])
def test_a_flipped_bit_is_found_by_the_rank_that_reads_it(pool, tmp_path, digests):
    path = saved(tmp_path, digests)
    file = flipped(path, "model.0.float32", 0.9)
    with pytest.raises(AssertionError, match=rf"{file}.*model\.0\.float32.*damaged"):
        pool.run(3, "storage_worker", "load", "lowbit", str(path), 0)


def test_a_flipped_bit_anywhere_is_found_or_changes_nothing(tmp_path):
    """In values, headers, digests and metadata alike: what is loaded is what was saved, or the load is refused, by names."""
    chance = random.Random(1)
    path = tmp_path / "run"
    save(storage_worker.state(0), path)
    found, names = {}, [*checkpoint.Checkpoint(path).tensors, *checkpoint.Checkpoint(path).values]
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for _ in range(25):
            damaged = bytearray(whole)
            damaged[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
            file.write_bytes(damaged)
            state = storage_worker.state(0, 3)
            try:
                load(state, path)
            except dcp.api.CheckpointException as error:
                said = str(error)
                named = any(name in said for name in names)
                if file.suffix == ".distcp":
                    assert file.name in said and named, said
                else:  # a key of `.metadata` that is another one now is missed by its name alone
                    assert file.name in said or (file.name == ".metadata" and named), said
                found[file.name] = found.get(file.name, 0) + 1
            else:
                assert storage_worker.wrong(state) == [], file.name
        file.write_bytes(whole)
    # What no digest covers: padding, names of files that nobody opens, digests of cells that nobody reads, the id of a save.
    assert all(found.get(file.name, 0) >= 10 for file in path.iterdir()), found


def lied(path, change):
    """Changes what lowbit.json says of the tensor model.0.float32."""
    recorded = json.loads((path / "lowbit.json").read_text())
    change(recorded["tensors"]["model.0.float32"])
    (path / "lowbit.json").write_text(json.dumps(recorded))


def _one_digest(entry):
    del entry["tiles"]


def _no_digits(entry):
    del entry["tiles"]
    entry["chunks"] = {"0,0": ""}


LIES = [
    (_one_digest, "damaged"),
    (_no_digits, "damaged"),
    (lambda e: e["tiles"].update({"0,0": [1, 1, "0" * 16]}), "damaged"),
    (lambda e: e["tiles"].update({"0,0": [600, 300, "0" * 16 * 600 * 300]}), "damaged"),
    (lambda e: e["tiles"].update({"0,0": [2**63, 2, ""]}), "not laid out"),
    (lambda e: e["tiles"].update({"0,0": [65536, 65536, "0" * 16]}), "not laid out"),
    (lambda e: e["tiles"].update({"0,0": [-1, 4, ""]}), "not laid out"),
    (lambda e: e.update(tiles={}, chunks={"0,1": "0" * 32}), "no digest"),
    (lambda e: e.update(shape=[2**62, 2**62]), "different checkpoints"),
    (lambda e: e.update(dtype="int32"), "different checkpoints"),
]


@pytest.mark.parametrize("number", range(len(LIES)))
def test_a_false_lowbit_json_lets_no_damage_through(tmp_path, number):
    change, said = LIES[number]
    path = tmp_path / "run"
    save(storage_worker.state(0), path)
    flipped(path, "model.0.float32", 0.3)
    lied(path, change)
    with pytest.raises(dcp.api.CheckpointException, match=said):
        load(storage_worker.state(0, 3), path)


def test_memory_of_another_size_is_never_written(tmp_path):
    save({"w": torch.ones(4, 4)}, tmp_path / "run")
    reader = checkpoint.Reader(tmp_path / "run")
    reader.read_metadata()
    into = torch.zeros(4, 4, dtype=torch.float16)
    for wanted in (("w", [0, 0], [4, 4], into.data_ptr(), into.nbytes), ("w", [0, 0], [4, 5], into.data_ptr(), 80), ("w", [2, 0], [4, 4], into.data_ptr(), 64)):  # fmt: skip
        with pytest.raises(ValueError, match=r"do not hold|not inside"):
            reader._reader.read_into([wanted], 1, True, None)
    assert not into.any()


def test_async_saves_through_one_writer_do_not_mix(pool, tmp_path):
    for bad in pool.run(1, "storage_worker", "saved_at_once", str(tmp_path / "run")):
        assert bad == [[]] * 6
    assert sorted(os.listdir(tmp_path)) == [f"run{seed}" for seed in range(6)]


def test_one_writer_serves_one_async_save_after_another(pool, tmp_path):
    for bad, places in pool.run(2, "storage_worker", "saved_async", str(tmp_path / "run"), 0):
        assert bad == [[], []] and places == 1


@pytest.mark.parametrize("keep", [True, False])
def test_a_staged_copy_keeps_the_values_of_its_time(pool, keep):
    """Also of a DTensor without dimensions, which torch's own staging does not copy."""
    for right in pool.run(2, "storage_worker", "staged_values", keep):
        assert right == [True, True]
    for right in pool.run(2, "storage_worker", "staged_elsewhere", keep):
        assert right == [True, True]


def test_a_save_returns_its_metadata_on_every_rank(pool, tmp_path):
    """On ranks that did not write it, as bytes until somebody looks."""
    said = pool.run(2, "storage_worker", "returned_metadata", str(tmp_path / "run"))
    assert said == [("Metadata", True, "Metadata"), ("Received", True, "Metadata")]


def test_plans_that_torch_keeps_are_written_as_they_are(pool, tmp_path):
    for bad, values in pool.run(
        2, "storage_worker", "saved_with_kept_plans", str(tmp_path / "run")
    ):
        assert bad == [] and values == [0, 1, 2, 3, 4]


def test_a_save_that_fails_on_one_rank_fails_on_all_and_changes_nothing(pool, tmp_path):
    path = tmp_path / "run"
    pool.run(2, "storage_worker", "save", "lowbit", str(path), 0)
    before = checkpoint.inspect(path, digest=True)["digest"]
    for said in pool.run(2, "storage_worker", "fails_on_one", str(path), 0):
        assert "CheckpointException" in said and "largest file" in said and str(path) in said
    assert checkpoint.inspect(path, digest=True)["digest"] == before
    pool.run(2, "storage_worker", "save", "lowbit", str(path), 0, 2)
    assert os.listdir(tmp_path) == ["run"]
    for bad, _ in pool.run(2, "storage_worker", "load", "lowbit", str(path), 0, 2):
        assert bad == []


def killed_saves(folder, moments, ranks=2):
    """Programs that save over and over into one path, killed after each of `moments` seconds: (rank that is killed or all, seconds).

    Yields the number of the last save that ended, as the program said, and of the one that is there.
    """
    path = pathlib.Path(folder) / "run"
    for number, (who, seconds) in enumerate(moments):
        command = [sys.executable, str(WORKER), "until_killed", f"{folder}/store{number}", str(path)]  # fmt: skip
        started = [
            subprocess.Popen([*command, str(rank), str(ranks)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            for rank in range(ranks)
        ]  # fmt: skip
        first = started[
            0
        ].stdout.readline()  # a save has ended: from here on each moment is one of a save
        assert first.strip() == "0"
        time.sleep(seconds)
        for rank in range(ranks) if who == "all" else [who]:
            started[rank].send_signal(signal.SIGKILL)
        time.sleep(0.05)
        for process in started:
            process.kill()
        said = started[0].stdout.read().split()
        for process in started:
            process.wait()
        yield int(said[-1]) if said else 0, path


def test_killed_saves_leave_the_last_checkpoint_whole(tmp_path):
    chance = random.Random(0)
    moments = [(chance.choice(["all", 0, 1]), chance.random() * 0.4) for _ in range(2)]
    for last, path in killed_saves(tmp_path, moments):
        checkpoint.verify(path)
        seeds = [seed for seed in (last, last + 1) if _holds(path, seed)]
        assert len(seeds) == 1
        partial = [name for name in os.listdir(tmp_path) if "partial" in name]
        assert partial in ([], [".run.partial-saving"])
        if partial:
            with pytest.raises(checkpoint.CheckpointError):
                checkpoint.verify(tmp_path / partial[0])
    save(storage_worker.state(0, 99), path)
    assert _holds(path, 99) and not [name for name in os.listdir(tmp_path) if "partial" in name]


def _holds(path, seed):
    state = storage_worker.state(0, seed + 1)
    load(state, path)
    return storage_worker.wrong(state, seed) == []


def test_two_saves_to_one_name_do_not_mix(tmp_path):
    from lowbit.checkpoint.partial_folder import PartialFolder

    begun, tried = threading.Event(), threading.Event()

    def another() -> None:
        running = PartialFolder(str(tmp_path / "run"), True)
        begun.set()
        tried.wait()
        running.drop()

    thread = threading.Thread(target=another)
    thread.start()
    begun.wait()
    with pytest.raises(dcp.api.CheckpointException, match=rf"another save .* process {os.getpid()} "):  # fmt: skip
        save(storage_worker.state(0), tmp_path / "run")
    tried.set()
    thread.join()
    save(storage_worker.state(0), tmp_path / "run")
    assert _holds(tmp_path / "run", 0)


def test_a_save_goes_on_after_one_that_failed(tmp_path, monkeypatch):
    """Its error, and with it the old writer, are still in somebody's hands."""
    from lowbit.checkpoint.storage_writer import Writer

    with monkeypatch.context() as patched:
        patched.setattr(Writer, "finish", lambda *_, **__: 1 / 0)
        with pytest.raises(dcp.api.CheckpointException, match="division") as kept:
            save(storage_worker.state(0), tmp_path / "run")
    assert os.listdir(tmp_path) == [".run.partial-saving"]
    save(storage_worker.state(0, 1), tmp_path / "run")
    assert os.listdir(tmp_path) == ["run"] and _holds(tmp_path / "run", 1) and kept


def test_a_file_is_never_replaced_by_a_folder(tmp_path):
    (tmp_path / "run").write_text("years of work")
    with pytest.raises(dcp.api.CheckpointException, match="exists and is not a folder"):
        save(storage_worker.state(0), tmp_path / "run")
    assert (tmp_path / "run").read_text() == "years of work" and os.listdir(tmp_path) == ["run"]
    save(storage_worker.state(0), tmp_path / "deep" / "er" / "run")
    save(storage_worker.state(0, 1), tmp_path / "deep" / "er" / "run")
    assert _holds(tmp_path / "deep" / "er" / "run", 1)
    with pytest.raises(dcp.api.CheckpointException, match="exists"):
        save(storage_worker.state(0), tmp_path / "deep" / "er" / "run", overwrite=False)


def test_nothing_outside_is_touched(tmp_path):
    """Links and files in the place of the folder that a save writes, or in it."""
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
        shutil.rmtree(
            partial
        ) if partial.is_dir() and not partial.is_symlink() else partial.unlink()
    partial.mkdir()
    (partial / "link").symlink_to(outside)
    save({"w": torch.ones(3)}, tmp_path / "run")
    assert sorted(os.listdir(outside)) == [".owner", "thesis.txt"] and not partial.exists()


def test_a_folder_that_another_save_took_is_left_to_it(tmp_path):
    from lowbit.checkpoint.partial_folder import PartialFolder

    first = PartialFolder(str(tmp_path / "run"), True)
    shutil.rmtree(first.temporary)  # as one does that found it before it had an owner
    (tmp_path / ".run.partial-saving").mkdir()
    (tmp_path / ".run.partial-saving" / ".owner").write_text("another")
    with pytest.raises(checkpoint.CheckpointError, match="another save"):
        first.publish({}, b"", b"")
    first.drop()
    assert os.listdir(tmp_path) == [".run.partial-saving"]


def test_a_fork_removes_nothing(tmp_path):
    from lowbit.checkpoint.partial_folder import PartialFolder

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
    from lowbit.checkpoint.partial_folder import OWNER, PartialFolder

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
    """The longest names that a file system has leave no room for what is added while they are written."""
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


class Evil:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def test_nothing_of_a_file_is_executed(tmp_path):
    marker, path = tmp_path / "marker", tmp_path / "run"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": torch.ones(3), "evil": Evil(marker)}, checkpoint_id=path, no_dist=True)
    state = {"w": torch.zeros(3), "evil": None}
    with pytest.raises(dcp.api.CheckpointException, match="evil is no plain data"):
        load(state, path)
    assert not marker.exists()
    part = {"w": torch.zeros(3)}
    load(part, path)
    assert part["w"].tolist() == [1, 1, 1] and not marker.exists()
    # The metadata itself, which torch's reader unpickles.
    (path / ".metadata").write_bytes(pickle.dumps(Evil(marker)))
    with pytest.raises(dcp.api.CheckpointException, match=r"posix\.system"):
        load(part, path)
    assert not marker.exists()


def test_values_with_tensors_in_them(tmp_path):
    """torch's planner flattens dicts and lists; a tuple is one value, whatever it holds (more in test_storage_values.py)."""
    rng = torch.get_rng_state()
    save({"pair": (rng, 3), "list": [rng, {"a": 3}], "w": torch.ones(3)}, tmp_path / "run")
    got = {"list": [torch.zeros_like(rng), {"a": 0}], "w": torch.zeros(3)}
    load(got, tmp_path / "run")
    assert torch.equal(got["list"][0], rng) and got["list"][1] == {"a": 3}
    pair = {"pair": None}
    load(pair, tmp_path / "run")
    assert torch.equal(pair["pair"][0], rng) and pair["pair"][1] == 3


def test_tensors_of_every_kind(tmp_path):
    """Views, other dtypes than the file's, conjugates and dtypes without a storage class of their own; the target as the caller has it."""
    torch.manual_seed(0)
    t = torch.randn(6, 8)
    state = {
        "transposed": t.t(),
        "strided": t[::2, 1::3],
        "conjugate": torch.complex(t, -t).conj(),
        "fp8": t.to(torch.float8_e4m3fn),
        "bool": t > 0,
        "uint16": torch.tensor([1, 2, 65535], dtype=torch.uint16),
        "half": t.half(),
    }
    save(state, tmp_path / "run")
    for kind in ("lowbit", "torch"):
        got = {name: torch.zeros(v.shape, dtype=v.dtype) for name, v in state.items()}
        got["half"] = torch.zeros(6, 8, dtype=torch.float64)
        got["transposed"] = torch.zeros(6, 8).t()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(
                got, storage_reader=storage_worker.reader(kind, tmp_path / "run"), no_dist=True
            )
        for name, value in state.items():
            equal = got[name].to(value.dtype) if name == "half" else got[name]
            assert torch.equal(equal.view(torch.uint8) if name == "fp8" else equal, value.view(torch.uint8) if name == "fp8" else value), (kind, name)  # fmt: skip


def test_cached_plans_of_torch_serve(tmp_path):
    planner = lambda: dcp.DefaultSavePlanner(enable_plan_caching=True)  # noqa: E731
    for seed in range(3):
        writer = checkpoint.Writer(tmp_path / f"run{seed}")
        dcp.save(storage_worker.state(0, seed), storage_writer=writer, planner=planner(), no_dist=True)  # fmt: skip
        assert _holds(tmp_path / f"run{seed}", seed)


def test_misuse_is_said_at_once(tmp_path):
    with pytest.raises(ValueError, match="thread_count"):
        checkpoint.Writer(tmp_path, thread_count=0)
    with pytest.raises(dcp.api.CheckpointException, match="Writer has no path"):
        dcp.save({}, storage_writer=checkpoint.Writer(), no_dist=True)
    with pytest.raises(ValueError, match="use_collectives=False"):
        checkpoint.Writer(tmp_path).set_up_storage_writer(True, rank=0, use_collectives=False)
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    with pytest.raises(dcp.api.CheckpointException, match="lowbit-ckpt convert"):
        load({"w": torch.zeros(2)}, tmp_path / "w.pt")
    with pytest.raises(dcp.api.CheckpointException, match="cannot open"):
        load({"w": torch.zeros(2)}, pathlib.Path(tempfile.gettempdir()) / "there" / "is" / "none")
    with pytest.raises(dcp.api.CheckpointException, match=r"sp has the layout torch\.sparse_coo"):
        save({"sp": torch.eye(3).to_sparse()}, tmp_path / "sparse")
    assert checkpoint.Writer.validate_checkpoint_id("s3://bucket/run")
    assert not checkpoint.Writer.validate_checkpoint_id("nosuch://bucket/run")
