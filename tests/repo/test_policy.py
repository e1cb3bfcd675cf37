"""What is decided about a parameter is decided in csrc/policy, for Python,
for lowbit-ckpt and for the C++ front end.
"""

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import zlib

import pytest
import torch

import lowbit
from lowbit.config.overrides import clean_name
from lowbit.state import layout
from tests.support.paths import ROOT
from tests.support.peers.files import TOOL, need_tool
from tests.support.require import need

pytestmark = pytest.mark.long

BUILD = ROOT / "build" / "lowbit"
ROOM = ROOT / "csrc" / "policy"
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
NAMES = [
    "weight",
    "module.weight",
    "module.module.weight",
    "layers.0.module.weight",
    "_orig_mod.module.a.weight",
    "a._fsdp_wrapped_module.b._checkpoint_wrapped_module.weight",
    "submodule.weight",
    "my_module.weight",
    "a-module.weight",
    "module",
    "module.",
    "5module.weight",
    "ünï.module.weight",
    "ümodule.weight",
    "a..module.weight",
]
# Name, state format and shape: each of one decision, so that a change of it shows.
CASES = [
    ("module.body.weight", "8bit", (64, 64)),
    ("wrapped.body.weight", "8bit", (64, 64)),
    ("body.weight", "8bit", (40, 40)),
    ("body.weight", "8bit", (1000, 6)),
    ("body.weight", "7bit", (64, 64)),
    ("body.weight", "8bit", (5000,)),
]


# Where it is written


def parts(text, suffix):
    """The text without comments."""
    if suffix == ".py":
        text = re.sub(r'"""(.|\n)*?"""', "", text)
        return re.sub(r"(?m)(^|\s)#.*$", "", text)
    return re.sub(r"(?m)//.*$", "", text)


# What is decided, as code would write it again; the files that may,
# and an offence for the test of the test.
WRITTEN = {
    "presets": (
        r"""["'](lpmm4|muon4|factored[48]|fp8_e5m2|[23567]bit)["']""",
        {
            "csrc/policy/presets.cpp",
            # Type checkers take no names from the catalog;
            # tests/optim/test_help.py holds these to it.
            "lowbit/config/types.py",
        },
        'if name == "factored4": return',
    ),
    "thresholds": (
        r"(?i)\bk?_?min_?(numel|cols|dims)\b[^=\n]{0,20}[={] *[1-9]",
        {"csrc/policy/thresholds.h"},
        "MIN_NUMEL = 100",
    ),
    "4096": (
        r"\b4096\b",
        {
            "csrc/policy/thresholds.h",
            # Sizes of buffers and of runs.
            "csrc/ops/lowrank.cpp",
            "lowbit/gradients/clip.py",
            "lowbit/step/lowrank.py",
            "tools/container/document/document.cpp",
            "tools/container/manifest/tensor_reader.cpp",
            "tools/container/manifest/tiling.cpp",
            "tools/container/dcp/verified_reader.cpp",
            "tools/container/deepspeed/writer.cpp",
            "tools/container/safetensors/writer.cpp",
            "tools/container/torch/writer.cpp",
            "tools/dialect/flashoptim/reader.cpp",
            "tools/pickle/scan.cpp",
            "tools/pipeline/value_stats.cpp",
            # What other optimizers decide.
            "lowbit/config/qconfig.py",
            "lowbit/planning/libraries.py",
            "tools/dialect/adafactor8bit/writer.cpp",
            "tools/dialect/bitsandbytes/bitsandbytes.h",
            "tools/dialect/bitsandbytes/reader.cpp",
            "tools/dialect/lpmm/config.cpp",
            "tools/dialect/lpmm/writer.cpp",
            "tools/dialect/torchao/kind.h",
        },
        "if (numel < 4096) return;",
    ),
    "wrapper prefixes": (
        r"_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod\\?\."
        r"""|["'(|]module\\?\.["'|)]""",
        {"csrc/policy/names.cpp"},
        'name.removeprefix("module.")',
    ),
}


