"""Writes docs/reference/ckpt-options.md, the reference of lowbit-ckpt, from what `--help` prints:
`python docs/site/ckpt_options.py`.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
from collections.abc import Callable

PAGE = pathlib.Path(__file__).resolve().parent.parent / "reference" / "ckpt-options.md"
# A default that depends on the machine.
THREADS = re.compile(r"(--threads N)=\d+")


def help_of(*command: str) -> str:
    """What the tool prints for `--help`."""
    done = ["lowbit-ckpt", *command, "--help"]
    return subprocess.run(done, check=True, capture_output=True, text=True, timeout=60).stdout


def page(help_of: Callable[..., str] = help_of) -> str:
    """The whole page."""
    first = help_of()
    commands = [(name, what) for name, what in _entries(first, "Commands")]
    (codes,) = re.findall(r"^Exit codes: (.*)\.$", first, re.M)
    lines = [
        "# Options of lowbit-ckpt",
        "",
        (
            "`python docs/site/ckpt_options.py` writes this page from `lowbit-ckpt --help`. "
            "[ckpt.md](../ckpt.md) says which command"
        ),
        "does what.",
        "",
        (
            "`lowbit-ckpt --version` prints the version and those of its libraries. `--threads` is "
            "as many as the machine has cores,"
        ),
        "at most 8, by default.",
        "",
        *_table(("command", "does"), [(f"[`{name}`](#{name})", what) for name, what in commands]),
        *_table(("exit code", "means"), [tuple(code.split(" ", 1)) for code in codes.split(", ")]),
    ]
    for name, _ in commands:
        lines += _section(name, help_of(name))
    return "\n".join(lines).rstrip() + "\n"


def _section(name: str, text: str) -> list[str]:
    """A command's heading, its arguments and options, and its examples."""
    (usage,) = re.findall(r"^Usage: (.*)$", text, re.M)
    entries = [*_entries(text, "Arguments"), *_entries(text, "Options")]
    shown = [
        (f"`{said.removesuffix(' REQUIRED')}`", what)
        for said, what in entries
        if said != "-h,--help"
    ]
    examples = re.findall(r"^  (.+)$", text[text.index("Examples:") :], re.M)
    return [
        f"## {name}",
        "",
        f"{text.splitlines()[0]}: `{usage}`",
        "",
        *_table(("argument or option", "means"), shown),
        "```text",
        *examples,
        "```",
        "",
    ]


def _entries(text: str, title: str) -> list[tuple[str, str]]:
    """The two columns of a part of a help text."""
    part = re.search(rf"^{title}:\n((?:  .*\n)+)", THREADS.sub(r"\1", text), re.M)
    return re.findall(r"^  (\S.*?) {2,}(\S.*)$", part[1], re.M) if part else []


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    cells = [[_escaped(cell) for cell in row] for row in rows]
    return [*(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *cells)), ""]


def _escaped(cell: str) -> str:
    """Markdown takes stars and bars outside of code for its own."""
    return cell if cell.startswith("`") else re.sub(r"([*|])", r"\\\1", cell)


if __name__ == "__main__":
    PAGE.write_text(page())
