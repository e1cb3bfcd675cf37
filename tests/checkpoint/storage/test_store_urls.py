"""URLs at the door of a store: which are refused and in which words, what they may replace, and who
may have the same one open.
"""

import gc
import gzip
import pathlib
import re
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import lowbit
from lowbit import checkpoint
from lowbit.checkpoint import native, object_store
from lowbit.checkpoint.object_store import Opened
from tests.support.files.deepspeed import small_run, write_universal, write_zero
from tests.support.require import need

fsspec = pytest.importorskip("fsspec")  # torch itself depends on it
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402

need("ckpt", native._checkpoint is not None, "lowbit._checkpoint is not built", module=True)


@pytest.fixture
def fs():
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield fsspec.filesystem("memory")
    MemoryFileSystem.store.clear()


def test_a_url_that_went_through_pathlib(tmp_path, monkeypatch):
    """pathlib.Path("s3://bucket/run") is s3:/bucket/run,
    which would be a folder of this machine.
    """
    monkeypatch.chdir(tmp_path)

    def load(path):
        return lowbit.load_optimizer(lowbit.AdamW([nn.Parameter(torch.ones(3))]), path)

    for call in (checkpoint.Writer, checkpoint.Reader, checkpoint.verify, load):
        with pytest.raises(checkpoint.CheckpointError, match="pass text: 's3://bucket/run'"):
            call(pathlib.Path("s3://bucket/run"))
    (tmp_path / "s3:" / "bucket").mkdir(parents=True)
    assert not object_store.is_url(pathlib.Path("s3:/bucket/run"))
    assert not object_store.is_url("s3:/bucket/run")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    dcp.save({"w": torch.ones(300, 3)}, checkpoint_id=path / "run", no_dist=True)
    torch.save({"w": torch.ones(300, 3)}, path / "run.pt")
    return path


def save(url, **options):
    dcp.save(
        {"w": torch.zeros(300, 3)}, storage_writer=checkpoint.Writer(url, **options), no_dist=True
    )


def names(fs, path):
    return sorted(name.removeprefix(f"{path}/") for name in fs.find(path))


def in_thread(work):
    """What `work` returns or raises in another thread."""
    out = []

    def run():
        try:
            out.append(work())
        except Exception as error:
            out.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return out[0]


def test_two_threads_have_one_url_open(fs):
    """fsspec makes a file system for each thread, of the same options."""
    url = "memory://bucket/run"
    with Opened(url, {"a": 1}) as name:
        assert in_thread(lambda: Opened(url, {"a": 1}).name) == name
        other = in_thread(lambda: Opened(url, {"a": 2}))
        assert isinstance(other, ValueError) and "open with other storage_options" in str(other)
    with Opened(url, {"a": 2}):  # the first options went with who had them
        assert object_store.location(name).fs.storage_options == {"a": 2}


def test_a_url_stays_open_as_long_as_anybody_has_it(fs):
    url = "memory://bucket/run"
    first, second = Opened(url, {"a": 1}), Opened(url, {"a": 1})
    del first
    assert object_store.location(second.name + b"/x").fs.storage_options == {"a": 1}
    kept = object_store.location(second.name)  # as C++ keeps it
    with second:
        pass
    assert object_store.location(second.name).fs.storage_options == {} and kept.url == url


def test_the_garbage_collector_closes_inside_the_lock(fs):
    """It may run at any allocation, in the thread that has the lock."""

    class Cycle:
        def __init__(self):
            self.itself, self.opened = self, Opened("memory://bucket/run", {"a": 1})

    def collected():
        cycle = Cycle()
        with object_store._LOCK:
            del cycle
            gc.collect()
        return Opened("memory://bucket/run").name

    done = []
    thread = threading.Thread(target=lambda: done.append(collected()), daemon=True)
    thread.start()
    thread.join(10)
    assert done == [b"memory://bucket/run"], "it waits for itself"


