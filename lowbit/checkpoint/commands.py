"""Inspects, verifies, converts, reshards and compares checkpoints, as `lowbit-ckpt` does,
and returns its reports.

Nothing in a file is ever executed, and nothing of a tensor's size is held in memory. The work runs
without the GIL. Ctrl-C and an exception of the progress callback stop it, and nothing is left
behind.
"""

from __future__ import annotations

import json
import operator
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from lowbit.checkpoint.errors import CheckpointError
from lowbit.checkpoint.native import native
from lowbit.checkpoint.object_store import StorageOptions, is_url, opened
from lowbit.checkpoint.paths import Path, bytes_of
from lowbit.checkpoint.progress import Progress, Shown
from lowbit.checkpoint.upload import is_folder, written


def inspect(
    path: Path,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    health: bool = False,
    digest: bool = False,
    progress: Progress | bool | None = None,
    storage_options: StorageOptions = None,
) -> dict[str, Any]:
    """Returns what a checkpoint contains.

    Args:
        path: a folder of `torch.distributed.checkpoint` or of DeepSpeed, or a file of `torch.save`
            or safetensors; a path, or a URL of an object store that fsspec knows, such as
            "s3://bucket/run/step-1000" (docs/definitions/object-stores.md).
        include: globs on flat names, such as "optim.state.*.exp_avg"; only names that match one
            count. Empty by default: everything counts.
        exclude: globs on flat names; names that match one are skipped. Empty by default.
        health: read everything, for shares of zero and saturated codes, ranges of magnitudes, NaN
            and infinity; False by default.
        digest: read everything, for a digest of all tensors that does not depend on the sharding;
            False by default.
        progress: called with bytes done and bytes in all, at most ten times a second, in this
            thread; if it returns False or raises, the work stops. True draws a bar on standard
            error (with tqdm, if that is a terminal). None by default.
        storage_options: keyword arguments that fsspec opens URLs with, such as
            `{"endpoint_url": "http://127.0.0.1:9000"}`; for all URLs of the call.

    Returns:
        The report of `lowbit-ckpt inspect --json`.

    Raises:
        CheckpointError: code 1 for I/O, 2 for usage, 3 for a bad checkpoint, 4 for a mismatch.
        ImportError: lowbit was built without its checkpoint module, or a URL or a bar needs a
            package that is not installed.
        ValueError: a URL is open with other `storage_options`.
    """
    chosen = _chosen(include, exclude)
    read = {"health": bool(health), "digest": bool(digest)}
    with Shown(progress, "inspect") as told, opened(storage_options, path) as (name,):
        text = native().inspect(name, _options(chosen, read), told)
    return json.loads(text)


def verify(
    path: Path,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    finite: bool = True,
    opaque: bool = False,
    threads: int = 1,
    progress: Progress | bool | None = None,
    storage_options: StorageOptions = None,
) -> dict[str, Any]:
    """Checks that a checkpoint is sound: structure, checksums, coverage and values.

    Args:
        finite: also check values: NaN, infinity, second moments below 0; True by default.
        opaque: warn about opaque objects, which torch would import and run, instead of failing;
            False by default.
        threads: number of reading threads, 1 to 256; 1 by default.
        path, include, exclude, progress, storage_options: as for `inspect`.

    Returns:
        The report of `lowbit-ckpt verify --json`. "ok" says whether the values are sound;
        "findings" has tensor and reason of each that is not.

    Raises:
        CheckpointError: code 1 for I/O, 2 for usage, 3 for a bad checkpoint, 4 for a mismatch.
        ImportError: lowbit was built without its checkpoint module, or a URL or a bar needs a
            package that is not installed.
        ValueError: a URL is open with other `storage_options`.
    """
    chosen = _chosen(include, exclude)
    checks = {"finite": bool(finite), "opaque": bool(opaque), "threads": threads}
    with Shown(progress, "verify") as told, opened(storage_options, path) as (name,):
        text = native().verify(name, _options(chosen, checks), told)
    return json.loads(text)


