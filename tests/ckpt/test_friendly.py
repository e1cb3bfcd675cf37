"""What `lowbit-ckpt` says to mistakes and of things that are not checkpoints; several optimizers;
what is left of killed runs.
"""

import argparse
import enum
import fcntl
import json
import os
import pickle
import pty
import re
import resource
import struct
import subprocess
import termios
import zipfile

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from tests.support.paths import ROOT
from tests.support.peers.files import TOOL, need_tool, run

pytestmark = pytest.mark.slow

need_tool()


def optimizer(step=True):
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 96)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if step:
        model(torch.randn(3, 64)).sum().backward()
        opt.step()
    return model, opt


class Call:
    """Pickled as the call of a function."""

    def __init__(self, function, *arguments):
        self.called = function, arguments

    def __reduce__(self):
        return self.called


def without_step():
    content = optimizer()[1].state_dict()
    del content["state"][0]["step"]
    return content


@pytest.fixture
def messages(tmp_path):
    """What inputs of all kinds are refused with."""

    def of(command, path, *options, code=3):
        return run(command, path, *options, code=code).stderr.removeprefix("lowbit-ckpt: ").strip()

    def saved(content, **more):
        torch.save(content, tmp_path / "a.pt", **more)
        return tmp_path / "a.pt"

    out = (tmp_path / "b.pt", "--to", "lowbit")
    made = [
        of("inspect", saved({"x": Call(os.getcwd)})),
        of("verify", saved({"x": argparse.Namespace()})),
        of("inspect", saved(torch.nn.Linear(2, 2))),
        of("convert", saved({"model": torch.nn.Linear(2, 2), "epoch": 1}), *out),
        of("convert", saved(optimizer(step=False)[1].state_dict()), *out),
        of(
            "convert",
            saved({"a": optimizer()[1].state_dict(), "b": optimizer()[1].state_dict()}),
            *out,
        ),
        of(
            "convert",
            saved({"state": {}, "param_groups": [{"lowbit_version": 9, "params": []}]}),
            *out,
        ),
        of("convert", saved(without_step()), *out),
        of("verify", saved({"a": [list(range(1000))] * 999})),
    ]
    for name, method in (("root", zipfile.ZIP_STORED), ("small", zipfile.ZIP_DEFLATED)):
        with zipfile.ZipFile(tmp_path / name, "w", method) as z:
            z.writestr("data.pkl", "x" * 99)
    torch.jit.script(torch.nn.Linear(3, 2)).save(tmp_path / "s.pt")
    (tmp_path / "lfs").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    (tmp_path / "p").write_bytes(pickle.dumps([1]))
    with zipfile.ZipFile(tmp_path / "z", "w") as z:
        z.writestr("policy.pth", "x")
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "optimizer.pt").write_bytes(b"x")
    return made + [
        of("inspect", tmp_path / name) for name in ("s.pt", "lfs", "p", "z", "t", "root", "small")
    ]


def test_the_page_lists_these_messages(messages):
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    page = page[page.index("## Files") : page.index("## From Python")]
    rows = re.findall(r"^\| `(.*?)` \|", page, re.M)
    patterns = {row: re.compile(".*".join(map(re.escape, row.split("..."))) + "$") for row in rows}
    found = [[row for row in rows if patterns[row].match(message)] for message in messages]
    assert all(len(some) == 1 for some in found), list(zip(messages, found, strict=True))
    assert {row for (row,) in found} == set(rows)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("inspct", "x"), "did you mean inspect?"),
        (("verfy", "x"), "did you mean verify?"),
        (("reshard", "a", "b", "--wrld-size", "2"), "did you mean --world-size?"),
        (("reshard", "a", "b", "--world", "2"), "did you mean --world-size?"),
        (("convert", "a", "b", "--state-fromat=8bit"), "did you mean --state-format?"),
        (("frobnicate",), "there is no command frobnicate; there are inspect"),
    ],
)
def test_did_you_mean(arguments, words):
    assert words in run(*arguments, code=2).stderr


