"""Checkpoints in object stores, through fsspec's own store in memory: ranges that are read, objects
that are written, and what goes wrong on the way.
"""

import pathlib
import pickle
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter

import pytest
import torch
import torch.distributed.checkpoint as dcp

import lowbit
from lowbit import checkpoint
from lowbit.checkpoint import native
from lowbit.checkpoint.object_store import Opened
from tests.support.require import need
from tests.support.trained import trained

pytestmark = pytest.mark.long

fsspec = pytest.importorskip("fsspec")  # torch itself depends on it
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402

need("ckpt", native._checkpoint is not None, "lowbit._checkpoint is not built", module=True)
warnings.filterwarnings("ignore", message="torch.distributed is disabled")
WRITES = ("put_file", "pipe_file", "rm_file")


class Killed(BaseException):
    """The process ends here: nothing that it does afterwards has an effect."""


class Store:
    """The store in memory, which counts what is asked of it."""

    def __init__(self, monkeypatch):
        self.fs = fsspec.filesystem("memory")
        self.read, self.requests, self.written = Counter(), [], []
        self.kill_at, self.before_read = None, lambda path, start, end: None
        cat = MemoryFileSystem.cat_file

        def counted(fs, path, start=None, end=None, **options):
            assert start is not None and end is not None, "an object is read whole"
            self.before_read(path, start, end)
            got = cat(fs, path, start=start, end=end, **options)
            self.read[path.rsplit("/", 1)[-1]] += len(got)
            self.requests.append((path, start, end))
            return got

        monkeypatch.setattr(MemoryFileSystem, "cat_file", counted)
        for name in WRITES:
            monkeypatch.setattr(
                MemoryFileSystem, name, self._write(name, getattr(MemoryFileSystem, name))
            )

    def _write(self, name, does):
        def write(fs, *arguments, **options):
            at = arguments[1] if name == "put_file" else arguments[0]
            if self.kill_at is not None and len(self.written) >= self.kill_at:
                raise Killed
            self.written.append((name, at.rsplit("/", 1)[-1]))
            return does(fs, *arguments, **options)

        return write

    def put(self, local, path):
        """A file or a folder of the disk, as it is."""
        local = pathlib.Path(local)
        for file in [local] if local.is_file() else local.iterdir():
            at = path if local.is_file() else f"{path}/{file.name}"
            with self.fs.open(at, "wb") as out:
                out.write(file.read_bytes())

    def names(self, path):
        return sorted(name.rsplit("/", 1)[-1] for name in self.fs.find(path))


