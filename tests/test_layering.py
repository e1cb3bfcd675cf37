"""The rooms of the house (docs/design.md) as rules about what a file may include or import. Each rule must also catch a planted offence."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.M)
TORCH = r"(torch|ATen|c10|pybind11|Python)"

# (name, files, what may not appear, an offence for the test of the test)
INCLUDES = [
    (
        "core uses itself, cstdint and intrinsics",
        "csrc/core/**/*.h",
        r"(?!core/|cstdint$|immintrin\.h$|cstring$)",
        "#include <vector>",
    ),
    (
        "cpu knows neither torch, Python nor the operators",
        "csrc/cpu/*",
        rf"({TORCH}|ops(_\w+)?\.h)",
        '#include "ops_plan.h"',
    ),
    (
        "cuda knows neither torch, Python nor the operators",
        "csrc/cuda/*",
        rf"({TORCH}|ops(_\w+)?\.h)",
        "#include <ATen/cuda/CUDAContext.h>",
    ),
    (
        "only files of operators include torch",
        "csrc/*.[ch]*",
        rf"{TORCH}",
        "#include <torch/csrc/stable/tensor.h>",
    ),
    (
        "the front end in C++ knows the kernels by one header without torch",
        "cpp/**/*.h",
        r"(core/|cpu/|cuda/|catalog\.h|job\.h|ops(_\w+)?\.h)",
        '#include "cpu/step.h"',
    ),
    (
        "tools know neither torch nor Python",
        "tools/**/*",
        TORCH,
        "#include <torch/all.h>",
    ),
    (
        "only dialects know what numbers mean",
        "tools/[!d]*/*",
        r"(core/|cpu/|cuda/|catalog\.h)",
        '#include "core/registry.h"',
    ),
    (
        "io uses nothing above it",
        "tools/io/*",
        r"(pickle|container|dialect|pipeline|command)/",
        '#include "pickle/value.h"',
    ),
    (
        "pickle uses nothing above it",
        "tools/pickle/*",
        r"(container|dialect|pipeline|command)/",
        '#include "container/zip.h"',
    ),
    (
        "container uses nothing above it",
        "tools/container/*",
        r"(dialect|pipeline|command)/",
        '#include "pipeline/commands.h"',
    ),
    (
        "dialects use nothing above them",
        "tools/dialect/*",
        r"(pipeline|command)/",
        '#include "pipeline/commands.h"',
    ),
    (
        "pipeline does not know commands, nor prints",
        "tools/pipeline/*",
        r"(command/|CLI/|iostream|unistd)",
        "#include <CLI/CLI.hpp>",
    ),
]
TEXTS = [
    ("only ops.py touches torch.ops", "lowbit/*.py", r"torch\.ops\b(?!`)", "torch.ops.lowbit.step()", {"ops.py"}),
    ("only lowbit/shard knows torch.distributed", "lowbit/*.py", r"import .*torch\.distributed|from torch\.distributed", "import torch.distributed", set()),
    ("only lowbit/shard knows DTensor", "lowbit/*.py", r"\bDTensor\(|isinstance\(.*DTensor", "isinstance(p, DTensor)", set()),
    ("lowbit/shard knows nothing of lowbit but itself", "lowbit/shard/*.py", r"(from|import) lowbit(?!\.shard)", "from lowbit import layout", set()),
    ("the library imports no test, bench or recipe", "lowbit/*.py", r"^(from|import) (tests|bench|recipes)", "import bench", set()),
    ("the library does not print", "lowbit/*.py", r"^\s*print\(", "print(1)", set()),
    ("only io opens files", "tools/**/*.cpp", r"(?<!\w)::open(at)?\(|\bfopen\(|ifstream", "::open(path)", {"file.cpp", "output.cpp", "place.cpp"}),
    ("only commands print", "tools/[!cf]*/*.cpp", r"\bprintf\(|std::cout|fmt::print", "fmt::print(x)", set()),
    ("core allocates and throws nothing", "csrc/core/**/*.h", r"\bnew \w|\bmalloc\(|\bthrow\b|std::vector", "throw 1;", set()),
    ("no file names a machine's paths", "**/*.[pchm]*", r"/(home|root|work)/", "/home/me/x", {"test_layering.py"}),
]  # fmt: skip


def files(root, pattern):
    skip = {
        ".venv",
        "build",
        "out",
        ".git",
        ".mypy_cache",
        ".ruff_cache",
        ".pytest_cache",
        ".hypothesis",
    }
    return [
        p
        for p in root.glob(pattern)
        if p.is_file()
        and p.suffix not in (".png", ".npz", ".so")
        and not skip & set(p.relative_to(root).parts)
    ]


def included(root, pattern, offence):
    return [
        f"{path.relative_to(root)}: {name}"
        for path in files(root, pattern)
        if not re.fullmatch(
            r"ops(_\w+)?\.(cpp|h)|CMakeLists\.txt|coding\.cpp|master\.cpp", path.name
        )
        and path.parent.name != "python"  # the one module of the tools that knows Python
        for name in INCLUDE.findall(path.read_text())
        if re.match(offence, name)
        and not (path.parent.name == "csrc" and name in ("catalog.h", "job.h", "ops.h"))
    ]


def written(root, pattern, offence, allowed):
    return [
        f"{path.relative_to(root)}: {match.group(0)}"
        for path in files(root, pattern)
        if path.name not in allowed
        for match in re.finditer(offence, path.read_text(), re.M)
    ]


def place_for(root, pattern):
    """A file that the pattern covers, in an empty tree."""
    path = root / pattern.replace("**/*", "room/x").replace("*.[ch]*[!t]", "x.cpp").replace(
        "*.[pchm]*", "x.py"
    ).replace("room/x.[pchm]*", "x.py")
    path = pathlib.Path(str(path).replace("/*", "/x"))
    path = path if path.suffix and "[" not in path.suffix else path.with_suffix(".cpp")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


@pytest.mark.parametrize(
    "name, pattern, offence, example",
    INCLUDES,
    ids=lambda x: x if isinstance(x, str) and " " in x else "",
)
def test_includes(name, pattern, offence, example, tmp_path):
    assert files(ROOT, pattern), f"{pattern} covers nothing: the rule is out of date"
    assert included(ROOT, pattern, offence) == []
    place_for(tmp_path, pattern).write_text(example + "\n")
    assert included(tmp_path, pattern, offence), "the rule does not see a planted offence"


@pytest.mark.parametrize(
    "name, pattern, offence, example, allowed",
    TEXTS,
    ids=lambda x: x if isinstance(x, str) and " " in x else "",
)
def test_texts(name, pattern, offence, example, allowed, tmp_path):
    assert files(ROOT, pattern), f"{pattern} covers nothing: the rule is out of date"
    assert written(ROOT, pattern, offence, allowed) == []
    place_for(tmp_path, pattern).write_text(example + "\n")
    assert written(tmp_path, pattern, offence, set()), "the rule does not see a planted offence"


def test_readme_examples_run_and_names_exist(tmp_path, monkeypatch):
    text = (ROOT / "README.md").read_text()
    monkeypatch.chdir(tmp_path)
    scope = {}
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) >= 2
    for block in blocks:
        exec(compile(block, "README.md", "exec"), scope)
    assert scope["opt"].state
    for name in re.findall(r"`((?:docs|recipes|tests|bench)/[\w./]+)`|\]\((docs/[\w./]+)\)", text):
        assert (ROOT / (name[0] or name[1])).exists(), name
    makefile = (ROOT / "Makefile").read_text()
    for verb in re.findall(r"make (run|test|gpu|bench|lint)", text):
        assert f"\n{verb}:" in makefile
