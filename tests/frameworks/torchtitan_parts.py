"""Data for torchtitan's Trainer, by its own plug-in classes: batches drawn from the step's number,
so that neither files nor a tokenizer are needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer

VOCABULARY = 2048


class Words(BaseTokenizer):
    """A tokenizer that nobody asks."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *_: Any, **__: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return VOCABULARY


class Batches(BaseDataLoader):
    """Counts upwards from drawn tokens, which a model learns in some steps. The place is saved, as
    torchtitan's own loaders do.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **_: Any,
    ) -> None:
        self.ranks, self.rank = dp_world_size, dp_rank
        self.sizes, self.given = (local_batch_size, seq_len), 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            generator = torch.Generator().manual_seed(1000 * self.given + self.rank)
            self.given += 1
            size, length = self.sizes
            first = torch.randint(VOCABULARY, (size, 1), generator=generator)
            tokens = (first + torch.arange(length + 1)) % VOCABULARY
            positions = torch.arange(length).expand(size, length)
            yield {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given, "ranks": self.ranks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """On another number of ranks, where another part of the batch is theirs, the count
        continues by the tokens that were seen.
        """
        self.given = state["given"] * state["ranks"] // self.ranks