@pytest.fixture
def store(monkeypatch):
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield Store(monkeypatch)
    MemoryFileSystem.store.clear()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory, a file of torch.save and one of safetensors of one training."""
    net, opt = trained(steps=2)
    path = tmp_path_factory.mktemp("saved")
    state = {"model": net.state_dict(), "optim": opt.state_dict(), "note": "first"}
    dcp.save(state, checkpoint_id=path / "run", no_dist=True)
    torch.save(state, path / "run.pt")
    checkpoint.convert(path / "run.pt", path / "run.safetensors")
    return path


def without_paths(report):
    """What does not say where the checkpoint lies."""
    return {key: value for key, value in report.items() if key not in ("path", "source", "target")}


@pytest.mark.parametrize("name", ["run", "run.pt", "run.safetensors"])
def test_a_url_is_read_as_a_path_is(saved, store, name):
    store.put(saved / name, f"/bucket/{name}")
    url = f"memory://bucket/{name}"
    assert without_paths(checkpoint.inspect(url, digest=True)) == without_paths(
        checkpoint.inspect(saved / name, digest=True)
    )
    assert checkpoint.verify(url, threads=4)["ok"]
    assert checkpoint.diff(url, saved / name, bytes=True)["same"]
    with_slash = checkpoint.Checkpoint(f"{url}/")
    assert with_slash.read("model.0.weight") == checkpoint.Checkpoint(saved / name).read(
        "model.0.weight"
    )
    with_slash.finish()


def test_inspect_reads_the_index_and_no_tensor(store, tmp_path):
    state = {f"w{i}": torch.randn(1024, 1024) for i in range(4)}
    dcp.save(state, checkpoint_id=tmp_path / "run", no_dist=True)
    store.put(tmp_path / "run", "/bucket/run")
    checkpoint.inspect("memory://bucket/run")
    data = (tmp_path / "run" / "__0_0.distcp").stat().st_size
    assert store.read[".metadata"] == (tmp_path / "run" / ".metadata").stat().st_size
    assert store.read["__0_0.distcp"] == 0 and data > 16 << 20
    torch.save(state, tmp_path / "run.pt")
    store.put(tmp_path / "run.pt", "/bucket/run.pt")
    checkpoint.inspect("memory://bucket/run.pt")
    # a block at the end, and one where each record begins
    assert store.read["run.pt"] <= 8 * (16 << 10)
    assert len(store.requests) < 20


@pytest.mark.parametrize("writer", ["torch", "lowbit"])
def test_a_reshard_reads_each_byte_once(store, tmp_path, writer):
    state = {f"w{i}": torch.randn(700, 1500 + i) for i in range(5)} | {"step": 3}
    options = {} if writer == "torch" else {"storage_writer": checkpoint.Writer()}
    dcp.save(state, checkpoint_id=tmp_path / "run", no_dist=True, **options)
    store.put(tmp_path / "run", "/bucket/run")
    size = (tmp_path / "run" / "__0_0.distcp").stat().st_size
    for name, cut in (("three", {"world_size": 3}), ("columns", {"mesh": {0: 2, 1: 3}})):
        store.read.clear()
        store.requests.clear()
        checkpoint.reshard("memory://bucket/run", tmp_path / name, **cut)
        assert store.read["__0_0.distcp"] <= 1.01 * size, name
        assert len(store.requests) < 100, name
    assert checkpoint.diff("memory://bucket/run", tmp_path / "columns", bytes=True)["same"]


def test_a_universal_checkpoint_goes_to_no_store(store, tmp_path, monkeypatch):
    """It is refused before anything is read or written."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    torch.save({"w": torch.ones(3)}, tmp_path / "a.pt")
    for dry_run in (False, True):
        with pytest.raises(
            checkpoint.CheckpointError, match=r"memory://bucket/u: .*local folder"
        ) as caught:
            checkpoint.convert(
                tmp_path / "a.pt", "memory://bucket/u", container="universal", dry_run=dry_run
            )
        assert caught.value.code == 2
    assert not list((tmp_path / "tmp").iterdir()) and not store.fs.exists("/bucket/u")


def test_every_operation_reads_ranges_and_each_byte_once(store, tmp_path):
    """What docs/definitions/object-stores.md says of each: of a large directory, the data once,
    but for blocks at the ends.
    """
    url, state = "memory://bucket/run", {f"w{i}": torch.randn(1 << 20) for i in range(4)}
    dcp.save(state, storage_writer=checkpoint.Writer(url), no_dist=True)
    (data,) = (name for name in store.names("/bucket/run") if name.endswith(".distcp"))
    size = store.fs.size(f"/bucket/run/{data}")
    into = {name: torch.zeros_like(t) for name, t in state.items()}
    for work in (
        lambda: dcp.load(into, storage_reader=checkpoint.Reader(url), no_dist=True),
        lambda: checkpoint.verify(url),
        lambda: checkpoint.convert(url, tmp_path / "one.pt"),
    ):
        store.read.clear()
        work()
        assert size <= store.read[data] <= 1.03 * size
    assert all(torch.equal(into[name], t) for name, t in state.items())
    store.read.clear()
    dcp.load({"w2": into["w2"]}, storage_reader=checkpoint.Reader(url), no_dist=True)
    assert state["w2"].nbytes <= store.read[data] <= state["w2"].nbytes + (5 << 20)


