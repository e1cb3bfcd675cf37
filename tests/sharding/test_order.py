"""Ranks that give an optimizer its parameters in different orders, as iterating over a set does: a
step that reduces would mix the numbers of two parameters, and is refused on every rank.
"""

import re

import pytest
import torch

from tests.sharding import order_worker
from tests.support.paths import ROOT


def listed(message):
    """Whether docs/troubleshooting.md has a row for a message."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    rows = re.findall(r"^\| `(.*?)` \|", page, re.M)
    return any(re.match(".*".join(map(re.escape, row.split("..."))) + "$", message) for row in rows)


@pytest.mark.parametrize("rule", ["Adafactor", "LAMB", "Muon"])
def test_another_order_is_refused_where_ranks_reduce(pool, rule):
    for said, _ in pool.run(2, order_worker.fsdp2, rule, "reversed"):
        assert "parameter 0 is '0.weight' of shape (128, 128) on rank 0 and '1.weight'" in said
        assert "a set has another order in each process" in said and listed(said)
    assert [said for said, _ in pool.run(2, order_worker.fsdp2, rule, "same")] == ["nothing"] * 2


def test_another_order_changes_no_bits_where_nothing_is_reduced(pool):
    (said, same), _ = pool.run(2, order_worker.fsdp2, "AdamW", "same")
    (other, turned), _ = pool.run(2, order_worker.fsdp2, "AdamW", "reversed")
    assert said == other == "nothing" and all(map(torch.equal, same, turned))


@pytest.mark.parametrize(
    "how, there", [("reversed", "0.weight' of shape (128, 128) on rank 0"), ("fewer", "missing")]
)
def test_fsdp1_is_refused_when_it_is_bound(pool, how, there):
    for said in pool.run(2, order_worker.fsdp1, how):
        assert there in said and "same names and shapes in the same order on every rank" in said
        assert listed(said)
    assert pool.run(2, order_worker.fsdp1, "same") == ["nothing"] * 2
