"""Loads sanitized modules of lowbit, of the build folder LOWBIT_SANITIZED, instead of the
installed ones: `make sanitize-python`. Python runs this file at each start, in subprocesses too.
"""

import importlib.util
import os
import pathlib
import sys
from importlib.machinery import ModuleSpec
from typing import Any

FILES = {
    f"lowbit.{path.name.partition('.')[0]}": str(path)
    for folder in ("csrc", "tools")
    for path in pathlib.Path(os.environ["LOWBIT_SANITIZED"], folder).glob("_*.so")
}
if "lowbit._ops" not in FILES:
    sys.exit(f"{os.environ['LOWBIT_SANITIZED']} has no _ops.so")


class Sanitized:
    """A finder that knows these modules alone."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        path = FILES.get(name)
        return importlib.util.spec_from_file_location(name, path) if path else None


sys.meta_path.insert(0, Sanitized())  # type: ignore[arg-type]
