"""The pages of the documentation: their blocks of code,
and how a block of a terminal is run and compared.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass

from tests.support.paths import ROOT
from tests.support.ranks import launch

# What a block may be written in. Those of RUN are run, the rest is shown.
RUN = ("python", "bash", "console")
SHOWN = ("text", "cmake", "json", "yaml")

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: its file, from the repository's root.
        line: that of the opening fence, from 1.
        language: behind the fence.
        text: what is between the fences.
        not_run: why it is not run, from a comment `<!-- not run: REASON -->` above it; "" if it is.
        needs: packages without which it is not run,
            from `<!-- needs: PACKAGE, PACKAGE -->` above it.
        file: a script that later commands run, from `<!-- file: NAME -->` above it: it is written
            under that name, and not run by itself.
    """

    page: str
    line: int
    language: str
    text: str
    not_run: str = ""
    needs: tuple[str, ...] = ()
    file: str = ""

    @property
    def reason(self) -> str:
        """Why this machine does not run it, or ""."""
        missing = [name for name in self.needs if importlib.util.find_spec(name) is None]
        return self.not_run or (f"{' and '.join(missing)} not installed" if missing else "")

    @property
    def code(self):
        """Compiled, with the page's own lines in a traceback."""
        return compile("\n" * self.line + self.text, self.page, "exec")


def blocks_of(text: str, page: str) -> list[Block]:
    """The fenced blocks of a page in their order."""
    found = []
    above, opened, lines = "", None, []
    for number, line in enumerate(text.splitlines(), 1):
        fence = re.match(r" *```(.*)$", line)
        if fence and opened is None:
            opened, lines = (number, fence[1], above), []
        elif fence and opened is not None:
            first, language, comment = opened
            said = re.fullmatch(r" *<!-- (not run|needs|file): (.+) -->", comment)
            kind, what = said.groups() if said else ("", "")
            found.append(
                Block(
                    page,
                    first,
                    language,
                    "\n".join(lines) + "\n",
                    what if kind == "not run" else "",
                    tuple(what.split(", ")) if kind == "needs" else (),
                    what if kind == "file" else "",
                )
            )
            opened = None
        elif opened is not None:
            lines.append(line)
        above = line
    assert opened is None, f"{page}: a block that begins at line {opened[0]} does not end"
    return found


def blocks(path: pathlib.Path) -> list[Block]:
    return blocks_of(path.read_text(), str(path.relative_to(ROOT)))


def indented_code(text: str) -> list[str]:
    """Lines of code that are marked by their indentation alone: neither a test nor a highlighter
    knows their language.
    """
    plain = re.sub(r"^ *```.*?^ *```", "", text, flags=re.S | re.M)
    return [
        line
        for before, line in re.findall(r"^(.*)\n\n(    .*)$", plain, re.M)
        if not re.match(r" *([*]|\d+\.) |  ", before)
    ]


# A terminal


def commands(block: Block) -> list[tuple[str, str | None]]:
    """What a block types, and what it shows below each line: None where it shows nothing of the
    kind (bash).
    """
    joined = block.text.replace("\\\n", " ")
    if block.language == "bash":
        return [(line, None) for line in joined.splitlines() if line.strip()]
    typed = re.split(r"^\$ ", joined, flags=re.M)
    assert typed[0] == "", f"{block.page}:{block.line}: a console block begins with '$ '"
    pairs = [part.partition("\n") for part in typed[1:]]
    return [(command, shown) for command, _, shown in pairs]


def run(command: str) -> tuple[int, str]:
    """Runs a command line as bash would. Returns its exit status and what it printed;
    `python -m lowbit` runs in this process, and ranks are forked from one that has imported torch.
    """
    words = shlex.split(command, comments=True)
    if words[:2] == ["lowbit-ckpt", "convert"] or words[:2] == ["lowbit-ckpt", "reshard"]:
        remove(words[3])  # of an earlier block: a page may show the same line twice
    if words[:3] == ["python", "-m", "lowbit"]:
        from lowbit.__main__ import main

        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            return main(words[3:]), out.getvalue()
    if words[:3] == ["torchrun", "--standalone", "--nproc-per-node"]:
        return 0, launch.run(words[4], int(words[3]), *words[5:])
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        env={**os.environ, "PATH": path},
        text=True,
        capture_output=True,
        timeout=600,
    )
    return done.returncode, done.stdout + done.stderr


def remove(name: str) -> None:
    path = pathlib.Path(name)
    assert not path.is_absolute() and ".." not in path.parts, name
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


NUMBER = r"\d+\.\d+(?:e[+-]?\d+)?|\d+e[+-]?\d+"


def alike(shown: str, printed: str) -> bool:
    """Whether a page shows what was printed: a line `...` stands for any lines, and numbers with a
    point may differ by a tenth.
    """
    pieces = [piece.strip("\n") for piece in re.split(r"^\.\.\.$", shown, flags=re.M)]
    at, lines = 0, printed.rstrip("\n").split("\n")
    for i, piece in enumerate(pieces):
        wanted = piece.split("\n") if piece else []
        last, places = i == len(pieces) - 1, range(at, len(lines) - len(wanted) + 1)
        if i == 0:
            places = [0]
        if last and wanted:
            places = [p for p in places if p == len(lines) - len(wanted)]
        here = next((p for p in places if _same(wanted, lines[p : p + len(wanted)])), None)
        if here is None:
            return False
        at = here + len(wanted)
    return at == len(lines) or pieces[-1] == ""


def _same(wanted: list[str], lines: list[str]) -> bool:
    if len(wanted) != len(lines):
        return False
    for want, line in zip(wanted, lines, strict=True):
        if re.sub(NUMBER, "0", want).split() != re.sub(NUMBER, "0", line).split():
            return False
        pairs = zip(re.findall(NUMBER, want), re.findall(NUMBER, line), strict=True)
        if any(abs(float(a) - float(b)) > 0.1 * abs(float(b)) for a, b in pairs):
            return False
    return True
