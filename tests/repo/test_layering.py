"""The rooms of the house (docs/design.md) as rules about what a file may include, import and
contain. Each rule also catches planted offences.
"""

import ast
import itertools
import pathlib
import re

import pytest

from tests.support.paths import ROOT

CODE = (".py", ".h", ".cpp", ".cc", ".cu", ".cuh", ".inl")
SKIPPED = {
    ".venv",
    "build",
    "out",
    ".git",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    ".hypothesis",
    "__pycache__",
}
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.M)

# The floors of each tree, lowest first. A room may use itself and the rooms of lower floors. "*" is
# any folder that no other floor names.
FLOORS = {
    "lowbit": [
        ("ops",),
        ("config",),
        ("sharding",),
        ("state",),
        ("step",),
        ("optim",),
        ("gradients",),
        ("checkpoint",),
        ("flat",),
        ("compat", "elastic", "fsdp1", "planning"),
        ("__init__",),
        ("environment",),
        ("integrations", "__main__"),
    ],
    "csrc": [("core",), ("catalog",), ("policy",), ("cpu", "cuda"), ("ops", "libtorch", "python")],
    "tools": [
        ("io",),
        ("pickle",),
        ("container/manifest", "container/zip"),
        ("container/pickled",),
        ("container/document",),
        ("container/common",),
        ("container/*",),
        ("dialect/model",),
        ("dialect/numbers",),
        ("dialect/megatron_view",),
        ("dialect/tree",),
        ("dialect/requantize",),
        ("dialect/common",),
        ("dialect/*",),
        ("pipeline",),
        ("command", "python", "fuzz"),
        ("lowbit_ckpt",),
    ],
    "bench": [
        ("__init__",),
        ("measuring", "contestants", "pages"),
        ("speed",),
        ("storage", "gpu", "quality"),
        ("__main__",),
    ],
}
PYTHON = ("lowbit", "bench")
# modules of C++ inside the package
COMPILED = ("lowbit._ops", "lowbit._tensors", "lowbit._checkpoint")
# -I of the compiler
INCLUDED_FROM = {"csrc": ("csrc", "csrc/libtorch"), "tools": ("tools", "csrc")}

