"""docs/loss/drift.md from the numbers of bench/quality/drift.py: what they say of each preset."""

from __future__ import annotations

from typing import Any

import lowbit
from bench.pages.page import bullets, filled, folded, table

STEPS = (1_000, 10_000, 100_000)
# The largest bias, over all steps, up to which a preset is recommended; and up to which it is
# tolerated: of the second moment's root where magnitudes are alike, and of the first moment where
# they are not.
RECOMMENDED, TOLERATED, TOLERATED_FIRST = 0.15, 0.3, 0.5
STATE = ("exp_avg_sq_alike", "exp_avg_sq", "exp_avg")

PICTURE = (
    "![How far the state of each preset drifts from float32's in 100,000 steps]"
    "(../pictures/drift.svg)"
)
VERDICTS = bullets(
    f"**Recommended**: all three are at most {100 * RECOMMENDED:.0f} %.",
    f"**Warned about**: like magnitudes are off by more than {100 * TOLERATED:.0f} %, or the first "
    f"moment by more than {100 * TOLERATED_FIRST:.0f} %.",
    "**Tolerated**: all else. Small values of a block lose part of their first moment, and take "
    "smaller steps than they should, because a second moment never becomes zero. Or all steps are "
    "smaller by a constant factor.",
)
CAUSES = "## What follows, by state\n\n" + bullets(
    "**`bfloat16` to the nearest** has a second moment that grows for as long as a run lasts. A "
    "step of beta2 0.999 is less than half a unit in the last place downwards, and is lost. "
    "`bfloat16_stochastic` takes the same bytes and does not drift.",
    "**`6bit`** settles high for the same reason: its steps of 1/64 swallow small changes, most of "
    "all downwards. With fewer bits the block's own maximum holds the values down.",
    "**`log8` and `log8_fixed`**, rounded to the nearest, settle beside the mean. "
    '`rounding="stochastic"` brings them back.',
    "**Factored moments** are float32 means, which do not drift. What they approximate is another "
    "matter.",
    "**AdEMAMix's slow mean** belongs in `bfloat16`, rounded stochastically, as presets keep it. "
    "[optimizers.md](../reference/optimizers.md#presets) says how to choose otherwise; every other "
    "format but float32 brings a warning.",
    "**Lion** should not be trained with two bits. Its update is a sign: with `2bit` more than a "
    "third of the signs are wrong, with `8bit` less than a hundredth.",
)
METHOD = "## Method\n\n" + "\n\n".join(
    filled(text)
    for text in (
        "**What runs.** State is stored in a format and stepped under stationary gradients, beside "
        "float32 state under the same ones. `python -m bench.quality.drift` simulates one tensor "
        "of 512 elements with the CPU's own step, continues where it stopped, and writes this "
        "page; `python docs/site/pictures.py` draws its picture. Formats with scales of rows and "
        "columns have one of 256 rows of 256: a row and a column of a few elements would fit each "
        "of them too well.",
        "**Gradients.** Element i's gradient is s (0.3 sign + z), with z normal and new in each "
        "step. Of *unlike* magnitudes log s has a standard deviation of 1, so a block of 256 "
        "covers some five binary orders each way. Of *like* ones s is the same everywhere.",
        "**Bias** of a mean is its part along the gradient's mean, relative to float32's. Of a "
        "second moment it is that of its root, by which a step is divided. Elements count alike, "
        "relative to s. Numbers are averages of 20 looks in the last tenth of the steps.",
        "**Error** of a mean is the root mean square of what differs, relative to float32's.",
    )
)
BOOK = "## The laboratory book\n\n" + filled(
    "Every format, rounded to the nearest and stochastically, after 1,000, 10,000 and 100,000 "
    "steps. A preset is a format for each state: [presets.md](../presets.md#all-presets)."
)
SERIES = {  # a title, what to know, the state's name in the results, and its columns
    "Second moment, like magnitudes": (
        "Of Adam's second moment, beta2 0.999: the bias of its root.",
        "exp_avg_sq_alike",
        ["bias"],
    ),
    "Second moment, unlike magnitudes": (
        "Of Adam's second moment, beta2 0.999: the bias of its root.",
        "exp_avg_sq",
        ["bias"],
    ),
    "First moment": ("Of Adam's first moment, beta1 0.9.", "exp_avg", ["bias", "error"]),
    "AdEMAMix's slow mean": (
        filled(
            "The decay is 0.9999. Where gradients have no mean, float32's own slow mean is only "
            "noise, and the error is 11 % of that after 6,000 steps."
        ),
        "exp_avg_slow",
        ["bias", "error"],
    ),
    "Lion": (
        filled(
            "Betas are 0.9 and 0.99. *Signs* is the share of updates with another sign than "
            "float32's. Half of them would be chance."
        ),
        "lion",
        ["error", "signs"],
    ),
}

