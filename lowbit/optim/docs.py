"""Class docstrings as `help` shows them: with the meaning of every argument,
also of those that another class describes.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

_SECTION = re.compile(r"^Args:\n((?:(?:    .*)?\n)*)", re.M)
_ENTRY = re.compile(r"^    (\w+(?:,\s+\w+)*): (.*\n(?:(?: {8}.*)?\n)*)", re.M)
_ELSEWHERE = re.compile(r"as\s+in\s+`(\w+)`(?:,\s+with\s+its\s+defaults)?\.\s*")

_entries: dict[str, dict[str, str]] = {}  # class name -> argument -> what it means
_waiting: list[type] = []  # classes that name one that is not defined yet


def complete(cls: type) -> None:
    """Writes into a class's docstring what its arguments mean: an entry "a, b: as in `Adam`."
    becomes Adam's entries.

    Arguments without an entry get that of a base class.
    A class may name one that is defined after it.
    """
    _waiting.append(cls)
    while done := [each for each in _waiting if _complete(each)]:
        for each in done:
            _waiting.remove(each)


def _complete(cls: Any) -> bool:
    """Whether all that the docstring refers to is known; it is then rewritten."""
    if any(base in _waiting for base in cls.__mro__[1:]):
        return False
    doc = _text(cls)
    own = _read(doc)
    inherited = [_entries[base.__name__] for base in cls.__mro__[1:] if base.__name__ in _entries]
    inherited += [_read(_text(base)) for base in cls.__mro__[1:] if base.__name__.startswith("_")]
    made = {}
    for name in inspect.signature(cls).parameters:
        text = own.get(name) or next((some[name] for some in inherited if name in some), None)
        if text is None:
            continue
        if elsewhere := _ELSEWHERE.fullmatch(text):
            other = _entries.get(elsewhere[1])
            if other is None:
                return False
            text = other[name]
        made[name] = text
    _entries[cls.__name__] = made
    if made and doc:
        section = "Args:\n" + "".join(f"    {name}: {text}" for name, text in made.items())
        if _SECTION.search(doc):
            cls.__doc__ = _SECTION.sub(lambda _: section + "\n", doc, count=1).rstrip() + "\n"
        else:
            cls.__doc__ = doc.rstrip() + "\n\n" + section
    return True


def _text(cls: type) -> str:
    """A class's own docstring without its indentation, as Python keeps it from 3.13 on."""
    doc = cls.__dict__.get("__doc__")
    return inspect.cleandoc(doc) + "\n" if doc else ""


def _read(doc: str) -> dict[str, str]:
    """The entries of a docstring's Args, by argument."""
    section = _SECTION.search(doc)
    return {
        name: text.rstrip() + "\n"
        for names, text in _ENTRY.findall(section[1] if section else "")
        for name in re.split(r",\s+", names)
    }
