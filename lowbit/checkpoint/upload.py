"""Checkpoints written to object stores,
which have no rename: what the name shows is whole at every moment.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lowbit.checkpoint.errors import CheckpointError
from lowbit.checkpoint.native import native
from lowbit.checkpoint.object_store import (
    FOLDER,
    MISSING,
    OBJECT,
    Entry,
    StorageOptions,
    connect,
    failed,
    is_url,
    local_path,
)
from lowbit.checkpoint.paths import Path, bytes_of

INDEX, DIGESTS = ".metadata", "lowbit.json"
DATA = re.compile(r"__\d+_(\d+)\.distcp")
NUMBERS = 1 << 30  # of names of data, which are drawn
RANK = re.compile(r"__\d+\.metadata")
# What may be replaced begins like a zip, a pickle or a page;
# safetensors has a length below 2^48 and a brace.
HEADS = (b"PK", b"\x80", b"<!doctype")


class Upload:
    """A checkpoint that is being written to a URL.

    Objects of data come first, under names that no object there has, so that they change nothing
    that a reader sees. `.metadata` is one object and is put last: it makes the checkpoint visible,
    or replaces the old one. What an older checkpoint had is removed after that. A process that is
    killed before leaves objects that nothing names; the next write to the URL removes them.

    Raises:
        CheckpointError: the URL may not be replaced, or cannot be written.
    """

    def __init__(self, url: str, storage_options: StorageOptions = None) -> None:
        self.url = url.rstrip("/")
        self.location = connect(self.url, storage_options)

    def check(
        self,
        overwrite: bool,
        folder: bool | None,
        advice: str = "force=True replaces it",
        fill: bool = False,
    ) -> None:
        """Whether a checkpoint may be written here, as a folder or an object;
        None: it is not known yet.

        Args:
            fill: also between other objects where there is no checkpoint yet.
        """
        kind = self.location.info("").kind
        if kind != MISSING and folder is not None and folder != (kind == FOLDER):
            # Every reader looks for the object first, and would keep reading that one.
            what = "a folder, not an object" if kind == FOLDER else "an object, not a folder"
            raise CheckpointError(f"{self.url} exists and is {what}; choose another place", code=2)
        there = self._entries() if kind != OBJECT else {}
        if kind == MISSING or (kind == FOLDER and not there):
            return
        if kind == FOLDER and all(DATA.fullmatch(name) or name == DIGESTS for name in there):
            return  # left by a save that did not finish
        if fill and kind == FOLDER and INDEX not in there and not any(map(RANK.fullmatch, there)):
            return
        if not overwrite:
            raise CheckpointError(f"{self.url} exists; {advice}", code=2)
        if not (
            self._is_file() if kind == OBJECT else INDEX in there or any(map(DATA.fullmatch, there))
        ):
            raise CheckpointError(
                f"{self.url} exists and holds something else than a "
                "checkpoint, which is not replaced",
                code=2,
            )

    def _is_file(self) -> bool:
        size = min(self.location.info("").size, 9)
        head = self.location.read("", 0, size) if size else b""
        return not head or head.startswith(HEADS) or (len(head) == 9 and head[6:] == b"\0\0{")

    def _entries(self) -> dict[str, Entry]:
        return {entry.name: entry for entry in self.location.list()}

    def number(self) -> int:
        """The N of names __RANK_N.distcp that no object here has, and none that is still being
        uploaded: a store does not list those of a save that was stopped, and may finish them late.
        """
        taken = {int(m[1]) for m in map(DATA.fullmatch, self._entries()) if m}
        while (number := secrets.randbelow(NUMBERS)) in taken:
            pass
        return number

    def put(self, name: str, local: str) -> None:
        """A file of the local disk; "" is the URL itself."""
        try:
            self.location.fs.put_file(local, self.location.at(name))
        except Exception as error:
            raise failed(self.location.url_of(name), "write it", error) from error

    def _pipe(self, name: str, content: bytes) -> None:
        try:
            self.location.fs.pipe_file(self.location.at(name), content)
        except Exception as error:
            raise failed(self.location.url_of(name), "write it", error) from error

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            try:
                self.location.fs.rm_file(self.location.at(name))
            except FileNotFoundError:
                pass
            except Exception as error:
                raise failed(self.location.url_of(name), "remove it", error) from error

    def publish(self, data: Mapping[str, int], index: bytes, digests: bytes | None) -> None:
        """Makes the checkpoint visible, in the order of `publication` in
        tools/io/write/checkpoint_folder.h.

        Args:
            data: the objects that are there already, and their bytes.
            index, digests: the contents of `.metadata` and, where there are digests,
                of `lowbit.json`.
        """
        there = self._entries()
        for name, size in data.items():
            if name not in there or there[name].size != size:
                found = f"{there[name].size} bytes" if name in there else "nothing"
                raise CheckpointError(
                    f"{self.location.url_of(name)}: {size} bytes were written, and {found} is "
                    "there; the checkpoint was not published"
                )
        contents = {INDEX: index, DIGESTS: digests or b""}
        # A checkpoint's names are ASCII.
        known = json.dumps([name for name in there if name.isascii()])
        steps = native().publication(known, json.dumps(list(data)), digests is not None)
        for puts, name in json.loads(steps):
            if puts:
                self._pipe(name, contents[name])
            else:
                self._remove([name])

    def folder(self, local: str) -> None:
        """A whole directory of torch.distributed.checkpoint from the local disk."""
        data = {
            n: os.path.getsize(os.path.join(local, n))
            for n in sorted(os.listdir(local))
            if DATA.fullmatch(n)
        }
        begun: list[str] = []
        try:
            for name in data:
                begun.append(name)
                self.put(name, os.path.join(local, name))
        except BaseException:
            with contextlib.suppress(CheckpointError):
                self._remove(begun)
            raise
        digests = os.path.join(local, DIGESTS)
        self.publish(
            data,
            _content(os.path.join(local, INDEX)),
            _content(digests) if os.path.exists(digests) else None,
        )


def is_folder(target: Path, container: str) -> bool | None:
    """Whether `convert` writes a folder, by the rules of container_of in C++;
    None: as the source is.
    """
    if container:
        return container in ("dcp", "universal")
    ends = (b".pt", b".pth", b".bin", b".ckpt", b".safetensors")
    return False if bytes_of(target).rstrip(b"/").endswith(ends) else None


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _local_name(url: str) -> str:
    """The last name of a URL, with the end that tells the container;
    a store takes longer names than a disk.
    """
    name = url.rpartition("/")[2]
    return name if len(os.fsencode(name)) < 256 else name[-60:]


class Target:
    """Where a command writes: the target itself,
    or a place on the local disk from where it is uploaded.
    """

    def __init__(self, path: bytes, options: dict[str, Any], url: str = "") -> None:
        self.path, self.options, self.url = path, options, url

    def report(self, text: str) -> dict[str, Any]:
        """A command's report, by the name that the caller gave."""
        report = json.loads(text)
        return {**report, "target": self.url} if self.url else report


