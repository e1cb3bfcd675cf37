"""Where things of the repository lie."""

import os
import pathlib

SUPPORT = pathlib.Path(__file__).parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent
GOLDEN = TESTS / "golden"
RECIPES = ROOT / "recipes"


def for_build(folder: pathlib.Path) -> dict[str, str]:
    """The environment of a build in a temporary folder: a ccache, where one is used, then finds the
    objects of an earlier folder.
    """
    return {**os.environ, "CCACHE_BASEDIR": str(folder)}
