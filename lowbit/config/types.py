"""The types of options, so that a type checker finds an unknown name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

# The presets, then the formats of `lowbit.catalog()["state"]` that are not presets.
StateFormatName: TypeAlias = Literal[
    "8bit", "7bit", "6bit", "5bit", "4bit", "3bit", "2bit", "fp8", "fp8_e5m2", "log8", "linear8",
    "uniform8", "companded8", "muon4", "lpmm4", "factored8", "factored4", "bfloat16",
    "bfloat16_stochastic", "float32", "factored",
    "dynamic8", "dynamic7", "dynamic6", "dynamic5", "dynamic4", "dynamic3", "dynamic2",
    "dynamic8_unsigned", "dynamic7_unsigned", "dynamic6_unsigned", "dynamic5_unsigned",
    "dynamic4_unsigned", "dynamic3_unsigned", "dynamic2_unsigned",
    "linear7", "linear6", "linear5", "linear4", "linear3", "linear2",
    "linear8_unsigned", "linear7_unsigned", "linear6_unsigned", "linear5_unsigned",
    "linear4_unsigned", "linear3_unsigned", "linear2_unsigned",
    "power1_8", "power1_7", "power1_6", "power1_5", "power1_4", "power1_3", "power1_2",
    "power1_8_unsigned", "power1_7_unsigned", "power1_6_unsigned", "power1_5_unsigned",
    "power1_4_unsigned", "power1_3_unsigned", "power1_2_unsigned",
    "power2_8", "power2_7", "power2_6", "power2_5", "power2_4", "power2_3", "power2_2",
    "power2_8_unsigned", "power2_7_unsigned", "power2_6_unsigned", "power2_5_unsigned",
    "power2_4_unsigned", "power2_3_unsigned", "power2_2_unsigned",
    "float8_e4m3", "float8_e4m3_unsigned", "float8_e5m2", "float8_e5m2_unsigned",
    "log8_fixed", "log16", "log8_signed", "companded8_unsigned",
]  # fmt: skip

# One name for all states; or a `lowbit.scaled(...)`; or one of these for each state's name.
StateFormat: TypeAlias = StateFormatName | Mapping[str, Any]

# "auto" and "nearest" follow the parameter's dtype; the others are those of
# `lowbit.catalog()["param"]`.
ParamFormat: TypeAlias = Literal[
    "auto", "nearest", "float32", "bfloat16", "bfloat16_stochastic", "bfloat16_kahan",
    "bfloat16_split8", "bfloat16_split8_stochastic", "bfloat16_split16", "float16",
    "float16_stochastic", "float16_kahan", "float16_split8", "float16_split16",
]  # fmt: skip

StateMemory: TypeAlias = Literal["device", "pinned", "managed"]
