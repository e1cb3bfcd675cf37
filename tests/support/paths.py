"""Where things of the repository lie."""

import pathlib

SUPPORT = pathlib.Path(__file__).parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent
GOLDEN = TESTS / "golden"
RECIPES = ROOT / "recipes"
