"""lowbit.checkpoint.Reader where several ranks need the same bytes: one reads them,
the others receive them.
"""

import pytest
import torch.distributed.checkpoint as dcp

from lowbit import checkpoint
from tests.checkpoint.storage import shared_reads_worker as worker

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("shared") / "run"
    dcp.save(worker.tensors(), storage_writer=checkpoint.Writer(path), no_dist=True)
    return path


@pytest.mark.parametrize("kind", ["replicated", "strided", "hsdp"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_byte_is_read_once(pool, path, kind, ranks):
    told = pool.run(ranks, worker.load, str(path), kind)
    assert [bad for bad, *_ in told] == [[]] * ranks
    read, received, rounds = ([t[i] for t in told] for i in (1, 2, 3))
    again = ranks - 1 if kind != "hsdp" else 1  # all ranks of HSDP need the scalar
    scalar = 4 * (ranks - 1 - again)
    assert sum(received) == again * worker.total() + scalar
    if kind != "hsdp":
        assert sum(read) == worker.total()
        largest = max(t.nbytes for t in worker.tensors().values())
        assert max(read) <= max(largest, 1.2 * worker.total() / ranks)
    else:  # what the cuts of one replica read
        alone = pool.run(ranks // 2, worker.load, str(path), "sharded")
        assert sum(read) == sum(read for _, read, _, _ in alone)
    assert rounds == [1] * ranks


def test_large_boxes_go_in_rounds(pool, path):
    told = pool.run(3, worker.load, str(path), "replicated", 20_000)
    assert [bad for bad, *_ in told] == [[]] * 3
    assert sum(read for _, read, _, _ in told) == worker.total()
    assert len({rounds for *_, rounds in told}) == 1 and told[0][3] > 10


def test_buffers_are_bounded_and_reads_are_dealt_out_evenly():
    sizes = [1_000_003, 999, 5, 400_000, 400_000, 123_456] + [4] * 100
    for ranks in (2, 5, 16):
        most, read, rounds = worker.largest_buffers(ranks, sizes, 100_000)
        assert most <= 100_000 and sum(read) == sum(sizes) and len(rounds) == 1
        assert max(read) <= max(1_000_003, 1.2 * sum(sizes) / ranks)


@pytest.mark.parametrize("ranks", [8, 32])
def test_all_ranks_send_in_the_same_rounds(ranks):
    """One rank at a time would take as many rounds as there are ranks and more: some 30 times
    these.
    """
    sizes, buffer = [320_000] * 64, 640_000
    _, _, (rounds,) = worker.largest_buffers(ranks, sizes, buffer)
    assert rounds <= 1.3 * sum(sizes) / buffer + 2


@pytest.mark.parametrize(
    ("kind", "options", "shared"),
    [
        ("replicated", {"share_reads": False}, False),
        ("group", {}, True),
        ("other group", {}, False),
    ],
)
def test_ranks_share_only_where_all_of_the_group_load(pool, path, kind, options, shared):
    told = pool.run(3, worker.load, str(path), kind, worker.shared_reads.BUFFER, options)
    assert [bad for bad, *_ in told] == [[]] * 3
    loading = 2 if "group" in kind else 3
    assert sum(read for _, read, _, _ in told) == worker.total() * (1 if shared else loading)
    assert sum(received for _, _, received, _ in told) == (worker.total() if shared else 0)


@pytest.mark.parametrize("buffer", [worker.shared_reads.BUFFER, 20_000])
def test_a_rank_that_cannot_read_tells_the_others(pool, tmp_path, buffer):
    """These send their share to the end, and keep none of it."""
    damaged = tmp_path / "run"
    dcp.save(worker.tensors(), storage_writer=checkpoint.Writer(damaged), no_dist=True)
    values = bytes(checkpoint.Checkpoint(damaged).read("w5"))
    (file,) = damaged.glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[content.index(values) + 4000] ^= 1
    file.write_bytes(content)
    told = pool.run(3, worker.fails, str(damaged), buffer)
    assert [held for _, held in told if held] == [[set()]] * 2
    for said, _ in told:
        assert (
            "w5" in said
            and file.name in said
            and "damaged" in said
            and "failed to read its share; its own error says why" in said
        )
