"""The pages: every block of code runs, every name of the API is described, and the worked example
of the formats has lowbit's bytes.

pytest -s tests/repo/test_docs.py -k not_run        # prints which blocks are not run, and why
"""

import ast
import collections
import gc
import importlib.util
import pathlib
import re
import socket
import subprocess
import sys
import types

import pytest
import torch

import lowbit
from tests.support import pages
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

# Why a block may go without being run.
REASONS = (
    "builds",
    "downloads",
    "needs a GPU",
    "needs a folder of another program",
    "takes minutes",
    "the rest of the script",
)
NAMES = [str(path.relative_to(ROOT)) for path in pages.PAGES]
RUN = [
    name
    for name in NAMES
    if any(b.language in pages.RUN and not b.not_run for b in pages.blocks(ROOT / name))
]


@pytest.fixture
def one_rank(tmp_path, monkeypatch):
    """A page runs in a folder of its own, as torchrun's only rank."""
    monkeypatch.chdir(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rank = {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 1,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": 1,  # of what a page starts by torchrun
    }
    for name, value in rank.items():
        monkeypatch.setenv(name, str(value))
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.manual_seed(0)
    yield
    gc.collect()  # gloo aborts at exit if a sharded tensor outlives it
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    torch.set_rng_state(state)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", RUN)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.usefixtures("one_rank", "ckpt")
def test_every_block_of_a_page_runs(name, capsys, request):
    scope = {"__name__": "__main__"}
    request.addfinalizer(scope.clear)  # sharded tensors go before the process group does
    for block in pages.blocks(ROOT / name):
        if block.language not in pages.RUN or block.reason:
            continue
        if block.file:
            pathlib.Path(block.file).write_text(block.text)
            continue
        if block.language == "python":
            exec(block.code, scope)
            continue
        for command, shown in pages.commands(block):
            status, printed = pages.run(command)
            assert status in ((0, 4) if " diff " in command else (0,)), f"{command}\n{printed}"
            assert shown is None or pages.alike(shown, printed), (
                f"{block.page}:{block.line}: {command} printed\n{printed}"
            )
    if name == "README.md":
        assert scope["opt"].state
    if name == "docs/reference/optimizers.md":
        assert scope["opt"].state and "exp_avg_sq" in capsys.readouterr().out


# What is not run


def test_what_is_not_run_says_why():
    """And is still code: Python compiles, and bash parses."""
    found = collections.defaultdict(list)
    for name in NAMES:
        for block in pages.blocks(ROOT / name):
            if block.language not in pages.RUN or not block.reason:
                continue
            place = f"{block.page}:{block.line}"
            assert not block.not_run or block.not_run.startswith(REASONS), (
                f"{place}: {block.not_run}"
            )
            if block.language == "python":
                assert block.code
            else:
                typed = "\n".join(command for command, _ in pages.commands(block))
                subprocess.run(["bash", "-n"], input=typed, text=True, check=True, timeout=60)
            found[block.reason].append(place)
    every = [b for name in NAMES for b in pages.blocks(ROOT / name) if b.language in pages.RUN]
    print(f"\n{len(every)} blocks, of which {sum(map(len, found.values()))} are not run")
    for reason, places in sorted(found.items()):
        print(f"{len(places):4}  {reason}: {', '.join(places)}")
    python = [b for b in every if b.language == "python"]
    unrun = [b for b in python if b.not_run]
    assert len(unrun) <= 9, "most of the Python of the pages has to run"
    assert len(python) > 30


@pytest.mark.parametrize("name", NAMES)
def test_blocks_name_their_language(name):
    text = (ROOT / name).read_text()
    for block in pages.blocks(ROOT / name):
        assert block.language in pages.RUN + pages.SHOWN, f"{name}:{block.line}"
    assert pages.indented_code(text) == [], f"{name}: fence these lines, with their language"


@pytest.mark.parametrize("name", NAMES)
def test_lists_and_tables_look_the_same_on_github_and_on_the_site(name):
    """The site's Markdown wants an empty line before a list or a table,
    and four columns for a list inside a list.
    """
    plain = re.sub(r"^ *```.*?^ *```", "```", (ROOT / name).read_text(), flags=re.S | re.M)
    lines = plain.splitlines()
    for before, line in zip(["", *lines], lines, strict=False):
        item = re.match(r"( *)(?:[*]|\d+\.) ", line)
        if item:
            inside = re.match(r" *(?:[*]|\d+\.) |  ", before) or not before
            assert inside, f"{name}: an empty line is missing before {line!r}"
            assert len(item[1]) % 4 == 0, f"{name}: {line!r} is indented by {len(item[1])}"
        if line.startswith("|") and not before.startswith("|"):
            assert not before or before.startswith("<!--"), f"{name}: no empty line before {line!r}"


# The runner itself


def test_a_block_that_fails_is_seen(tmp_path, monkeypatch):
    text = (
        "# Page\n\n```python\nx = 1\nassert x == 2\n```\n\n<!-- not run: builds -->\n```bash\n"
        "make x\n```\n"
    )
    fails, marked = pages.blocks_of(text, "page.md")
    assert (fails.line, fails.reason, marked.reason) == (3, "", "builds")
    with pytest.raises(AssertionError) as raised:
        exec(fails.code, {})
    assert (str(raised.traceback[-1].path), raised.traceback[-1].lineno) == ("page.md", 4)
    (needs,) = pages.blocks_of("<!-- needs: re, no_such -->\n```python\n```\n", "page.md")
    assert needs.reason == "no_such not installed"
    (script,) = pages.blocks_of("<!-- file: a.py -->\n```python\nx = 1\n```\n", "page.md")
    assert (script.file, script.reason, script.text) == ("a.py", "", "x = 1\n")
    monkeypatch.chdir(tmp_path)
    assert pages.run("false")[0] == 1 and pages.run("echo a  # b") == (0, "a\n")
    with pytest.raises(AssertionError, match="does not end"):
        pages.blocks_of("```python\n", "page.md")
    assert pages.indented_code("text\n\n    make x\n") == ["    make x"]
    assert pages.indented_code("* item\n\n    more of it\n") == []


@pytest.mark.parametrize(
    "shown, printed, same",
    [
        ("a\nb\n", "a\nb\n", True),
        ("a\n...\n", "a\nb\nc\n", True),
        ("a\n...\nc\n", "a\nb\nc\n", True),
        ("...\nb\n", "a\nb\n", True),
        ("a\n...\nc\n", "a\nb\nd\n", False),
        ("a\n", "a\nb\n", False),
        ("b\n", "a\nb\n", False),
        ("error 1.56e-05, 3 of 4", "error 1.60e-05, 3 of 4", True),
        ("error 1.56e-05, 3 of 4", "error 2.56e-05, 3 of 4", False),
        ("error 1.56e-05, 3 of 4", "error 1.56e-05, 2 of 4", False),
        ("name  float32   [96]", "name   float32 [96]", True),
    ],
)
def test_output_is_compared(shown, printed, same):
    assert pages.alike(shown, printed) == same


# Numbers and names of the pages


def test_the_bytes_of_presets_are_those_of_the_optimizer():
    matrix = torch.nn.Linear(4096, 4096, bias=False, device="meta", dtype=torch.bfloat16)

    def state(optimizer="AdamW", **options):
        footprint = lowbit.estimate(matrix, optimizer, **options)["lowbit"]
        return f"{footprint.state[0] / 4096**2:.2f}"

    text = (ROOT / "docs" / "presets.md").read_text()
    rows = re.findall(r"^\| (.*`) \| .* \| .* \| (\d\.\d\d) \|$", text, re.M)
    listed = {name: shown for names, shown in rows for name in re.findall(r"`(\w+)`", names)}
    assert sorted(listed) == sorted(preset["name"] for preset in lowbit.catalog()["presets"])
    assert listed == {name: state(state_format=name) for name in listed}
    for names, shown in re.findall(r"^\| [^|`]* \| (`[^|]*`) \| ([\d., ]+) \| ", text, re.M):
        for name, number in zip(re.findall(r"`(\w+)`", names), shown.split(", "), strict=True):
            rank = {"rank": 128} if name == "APOLLO" else {}
            assert number == (listed[name] if name in listed else state(name, **rank)), name
    assert f"| `muon4`, with Muon | {state('Muon', state_format='muon4')} |" in text


MODULES = (
    "lowbit",
    "lowbit.checkpoint",
    "lowbit.elastic",
    "lowbit.flat",
    "lowbit.fsdp1",
    "lowbit.integrations.deepspeed",
    "lowbit.integrations.transformers",
    "lowbit.integrations.torchtitan",
    "lowbit.integrations.axolotl",
    "lowbit.integrations.nemo_automodel",
)
PUBLIC = {
    "lowbit.fsdp1": ["bind", "get_state_dict", "set_state_dict"],
    "lowbit.integrations.deepspeed": ["bind"],
    "lowbit.integrations.transformers": ["ScheduleFreeCallback", "from_optim_args", "optimizer"],
    "lowbit.integrations.torchtitan": ["LowbitOptimizers", "adamw"],
    "lowbit.integrations.axolotl": ["LowbitArgs", "LowbitPlugin"],
    "lowbit.integrations.nemo_automodel": ["LowbitConfig"],
}


def test_the_api_has_every_public_name():
    """Once each, in the pages of docs/api, with the objects that users get from them;
    and nothing else.
    """
    text = "".join(path.read_text() for path in sorted((ROOT / "docs" / "api").glob("*.md")))
    listed = re.findall(r"^::: (\S+)$", text, re.M)
    assert len(listed) == len(set(listed))
    wanted = set()
    for name in MODULES:
        public = PUBLIC.get(name) or importlib.import_module(name).__all__
        wanted |= {f"{name}.{each}" for each in public if each != "__version__"}
    wanted -= {name for name in wanted if name in MODULES}
    wanted |= {
        "lowbit.gradients.accumulator.Accumulator",
        "lowbit.gradients.exact.ExactAccumulator",
        "lowbit.gradients.reproducible.Reproducibility",
        "lowbit.gradients.step_in_backward.InBackward",
    }
    assert set(listed) == wanted


def test_the_page_of_formats_has_the_state_of_every_rule():
    text = (ROOT / "docs" / "definitions" / "formats.md").read_text()
    kept = {slot["name"] for rule in lowbit.ops.catalog()["rules"] for slot in rule["slots"]}
    assert not [name for name in sorted(kept) if f"`{name}`" not in text]


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"^ +- .*?([\w/-]+\.md)$", text, re.M)
    assert len(listed) == len(set(listed))
    root = {"changelog.md", "contributing.md", "security.md"}  # docs/site/hooks.py
    found = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert set(listed) == found | root


