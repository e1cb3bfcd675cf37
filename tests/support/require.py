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


def gpu(covered: str = "", *, stand_in: bool = True) -> str:
    """The device of a module's tests: a GPU, or in a rehearsal (LOWBIT_STAND_IN=cpu) the CPU.

    Without a GPU the module is skipped, and `covered` says what covers it.
    """
    import torch

    device = os.environ.get("LOWBIT_STAND_IN", "cuda") if stand_in else "cuda"
    hint = f"no GPU here (torch.cuda.is_available() is False){covered}"
    need("cuda", device == "cpu" or torch.cuda.is_available(), hint, module=True)
    return device
