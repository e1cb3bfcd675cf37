"""The matrix in docs/sharding.md, written from tests/sharding/matrix.json, which test_matrix.py found."""

from __future__ import annotations

import json
import re
import textwrap

from paths import ROOT

RESULTS = ROOT / "tests/sharding/matrix.json"
PAGE = ROOT / "docs/sharding.md"
BEGIN, END = "<!-- tests/sharding/test_matrix.py writes this -->", "<!-- end of the matrix -->"
SAME = "same bits"
Found = dict[str, dict[str, str]]  # wrapper -> case -> SAME or a refusal

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


def general(words: str) -> str:
    """A refusal without the parameter's name and numbers, so that those of two parameters are one."""
    return re.sub(r"(?<=parameter )'[^']+'|(?<=\[)'[^']+'(?=\])", "NAME", words)


def matrix(found: Found) -> str:
    """The tables and the refusals that they number."""
    refusals: dict[str, int] = {}

    def cell(wrapper: str, cases: tuple[str, ...]) -> str:
        said = [found[wrapper][case] for case in cases]
        refused = sorted({refusals.setdefault(general(words), len(refusals) + 1) for words in said if words != SAME})  # fmt: skip
        if not refused:
            return SAME
        assert SAME not in said, f"{wrapper}: some of {cases} are served and some refused"
        return f"refused ({', '.join(map(str, refused))})"

    lines = []
    for title, columns in TABLES.items():
        lines += [f"| {title} | {' | '.join(columns)} |", "|" + "---|" * (len(columns) + 1)]  # fmt: skip
        for wrapper in found:
            cells = [cell(wrapper, cases) for cases in columns.values()]
            lines.append(f"| {wrapper} | {' | '.join(cells)} |")
        lines.append("")
    for words, number in refusals.items():
        lines += textwrap.wrap(f"{number}. {words}", 118, subsequent_indent="   ", break_on_hyphens=False)  # fmt: skip
    return "\n".join(lines).rstrip()


def read_page() -> str:
    return PAGE.read_text()


def page_with(found: Found) -> str:
    """The page with this matrix in place of the one that it has."""
    before, rest = read_page().split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{matrix(found)}\n\n{END}{after}"


def write_page(text: str) -> None:
    PAGE.write_text(text)


def recorded() -> Found:
    return json.loads(RESULTS.read_text())
