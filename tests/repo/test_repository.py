"""The pages at the root say what is so: verbs, versions, files, and which tests are slow."""

import collections
import json
import os
import re
import subprocess

import pytest
import yaml

import lowbit
from tests.support import pages, selection
from tests.support.paths import ROOT

GENERATED = {
    "bench-cpu.md",
    "bench-cuda.md",
    "bench-rules.md",
    "drift.md",
    "quality.md",
    "scaling.md",
}
DOCS = [
    str(p.relative_to(ROOT))
    for p in sorted((ROOT / "docs").rglob("*.md"))
    if p.name not in GENERATED
]
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "README.md", "SECURITY.md", *DOCS)
BUILD = ("CMakeLists.txt", "Makefile", "run")
PATH = r"(?:bench|csrc|docs|lowbit|recipes|tests|tools)/[\w./*-]+"


def test_files_say_themselves_that_they_are_slow():
    """As `make check` reads it, without importing them, is what pytest would find."""
    said = {path.name: selection.marks_of(path) for path in (ROOT / "tests").rglob("test_*.py")}
    assert sum(bool(marks) for marks in said.values()) > 100
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text()
        named = set(re.findall(r"pytest\.mark\.(slow|long|product|whole)\b", text))
        if path.name != "test_repository.py":
            assert bool(named) == bool(said[path.name]) or "frameworks" in path.parts, path.name
    took = json.loads(selection.DURATIONS.read_text())
    assert set(took) <= set(said), "make test MARK= with LOWBIT_DURATIONS=1 records them again"


def python_files():
    skipped = {".venv", "build", "out", "shared"}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).parts
        if not skipped & set(parts) and not any(p.startswith(".") for p in parts if p != ".ci"):
            yield path


def test_the_formatter_formats_all_python():
    """But for a few tables. No line is longer than it makes them, not even by its pragma."""
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in python_files()}
    assert "lowbit/__init__.py" in texts and ".ci/progress.py" in texts
    skips = {name: len(re.findall("# fmt: (?:skip|off)", text)) for name, text in texts.items()}
    assert sum(skips.values()) <= 20, {name: count for name, count in skips.items() if count}
    assert [
        f"{name}:{number}"
        for name, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        if len(line) > 100
    ] == []


def test_lines_of_cpp_have_at_most_100_columns():
    """Their comments too, which the formatter leaves as they are."""
    rooms = [ROOT / room for room in ("csrc", "tools", "tests/cpp", "bench", "recipes")]
    files = [path for room in rooms for path in room.rglob("*.*")]
    texts = {f: f.read_text() for f in files if f.suffix in (".h", ".cpp", ".cu", ".cuh")}
    assert len(texts) > 500
    del texts[ROOT / "tools" / "pipeline" / "page.cpp"]  # a page of HTML
    assert [
        f"{path}:{number}"
        for path, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        if len(line) > 100
    ] == []


def test_lines_of_build_files_have_at_most_120_columns():
    """But for files with digests, and the texts into which mistakes are planted."""
    rooms = [ROOT / room for room in ("csrc", "tools", "tests/cpp", "recipes", ".ci", ".github")]
    files = [path for room in rooms for path in room.rglob("*")] + list(ROOT.glob("*"))
    files = [f for f in files if f.suffix in (".cmake", ".toml", ".yml", ".sh") or f.name in BUILD]
    files += list((ROOT / "tests").rglob("*.txt"))
    assert len(files) > 20
    files.remove(ROOT / "tests/cpp/cuda/cuda_mutations.cmake")
    assert [
        f"{path}:{number}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > 120 and not line.startswith("source ")
    ] == []