@pytest.mark.parametrize("length", [123, 0x8B1F, 0x685A42, 0x4B50])
def test_a_cut_off_header_is_no_magic_number(tmp_path, length):
    """Its length begins as JSON ('{'), gzip, bzip2 and zip do."""
    header = b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
    (tmp_path / "a.safetensors").write_bytes(length.to_bytes(8, "little") + header)
    error = run("inspect", tmp_path / "a.safetensors", code=3).stderr
    assert "header" in error and "JSON:" not in error and "compressed" not in error


def test_a_pointer_of_git_lfs(tmp_path):
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 12345\n"
    for name in ("a.safetensors", "a.pt", "model.onnx", "flax_model.msgpack"):
        (tmp_path / name).write_text(text)
        error = run("inspect", tmp_path / name, code=3).stderr
        assert "pointer of Git LFS" in error and "git lfs pull" in error


def test_folders_of_others(tmp_path):
    folder = tmp_path / "checkpoint-20"
    folder.mkdir()
    for name in ("optimizer.pt", "model.safetensors", "trainer_state.json"):
        (folder / name).write_bytes(b"x")
    error = run("inspect", folder, code=3).stderr
    assert "of a Trainer" in error and "model.safetensors, optimizer.pt" in error
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "run" / "step-10", no_dist=True)
    error = run("inspect", tmp_path / "run", code=3).stderr
    assert "holds some; give one of them: step-10" in error


def test_folders_of_deepspeed(tmp_path):
    """By the names that DeepSpeed 0.19.8 gives."""
    run_folder, step = tmp_path / "run", tmp_path / "run" / "global_step3"
    step.mkdir(parents=True)
    (run_folder / "latest").write_text("global_step3\n")
    (run_folder / "zero_to_fp32.py").touch()
    error = run("inspect", run_folder, code=3).stderr
    assert "holds checkpoints of DeepSpeed" in error and "the last one is global_step3" in error
    (step / "mp_rank_00_model_states.pt").touch()
    error = run("inspect", step, code=3).stderr
    assert "without ZeRO; give one of its files: mp_rank_00_model_states.pt" in error


@pytest.mark.parametrize("kind", ["zero", "bf16", "stage3"])
def test_a_file_of_one_rank_of_zero_is_not_converted(tmp_path, kind):
    """Its keys are those of DeepSpeed 0.19.8; the flat slices would pass for parameters."""
    flat = torch.nn.Parameter(torch.ones(1300))
    opt = torch.optim.AdamW([flat])
    flat.sum().backward()
    opt.step()
    partition = {
        "base_optimizer_state": opt.state_dict(),
        "single_partition_of_fp32_groups": [flat.data],
        "partition_count": [2],
    }
    of_rank = {
        "zero": {"zero_stage": 1, **partition},
        "bf16": partition,
        "stage3": {
            "zero_stage": 3,
            "partition_count": 2,
            "optimizer_state_dict": opt.state_dict(),
            "fp32_flat_groups": [flat.data],
        },
    }[kind]
    file = tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": of_rank, "ds_version": "0.19.8"}, file)
    assert "has one rank's slices of flat vectors" in run("inspect", file).stdout
    for more in (
        ["--to", "lowbit"],
        [],
        ["--include", "*.exp_avg"],
        ["--to", "lowbit", "--from", "torch", "--dry-run"],
    ):
        error = run("convert", file, tmp_path / "x.pt", *more, code=3).stderr
        assert "one rank's slices of flat vectors" in error and "give the folder" in error
        assert str(file) in error
    assert not (tmp_path / "x.pt").exists()
    torch.save({"optimizer": opt.state_dict(), "partition_count": 2}, tmp_path / "own.pt")
    run("convert", tmp_path / "own.pt", tmp_path / "x.pt", "--to", "lowbit")


def test_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "is a pipe, not a regular file" in run("inspect", tmp_path / "pipe", code=3).stderr


