"""What a rank does in test_matrix_kinds.py for the kinds of checkpoints: each saved under a
wrapper, and loaded under the next one and in one process.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import lowbit.checkpoint
from lowbit import fsdp1
from tests.sharding.matrix.cases import OF_KINDS, ZERO, Run, built
from tests.sharding.matrix.rows_worker import ONE, Place, alone
from tests.sharding.wrappers_worker import END, SAVED
from tests.support.selection import WHOLE

RESHARDED_TO = 5  # no row has as many
Runs = dict[str, Run]
Saved = dict[str, dict[str, Any]]
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def model_of(run: Run) -> dict[str, Any]:
    """torch's, but of a model that it does not know: vectors."""
    return run.weights() if hasattr(run.model, "slices") else get_model_state_dict(run.model)


def take_model(run: Run, saved: dict[str, Any]) -> None:
    if hasattr(run.model, "slices"):
        run.take_weights(saved)
    else:
        set_model_state_dict(run.model, saved)


def nested(run: Run) -> dict[str, Any]:
    return get_optimizer_state_dict(run.model, run.outer)


def take_nested(run: Run, saved: dict[str, Any]) -> None:
    set_optimizer_state_dict(run.model, run.outer, saved)


def flat_names(run: Run) -> dict[str, Any]:
    return get_optimizer_state_dict(run.model, run.outer, options=FLAT)


def take_flat_names(run: Run, saved: dict[str, Any]) -> None:
    set_optimizer_state_dict(run.model, run.outer, saved, options=FLAT)


def own(run: Run) -> dict[str, Any]:
    """With names: slices have none in their groups, and who loads this may ask for them."""
    return fsdp1.get_state_dict(run.outer, param_names=True)


def take_own(run: Run, saved: dict[str, Any]) -> None:
    fsdp1.set_state_dict(run.outer, saved)


STATES: dict[str, tuple[Callable[[Run], dict[str, Any]], Callable[[Run, dict[str, Any]], None]]] = {
    "nested": (nested, take_nested),
    "flat": (flat_names, take_flat_names),
    "lowbit": (own, take_own),
}
# Kind: whose state dict, and by what it is written and read.
# "torch.save" is of what an optimizer has here.
KINDS: dict[str, tuple[str, str]] = {
    "lowbit, torch's files": ("lowbit", "torch"),
    "lowbit, Writer": ("lowbit", "lowbit"),
    "lowbit, resharded": ("lowbit", "resharded"),
    "torch.save": ("", ""),
    "nested, torch's files": ("nested", "torch"),
    "nested, Writer": ("nested", "lowbit"),
    "flat names, torch's files": ("flat", "torch"),
    "flat names, Writer": ("flat", "lowbit"),
}


def kinds_of(row: int) -> list[str]:
    """The kinds that a row has in CI: its wrapper saves and loads every state dict, and by each of
    the ways to write and read, which take turns. `make matrix` has all kinds in every row.
    """
    if WHOLE:
        return [*KINDS]
    nested, flat = [("torch's files", "Writer"), ("Writer", "torch's files")][row % 2]
    own = ["Writer"] if row % 2 else ["torch's files"] if row % 4 == 0 else []
    return [
        *(f"lowbit, {storage}" for storage in own),
        "lowbit, resharded",
        "torch.save",
        f"nested, {nested}",
        f"flat names, {flat}",
    ]


def path_of(folder: str, kind: str, place: Place) -> pathlib.Path:
    return pathlib.Path(folder) / f"kinds {kind} {place[0]} {place[1]}"


def trained(wrapper: str, seed: int = 0) -> Runs:
    runs = {name: built(wrapper, case, seed) for name, case in OF_KINDS.items()}
    if not seed:
        for run in runs.values():
            run.steps(0, SAVED)
    return runs


def save(runs: Runs, kind: str, path: pathlib.Path) -> None:
    state, storage = KINDS[kind]
    if not state:
        return save_here(runs, path)
    get = STATES[state][0]
    if state != "lowbit" and any(run.outer is not run.opt for run in runs.values()):
        # torch makes the whole optimizer's state, which is empty, by a step with a learning rate of
        # 0, and refuses afterwards.
        runs = trained(ZERO, seed=1)
    saved = {name: {"model": model_of(run), "optim": get(run)} for name, run in runs.items()}
    if storage == "lowbit":
        dcp.save(saved, storage_writer=lowbit.checkpoint.Writer(path))
    else:
        dcp.save(saved, checkpoint_id=path)
    if storage == "resharded" and dist.get_rank() == 0:
        lowbit.checkpoint.reshard(path, f"{path} resharded", world_size=RESHARDED_TO)