def test_the_first_shelf_is_one_that_people_read():
    """Pages of `nav` under "Using it", all of which the first page lists; and the README."""
    text = (ROOT / "mkdocs.yml").read_text()
    shelf = re.search(r"^  - Using it:.*\n((?:      - .*\n)+)", text, re.M)
    assert shelf
    listed = re.findall(r"([\w/-]+\.md)$", shelf[1], re.M)
    assert 10 <= len(listed) <= 14
    lengths = {name: len((ROOT / "docs" / name).read_text().splitlines()) for name in listed}
    assert {name: length for name, length in lengths.items() if length >= 150} == {}
    first = (ROOT / "docs" / "index.md").read_text()
    questions = re.search(r"^## Using it\n(.*?)^\w", first, re.M | re.S)
    assert questions
    assert re.findall(r"\(([\w-]+\.md)\) \|$", questions[1], re.M) == listed[1:]
    assert len((ROOT / "README.md").read_text().splitlines()) < 60


# What mkdocs is given, without mkdocs


@pytest.fixture
def plugin(monkeypatch):
    """A module of docs/site, over an empty stand-in of the package that it extends."""

    def load(name, package, **names):
        for module in (package, *names):
            monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(**names.get(module, {})))
        if not names:
            monkeypatch.setitem(sys.modules, package, types.SimpleNamespace(Extension=object))
        spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "site" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def test_entries_of_several_names_are_split(plugin):
    split = plugin("docstrings", "griffe").split
    text = (
        "Does.\n\nArgs:\n    one: alone,\n        twice.\n    a, b: of\n        both.\n    c,\n"
        "        d: as in `Adam`.\n\nReturns:\n    It.\n"
    )
    assert split(text) == (
        "Does.\n\nArgs:\n    one: alone,\n        twice.\n    a: of both.\n    b: of both.\n\n"
        "`c`, `d`: as in `Adam`.\n\nReturns:\n    It.\n"
    )
    assert split("Does.\n\nArgs:\n    a, b: as for `f`.\n") == "Does.\n\n`a`, `b`: as for `f`.\n"
    assert split("Has none.") == "Has none."


