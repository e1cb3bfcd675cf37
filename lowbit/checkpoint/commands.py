"""Checkpoints looked into, checked, converted and resharded: what `lowbit-ckpt` does, with the same options and the same reports.

Nothing in a file is ever executed, and nothing of a tensor's size is held in memory. The work runs without the GIL; Ctrl-C and an exception of the
progress callback stop it, and nothing is left behind.
"""

from __future__ import annotations

import json
import operator
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from lowbit.checkpoint.errors import CheckpointError
from lowbit.checkpoint.object_store import StorageOptions, is_url, opened
from lowbit.checkpoint.paths import Path, bytes_of
from lowbit.checkpoint.progress import Progress, Shown
from lowbit.checkpoint.reader import module
from lowbit.checkpoint.upload import is_folder, written


def inspect(
    path: Path, *, include: Sequence[str] = (), exclude: Sequence[str] = (), health: bool = False,
    digest: bool = False, progress: Progress | bool | None = None, storage_options: StorageOptions = None,
) -> dict[str, Any]:  # fmt: skip
    """What is in a checkpoint: the report of `lowbit-ckpt inspect --json`.

    Args:
        path: a folder of `torch.distributed.checkpoint`, a file of `torch.save` or one of safetensors; a path, or a URL of an object store that
            fsspec knows, such as "s3://bucket/run/step-1000" (docs/object-stores.md).
        include, exclude: globs on flat names such as "optim.state.*.exp_avg"; without `include` everything counts.
        health: read everything, for the range of scales, shares of zero and saturated codes, and NaN.
        digest: read everything, for a digest of all tensors that does not depend on how they are sharded.
        progress: called with bytes done and bytes in all, at most ten times a second, in this thread; False, and an exception, stop the work.
            True: a bar on standard error (with tqdm, where that is a terminal).
        storage_options: what fsspec opens URLs with, such as `{"endpoint_url": "http://127.0.0.1:9000"}`; all URLs of the call.

    Raises:
        CheckpointError: the checkpoint is not sound.
    """
    with Shown(progress, "inspect") as told:
        options = _options(include=_names(include), exclude=_names(exclude), health=bool(health), digest=bool(digest))  # fmt: skip
        with opened(storage_options, path) as (name,):
            text = module().inspect(name, options, told)
    return json.loads(text)


def verify(
    path: Path, *, include: Sequence[str] = (), exclude: Sequence[str] = (), finite: bool = True,
    opaque: bool = False, threads: int = 1, progress: Progress | bool | None = None, storage_options: StorageOptions = None,
) -> dict[str, Any]:  # fmt: skip
    """Whether a checkpoint is whole: structure, checksums, coverage, values.

    Args:
        finite: also look at values: NaN, infinity, second moments below 0.
        opaque: let values pass that are no plain data; torch would run what they name.
        threads: that read.
        path, include, exclude, progress, storage_options: as for `inspect`.

    Returns:
        The report of `lowbit-ckpt verify --json`. "ok" says whether the values are sound; "findings" name file, item and tensor of what is not.

    Raises:
        CheckpointError: the structure is not sound, or a checksum does not hold.
    """
    with Shown(progress, "verify") as told:
        options = _options(
            include=_names(include), exclude=_names(exclude), finite=bool(finite), opaque=bool(opaque), threads=threads,
        )  # fmt: skip
        with opened(storage_options, path) as (name,):
            text = module().verify(name, options, told)
    return json.loads(text)


