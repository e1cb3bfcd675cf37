"""Things that a machine may lack."""

import os

import pytest


def need(thing: str, present: bool, hint: str, *, module: bool = False) -> None:
    """Skips where `thing` is missing, and says so; fails instead where LOWBIT_REQUIRE names it
    (LOWBIT_REQUIRE=cuda,ckpt).
    """
    if present:
        return
    if thing in os.environ.get("LOWBIT_REQUIRE", "").split(","):
        pytest.fail(f"LOWBIT_REQUIRE names {thing!r}, but {hint}", pytrace=False)
    pytest.skip(hint, allow_module_level=module)


def cuda_or_stand_in() -> str:
    """The device of CUDA tests: a GPU, or in a rehearsal (LOWBIT_STAND_IN=cpu) the CPU."""
    return os.environ.get("LOWBIT_STAND_IN", "cuda")