def test_any_ranges_in_any_order_give_the_bytes(store, tmp_path):
    """Blocks that are kept, fetched ahead, dropped and fetched again, by several threads."""
    torch.manual_seed(0)
    t = torch.randn(3000, 1000)
    dcp.save({"w": t, "b": t[0].clone()}, checkpoint_id=tmp_path / "run", no_dist=True)
    store.put(tmp_path / "run", "/bucket/run")
    with Opened("memory://bucket/run") as name:
        read = native.native().Reader(name)
        boxes = []
        for i in range(400):
            rows, columns = (int(torch.randint(1, 40 if i % 4 else n, ())) for n in (2000, 1000))
            at = [
                int(torch.randint(0, n - size + 1, ()))
                for n, size in ((3000, rows), (1000, columns))
            ]
            boxes.append((at, torch.zeros(rows, columns)))
        wanted = [("w", at, list(into.shape), into.data_ptr(), into.nbytes) for at, into in boxes]
        for threads in (1, 4):
            read.read_into(wanted, threads, False, None)
            for (row, column), into in boxes:
                assert torch.equal(
                    into, t[row : row + into.shape[0], column : column + into.shape[1]]
                )
                into.zero_()


def test_a_command_writes_a_url(saved, store):
    source, target = saved / "run", "memory://bucket/three"
    said = checkpoint.reshard(source, target, world_size=3)
    assert said["target"] == target
    assert store.written[-2:] == [("pipe_file", "lowbit.json"), ("pipe_file", ".metadata")]
    first = store.names("/bucket/three")
    assert without_numbers(first) == [
        ".metadata",
        "__0_N.distcp",
        "__1_N.distcp",
        "__2_N.distcp",
        "lowbit.json",
    ]
    assert checkpoint.verify(target)["ok"] and checkpoint.diff(source, target)["same"]
    for again in (checkpoint.reshard, checkpoint.convert):
        with pytest.raises(checkpoint.CheckpointError, match="exists; force=True") as caught:
            again(source, target, world_size=2)
        assert caught.value.code == 2
    assert checkpoint.convert(source, target, to="lowbit", world_size=2, force=True)
    assert without_numbers(store.names("/bucket/three")) == [
        ".metadata",
        "__0_N.distcp",
        "__1_N.distcp",
        "lowbit.json",
    ]
    assert not {name for name in store.names("/bucket/three") if "distcp" in name} & {*first}
    assert checkpoint.verify(target)["ok"]
    for name in ("one.pt", "one.safetensors"):
        checkpoint.convert(target, f"memory://bucket/{name}")
        assert checkpoint.diff(target, f"memory://bucket/{name}")["same"]
        with pytest.raises(checkpoint.CheckpointError, match="exists; force=True"):
            checkpoint.convert(target, f"memory://bucket/{name}")
        checkpoint.convert(target, f"memory://bucket/{name}", force=True)


def test_what_is_not_replaced(saved, store):
    store.fs.pipe_file("/bucket/notes/thesis.txt", b"years of work")
    store.fs.pipe_file("/bucket/thesis.txt", b"years of work")
    for source, name in (("run", "notes"), ("run.pt", "thesis.txt")):
        with pytest.raises(checkpoint.CheckpointError, match="something else than a checkpoint"):
            checkpoint.convert(saved / source, f"memory://bucket/{name}", force=True)
    store.put(saved / "run", "/bucket/run")
    for target in ("memory://bucket/run", "memory://bucket"):
        with pytest.raises(
            checkpoint.CheckpointError, match=r"the source.*; choose another target"
        ):
            checkpoint.reshard("memory://bucket/run", target, world_size=2, force=True)
    with pytest.raises(checkpoint.CheckpointError, match="lies in the source memory://bucket/run"):
        checkpoint.convert(
            "memory://bucket/run", "memory://bucket/run/.metadata", container="torch", force=True
        )
    checkpoint.verify("memory://bucket/run")
    with pytest.raises(checkpoint.CheckpointError, match="exists and is a folder"):
        checkpoint.convert(saved / "run.pt", "memory://bucket/run", force=True)
    with pytest.raises(checkpoint.CheckpointError, match="machines share"):
        checkpoint.reshard(saved / "run", "memory://bucket/x", world_size=2, part=(0, 2))
    assert checkpoint.reshard(saved / "run", "memory://bucket/x", world_size=2, dry_run=True)
    assert not store.fs.exists("/bucket/x")


def without_numbers(names):
    """Names with N for the number of a file of data, which is drawn."""
    return [re.sub(r"_\d+\.distcp$", "_N.distcp", name) for name in names]