Results = dict[str, dict[str, dict[str, dict[str, float]]]]


def label(spec: dict[str, Any]) -> str:
    """The name of a format in the results."""
    scale = spec.get("scale", "none")
    other = "" if scale in ("none", "block") else f" {scale}"
    return f"{spec['format']}{other} {spec.get('rounding', 'nearest')}"


def numbers(results: Results, state: str, name: str, what: str = "bias") -> list[float | None]:
    """A number of a format after each of STEPS; None where it was not measured.
    Float32 and its means have no drift.
    """
    if name.startswith(("float32", "factored")):
        return [0.0] * len(STEPS)
    saved = results.get(state, {})
    return [saved.get(str(n), {}).get(name, {}).get(what) for n in STEPS]


def worst(found: list[float | None]) -> float | None:
    measured = [abs(x) for x in found if x is not None]
    return max(measured) if measured else None


def of_preset(results: Results, preset: dict[str, Any]) -> list[float | None]:
    """The largest bias of the second moment's root, of like and unlike magnitudes,
    and of the first moment.
    """
    kinds = ("unsigned", "unsigned", "signed")
    return [
        worst(numbers(results, state, label(preset[kind])))
        for state, kind in zip(STATE, kinds, strict=True)
    ]


def verdict(found: list[float | None]) -> str:
    """What the page says of a preset with these biases."""
    if None in found:
        return "not measured yet"
    alike, unlike, first = (x or 0.0 for x in found)
    if alike > TOLERATED or first > TOLERATED_FIRST:
        return "warned about"
    return "recommended" if max(alike, unlike, first) <= RECOMMENDED else "tolerated"


def verdicts(results: Results) -> dict[str, str]:
    return {p["name"]: verdict(of_preset(results, p)) for p in lowbit.catalog()["presets"]}


def percent(x: float | None) -> str:
    if x is None:
        return ""
    return f"{100 * x:.1f} %" if abs(x) < 0.0995 else f"{100 * x:,.0f} %"


def series(results: Results, state: str, whats: list[str], title: str) -> str:
    """A table of every measured format of a state: a column for each number after each of STEPS."""
    names = sorted({name for each in results.get(state, {}).values() for name in each})
    head = [title] + [f"{what}, {n:,}" for what in whats for n in STEPS]
    rows = [
        [f"`{name.rpartition(' ')[0]}`, {name.rpartition(' ')[2]}"]
        + [percent(x) for what in whats for x in numbers(results, state, name, what)]
        for name in names
    ]
    return table(head, rows)


def opening(results: Results) -> str:
    """What follows from the verdicts."""
    names: dict[str, list[str]] = {}
    for name, said in verdicts(results).items():
        names.setdefault(said, []).append(f"`{name}`")
    said = (
        f"Take one of {', '.join(names['recommended'])}: after 100,000 simulated steps their state "
        f"is still within {percent(RECOMMENDED)} of float32's."
    )
    if worse := names.get("warned about"):
        said += f" Avoid {', '.join(worse)} under AdamW: their state drifts away."
    return filled(said)


def page(results: Results) -> str:
    presets = lowbit.catalog()["presets"]
    rows = []
    for preset in presets:
        found = of_preset(results, preset)
        rows.append([f"`{preset['name']}`", *map(percent, found), verdict(found)])
    parts = [
        "# Drift",
        PICTURE,
        opening(results),
        "Each mark is a state of a preset. A preset left of the dashed line is recommended.",
        "## Presets",
        filled(
            "The largest bias of stored state after 1,000, 10,000 and 100,000 steps. The first "
            "moment is one of unlike magnitudes. An empty cell is not measured yet."
        ),
        table(
            [
                "preset",
                "root of second moment, like magnitudes",
                "unlike magnitudes",
                "first moment",
                "verdict",
            ],
            rows,
        ),
        VERDICTS,
        "[quality.md](../quality.md) has the loss of some presets after a real run.",
        CAUSES,
        METHOD,
        BOOK,
        *(
            folded(f"{name}: every format", text, series(results, state, whats, "format"))
            for name, (text, state, whats) in SERIES.items()
        ),
    ]
    return "\n\n".join(parts) + "\n"