def written(root, pattern, allowed):
    return [
        f"{path.relative_to(root)}: {match.group(0)}"
        for room in ("csrc", "lowbit", "tools")
        for path in sorted((root / room).rglob("*"))
        if path.suffix in (".py", ".cpp", ".h", ".cuh", ".cu", ".inl", ".cc")
        and str(path.relative_to(root)) not in allowed
        for match in re.finditer(pattern, parts(path.read_text(), path.suffix))
    ]


@pytest.mark.parametrize("what", WRITTEN)
def test_it_stands_in_one_place(what, tmp_path):
    pattern, allowed, offence = WRITTEN[what]
    assert written(ROOT, pattern, allowed) == []
    for place in allowed:
        text = parts((ROOT / place).read_text(), pathlib.Path(place).suffix)
        assert re.search(pattern, text), f"{place} is out of date"
    for place in ("lowbit/state/x.py", "csrc/cpu/x.h", "tools/dialect/lowbit/x.cpp"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(offence + "\n")
    assert len(written(tmp_path, pattern, allowed)) == 3, "the rule does not see planted offences"


# What the three say


def run(*command, **options):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    assert done.returncode == 0, (command, (done.stdout + done.stderr)[-4000:])
    return done.stdout


def decided_in_python(name, state_format, shape):
    p = torch.nn.Parameter(torch.ones(shape))
    opt = lowbit.AdamW([(name, p)], state_format=state_format)
    p.grad = torch.ones(shape)
    opt.step()
    return said(opt.state[p])


def said(state):
    """The stream in a state, and the keys of its tensors."""
    keys = sorted(set(state) - {"step", "stream", "shape"})
    return [int(state["stream"]), *keys]


def decided_by_front(program, name, state_format, shape):
    stream, *keys = run(program, name, state_format, *shape).split()
    return [int(stream), *sorted(keys)]


def decided_by_tool(tool, folder, name, state_format, shape):
    p = torch.nn.Parameter(torch.ones(shape))
    opt = torch.optim.AdamW([(name, p)])
    p.grad = torch.ones(shape)
    opt.step()
    torch.save({"optimizer": opt.state_dict(), "model": {name: p.detach()}}, folder / "torch.pt")
    (folder / "lowbit.pt").unlink(missing_ok=True)
    run(
        tool,
        "convert",
        folder / "torch.pt",
        folder / "lowbit.pt",
        "--to",
        "lowbit",
        "--state-format",
        state_format,
    )
    (state,) = torch.load(folder / "lowbit.pt", weights_only=True)["optimizer"]["state"].values()
    return said(state)


def front(folder, archive):
    """The program of the C++ front end, linked with that library."""
    csrc = ROOT / "csrc"
    program = folder / "front"
    run(
        COMPILER,
        "-std=c++20",
        f"-I{csrc / 'libtorch'}",
        f"-I{csrc}",
        ROOT / "tests" / "cpp" / "front" / "policy.cpp",
        csrc / "libtorch" / "param_state.cpp",
        archive,
        "-pthread",
        "-o",
        program,
    )
    return program


@pytest.fixture(scope="module")
def built():
    need_tool()
    there = COMPILER is not None and (BUILD / "liblowbit_cpu.a").exists()
    need("cpp", there, "there is no compiler, or no build folder to link from: run make setup")


@pytest.fixture(scope="module")
def program(built, tmp_path_factory):
    return front(tmp_path_factory.mktemp("front"), BUILD / "liblowbit_cpu.a")


@pytest.mark.parametrize("name", NAMES)
def test_a_wrapped_parameter_has_the_same_stream_everywhere(name, program):
    stream = layout.stream_of(name, 7)
    assert stream == zlib.crc32(clean_name(name).encode())
    assert decided_by_front(program, name, "8bit", (2, 2))[0] == stream


def test_wrappers_leave_no_trace_in_a_name():
    assert {clean_name(f"{w}a.{w}weight") for w in lowbit.catalog()["wrapper_prefixes"]} == {
        "a.weight"
    }
    assert clean_name("submodule.weight") == "submodule.weight"


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case)))
def test_the_three_decide_alike(case, program, tmp_path):
    expected = decided_in_python(*case)
    assert decided_by_front(program, *case) == expected
    assert decided_by_tool(TOOL, tmp_path, *case) == expected


