"""`python -m lowbit`: what lowbit says about a model from a terminal."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Container, Sequence
from typing import Any

import torch

import lowbit
from lowbit.environment import described, environment
from lowbit.optim.ema import FORMATS

DTYPES = ("float32", "bfloat16", "float16")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code: 0, or 2 where the arguments do not fit."""
    given = _parser().parse_args(arguments)
    if given.command == "env":
        found = environment()
        sys.stdout.write((json.dumps(found, indent=2) if given.json else described(found)) + "\n")
        return 0
    try:
        result = lowbit.estimate(
            given.model,
            given.optimizer,
            ranks=given.ranks,
            dtype=given.dtype and getattr(torch, given.dtype),
            ema=given.ema,
            device_memory=given.device_memory,
            step_in_backward=given.step_in_backward,
            waiting=given.waiting,
            micro_batch=given.micro_batch,
            context=given.context,
            checkpointing=given.checkpointing,
            loss_chunk=given.loss_chunk,
            **_options(given),
        )
    except (TypeError, ValueError, RuntimeError, OSError, ImportError) as error:
        sys.stderr.write(f"lowbit estimate: {_typed(error, vars(given))}\n")
        return 2
    text = json.dumps(result.as_dict(), indent=2) if given.json else str(result)
    sys.stdout.write(text + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m lowbit", description="Low-bit optimizers for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"lowbit {lowbit.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    _add_estimate(commands)
    _add_env(commands)
    return parser


def _add_estimate(commands: Any) -> None:
    estimate = commands.add_parser(
        "estimate",
        help="bytes of weights, gradients, state and checkpoint before training",
        description=(
            "Bytes of weights, gradients, optimizer state and checkpoint before training, under "
            "lowbit and other libraries. Allocates nothing, downloads nothing, and executes no "
            "code of the model's folder."
        ),
    )
    add = estimate.add_argument
    add("model", metavar="MODEL", help="a folder of transformers, or its config.json")
    add("--optimizer", default="AdamW", metavar="NAME", help="a class of lowbit (AdamW)")
    add("--ranks", type=int, default=1, metavar="N", help="ranks of fully_shard (1)")
    add("--dtype", choices=DTYPES, help="dtype of the weights (the configuration's)")
    add("--state-format", metavar="FORMAT", help="the optimizer's state_format (8bit)")
    add("--param-format", metavar="FORMAT", help="the optimizer's param_format (auto)")
    add(
        "--full-precision",
        action="append",
        metavar="PATTERN",
        help="parameters of these names keep float32 state; repeatable (none)",
    )
    add("--embeddings", metavar="FORMAT", help="the state_format of embeddings (--state-format)")
    add("--heads", metavar="FORMAT", help="the state_format of output heads (--state-format)")
    add(
        "--ema",
        choices=tuple(FORMATS),
        default=False,
        help="count the averages of lowbit.EMA in this format",
    )
    add(
        "--device-memory",
        metavar="SIZE",
        help="memory of one card, such as 24GiB: does the run fit?",
    )
    add("--context", type=int, metavar="N", help="tokens of a sequence")
    add("--micro-batch", type=int, default=1, metavar="N", help="sequences of a forward pass (1)")
    add("--checkpointing", action="store_true", help="layers are recomputed in the backward pass")
    add("--loss-chunk", type=int, metavar="N", help="positions whose logits exist at once (all)")
    add("--step-in-backward", action="store_true", help="gradients are freed as they are used")
    add(
        "--waiting",
        metavar="SIZE",
        help="bytes of gradients that may wait for their steps (none)",
    )
    add("--state-memory", metavar="MEMORY", help="the optimizer's state_memory (device)")
    add(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        type=_option,
        help="another argument of the optimizer, such as rank=128 or momentum=0.9; repeatable",
    )
    add("--json", action="store_true", help="numbers of bytes as JSON")


def _add_env(commands: Any) -> None:
    env = commands.add_parser(
        "env",
        help="versions, processor, GPUs and kernels, for a bug report",
        description=(
            "Versions, processor, GPUs and the kernels that serve them, for a bug report. "
            "Starts no kernel."
        ),
    )
    env.add_argument("--json", action="store_true", help="the same as JSON")


def _typed(error: Exception, options: Container[str]) -> str:
    """An error of `lowbit.estimate` in one line, with options as they are typed in a terminal."""

    def option(found: re.Match[str]) -> str:
        return f"--{found[1].replace('_', '-')}" if found[1] in options else found[0]

    return re.sub(r"\b([a-z_]+)=(?=[\s,:.]|$)", option, " ".join(str(error).split()))


def _option(text: str) -> tuple[str, Any]:
    """A name and its value, which is JSON or else text."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _options(given: argparse.Namespace) -> dict[str, Any]:
    names = (
        "state_format",
        "param_format",
        "state_memory",
        "full_precision",
        "embeddings",
        "heads",
    )
    own = {name: getattr(given, name) for name in names}
    if own["full_precision"] is not None:
        own["full_precision"] = [pattern for pattern in own["full_precision"] if pattern]
    return {**dict(given.option), **{k: v for k, v in own.items() if v is not None}}


if __name__ == "__main__":
    sys.exit(main())
