"""The matrix in docs/bits/sharding-matrix.md, written from what test_matrix.py, test_matrix_rows.py
and test_matrix_kinds.py found: *.json beside this file.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

from tests.sharding.matrix.cases import (
    COLUMNS_OF_FORMATS,
    COLUMNS_OF_REDUCING,
    COLUMNS_OF_RULES,
    IN_PRODUCTS,
    OF_PRODUCTS,
    OVER_KINDS,
)
from tests.sharding.matrix.run import SAME
from tests.sharding.matrix.worker import MORE_RANKS
from tests.support.paths import ROOT

# By the name of the table. "first" is wrapper -> case -> SAME or a refusal;
# the others are as run.py gives them.
FILES = {
    "first": ROOT / "tests/sharding/matrix/first.json",
    "wrappers": ROOT / "tests/sharding/matrix/rows.json",
    "products": ROOT / "tests/sharding/matrix/products.json",
    "kinds": ROOT / "tests/sharding/matrix/kinds.json",
    "pairs": ROOT / "tests/sharding/matrix/pairs.json",  # not on the page, which has the products
}
PAGE = ROOT / "docs/bits/sharding-matrix.md"
BEGIN, END = (
    "<!-- tests/sharding/matrix/test_matrix.py writes this -->",
    "<!-- end of the matrix -->",
)
Found = dict[str, Any]
Columns = dict[str, tuple[str, ...]]  # title -> the cases that are one column

# The columns of each table: rule families with their cases, and formats.
FIRST: dict[str, Columns] = {
    "Rules": {
        "AdamW, Lion": ("AdamW", "Lion"),
        "SGD, RMSprop, Adagrad": ("SGD", "RMSprop", "Adagrad"),
        "Adam, AdEMAMix, cautious": ("Adam", "AdEMAMix", "cautious AdamW", "cautious Lion"),
        "Schedule-Free": ("Schedule-Free",),
    },
    "Rules that reduce": {
        "Adafactor, CAME": ("Adafactor", "CAME"),
        "LAMB, LARS": ("LAMB", "LARS"),
        "APOLLO, Fira": ("APOLLO", "Fira"),
        "Muon": ("Muon",),
    },
    "Formats": {
        "8bit, log8, fp8": ("AdamW", "log8", "fp8"),
        "4bit": ("4bit",),
        "lpmm4": ("lpmm4",),
        "factored8": ("factored8",),
        "column scales": ("column scales",),
        "Kahan, split8": ("Kahan", "split8"),
    },
}
# What more ranks run.
OF_EACH_COLUMN = [
    *dict.fromkeys(cases[0] for columns in FIRST.values() for cases in columns.values())
]
# The columns of more rows: the first case of those that behave alike.
MORE: dict[str, Columns] = {
    "Rules (ranks)": {cases[0]: (cases[0],) for cases in COLUMNS_OF_RULES.values()},
    "Rules that reduce (ranks)": {cases[0]: (cases[0],) for cases in COLUMNS_OF_REDUCING.values()},
    "Formats (ranks)": {
        cases[0]: (cases[0],)
        for cases in COLUMNS_OF_FORMATS.values()
        if cases[0] not in COLUMNS_OF_RULES["Adam, AdamW, Lion, AdEMAMix"]
    },
}
# Of the kinds of checkpoints: a column's title, and its kinds.
COLUMNS_OF_KINDS: Columns = {
    "nested": ("nested, torch's files", "nested, Writer"),
    "flat names": ("flat names, torch's files", "flat names, Writer"),
    "lowbit's": ("lowbit, torch's files", "lowbit, Writer"),
    "lowbit's, resharded": ("lowbit, resharded",),
    "torch.save": ("torch.save",),
}
# What is longer than what it means.
SHORTER = {
    r"^RuntimeError: (Optimizer state has not been consolidated).*": r"torch: \1 on this rank",
    (
        r"^(at loading what pipeline[^:]* saved: ValueError: (group 0|no group) of the state dict "
        r"has|CheckpointError: ranks \d+ and \d+ have other parameters) .*"
    ): (
        "torch.distributed.checkpoint keeps one rank's param_groups: Writer refuses to save them, "
        "and a stage that loads what torch's writer saved raises ValueError. Save flat names: "
        "[pipeline.md](pipeline.md)"
    ),
}


def general(words: str) -> str:
    """A refusal without the parameter's name and numbers,
    so that those of two parameters are one.
    """
    for pattern, meant in SHORTER.items():
        words = re.sub(pattern, meant, words)
    return re.sub(r"(?<=parameter )('[^']+'|\d+)|(?<=\[)'[^']+'(?=\])", "NAME", words)


class Refusals:
    """Numbers them in the order in which the tables name them."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def cell(self, said: Iterable[str], where: str) -> str:
        said = list(said)
        refused = sorted(
            {
                self.numbers.setdefault(general(words), len(self.numbers) + 1)
                for words in said
                if words != SAME
            }
        )
        if not refused:
            return SAME
        assert SAME not in said, f"{where}: some of these are served and some refused: {said}"
        return f"refused ({', '.join(map(str, refused))})"

    def lines(self) -> list[str]:
        made = []
        for words, number in self.numbers.items():
            made += textwrap.wrap(
                f"{number}. {words}", 118, subsequent_indent="   ", break_on_hyphens=False
            )
        return made