TORCH = r"(torch|ATen|c10|Python)"
KERNELS = r"(core/|policy/|cpu/|cuda/|catalog)"
# (name, folders, what may not be included there, an offence)
INCLUDES = [
    (
        "core uses itself, cstdint and intrinsics",
        ["csrc/core"],
        r"(?!core/|cstdint$|immintrin\.h$|cstring$)",
        "#include <vector>",
    ),
    (
        "below the operators nothing knows torch or Python",
        ["csrc/core", "csrc/catalog", "csrc/policy", "csrc/cpu", "csrc/cuda"],
        TORCH,
        "#include <ATen/cuda/CUDAContext.h>",
    ),
    (
        "the operators keep to torch's stable ABI",
        ["csrc/ops"],
        r"(ATen|c10|Python|torch/(?!csrc/stable|headeronly))",
        "#include <torch/all.h>",
    ),
    (
        "the front end's headers know the kernels by their own header",
        ["csrc/libtorch/lowbit"],
        KERNELS + r"|ops/",
        '#include "cpu/step.h"',
    ),
    ("tools know no torch", ["tools"], r"(torch|ATen|c10)/", "#include <torch/all.h>"),
    (
        "only tools/python knows Python",
        [
            "tools/io",
            "tools/pickle",
            "tools/container",
            "tools/dialect",
            "tools/pipeline",
            "tools/command",
            "tools/fuzz",
            "tools/lowbit_ckpt.cc",
        ],
        r"Python",
        "#include <Python.h>",
    ),
    (
        "only dialects know what numbers mean",
        [
            "tools/io",
            "tools/pickle",
            "tools/container",
            "tools/pipeline",
            "tools/command",
            "tools/python",
            "tools/fuzz",
        ],
        r"(core/|cpu/|cuda/|catalog)",
        '#include "core/registry.h"',
    ),
    (
        "what reads files knows nothing of what writes them",
        ["tools/io/read"],
        r"io/write/",
        '#include "io/write/output.h"',
    ),
    (
        "pipeline does not know commands, nor prints",
        ["tools/pipeline"],
        r"(command/|CLI/|iostream|unistd)",
        "#include <CLI/CLI.hpp>",
    ),
]
# (name, folders, what may not be written there, an offence, files and folders that may)
TEXTS = [
    (
        "only lowbit/ops touches torch.ops",
        ["lowbit"],
        r"torch\.ops\b(?!`)",
        "torch.ops.lowbit.step()",
        ["lowbit/ops"],
    ),
    (
        "operators and their threads keep the floating-point environment",
        ["csrc/ops"],
        r"TORCH_BOX\(|stable::parallel_for",
        'm.impl("step", TORCH_BOX(&lowbit::step));',
        ["csrc/ops/ops.h"],
    ),
    (
        "only lowbit/sharding and the storage of checkpoints know torch.distributed",
        ["lowbit"],
        r"import .*torch\.distributed|from torch\.distributed",
        "import torch.distributed",
        ["lowbit/sharding", "lowbit/checkpoint/storage"],
    ),
    (
        "only lowbit/sharding knows DTensor",
        ["lowbit"],
        r"\bDTensor\(|isinstance\(.*DTensor",
        "isinstance(p, DTensor)",
        ["lowbit/sharding"],
    ),
    (
        "lowbit/sharding knows nothing of lowbit but itself",
        ["lowbit/sharding"],
        r"(from|import) lowbit(?!\.shard)",
        "from lowbit import layout",
        [],
    ),
    (
        "an optimizer's private members are its own class's",
        ["lowbit"],
        r"\b(opt|optimizer)\._(?!optimizer_)[a-z]",
        "opt._update()",
        [],
    ),
    (
        "the library imports no test, bench or recipe",
        ["lowbit"],
        r"^\s*(from|import) (tests|bench|recipes)",
        "import bench",
        [],
    ),
    ("the library does not print", ["lowbit"], r"^\s*print\(", "print(1)", []),
    (
        "lowbit/__init__.py holds the public names and nothing else",
        ["lowbit/__init__.py"],
        r"^(def|class|if|for|try|with) ",
        "def helper(): pass",
        [],
    ),
    (
        "only io opens files",
        ["tools"],
        r"(?<!\w)::open(at)?\(|\bfopen\(|ifstream",
        "::open(path)",
        ["tools/io"],
    ),
    (
        "only commands print",
        ["tools"],
        r"\bprintf\(|std::cout|fmt::print",
        "fmt::print(x)",
        ["tools/command", "tools/fuzz", "tools/lowbit_ckpt.cc"],
    ),
    (
        "core allocates and throws nothing",
        ["csrc/core"],
        r"^(?:[^/\n]|/(?!/))*\bnew \w|\bmalloc\(|\bthrow\b|std::vector",
        "return new T;",
        [],
    ),
    (
        "no file names a machine's paths",
        ["."],
        r"/(home|root|work)/",
        "/home/me/x",
        ["tests/repo/test_layering.py"],
    ),
]
# Folders whose files of code may have so many lines; the longest path that fits counts.
LINES = {"lowbit": 420, "csrc": 500, "tools": 500, "bench": 500, "recipes": 500}
FUNCTION = 60  # lines of code of a function in Python, without docstring, blank lines and comments


# Files


def within(path: str, folders) -> bool:
    return any(folder in (".", path) or path.startswith(folder + "/") for folder in folders)


def files(root, folders, suffixes=CODE):
    """The paths below `root` of the files of code in some folders, as text."""
    found = {
        path
        for folder in folders
        for path in ([root / folder] if (root / folder).is_file() else (root / folder).rglob("*"))
        if path.suffix in suffixes and path.is_file()
    }
    relative = (path.relative_to(root) for path in found)
    return sorted(str(path) for path in relative if not SKIPPED & set(path.parts))


# What uses what


