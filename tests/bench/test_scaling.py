"""The page of many threads: its model is right at both ends, its crossings are where two steps are
equal, and it is that of the results.
"""

import json
import math
import time

import pytest
import torch

from bench.contestants.baselines import TorchForeach
from bench.pages.page import quoted
from bench.speed import scaling, scaling_page
from bench.speed.step import Params
from bench.speed.stream import Streams
from tests.support.paths import ROOT

RESULTS = json.loads(scaling.RESULTS.read_text())
FAST, LEAN = {"cache_ns": 0.5, "bytes": 28.0}, {"cache_ns": 1.0, "bytes": 10.0}


def test_the_pages_are_those_of_the_results():
    assert (ROOT / "docs" / "speed" / "scaling.md").read_text() == scaling_page.page(RESULTS)
    bench = (ROOT / "docs" / "speed" / "bench.md").read_text()
    assert scaling_page.pressed(RESULTS) in bench
    assert quoted(bench, scaling_page.MARKS, scaling_page.pressed(RESULTS)) == bench


def test_the_model_is_bound_by_cores_and_then_by_memory():
    assert scaling_page.model(LEAN, 2, 100.0) == 0.5
    assert scaling_page.model(LEAN, 64, 100.0) == 0.1
    assert scaling_page.waits(LEAN, 100.0) == 10.0
    for row in (FAST, LEAN):
        edge = scaling_page.waits(row, 100.0)
        assert scaling_page.model(row, edge, 100.0) == pytest.approx(row["cache_ns"] / edge)


def test_steps_are_equal_at_their_crossing():
    threads = scaling_page.passes(LEAN, FAST, 100.0)
    one, other = (scaling_page.model(row, threads, 100.0) for row in (LEAN, FAST))
    assert one == pytest.approx(other) and threads > scaling_page.waits(FAST, 100.0)
    assert scaling_page.model(LEAN, 1.1 * threads, 100.0) < other
    assert scaling_page.model(LEAN, 0.9 * threads, 100.0) > other
    assert scaling_page.passes(FAST, LEAN, 100.0) is None, (
        "faster with one thread, slower with many"
    )
    assert scaling_page.passes({"cache_ns": 0.4, "bytes": 9.0}, FAST, 100.0) == 1.0
    assert scaling_page.passes({"cache_ns": 2.0, "bytes": 30.0}, FAST, 100.0) is None


def test_bandwidths_are_those_of_channels():
    by_name = {server.name: server.gb for server in scaling_page.SERVERS}
    assert by_name["AMD EPYC 9004"] == pytest.approx(460.8)
    assert by_name["Intel Xeon, 4th generation"] == pytest.approx(307.2)
    assert all(server.source.startswith("https://") for server in scaling_page.SERVERS)


def test_streams_move_bytes_only_while_they_may():
    with Streams(1, mib=8) as streams:
        deadline = time.perf_counter() + 20
        while streams.alone(0.3) == 0:  # on a busy machine a stream may get no time for so long
            assert time.perf_counter() < deadline
        time.sleep(0.05)  # a signal takes a moment
        before = streams.moved()
        time.sleep(0.2)
        assert streams.moved() == before
        streams.go()
        deadline = time.perf_counter() + 20
        while streams.moved() == before:
            assert time.perf_counter() < deadline
            time.sleep(0.01)
    assert all(child.returncode is not None for child in streams.children)


def test_a_measurement_has_every_contestant(monkeypatch, tmp_path):
    # On a busy machine a small difference of times may come out below 0,
    # which is refused: not what is tested here.
    monkeypatch.setattr(
        scaling, "nearest", lambda _: dict.fromkeys((k.name for k in scaling.CONTESTANTS), 1.0)
    )
    result = scaling.measure(scaling.Settings(numel=14, rounds=2, threads=(1, 2)))
    names = {row["name"] for row in result["rows"]} | set(result["missing"])
    assert names == {kind.name for kind in scaling.CONTESTANTS}
    for row in result["rows"]:
        assert all(x > 0 for x in (*row["memory_ns"].values(), *row["beside"].values()))
    (tmp_path / "bench.md").write_text("a\n{}\n{}\nb\n".format(*scaling_page.MARKS))
    scaling_page.write(json.loads(json.dumps(result)), tmp_path)
    assert "| torch fused, float32 |" in (tmp_path / "bench.md").read_text()
    assert "faster than torch's fused float32 step" in (tmp_path / "scaling.md").read_text()


def test_a_machine_that_is_too_busy_is_refused(monkeypatch):
    several = iter(({"a": 2e-6}, {"a": 1e-6}))
    monkeypatch.setattr(scaling, "prepared", lambda _: ([], {}))
    monkeypatch.setattr(scaling, "least", lambda *_: next(several))
    before = torch.get_num_threads()
    with pytest.raises(SystemExit, match="too busy"):
        scaling.nearest(scaling.Settings())
    torch.set_num_threads(before)


def test_foreach_moves_more_than_fused():
    entry = TorchForeach()
    entry.prepare(Params([(64, 64)], "cpu").of(entry.dtype))
    assert entry.traffic() == 84 * 4096 and math.isfinite(entry.state_bytes())