def convert(
    source: Path,
    target: Path,
    *,
    to: str = "",
    container: str = "",
    state_format: str = "",
    block: int = 0,
    keep: bool = False,
    full_precision: Sequence[str] = (),
    weights: str = "",
    seed: int = 0,
    model: Path = "",
    from_dialect: str = "",
    optimizer: str = "",
    group: Sequence[str] = (),
    lossy: bool = False,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    dry_run: bool = False,
    world_size: int | None = None,
    mesh: Mapping[int, int] | None = None,
    part: tuple[int, int] | None = None,
    force: bool = False,
    manifest: bool = True,
    threads: int = 1,
    memory_limit: int = 64 << 20,
    progress: Progress | bool | None = None,
    storage_options: StorageOptions = None,
) -> dict[str, Any]:
    """Converts a checkpoint to another optimizer's format.

    Args:
        source: the checkpoint, as `path` of `inspect`.
        target: the folder or file to write, or its URL; it appears whole or not at all. For a URL
            it is written to TMPDIR first.
        to: the dialect of the target: "torch", "lowbit", "bitsandbytes", ...; "" by default,
            which keeps the source's.
        container: "dcp", "torch", "safetensors", or "universal", which DeepSpeed resumes from; ""
            by default: the target's name decides, else the source's container.
        state_format: the format of the target's state: "8bit", "4bit", "float32", ...; "" by
            default: codes stay if the dialect has them, and float32 takes the dialect's default
            format.
        block: values that share a scale, 32 to 2048; 0 by default, which leaves it to the format.
        keep: raise rather than round or requantize; False by default.
        full_precision: globs on names of parameters whose state stays float32; empty by default.
        weights: also round float32 weights, to "bfloat16" or "bfloat16_stochastic"; "" by default,
            which leaves them.
        seed: of the stochastic rounding of `weights`; 0 by default.
        model: a checkpoint with the weights, if the source lacks its parameters' names or shapes;
            "" by default.
        from_dialect: the dialect of the source, if it is ambiguous;
            "" by default: it is recognized.
        optimizer: the path of the optimizer to convert, such as "optimizers.0", if the source has
            several; the others stay as they are.
        group: "N=PATTERN", whose parameters are in group N of Megatron-Core's common.pt, by globs
            on names; empty by default.
        lossy: drop what the target cannot store, with a warning; False by default.
        world_size: number of ranks of a directory; by default as many as the source has.
        mesh: instead, parts along each tensor dimension, as for `reshard`.
        part: (i, n) writes part i of n of a directory, as for `reshard`.
            Errors in the report are then those of this part.
        dry_run, force, manifest, threads, memory_limit: as for `reshard`.
        include, exclude, progress, storage_options: as for `inspect`.

    Returns:
        The report of `lowbit-ckpt convert --json`: for each state whether its bits stayed, or the
        errors of requantizing it.

    Raises:
        CheckpointError: code 1 for I/O, 2 for usage, 3 for a bad checkpoint, 4 for a mismatch or
            for what the target cannot store.
        ImportError: lowbit was built without its checkpoint module, or a URL or a bar needs a
            package that is not installed.
        TypeError: both `world_size` and `mesh` are given.
        ValueError: `part` or `mesh` has a number outside its range,
            or a URL is open with other `storage_options`.
    """
    if container == "universal" and is_url(target):
        reason = (
            "a Universal Checkpoint is written to a local folder; copy that to the store afterwards"
        )
        raise CheckpointError(f"{os.fsdecode(target)}: {reason}", code=2)
    _check_part(part, target)
    if world_size is None and mesh is None:
        mesh = {}
    chosen = _chosen(include, exclude)
    read = {"from": from_dialect, "optimizer": optimizer, "members": _names(group)}
    kind = {"to": to, "container": container, "keep": bool(keep), "lossy": bool(lossy)}
    codes = {"state_format": state_format, "block": block, "full_precision": _names(full_precision)}
    rounded = {"weights": weights, "seed": seed}
    cut = _cut(world_size, mesh, part)
    write = _writing(dry_run, force, manifest, threads, memory_limit)
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
        options = _options(chosen, read, kind, codes, rounded, cut, write, to_write.options)
        text = native().convert(name, to_write.path, weights_of, options, told)
    return to_write.report(text)


def reshard(
    source: Path,
    target: Path,
    *,
    world_size: int | None = None,
    mesh: Mapping[int, int] | None = None,
    requantize: bool = False,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    dry_run: bool = False,
    part: tuple[int, int] | None = None,
    force: bool = False,
    manifest: bool = True,
    threads: int = 1,
    memory_limit: int = 64 << 20,
    progress: Progress | bool | None = None,
    storage_options: StorageOptions = None,
) -> dict[str, Any]:
    """Reshards a checkpoint to another number of ranks; values do not change.

    Args:
        source: the checkpoint, as `path` of `inspect`.
        target: the folder to write, or its URL; it appears whole or not at all.
            For a URL it is written to TMPDIR first.
        world_size: number of ranks, at least 1, cut as FSDP2 cuts: `mesh={0: world_size}`.
        mesh: instead, parts along each tensor dimension, such as `{0: 4, 1: 2}` for FSDP over 4 and
            tensor parallelism over 2.
        requantize: make new codes where a cut falls inside a block of torchao's quantized state;
            False by default, which raises there.
        dry_run: return the plan and write nothing; False by default.
        part: (i, n) writes part i of n, counted from 0. All n run in any order, on machines that
            share a file system, under torchrun as `part=(rank, world_size)`; the last one publishes
            the target. Rerun a part that was killed. Parts replace no target.
        force: replace the target if it exists and is a checkpoint; False by default.
        manifest: write digests into `lowbit.json`, for `verify` and `Reader`; True by default.
        threads: number of threads that read and write, 1 to 256; 1 by default.
        memory_limit: maximum size of all buffers in bytes; 64 MiB by default.
        include, exclude, progress, storage_options: as for `inspect`.

    Returns:
        The report of `lowbit-ckpt reshard --json`; of a part also whether it "published" the
        target, and the parts that are "missing".

    Raises:
        CheckpointError: code 1 for I/O, 2 for usage, 3 for a bad checkpoint, 4 for a mismatch.
        ImportError: lowbit was built without its checkpoint module, or a URL or a bar needs a
            package that is not installed.
        TypeError: neither `world_size` nor `mesh` is given, or both are.
        ValueError: `part` or `mesh` has a number outside its range,
            or a URL is open with other `storage_options`.
    """
    if world_size is None and mesh is None:
        raise TypeError("reshard needs world_size= or mesh=")
    _check_part(part, target)
    chosen = {**_chosen(include, exclude), "requantize": bool(requantize)}
    cut = _cut(world_size, mesh, part)
    write = _writing(dry_run, force, manifest, threads, memory_limit)
    with (
        Shown(progress, "reshard") as told,
        opened(storage_options, source) as (name,),
        written(
            storage_options, target, [source], folder=True, force=force, dry_run=dry_run
        ) as to_write,
    ):
        options = _options(chosen, cut, write, to_write.options)
        text = native().reshard(name, to_write.path, options, told)
    return to_write.report(text)