def test_an_upload_that_ends_late_changes_no_newer_checkpoint(store, monkeypatch):
    """One of a killed save: a store does not list it, so nobody can know its name."""
    late = []
    put = MemoryFileSystem.put_file

    def stopped(fs, local, path, **options):
        late.append((path, pathlib.Path(local).read_bytes()))
        raise OSError("killed")

    monkeypatch.setattr(MemoryFileSystem, "put_file", stopped)
    with pytest.raises(BaseException, match="killed"):
        save(1, "memory://bucket/run")
    monkeypatch.setattr(MemoryFileSystem, "put_file", put)
    save(2, "memory://bucket/run")
    for path, content in late:
        store.fs.pipe_file(path, content)
    assert late and load("memory://bucket/run") == 2


def save(seed, url, **options):
    state = {
        "w": torch.full((300, 300), float(seed)),
        "b": torch.full((3,), float(seed)),
        "step": seed,
    }
    dcp.save(state, storage_writer=checkpoint.Writer(url, **options), no_dist=True)


def load(url):
    state = {"w": torch.zeros(300, 300), "b": torch.zeros(3), "step": -1}
    dcp.load(state, storage_reader=checkpoint.Reader(url), no_dist=True)
    assert (state["w"] == state["step"]).all() and (state["b"] == state["step"]).all()
    return state["step"]


def test_a_save_and_a_load(store):
    url = "memory://bucket/run"
    save(1, url)
    assert load(url) == 1 and checkpoint.verify(url)["ok"]
    written = [name for _, name in store.written]
    assert without_numbers(written) == ["__0_N.distcp", "lowbit.json", ".metadata"]
    save(2, url)
    assert load(url) == 2 and checkpoint.verify(url)["ok"]
    replaced = store.names("/bucket/run")
    assert without_numbers(replaced) == [".metadata", "__0_N.distcp", "lowbit.json"]
    assert replaced[1] not in written
    with pytest.raises(BaseException, match="exists; overwrite=True"):
        save(3, url, overwrite=False)
    dcp.async_save(
        {"w": torch.ones(3)}, checkpoint_id=url, storage_writer=checkpoint.Writer(), no_dist=True
    ).result()
    assert checkpoint.Checkpoint(url).read("w") == b"\0\0\x80?" * 3


@pytest.mark.parametrize("how", ["save", "reshard"])
def test_who_is_killed_leaves_the_last_checkpoint_whole(store, tmp_path, how):
    """Killed before each of its writes, and each removal."""
    url = "memory://bucket/run"

    def write(seed):
        first = seed == 1 and ".metadata" not in store.names("/bucket/run")
        if how == "save":
            return save(seed, url, overwrite=not first)
        if not (tmp_path / str(seed)).exists():
            save(seed, tmp_path / str(seed))
        return checkpoint.reshard(tmp_path / str(seed), url, world_size=3, force=not first)

    def killed(seed, at):
        store.written.clear()
        store.kill_at = at
        try:
            write(seed)
        except BaseException as error:  # torch's CheckpointException is one
            assert "Killed" in repr(error) + str(error), error
            return True
        finally:
            store.kill_at = None
        return False

    at = 0
    while killed(1, at):  # nothing was there before
        if ".metadata" in store.names("/bucket/run"):  # it only had to tidy up
            assert load(url) == 1
            store.fs.rm("/bucket/run", recursive=True)
        with pytest.raises(checkpoint.CheckpointError, match=r"did not finish|No such file"):
            checkpoint.inspect(url)
        at += 1
    assert at >= 3 and load(url) == 1
    seen, at = set(), 0
    while killed(2, at):
        seen.add(load(url))
        assert checkpoint.verify(url)["ok"]
        save(1, url)
        at += 1
    assert load(url) == 2 and seen == {1, 2} and at >= 5
    left = 3 if how == "save" else 5
    assert len(store.names("/bucket/run")) == left  # what the killed ones left is gone