def test_what_is_outside_the_allowlist_says_what_to_do(tmp_path):
    torch.save({"x": Call(os.getcwd)}, tmp_path / "a.pt")
    error = run("inspect", tmp_path / "a.pt", code=3).stderr
    assert "posix.getcwd, which is outside the allowlist; nothing was executed" in error
    assert "if you trust the file, save it again" in error


def test_a_plain_pickle(tmp_path):
    (tmp_path / "a.pkl").write_bytes(pickle.dumps({"a": 1}, protocol=4))
    error = run("inspect", tmp_path / "a.pkl", code=3).stderr
    assert "is a pickle, but not of torch.save" in error and "torch.save" in error
    for protocol in (0, 1):
        for content in ({"a": 1}, [torch.ones(2)], np.ones(2), argparse.Namespace(a=1)):
            (tmp_path / "a.pkl").write_bytes(pickle.dumps(content, protocol=protocol))
            error = run("inspect", tmp_path / "a.pkl", code=3).stderr
            assert "is a pickle, but not of torch.save" in error


def test_a_program_of_torch_export(tmp_path):
    torch.export.save(
        torch.export.export(torch.nn.Linear(3, 2), (torch.ones(1, 3),)), tmp_path / "a.pt2"
    )
    error = run("inspect", tmp_path / "a.pt2", code=3).stderr
    assert "is a program of torch.export" in error and "torch.export.load" in error


def test_a_zip_of_files(tmp_path):
    """As stable-baselines writes: the files of torch.save lie inside, and are read there."""
    model, opt = optimizer()
    with zipfile.ZipFile(tmp_path / "model.zip", "w") as z:
        z.writestr("data", "{}")
        for name, content in (
            ("policy.pth", model.state_dict()),
            ("policy.optimizer.pth", opt.state_dict()),
        ):
            with z.open(name, "w", force_zip64=True) as f:
                torch.save(content, f)
    error = run("inspect", tmp_path / "model.zip", code=3).stderr
    # the largest
    assert "policy.pth, policy.optimizer.pth" in error and "model.zip/policy.optimizer.pth" in error
    inner = tmp_path / "model.zip" / "policy.optimizer.pth"
    run("verify", inner)
    run("convert", inner, tmp_path / "o.pt")
    state = torch.load(tmp_path / "o.pt")["state"]
    assert torch.equal(state[0]["exp_avg"], opt.state_dict()["state"][0]["exp_avg"])
    assert (
        "no record other.pth" in run("inspect", tmp_path / "model.zip" / "other.pth", code=3).stderr
    )


def test_a_zip_of_files_in_folders(tmp_path):
    """The folders of a zip are none of torch.save, whatever their number."""
    with zipfile.ZipFile(tmp_path / "run.zip", "w") as z:
        z.writestr("run/config.json", "{}")
        for name in ("run/policy.pt", "run/deep/other.pth"):
            with z.open(name, "w", force_zip64=True) as f:
                torch.save({"w": torch.ones(3)}, f)
    error = run("inspect", tmp_path / "run.zip", code=3).stderr
    assert "is a zip of several files" in error and "no file of torch.save" in error
    assert "run/policy.pt, run/deep/other.pth" in error and "run.zip/run/policy.pt" in error
    run("verify", tmp_path / "run.zip" / "run" / "policy.pt")
    run("verify", tmp_path / "run.zip" / "run" / "deep" / "other.pth")


