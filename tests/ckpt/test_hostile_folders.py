"""Folders of several files, as DeepSpeed and Megatron-Core write them, damaged in every way that a
disk, a copy or somebody else can: lowbit-ckpt refuses them in one line, soon, in little memory,
executes nothing, and leaves nothing behind. What it takes of DeepSpeed's is what it was."""

import os
import pickle
import random
import shutil
import tarfile
import zipfile

import pytest

from tests.ckpt.hostile import BAD, FINE, PROOF, VALUES
from tests.ckpt.hostile.case import Case
from tests.ckpt.test_hostile import TOOL, judge, run, tree
from tests.support.files.deepspeed import small_run, write_universal, write_zero
from tests.support.files.megatron import groups, tensors, write
from tests.support.paths import ROOT
from tests.support.peers.files import need_tool

pytestmark = pytest.mark.slow

need_tool()
GOLDEN = ROOT / "tests" / "golden" / "megatron_core.tar.xz"
MAKE = {
    "zero 2": lambda folder: write_zero(folder, small_run(), 2, 2),
    "zero 3": lambda folder: write_zero(folder, small_run(), 3, 2),
    "universal 1": lambda folder: write_universal(folder, small_run(), 1),
    "universal 3": lambda folder: write_universal(folder, small_run(), 3),
    "megatron": lambda folder: write(folder, tensors(), {"param_groups": groups()}),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """One folder of each kind."""
    folder = tmp_path_factory.mktemp("sound")
    made = {kind: make(folder / kind) for kind, make in MAKE.items()}
    with tarfile.open(GOLDEN) as archive:
        archive.extractall(folder / "golden", filter="data")
    made["megatron, its own"] = folder / "golden" / "small" / "plain_tp2"
    return made


KINDS = [*MAKE, "megatron, its own"]


def check(folder, work, about, codes=frozenset({FINE, BAD, VALUES})):
    """What verify and convert say of a folder below `work`; returns their exit codes,
    and what convert wrote.
    """
    case = Case(about, lambda path: path, codes, None, None, False, None, about)
    before = tree(work)
    first = run(work, TOOL, "verify", folder)
    judge(case, first, codes)
    assert tree(work) == before, f"{about}: verify wrote something"
    second = run(work, TOOL, "convert", folder, work / "out.pt", "--to", "torch")
    judge(case, second, codes)
    after, written = tree(work), b""
    if second["code"] == FINE:
        after.pop("out.pt")
        written = (work / "out.pt").read_bytes()
        (work / "out.pt").unlink()
    assert after == before and PROOF not in after, (
        f"{about}: left behind {sorted(set(after) ^ set(before))}"
    )
    return first["code"], second["code"], written


def files(folder):
    return sorted(p for p in folder.rglob("*") if p.is_file())


def flip(path, chance):
    content = bytearray(path.read_bytes())
    for _ in range(chance.choice([1, 1, 4, 64])):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def cut(path, chance):
    content = path.read_bytes()
    path.write_bytes(content[: chance.randrange(len(content))])


def longer(path, chance):
    path.write_bytes(path.read_bytes() + chance.randbytes(chance.choice([1, 100, 5000])))


def other(path, chance):
    """Another file of the folder, so a sound one, instead of it."""
    near = [p for p in path.parents[1].rglob("*") if p.is_file() and p != path]
    path.write_bytes(chance.choice(near).read_bytes())


def gone(path, chance):
    path.unlink()


def folder_instead(path, chance):
    path.unlink()
    path.mkdir()


def pipe_instead(path, chance):
    path.unlink()
    os.mkfifo(path)


DAMAGE = [flip, flip, flip, cut, cut, longer, other, gone, folder_instead, pipe_instead]


@pytest.mark.parametrize("kind", KINDS)
def test_damage_anywhere(sound, tmp_path, kind):
    damaged_anywhere(sound[kind], tmp_path, kind, random.Random(kind))


def damaged_anywhere(sound, work, kind, chance):
    """Bytes of DeepSpeed's files are under a CRC-32 or do not matter;
    `.metadata` and JSON of the others have no sum.
    """
    *codes, whole = check(sound, work, kind, frozenset({FINE}))
    assert codes == [FINE, FINE]
    for damage in DAMAGE:
        folder = work / "folder"
        shutil.copytree(sound, folder)
        path = chance.choice(files(folder))
        damage(path, chance)
        about = f"{kind}: {damage.__name__} of {path.relative_to(folder)}"
        _, code, written = check(folder, work, about)
        if code == FINE and damage in (flip, cut, longer) and "megatron" not in kind:
            assert written == whole, f"{about}: another state came of it"
        shutil.rmtree(folder)


class Runs:
    """Unpickled, it makes a file."""

    def __reduce__(self):
        return os.system, (f"touch {PROOF}",)


def with_code(path):
    """A zip of torch.save whose pickle runs a command, with all other records as they were;
    or a pickle that does.
    """
    if not zipfile.is_zipfile(path):
        path.write_bytes(pickle.dumps(Runs()))
        return
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in records.items():
            archive.writestr(
                name, pickle.dumps(Runs(), 2) if name.endswith("data.pkl") else content
            )


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_any_file_is_executed(sound, tmp_path, kind):
    """Each file of the folder in its turn, small ones of one name once."""
    done = set()
    for path in files(sound[kind]):
        if path.name in done or path.suffix == ".json":
            continue
        done.add(path.name)
        folder = tmp_path / "folder"
        shutil.copytree(sound[kind], folder)
        with_code(folder / path.relative_to(sound[kind]))
        check(folder, tmp_path, f"{kind}: code in {path.name}")
        shutil.rmtree(folder)
    assert done


@pytest.mark.parametrize("kind", KINDS)
def test_links_lead_nowhere(sound, tmp_path, kind):
    """A file that is a link to a sound one outside of the folder is not read through it."""
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    shutil.copytree(sound[kind], folder)
    path = max(files(folder), key=lambda p: p.stat().st_size)
    path.rename(outside)
    path.symlink_to(outside)
    assert check(folder, tmp_path, f"{kind}: link at {path.name}", frozenset({BAD, 1}))[0] != FINE