def convert(
    source: Path, target: Path, *, to: str = "", container: str = "", state_format: str = "",
    block: int = 0, keep: bool = False, full_precision: Sequence[str] = (), weights: str = "", seed: int = 0,
    model: Path = "", from_dialect: str = "", optimizer: str = "", lossy: bool = False, include: Sequence[str] = (),
    exclude: Sequence[str] = (), dry_run: bool = False, world_size: int | None = None, mesh: Mapping[int, int] | None = None,
    part: tuple[int, int] | None = None, force: bool = False, manifest: bool = True, threads: int = 1, memory_limit: int = 64 << 20,
    progress: Progress | bool | None = None, storage_options: StorageOptions = None,
) -> dict[str, Any]:  # fmt: skip
    """Writes a checkpoint in the words of another optimizer.

    Args:
        to: the dialect: "torch", "lowbit", "bitsandbytes", ...; "" keeps the source's.
        container: "dcp", "torch", "safetensors", or "universal", which DeepSpeed resumes from; "" follows the target's name, else the source.
        state_format, block: how state is kept where the dialect has a choice: "8bit", "4bit", "float32", ...
        keep: refuse rather than requantize.
        full_precision: globs on names of parameters whose state stays float32.
        weights, seed: round float32 weights too, such as to "bfloat16_stochastic", with that seed.
        model: a checkpoint with the weights, where names or shapes are needed.
        optimizer: where the source has several, the path of the one to convert, such as "optimizers.0"; the others stay as they are.
        from_dialect: whose state the source is, where its names fit two; "" is the one that is surest.
        lossy: leave out what the target cannot keep, with a warning.
        world_size, mesh: of a directory; by default as many ranks as the source has.
        part: (i, n) writes part i of n of a directory, as for `reshard`. Errors of requantizing are those of what this part wrote.
        target, dry_run, force, manifest, threads, memory_limit: as for `reshard`.
        include, exclude, progress, storage_options: as for `inspect`.

    Returns:
        The report of `lowbit-ckpt convert --json`: for each state whether its bits stayed, else the errors of requantizing it.

    Raises:
        CheckpointError: the source is not sound, or the target cannot say what the source does.
    """
    if container == "universal" and is_url(target):
        said = (
            "a Universal Checkpoint is written to a local folder; copy that to the store afterwards"
        )
        raise CheckpointError(f"{os.fsdecode(target)}: {said}", code=2)
    _check_part(part, target)
    with (
        Shown(progress, "convert") as told,
        opened(storage_options, source, model) as (name, weights_of),
        written(
            storage_options,
            target,
            [source, model],
            folder=is_folder(target, container),
            force=force,
            dry_run=dry_run,
        ) as to_write,
    ):
        options = _options(
            to=to, container=container, state_format=state_format, block=block, keep=bool(keep), full_precision=_names(full_precision),
            weights=weights, seed=seed, optimizer=optimizer, lossy=bool(lossy), include=_names(include), exclude=_names(exclude), dry_run=bool(dry_run),
            **{"from": from_dialect}, **_writing(world_size, {} if world_size is None and mesh is None else mesh, part, force, manifest, threads, memory_limit),
            **to_write.options,
        )  # fmt: skip
        text = module().convert(name, to_write.path, weights_of, options, told)
    return to_write.report(text)