@pytest.mark.parametrize("force", [False, True])
def test_an_object_is_no_folder(saved, fs, force):
    """Objects below its name would be a checkpoint that no reader finds: they all look for the
    object first.
    """
    content = (saved / "run.pt").read_bytes()
    fs.pipe_file("/bucket/run.pt", content)
    url, words = "memory://bucket/run.pt", "exists and is an object, not a folder; choose another"
    for write in (
        lambda: save(url, overwrite=force),
        lambda: checkpoint.reshard(saved / "run", url, world_size=2, force=force, dry_run=True),
        lambda: checkpoint.reshard(saved / "run", url, world_size=2, force=force),
        lambda: checkpoint.convert(saved / "run", url, container="dcp", force=force, dry_run=True),
        lambda: checkpoint.convert(saved / "run", url, container="dcp", force=force),
    ):
        with pytest.raises(BaseException, match=words) as caught:
            write()
        assert not isinstance(caught.value, checkpoint.CheckpointError) or caught.value.code == 2
    assert names(fs, "/bucket") == ["run.pt"] and fs.cat("/bucket/run.pt") == content


def test_a_folder_is_no_object(saved, fs):
    save("memory://bucket/run.pt")
    for more in ({}, {"container": "safetensors"}):
        with pytest.raises(
            checkpoint.CheckpointError, match="exists and is a folder, not an object"
        ):
            checkpoint.convert(
                saved / "run.pt", "memory://bucket/run.pt", force=True, dry_run=True, **more
            )


@pytest.mark.parametrize(
    "url",
    [
        "ftp://user:hunter2@host/run",
        "simplecache::ftp://user:hunter2@host/run",
        "ftp://:hunter2@host/run",
        "https://host/run?X-Amz-Date=1&X-Amz-Signature=hunter2",
        "https://host/run?x-goog-signature=hunter2",
        "https://host/run?sv=1&sig=hunter2",
    ],
)
def test_a_password_is_in_no_message(saved, tmp_path, url):
    opt = lowbit.AdamW(nn.Linear(2, 2).parameters())
    for use in (
        lambda: checkpoint.inspect(url),
        lambda: checkpoint.diff(saved / "run", url),
        lambda: checkpoint.Checkpoint(url),
        lambda: checkpoint.convert(url, tmp_path / "x.pt"),
        lambda: checkpoint.convert(saved / "run", url),
        lambda: checkpoint.reshard(saved / "run", url, world_size=2),
        lambda: checkpoint.reshard(saved / "run", url, world_size=2, part=(0, 2)),
        lambda: lowbit.load_optimizer(opt, url),
        lambda: checkpoint.Writer(url),
        lambda: checkpoint.Reader(url),
        lambda: checkpoint.Writer().reset(url),
        lambda: object_store.connect(url),
    ):
        with pytest.raises(
            checkpoint.CheckpointError, match="pass it by storage_options="
        ) as caught:
            use()
        assert "hunter2" not in str(caught.value) and caught.value.code == 2
        assert caught.value.__context__ is None
    assert str(caught.value).startswith(f"{url.split('://', 1)[0]}://...: ")


def test_what_has_no_secret_is_a_url(fs):
    for url in ("abfs://container@account/run", "s3://bucket/a:b@c", "http://host:80/run?design=1"):
        assert object_store.is_url(url) and object_store.local_path(url) == url.encode()


