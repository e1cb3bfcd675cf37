"""The result of `lowbit.estimate`: bytes of each library, as a table, as HTML and for JSON."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lowbit.config.size import readable
from lowbit.optim.report import aligned
from lowbit.planning.fit import Fit


@dataclass(frozen=True)
class Footprint:
    """What one library keeps between steps, in bytes. The tuples have an element for each rank."""

    title: str
    weights: tuple[int, ...]  # parameters and buffers
    gradients: tuple[int, ...]
    state: tuple[int, ...]  # of the optimizer, with correction bits of the weights
    checkpoint: int  # weights and optimizer state, on all ranks together
    note: str = ""  # what else to know, such as what stands in the way of running it
    averages: tuple[int, ...] = ()  # of weights, if they were asked for: lowbit.EMA, or a copy

    @property
    def total(self) -> tuple[int, ...]:
        """Weights, gradients, state and averages of each rank."""
        return tuple(map(sum, zip(*self.parts.values(), strict=True)))

    @property
    def parts(self) -> dict[str, tuple[int, ...]]:
        """What the total is the sum of, by name."""
        named = {"weights": self.weights, "gradients": self.gradients, "state": self.state}
        return {**named, "averages": self.averages} if self.averages else named

    @property
    def largest(self) -> int:
        """The first of the ranks that hold the most."""
        return self.total.index(max(self.total))


@dataclass(frozen=True)
class Estimate:
    """The footprints of a run under lowbit and under other libraries. Print it for a table."""

    optimizer: str
    ranks: int
    parameters: int  # values in the whole model
    trained: int  # those that require a gradient
    dtypes: tuple[str, ...]  # of the parameters under lowbit
    # By library: "lowbit", "torch_float32", "torch_bfloat16", "torchao_8bit", "bitsandbytes_8bit",
    # "bitsandbytes_8bit_trainer".
    footprints: dict[str, Footprint]
    fit: Fit | None = None  # on one card, if it was asked for

    def __getitem__(self, library: str) -> Footprint:
        return self.footprints[library]

    def _title(self) -> str:
        trained = "" if self.trained == self.parameters else f" ({self.trained:,} of them trained)"
        where = "one rank" if self.ranks == 1 else f"the largest of {self.ranks} ranks"
        return (
            f"{self.parameters:,} parameters{trained}, "
            f"{' and '.join(self.dtypes)}; bytes on {where}"
        )

    def _head(self) -> tuple[str, ...]:
        return ("", *self["lowbit"].parts, "sum", "of float32", "checkpoint")

    def _table(self) -> list[tuple[str, ...]]:
        whole = self["torch_float32"]
        rows = []
        for each in self.footprints.values():
            at = each.largest
            parts = (*(part[at] for part in each.parts.values()), each.total[at])
            share = f"{100 * each.total[at] / max(1, whole.total[whole.largest]):.0f}%"
            rows.append((each.title, *map(readable, parts), share, readable(each.checkpoint)))
        return rows

    def _notes(self) -> list[str]:
        notes = [f"{each.title}: {each.note}" for each in self.footprints.values() if each.note]
        if self.ranks > 1:
            assumed = (
                f"Assumed: fully_shard over {self.ranks} ranks; a checkpoint is the sum of all."
            )
            notes.insert(0, assumed)
        uncounted = (
            "Not counted: activations, temporary buffers, what allocators and file formats add."
        )
        if self["lowbit"].averages:
            of_averages = (
                "averages: lowbit.EMA; of the others torch's AveragedModel, which in bfloat16 "
                "stands still (docs/loss/ema.md)"
            )
            notes.append(of_averages)
        return [uncounted, *notes]

    def __str__(self) -> str:
        lines = aligned([self._head(), *self._table()])
        text = "\n".join([self._title(), "", *lines, "", *self._notes()])
        if self.fit is None:
            return text
        table = aligned(_fit_table(self.fit))
        return "\n".join([text, "", _fit_title(self.fit), "", *table, "", *_fit_notes(self.fit)])

    def _repr_html_(self) -> str:
        """The table for a notebook."""

        page = _html(self._title(), [self._head(), *self._table()], self._notes())
        if self.fit is None:
            return page
        return page + _html(_fit_title(self.fit), _fit_table(self.fit), _fit_notes(self.fit))

    def as_dict(self) -> dict[str, Any]:
        """Numbers in bytes for JSON; lists have an element for each rank."""
        return {
            "optimizer": self.optimizer,
            "ranks": self.ranks,
            "parameters": self.parameters,
            "trained": self.trained,
            "dtypes": list(self.dtypes),
            "footprints": {
                library: {
                    "title": each.title,
                    **{name: list(part) for name, part in each.parts.items()},
                    "total": list(each.total),
                    "largest_rank": each.largest,
                    "checkpoint": each.checkpoint,
                    "note": each.note,
                }
                for library, each in self.footprints.items()
            },
            **({} if self.fit is None else {"fit": self.fit.as_dict()}),
        }


def _html(title: str, rows: Sequence[tuple[str, ...]], notes: Sequence[str]) -> str:
    def cells(row: tuple[str, ...], tag: str) -> str:
        return "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows[1:])
    footer = "<br>".join(html.escape(note) for note in notes)
    return (
        f"<table><caption>{html.escape(title)}</caption><thead><tr>{cells(rows[0], 'th')}</tr>"
        f"</thead><tbody>{body}</tbody></table><small>{footer}</small>"
    )


def _fit_title(fit: Fit) -> str:
    where = "one card"
    if fit.device_memory is not None and fit.usable is not None:
        where = f"a card of {readable(fit.device_memory)}, {readable(fit.usable)} for tensors"
    return ": ".join(filter(None, [f"Peaks on {where}", str(fit.setting)]))


def _fit_table(fit: Fit) -> list[tuple[str, ...]]:
    first = next(iter(fit.plans.values()))
    rows = [("", "weights", "state", *first.phases, "peak", "host", "fits")]
    for name, plan in fit.plans.items():
        sizes = [plan.weights, plan.state, *map(plan.total, plan.phases), plan.peak, plan.host]
        answer = "" if fit.usable is None else "yes" if fit.fits(name) else "no"
        rows.append((plan.title, *map(readable, sizes), answer))
    return rows


def _fit_notes(fit: Fit) -> list[str]:
    ours = fit.plans["lowbit"]
    at = ours.phases[ours.worst]
    notes = [
        f"lowbit's peak is in {ours.worst}: {readable(at.gradients)} of gradients, and "
        f"{readable(at.activations)} of activations, operators' results and gradients that still "
        f"add up; the largest gradient has {readable(fit.largest_gradient)}."
    ]
    if fit.changes is None:
        notes.append(
            "Nothing that estimate knows makes lowbit fit: take a shorter context, several cards "
            "(fully_shard), or a larger one."
        )
    elif fit.changes:
        changes = ", ".join(f"{name}={value!r}" for name, value in fit.changes.items())
        notes.append(f"lowbit fits with {changes}.")
    return notes + [f"{plan.title}: {plan.note}" for plan in fit.plans.values() if plan.note]