def test_an_upload_that_fails_leaves_nothing(saved, store, monkeypatch):
    put = MemoryFileSystem.put_file

    def full(fs, local, path, **options):
        if re.search(r"__1_\d+.distcp$", path):
            raise OSError("quota exceeded")
        return put(fs, local, path, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", full)
    with pytest.raises(
        checkpoint.CheckpointError,
        match=r"memory://bucket/x/__1_\d+.distcp: cannot write it: OSError: quota exceeded",
    ):
        checkpoint.reshard(saved / "run", "memory://bucket/x", world_size=3)
    assert store.names("/bucket/x") == []

    def torn(fs, local, path, **options):
        fs.pipe_file(path, pathlib.Path(local).read_bytes()[:-1])

    monkeypatch.setattr(MemoryFileSystem, "put_file", torn)
    with pytest.raises(checkpoint.CheckpointError, match="was not published"):
        checkpoint.reshard(saved / "run", "memory://bucket/x", world_size=3)


def test_what_changes_while_it_is_read_is_noticed(saved, store):
    url = "memory://bucket/run"
    store.put(saved / "run", "/bucket/run")
    file = checkpoint.Checkpoint(url)
    file.read("model.0.weight")
    content = store.fs.store["/bucket/run/__0_0.distcp"].getvalue()
    store.fs.pipe_file("/bucket/run/__0_0.distcp", content)  # the same bytes, another object
    with pytest.raises(
        checkpoint.CheckpointError, match=r"__0_0.distcp: changed while it was read"
    ):
        file.finish()
    file = checkpoint.Checkpoint(url)
    store.fs.pipe_file("/bucket/run/__0_0.distcp", content[: len(content) // 2])
    with pytest.raises(
        checkpoint.CheckpointError,
        match=r"memory://bucket/run/__0_0.distcp: returned \d+ bytes for range \d+-\d+",
    ):
        for name in file.tensors:
            file.read(name)
    with pytest.raises(checkpoint.CheckpointError, match="the file is cut off"):
        checkpoint.inspect(url)
    store.fs.rm_file("/bucket/run/__0_0.distcp")
    with pytest.raises(
        checkpoint.CheckpointError, match=r"__0_0.distcp: was deleted while"
    ) as caught:
        for name in file.tensors:
            file.read(name)
    assert caught.value.code == 3


def test_names_lead_nowhere_else(saved, store, tmp_path):
    store.put(saved / "run", "/bucket/secret")
    for name in ("../secret/__0_0.distcp", "a::memory://bucket/secret/__0_0.distcp", ".."):
        metadata = pickle.loads((saved / "run" / ".metadata").read_bytes())
        for info in metadata.storage_data.values():
            info.relative_path = name
        store.fs.pipe_file("/bucket/run/.metadata", pickle.dumps(metadata))
        store.requests.clear()
        with pytest.raises(checkpoint.CheckpointError, match="leads out of"):
            checkpoint.inspect("memory://bucket/run")
        assert {path for path, _, _ in store.requests} == {"/bucket/run/.metadata"}


def test_messages_have_no_terminal_codes(saved, store):
    metadata = pickle.loads((saved / "run" / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "\x1b[31m.distcp"
    store.put(saved / "run", "/bucket/run")
    store.fs.pipe_file("/bucket/run/.metadata", pickle.dumps(metadata))
    content = store.fs.store["/bucket/run/__0_0.distcp"].getvalue()
    store.fs.pipe_file("/bucket/run/\x1b[31m.distcp", content)
    file = checkpoint.Checkpoint("memory://bucket/run")
    store.fs.rm_file("/bucket/run/\x1b[31m.distcp")
    with pytest.raises(checkpoint.CheckpointError, match="was deleted while") as caught:
        for name in file.tensors:
            file.read(name)
    assert "\x1b" not in str(caught.value) and r"\x1b[31m.distcp" in str(caught.value)


def test_a_store_that_tells_no_size(saved, store, monkeypatch):
    store.put(saved / "run.pt", "/bucket/run.pt")
    info = MemoryFileSystem.info
    monkeypatch.setattr(MemoryFileSystem, "info", lambda *a, **o: {**info(*a, **o), "size": None})
    with pytest.raises(checkpoint.CheckpointError, match="does not tell its size"):
        checkpoint.inspect("memory://bucket/run.pt")


def test_state_loads_into_an_optimizer(saved, store):
    for name in ("run", "run.pt"):
        store.put(saved / name, f"/bucket/{name}")
        net, _ = trained(steps=2, seed=1)
        both = []
        for path in (saved / name, f"memory://bucket/{name}"):
            opt = lowbit.AdamW(net.named_parameters(), lr=1e-2)
            lowbit.load_optimizer(opt, path, model=net)
            both.append(opt.state_dict()["state"])
        for i in both[0]:
            for key, value in both[0][i].items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(both[1][i][key])), key
    with pytest.raises(FileNotFoundError, match="there is no checkpoint at memory://bucket/none"):
        lowbit.load_optimizer(opt, "memory://bucket/none")


def test_threads_read_at_once(store, tmp_path):
    """Each request releases the GIL; nothing waits for itself."""
    dcp.save(
        {f"w{i}": torch.randn(64, 1024) for i in range(16)},
        checkpoint_id=tmp_path / "run",
        no_dist=True,
    )
    store.put(tmp_path / "run", "/bucket/run")
    at_once, most, lock = 0, 0, threading.Lock()

    def slow(path, start, end):
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.01)
        with lock:
            at_once -= 1

    store.before_read = slow
    assert checkpoint.verify("memory://bucket/run", threads=8)["ok"]
    assert most > 1


def test_ctrl_c_in_a_request_is_ctrl_c(saved, store):
    store.put(saved / "run", "/bucket/run")

    def interrupt(path, start, end):
        raise KeyboardInterrupt

    store.before_read = interrupt
    with pytest.raises(KeyboardInterrupt):
        checkpoint.Checkpoint("memory://bucket/run")
    store.before_read = lambda path, start, end: None
    checkpoint.Checkpoint("memory://bucket/run").finish()


def test_errors_say_what_to_do(store, monkeypatch):
    with pytest.raises(
        checkpoint.CheckpointError, match="cannot open memory://bucket/none: No such file"
    ):
        checkpoint.inspect("memory://bucket/none")
    with pytest.raises(checkpoint.CheckpointError, match=r"nosuch://x: cannot open it: .*nosuch"):
        checkpoint.inspect("nosuch://x")
    with Opened("memory://bucket/a"), pytest.raises(ValueError, match="open with other"):
        Opened("memory://bucket/a", {"other": 1})
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ImportError, match=r"pip install 'fsspec>=2024\.2'"):
        checkpoint.inspect("memory://bucket/none")


def test_messages_name_the_url(saved, store):
    """The copy under TMPDIR is named where it is what went wrong, after the URL."""
    for command, url, options in (
        (checkpoint.reshard, "memory://bucket/a.pt", {"world_size": 2}),
        (checkpoint.convert, "memory://bucket/b.pt", {"world_size": 2}),
    ):
        with pytest.raises(checkpoint.CheckpointError) as caught:
            command(saved / "run.pt", url, **options)
        assert url in caught.value.text and "lowbit-" not in caught.value.text
        assert caught.value.code == 2
    url = f"memory://bucket/{'long' * 80}.safetensors"
    assert checkpoint.convert(saved / "run.pt", url)["target"] == url
    assert checkpoint.inspect(url)["container"] == "safetensors"
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        with pytest.raises(checkpoint.CheckpointError) as caught:
            checkpoint.convert(saved / "run.pt", "memory://bucket/c.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    said = caught.value.text
    assert (
        said.startswith("memory://bucket/c.pt is written to TMPDIR first: ")
        and "/c.pt grows beyond" in said
    )
    assert caught.value.code == 1 and not store.fs.exists("/bucket/c.pt")


def test_a_file_url_is_a_path(saved):
    local = checkpoint.inspect(saved / "run")
    assert checkpoint.inspect(f"file://{saved}/run") == local


def test_the_program_sends_to_python(saved, tmp_path):
    for arguments in (
        ["inspect", "s3://bucket/run"],
        ["reshard", saved / "run", "s3://bucket/two", "--world-size", "2"],
        ["convert", saved / "run", "s3://bucket/x.pt"],
    ):
        done = subprocess.run(["lowbit-ckpt", *arguments], capture_output=True, text=True)
        assert done.returncode == 2 and "lowbit.checkpoint.inspect" in done.stderr, done.stderr
        assert "s3://bucket/" in done.stderr
