"""The table of docs/one-card.md, from `lowbit.estimate`: python docs/site/one_card.py"""

from __future__ import annotations

import pathlib

import torch
import transformers

import lowbit

PAGE = pathlib.Path(__file__).parents[1] / "one-card.md"
BEGIN, END = "<!-- table: python docs/site/one_card.py -->", "<!-- end of table -->"
CARDS = (12, 16, 24, 48, 80)
CONTEXT = 4096
# What estimate answers, by the letters of the page.
LETTERS = {
    "checkpointing": "C",
    "loss_chunk": "L",
    "step_in_backward": "G",
    "state_format": "4",
    "state_memory": "P",
}
_LLAMA = {"vocab_size": 128256, "num_key_value_heads": 8, "head_dim": 128}
# Shapes of the published configurations, by name.
MODELS = {
    "1 B (Llama 3.2)": transformers.LlamaConfig(
        **{**_LLAMA, "head_dim": 64},
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        tie_word_embeddings=True,
    ),
    "3 B (Llama 3.2)": transformers.LlamaConfig(
        **_LLAMA,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=24,
        tie_word_embeddings=True,
    ),
    "8 B (Llama 3.1)": transformers.LlamaConfig(
        **_LLAMA,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
    ),
    "14 B (Qwen3)": transformers.Qwen3Config(
        vocab_size=151936,
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=40,
        num_attention_heads=40,
        num_key_value_heads=8,
        head_dim=128,
    ),
}


def row(name: str) -> str:
    """One model: its size, and for each card the letters with which it fits."""
    cells = []
    for card in CARDS:
        said = lowbit.estimate(
            MODELS[name], dtype=torch.bfloat16, device_memory=f"{card}GiB", context=CONTEXT
        )
        changes = said.fit.changes
        letters = None if changes is None else " ".join(LETTERS[key] for key in changes)
        cells.append("no" if letters is None else letters or "as it is")
    whole = lowbit.estimate(
        MODELS[name],
        dtype=torch.bfloat16,
        context=CONTEXT,
        checkpointing=True,
        loss_chunk=512,
        step_in_backward=True,
        state_memory="pinned",
    ).fit.plans["lowbit"]
    sizes = [f"{size / 2**30:.1f} GiB" for size in (whole.peak, whole.host)]
    return "| " + " | ".join([name, *cells, *sizes]) + " |"


def table() -> str:
    cards = " | ".join(f"{card} GB" for card in CARDS)
    head = [
        f"| model | {cards} | peak with C L G P | host |",
        "|" + "---|" * (len(CARDS) + 3),
    ]
    return "\n".join([*head, *map(row, MODELS)])


if __name__ == "__main__":
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}")
