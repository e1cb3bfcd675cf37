"""The pictures of docs/pictures are those of the recorded results, and pages show them."""

import importlib.util
import json
import re
import sys

import pytest

from tests.support.paths import ROOT
from tests.support.require import need

pytestmark = pytest.mark.slow

SITE, FOLDER = ROOT / "docs" / "site", ROOT / "docs" / "pictures"
SHOWN = re.compile(r"pictures/([\w-]+)\.svg\)")


def words(svg):
    """The texts of a picture, in their order."""
    return re.findall(r"<text [^>]*>([^<]*)</text>", svg)


@pytest.fixture
def site(monkeypatch):
    monkeypatch.syspath_prepend(str(SITE))
    yield
    for name in ("pictures", "plots", "speed_plots", "flows", "memory"):
        sys.modules.pop(name, None)


def test_pictures_are_of_the_recorded_results(site, tmp_path, monkeypatch):
    import pictures

    monkeypatch.setattr(pictures, "FOLDER", tmp_path)
    drawn = pictures.all_pictures()
    assert sorted(drawn) == sorted(path.stem for path in FOLDER.glob("*.svg"))
    for name, draw in drawn.items():
        draw()
        made = words((tmp_path / f"{name}.svg").read_text())
        assert made and made == words((FOLDER / f"{name}.svg").read_text()), (
            f"{name}: python docs/site/pictures.py draws it anew"
        )


def test_pictures_follow_the_scheme_of_the_page():
    for path in FOLDER.glob("*.svg"):
        head, _, drawn = path.read_text().partition("</style>")
        assert "prefers-color-scheme: dark" in head and "<title>" in head
        # matplotlib draws a clipping path in black, which is not seen
        assert not re.findall(r"(?:fill|stroke): ?#(?!000000)\w{6}", drawn), path.name
        assert "DejaVu Sans'" in drawn and 'href="http' not in drawn


def test_every_picture_is_on_a_page_and_says_what_it_shows():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "".join(path.read_text() for path in pages)
    assert set(SHOWN.findall(text)) == {path.stem for path in FOLDER.glob("*.svg")}
    assert all(
        len(said) > 20 for said in re.findall(r"!\[([^\]]*)\]\([^)]*pictures/[^)]*svg", text)
    )


def test_the_recorded_memory_is_the_estimate(site):
    present = importlib.util.find_spec("transformers") is not None
    need("frameworks", present, "transformers is not installed: make frameworks")
    import memory

    recorded = json.loads(memory.RESULTS.read_text())
    assert list(recorded) == list(memory.MODELS)
    for name, counted in memory.count(list(memory.MODELS)[:2]).items():
        assert counted == recorded[name]
