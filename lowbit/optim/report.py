"""The report of `opt.stats()`: as text, as HTML, as a table of every tensor,
and as numbers to log.
"""

from __future__ import annotations

import html
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from lowbit import ops
from lowbit.config.size import readable

COMPONENTS = (
    "parameter",
    "compensation",
    "codes",
    "scales",
    "full_precision",
    "factors",
    "numbers",
    "other",
)
_ROWS = 20  # of the table of groups
_WORST = 3  # tensors that the summary names
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of a dotted name
_SHARES = ("saturated", "zero", "used", "rms_error", "max_error")


class Stats(dict):  # type: ignore[type-arg]
    """The result of `stats()`: a dict that prints as a summary of at most ten lines and a table of
    at most 20 rows.

    The table has a row for each group of like tensors: names that differ only in numbers, such as
    `blocks.0.mlp.weight` and `blocks.1.mlp.weight`, with the same formats. Cells with several
    numbers have one for each state, in the summary's order. `table()` has a row for each tensor and
    state. Notebooks show the same as HTML.
    """

    def __str__(self) -> str:
        lines = [f"{label:<13} {text}".rstrip() for label, text in self._summary()]
        return "\n".join([*lines, "", *aligned(self._groups(), left=(0, 4))])

    def _repr_html_(self) -> str:
        """The summary and the table for a notebook, without scripts, styles or other resources."""
        summary = [_html_row("td", pair) for pair in self._summary()]
        head, *rows = self._groups()
        body = [_html_row("th", head), *(_html_row("td", row) for row in rows)]
        return "".join(
            ["<div>", "<table>", *summary, "</table>", "<table>", *body, "</table>", "</div>"]
        )

    def table(self) -> str:
        """The text of a table with a row for each tensor and state,
        and one for each state in total.
        """
        rows = [
            (
                "",
                "values",
                "bytes each",
                "state",
                "format",
                "saturated",
                "zero",
                "used",
                "rms error",
                "max error",
                "lost",
            )
        ]
        for name, entry in [*self["parameters"].items(), ("total", self["total"])]:
            head = [name, str(entry["values"]), f"{entry['bytes_per_value']:.3f}"]
            lost = percent(entry.get("lost"))
            for state, kept in entry["states"].items() or [("", {})]:
                rows.append(
                    (
                        *head,
                        state,
                        kept.get("format", ""),
                        *(percent(kept.get(key)) for key in ("saturated", "zero", "used")),
                        *(
                            f"{kept[key]:.3g}" if key in kept else ""
                            for key in ("rms_error", "max_error")
                        ),
                        lost,
                    )
                )
                head, lost = ["", "", ""], ""
        return "\n".join(aligned(rows, left=(0, 3, 4)))

    def scalars(self) -> dict[str, float]:
        """The numbers of the total, for TensorBoard's `add_scalar` or `wandb.log`;
        names keep their meaning.

        Returns:
            A dict of floats:
            `lowbit/values`: the number of elements; `lowbit/bytes` and `lowbit/bytes_per_value`.
            `lowbit/bytes/COMPONENT`: the bytes of `parameter`, `compensation`, `codes`, `scales`,
            `full_precision`, `factors`, `numbers` and `other`.
            `lowbit/saturated/STATE`, `lowbit/zero/STATE`, `lowbit/used/STATE`: shares from 0 to 1,
            for each quantized state, such as `lowbit/zero/exp_avg`.
            `lowbit/out_of_reach`: if any weights are rounded to nearest without compensation.
            With `stats(probe=True)`, if there are gradients: `lowbit/rms_error/STATE`,
            `lowbit/max_error/STATE`, `lowbit/updates` and `lowbit/lost_updates`.
        """
        total = self["total"]
        made = {"lowbit/values": total["values"], "lowbit/bytes": sum(total["bytes"].values())}
        made["lowbit/bytes_per_value"] = total["bytes_per_value"]
        made.update({f"lowbit/bytes/{key}": total["bytes"][key] for key in COMPONENTS})
        for state, kept in total["states"].items():
            made.update({f"lowbit/{key}/{state}": kept[key] for key in _SHARES if key in kept})
        for key in ("out_of_reach", "updates", "lost_updates"):
            if key in total:
                made[f"lowbit/{key}"] = total[key]
        return {key: float(value) for key, value in made.items()}

    def _summary(self) -> list[tuple[str, str]]:
        """At most ten lines: (label, text)."""
        total, count = self["total"], len(self["parameters"])
        size, values = sum(total["bytes"].values()), total["values"]
        each = [
            f"{key.replace('_', ' ')} {total['bytes'][key] / values:.3f}"
            for key in COMPONENTS
            if values and total["bytes"][key] / values >= 0.0005
        ]
        made = [
            ("parameters", f"{count} tensors of {values:,} values"),
            (
                "bytes",
                (
                    f"{readable(size, 1)}, {total['bytes_per_value']:.3f} for each value: "
                    f"{', '.join(each)}"
                ),
            ),
        ]
        for key in ("saturated", "zero", "rms_error"):
            shares = [
                f"{name} {percent(kept[key])}"
                for name, kept in total["states"].items()
                if key in kept
            ]
            if shares:
                made.append((key.replace("_", " "), ", ".join(shares)))
        made.append(("lost updates", self._lost()))
        if "out_of_reach" in total:
            share = percent(total["out_of_reach"])
            made.append(
                (
                    "out of reach",
                    (
                        f"{share} of the weights rounded to nearest are too large for this "
                        "learning rate to change"
                    ),
                )
            )
        label = "worst"
        for name, amount, what in self._worst():
            made.append((label, f"{name}: {percent(amount)} {what}"))
            label = ""
        return made

    def _lost(self) -> str:
        total = self["total"]
        if "lost_updates" not in total:
            return "not counted; stats(probe=True) counts them where there are gradients"
        probed = [entry for entry in self["parameters"].values() if "lost" in entry]
        if any(ops.param_format(entry["param_format"])["random"] for entry in probed):
            same = percent(total["lost"])
            return (
                f"{percent(total['lost_updates'])}; {same} of the weights stay as they are, by "
                "chance where rounding is stochastic"
            )
        return percent(total["lost_updates"])

    def _worst(self) -> list[tuple[str, float, str]]:
        """The tensors with the largest share of lost updates or of a state's zeros or saturated
        values: name, share, what.
        """
        made = []
        for name, entry in self["parameters"].items():
            numbers = [(entry.get("lost_updates", 0.0), "of the updates lost")]
            for state, kept in entry["states"].items():
                numbers.append((kept.get("zero", 0.0), f"of {state} zero"))
                numbers.append((kept.get("saturated", 0.0), f"of {state} saturated"))
            share, what = max(numbers, key=lambda number: number[0])
            if share > 0:
                made.append((name, share, what))
        return sorted(made, key=lambda one: -one[1])[:_WORST]

    def _groups(self) -> list[list[str]]:
        """The table of groups of like tensors: its head, then at most _ROWS rows;
        the last joins what has no row.
        """
        groups: dict[Any, list[tuple[str, Mapping[str, Any]]]] = {}
        for name, entry in self["parameters"].items():
            formats = tuple(kept["format"] for kept in entry["states"].values())
            key = (_NUMBER.sub("*", name), entry["rule"], entry["param_format"], formats)
            groups.setdefault(key, []).append((name, entry))
        size = {
            key: sum(entry["values"] for _, entry in members) for key, members in groups.items()
        }
        largest = sorted(groups, key=lambda key: -size[key])
        shown = set(largest if len(groups) <= _ROWS else largest[: _ROWS - 1])
        rows = [
            _row(key[0] if len(members) > 1 else members[0][0], [entry for _, entry in members])
            for key, members in groups.items()
            if key in shown
        ]
        rest = [
            entry for key, several in groups.items() if key not in shown for _, entry in several
        ]
        if rest:
            rows.append(_row(f"({len(groups) - len(shown)} more)", rest))
        head = [
            "",
            "tensors",
            "values",
            "bytes each",
            "state",
            "saturated",
            "zero",
            "max rms error",
            "lost updates",
        ]
        used = [i for i in range(len(head)) if i < 5 or any(row[i] for row in rows)]
        return [[row[i] for i in used] for row in (head, *rows)]


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f}%"


