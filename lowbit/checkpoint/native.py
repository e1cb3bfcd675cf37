"""The C++ behind lowbit.checkpoint."""

from __future__ import annotations

from typing import Any

try:
    from lowbit import _checkpoint  # type: ignore[attr-defined]
except ImportError as error:  # built without it
    _missing: str | None = str(error)
    _checkpoint = None
else:
    _missing = None


def native() -> Any:
    """The C++ module; ImportError where lowbit was built without it."""
    if _checkpoint is None:
        raise ImportError(
            f"lowbit was built without its checkpoint module ({_missing}). Install its libraries, "
            "and build again: sudo apt-get install libcli11-dev nlohmann-json3-dev libfmt-dev "
            "libdeflate-dev libxxhash-dev libzstd-dev && pip install --no-build-isolation "
            "--force-reinstall --no-deps ."
        )
    return _checkpoint
