"""lpmm's YAML configurations as `state_format`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lowbit import ops
from lowbit.config.presets import scaled

# lpmm's values for keys that a file leaves out;
# those of SCALE_TYPE and QUANT_TYPE stand under DEFAULT.
_COMMON = {
    "ENABLE": True,
    "THRESHOLD": 4096,
    "BITS": 4,
    "GROUP_SIZE": 128,
    "SCALE_TYPE": "group",
    "ROUND_TYPE": "real-nearest",
}
_DEFAULTS = {
    "M": {**_COMMON, "QUANT_TYPE": "nonlinear", "SIGNED": True},
    "SQM": {**_COMMON, "QUANT_TYPE": "power-1", "SIGNED": False},
}
_SCALES = {"group": "block", "tensor": "tensor", "dim0": "row", "dim1": "column", "rank1": "rank1"}
_MAPS = {
    "nonlinear": "dynamic{}",
    "linear": "linear{}",
    "power-1": "power1_{}",
    "power-2": "power2_{}",
}
_ROUNDINGS = {
    "real-nearest": "nearest",
    "nearest": "nearest",
    "real-sr": "stochastic",
    "sr": "stochastic",
}
_UNUSED = ("EXCLUDE_SUFFIX", "EXCLUDE_REGEX")  # lpmm reads and ignores them


def qconfig(
    config: str | os.PathLike[str] | Mapping[str, Any],
    *,
    first: str | None = "exp_avg",
    second: str | None = "exp_avg_sq",
) -> dict[str, dict[str, Any]]:
    """`state_format` from an lpmm configuration: `lowbit.AdamW(params,
    state_format=lowbit.qconfig("default.yml"))`.

    Three things differ from lpmm. Blocks begin at each row, in lpmm at the tensor. Vectors, and
    rows shorter than 16, stay in full precision. For a tensor of more than two dimensions, dim1 has
    one scale for each element of a row.

    Args:
        config: a YAML file as lpmm ships them, or its content. It has sections M and SQM under
            QUANT; BASE names files to start from.
        first: the state that M configures, "exp_avg" by default and "momentum_buffer" for SGD;
            None leaves it out.
        second: the state that SQM configures, "exp_avg_sq" by default; None leaves it out.

    Returns:
        A `scaled(...)` for each state. Its `min_numel` is THRESHOLD plus one, because lpmm
        quantizes above THRESHOLD.

    Raises:
        ValueError: a key or value that has no equivalent here, or a section that has no settings;
            the message names both. Or `BASE` is circular.
    """
    merged: dict[str, dict[str, Any]] = {name: dict(keys) for name, keys in _DEFAULTS.items()}
    _merge(merged, config)
    made = {}
    for section, name in (("M", first), ("SQM", second)):
        if name is not None:
            made[name] = _spec(section, merged[section])
    return made


def _merge(
    merged: dict[str, dict[str, Any]],
    config: str | os.PathLike[str] | Mapping[str, Any],
    above: tuple[str, ...] = (),
) -> None:
    """Applies a configuration over `merged`, after the files of its BASE.

    Args:
        above: the files that start from this one.
    """
    base = ""
    if not isinstance(config, Mapping):
        import yaml  # type: ignore[import-untyped]

        path = os.fspath(config)
        if os.path.realpath(path) in above:
            raise ValueError(
                f"BASE is circular: {above[-1]!r} names {path!r}, which is built on it"
            )
        above = (*above, os.path.realpath(path))
        base = os.path.dirname(path)
        with open(path, encoding="utf-8") as file:
            config = yaml.safe_load(file) or {}
        if not isinstance(config, Mapping):
            raise ValueError(f"the configuration must be a mapping, not {config!r}")
    for path in _bases(config):
        _merge(merged, os.path.join(base, path), above)
    quant = _settings("QUANT", config.get("QUANT", config), "M and SQM to their settings")
    for section, keys in quant.items():
        if section == "BASE":
            continue
        if section not in (*merged, "P", "G"):
            raise ValueError(
                f"{section!r} is not a section that lowbit uses; sections are {', '.join(merged)}"
            )
        keys = _settings(section, keys, "names of settings to values")
        if section not in merged:
            if keys.get("ENABLE"):
                raise ValueError(
                    f"{section}.ENABLE is {keys['ENABLE']!r}: only optimizer state is quantized "
                    "here"
                )
            continue
        for key, value in keys.items():
            if key in ("SCALE_TYPE", "QUANT_TYPE") and isinstance(value, Mapping):
                if value.get("DEFAULT_ONLY", True) is not True:
                    raise ValueError(
                        f"{section}.{key}.DEFAULT_ONLY is {value['DEFAULT_ONLY']!r}; only one type "
                        "for all parameters can be expressed"
                    )
                value = value.get("DEFAULT", merged[section][key])
            if key not in merged[section] and key not in _UNUSED:
                raise ValueError(f"{section}.{key} is {value!r}, but lowbit has no such setting")
            merged[section][key] = value


def _settings(name: str, given: Any, what: str) -> Mapping[str, Any]:
    """The settings of a section. Raises ValueError if it is not a mapping, as an empty one in YAML
    is not.
    """
    if isinstance(given, Mapping):
        return given
    raise ValueError(f"{name} is {given!r}; it must map {what}, or be left out for lpmm's own")


def _bases(config: Mapping[str, Any]) -> list[str]:
    """The files that a configuration starts from; "" names none, as lpmm has it."""
    given = config.get("BASE")
    if given is None:
        return []
    if not isinstance(given, (list, tuple)) or not all(isinstance(path, str) for path in given):
        raise ValueError(f"BASE is {given!r}; it must be a list of files")
    return [path for path in given if path]


def _spec(section: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    """The `scaled(...)` of one section."""

    def one_of(key: str, known: Mapping[str, str]) -> str:
        if not isinstance(keys[key], str) or keys[key] not in known:
            raise ValueError(
                f"{section}.{key} is {keys[key]!r}, which cannot be expressed; known are "
                f"{', '.join(known)}"
            )
        return known[keys[key]]

    if keys["ENABLE"] is False:
        return scaled("float32")
    for key in ("ENABLE", "SIGNED"):
        if not isinstance(keys[key], bool):
            raise ValueError(f"{section}.{key} is {keys[key]!r}, not true or false")
    format = one_of("QUANT_TYPE", _MAPS).format(keys["BITS"])
    format += "" if keys["SIGNED"] else "_unsigned"
    if isinstance(keys["BITS"], bool) or format not in ops.names("state"):
        raise ValueError(
            f"{section}.BITS is {keys['BITS']!r}, for which there is no {keys['QUANT_TYPE']} map"
        )
    scale, rounding = one_of("SCALE_TYPE", _SCALES), one_of("ROUND_TYPE", _ROUNDINGS)
    if section == "M" and not keys["SIGNED"]:
        raise ValueError("M.SIGNED is False, but a first moment has negative values")
    threshold = keys["THRESHOLD"]
    number = isinstance(threshold, int) and not isinstance(threshold, bool)
    if threshold is not None and not (number and threshold >= 0):
        raise ValueError(f"{section}.THRESHOLD is {threshold!r}, not a number of elements")
    try:
        return scaled(
            format,
            scale=scale,
            block=keys["GROUP_SIZE"] if scale == "block" else None,
            rounding=rounding,
            min_numel=0 if threshold is None else threshold + 1,
        )
    except ValueError as error:
        raise ValueError(f"{section}.GROUP_SIZE is {keys['GROUP_SIZE']!r}: {error}") from None
