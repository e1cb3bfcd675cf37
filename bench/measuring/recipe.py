"""The recipe whose model is trained: recipes/train_gpt.py."""

from __future__ import annotations

import importlib.util
from types import ModuleType

from bench import ROOT


def load_recipe() -> ModuleType:
    """A new module made from the recipe's file, which is in no package."""
    spec = importlib.util.spec_from_file_location("train_gpt", ROOT / "recipes" / "train_gpt.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