def reshard(
    source: Path, target: Path, *, world_size: int | None = None,
    mesh: Mapping[int, int] | None = None, requantize: bool = False, include: Sequence[str] = (),
    exclude: Sequence[str] = (), dry_run: bool = False, part: tuple[int, int] | None = None, force: bool = False,
    manifest: bool = True, threads: int = 1, memory_limit: int = 64 << 20, progress: Progress | bool | None = None,
    storage_options: StorageOptions = None,
) -> dict[str, Any]:  # fmt: skip
    """Writes a checkpoint for another number of ranks; values stay as they are.

    Args:
        target: the folder to write, or its URL; it appears whole or not at all. For a URL it is written to TMPDIR first.
        world_size: number of ranks, cut as FSDP2 cuts: `mesh={0: world_size}`.
        mesh: instead, parts along each tensor dimension, such as `{0: 4, 1: 2}` for FSDP over 4 and tensor parallelism over 2.
        requantize: make new codes where a cut falls inside a block of torchao's quantized state; otherwise that is an error.
        dry_run: only the plan.
        part: (i, n) writes part i of n, from 0. All n run in any order, on machines that share a file system, under torchrun
            `part=(rank, world_size)`; the last one publishes the target. A part that was killed is run again. Parts replace no target.
        force: replace the target where it exists.
        manifest: leave digests of what was written, for `verify`.
        threads, memory_limit: that read and write, and their buffers in bytes, all together.
        include, exclude, progress, storage_options: as for `inspect`.

    Returns:
        The report of `lowbit-ckpt reshard --json`; of a part also whether it "published" the target, and the parts that are "missing".

    Raises:
        CheckpointError: the source is not sound, or the target cannot be written.
    """
    if world_size is None and mesh is None:
        raise TypeError("reshard needs world_size= or mesh=")
    _check_part(part, target)
    with (
        Shown(progress, "reshard") as told,
        opened(storage_options, source) as (name,),
        written(
            storage_options, target, [source], folder=True, force=force, dry_run=dry_run
        ) as to_write,
    ):
        options = _options(
            include=_names(include), exclude=_names(exclude), dry_run=bool(dry_run), requantize=bool(requantize),
            **_writing(world_size, mesh, part, force, manifest, threads, memory_limit),
            **to_write.options,
        )  # fmt: skip
        text = module().reshard(name, to_write.path, options, told)
    return to_write.report(text)


def diff(
    a: Path, b: Path, *, bytes: bool = False, tolerance: float = 0.0, include: Sequence[str] = (),
    exclude: Sequence[str] = (), progress: Progress | bool | None = None, storage_options: StorageOptions = None,
) -> dict[str, Any]:  # fmt: skip
    """How two checkpoints differ.

    Args:
        bytes: compare what lies in the files; by default the dequantized values.
        tolerance: of a difference, relative to the 2-norm of the larger of two tensors.
        include, exclude, progress, storage_options: as for `inspect`.

    Returns:
        The report of `lowbit-ckpt diff --json`: "same", and the "differences" by name with the first element that differs.
    """
    with Shown(progress, "diff") as told:
        options = _options(
            include=_names(include), exclude=_names(exclude), bytes=bool(bytes), tolerance=min(float(tolerance), sys.float_info.max),
        )  # fmt: skip
        with opened(storage_options, a, b) as names:
            text = module().diff(*names, options, told)
    return json.loads(text)


def _options(**fields: Any) -> str:
    """The options of a command as JSON, which the C++ module reads. Its numbers are Python's: none infinite, whole ones as their `__index__` says."""
    return json.dumps(fields, ensure_ascii=False, allow_nan=False, default=operator.index)


def _names(names: Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _check_part(part: tuple[int, int] | None, target: Path) -> None:
    if part is not None and is_url(target):
        raise CheckpointError(
            f"{os.fsdecode(bytes_of(target))}: parts are written to a file system that the machines share; an object store has none", code=2
        )  # fmt: skip


def _part(part: tuple[int, int] | None) -> list[int]:
    if part is None:
        return []
    number, count = map(operator.index, part)
    if not 0 <= number < count:
        raise ValueError(f"part=(i, n) has i from 0 to n - 1, not {number} and {count}")
    return [number, count]


def _writing(
    world_size: int | None, mesh: Mapping[int, int] | None, part: tuple[int, int] | None, force: bool, manifest: bool, threads: int, memory_limit: int
) -> dict[str, Any]:  # fmt: skip
    if world_size is not None and mesh is not None:
        raise TypeError("give world_size= or mesh=, not both")
    parts = {0: 1 if world_size is None else world_size} if mesh is None else dict(mesh)
    if any(n < 1 for n in parts.values()) or any(d < 0 for d in parts):
        raise ValueError(f"a tensor is cut into one part or more along each dimension, not {parts}")
    return {
        "replace": bool(force), "manifest": bool(manifest), "threads": threads, "memory": memory_limit,
        "parts": list(parts.values()), "dims": list(parts), "part": _part(part),
    }  # fmt: skip
