"""Counts bench/results/memory.json: what whole models keep in memory under each library's AdamW,
by `lowbit.estimate`.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

RESULTS = pathlib.Path(__file__).resolve().parents[2] / "bench" / "results" / "memory.json"
# Configurations of transformers, as their authors published them.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2, 0.12 B": ("GPT2Config", {}),
    "Llama 3.2, 1 B": (
        "LlamaConfig",
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
        },
    ),
    "Llama 3.1, 8 B": (
        "LlamaConfig",
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
    ),
    "Llama 3.1, 70 B": (
        "LlamaConfig",
        {
            "vocab_size": 128256,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
        },
    ),
}


def count(names: list[str] | None = None) -> dict[str, dict[str, dict[str, int]]]:
    """Bytes of weights, gradients and state by model and row."""
    import torch
    import transformers

    import lowbit

    counted = {}
    for name in names or MODELS:
        kind, settings = MODELS[name]
        config = getattr(transformers, kind)(**settings)
        rows = {}
        for title, options in (
            ("lowbit AdamW, 8bit", {}),
            ("lowbit AdamW, 4bit", {"state_format": "4bit"}),
        ):
            result = lowbit.estimate(config, dtype=torch.bfloat16, **options)
            rows[title] = {part: number[0] for part, number in result["lowbit"].parts.items()}
        for each in list(result.footprints.values())[1:]:
            rows[each.title] = {part: number[0] for part, number in each.parts.items()}
        counted[name] = {"parameters": result.parameters, "rows": rows}
    return counted


def record() -> None:
    RESULTS.write_text(json.dumps(count(), indent=1) + "\n")
