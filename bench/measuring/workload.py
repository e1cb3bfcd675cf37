"""Workloads: the shapes of the parameters of a timed step."""

from __future__ import annotations

import math
from dataclasses import dataclass

Shapes = list[tuple[int, ...]]


class Workload:
    """A set of parameters. To add one, write a subclass or an instance and list it in WORKLOADS.

    Attributes:
        name: its name on pages.
        one_shape: whether all parameters have one shape.
    """

    name: str
    one_shape = True

    def shapes(self, limit: int) -> tuple[Shapes, str]:
        """Shapes of at most `limit` elements in total,
        and a note about what was reduced (empty: nothing).
        """
        raise NotImplementedError


@dataclass
class Equal(Workload):
    """`count` matrices of `numel` elements each, a power of two. Above the limit they shrink to at
    least 4,096 elements; then there are fewer.
    """

    name: str
    count: int
    numel: int

    def shapes(self, limit: int) -> tuple[Shapes, str]:
        count, numel = self.count, self.numel
        while count * numel > limit and numel > 4096:
            numel //= 2
        while count * numel > limit and count > 1:
            count //= 2
        rows = 1 << (numel.bit_length() - 1) // 2
        changed = (count, numel) != (self.count, self.numel)
        return [(rows, numel // rows)] * count, f"{count:,} of {numel:,} elements here" * changed


@dataclass
class Transformer(Workload):
    """Embeddings with the last norm, and layers. Above the limit it has fewer layers, then no
    embeddings, then matrices with fewer rows.
    """

    name: str
    embeddings: Shapes
    layer: Shapes
    layers: int
    one_shape = False

    def shapes(self, limit: int) -> tuple[Shapes, str]:
        embeddings, layer, layers, cut = self.embeddings, self.layer, self.layers, 1
        while numel(embeddings) + layers * numel(layer) > limit and layers > 1:
            layers -= 1
        if numel(embeddings) + layers * numel(layer) > limit:
            embeddings = []
            while layers < self.layers and (layers + 1) * numel(layer) <= limit:
                layers += 1
        while layers * numel([shorter(s, cut) for s in layer]) > limit and cut < max(layer)[0]:
            cut *= 2
        layer = [shorter(s, cut) for s in layer]
        while numel(layer) > limit:  # even one row of each is too much
            layer = layer[:-1]
        notes = []
        if layers < self.layers:
            notes.append(f"{layers} of {self.layers} layers")
        if embeddings != self.embeddings:
            notes.append("no embeddings")
        if cut > 1:
            notes.append(f"1/{cut} of the rows")
        return [*embeddings, *layer * layers], ", ".join(notes)


def shorter(shape: tuple[int, ...], cut: int) -> tuple[int, ...]:
    return (max(1, shape[0] // cut), *shape[1:])


def numel(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes)


# The numbers of GPT-2 and Llama (their config.json): widths, key and value heads, vocabulary rows.
GPT2 = Transformer(
    "GPT-2", [(50257, 768), (1024, 768), (768,), (768,)],
    [(768,), (768,), (768, 2304), (2304,), (768, 768), (768,), (768,), (768,), (768, 3072), (3072,),
     (3072, 768), (768,)],
    12,
)  # fmt: skip
LLAMA_1B = Transformer(
    "Llama-3.2-1B", [(128256, 2048), (2048,)],
    [(2048, 2048), (512, 2048), (512, 2048), (2048, 2048), (8192, 2048), (8192, 2048), (2048, 8192),
     (2048,), (2048,)],
    16,
)  # fmt: skip
LLAMA_8B = Transformer(
    "one layer of Llama-3.1-8B", [],
    [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096),
     (4096, 14336), (4096,), (4096,)],
    1,
)  # fmt: skip
ONE, THOUSAND, MANY = (
    Equal("one tensor", 1, 1 << 26),
    Equal("1,000 tensors of 64 k", 1000, 1 << 16),
    Equal("2,000 tensors of 16 k", 2000, 1 << 14),
)
WORKLOADS: tuple[Workload, ...] = (ONE, THOUSAND, MANY, GPT2, LLAMA_1B, LLAMA_8B)
QUARTER = Equal("one tensor of 256 M", 1, 1 << 28)  # on a GPU
