"""The table of docs/one-card.md is what `estimate` says: two rows of it, with LOWBIT_WHOLE=1 all.

A row of a large model takes most of a minute: it fits few cards, so `estimate` tries every change.
"""

import importlib.util

import pytest

from tests.support.paths import ROOT
from tests.support.require import need
from tests.support.selection import WHOLE

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def made():
    need("frameworks", importlib.util.find_spec("transformers"), "no transformers: make frameworks")
    spec = importlib.util.spec_from_file_location("one_card", ROOT / "docs/site/one_card.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("size", ["1 B", "3 B", "8 B", "14 B"] if WHOLE else ["1 B", "3 B"])
def test_a_row_is_what_estimate_says(made, size):
    name = next(name for name in made.MODELS if name.startswith(size))
    said = made.PAGE.read_text().split(made.BEGIN)[1].split(made.END)[0]
    assert made.row(name) in said.splitlines(), "python docs/site/one_card.py writes it anew"