# A change of the room, which all three follow

CHANGES = {
    "presets.cpp": [
        ('{"8bit", {"dynamic8"}, {"dynamic8_unsigned"}}', '{"8bit", {"linear8"}, {"log8"}}')
    ],
    "thresholds.h": [("kMinNumel = 4096", "kMinNumel = 1500"), ("kMinCols = 16", "kMinCols = 5")],
    "names.cpp": [('"module."', '"wrapped."')],
}
PROBE = """
import json, sys
sys.meta_path = [f for f in sys.meta_path if type(f).__name__ != "ScikitBuildRedirectingFinder"]
sys.path.insert(0, sys.argv[1])
import lowbit
from tests.repo import test_policy
assert lowbit.__file__.startswith(sys.argv[1]), lowbit.__file__
print(json.dumps([test_policy.decided_in_python(*case) for case in test_policy.CASES]))
"""


def command_for(source):
    """The arguments that compile a file of the room, without those for its object."""
    for entry in json.loads((BUILD / "compile_commands.json").read_text()):
        if pathlib.Path(entry["file"]) == source:
            words = shlex.split(entry["command"])
            at = words.index("-o")
            kept = words[:at] + words[at + 2 :]
            return [w for w in kept if w != "-c" and not w.endswith(source.name)]
    raise AssertionError(f"{source} is not compiled")


def linked_again(target, archive, output):
    """Links a target of the build folder as it was linked, but with another library for the CPU."""
    ninja = shutil.which("ninja", path=str(pathlib.Path(sys.executable).parent)) or "ninja"
    last = run(ninja, "-C", BUILD, "-t", "commands", target)
    line = next(
        part.strip()
        for part in " && ".join(last.splitlines()).split(" && ")
        if f"-o {target} " in part and "liblowbit_cpu.a" in part
    )
    line = line.replace(f"-o {target} ", f"-o {output} ")
    words = [str(archive) if w.endswith("liblowbit_cpu.a") else w for w in shlex.split(line)]
    run(*words, cwd=BUILD)
    return output


@pytest.fixture(scope="module")
def planted(built, tmp_path_factory):
    """The room, changed and compiled again, and the library, the operators,
    the tool and the front end linked with it.
    """
    folder = tmp_path_factory.mktemp("planted")
    room = folder / "csrc" / "policy"
    shutil.copytree(ROOM, room)
    for name, changes in CHANGES.items():
        text = (room / name).read_text()
        for before, after in changes:
            assert text.count(before) == 1, f"{name} does not say {before!r} once"
            text = text.replace(before, after)
        (room / name).write_text(text)
    archive = shutil.copy(BUILD / "liblowbit_cpu.a", folder)
    for source in sorted(room.glob("*.cpp")):
        command = [*command_for(ROOM / source.name), "-iquote", room.parent]
        run(*command, "-c", source, "-o", f"{source}.o", cwd=BUILD)
        run("ar", "r", archive, f"{source}.o")
    package = folder / "package" / "lowbit"
    shutil.copytree(ROOT / "lowbit", package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    linked_again("csrc/_ops.so", archive, package / "_ops.so")
    tool = linked_again("tools/lowbit-ckpt", archive, folder / "lowbit-ckpt")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    python = json.loads(run(sys.executable, "-c", PROBE, package.parent, env=environment))
    return python, front(folder, archive), tool


@pytest.mark.parametrize("at", range(len(CASES)), ids=lambda at: " ".join(map(str, CASES[at])))
def test_all_follow_a_change_of_the_room(at, planted, program, tmp_path):
    python, changed, tool = planted
    case = CASES[at]
    assert decided_by_front(changed, *case) == python[at]
    assert decided_by_tool(tool, tmp_path, *case) == python[at]
    moved = python[at] != decided_by_front(program, *case)
    assert moved == (at < 4), "each of the first four cases shows one of the changes"