def load(runs: Runs, kind: str, path: pathlib.Path) -> None:
    state, storage = KINDS[kind]
    if not state:
        return load_here(runs, path)
    get, take = STATES[state]
    optim = {name: {"optim": get(run)} for name, run in runs.items()}
    models: Saved = {name: {"model": model_of(run)} for name, run in runs.items()}
    if storage == "resharded":
        path = pathlib.Path(f"{path} resharded")
    # Weights apart, and those of FSDP1 each: docs/bits/sharding-details.md.
    for part in (optim, *({name: model} for name, model in models.items())):
        if storage == "lowbit":
            dcp.load(part, storage_reader=lowbit.checkpoint.Reader(path))
        else:
            dcp.load(part, checkpoint_id=path)
    for name, run in runs.items():
        take_model(run, models[name]["model"])
        take(run, optim[name]["optim"])


def save_here(runs: Runs, path: pathlib.Path) -> None:
    """A file for each rank; of ZeroRedundancyOptimizer rank 0's, which it consolidates."""
    saved: Saved = {}
    for name, run in runs.items():
        if run.outer is not run.opt:
            run.outer.consolidate_state_dict(to=0)
        mine = run.outer is run.opt or dist.get_rank() == 0
        weights = {
            key: t.to_local() if hasattr(t, "to_local") else t for key, t in run.weights().items()
        }
        saved[name] = {"model": weights, "optim": run.outer.state_dict() if mine else None}
    path.mkdir(exist_ok=True)
    torch.save(saved, path / f"{dist.get_rank()}.pt")


def load_here(runs: Runs, path: pathlib.Path) -> None:
    saved = torch.load(path / f"{dist.get_rank()}.pt", weights_only=True)
    for name, run in runs.items():
        for key, t in (here := run.weights()).items():
            (t.to_local() if hasattr(t, "to_local") else t).copy_(saved[name]["model"][key])
        run.take_weights(here)
        state = saved[name]["optim"]
        if run.outer is not run.opt:
            state = torch.load(path / "0.pt", weights_only=True)[name]["optim"]
        run.outer.load_state_dict(state)


def said_of(error: BaseException) -> str:
    """The words of a refusal: of torch's own error where it wraps another one, in one line."""
    inner = getattr(error, "failures", None)
    if inner:
        error = next(iter(inner.values()))[0]
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def refused(what: Callable[[], None]) -> str | None:
    """The words of the first rank that raised, after all have tried."""
    mine = None
    try:
        what()
    except (Exception, CheckpointException) as error:  # the latter is not an Exception
        mine = said_of(error)
    every: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return next(filter(None, every), None)


def kinds(
    folder: str, place: Place, chosen: list[str], sources: dict[str, Place]
) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Per chosen kind what is refused, at saving or at loading; else what is not equal when it is
    saved, after loading what a source saved, and 2 steps later.
    """
    runs = trained(place[0])
    before = [
        f"{name}: {each}"
        for name, run in runs.items()
        for each in run.unequal(alone("kinds", folder, name)[SAVED])
    ]
    said: dict[str, str] = {}
    for kind in chosen:
        if words := refused(lambda kind=kind: save(runs, kind, path_of(folder, kind, place))):
            said[kind] = words
    runs.clear()
    wrong = {}
    for kind in chosen:
        if kind in said:
            continue
        wrong[kind] = [*before]
        for source in sources_of(kind, place, sources):
            words, found = resumed(folder, place[0], kind, source)
            if words:
                said[kind] = f"at loading what {source[0]} saved: {words}"
                del wrong[kind]
                break
            wrong[kind] += found
    return said, wrong


def sources_of(kind: str, place: Place, sources: dict[str, Place]) -> list[Place]:
    """Stages, of which no rank has every parameter,
    load what they saved too: dcp keeps one rank's groups of nested names.
    """
    if not KINDS[kind][0]:
        return [place]
    return [sources.get(kind, ONE), *([place] if place[0].startswith("pipeline") else [])]


def resumed(folder: str, wrapper: str, kind: str, source: Place) -> tuple[str | None, list[str]]:
    wrong = []
    runs = trained(wrapper, seed=1)
    if words := refused(lambda: load(runs, kind, path_of(folder, kind, source))):
        return words, []
    for name, run in runs.items():
        want = alone("kinds", folder, name)
        wrong += [f"{name}: {each}, loaded from {source}" for each in run.unequal(want[SAVED])]
        run.steps(SAVED, END)
        wrong += [f"{name}: {each}, 2 steps after {source}" for each in run.unequal(want[END])]
    return None, wrong


def one_process_loads(folder: str, sources: list[tuple[str, Place]]) -> list[str]:
    """What is not equal after one process has loaded these kinds from these places,
    and 2 steps later.
    """
    wrong = []
    for kind, place in sources:
        words, found = resumed(folder, "single", kind, place)
        wrong += [f"{kind} of {place}: {words}"] if words else found
    return wrong
