"""What mkdocstrings reads, mended before it is shown: options that a constructor takes by
`**options`, and docstrings whose entries have several names.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_SECTION = re.compile(r"^Args:\n((?:(?: +.*)?\n?)*)", re.M)
_ENTRY = re.compile(r"^    (\w+(?:,\s+\w+)+): (.*(?:\n(?: {8}.*)?(?=\n|$))*)", re.M)


class Docstrings(griffe.Extension):
    """Goes through a package when it is loaded; nothing of it is imported."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        arguments, muon = pkg["config.arguments"], pkg["config.muon"]
        # Muon's own come first, as in its signature.
        self.defaults = {**defaults(muon["OWN"]), **defaults(arguments["DEFAULTS"])}
        own = {name: m.annotation for name, m in arguments["Options"].members.items()}
        torchs = {name: m.annotation for name, m in arguments["AllOptions"].members.items()}
        muons = {name: m.annotation for name, m in muon["MuonOptions"].members.items()}
        self.options = {
            "Unpack[Options]": own,
            "Unpack[AllOptions]": {**own, **torchs},
            "Unpack[MuonOptions]": {**muons, **own, **torchs},
        }
        self._walk(pkg)

    def _walk(self, some: Any) -> None:
        if some.docstring:
            some.docstring.value = split(some.docstring.value)
        if some.is_function:
            self._unpack(some)
        for member in some.members.values():
            if not member.is_alias:
                self._walk(member)

    def _unpack(self, function: griffe.Function) -> None:
        """Each of the options in place of `**options: Unpack[...]`, with its default,
        as `help` shows them.
        """
        for parameter in list(function.parameters):
            kinds = self.options.get(str(parameter.annotation))
            if kinds is None or parameter.kind is not griffe.ParameterKind.var_keyword:
                continue
            del function.parameters[parameter.name]
            for name, default in self.defaults.items():
                if name in kinds:
                    function.parameters.add(
                        griffe.Parameter(
                            name,
                            annotation=kinds[name],
                            kind=griffe.ParameterKind.keyword_only,
                            default=default,
                        )
                    )


def defaults(said: Any) -> dict[str, Any]:
    """Names and defaults of options, from a dict in the source."""
    return {str(k).strip("'\""): v for k, v in zip(said.value.keys, said.value.values, strict=True)}


def split(text: str) -> str:
    """A docstring whose Args have one name each: "a, b: text" comes once for each name, "a, b: as
    in `Adam`." becomes a sentence behind them.
    """
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