def verbs():
    done = subprocess.run(
        ["make", "--no-print-directory"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    return {line.split()[1]: " ".join(line.split()[2:]) for line in done.stdout.splitlines()}


def test_no_folder_has_more_than_30_files():
    """A reader holds a folder in view; what a fuzzer starts from is data."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    folders = collections.Counter(os.path.dirname(name) for name in listed.stdout.splitlines())
    full = {name: n for name, n in folders.items() if n > 30}
    assert all(name.startswith("tests/ckpt/corpus/") for name in full), full


def test_make_lists_the_verbs_that_the_pages_name():
    listed = verbs()
    assert all(listed.values())
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        text = (ROOT / page).read_text()
        typed = [b.text for b in pages.blocks_of(text, page) if b.language in ("bash", "console")]
        named = re.findall(r"^(?:\$ )?make ([a-z-]+)", "".join(typed), re.M)
        for verb in [*named, *re.findall(r"`make ([a-z-]+)", text)]:
            assert verb in listed, f"{page}: make {verb}"
    for verb in listed:
        assert re.search(rf"^{verb}:", makefile, re.M)


@pytest.mark.parametrize("page", PAGES)
def test_lines_fit_a_screen(page):
    text = re.sub(r"<!-- python .*?<!-- end -->", "", (ROOT / page).read_text(), flags=re.S)
    lines = [line for line in text.splitlines() if not line.startswith("|")]  # tables may be wide
    assert [line for line in lines if len(line) > 120] == []


def test_where_the_project_lives_is_said_once():
    """By a variable of the site. What must name it too agrees, and no page clones from it."""
    (home,) = re.findall(r"repository: &\w+ (\S+)", (ROOT / "mkdocs.yml").read_text())
    for page in PAGES:
        text = (ROOT / page).read_text()
        assert "git clone" not in text, page
        assert home not in text or page == "SECURITY.md", page
    for name in ("SECURITY.md", "CITATION.cff", "pyproject.toml", "integrations/patches/README.md"):
        named = re.findall(r"https://github\.com/lowbit[^\s\"')>]*", (ROOT / name).read_text())
        assert named and all(address.startswith(home) for address in named), name
    for page in ("docs/index.md", "docs/install.md"):
        wheel, source = ((ROOT / page).read_text().index(x) for x in ("-cp310-abi3-", "make setup"))
        assert wheel < source, f"{page}: what compiles nothing comes first"


def headings(page):
    """The anchors of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    plain = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
    return {*plain, *re.findall(r'<a id="([^"]+)">', text)}


@pytest.mark.parametrize("page", PAGES)
def test_links_and_paths_lead_somewhere(page):
    text, folder = (ROOT / page).read_text(), (ROOT / page).parent
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        file = folder / target if target else ROOT / page
        assert file.exists(), f"{page}: {target}"
        assert not anchor or anchor in headings(file), f"{page}: {target}#{anchor}"
    for path in re.findall(rf"`({PATH})`", text):
        if "NAME" not in path:
            roots = (ROOT, ROOT / "csrc" / "libtorch")  # its headers as a program includes them
            assert any(any(root.glob(path.rstrip("/"))) for root in roots), f"{page}: {path}"


def nav(shelf):
    """The pages of a shelf of mkdocs.yml."""
    text = (ROOT / "mkdocs.yml").read_text()
    part = re.search(rf"^  - {shelf}:.*\n((?:   .*\n)+)", text, re.M)
    assert part
    return re.findall(r": ([\w/-]+\.md)$", part[1], re.M)


def test_every_page_of_the_docs_is_two_links_from_the_readme():
    """docs/index.md has the pages of use and reference, docs/known.md those of what was found."""
    readme = (ROOT / "README.md").read_text()
    shelves = ("index.md", "known.md")
    assert all(f"](docs/{name})" in readme for name in shelves)
    linked = "".join((ROOT / "docs" / name).read_text() for name in shelves)
    found = [str(p.relative_to(ROOT / "docs")) for p in sorted((ROOT / "docs").rglob("*.md"))]
    unlinked = [name for name in found if f"]({name})" not in linked]
    assert set(unlinked) <= {"index.md"}, unlinked


def test_the_readme_is_a_screen_and_the_first_shelf_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 60
    using = nav("Using it")
    assert len(using) <= 15
    for name in using:
        lines = (ROOT / "docs" / name).read_text().splitlines()
        assert len(lines) < 150, f"{name}: {len(lines)} lines"
    index = (ROOT / "docs" / "index.md").read_text()
    order = [index.index(f"]({name})") for name in using if name != "index.md"]
    assert order == sorted(order), "docs/index.md and mkdocs.yml have another order"


def test_the_version_and_the_license_stand_in_every_place():
    """pyproject.toml says them, and a release's tag must be its version."""
    project = (ROOT / "pyproject.toml").read_text()
    (version,) = re.findall(r'^version = "(.*)"', project, re.M)
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.*)", citation, re.M) == [version]
    newest = re.search(r"^## \[(.*)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1]
    assert newest == f"Unreleased]: {version}" or newest.startswith(f"{version}] - 20"), newest
    assert lowbit.__version__ == version, "pip knows another version: make setup"
    for page in (ROOT / "docs").rglob("*.md"):
        assert set(re.findall(r"lowbit-(\d[\d.]*)-cp", page.read_text())) <= {version}, page
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "wheels.yml").read_text())
    steps = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    (check,) = [run for run in steps if "GITHUB_REF_NAME" in run]
    for tag, refused in ((f"v{version}", 0), ("v9.9.9", 1)):
        said = {**os.environ, "GITHUB_REF_TYPE": "tag", "GITHUB_REF_NAME": tag}
        assert subprocess.run(["bash", "-c", check], cwd=ROOT, env=said).returncode == refused
    assert 'license = "Apache-2.0"' in project and "\nlicense: Apache-2.0\n" in citation
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_the_oldest_torch_stands_in_one_place():
    """pyproject.toml; the build, CI and the bench read it there, and pages name the same."""
    (oldest,) = re.findall(r'^ *"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    for page in ("docs/install.md", "docs/speed/bench.md"):
        assert f"torch {oldest} or later" in (ROOT / page).read_text()
    programs = [*(ROOT / "bench").rglob("*.py"), *(ROOT / ".ci").glob("*.*"), ROOT / ".ci" / "run"]
    for path in [*programs, ROOT / "csrc" / "CMakeLists.txt", ROOT / "Makefile"]:
        text = path.read_text()
        assert oldest not in text and "TORCH_TARGET_VERSION=0x" not in text, path


def test_a_bug_report_asks_for_the_environment():
    assert "python -m lowbit env" in (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text()