def test_an_archive_packed_again(tmp_path):
    """Its records at the root, or compressed: the message says what to do, and that works."""
    torch.save({"w": torch.ones(300)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as z:
        records = {name.partition("/")[2]: z.read(name) for name in z.namelist()}

    def packed(name, folder, method):
        with zipfile.ZipFile(tmp_path / name, "w", method) as z:
            for record, content in records.items():
                z.writestr(folder + record, content)
        return tmp_path / name

    error = run("inspect", packed("root.pt", "", zipfile.ZIP_STORED), code=3).stderr
    assert (
        "with its records in no folder" in error and "zip that folder without compression" in error
    )
    for folder in ("", "archive/"):
        error = run("inspect", packed("small.pt", folder, zipfile.ZIP_DEFLATED), code=3).stderr
        assert "is compressed" in error and "unzip it" in error and "without compression" in error
    assert torch.load(run_on(packed("good.pt", "archive/", zipfile.ZIP_STORED)))["w"].sum() == 300


def run_on(path):
    run("verify", path)
    return path


@pytest.mark.parametrize("kind", ["list", "dict"])
def test_the_limit_of_values(tmp_path, kind):
    """One value that many keys share: the pickle has it once,
    and a reader as often as it is named.
    """
    shared = list(range(1000)) if kind == "list" else {str(i): i for i in range(1000)}

    def saved(count):
        content = {"w": torch.ones(3), "all": {str(i): shared for i in range(count)}}
        torch.save(content, tmp_path / "a.pt")
        return tmp_path / "a.pt"

    run("verify", saved(10))
    error = run("verify", saved(400), code=3).stderr
    assert "a.pt" in error and "unfolds to too many values" in error
    assert "save long lists of numbers as tensors" in error
    if kind == "dict":
        assert re.search(r"more than \d+, the limit for a file of its size", error)


def test_a_torchscript_program(tmp_path):
    torch.jit.script(torch.nn.Linear(3, 2)).save(tmp_path / "a.pt")
    error = run("inspect", tmp_path / "a.pt", code=3).stderr
    assert "is a TorchScript program" in error and "torch.jit.load" in error


class ByName(pickle.Pickler):
    """Pickles members of enums as Python 3.11.2 does."""

    def reducer_override(self, obj):
        return (getattr, (type(obj), obj.name)) if isinstance(obj, enum.Enum) else NotImplemented


@pytest.mark.parametrize("pickler", [pickle.Pickler, ByName])
def test_the_metadata_of_megatron(tmp_path, pickler):
    """Megatron-Core adds the plans of all ranks and its own data."""
    content = {"w": torch.arange(12.0).reshape(3, 4), "epoch": 3}
    dcp.save(content, checkpoint_id=tmp_path / "a", no_dist=True)
    planner = DefaultSavePlanner()
    planner.set_up_planner(content, is_coordinator=True)
    plan = planner.create_local_plan()
    metadata = dcp.FileSystemReader(tmp_path / "a").read_metadata()
    metadata.all_local_plans = [plan]
    metadata.mcore_data = {"w": {"nd_reformulated_orig_global_shape": (3, 4)}}
    with open(tmp_path / "a" / ".metadata", "wb") as file:
        pickler(file).dump(metadata)
    report = json.loads(run("inspect", tmp_path / "a", "--json").stdout)
    assert "written by Megatron-Core" in report["facts"] and report["warnings"] == []
    run("convert", tmp_path / "a", tmp_path / "b.pt")
    assert torch.equal(torch.load(tmp_path / "b.pt")["w"], content["w"])


def test_an_optimizer_that_never_stepped(tmp_path):
    torch.save(optimizer(step=False)[1].state_dict(), tmp_path / "a.pt")
    error = run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", "lowbit", code=3).stderr
    assert "a.pt: its optimizer was never stepped" in error


def test_several_optimizers(tmp_path):
    """One is chosen, and the others stay as they are."""
    states = [optimizer()[1].state_dict() for _ in range(2)]
    torch.save({"optimizers": states, "w": torch.ones(2)}, tmp_path / "a.pt")
    source, target = tmp_path / "a.pt", tmp_path / "b.pt"
    error = run("convert", source, target, "--to", "lowbit", code=3).stderr
    assert "'optimizers.0', 'optimizers.1'" in error and "--optimizer" in error
    error = run("convert", source, target, "--to", "lowbit", "--optimizer", "other", code=2).stderr
    assert "no optimizer under 'other'" in error
    assert "--to" in run("convert", source, target, "--optimizer", "optimizers.1", code=2).stderr
    run("convert", source, target, "--to", "lowbit", "--optimizer", "optimizers.1")
    back = torch.load(target)
    assert torch.equal(back["w"], torch.ones(2))
    first, second = back["optimizers"]
    assert torch.equal(first["state"][0]["exp_avg"], states[0]["state"][0]["exp_avg"])
    assert (
        "exp_avg_dynamic8" in second["state"][0] and "lowbit_version" in second["param_groups"][0]
    )


def test_the_other_optimizer_is_left_out(tmp_path):
    """As the error advises. Its place in the list stays, as that of an opaque object does."""
    states = [optimizer()[1].state_dict() for _ in range(2)]
    torch.save({"optimizers": states, "w": torch.ones(2)}, tmp_path / "a.pt")
    source, target = tmp_path / "a.pt", tmp_path / "b.pt"
    assert "--exclude PATTERN" in run("convert", source, target, "--to", "lowbit", code=3).stderr
    options = ("--to", "lowbit", "--exclude", "optimizers.0.*")
    done = run("convert", source, target, *options)
    said = "warning: optimizers.0: is left out, and None stands at its place in the list\n"
    assert done.stderr == said
    first, second = torch.load(target)["optimizers"]
    assert first is None and "exp_avg_dynamic8" in second["state"][0]
    # What lies behind all that stays has no place.
    for more in (("--exclude", "optimizers.1.*"), ("--include", "optimizers.0.*")):
        done = run("convert", source, target, "--to", "lowbit", "--force", *more)
        assert done.stderr == "" and len(torch.load(target)["optimizers"]) == 1
    # Directories keep the place too, for files that are made of them, and so does safetensors.
    run("convert", source, tmp_path / "d", "--container", "dcp", *options)
    run("convert", source, tmp_path / "c.safetensors", *options)
    done = run("reshard", source, tmp_path / "e", "--world-size", 2, "--exclude", "optimizers.0.*")
    assert done.stderr == said
    for name in ("d", "c.safetensors", "e"):
        run("convert", tmp_path / name, target, "--force")
        first, second = torch.load(target)["optimizers"]
        assert first is None and len(second["state"]) == 2


def test_places_of_lists_that_are_left_out(tmp_path):
    content = {"l": [[1, torch.ones(2)], (3, [torch.ones(2)], 6), *range(20)], "m": [{"x": 1}, 2]}
    torch.save(content, tmp_path / "a.pt")
    source, target = tmp_path / "a.pt", tmp_path / "b.pt"

    def written(*options):
        done = run("convert", source, target, "--force", *options)
        return torch.load(target), done.stderr.splitlines()

    got, said = written("--exclude", "l.0.0", "--exclude", "l.1.1.*", "--exclude", "m.*")
    assert set(got) == {"l"} and got["l"][0][0] is None and got["l"][1] == (3, None, 6)
    assert len(said) == 2 and got["l"][2:] == list(range(20))
    got, said = written("--include", "l.21")
    assert got == {"l": [None] * 21 + [19]}
    assert len(said) == 6 and said[5] == (
        "warning: 16 more places of lists are left out, and hold None"
    )


def test_few_open_files(tmp_path):
    """Many ranks where the system allows few open files: it works, and where it cannot,
    nothing is left.
    """
    torch.save({"w": torch.arange(4000.0).reshape(2000, 2)}, tmp_path / "a.pt")

    def limited(count):
        return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))

    command = [TOOL, "reshard", tmp_path / "a.pt", tmp_path / "b", "--world-size", "500"]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limited(24))
    assert done.returncode == 0, done.stderr
    run("verify", tmp_path / "b")
    command[3] = tmp_path / "c"
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limited(6))
    if done.returncode != 0:
        assert done.returncode == 1
        assert sorted(os.listdir(tmp_path)) == ["a.pt", "b"]


