"""Draws the pictures of docs/pictures from recorded results: `python docs/site/pictures.py`.
`--memory` first counts bench/results/memory.json anew, which needs transformers.

Each is an SVG of 400 pixels, a phone's width, with text as text. Its colors are variables that
change with `prefers-color-scheme`: a browser takes that from the page's own `color-scheme`.
"""

from __future__ import annotations

import contextlib
import pathlib
import re
import sys
from collections.abc import Callable, Iterator

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "pictures"
WIDTH = 4.17  # inches: 400 pixels
# A name's color on a light ground, which is what matplotlib draws, and on a dark one.
COLORS = {
    "ground": ("#fefefe", "#1e2129"),
    "ink": ("#1b1f24", "#e6edf3"),
    "muted": ("#59636e", "#a4adb8"),
    "line": ("#d1d9e0", "#444c56"),
    "plain": ("#b6bfc9", "#5c6773"),
    "plainer": ("#dde3e9", "#3b434d"),
    "other": ("#7a6652", "#c4a98c"),
    "ours": ("#3949ab", "#8fa2ff"),
    "ours_soft": ("#c5cbea", "#39437a"),
    "bad": ("#c0392b", "#ff8a7a"),
}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


class Palette:
    """The colors on a light ground, by name."""

    def __getattr__(self, name: str) -> str:
        return COLORS[name][0]


INK = Palette()


@contextlib.contextmanager
def picture(name: str, title: str, height: float) -> Iterator[Figure]:
    """A figure of WIDTH x height inches, written as docs/pictures/NAME.svg."""
    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "font.size": 9.5,
        "font.family": "DejaVu Sans",
        "text.color": INK.ink,
        "axes.edgecolor": INK.line,
        "axes.labelcolor": INK.muted,
        "axes.titlecolor": INK.ink,
        "axes.facecolor": "none",
        "figure.facecolor": INK.ground,
        "xtick.color": INK.muted,
        "ytick.color": INK.muted,
        "grid.color": INK.line,
    }
    with pyplot.rc_context(style):
        figure = pyplot.figure(figsize=(WIDTH, height))
        yield figure
        path = FOLDER / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None, "Creator": None, "Title": title})
        pyplot.close(figure)
    path.write_text(themed(path.read_text(), title))


def themed(svg: str, title: str) -> str:
    """An SVG of matplotlib with variables for its colors, the reader's own font, and a title."""
    for name, (light, _) in COLORS.items():
        svg = svg.replace(light, f"var(--{name})")
    svg = re.sub(r"(font(?:-family)?: ?[^;\"]*?)'DejaVu Sans'[^;\"]*", rf"\1{FONT}", svg)
    light, dark = ("".join(f"--{n}:{c[i]};" for n, c in COLORS.items()) for i in (0, 1))
    style = f"<style>:root{{{light}}}@media (prefers-color-scheme: dark){{:root{{{dark}}}}}</style>"
    head = re.search(r"<svg [^>]*>", svg, re.S)
    assert head is not None
    svg = f"{svg[: head.end()]}\n <title>{title}</title>\n {style}{svg[head.end() :]}"
    return re.sub(r" +$", "", svg, flags=re.M)


def panel(figure: Figure, bottom: float, height: float, left: float = 0.04) -> Axes:
    """Axes of the figure's width, from the bottom up, all in inches; without a frame."""
    tall = figure.get_figheight()
    axes = figure.add_axes((left, bottom / tall, 0.95 - left, height / tall))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0)
    axes.set_yticks([])
    return axes


def without_scale(axes: Axes) -> None:
    """For bars with their numbers beside them."""
    axes.spines["bottom"].set_visible(False)
    axes.set_xticks([])


def log_x(axes: Axes, least: float, most: float, ticks: dict[float, str]) -> None:
    """A logarithmic scale from left to right, with these ticks alone."""
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.set_xlim(least, most)
    axes.set_xticks(list(ticks), list(ticks.values()))


def heading(figure: Figure, title: str, below: str = "") -> None:
    """Two lines at the top left."""
    tall = figure.get_figheight()
    figure.text(0.04, 1 - 0.1 / tall, title, weight="bold", size=10.5, va="top")
    if below:
        figure.text(0.04, 1 - 0.3 / tall, below, color=INK.muted, size=8.8, va="top")


def all_pictures() -> dict[str, Callable[[], None]]:
    """What draws each, by its file's name."""
    import flows
    import plots
    import speed_plots

    return {**plots.PICTURES, **speed_plots.PICTURES, **flows.PICTURES}


if __name__ == "__main__":
    sys.modules["pictures"] = sys.modules["__main__"]
    if "--memory" in sys.argv:
        import memory

        memory.record()
    FOLDER.mkdir(exist_ok=True)
    for name, draw in all_pictures().items():
        draw()
        print(f"docs/pictures/{name}.svg")