@contextlib.contextmanager
def written(
    storage_options: StorageOptions,
    target: Path,
    sources: Sequence[Path],
    *,
    folder: bool | None,
    force: bool,
    dry_run: bool,
) -> Iterator[Target]:
    """A target, for the length of a command. What is for a URL is written to TMPDIR, then uploaded.

    Args:
        folder: whether the target is a folder; None: its source tells.
    """
    if not is_url(target):
        yield Target(local_path(target), {})
        return
    url = os.fsdecode(bytes_of(target)).rstrip("/")
    for source in sources:
        read = os.fsdecode(bytes_of(source)).rstrip("/")
        if f"{read}/".startswith(f"{url}/"):
            what = "is the source" if read == url else f"holds the source {read}"
            raise CheckpointError(f"{url} {what}; choose another target", code=2)
    upload = Upload(url, storage_options)
    for source in sources:
        within = url.startswith(f"{os.fsdecode(bytes_of(source)).rstrip('/')}/")
        if within and upload.location.info("").kind == OBJECT:
            raise CheckpointError(
                f"{url} lies in the source {os.fsdecode(bytes_of(source))}, of which it may be a "
                "part; choose another target",
                code=2,
            )
    upload.check(force, folder)
    with tempfile.TemporaryDirectory(prefix="lowbit-") as scratch:
        local = os.path.join(scratch, _local_name(url))
        try:
            yield Target(
                os.fsencode(local), {"file_number": upload.number(), "published_as": url}, url
            )
        except CheckpointError as error:
            if local not in error.text:
                raise
            # Only an I/O error is about the local copy.
            text = (
                f"{url} is written to TMPDIR first: {error.text}"
                if error.code == 1
                else error.text.replace(local, url)
            )
            file = error.file if error.code == 1 else error.file.replace(local, url)
            raise CheckpointError(text, error.code, file, *error.args[3:]) from error
        if dry_run:
            return
        upload.check(force, os.path.isdir(local))
        if os.path.isdir(local):
            upload.folder(local)
        else:
            upload.put("", local)