def test_what_is_a_url(saved, tmp_path, monkeypatch):
    """As C++ has it; a scheme alone would be a folder of this machine, "memory:"."""
    for path in ("/a/s3://b", "a b://c", "x/y://z", "s3:/bucket", "://x", "run\ns3://b"):
        assert not object_store.is_url(path), path
    for path in ("file:///tmp/x", "local:///tmp/x"):
        assert not object_store.is_url(path) and object_store.local_path(path) == b"/tmp/x"
    assert object_store.is_url(b"a+b-c.1::s3://x")
    monkeypatch.chdir(tmp_path)
    for url in ("s3://", "memory://", "memory:///", "gs:////"):
        for use in (
            lambda: checkpoint.inspect(url),  # noqa: B023
            lambda: checkpoint.reshard(saved / "run", url, world_size=2),  # noqa: B023
            lambda: save(url),  # noqa: B023
            lambda: checkpoint.Reader(url),  # noqa: B023
        ):
            with pytest.raises(
                checkpoint.CheckpointError, match=f"{url}: names no bucket"
            ) as caught:
                use()
            assert caught.value.code == 2
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_first_save_left_is_replaced_without_force(saved, fs):
    for name in ("__0_0.distcp", "__1_0.distcp", "lowbit.json"):
        fs.pipe_file(f"/bucket/run/{name}", b"half of it")
    assert checkpoint.reshard(saved / "run", "memory://bucket/run", world_size=2, dry_run=True)
    checkpoint.reshard(saved / "run", "memory://bucket/run", world_size=2)
    whole = [re.sub(r"_\d+\.distcp", "_N.distcp", name) for name in names(fs, "/bucket/run")]
    assert whole == [".metadata", "__0_N.distcp", "__1_N.distcp", "lowbit.json"]
    assert not {"__0_0.distcp", "__1_0.distcp"} & {*names(fs, "/bucket/run")}
    assert checkpoint.verify("memory://bucket/run")["ok"]
    for path in ("/bucket/run", "/bucket/more"):  # a checkpoint, and something of somebody's
        fs.pipe_file(f"{path}/__0_0.distcp", b"half of it")
        fs.pipe_file(f"{path}/{'.metadata' if path == '/bucket/run' else 'notes.txt'}", b"x")
        with pytest.raises(checkpoint.CheckpointError, match="exists; force=True"):
            checkpoint.reshard(saved / "run", f"memory:/{path}", world_size=2)
    with pytest.raises(BaseException, match="exists; overwrite=True"):
        save("memory://bucket/run", overwrite=False)
    save("memory://bucket/more", overwrite=False)  # no checkpoint yet, as torch has it
    assert (
        fs.cat_file("/bucket/more/notes.txt") == b"x"
        and checkpoint.verify("memory://bucket/more")["ok"]
    )


def test_force_replaces_no_archive(saved, fs, tmp_path):
    """Made without a time it has zeros where the length of a safetensors header has them."""
    content = gzip.compress(b"years of work", mtime=0)
    assert content[6:8] == b"\0\0"
    fs.pipe_file("/bucket/notes.tar.gz", content)
    (tmp_path / "notes.tar.gz").write_bytes(content)
    for target in ("memory://bucket/notes.tar.gz", tmp_path / "notes.tar.gz"):
        with pytest.raises(
            checkpoint.CheckpointError, match=r"something else than|neither a checkpoint"
        ):
            checkpoint.convert(saved / "run.pt", target, container="torch", force=True)
    assert (tmp_path / "notes.tar.gz").read_bytes() == fs.cat("/bucket/notes.tar.gz") == content
    for target in ("memory://bucket/a.safetensors", tmp_path / "a.safetensors"):
        for _ in range(2):
            checkpoint.convert(saved / "run.pt", target, force=True)


@pytest.mark.parametrize("kind", ["zero 1", "zero 2", "zero 3", "universal 2"])
def test_folders_of_deepspeed_are_sources_in_a_store(fs, tmp_path, kind):
    """Of several files of which none is an index: all commands say and write what they do on a
    disk.
    """
    name, stage = kind.split()
    write = write_zero if name == "zero" else write_universal
    local = write(tmp_path / "global_step3", small_run(), int(stage), 2)
    for file in local.rglob("*"):
        if file.is_file():
            fs.pipe_file(f"/z/global_step3/{file.relative_to(local)}", file.read_bytes())
    url = "memory://z/global_step3"
    for command in (checkpoint.inspect, checkpoint.verify):
        here, there = command(local), command(url)
        assert {**here, "path": ""} == {**there, "path": ""}
    assert checkpoint.diff(local, url)["same"]
    for target, options in (
        ("out", {"container": "dcp", "to": "lowbit", "world_size": 2}),
        ("out.pt", {}),
    ):
        checkpoint.convert(local, tmp_path / target, **options)
        checkpoint.convert(url, f"memory://z/{target}", **options)
        checkpoint.convert(url, tmp_path / f"of-store-{target}", **options)
        for made in (f"memory://z/{target}", tmp_path / f"of-store-{target}"):
            assert checkpoint.diff(tmp_path / target, made, bytes=True)["same"]
    fs.rm_file(next(f for f in fs.find("/z/global_step3") if "optim_states" in f or "exp_avg" in f))
    with pytest.raises(checkpoint.CheckpointError):
        checkpoint.convert(url, tmp_path / "damaged.pt")
    assert not (tmp_path / "damaged.pt").exists()
