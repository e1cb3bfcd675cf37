"""Moments of a parameter's state, by their keys: those of each rule, in every format."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from lowbit import ops
from lowbit.state.layout import Layout


class Moment(NamedTuple):
    """A moment of a layout."""

    name: str
    keys: list[str]  # of its tensors here


def is_own_key(key: Any) -> bool:
    """Whether lowbit's state of some rule and format has such a key."""
    return _own_keys().fullmatch(str(key)) is not None


def moment_of(key: Any) -> str | None:
    """The moment, factored or not, that a key of lowbit's state belongs to, or None."""
    found = _own_keys().fullmatch(str(key))
    return None if found is None else found["moment"]


def with_other_formats(lay: Layout, state: Mapping[str, Any]) -> Iterator[tuple[Moment, list[str]]]:
    """The moments of a layout, each with the keys in which state has it in other formats."""
    moments = list(_own_moments(lay))
    here = {name for own in moments for name in own.keys}
    for own in moments:
        yield own, [name for name in _names_of(own.name) if name in state and name not in here]


def in_other_format(lay: Layout, state: Mapping[str, Any]) -> tuple[str, str] | None:
    """The key of a moment in live state that the layout keeps in another format, and its key there.
    None if there is no such moment.
    """
    for own, others in with_other_formats(lay, state):
        if lay.rule.startswith("adafactor") and own.name == "variance":
            continue  # `factored` may change between steps
        if others and not all(name in state for name in own.keys):
            return others[0], own.keys[0]
    return None


def _own_moments(lay: Layout) -> Iterator[Moment]:
    for slot in lay.slots:
        yield Moment(slot.name, [entry.key for entry in slot.entries(lay.part)])
    for entry in lay.auxiliary:
        if entry.key.endswith(("_row", "_col")):
            yield Moment(entry.key[:-4], [entry.key])


def _names_of(moment: str) -> list[str]:
    """The first key of a moment in every format, and those of its row and column means."""
    formats = (entry["name"] for entry in ops.entries("state"))
    return [moment, f"{moment}_row", f"{moment}_col", *(f"{moment}_{name}" for name in formats)]


@functools.cache
def _own_keys() -> re.Pattern[str]:
    """Matches the keys that state of any rule in any format has."""

    def any_of(names: Iterable[str]) -> str:
        return f"(?:{'|'.join(sorted(set(names), key=len, reverse=True))})"

    rules = ops.entries("rules")
    moments = {slot["name"] for rule in rules for slot in rule["slots"]}
    moments.update(name for rule in rules for name in rule["factors"])
    formats = any_of(entry["name"] for entry in ops.entries("state"))
    params = any_of(entry["name"].removesuffix("_stochastic") for entry in ops.entries("param"))
    others = any_of(
        ("step", "stream", "shape", "projection", "update_norm", "second_momentum_buffer")
    )
    scale = r"_scale(?:_(?:row|column|tensor|rank1_\d+))?"
    kept = rf"(?P<moment>{any_of(moments)})(?:_row|_col|_{formats}(?:{scale})?)?"
    return re.compile(rf"{others}|param_{params}|{kept}")