def diff(
    a: Path,
    b: Path,
    *,
    bytes: bool = False,
    tolerance: float = 0.0,
    model: Path = "",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    progress: Progress | bool | None = None,
    storage_options: StorageOptions = None,
) -> dict[str, Any]:
    """Compares two checkpoints.

    Args:
        a: a checkpoint, as `path` of `inspect`.
        b: the other.
        bytes: compare stored bytes instead of values; False by default.
        tolerance: largest allowed difference relative to the larger tensor's 2-norm; 0 by default.
        model: a checkpoint with the weights, if `a` or `b` lacks its parameters' names or shapes;
            "" by default.
        include, exclude, progress, storage_options: as for `inspect`.

    Returns:
        The report of `lowbit-ckpt diff --json`: "same", "warnings", and the "differences" by name
        with the first element that differs.

    Raises:
        CheckpointError: code 1 for I/O, 2 for usage, 3 for a bad checkpoint, 4 for a mismatch.
        ImportError: lowbit was built without its checkpoint module, or a URL or a bar needs a
            package that is not installed.
        ValueError: a URL is open with other `storage_options`.
    """
    chosen = _chosen(include, exclude)
    same = {"bytes": bool(bytes), "tolerance": min(float(tolerance), sys.float_info.max)}
    with Shown(progress, "diff") as told, opened(storage_options, a, b, model) as names:
        text = native().diff(*names, _options(chosen, same), told)
    return json.loads(text)


def _options(*parts: Mapping[str, Any]) -> str:
    """The options of a command as JSON, which the C++ module reads. Its numbers are Python's: none
    infinite, whole ones as their `__index__` says.
    """
    fields = {key: value for part in parts for key, value in part.items()}
    return json.dumps(fields, ensure_ascii=False, allow_nan=False, default=operator.index)


def _chosen(include: Sequence[str], exclude: Sequence[str]) -> dict[str, Any]:
    return {"include": _names(include), "exclude": _names(exclude)}


def _names(names: Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _check_part(part: tuple[int, int] | None, target: Path) -> None:
    if part is not None and is_url(target):
        raise CheckpointError(
            f"{os.fsdecode(bytes_of(target))}: parts are written to a file system that the "
            "machines share; an object store has none",
            code=2,
        )


def _part(part: tuple[int, int] | None) -> list[int]:
    if part is None:
        return []
    number, count = map(operator.index, part)
    if not 0 <= number < count:
        raise ValueError(f"part=(i, n) has i from 0 to n - 1, not {number} and {count}")
    return [number, count]


def _cut(
    world_size: int | None, mesh: Mapping[int, int] | None, part: tuple[int, int] | None
) -> dict[str, Any]:
    if world_size is not None and mesh is not None:
        raise TypeError("give world_size= or mesh=, not both")
    parts = {0: 1 if world_size is None else world_size} if mesh is None else dict(mesh)
    if any(n < 1 for n in parts.values()) or any(d < 0 for d in parts):
        raise ValueError(f"a tensor is cut into one part or more along each dimension, not {parts}")
    return {"parts": list(parts.values()), "dims": list(parts), "part": _part(part)}


def _writing(
    dry_run: bool, force: bool, manifest: bool, threads: int, memory_limit: int
) -> dict[str, Any]:
    return {
        "dry_run": bool(dry_run),
        "replace": bool(force),
        "manifest": bool(manifest),
        "threads": threads,
        "memory": memory_limit,
    }
