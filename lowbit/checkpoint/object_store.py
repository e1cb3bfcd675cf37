"""Checkpoints in object stores, read through fsspec: what a path is that begins like "s3://". C++
asks here for each range of bytes.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pathlib
import re
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from lowbit.checkpoint.errors import CheckpointError
from lowbit.checkpoint.paths import Path, bytes_of

StorageOptions = Mapping[str, Any] | None
MISSING, OBJECT, FOLDER = range(3)
# Fields that change when an object is replaced, the surest first.
VERSIONS = (
    "ETag",
    "etag",
    "generation",
    "version_id",
    "LastModified",
    "last_modified",
    "updated",
    "mtime",
    "created",
)


class Entry(NamedTuple):
    """What a store reports about an object, or about a folder whose entries begin with the name."""

    name: str
    kind: int
    size: int
    version: str


URL = re.compile(rb"[A-Za-z0-9+.:-]+://")  # as is_url of C++ has it
LOCAL = (b"file://", b"local://")
ONE_SLASH = re.compile(rb"([A-Za-z][A-Za-z0-9+.-]+:)/[^/]")  # what pathlib makes of a URL
SECRET = re.compile(
    rb"://[^/@]*:[^/@]*@|[?&](?:x-amz-signature|x-goog-signature|signature|sig)=", re.I
)


def is_url(path: Path) -> bool:
    """Whether a path is a URL of a store; "file://" is a path. What takes one asks here first.

    Raises:
        CheckpointError: it is one that has a password, that names nothing,
            or that went through pathlib.
    """
    name = bytes_of(path)
    lost = ONE_SLASH.match(name) if isinstance(path, pathlib.PurePath) else None
    if lost is not None and not os.path.isdir(lost[1]):
        url = os.fsdecode(name.replace(b":/", b"://", 1))
        raise CheckpointError(
            f"{os.fsdecode(name)}: pathlib keeps one of a URL's two slashes; pass text: {url!r}",
            code=2,
        )
    scheme = URL.match(name)
    if scheme is None or name.startswith(LOCAL):
        return False
    if SECRET.search(name):
        raise CheckpointError(
            f"{os.fsdecode(scheme[0])}...: the URL has a password or a signature, which errors "
            "and .metadata would show; pass it by storage_options=",
            code=2,
        )
    if not name[scheme.end() :].strip(b"/"):
        raise CheckpointError(f"{os.fsdecode(name)}: names no bucket or folder", code=2)
    return True


def local_path(path: Path) -> bytes:
    """A path as C++ takes it."""
    name = bytes_of(path)
    return name if is_url(path) or not name.startswith(LOCAL) else name.split(b"://", 1)[1]


def failed(url: str, doing: str, error: Exception) -> CheckpointError:
    """One sentence of what a store's library raised."""
    kind = type(error).__name__
    hint = ""
    if isinstance(error, PermissionError) or "credential" in kind.lower():
        hint = "; check the credentials, or pass storage_options="
    return CheckpointError(f"{url}: cannot {doing}: {kind}: {error}{hint}")


class Location:
    """A URL. Names are those of entries below it, and lead nowhere else; "" is the URL itself."""

    def __init__(self, url: str, fs: Any, path: str) -> None:
        self.url, self.fs, self.path = url, fs, path

    def below(self, rest: str) -> Location:
        return Location(f"{self.url}/{rest}", self.fs, self.at(rest))

    def at(self, name: str) -> str:
        # Joined as text: fsspec would take a name such as "a::file:///b" for a URL of its own.
        return f"{self.path.rstrip('/')}/{name}" if name else self.path

    def url_of(self, name: str) -> str:
        """For messages: a terminal obeys nothing of it."""
        url = f"{self.url}/{name}" if name else self.url
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in url)

    def info(self, name: str) -> Entry:
        """The entry now; its kind is MISSING if there is none."""
        try:
            self.fs.invalidate_cache(self.at(name))
            info = self.fs.info(self.at(name))
        except FileNotFoundError:
            return Entry(name, MISSING, 0, "")
        except Exception as error:
            raise failed(self.url_of(name), "open it", error) from error
        if info["type"] == "file" and info.get("size") is None:
            raise CheckpointError(
                f"{self.url_of(name)}: its store does not tell its "
                "size, without which it is not read"
            )
        return _entry(name, info)

    def list(self) -> list[Entry]:
        """What lies below it now, by one request for each thousand or so."""
        try:
            self.fs.invalidate_cache(self.path)
            listed = self.fs.ls(self.path, detail=True)
        except FileNotFoundError:
            return []
        except Exception as error:
            raise failed(self.url, "list it", error) from error
        entries = []
        for info in listed:
            parent, _, name = info["name"].strip("/").rpartition("/")
            if not name or parent != self.path.strip("/"):
                continue  # the folder's own marker
            unsized = info["type"] == "file" and info.get("size") is None
            entries.append(self.info(name) if unsized else _entry(name, info))
        return entries

    def read(self, name: str, begin: int, end: int) -> bytes:
        """Bytes [begin, end) of an object; code 3 where it has changed meanwhile."""
        try:
            got = self.fs.cat_file(self.at(name), start=begin, end=end)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{self.url_of(name)}: was deleted while the checkpoint was read; open it again",
                code=3,
            ) from error
        except Exception as error:
            raise failed(self.url_of(name), f"read bytes {begin}-{end - 1}", error) from error
        if len(got) != end - begin:
            raise CheckpointError(
                f"{self.url_of(name)}: returned {len(got)} bytes for range {begin}-{end - 1}: the "
                "object changed, or the store does not support range requests; read again or "
                "copy it to disk",
                code=3,
            )
        return got


