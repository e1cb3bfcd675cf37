"""What a rank does in test_matrix_pairs.py and test_matrix_rows.py: each rule and format under a
wrapper, trained, saved and loaded, beside one process.
"""

from __future__ import annotations

import functools
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import lowbit.checkpoint
from lowbit import fsdp1
from tests.sharding.matrix.cases import TABLES, Run, built, cases_on
from tests.sharding.wrappers_worker import END, SAVED, Kept, kept_of

Place = tuple[str, int]  # a wrapper and its number of ranks
ONE: Place = ("single", 1)


def path_of(folder: str, table: str, place: Place) -> pathlib.Path:
    return pathlib.Path(folder) / f"{table} {place[0]} {place[1]}"


def one_process(table: str, folder: str, saves: list[str]) -> dict[str, str]:
    """Writes what one process has when it saves and 2 steps later, and a checkpoint of some cases.
    What it refuses itself, at construction.
    """
    runs, said = {}, {}
    for name, case in TABLES[table][0].items():
        try:
            runs[name] = built("single", case)
        except ValueError as error:
            said[name] = str(error)
    made: dict[int, dict[str, Kept]] = {}
    for begin, end in ((0, SAVED), (SAVED, END)):
        for run in runs.values():
            run.steps(begin, end)
        made[end] = {name: kept_of(run.model, run.opt) for name, run in runs.items()}
        if end == SAVED and saves:
            saved = {name: saved_of(runs[name]) for name in saves if name in runs}
            dcp.save(saved, checkpoint_id=path_of(folder, table, ONE))
    for name in runs:
        kept = {end: by_name[name] for end, by_name in made.items()}
        torch.save(kept, pathlib.Path(folder) / f"{table} {name}.pt")
    return said


@functools.cache
def alone(table: str, folder: str, name: str) -> dict[int, Kept]:
    """What one process has of a case, by the number of steps. By CPython's own unpickler, in half
    of the time that torch's in Python takes for so many small tensors: the file is the test's.
    """
    return torch.load(pathlib.Path(folder) / f"{table} {name}.pt", mmap=True, weights_only=False)


def saved_of(run: Run) -> dict[str, dict]:
    """Weights and state, and what a rule with modes keeps in its groups."""
    state = fsdp1.get_state_dict(run.opt)
    groups = state["param_groups"] if hasattr(run.opt, "train") else []
    kept = [{k: v for k, v in group.items() if not k.startswith("param")} for group in groups]
    return {"model": run.weights(), "state": state["state"], "groups": dict(enumerate(kept))}


def cells(
    table: str, folder: str, place: Place, not_alone: list[str], sources: dict[Place, list[str]]
) -> tuple[dict[str, str], dict[str, list[str]], list[str]]:
    """What is refused at construction, with the words; what is not equal when it is saved, after
    loading these cases of what other places saved, and 2 steps later; and which of those cases are
    refused here. Saves.
    """
    said, runs = {}, {}
    for name, case in cases_on(table, place[0]).items():
        if name in not_alone:
            continue
        try:
            runs[name] = built(place[0], case)
        except ValueError as error:
            said[name] = str(error)
    torch.manual_seed(dist.get_rank())  # must not matter
    wrong: dict[str, list[str]] = {}
    for name, run in runs.items():
        run.steps(0, SAVED)
        wrong[name] = run.unequal(alone(table, folder, name)[SAVED])
    saved = {name: saved_of(run) for name, run in runs.items()}
    dcp.save(saved, checkpoint_id=path_of(folder, table, place))
    runs.clear()
    del saved
    refused: list[str] = []
    for source, names in sources.items():
        found, not_here = loaded(table, folder, place[0], source, names)
        refused += not_here
        for name, each in found.items():
            wrong.setdefault(name, []).extend(each)
    return said, wrong, refused


def loaded(
    table: str, folder: str, wrapper: str, source: Place, names: list[str]
) -> tuple[dict[str, list[str]], list[str]]:
    """What is not equal after loading these cases, and 2 steps later; and those that are refused
    here.
    """
    runs, refused = {}, []
    for name in names:
        try:
            runs[name] = built(wrapper, TABLES[table][0][name], seed=1)
        except ValueError:
            refused.append(name)
    if not runs:
        return {}, refused
    parts = {name: saved_of(run) for name, run in runs.items()}
    # lowbit's Reader, in less than half of the time that torch's takes for so many small tensors.
    # Both read the kinds of checkpoints (test_matrix_kinds.py).
    dcp.load(parts, storage_reader=lowbit.checkpoint.Reader(path_of(folder, table, source)))
    wrong = {}
    for name, run in runs.items():
        run.take_weights(parts[name]["model"])
        groups = fsdp1.get_state_dict(run.opt)["param_groups"]
        for number, kept in parts[name]["groups"].items():
            groups[int(number)].update(kept)
        fsdp1.set_state_dict(run.opt, {"state": parts[name]["state"], "param_groups": groups})
        saved, later = (alone(table, folder, name)[end] for end in (SAVED, END))
        wrong[name] = [f"{each}, loaded from {source}" for each in run.unequal(saved)]
        run.steps(SAVED, END)
        wrong[name] += [
            f"{each}, 2 steps after loading from {source}" for each in run.unequal(later)
        ]
    return wrong, refused


def in_one_process(
    table: str, folder: str, sources: dict[Place, list[str]]
) -> dict[str, list[str]]:
    """What is not equal after one process has loaded these cases of each of these places,
    and 2 steps later.
    """
    wrong: dict[str, list[str]] = {}
    for source, names in sources.items():
        for name, found in loaded(table, folder, "single", source, names)[0].items():
            wrong.setdefault(name, []).extend(found)
    return wrong


def nothing_loaded(table: str, folder: str) -> list[str]:
    """The comparison can fail: what one process has before its first step."""
    name, case = next(iter(TABLES[table][0].items()))
    return built("single", case).unequal(alone(table, folder, name)[SAVED])
