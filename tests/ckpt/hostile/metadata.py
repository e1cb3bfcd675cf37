"""Metadata that is not all there, or is something else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from .case import BAD, FINE, add, case
from .dcp import (
    MODULE,
    Tensor,
    W,
    base,
    made,
    size,
    state,
    weight,
)
from .write import Pairs, Raw, build, dump, glob, reduce


# Metadata that is not all there.
def ranks(
    *,
    without: int | None,
    names: tuple[str, ...] = ("__0.metadata", "__1.metadata", "__2.metadata"),
) -> Callable[[Path], Path]:
    """As use_collectives=False leaves it: each rank's metadata names its own chunks alone. The last
    rank holds nothing of the weight.
    """

    def make(folder: Path) -> Path:
        whole = base()
        path = whole.write(folder)
        _, places = whole.files()
        (path / ".metadata").unlink()
        for rank, name in enumerate(names):
            if rank == without:
                continue
            part = base()
            for key in list(part.items):
                it = part.items[key]
                if it.file != f"__{rank}_0.distcp":
                    it.listed = False
                    told = part.tensors[key[0]]
                    if isinstance(told, Tensor):
                        told.chunks = [c for c in told.chunks if c[0] != key[1]]
                    else:
                        del part.tensors[key[0]], part.paths[key[0]]
            for key in [
                k for k, t in part.tensors.items() if isinstance(t, Tensor) and not t.chunks
            ]:
                del part.tensors[key]
                part.paths.pop(key, None)
            (path / name).write_bytes(part.metadata(places))
        return path

    return make


add("dcp.ranks_sound", ranks(without=None), FINE, about="Metadata of each rank, joined.")
add("dcp.ranks_first_missing", ranks(without=0), BAD, "missing|rank|__0")
add("dcp.ranks_middle_missing", ranks(without=1), BAD, "missing|rank|__1")
add(
    "dcp.ranks_last_missing",
    ranks(without=1, names=("__0.metadata", "__1.metadata")),
    BAD,
    "missing|part|elements",
)
add(
    "dcp.ranks_numbered_wildly",
    ranks(without=None, names=("__0.metadata", "__1.metadata", "__99999999999999999999.metadata")),
    BAD,
    "missing|rank|__2",
)


@case("dcp.torn_save", BAD, "finish|metadata")
def torn(folder: Path) -> Path:
    """.metadata is written last; without it the save did not finish."""
    path = base().write(folder)
    (path / ".metadata").unlink()
    return path


@case("dcp.torn_save_with_tmp", BAD, "finish|metadata")
def torn_tmp(folder: Path) -> Path:
    path = base().write(folder)
    (path / ".metadata").rename(path / ".metadata.tmp")
    return path


@case("dcp.empty_folder", BAD, "metadata|not a checkpoint|empty")
def empty(folder: Path) -> Path:
    path = folder / "checkpoint"
    path.mkdir()
    return path


@case("dcp.metadata_of_all_and_of_each", (BAD, FINE), "both|metadata|rank")
def both(folder: Path) -> Path:
    """A directory that was written over without being emptied."""
    path = ranks(without=None)(folder)
    shutil.copy(path / "__0.metadata", path / "__3.metadata")
    (path / ".metadata").write_bytes(base().metadata(base().files()[1]))
    return path


ROOT = "metadata|expect|tensors|storage|dict|path|names"
for name, fields, ok in (
    ("tensors_missing", {"state_dict_metadata": ...}, None),
    ("tensors_a_list", {"state_dict_metadata": []}, None),
    ("storage_missing", {"storage_data": ...}, None),
    ("storage_none", {"storage_data": None}, None),
    ("paths_a_list", {"planner_data": [1]}, None),
    ("paths_of_text", {"planner_data": {W: "model.w"}}, None),
    ("paths_of_floats", {"planner_data": {W: (1.5,)}}, None),
):
    add("dcp.metadata_" + name, state(**fields), BAD, ROOT, torch=ok)
for name, root in (
    ("none", None),
    ("a_dict", {"state_dict_metadata": {}}),
    ("a_number", 7),
    ("a_size", size((1,))),
):
    add(
        f"dcp.metadata_is_{name}",
        made(lambda d, root=root: setattr(d, "change", lambda p: p[:2] + dump(root) + b".")),
        BAD,
        ROOT,
    )
add(
    "dcp.metadata_without_state",
    made(lambda d: setattr(d, "change", lambda p: p[:2] + glob(MODULE, "Metadata") + b")\x81.")),
    BAD,
    ROOT,
)
add(
    "dcp.metadata_built_twice",
    made(lambda d: setattr(d, "change", lambda p: p[:-1] + b"}b.")),
    (BAD, FINE),
    ROOT + "|state",
)
add(
    "dcp.name_is_a_number",
    made(lambda d: d.tensors.__setitem__(7, d.tensors[W])),
    BAD,
    "name|text|chunk|stored",
)
add(
    "dcp.name_twice",
    made(
        lambda d: d.state_extra.update(
            state_dict_metadata=Pairs(
                [
                    (k, v.raw() if isinstance(v, Tensor) else v)
                    for k, v in [*d.tensors.items(), (W, d.tensors[W])]
                ]
            )
        )
    ),
    BAD,
    r"twice|two|duplicate|model\.w",
    torch=True,
)
add(
    "dcp.metadata_key_twice",
    made(lambda d: setattr(d, "change", lambda p: p[:-3] + dump("version") + dump("2") + p[-3:])),
    BAD,
    "twice|duplicate|two",
    torch=True,
)
add(
    "dcp.size_with_two_arguments",
    weight(shape=Raw(dump((4,)) + dump((8,)))),
    BAD,
    "size|argument|expect|call|dimension",
)
add(
    "dcp.layout_sparse",
    weight(
        properties=build(
            glob(MODULE, "TensorProperties"),
            (
                glob("torch", "float32"),
                reduce(glob("torch.serialization", "_get_layout"), "torch.sparse_coo"),
                False,
                reduce(glob(MODULE, "_MEM_FORMAT_ENCODING"), 0),
                False,
            ),
        )
    ),
    BAD,
    "layout|sparse|argument|call|strided",
)
add(
    "dcp.memory_format_7",
    weight(
        properties=build(
            glob(MODULE, "TensorProperties"),
            (
                glob("torch", "float32"),
                reduce(glob("torch.serialization", "_get_layout"), "torch.strided"),
                False,
                reduce(glob(MODULE, "_MEM_FORMAT_ENCODING"), 7),
                False,
            ),
        )
    ),
    BAD,
    "format|argument|call|MEM_FORMAT",
)
GETATTR = glob("builtins", "getattr")
for name, arguments, codes in (
    ("enum", (glob(MODULE, "_MEM_FORMAT_ENCODING"), "TORCH_CONTIGUOUS_FORMAT"), FINE),
    ("of_an_enum_class", (glob(MODULE, "_MEM_FORMAT_ENCODING"), "__class__"), BAD),
    ("of_a_size", (glob("torch", "Size"), "__reduce__"), BAD),
    ("of_three", (glob(MODULE, "_MEM_FORMAT_ENCODING"), "TORCH_CONTIGUOUS_FORMAT", 1), BAD),
):
    told = build(
        glob(MODULE, "TensorProperties"),
        (
            glob("torch", "float32"),
            reduce(glob("torch.serialization", "_get_layout"), "torch.strided"),
            False,
            reduce(GETATTR, *arguments),
            False,
        ),
    )
    add(
        f"dcp.getattr_{name}",
        weight(properties=told),
        codes,
        "getattr|argument|call|allow|attr",
        torch=True if codes == FINE else None,
    )