def test_no_docstring_has_an_entry_that_the_site_cannot_read(plugin):
    split = plugin("docstrings", "griffe").split
    for path in sorted((ROOT / "lowbit").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
                args = re.search(r"^Args:\n((?:    .*\n?)*)", split(ast.get_docstring(node)), re.M)
                for line in re.findall(r"^    \S.*$", args[1] if args else "", re.M):
                    assert re.match(r"    \w+: ", line), f"{path}: {node.name}: {line}"


def test_links_from_a_page_lead_to_pages_of_the_site(plugin):
    structure = {
        "mkdocs": {},
        "mkdocs.structure": {},
        "mkdocs.structure.files": {"File": None, "Files": None},
    }
    hooks = plugin("hooks", "mkdocs", **structure)
    config = types.SimpleNamespace(extra={"repository": "https://host/lowbit"})

    def seen(text, page):
        file = types.SimpleNamespace(src_uri=page)
        return hooks.on_page_markdown(text, types.SimpleNamespace(file=file), config)

    assert seen("[x](../SECURITY.md#promises)", "ckpt.md") == "[x](security.md#promises)"
    assert seen("[ckpt.md](ckpt.md#dialects)", "migrate.md") == "[lowbit-ckpt](ckpt.md#dialects)"
    assert seen("[ckpt.md](../ckpt.md)", "api/checkpoint.md") == "[lowbit-ckpt](../ckpt.md)"
    assert seen("[x](docs/design.md)", "contributing.md") == "[x](design.md)"
    assert (
        seen("[x](../recipes/fsdp2.py)", "sharding.md")
        == "[x](https://host/lowbit/blob/main/recipes/fsdp2.py)"
    )
    assert seen("[x](../recipes)", "sharding.md") == "[x](https://host/lowbit/tree/main/recipes)"
    for same in ("[x](none.md)", "[x](#here)", "[x](https://a.b/c.md)"):
        assert seen(same, "ckpt.md") == same


def test_the_site_takes_nothing_from_other_hosts():
    text = (ROOT / "mkdocs.yml").read_text()
    assert "\n  font: false" in text and "extra_javascript" not in text and "strict: true" in text
    assert "repo_url:" not in re.sub("#.*", "", text), "the theme would ask GitHub on every page"
    assert "http" not in (ROOT / "docs" / "site" / "style.css").read_text()
    assert (
        "--quiet"
        not in re.search(r"^docs:.*\n.*mkdocs.*", (ROOT / "Makefile").read_text(), re.M)[0]
    )
