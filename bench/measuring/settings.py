"""The extent of a run: sizes, rounds and time limits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.measuring.workload import (
    GPT2,
    LLAMA_1B,
    LLAMA_8B,
    MANY,
    ONE,
    QUARTER,
    THOUSAND,
    Workload,
)


@dataclass(frozen=True)
class Settings:
    """
    Attributes:
        name: tiny, quick or full.
        device: cpu or cuda.
        threads: thread counts of the step section.
        workloads: workloads of the step section.
        limit: maximum number of elements of a workload; free memory may lower it.
        rounds: number of turns of each contestant.
        budget: seconds after which a contestant is skipped in later rounds.
        patience: maximum seconds per step. Contestants that exceed it, judged by a small tensor,
            are skipped, and the page lists them.
        largest: log2 of the largest tensor in the growth section.
        model: width, depth, batch size and steps of the training section.
        trained: names from bench/speed/training.py.
        gib: GiB of float32 state in the checkpoint section.
        compile: whether to include contestants that compile for each shape,
            half a minute per shape.
    """

    name: str
    device: str = "cpu"
    threads: tuple[int, ...] = (1, 2)
    workloads: tuple[Workload, ...] = (ONE, THOUSAND, MANY, GPT2, LLAMA_1B, LLAMA_8B)
    limit: int = 1 << 27
    rounds: int = 7
    budget: float = 8
    patience: float = 12
    largest: int = 28
    model: tuple[int, int, int, int] = (512, 6, 8, 7)
    trained: tuple[str, ...] = (
        "torch fused, float32",
        "torch fused, bf16 nearest",
        "lowbit 8-bit, bf16 stochastic",
        "lowbit 4-bit, bf16 stochastic",
        "lowbit 8-bit, step in backward",
        "lowbit Adafactor, bf16 stochastic",
        "no optimizer, float32",
        "no optimizer, bf16",
    )
    gib: float = 0.5
    compile: bool = True


FULL = Settings("full")
QUICK = Settings(
    "quick",
    trained=("torch fused, float32", "lowbit 8-bit, bf16 stochastic", "no optimizer, bf16"),
    workloads=(ONE, THOUSAND),
    limit=1 << 24,
    rounds=4,
    budget=1,
    patience=2,
    largest=24,
    model=(256, 4, 4, 4),
    gib=0.05,
)
TINY = Settings(
    "tiny",
    trained=("torch fused, float32", "lowbit 8-bit, bf16 stochastic"),
    threads=(1,),
    workloads=(ONE, THOUSAND, GPT2),
    limit=1 << 18,
    rounds=2,
    budget=0.2,
    patience=0.5,
    largest=14,
    model=(32, 1, 2, 2),
    gib=0.002,
    compile=False,
)
NAMED = {s.name: s for s in (FULL, QUICK, TINY)}


def chosen(name: str, device: str, threads: list[int] | None) -> Settings:
    """The settings of that name. On a GPU they use one thread,
    and the full ones other workloads.
    """
    settings = replace(NAMED[name], device=device)
    if device == "cuda":
        settings = replace(settings, threads=(1,))
        if name == "full":
            settings = replace(
                settings,
                # The required workloads come first, because a run may end early. Contestants with a
                # launch per tensor take half a second per step of MANY.
                workloads=(QUARTER, MANY, LLAMA_1B, GPT2),
                limit=5 << 28,
                rounds=15,
                budget=2.5,
            )
        elif name == "quick":
            settings = replace(settings, limit=1 << 28, rounds=11, largest=26)
    return replace(settings, threads=tuple(threads)) if threads else settings
