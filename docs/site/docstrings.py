"""Docstrings as mkdocstrings reads them: an entry "a, b: text" of Args becomes one for each name, and "a, b: as in `Adam`." a sentence."""

from __future__ import annotations

import re
from typing import Any

import griffe

_SECTION = re.compile(r"^Args:\n((?:(?: +.*)?\n?)*)", re.M)
_ENTRY = re.compile(r"^    (\w+(?:,\s+\w+)+): (.*(?:\n(?: {8}.*)?(?=\n|$))*)", re.M)


class Docstrings(griffe.Extension):
    """Rewrites the docstrings of a package when it is loaded."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        self._walk(pkg)

    def _walk(self, some: Any) -> None:
        if some.docstring:
            some.docstring.value = split(some.docstring.value)
        for member in some.members.values():
            if not member.is_alias:
                self._walk(member)


def split(text: str) -> str:
    """A docstring whose Args have one name each."""
    section = _SECTION.search(text)
    if section is None:
        return text
    said = []

    def entry(match: re.Match[str]) -> str:
        names, meaning = re.split(r",\s+", match[1]), " ".join(match[2].split())
        if meaning.startswith(("as in ", "as for ")):
            said.append(f"{', '.join(f'`{name}`' for name in names)}: {meaning}")
            return ""
        return "\n".join(f"    {name}: {meaning}" for name in names)

    entries = _ENTRY.sub(entry, section[1])
    lines = [line for line in entries.splitlines() if line.strip()]
    made = "Args:\n" + "\n".join(lines) + "\n\n" if lines else ""
    made += "".join(f"{sentence}\n\n" for sentence in said)
    return (text[: section.start()] + made + text[section.end() :]).rstrip() + "\n"