def _row(name: str, entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """The cells of a group: means over its values; of the errors the largest."""
    values = sum(entry["values"] for entry in entries)
    size = sum(sum(entry["bytes"].values()) for entry in entries)
    formats = dict.fromkeys(
        kept["format"].removesuffix("_unsigned") for e in entries for kept in e["states"].values()
    )
    cells = [
        name,
        str(len(entries)),
        f"{values:,}",
        f"{size / values if values else 0:.3f}",
        ", ".join(formats),
    ]
    states = dict.fromkeys(state for entry in entries for state in entry["states"])
    for key in ("saturated", "zero", "rms_error"):
        shares = []
        for state in states:
            having = [e for e in entries if key in e["states"].get(state, {})]
            if having:
                found = [(e["states"][state][key], e["values"]) for e in having]
                shares.append(max(found)[0] if key == "rms_error" else _mean(found))
        cells.append(" ".join(map(percent, shares)))
    lost = [(e["lost_updates"], e["updates"] * e["values"]) for e in entries if "lost_updates" in e]
    return [*cells, percent(_mean(lost)) if lost else ""]


def _mean(weighted: Iterable[tuple[float, float]]) -> float:
    """The mean of (number, weight); 0 without weight."""
    pairs = list(weighted)
    weight = sum(w for _, w in pairs)
    return sum(a * w for a, w in pairs) / weight if weight else 0.0


def aligned(rows: Sequence[Sequence[str]], left: Container[int] = (0,)) -> list[str]:
    """The rows as lines of columns, those in `left` aligned to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(w) if i in left else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _html_row(tag: str, cells: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"
