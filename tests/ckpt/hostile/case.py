"""What a hostile input is: a function that writes it,
and what the checkpoint tool must say of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

BAD, VALUES, FINE = 3, 4, 0
"""Exit codes of `verify`: damaged or unsafe; sound bytes with senseless values; nothing wrong."""

PROOF = "hostile-executed"
"""The file that appears in the working directory of whoever executes what an input carries."""

Make = Callable[[Path], Path]


@dataclass(frozen=True)
class Case:
    """One input."""

    name: str
    """`<group>.<what>`; also the folder that holds it in a corpus."""
    make: Make
    """Writes it into an empty folder and returns the path to hand to the tool."""
    codes: frozenset[int]
    """Exit codes that `verify` may give: one of them,
    or two where the limit is the reader's choice.
    """
    convert: frozenset[int] | None
    """The same of `convert --to torch`. None: any, since the input holds no optimizer state or the
    target cannot express it.
    """
    mentions: re.Pattern[str]
    """What the error (or, where the code is 0, the warning) must mention.
    Errors of cases with code 0 are free.
    """
    warns: bool
    """Whether a line `warning: ...` is demanded where the code is 0."""
    torch: bool | None
    """Whether torch.load(weights_only=True), dcp.load or safetensors accept it; None: not asked,
    since it would hurt or does not matter.
    """
    about: str = field(compare=False)

    def __str__(self) -> str:
        return self.name


CASES: dict[str, Case] = {}
# What says enough of any input: the words of the checks that come first.
ALSO = (
    "neither a file|too many elements|6[34] bits|negated view|not a plain value|local header|byte "
    "order|of a file of|neither text"
)


def add(
    name: str,
    make: Make,
    code: int | tuple[int, ...],
    mentions: str = "",
    *,
    torch: bool | None = None,
    convert: tuple[int, ...] | None = (-1,),
    warns: bool = False,
    about: str = "",
) -> None:
    """Registers a case. `convert` is what verify gives unless said otherwise;
    senseless values may be converted.
    """
    if name in CASES:
        raise ValueError(f"two cases are called {name}")
    codes = frozenset((code,) if isinstance(code, int) else code)
    if convert == (-1,):
        convert = (VALUES, FINE) if VALUES in codes else tuple(codes)
    pattern = re.compile(f"{mentions}|{ALSO}" if mentions else "", re.IGNORECASE)
    CASES[name] = Case(
        name=name,
        make=make,
        codes=codes,
        convert=None if convert is None else frozenset(convert),
        mentions=pattern,
        warns=warns,
        torch=torch,
        about=about,
    )


def case(
    name: str, code: int | tuple[int, ...], mentions: str = "", **more
) -> Callable[[Make], Make]:
    """`add` as a decorator; what the input is stands in the function's doc comment."""

    def register(make: Make) -> Make:
        add(name, make, code, mentions, about=" ".join((make.__doc__ or "").split()), **more)
        return make

    return register
