"""Checkpoints in S3: moto's server on this machine, through s3fs. Several ranks, a kill in the
middle of a save, and credentials that do not fit.
"""

import gc
import pickle
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import torch
import torch.distributed.checkpoint as dcp

import lowbit
from lowbit import checkpoint
from lowbit.checkpoint import native
from tests.checkpoint.storage import storage_worker
from tests.support.ranks import forked
from tests.support.require import need

pytestmark = pytest.mark.long

need("ckpt", native._checkpoint is not None, "lowbit._checkpoint is not built", module=True)
try:
    import moto.server  # noqa: F401
    import s3fs
except ImportError as error:
    need("s3", False, f"{error.name} is not installed: pip install moto[server] s3fs", module=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The URL of a server that lives as long as this file's tests, with an empty bucket; every
    process finds it, by fsspec's own variables.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("moto") / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=out,
            stderr=out,
        )
    url = f"http://127.0.0.1:{port}"
    for _ in range(600):
        try:
            urllib.request.urlopen(f"{url}/moto-api/", timeout=5).read()
            break
        except OSError:
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
    yield url
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def options(server):
    made = {"endpoint_url": server, "key": "testing", "secret": "testing"}
    s3fs.S3FileSystem(**made).mkdir("bucket")
    return made


@pytest.fixture
def everywhere(server, monkeypatch):
    """Programs that the test starts find the server without being told."""
    for name, value in (("ENDPOINT_URL", server), ("KEY", "testing"), ("SECRET", "testing")):
        monkeypatch.setenv(f"FSSPEC_S3_{name}", value)


def test_a_checkpoint_goes_there_and_back(options, tmp_path):
    state = {"w": torch.randn(512, 3000), "b": torch.randn(7).bfloat16(), "step": 3}
    url = "s3://bucket/there/run"
    dcp.save(state, storage_writer=checkpoint.Writer(url, storage_options=options), no_dist=True)
    assert checkpoint.verify(url, threads=4, storage_options=options)["ok"]
    said = checkpoint.reshard(url, "s3://bucket/there/three", world_size=3, storage_options=options)
    assert said["ranks"] == 3
    checkpoint.reshard(url, tmp_path / "three", world_size=3, storage_options=options)
    s3 = s3fs.S3FileSystem(**options)
    there = {path.rpartition("/")[2]: s3.cat_file(path) for path in s3.ls("bucket/there/three")}
    metadata = pickle.loads(there.pop(".metadata"))
    assert metadata.storage_meta.checkpoint_id == "s3://bucket/there/three"
    here = {file.name: file.read_bytes() for file in (tmp_path / "three").iterdir()}
    data = [sorted(v for k, v in found.items() if k.endswith(".distcp")) for found in (there, here)]
    assert len(data[0]) == 3 and data[0] == data[1]  # under drawn numbers
    loaded = {"w": torch.zeros(512, 3000), "b": torch.zeros(7).bfloat16(), "step": 0}
    dcp.load(
        loaded,
        storage_reader=checkpoint.Reader("s3://bucket/there/three", storage_options=options),
        no_dist=True,
    )
    assert all(torch.equal(torch.as_tensor(state[k]), torch.as_tensor(loaded[k])) for k in state)
    checkpoint.convert(url, "s3://bucket/there/one.pt", storage_options=options)
    assert checkpoint.diff(url, "s3://bucket/there/one.pt", storage_options=options)["same"]
    with pytest.raises(checkpoint.CheckpointError, match="exists; force=True replaces it"):
        checkpoint.convert(url, "s3://bucket/there/one.pt", storage_options=options)


def test_an_optimizer_is_inspected_and_loaded_from_there(options):
    model = torch.nn.Linear(64, 96)
    opt = lowbit.AdamW(model.named_parameters(), lr=1e-3)
    model(torch.ones(2, 64)).sum().backward()
    opt.step()
    url = "s3://bucket/optimizer/run"
    state = {"model": model.state_dict(), "optim": opt.state_dict()}
    dcp.save(state, storage_writer=checkpoint.Writer(url, storage_options=options), no_dist=True)
    said = checkpoint.inspect(url, digest=True, storage_options=options)
    assert said["digest"] and said["path"] == url
    other = lowbit.AdamW(model.named_parameters(), lr=0.5)
    lowbit.load_optimizer(other, url, model=model, storage_options=options)
    for name, value in opt.state[model.weight].items():
        assert torch.equal(
            torch.as_tensor(other.state[model.weight][name]), torch.as_tensor(value)
        ), name
    assert other.param_groups[0]["lr"] == 1e-3


