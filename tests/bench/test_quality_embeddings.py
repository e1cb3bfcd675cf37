"""The studies of embeddings and heads: what is run, what is compared, and what rows of short blocks
lose.
"""

from bench.quality import drift_rows, embeddings_page
from bench.quality import embeddings as runs


def lines(chosen, loss):
    """Finished runs, as they are read."""
    made = []
    for run in chosen:
        value = loss(run)
        classes = dict.fromkeys(runs.CLASSES, value)
        made.append({**run.key(), "held_out_loss": value, "said": classes, "read": classes})
    return made


def test_nothing_is_compared_before_its_rate_is_tuned():
    first = runs.missing([])
    assert {run.name for run in first} == {runs.SAME}
    assert {run.seed for run in first} == {runs.TUNING_SEED}
    tuned = lines(first, lambda run: run.lr)  # the lowest rate is the best
    rest = runs.missing(tuned)
    assert rest[0].lr == runs.KINDS["untied"].rates[0] and rest[0].name == runs.SAME
    names = {run.name for run in rest if run.kind == "untied"}
    assert names == set(runs.contestants(runs.KINDS["untied"]))
    assert not runs.missing([*tuned, *lines(rest, lambda run: 1.0)])


def test_a_row_of_the_page_is_a_mean_of_pairs():
    tuned = lines(runs.missing([]), lambda run: run.lr)
    done = lines(
        runs.missing(tuned),
        lambda run: run.seed + 0.01 * (run.seed - 1) * (run.name == "8bit embedding"),
    )
    rows = embeddings_page.rows([*tuned, *done])
    name, rate, pairs, every, *_ = rows["untied", "8bit embedding", 1.0]
    assert name == "untied: 8bit embedding" and rate == "0.001" and pairs == "5"
    assert every == "+0.0100 ± 0.0196"
    assert rows["untied", "8bit head", 1.0][3] == "+0.0000 ± 0.0000"


def test_rows_lose_where_blocks_cross_them(monkeypatch):
    monkeypatch.setattr(drift_rows, "ROWS", 2)
    own, shared = (
        drift_rows.simulate(shape, (0.9, 0.999), steps=1000)
        for shape in ("a row is one block", "rows of 64 share blocks")
    )
    for kind in ("every 10th", "every 100th"):
        assert own["8bit"][kind]["error"] < 0.1 < shared["8bit"][kind]["error"]
        assert own["float32"][kind]["error"] < 1e-4