def rows(
    title: str, columns: Iterable[str], labels: dict[str, str], cell: Callable[[str, str], str]
) -> list[str]:
    """A table; `cell` of a row's key and a column."""
    columns = list(columns)
    lines = [f"| {title} | {' | '.join(columns)} |", "|" + "---|" * (len(columns) + 1)]
    lines += [
        f"| {label} | {' | '.join(cell(key, column) for column in columns)} |"
        for key, label in labels.items()
    ]
    return [*lines, ""]


def ranks_of_first() -> str:
    """What the numbers of ranks of the first tables are."""
    more = [
        f"{wrapper} on {' and '.join(map(str, counts))}" for wrapper, counts in MORE_RANKS.items()
    ]
    return (
        "These rows have 2 ranks, or the 4 of their mesh. On more ranks, too, the first rule or "
        "format of each column ends in the same cell, and loads what fewer ranks saved: "
        f"{', '.join(more)}."
    )


def matrix(found: Found) -> str:
    """The tables and the refusals that they number."""
    refusals, lines = Refusals(), []
    more = {
        f"{wrapper} ({ranks})": said
        for wrapper, by in found["wrappers"].items()
        for ranks, said in by.items()
    }
    for tables, cells in ((FIRST, found["first"]), (MORE, more)):
        for title, columns in tables.items():

            def of_cases(wrapper: str, column: str, columns=columns, cells=cells) -> str:
                return refusals.cell(
                    [cells[wrapper][case] for case in columns[column]], f"{wrapper}, {column}"
                )

            lines += rows(title, columns, {wrapper: wrapper for wrapper in cells}, of_cases)
        if tables is FIRST:
            lines += [*textwrap.wrap(ranks_of_first(), 118), ""]
    for wrapper, by in found["products"].items():

        def product(rule: str, name: str, wrapper=wrapper, by=by) -> str:
            said = [cells[f"{rule}, {name}"] for cells in by.values()]
            return refusals.cell(said, f"{wrapper}: {rule}, {name}")

        title = f"{wrapper} ({', '.join(by)})"
        lines += rows(title, IN_PRODUCTS, {rule: rule for rule in OF_PRODUCTS}, product)

    def kind(wrapper: str, column: str) -> str:
        said = [found["kinds"][wrapper][each] for each in COLUMNS_OF_KINDS[column]]
        return refusals.cell(said, f"{wrapper}: {column}")

    labels = {wrapper: f"{wrapper} ({OVER_KINDS[wrapper][0]})" for wrapper in found["kinds"]}
    lines += rows("Checkpoints (ranks)", COLUMNS_OF_KINDS, labels, kind)
    return "\n".join([*lines, *refusals.lines()]).rstrip()


def read_page() -> str:
    return PAGE.read_text()


def page_with(found: Found) -> str:
    """The page with this matrix in place of the one that it has."""
    before, rest = read_page().split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{matrix(found)}\n\n{END}{after}"


def recorded() -> Found:
    return {which: json.loads(path.read_text()) for which, path in FILES.items()}


def same_as_recorded(which: str, found: Any, record: bool) -> None:
    """AssertionError where a cell that was found is not what is recorded; with `record` it is
    written, and the page once every table has its file.
    """
    if record:
        FILES[which].write_text(json.dumps(found, indent=1) + "\n")
        if all(path.exists() for path in FILES.values()):
            PAGE.write_text(page_with(recorded()))
    known = json.loads(FILES[which].read_text())
    assert found.keys() == known.keys()
    if which == "kinds":  # CI has some of each row
        known = {row: {kind: known[row][kind] for kind in said} for row, said in found.items()}
    assert found == known
