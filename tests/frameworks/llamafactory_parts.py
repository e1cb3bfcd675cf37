"""A plug-in of pytest: the parts of LLaMA-Factory that choose an optimizer, where the whole of it
cannot be imported. Its `model` needs a TRL of before 2026.
"""

import os
import sys
import types

import launchers

os.environ["DISABLE_VERSION_CHECK"] = "1"  # it wants transformers below 5.7
launchers.part_of("llamafactory", "train")
model = types.ModuleType("llamafactory.model")
for name in ("find_all_linear_modules", "load_model", "load_tokenizer", "load_valuehead_params"):
    setattr(model, name, None)
sys.modules["llamafactory.model"] = model
