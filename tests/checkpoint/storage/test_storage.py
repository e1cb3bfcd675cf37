"""lowbit.checkpoint.Writer and Reader instead of torch's FileSystemWriter and
FileSystemReader: layouts, async saves, and every kind of value.
"""

import json
import os
import pathlib
import tempfile
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lowbit import checkpoint
from tests.checkpoint.storage import storage_worker
from tests.checkpoint.storage.storage_files import holds, load, save

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["lowbit", "torch"])
def written(request, pool, tmp_path_factory):
    """A directory of two ranks, and whose it is."""
    path = str(tmp_path_factory.mktemp("written") / "run")
    pool.run(2, storage_worker.save, request.param, path, 0)
    return request.param, path


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_any_layout_loads_what_two_ranks_saved(pool, written, ranks, dim):
    kind, path = written
    for bad, _ in pool.run(ranks, storage_worker.load, "lowbit", path, dim):
        assert bad == []
    if kind == "lowbit" and ranks in (2, 3):
        for bad, _ in pool.run(ranks, storage_worker.load, "torch", path, dim):
            assert bad == []


def test_the_tool_reads_what_a_save_wrote(written):
    kind, path = written
    checkpoint.verify(path)
    if kind == "lowbit":
        recorded = json.loads((pathlib.Path(path) / "lowbit.json").read_text())
        assert set(recorded["tensors"]) == {f"model.{name}" for name in storage_worker.tensors()}
        assert {"step", "dtype"} <= set(recorded["values"])


def test_async_saves_through_one_writer_do_not_mix(pool, tmp_path):
    for bad in pool.run(1, storage_worker.saved_at_once, str(tmp_path / "run")):
        assert bad == [[]] * 6
    assert sorted(os.listdir(tmp_path)) == [f"run{seed}" for seed in range(6)]


def test_one_writer_serves_one_async_save_after_another(pool, tmp_path):
    for bad, places in pool.run(2, storage_worker.saved_async, str(tmp_path / "run"), 0):
        assert bad == [[], []] and places == 1


@pytest.mark.parametrize("keep", [True, False])
def test_a_staged_copy_keeps_the_values_of_its_time(pool, keep):
    """Also of a DTensor without dimensions, which torch's own staging does not copy."""
    for right in pool.run(2, storage_worker.staged_values, keep):
        assert right == [True, True]
    for right in pool.run(2, storage_worker.staged_elsewhere, keep):
        assert right == [True, True]


def test_a_save_returns_its_metadata_on_every_rank(pool, tmp_path):
    """On ranks that did not write it, as bytes until somebody looks."""
    said = pool.run(2, storage_worker.returned_metadata, str(tmp_path / "run"))
    assert said == [("Metadata", True, "Metadata"), ("Received", True, "Metadata")]


def test_plans_that_torch_keeps_are_written_as_they_are(pool, tmp_path):
    for bad, values in pool.run(2, storage_worker.saved_with_kept_plans, str(tmp_path / "run")):
        assert bad == [] and values == [0, 1, 2, 3, 4]


def test_values_with_tensors_in_them(tmp_path):
    """torch's planner flattens dicts and lists; a tuple is one value,
    whatever it holds (more in test_storage_values.py).
    """
    rng = torch.get_rng_state()
    save({"pair": (rng, 3), "list": [rng, {"a": 3}], "w": torch.ones(3)}, tmp_path / "run")
    got = {"list": [torch.zeros_like(rng), {"a": 0}], "w": torch.zeros(3)}
    load(got, tmp_path / "run")
    assert torch.equal(got["list"][0], rng) and got["list"][1] == {"a": 3}
    pair = {"pair": None}
    load(pair, tmp_path / "run")
    assert torch.equal(pair["pair"][0], rng) and pair["pair"][1] == 3


def test_tensors_of_every_kind(tmp_path):
    """Views, other dtypes than the file's, conjugates and dtypes without a storage class of their
    own; the target as the caller has it.
    """
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
            assert torch.equal(
                equal.view(torch.uint8) if name == "fp8" else equal,
                value.view(torch.uint8) if name == "fp8" else value,
            ), (kind, name)


def test_cached_plans_of_torch_serve(tmp_path):
    planner = lambda: dcp.DefaultSavePlanner(enable_plan_caching=True)  # noqa: E731
    for seed in range(3):
        writer = checkpoint.Writer(tmp_path / f"run{seed}")
        dcp.save(
            storage_worker.state(0, seed), storage_writer=writer, planner=planner(), no_dist=True
        )
        assert holds(tmp_path / f"run{seed}", seed)


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
