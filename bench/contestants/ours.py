"""lowbit's own contestants."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import torch

import lowbit
from bench.contestants.contestant import Contestant, InGraph
from lowbit import ops


class Lowbit(Contestant):
    options: ClassVar[dict[str, Any]] = {}
    rule: ClassVar[str] = "AdamW"

    def optimizer(self, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return getattr(lowbit, self.rule)(params, **self.options)


class Eight(Lowbit):
    name = "lowbit 8-bit, bf16 stochastic"


class EightInGraph(InGraph, Eight):
    name = "lowbit 8-bit, bf16 stochastic, in a CUDA graph"


class EightFloat32(Lowbit):
    name = "lowbit 8-bit, float32 weights"
    dtype = torch.float32


class Four(Lowbit):
    name = "lowbit 4-bit, bf16 stochastic"
    options: ClassVar = {"state_format": "4bit"}


class Wide(Lowbit):
    name = "lowbit float32 state, bf16 stochastic"
    options: ClassVar = {"state_format": "float32"}


class Floats(Lowbit):
    name = "lowbit fp8, bf16 stochastic"
    options: ClassVar = {"state_format": "fp8"}


class Kahan(Lowbit):
    name = "lowbit 8-bit, bf16 Kahan"
    options: ClassVar = {"param_format": "bfloat16_kahan"}


class Split(Lowbit):
    name = "lowbit 8-bit, bf16 + 8 bits"
    options: ClassVar = {"param_format": "bfloat16_split8"}


class Logarithmic(Lowbit):
    name = "lowbit log8, bf16 stochastic"
    options: ClassVar = {"state_format": "log8"}


class Companded(Lowbit):
    name = "lowbit companded8, bf16 stochastic"
    options: ClassVar = {"state_format": "companded8"}


class FactoredAdamW(Lowbit):
    name = "lowbit factored8, bf16 stochastic"
    options: ClassVar = {"state_format": "factored8"}


class Factored(Lowbit):
    name = "lowbit Adafactor, bf16 stochastic"
    rule = "Adafactor"


class Came(Lowbit):
    name = "lowbit CAME, bf16 stochastic"
    rule = "CAME"


class General(Lowbit):
    """As many bytes as Eight, in the general kernel,
    which serves combinations without a kernel of their own.
    """

    name = "lowbit linear8, bf16 stochastic"
    devices = ("cuda",)
    options: ClassVar = {"state_format": "linear8"}


class Pinned(Eight):
    """Codes in host memory, stepped over the bus."""

    name = "lowbit 8-bit, pinned state"
    devices = ("cuda",)
    options: ClassVar = {"state_memory": "pinned"}


class Managed(Eight):
    """Codes in managed pages, which stay on the GPU while it has room."""

    name = "lowbit 8-bit, managed state"
    devices = ("cuda",)
    options: ClassVar = {"state_memory": "managed"}


class Avx2(Lowbit):
    """A contestant on AVX2, where the processor has more."""

    devices = ("cpu",)

    def missing(self, device: str) -> str | None:
        if (reason := super().missing(device)) is None and "avx2" not in ops.catalog()["isas"]:
            reason = "this processor has no AVX2"
        return reason

    def running(self) -> AbstractContextManager[None]:
        return forced("avx2")


class EightAvx2(Avx2, Eight):
    name = "lowbit 8-bit, AVX2 forced"


class FourAvx2(Avx2, Four):
    name = "lowbit 4-bit, AVX2 forced"


class FactoredAvx2(Avx2, Factored):
    name = "lowbit Adafactor, AVX2 forced"


@contextmanager
def forced(isa: str) -> Iterator[None]:
    """Forces an instruction set, like LOWBIT_ISA, so that contestants on two instruction sets can
    alternate in one process.
    """
    before = lowbit.catalog()["isa"]
    ops.set_isa(isa)
    try:
        yield
    finally:
        ops.set_isa(before)
