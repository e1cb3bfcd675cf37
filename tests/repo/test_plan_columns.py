"""The plan's columns and the workspace's tensors are defined in csrc/policy alone;
Python knows them by name.
"""

import re

import pytest
import torch

from lowbit import ops
from tests.support.paths import ROOT
from tests.support.plans import plan_row

# Numbers of columns, of workspace tensors and of words of an exact sum,
# as they were written by hand.
BY_HAND = (
    r"\bPLAN_COLUMNS\b|\bMAX_SLOTS\b|\bMAX_DIMS\b|_PARAM_FORMAT\b|\b_?WORDS(, TOTALS)? = "
    r"|\bSUM_WORDS\b|\brow\[\d+\]|\bplan\[[^\]]*\d\]|\b(workspace|scratch)\[\d\]|CUT_\w+ "
    r"= \d|\* 18\b"
)


def offences(text):
    return re.findall(BY_HAND, text)


def test_python_writes_no_column_number():
    for path in (ROOT / "lowbit").rglob("*.py"):
        assert not offences(path.read_text()), path


@pytest.mark.parametrize(
    "planted",
    [
        "row[5] = 1",
        "plan[:, 14:28:4]",
        "PLAN_COLUMNS = 38",
        "WORDS, TOTALS = 18, 2",
        "n = 3 * 18",
        "workspace[5]",
    ],
)
def test_a_planted_number_is_caught(planted):
    assert [match.group() for match in re.finditer(BY_HAND, planted)]


def test_columns_are_named_once():
    columns = ops.plan_columns()
    assert list(columns.values()) == list(range(len(columns)))
    assert all(columns), "a column has no name"
    text = "".join(
        p.read_text() for p in (ROOT / "csrc").rglob("*") if p.suffix in (".h", ".cpp", ".cu")
    )
    assert len(re.findall(r"struct PlanRow\b", text)) == 1
    assert len(re.findall(r"\bkWorkspace\[\] = ", text)) == 1


def test_no_such_column():
    with pytest.raises(KeyError, match="row"):
        ops.plan_row({"row": 1})


@pytest.mark.parametrize("rule", sorted(ops.names("rules")))
def test_regions_fill_the_workspace(rule):
    """What the phases share of a whole matrix is all of its workspace but the floats."""
    info = ops.rule(rule)
    formats = [{"format": "dynamic8", "scale": "rank1"} for _ in info["slots"]]
    plan = plan_row(24, 40, formats)
    ends = dict.fromkeys((info["name"] for info in ops.workspace_tensors()), 0)
    for phase in range(info["rounds"] + 1):
        for region in ops.workspace_regions(rule, plan, phase):
            count = {"none": 1, "each": 24, "cut": 0}[region.rows]
            ends[region.tensor] = max(ends[region.tensor], region.begin + count * region.width)
    sizes = ops.workspace_sizes(rule, plan)
    assert {**ends, "floats": sizes["floats"]} == sizes


def test_no_region_is_measured_by_the_update():
    plan = plan_row(24, 40, ["dynamic8", "dynamic8_unsigned"])
    with pytest.raises(RuntimeError, match="measures nothing"):
        ops.workspace_regions("adamw", plan, 1)
    assert [r.rows for r in ops.workspace_regions("adamw", plan, 0)] == ["cut", "cut"]
    assert torch.equal(plan, plan_row(24, 40, ["dynamic8", "dynamic8_unsigned"]))