def test_what_a_killed_run_left_is_named(tmp_path):
    torch.save({"w": torch.ones(4)}, tmp_path / "a.pt")
    (tmp_path / ".b.partial-abcdef").mkdir()
    (tmp_path / ".c.pt.partial-abcdef").write_bytes(b"x")
    done = run("reshard", tmp_path / "a.pt", tmp_path / "b", "--world-size", "2")
    assert ".b.partial-abcdef was left by a run that was killed" in done.stderr
    done = run("convert", tmp_path / "a.pt", tmp_path / "c.pt")
    assert ".c.pt.partial-abcdef was left by a run" in done.stderr
    assert "partial" not in run("convert", tmp_path / "a.pt", tmp_path / "d.pt").stderr


def test_what_is_private_stays_private(tmp_path):
    before = os.umask(0o022)
    try:
        torch.save({"w": torch.ones(4)}, tmp_path / "a.pt")
        (tmp_path / "a.pt").chmod(0o600)
        run("convert", tmp_path / "a.pt", tmp_path / "b.pt")
        run("convert", tmp_path / "a.pt", tmp_path / "b", "--container", "dcp")
        run("convert", tmp_path / "b", tmp_path / "c.safetensors")
        assert (tmp_path / "b.pt").stat().st_mode & 0o777 == 0o600
        assert (tmp_path / "b").stat().st_mode & 0o777 == 0o700
        assert (tmp_path / "c.safetensors").stat().st_mode & 0o777 == 0o600
        (tmp_path / "a.pt").chmod(0o644)
        run("convert", tmp_path / "a.pt", tmp_path / "d.pt")
        run("convert", tmp_path / "a.pt", tmp_path / "d", "--container", "dcp")
        assert (tmp_path / "d.pt").stat().st_mode & 0o777 == 0o644
        assert (tmp_path / "d").stat().st_mode & 0o777 == 0o755
    finally:
        os.umask(before)


