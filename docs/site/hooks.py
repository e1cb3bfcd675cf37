"""What mkdocs does beside its plugins: the pages at the root of the repository belong to the site,
and links leave it where they have to.
"""

from __future__ import annotations

import pathlib
import posixpath
import re
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
LINK = re.compile(r"\[([^\]\[]*)\]\((?![a-z]+:|#)([^)#\s]+)([^)\s]*)\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages of the root; README.md is not one, docs/index.md is in its place."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Points links at pages of the root to the site's own,
    and links at other files to the repository.
    """
    by_page = {at: name for name, at in PAGES.items()}
    source = by_page.get(page.file.src_uri)
    folder = "" if source else posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def target(link: re.Match[str]) -> str:
        said, to, anchor = link.groups()
        path = posixpath.normpath(posixpath.join(folder, to))
        if not (ROOT / path).exists():
            return link[0]  # strict mode says so
        if path.endswith(".md") and posixpath.basename(said) == posixpath.basename(path):
            said = _title(path)  # on GitHub a reader sees files, here pages
        if path in PAGES:
            to = _relative(PAGES[path], page)
        elif path.startswith("docs/"):
            to = _relative(path.removeprefix("docs/"), page)
        else:
            kind = "tree" if (ROOT / path).is_dir() else "blob"
            to = f"{config.extra['repository']}/{kind}/main/{path}"
        return f"[{said}]({to}{anchor})"

    return LINK.sub(target, markdown)


def _title(path: str) -> str:
    """The heading of a page."""
    heading = re.search(r"^# (.*)$", (ROOT / path).read_text(), re.M)
    return heading[1] if heading else path


def _relative(path: str, page: Any) -> str:
    return posixpath.relpath(path, posixpath.dirname(page.file.src_uri) or ".")
