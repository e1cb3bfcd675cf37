"""Small file systems that a test mounts for itself."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import shutil
import subprocess
from collections.abc import Iterator

from tests.support.require import need

TOOLS = ("unshare", "nsenter", "mount")


@dataclasses.dataclass(frozen=True)
class Mounted:
    """A file system that only some processes see.

    `enter` are the words before a command that sees it; paths in the command are absolute. `seen`
    is the same folder for a process that does not see it.
    """

    enter: list[str]
    seen: pathlib.Path


@contextlib.contextmanager
def mounted(folder: pathlib.Path, kind: str, size: str = "") -> Iterator[Mounted]:
    """Mounts a `tmpfs` of a given size, or a `ramfs`, at a new `folder`;
    skips the test where the machine does not let it.

    The mount belongs to a namespace, which needs no root. The kernel unmounts it when the last
    process in the namespace ends: at the end of the block, or with this process.
    """
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None]
    need(
        "mount",
        not lacking,
        f"a file system of its own needs {', '.join(lacking)}: apt-get install mount util-linux",
    )
    folder.mkdir()
    options = ["-o", f"size={size}"] if size else []
    holder = subprocess.Popen(
        [
            "unshare",
            "--map-root-user",
            "--mount",
            "sh",
            "-c",
            '"$@" && echo mounted && read line',
            "sh",
            "mount",
            "-t",
            kind,
            *options,
            "none",
            folder,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with holder:  # which closes its pipes, and waits
        try:
            assert holder.stdout is not None and holder.stderr is not None
            there = holder.stdout.readline() == "mounted\n"
            why = "" if there else holder.stderr.read().partition("\n")[0]
            need("mount", there, f"no {kind} can be mounted in a namespace of its own: {why}")
            enter = [
                "nsenter",
                f"--target={holder.pid}",
                "--user",
                "--mount",
                "--preserve-credentials",
            ]
            yield Mounted(enter, pathlib.Path(f"/proc/{holder.pid}/root{folder}"))
        finally:
            holder.kill()
