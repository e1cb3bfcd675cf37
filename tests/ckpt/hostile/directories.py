"""Directories whose metadata leads out of them, or to places where no item is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from .case import BAD, FINE, add
from .dcp import (
    FIRST,
    INDEX,
    INFO,
    SECOND,
    SQ,
    STEP,
    W,
    base,
    item,
    lies,
    made,
    size,
)
from .write import build, glob, reduce

# Places out of the folder. What lies there is the right item,
# so that nothing but the place is wrong.
PLACE = "folder|path|name|link|leads|regular|outside|cannot be opened"


def elsewhere(told: str, real: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        d = base()
        told_here = told.replace("FOLDER", str(folder.resolve()))
        for it in d.items.values():
            if it.file == "__1_0.distcp":
                it.lie = lambda p, a, n: (told_here, a, n)
        path = d.write(folder)
        target = folder / real
        target.parent.mkdir(parents=True, exist_ok=True)
        (path / "__1_0.distcp").rename(target)
        return path

    return make


add("dcp.path_above", elsewhere("../other/secret.bin", "other/secret.bin"), BAD, PLACE, torch=True)
add(
    "dcp.path_absolute",
    elsewhere("FOLDER/other/secret.bin", "other/secret.bin"),
    BAD,
    PLACE,
    torch=True,
)
add(
    "dcp.path_in_a_folder",
    elsewhere("sub/a.distcp", "checkpoint/sub/a.distcp"),
    BAD,
    PLACE,
    torch=True,
)
add(
    "dcp.path_through_a_folder",
    elsewhere("./a.distcp", "checkpoint/a.distcp"),
    BAD,
    PLACE,
    torch=True,
)
add(
    "dcp.path_with_a_backslash",
    elsewhere("..\\a.distcp", "checkpoint/..\\a.distcp"),
    (BAD, FINE),
    PLACE,
)
for name, path in (
    ("empty", ""),
    ("dot", "."),
    ("dots", ".."),
    ("metadata", ".metadata"),
    ("missing", "__7_0.distcp"),
    ("long", "a" * 5000),
    ("nul", "__0_0.distcp\0.bin"),
    ("escapes", "\x1b[2J\r\n"),
    ("number", 7),
    ("none", None),
    ("device", "/dev/zero"),
):
    add(
        f"dcp.path_{name}",
        lies(path=lambda _, path=path: path),
        BAD,
        PLACE + "|file|missing|zip|entry|text|metadata|overlap",
    )


def replaced(
    put: Callable[[Path, Path], object], name: str = "__1_0.distcp"
) -> Callable[[Path], Path]:
    """The plain directory with a file moved away and something else in its place."""

    def make(folder: Path) -> Path:
        path = base().write(folder)
        (path / name).rename(folder / "moved")
        put(path / name, folder / "moved")
        return path

    return make


def link(to: str | None = None) -> Callable[[Path, Path], object]:
    return lambda here, moved: here.symlink_to(moved.resolve() if to is None else to)


KIND = "link|regular|cannot be|not a|missing|did not finish|directory|folder"
add("dcp.link_as_data", replaced(link()), BAD, KIND, torch=True)
add(
    "dcp.link_as_data_inside",
    replaced(lambda here, moved: (moved.rename(here.parent / "real"), here.symlink_to("real"))),
    BAD,
    KIND,
    torch=True,
)
add("dcp.link_to_itself", replaced(lambda here, moved: here.symlink_to(here.name)), BAD, KIND)
add("dcp.link_to_zeros", replaced(link("/dev/zero")), BAD, KIND)
add("dcp.link_as_metadata", replaced(link(), ".metadata"), BAD, KIND, torch=True)
add("dcp.fifo_as_data", replaced(lambda here, moved: os.mkfifo(here)), BAD, KIND)
add("dcp.fifo_as_metadata", replaced(lambda here, moved: os.mkfifo(here), ".metadata"), BAD, KIND)
add("dcp.folder_as_data", replaced(lambda here, moved: here.mkdir()), BAD, KIND)
add("dcp.folder_as_metadata", replaced(lambda here, moved: here.mkdir(), ".metadata"), BAD, KIND)
add("dcp.data_missing", replaced(lambda here, moved: None), BAD, KIND + "|__1_0", torch=False)
add(
    "dcp.data_empty",
    replaced(lambda here, moved: here.touch()),
    BAD,
    "cut|beyond|short|end",
    torch=False,
)
add(
    "dcp.data_cut",
    replaced(lambda here, moved: here.write_bytes(moved.read_bytes()[:-10])),
    BAD,
    "cut|beyond|short|end",
    torch=False,
)
add(
    "dcp.data_is_zeros",
    replaced(lambda here, moved: here.write_bytes(bytes(moved.stat().st_size))),
    BAD,
    "zip|torch.save|archive",
    torch=False,
)


# Items that are not where they are said to be.
BOUNDS = "cut|beyond|end|zip|overlap|archive|offset|length|entry|number|integer"
for name, told, ok in (
    ("length_beyond", {"length": 10**15}, None),
    ("length_short", {"length": lambda n: n - 10}, False),
    ("length_long", {"at": None, "length": lambda n: n + 1}, None),
    ("length_zero", {"length": 0}, None),
    ("length_negative", {"length": -5}, None),
    ("length_2_64", {"length": (1 << 64) + 1577}, None),
    ("length_text", {"length": "1577"}, None),
    ("offset_plus_1", {"at": lambda a: a + 1}, False),
    ("offset_beyond", {"at": 10**12}, None),
    ("offset_negative", {"at": -1}, None),
    ("offset_2_63", {"at": (1 << 63) - 1, "length": (1 << 63) - 1}, None),
    ("offset_2_64", {"at": 1 << 64}, None),
    ("offset_none", {"at": lambda a: None}, None),
):
    add("dcp." + name, lies(**told), BAD, BOUNDS, torch=ok)
add(
    "dcp.items_shared",
    made(lambda d: setattr(d.items[SECOND], "like", FIRST)),
    BAD,
    "overlap|shared|same|two",
    torch=True,
)
add(
    "dcp.items_shared_by_tensors",
    made(lambda d: setattr(d.items[SQ, (0, 0)], "like", FIRST)),
    BAD,
    "overlap|shared|same|two",
    torch=True,
)
add(
    "dcp.items_overlap",
    lies(at=lambda a: a - 1, length=lambda n: n + 1),
    BAD,
    "overlap|zip|archive",
    torch=None,
)
add(
    "dcp.items_nested",
    made(
        lambda d: (
            setattr(d.items[FIRST], "wrap", lambda b: b + d.items[STEP].bytes()),
            setattr(d.items[STEP], "like", FIRST),
            setattr(d.items[STEP], "lie", lambda p, a, n: (p, a + n - 1577, 1577)),
        )
    ),
    BAD,
    "overlap|zip|archive|end|step",
)
add(
    "dcp.entry_missing",
    item(SECOND, listed=False),
    BAD,
    "nowhere|missing|entry|stored",
    torch=False,
)
add(
    "dcp.entry_of_a_value_missing",
    item(("optim.param_groups.0.lr", None), listed=False),
    BAD,
    "nowhere|missing|entry|stored|lr",
    torch=False,
)
add(
    "dcp.entry_extra",
    made(
        lambda d: d.storage_extra.append(
            (
                build(INDEX, {"fqn": "ghost", "index": 0, "offset": size((0,))}),
                build(INFO, {"relative_path": "__0_0.distcp", "offset": 0, "length": 1261}),
            )
        )
    ),
    BAD,
    "ghost|no tensor",
    torch=True,
)
add(
    "dcp.entry_twice",
    made(
        lambda d: d.storage_extra.append(
            (
                build(INDEX, {"fqn": W, "index": 5, "offset": size((0, 0))}),
                build(INFO, {"relative_path": "__1_0.distcp", "offset": 0, "length": 1577}),
            )
        )
    ),
    BAD,
    r"twice|two|model\.w",
    torch=False,
)
add(
    "dcp.entry_is_a_tuple",
    made(lambda d: d.storage_extra.append(((W, 0), ("__0_0.distcp", 0, 5)))),
    BAD,
    "entry|expect|MetadataIndex|storage",
)
add(
    "dcp.entry_without_path",
    made(
        lambda d: d.storage_extra.append(
            (build(INDEX, {"fqn": "ghost", "index": 0}), build(INFO, {"offset": 0, "length": 5}))
        )
    ),
    BAD,
    "entry|ghost|path|storage",
)
add(
    "dcp.entry_with_a_path_as_value",
    item(FIRST, lie=lambda p, a, n: (reduce(glob("pathlib", "PosixPath"), p), a, n)),
    BAD,
    "entry|path|text|name",
)