def used_by_python(root, path, tree):
    """The modules of its tree that a module imports, whichever way and wherever in it, as paths."""

    def module(name):
        """The file of a dotted name; None where it names something inside a module."""
        at = name.replace(".", "/")
        return next((f for f in (f"{at}.py", f"{at}/__init__.py") if (root / f).is_file()), None)

    for node in ast.walk(ast.parse((root / path).read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parent = path.split("/")[: -node.level] if node.level else []
            base = ".".join([*parent, *([node.module] if node.module else [])])
            inside = [f"{base}.{alias.name}" for alias in node.names]
            names = [name if module(name) or name in COMPILED else base for name in inside]
        else:
            continue
        for name in names:
            if name.split(".")[0] == tree and (found := module(name)) and found != path:
                yield found


def used_by_cpp(root, path, tree):
    """The files of the repository that a file includes."""
    for name in INCLUDE.findall((root / path).read_text()):
        here = str(pathlib.PurePosixPath(path).parent)
        for folder in (here, *INCLUDED_FROM[tree]):
            if (root / folder / name).is_file():
                yield f"{folder}/{name}"
                break


def uses(root, tree):
    """For each file of code of a tree the files that it uses."""
    suffixes, of = ((".py",), used_by_python) if tree in PYTHON else (CODE[1:], used_by_cpp)
    return {path: set(of(root, path, tree)) for path in files(root, [tree], suffixes)}


# Floors


def room_and_floor(tree, path):
    """The room that a file is in, and the number of its floor."""
    inside = path.removeprefix(tree + "/").rsplit(".", 1)[0]
    folder = inside.rsplit("/", 1)[0] if "/" in inside else inside
    for number, floor in enumerate(FLOORS[tree]):
        for room in floor:
            if folder == room or folder.startswith(room + "/"):
                return room, number
    for number, floor in enumerate(FLOORS[tree]):
        for room in floor:
            if room.endswith("/*") and folder.startswith(room[:-1]):
                return folder, number
    raise AssertionError(f"{path} is in no room of {tree}: name its floor in FLOORS")


def upward(root, tree):
    """What uses another room of its own floor or of a higher one."""
    found = []
    for path, several in uses(root, tree).items():
        room, floor = room_and_floor(tree, path)
        for used in sorted(several):
            if not used.startswith(tree + "/"):
                continue  # of csrc in tools: INCLUDES
            its_room, its_floor = room_and_floor(tree, used)
            if its_room != room and its_floor >= floor:
                found.append(f"{path} uses {used}")
    return found


def one_file(tree, room):
    """A path of a file in a room."""
    room = room.replace("*", "some")
    if tree in PYTHON:
        alone = room in ("elastic", "flat", "fsdp1", "__init__", "__main__")
        return f"{tree}/{room}.py" if alone else f"{tree}/{room}/some.py"
    return f"{tree}/{room}/some.h"


def plant(root, path, used):
    """Writes a file that uses another one."""
    for each in (path, used):
        (root / each).parent.mkdir(parents=True, exist_ok=True)
        (root / each).touch()
    if path.endswith(".py"):
        name = used.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        line = f"from {name} import x" if name in PYTHON else f"def f():\n    import {name}"
    else:
        line = f'#include "{used.split("/", 1)[1]}"'
    with open(root / path, "a") as file:
        file.write(line + "\n")


PAIRS = [
    (tree, low, high)
    for tree, floors in FLOORS.items()
    for i, floor in enumerate(floors)
    for low in floor
    for other in floors[i : i + 2]
    for high in other
    if high != low
]


@pytest.mark.parametrize("tree", FLOORS)
def test_low_floors_do_not_use_high_ones(tree):
    assert uses(ROOT, tree), f"{tree} has no files: the rule is out of date"
    assert upward(ROOT, tree) == []


@pytest.mark.parametrize("tree, low, high", PAIRS, ids=lambda x: x)
def test_planted_upward_uses_are_seen(tree, low, high, tmp_path):
    path, used = one_file(tree, low), one_file(tree, high)
    plant(tmp_path, used, path)
    if low not in next(floor for floor in FLOORS[tree] if high in floor):
        assert upward(tmp_path, tree) == []
    (tmp_path / used).write_text("")
    plant(tmp_path, path, used)
    assert upward(tmp_path, tree) == [f"{path} uses {used}"]


def test_folders_of_one_kind_do_not_use_each_other(tmp_path):
    plant(tmp_path, "tools/dialect/one/a.cpp", "tools/dialect/two/b.h")
    assert upward(tmp_path, "tools") == ["tools/dialect/one/a.cpp uses tools/dialect/two/b.h"]


@pytest.mark.parametrize(
    "line",
    [
        "from lowbit.optim.rules import lion",
        "from lowbit.optim.rules.lion import Lion",
        "import lowbit.optim.rules.lion as lion",
        "from ..optim.rules.lion import Lion",
        "if TYPE_CHECKING:\n    from lowbit.optim.rules.lion import Lion",
        "def f():\n    from lowbit.optim.rules.lion import Lion",
    ],
)
def test_imports_are_seen_in_every_form(line, tmp_path):
    plant(tmp_path, "lowbit/state/some.py", "lowbit/optim/rules/lion.py")
    (tmp_path / "lowbit/state/some.py").write_text(line + "\n")
    assert upward(tmp_path, "lowbit") == ["lowbit/state/some.py uses lowbit/optim/rules/lion.py"]


# Circles


def circles(graph):
    """The strongly connected components of more than one file."""
    number, least, stack, found = {}, {}, [], []

    def visit(path):
        number[path] = least[path] = len(number)
        stack.append(path)
        for used in sorted(graph.get(path, ())):
            if used not in number:
                visit(used)
                least[path] = min(least[path], least[used])
            elif used in stack:
                least[path] = min(least[path], number[used])
        if least[path] == number[path]:
            at = stack.index(path)
            found.append(sorted(stack[at:]))
            del stack[at:]

    for path in graph:
        if path not in number:
            visit(path)
    return [some for some in found if len(some) > 1]


@pytest.mark.parametrize("tree", FLOORS)
def test_no_circles(tree, tmp_path):
    assert circles(uses(ROOT, tree)) == []
    suffix = "py" if tree in PYTHON else "h"
    rooms = {"csrc": "core/state", "tools": "dialect/common", "lowbit": "state", "bench": "speed"}
    room = rooms[tree]
    loop = [f"{tree}/{room}/{name}.{suffix}" for name in "abc"]
    for path, used in itertools.pairwise(loop):
        plant(tmp_path, path, used)
    assert circles(uses(tmp_path, tree)) == []
    plant(tmp_path, loop[2], loop[0])
    assert circles(uses(tmp_path, tree)) == [loop]


# Includes, texts and lengths


def included(root, folders, offence):
    return [
        f"{path}: {name}"
        for path in files(root, folders, CODE[1:])
        for name in INCLUDE.findall((root / path).read_text())
        if re.match(offence, name)
    ]


def written(root, folders, offence, allowed):
    return [
        f"{path}: {match.group(0)}"
        for path in files(root, folders, (*CODE, ".md", ".toml", ".txt", ".json", ".yml", ".cmake"))
        if not within(path, allowed)
        for match in re.finditer(offence, (root / path).read_text(), re.M)
    ]


def planted(root, folder, suffix, text):
    path = root / folder if folder.endswith(suffix) else root / folder / "room" / f"some{suffix}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.mark.parametrize("name, folders, offence, example", INCLUDES, ids=[r[0] for r in INCLUDES])
def test_includes(name, folders, offence, example, tmp_path):
    assert files(ROOT, folders), f"{folders} have no files: the rule is out of date"
    assert included(ROOT, folders, offence) == []
    for folder in folders:
        planted(tmp_path / folder, folder, ".h", example)
        assert included(tmp_path / folder, [folder], offence), "it does not see an offence"


@pytest.mark.parametrize(
    "name, folders, offence, example, allowed", TEXTS, ids=[r[0] for r in TEXTS]
)
def test_texts(name, folders, offence, example, allowed, tmp_path):
    assert files(ROOT, folders), f"{folders} have no files: the rule is out of date"
    assert all((ROOT / path).exists() for path in allowed)
    assert written(ROOT, folders, offence, allowed) == []
    suffix = ".h" if folders[0].split("/")[0] in ("csrc", "tools") else ".py"
    planted(tmp_path, folders[0], suffix, example)
    assert written(tmp_path, folders, offence, allowed), "it does not see an offence"


def too_long(root):
    return [
        f"{path}: {lines} lines"
        for folder, most in LINES.items()
        for path in files(root, [folder])
        if (lines := (root / path).read_text().count("\n")) > most
    ]


def test_no_file_is_too_long(tmp_path):
    assert too_long(ROOT) == []
    for folder, most in LINES.items():
        planted(tmp_path / folder, folder, ".py", "\n" * (most - 1))
        assert too_long(tmp_path / folder) == []
        planted(tmp_path / folder, folder, ".py", "\n" * most)
        assert too_long(tmp_path / folder) == [f"{folder}/room/some.py: {most + 1} lines"]


def code_of(function, lines):
    """The lines of code of a function."""
    first = function.body[0]
    if ast.get_docstring(function) is None:
        said = range(0)
    else:
        said = range(first.lineno, first.end_lineno + 1)
    return [
        line
        for number, line in enumerate(
            lines[function.lineno - 1 : function.end_lineno], function.lineno
        )
        if number not in said and line.strip() and not line.strip().startswith("#")
    ]


def long_functions(root):
    found = {}
    for path in files(root, PYTHON, (".py",)):
        text = (root / path).read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = len(code_of(node, text.splitlines()))
                if count > FUNCTION:
                    found[f"{path}: {node.name}"] = count
    return found


def test_no_function_is_too_long(tmp_path):
    """A longer one has phases, and each has a name."""
    assert long_functions(ROOT) == {}
    head = 'def f():\n    """Two\n    lines."""\n\n    # A comment.\n'
    for folder in PYTHON:
        planted(tmp_path / folder, folder, ".py", head + "    pass\n" * (FUNCTION - 1))
        assert long_functions(tmp_path / folder) == {}
        planted(tmp_path / folder, folder, ".py", head + "    pass\n" * FUNCTION)
        assert list(long_functions(tmp_path / folder).values()) == [FUNCTION + 1]