def _entry(name: str, info: Mapping[str, Any]) -> Entry:
    kind = {"file": OBJECT, "directory": FOLDER}.get(info["type"], MISSING)
    version = next((str(info[key]) for key in VERSIONS if info.get(key)), "")
    return Entry(name, kind, int(info.get("size") or 0), version)


def connect(url: str, storage_options: StorageOptions = None) -> Location:
    """A URL as fsspec opens it.

    Raises:
        ImportError: fsspec, or the package that it needs for this kind of URL, is not installed.
        CheckpointError: there is no such kind, or the options do not fit.
    """
    is_url(url)  # no error below may show a password
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ImportError(
            f"{url}: object stores are read by fsspec: pip install 'fsspec>=2024.2'"
        ) from error
    try:
        fs, path = url_to_fs(url, **dict(storage_options or {}))
    except ImportError as error:
        raise ImportError(f"{url}: {error}") from error
    except Exception as error:
        raise failed(url, "open it", error) from error
    return Location(url, fs, path)


_LOCK = threading.Lock()
# By URL, as long as somebody has it open. No finalizer touches it: the garbage collector may run
# inside the lock, in the thread that has it.
_OPENED: weakref.WeakValueDictionary[str, Location] = weakref.WeakValueDictionary()


def _same(a: Any, b: Any) -> bool:
    """Whether two file systems were asked for in the same words;
    fsspec makes another for each thread.
    """
    return (
        type(a) is type(b)
        and a.storage_args == b.storage_args
        and a.storage_options == b.storage_options
    )


class Opened:
    """A path that C++ may open: a URL is known to it, with its options, as long as this lives.

    Raises:
        ValueError: the same URL is open with other options.
    """

    def __init__(self, path: Path, storage_options: StorageOptions = None) -> None:
        self.name = local_path(path)
        self.location: Location | None = None
        if not is_url(path):
            return
        url = os.fsdecode(self.name).rstrip("/")
        self.name = os.fsencode(url)
        asked = connect(url, storage_options)
        with _LOCK:
            known = _OPENED.setdefault(url, asked)
        if _same(known.fs, asked.fs):
            self.location = known
        else:
            del known  # the traceback would keep it open
            raise ValueError(
                f"{url} is open with other storage_options: drop the "
                "Checkpoint or Reader that has it first"
            )

    def __enter__(self) -> bytes:
        return self.name

    def __exit__(self, *_: object) -> None:
        self.location = None


@contextlib.contextmanager
def opened(storage_options: StorageOptions, *paths: Path) -> Iterator[list[bytes]]:
    """Paths as C++ takes them, for the length of a call."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Opened(path, storage_options)) for path in paths]


def location(name: bytes) -> Location:
    """Called by C++: a URL that is open, or lies below one; any other is opened without options."""
    url = os.fsdecode(name)
    with _LOCK:
        known_ones = sorted(_OPENED.items(), reverse=True)
    for base, known in known_ones:
        if url == base:
            return copy.copy(known)  # C++ may keep it longer than it is open
        if url.startswith(f"{base}/"):
            return known.below(url[len(base) + 1 :])
    return connect(url)
