"""Where things of the repository lie."""

import os
import pathlib

TESTS = pathlib.Path(__file__).parents[1]
ROOT = TESTS.parent
GOLDEN = TESTS / "golden"
RECIPES = ROOT / "recipes"


def importing_tests(**more: str) -> dict[str, str]:
    """The environment of a program that imports from `tests`, with `more`."""
    said = {**os.environ, **more}
    path = [*filter(None, [said.get("PYTHONPATH")]), str(ROOT)]
    return {**said, "PYTHONPATH": os.pathsep.join(path)}


def for_build(folder: pathlib.Path) -> dict[str, str]:
    """The environment of a build in a temporary folder: a ccache, where one is used, then finds the
    objects of an earlier folder.
    """
    return {**os.environ, "CCACHE_BASEDIR": str(folder)}