@pytest.mark.parametrize("columns", [20, 45, 120])
def test_progress_fits_the_terminal(tmp_path, columns):
    torch.save({"w": torch.zeros(1 << 20)}, tmp_path / "a.pt")
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command = [TOOL, "verify", tmp_path / "a.pt"]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=end, timeout=600)
    os.close(end)
    text = b""
    try:
        while part := os.read(terminal, 1 << 16):
            text += part
    except OSError:  # the other end is closed
        pass
    os.close(terminal)
    assert done.returncode == 0
    lines = [line for line in re.split("[\\r\\n]|\x1b\\[K", text.decode()) if line]
    assert lines and all(len(line) < columns for line in lines)
    assert all(line.startswith("verify ") for line in lines)
    assert ("[" in lines[-1]) == (columns > 40)


def test_quiet_hides_the_summary_and_no_warning(tmp_path):
    """What a conversion leaves out is said on stderr, whatever is hidden."""
    source = tmp_path / "a.pt"
    commands = {
        "convert": (source, tmp_path / "b.pt"),
        "reshard": (source, tmp_path / "d", "--world-size", "2"),
        "diff": (source, source),
        "verify": (source, "--opaque"),
    }
    said = {
        "convert": "warning: args: is opaque (argparse.Namespace) and is left out\n",
        "reshard": "warning: args: is opaque (argparse.Namespace) and is left out\n",
        "diff": "warning: 1 opaque object was not compared, such as args\n",
        "verify": "warning: args: is opaque, not read: argparse.Namespace\n",
    }
    for more in ({"args": argparse.Namespace()}, {}):
        torch.save({"w": torch.ones(4, 4), **more}, source)
        for name, arguments in commands.items():
            force = ["--force"] if name in ("convert", "reshard") else []
            done = run(name, *arguments, *force, "--quiet")
            assert (done.stdout, done.stderr) == ("", said[name] if more else "")
            assert "Print warnings and errors only" in run(name, "--help").stdout
    torch.save({"w": torch.ones(4, 4), "args": argparse.Namespace()}, source)
    done = run("convert", *commands["convert"], "--force", "--quiet", "--json")
    assert done.stderr == "" and "left out" in json.loads(done.stdout)["warnings"][0]
