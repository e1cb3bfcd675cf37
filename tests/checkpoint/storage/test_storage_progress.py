"""How far a save or a load is, and how a caller stops it."""

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lowbit import checkpoint
from tests.checkpoint.storage import storage_worker

STATE = {"a": torch.ones(300, 1000), "b": torch.ones(7), "step": 3, "empty": torch.zeros(0, 3)}
TOTAL = 4 * (300_000 + 7)


def save(path, state=None, **options):
    dcp.save(state or STATE, storage_writer=checkpoint.Writer(path, **options), no_dist=True)


def zeros():
    return {
        name: torch.zeros_like(t) if isinstance(t, torch.Tensor) else 0 for name, t in STATE.items()
    }


def rising(told, total):
    return told == sorted(told) and told[-1] == (total, total) and {of for _, of in told} == {total}


def test_it_ends_with_all_bytes(tmp_path, monkeypatch):
    told = []
    save(tmp_path / "run", progress=lambda *bytes: told.append(bytes))
    assert rising(told, TOTAL)
    told.clear()
    got = zeros()
    reader = checkpoint.Reader(tmp_path / "run", progress=lambda *bytes: told.append(bytes))
    dcp.load(got, storage_reader=reader, no_dist=True)
    assert rising(told, TOTAL) and torch.equal(got["a"], STATE["a"])
    # In several batches, of tensors that are copied on their way.
    from lowbit.checkpoint import storage

    monkeypatch.setattr(storage.writer, "COPIED", 1000)
    monkeypatch.setattr(storage.reader, "COPIED", 1000)
    told.clear()
    many = {f"w{i}": torch.ones(30, 20).t() for i in range(9)}
    save(tmp_path / "many", many, progress=lambda *bytes: told.append(bytes))
    assert rising(told, 9 * 2400) and len(told) >= 9
    told.clear()
    reader = checkpoint.Reader(tmp_path / "many", progress=lambda *bytes: told.append(bytes))
    dcp.load({name: t.double() for name, t in many.items()}, storage_reader=reader, no_dist=True)
    assert rising(told, 9 * 2400) and len(told) >= 9
    save(tmp_path / "bar", progress=True)  # no terminal: silent


def refuse(*_):
    raise RuntimeError("no time left")


@pytest.mark.parametrize(
    ("stop", "said"), [(lambda *_: False, "interrupted"), (refuse, "no time left")]
)
def test_a_caller_stops_it(tmp_path, stop, said):
    save(tmp_path / "run")
    before = checkpoint.inspect(tmp_path / "run", digest=True)["digest"]
    with pytest.raises(dcp.api.CheckpointException, match=said):
        save(tmp_path / "run", {**STATE, "a": torch.zeros(2)}, progress=stop)
    assert checkpoint.inspect(tmp_path / "run", digest=True)["digest"] == before
    with pytest.raises(dcp.api.CheckpointException, match=said):
        dcp.load(
            zeros(), storage_reader=checkpoint.Reader(tmp_path / "run", progress=stop), no_dist=True
        )


def test_one_rank_stops_all(pool, tmp_path):
    for told in pool.run(2, storage_worker.stopped_on_one, str(tmp_path / "run")):
        assert [("no time left" in text) for text in told] == [True, True]


def test_a_rank_that_cannot_draw_a_bar_tells_the_others(pool, tmp_path):
    """It would leave them waiting for what it was to read: all ranks need this tensor."""
    save(tmp_path / "run", {"w": torch.ones(1000)})
    for said in pool.run(2, storage_worker.no_bar_on_one, str(tmp_path / "run")):
        assert "pip install tqdm" in said and "imed out" not in said
