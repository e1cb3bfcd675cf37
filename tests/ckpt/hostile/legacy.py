"""Files of torch.save from before it wrote zip archives: five pickles,
then for each storage a count and its bytes.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

from .case import BAD, FINE, VALUES, add, case
from .state import GROUP, SHAPE, live, put
from .write import P2, Raw, dump, floats, glob, le, persistent, tensor

MAGIC = 0x1950A86A20F9469CFC6C
SYSTEM = {
    "protocol_version": 1001,
    "little_endian": True,
    "type_sizes": {"short": 2, "int": 4, "long": 4},
}
KEYS = {"94": floats(32), "95": floats(1, 7.0), "96": floats(32, 0.25), "97": floats(32, 0.125)}


def pickled(value: object) -> bytes:
    return P2 + dump(value) + b"."


def kept(
    key: str,
    shape: tuple[int, ...],
    *,
    held: int | None = None,
    view: object = None,
    **named: object,
) -> Raw:
    """A tensor; here the storage has a sixth part, the view of older days."""
    n = len(KEYS.get(key, b"")) // 4 if held is None else held
    place = persistent(("storage", glob("torch", "FloatStorage"), key, "cpu", n, view))
    return tensor(shape, storage=place, **named)  # type: ignore[arg-type]


def value(weight: object = None) -> dict[str, object]:
    state = {"step": kept("95", ()), "exp_avg": kept("96", SHAPE), "exp_avg_sq": kept("97", SHAPE)}
    optim = {"state": {0: state}, "param_groups": [{**GROUP, "params": [0]}]}
    return {"model": {"w": kept("94", SHAPE) if weight is None else weight}, "optim": optim}


def parts() -> dict[str, bytes]:
    """The parts of a whole file, in order."""
    out = {
        "magic": pickled(MAGIC),
        "protocol": pickled(1001),
        "system": pickled(SYSTEM),
        "object": pickled(value()),
        "keys": pickled(sorted(KEYS)),
    }
    for key, data in KEYS.items():
        out["count " + key], out["data " + key] = le(8, len(data) // 4), data
    return out


def made(change: Callable[[dict[str, bytes]], object]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        told = parts()
        change(told)
        return put(folder, b"".join(told.values()))

    return make


def part(name: str, data: bytes) -> Callable[[Path], Path]:
    return made(lambda told: told.__setitem__(name, data))


KIND = "magic|not a|unknown|recogni|legacy|pickle|torch.save|zip|checkpoint"
COUNT = "storage|elements|numbers|count|bytes|beyond|end|cut|says|short|negative"
add("legacy.sound", made(lambda told: None), FINE, torch=True)
add(
    "legacy.count_32_gib",
    part("count 94", le(8, 1 << 33)),
    BAD,
    COUNT,
    torch=None,
    about="torch allocates 32 GiB before it reads.",
)
for name, where, lie, what, torch in (
    ("count_2_62", "count 94", le(8, 1 << 62), COUNT, None),
    ("count_negative", "count 94", le(8, -1), COUNT, None),
    ("count_less", "count 94", le(8, 31), COUNT, None),
    ("object_says_more", "object", pickled(value(kept("94", SHAPE, held=64))), COUNT, None),
    ("tensor_beyond", "object", pickled(value(kept("94", (4, 9)))), COUNT + "|reach", False),
    (
        "tensor_offset_negative",
        "object",
        pickled(value(kept("94", SHAPE, offset=-8))),
        COUNT + "|offset|natural|reach",
        False,
    ),
    ("magic", "magic", pickled(MAGIC + 1), KIND, False),
    ("magic_is_text", "magic", pickled("magic"), KIND, False),
    ("magic_runs_code", "magic", pickled(live()), KIND + "|posix", False),
    ("system_runs_code", "system", pickled({"x": live()}), r"posix\W+system", False),
    ("object_runs_code", "object", pickled({**value(), "x": live()}), r"posix\W+system", False),
    ("keys_run_code", "keys", pickled([*sorted(KEYS), live()]), r"posix\W+system", False),
    ("protocol_1002", "protocol", pickled(1002), "protocol|version|1002", False),
    ("big_endian", "system", pickled({**SYSTEM, "little_endian": False}), "endian", None),
    ("system_is_a_list", "system", pickled([]), "system|dict|expect|legacy", None),
    ("key_missing", "keys", pickled(sorted(KEYS)[1:]), "key|storage|missing|behind|bytes", None),
    ("key_unknown", "keys", pickled([*sorted(KEYS), "99"]), "key|storage|99|end|cut", None),
    ("key_twice", "keys", pickled(["94", "94", "96", "97"]), "key|storage|twice|missing", None),
    ("keys_are_numbers", "keys", pickled([94, 95, 96, 97]), "key|storage|text", None),
    ("keys_are_a_dict", "keys", pickled(dict.fromkeys(KEYS)), "key|list|expect", None),
    (
        "keys_of_a_million",
        "keys",
        P2 + b"](" + b"X\1\0\0\0a" * 300_000 + b"e.",
        "key|storage|twice|end|cut|limit",
        None,
    ),
    (
        "view_beyond",
        "object",
        pickled(value(kept("94", SHAPE, view=("view", 1 << 40, 1 << 40)))),
        COUNT + "|view",
        None,
    ),
    ("deep_list", "object", P2 + b"]" * 1_000_000 + b"a" * 999_999 + b".", "deep|nest|limit", None),
    (
        "trailing_junk",
        "data 97",
        KEYS["97"] + b"junk",
        "behind|trailing|after|bytes|follow|end",
        True,
    ),
):
    add(f"legacy.{name}", part(where, lie), BAD, what, torch=torch)
add(
    "legacy.count_of_both_32_gib",
    made(
        lambda told: told.update(
            {"count 94": le(8, 1 << 33), "object": pickled(value(kept("94", SHAPE, held=1 << 33)))}
        )
    ),
    BAD,
    COUNT,
    torch=None,
)
add("legacy.nan_in_exp_avg", part("data 96", b"\0\0\xc0\x7f" * 32), VALUES, "exp_avg", torch=True)
for name in ("protocol", "object", "keys", "count 94", "data 94", "data 97"):

    def cut(told: dict[str, bytes], name: str = name) -> None:
        names = list(told)
        for later in names[names.index(name) + 1 :]:
            del told[later]
        told[name] = told[name][: len(told[name]) // 2]

    add(
        "legacy.cut_in_" + name.replace(" ", "_"),
        made(cut),
        BAD,
        "cut|end|trunc|short|pickle|beyond",
        torch=False,
    )


@case("legacy.tar", BAD, KIND + "|tar", torch=False)
def tar(folder: Path) -> Path:
    """The oldest files were tar archives; nobody should read them today."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as t:
        for name, data in (
            ("sys_info", pickled(SYSTEM)),
            ("pickle", pickled({})),
            ("storages", pickled(0)),
            ("tensors", pickled(0)),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            t.addfile(info, io.BytesIO(data))
    return put(folder, out.getvalue())


for name, data in (
    ("empty", b""),
    ("text", b"hello\n" * 100),
    ("zeros", bytes(4096)),
    ("elf", b"\x7fELF" + bytes(200)),
    ("gzip", b"\x1f\x8b\x08" + bytes(100)),
    ("pickle_alone", pickled({"a": 1})),
    ("live_pickle_alone", pickled(live())),
    ("protocol_0", b"cposix\nsystem\n(S'touch hostile-executed'\ntR."),
):
    add(
        "legacy.not_one_" + name,
        lambda folder, data=data: put(folder, data),
        BAD,
        KIND + "|empty|posix|opcode|short|safetensors",
        torch=False,
    )
