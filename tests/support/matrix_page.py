"""The matrix in docs/sharding.md, written from tests/sharding/matrix.json, which test_matrix.py found, and matrix_rows.json of test_matrix_rows.py."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterable

from matrix_cases import COLUMNS_OF_FORMATS, COLUMNS_OF_REDUCING, COLUMNS_OF_RULES
from paths import ROOT

ROWS = ROOT / "tests/sharding/matrix_rows.json"
RESULTS = ROOT / "tests/sharding/matrix.json"
PAGE = ROOT / "docs/sharding.md"
BEGIN, END = "<!-- tests/sharding/test_matrix.py writes this -->", "<!-- end of the matrix -->"
SAME = "same bits"
Found = dict[str, dict[str, str]]  # wrapper -> case -> SAME or a refusal
Rows = dict[str, dict[str, dict[str, str]]]  # the same by wrapper and number of ranks

# The columns of each table: rule families with their cases, and formats.
TABLES = {
    "Rules": {
        "AdamW, Lion": ("AdamW", "Lion"), "Schedule-Free": ("Schedule-Free",), "Adafactor, CAME": ("Adafactor", "CAME"), "LAMB": ("LAMB",),
        "APOLLO, Fira": ("APOLLO", "Fira"), "Muon": ("Muon",),
    },
    "Formats": {
        "8bit, log8, fp8": ("AdamW", "log8", "fp8"), "4bit": ("4bit",), "lpmm4": ("lpmm4",), "factored8": ("factored8",),
        "column scales": ("column scales",), "Kahan, split8": ("Kahan", "split8"),
    },
}  # fmt: skip


# The columns of more rows: the first case of those that behave alike.
MORE = {
    "Rules (ranks)": {cases[0]: (cases[0],) for cases in COLUMNS_OF_RULES.values()},
    "Rules that reduce (ranks)": {cases[0]: (cases[0],) for cases in COLUMNS_OF_REDUCING.values()},
    "Formats (ranks)": {cases[0]: (cases[0],) for cases in COLUMNS_OF_FORMATS.values() if cases[0] not in COLUMNS_OF_RULES["Adam, AdamW, Lion, AdEMAMix"]},
}  # fmt: skip


def general(words: str) -> str:
    """A refusal without the parameter's name and numbers, so that those of two parameters are one."""
    return re.sub(r"(?<=parameter )('[^']+'|\d+)|(?<=\[)'[^']+'(?=\])", "NAME", words)


def table(
    title: str, columns: dict[str, tuple[str, ...]], wrappers: Iterable[str], cell: Callable[[str, tuple[str, ...]], str]
) -> list[str]:  # fmt: skip
    lines = [f"| {title} | {' | '.join(columns)} |", "|" + "---|" * (len(columns) + 1)]
    for wrapper in wrappers:
        cells = [cell(wrapper, cases) for cases in columns.values()]
        lines.append(f"| {wrapper} | {' | '.join(cells)} |")
    return [*lines, ""]


def matrix(found: Found, more: Rows) -> str:
    """The tables and the refusals that they number."""
    refusals: dict[str, int] = {}
    rows = {f"{wrapper} ({ranks})": said for wrapper, by in more.items() for ranks, said in by.items()}  # fmt: skip
    found = {**found, **rows}

    def cell(wrapper: str, cases: tuple[str, ...]) -> str:
        said = [found[wrapper][case] for case in cases]
        refused = sorted({refusals.setdefault(general(words), len(refusals) + 1) for words in said if words != SAME})  # fmt: skip
        if not refused:
            return SAME
        assert SAME not in said, f"{wrapper}: some of {cases} are served and some refused"
        return f"refused ({', '.join(map(str, refused))})"

    lines = []
    for title, columns in TABLES.items():
        lines += table(title, columns, [wrapper for wrapper in found if wrapper not in rows], cell)
    for title, columns in MORE.items():
        lines += table(title, columns, rows, cell)
    for words, number in refusals.items():
        lines += textwrap.wrap(f"{number}. {words}", 118, subsequent_indent="   ", break_on_hyphens=False)  # fmt: skip
    return "\n".join(lines).rstrip()


def read_page() -> str:
    return PAGE.read_text()


def page_with(found: Found, more: Rows) -> str:
    """The page with this matrix in place of the one that it has."""
    before, rest = read_page().split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{matrix(found, more)}\n\n{END}{after}"


def write_page(text: str) -> None:
    PAGE.write_text(text)


def recorded() -> tuple[Found, Rows]:
    return json.loads(RESULTS.read_text()), json.loads(ROWS.read_text())