@pytest.mark.parametrize("dim, other", [(0, 0), (0, 1)])
def test_ranks_save_and_load(pool, options, dim, other):
    url = f"s3://bucket/ranks/{dim}-{other}"
    read = pool.run(3, storage_worker.there_and_back, url, options, dim, other)
    assert all(bad == [] for bad, _, _ in read)
    # of what all of them need, one asks the store
    assert sum(received for _, _, received in read) > 0
    assert checkpoint.verify(url, storage_options=options)["ok"]


def test_a_killed_save_leaves_the_last_checkpoint_whole(options, tmp_path):
    """Two ranks save over and over to one URL, and are killed at a random moment."""
    chance, url = random.Random(1), "s3://bucket/killed/run"
    for number in range(2):
        store = tmp_path / f"store{number}"
        started = [
            forked.start(storage_worker.until_killed, store, url, rank, 2, options)
            for rank in range(2)
        ]
        _, printed = started[0]
        assert printed.readline().strip() == "0"
        time.sleep(chance.random())
        for process, _ in started:
            process.kill()
        said = printed.read().split()
        for process, _ in started:
            process.join()
        last = int(said[-1]) if said else 0
        assert checkpoint.verify(url, storage_options=options)["ok"]
        held = [seed for seed in (last, last + 1) if _holds(url, options, seed)]
        assert len(held) == 1
    dcp.save(
        storage_worker.state(0, 99),
        storage_writer=checkpoint.Writer(url, storage_options=options),
        no_dist=True,
    )
    assert _holds(url, options, 99)
    assert len(s3fs.S3FileSystem(**options).ls("bucket/killed/run", refresh=True)) == 3


def _holds(url, options, seed):
    loaded = storage_worker.state(0, seed + 5)
    dcp.load(loaded, storage_reader=checkpoint.Reader(url, storage_options=options), no_dist=True)
    return storage_worker.wrong(loaded, seed) == []


def test_a_first_save_that_is_killed_is_no_checkpoint(options, everywhere):
    script = (
        "import os, signal, torch, torch.distributed.checkpoint as dcp\n"
        "from lowbit import checkpoint\nfrom lowbit.checkpoint.upload import Upload\n"
        "Upload.publish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "dcp.save({'w': torch.ones(3)}, storage_writer=checkpoint.Writer('s3://bucket/first/run'), "
        "no_dist=True)\n"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == -signal.SIGKILL
    with pytest.raises(checkpoint.CheckpointError, match="the save did not finish"):
        checkpoint.inspect("s3://bucket/first/run", storage_options=options)


def test_what_is_wrong_is_one_clear_error(options, server, monkeypatch):
    with pytest.raises(
        checkpoint.CheckpointError, match="cannot open s3://bucket/none: No such file"
    ):
        checkpoint.inspect("s3://bucket/none", storage_options=options)
    with pytest.raises(checkpoint.CheckpointError, match="s3://nobody/none"):
        checkpoint.inspect("s3://nobody/none", storage_options=options)
    s3 = s3fs.S3FileSystem(**options)
    state = {"w": torch.randn(300, 300)}
    url = "s3://bucket/wrong/run"
    dcp.save(state, storage_writer=checkpoint.Writer(url, storage_options=options), no_dist=True)
    (data,) = s3.glob("bucket/wrong/run/__0_*.distcp")
    content = s3.cat_file(data)
    open_file = checkpoint.Checkpoint(url, options)
    s3.pipe_file(data, content[:1000])
    with pytest.raises(checkpoint.CheckpointError, match=r"s3://bucket/wrong/run/__0_\d+\.distcp"):
        open_file.read("w")
    with pytest.raises(checkpoint.CheckpointError, match="the file is cut off"):
        checkpoint.verify(url, storage_options=options)
    s3.rm_file(data)
    with pytest.raises(checkpoint.CheckpointError, match=r"__0_\d+\.distcp: was deleted while"):
        open_file.read("w")
    # From here on the server asks who one is.
    del open_file
    gc.collect()
    requests(f"{server}/moto-api/reset-auth", b"0")
    try:
        stranger = {**options, "key": "AKIASTRANGER", "secret": "wrong"}
        for doing in (checkpoint.inspect, checkpoint.verify):
            with pytest.raises(
                checkpoint.CheckpointError, match=f"{url}: cannot open it: .*check the credentials"
            ):
                doing(url, storage_options=stranger)
    finally:
        requests(f"{server}/moto-api/reset-auth", b"inf")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    with pytest.raises(checkpoint.CheckpointError, match=r"NoCredentials.*check the credentials"):
        checkpoint.inspect(url, storage_options={"endpoint_url": server, "anon": False})


def requests(url, body):
    asked = urllib.request.Request(
        url, data=body, method="POST", headers={"Content-Type": "text/plain"}
    )
    urllib.request.urlopen(asked, timeout=10).read()
