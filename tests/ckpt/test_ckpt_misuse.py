"""What a newcomer tries with lowbit-ckpt, and what it must not answer in silence."""

import json
import os
import pathlib
import shlex
import shutil
import subprocess
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lowbit import checkpoint
from tests.support.peers.files import TOOL, need_tool, run
from tests.support.require import need

pytestmark = pytest.mark.slow

need_tool()
try:
    import torchao.optim as ao
except ImportError:
    need("torchao", False, "torchao is not installed", module=True)


def stepped(kind=torch.optim.AdamW, shape=(64, 96), **settings):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(*shape[::-1]))
    opt = kind(model.parameters(), **settings)
    for p in model.parameters():
        p.grad = torch.randn(p.shape)
    opt.step()
    return model, opt


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A file and a directory of torch's AdamW, and of torchao's."""
    folder = tmp_path_factory.mktemp("saved")
    with (
        mock.patch("torch.compile", lambda f, **_: f),
        mock.patch.dict(os.environ, {"TORCHDYNAMO_DISABLE": "1"}),
    ):
        for name, kind in {"adam": torch.optim.AdamW, "ao": ao.AdamW8bit}.items():
            model, opt = stepped(kind)
            content = {"model": model.state_dict(), "optim": opt.state_dict()}
            torch.save(content, folder / f"{name}.pt")
            dcp.save(content, checkpoint_id=folder / name)
            if name == "ao":
                content["optim"]["state"][0]["exp_avg"].codes[3, 5] ^= 1
                torch.save(content, folder / "flipped.pt")
                dcp.save(content, checkpoint_id=folder / "flipped")
    return folder


def report(*arguments, code=0):
    return json.loads(run(*arguments, "--json", code=code).stdout)


@pytest.mark.parametrize("kind", ["", ".pt"])
def test_one_bit_of_a_quantized_state_is_a_difference(saved, kind):
    a, b = saved / f"ao{kind}", saved / f"flipped{kind}"
    found = report("diff", a, b, "--bytes", code=4)["differences"]
    assert [d["name"] for d in found] == ["optim.state.0.exp_avg.codes"]
    assert found[0]["first"] == [3, 5] and found[0]["count"] == 1
    assert report("diff", a, b, code=4)["differences"][0]["first"] == [3, 5]
    assert report("diff", a, a, "--bytes")["same"]
    digests = [report("inspect", path, "--digest")["digest"] for path in (a, b)]
    assert digests[0] != digests[1]


def test_a_digest_of_quantized_state_does_not_depend_on_how_it_is_cut(saved, tmp_path):
    """Over 3 ranks blocks do not end with rows: all parts are plain."""
    run("reshard", saved / "ao", tmp_path / "two", "--world-size", 2)
    run("reshard", saved / "ao", tmp_path / "three", "--world-size", 3, "--requantize")
    places = (saved / "ao", tmp_path / "two", tmp_path / "three")
    assert len({report("inspect", path, "--digest")["digest"] for path in places}) == 1
    assert report("diff", saved / "ao", tmp_path / "two", "--bytes")["same"]
    assert report("diff", tmp_path / "three", tmp_path / "three", "--bytes")["same"]
    found = report("diff", saved / "ao", tmp_path / "three", "--bytes", code=4)["differences"]
    assert len(found) == 2 and "in another way" in found[0]["what"]


@pytest.mark.parametrize("kind", ["", ".pt"])
def test_quantized_state_is_not_called_wide(saved, tmp_path, kind):
    seen = report("inspect", saved / f"ao{kind}")
    state = {t["name"]: t for t in seen["tensors"]}["optim.state.0.exp_avg"]
    held = 64 * 96 + 64 * 96 // 256 * 4 + 256 * 4
    assert (state["bytes"], state["stored_as"]) == (held, "torchao 8-bit, blocks of 256")
    assert seen["bytes_by_kind"]["state, torchao 8-bit, blocks of 256"]["bytes"] == 2 * held
    assert seen["bytes_by_dtype"]["quantized"] == {"tensors": 2, "bytes": 2 * held}
    assert "torchao 8-bit, blocks of 256" in run("inspect", saved / f"ao{kind}").stdout
    there = report("convert", saved / f"ao{kind}", tmp_path / f"out{kind}", "--to", "torch")
    assert there["source_bytes"] == seen["bytes"]
    plan = report(
        "convert", saved / "adam.pt", tmp_path / f"a{kind}", "--to", "torchao", "--dry-run"
    )
    back = report("convert", saved / "adam.pt", tmp_path / f"a{kind}", "--to", "torchao")
    assert (plan["tensors"], plan["bytes"]) == (back["tensors"], back["bytes"])
    assert back["bytes"] == report("inspect", tmp_path / f"a{kind}")["bytes"]


def test_opaque_values_are_compared(tmp_path):
    for name, value in {"a": 1, "b": 2}.items():
        dcp.save({"t": torch.ones(3), "set": {value}}, checkpoint_id=tmp_path / name)
    for options in ([], ["--bytes"]):
        assert report("diff", tmp_path / "a", tmp_path / "a", *options)["same"]
        found = report("diff", tmp_path / "a", tmp_path / "b", *options, code=4)["differences"]
        assert [d["name"] for d in found] == ["set"]


@pytest.mark.parametrize("command", ["inspect", "verify", "diff", "convert", "reshard"])
def test_a_pattern_that_fits_nothing_is_a_mistake(saved, tmp_path, command):
    more = {
        "diff": [saved / "adam.pt"],
        "convert": [tmp_path / "out"],
        "reshard": [tmp_path / "out", "--world-size", 2],
    }
    done = run(command, saved / "adam", *more.get(command, []), "--include", "exp_avgs", code=2)
    assert "'exp_avgs' matches nothing" in done.stderr


def test_patterns_are_names_that_inspect_shows(saved, tmp_path):
    pattern = ("--include", "optim.state.0.exp_avg")
    assert len(report("inspect", saved / "adam", "--health", *pattern)["states"]) == 1
    run("convert", saved / "adam", tmp_path / "out", "--to", "lowbit", "--block", 32)
    found = report("diff", saved / "adam", tmp_path / "out", *pattern, code=4)["differences"]
    assert [d["name"] for d in found] == ["parameter 0.exp_avg"]
    report("diff", saved / "adam", tmp_path / "out", "--include", "model.*")
    # Settings too are only compared where they are wanted.
    for name, lr in {"a": 1.0, "b": 2.0}.items():
        torch.save(stepped(lr=lr)[1].state_dict(), tmp_path / name)
    both = (tmp_path / "a", tmp_path / "b")
    assert [d["name"] for d in report("diff", *both, code=4)["differences"]] == [
        "param_groups.0.lr"
    ]
    report("diff", *both, "--include", "*.exp_avg")


@pytest.mark.parametrize(
    "target", ["lowbit", "bitsandbytes", "torchao", "flashoptim", "lpmm", "adafactor8bit"]
)
def test_nadam_is_no_adam(tmp_path, target):
    torch.save(stepped(torch.optim.NAdam)[1].state_dict(), tmp_path / "a.pt")
    said = run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", target, code=3).stderr
    assert "its optimizer is NAdam" in said


@pytest.mark.parametrize("target", ["bitsandbytes", "lpmm", "adafactor8bit"])
def test_what_has_no_place_is_left_out_where_that_is_allowed(tmp_path, target):
    torch.save(stepped(amsgrad=True)[1].state_dict(), tmp_path / "a.pt")
    convert = ("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", target)
    assert "--lossy leaves it out" in run(*convert, code=3).stderr
    for quiet in ([], ["--quiet", "--force"]):
        assert "max_exp_avg_sq: it is left out" in run(*convert, "--lossy", *quiet).stderr


def test_not_everything_is_left_out(tmp_path):
    torch.save(stepped(torch.optim.Adafactor)[1].state_dict(), tmp_path / "a.pt")
    run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", "lpmm", "--lossy", code=3)
    assert os.listdir(tmp_path) == ["a.pt"]


def test_options_that_would_do_nothing_are_refused(saved, tmp_path):
    for options, why in [
        (["--to", "torch", "--state-format", "8bit"], "in float32"),
        (["--to", "torch", "--block", 256], "in float32"),
        (["--from", "torch"], "--to"),
        (["--lossy"], "--to"),
        (["--model", saved / "adam.pt"], "--to"),
        (["--to", "lowbit", "--weights", "bfloat16", "--seed", 3], "bfloat16_stochastic"),
        (["--to", "lowbit", "--container", "torch", "--world-size", 2], "--world-size"),
        (["--to", "lowbit", "--full-precision", "*embed*"], "matches no parameter"),
    ]:
        assert why in run("convert", saved / "adam", tmp_path / "out", *options, code=2).stderr
    assert not os.listdir(tmp_path)


def test_an_empty_path_and_a_negative_tolerance(saved):
    assert run("inspect", "", code=2).stderr == "lowbit-ckpt: the path of a checkpoint is empty\n"
    error = run("diff", saved / "adam", saved / "adam", "--tolerance", "-1", code=2).stderr
    assert "--tolerance" in error and "takes a number from 0 on" in error and len(error) < 200
    run("diff", saved / "adam", saved / "adam", "--tolerance", "1e-3")


def test_a_plan_refuses_what_the_deed_would(saved, tmp_path):
    (tmp_path / "there.pt").write_bytes(b"")
    (tmp_path / "there").mkdir()
    for name in ("there.pt", "there"):
        done = run(
            "convert",
            saved / "adam.pt",
            tmp_path / name,
            "--container",
            "torch" if "." in name else "dcp",
            "--dry-run",
            code=2,
        )
        assert "--force" in done.stderr
    run("reshard", saved / "adam.pt", tmp_path / "there", "--world-size", 2, "--dry-run", code=2)
    for name in ("no/where.pt", "no/where"):
        done = run("convert", saved / "adam.pt", tmp_path / name, "--to", "lowbit", code=1)
        assert "there is no folder" in done.stderr


def test_a_source_is_no_target(saved, tmp_path):
    """Also where nothing is replaced: --force would not help, and nobody is to remove it."""
    shutil.copy(saved / "adam.pt", tmp_path / "a.pt")
    shutil.copytree(saved / "adam", tmp_path / "run" / "a")
    for path in (tmp_path / "a.pt", tmp_path / "run" / "a"):
        for more in ([], ["--force"], ["--dry-run"]):
            error = run("convert", path, path, *more, code=2).stderr
            assert error == f"lowbit-ckpt: {path} is the source; choose another target\n"
    for more in ([], ["--part", "0/2"]):
        for target, why in (
            ("run/a", "is the source; choose another target"),
            ("run", f"the source {tmp_path / 'run' / 'a'} lies in it"),
            ("run/a/b", "lies in the source"),
        ):
            assert (
                why
                in run(
                    "reshard",
                    tmp_path / "run" / "a",
                    tmp_path / target,
                    "--world-size",
                    2,
                    *more,
                    code=2,
                ).stderr
            )
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "run"]


def test_the_weights_that_were_named_are_not_replaced(tmp_path):
    model, opt = stepped()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    torch.save(opt.state_dict(), tmp_path / "a.pt")
    place = tmp_path / "model.pt"
    run("convert", tmp_path / "a.pt", place, "--to", "lowbit", "--model", place, "--force", code=2)


def test_typing_mistakes_are_one_line_that_goes_on(saved):
    for arguments, wanted in [
        ([], "lowbit-ckpt --help"),
        (["inspct", "x"], "no command inspct; there are inspect, verify"),
        ([], "a command is required: inspect, verify, "),
        (["inspect"], "lowbit-ckpt inspect --help"),
        (["inspect", "x", "--jsn"], "inspect has no option --jsn; did you mean --json?; "),
        (["inspect", "x", "y"], "inspect has no place for 'y'; "),
        (["inspect", "x", "--world-size", "3"], "inspect has no option --world-size; lowbit"),
        (["--jsn", "inspect", "x"], "there is no option --jsn; "),
        (["inspect", "x", "--html"], "--html lacks its FILE; "),
        (
            ["verify", "x", "--threads", "0"],
            "--threads: takes a whole number from 1 to 256, not '0'",
        ),
        (
            ["reshard", "x", "y", "--world-size", "010"],  # 8, in C
            "--world-size: takes a whole number from 1 to 65536, not '010'",
        ),
        (["completion", "tcsh"], "SHELL: takes bash, zsh or fish, not 'tcsh'; "),
        (["convert", "x", "y", "--to", "tourch"], "; did you mean torch?"),
    ]:
        said = run(*arguments, code=2).stderr
        assert said.startswith("lowbit-ckpt: ") and said.count("\n") == 1 and wanted in said
    # A command is told of no option that it does not have.
    assert "--from" not in run("inspect", saved / "adam", "--include", "model.*").stdout


def test_python_keeps_the_ranks_of_the_source(saved, tmp_path):
    checkpoint.reshard(saved / "adam", tmp_path / "three", world_size=3)
    done = checkpoint.convert(tmp_path / "three", tmp_path / "out", to="lowbit")
    assert done["ranks"] == 3
    assert checkpoint.convert(saved / "adam", tmp_path / "b.pt", to="lowbit")["ranks"] == 1


def test_a_page_and_a_report_at_once(saved, tmp_path):
    assert report("inspect", saved / "adam", "--html", tmp_path / "page.html")["tensors"]
    assert (tmp_path / "page.html").exists()


def test_radam_is_no_adam(tmp_path):
    torch.save(stepped(torch.optim.RAdam)[1].state_dict(), tmp_path / "a.pt")
    run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", "torchao", code=3)
    assert not (tmp_path / "b.pt").exists()


@pytest.mark.parametrize(
    "target", ["torch", "bitsandbytes", "torchao", "flashoptim", "lpmm", "adafactor8bit"]
)
@pytest.mark.parametrize("first_moment", [False, True])
def test_the_adafactor_of_transformers_is_no_adam(tmp_path, first_moment, target):
    """A Trainer's `optim="adafactor"`: Adam's names, other numbers and another step."""
    group = {
        "lr": 1e-3,
        "eps": (1e-30, 1e-3),
        "clip_threshold": 1.0,
        "decay_rate": -0.8,
        "beta1": None,
        "weight_decay": 0.0,
        "scale_parameter": False,
        "relative_step": False,
        "warmup_init": False,
        "params": [0, 1],
    }
    matrix = {"step": 2, "exp_avg_sq_row": torch.rand(96), "exp_avg_sq_col": torch.rand(64)}
    vector = {"step": 2, "exp_avg_sq": torch.rand(96)}
    if first_moment:
        group["beta1"], matrix["exp_avg"], vector["exp_avg"] = (
            0.9,
            torch.rand(96, 64),
            torch.rand(96),
        )
    for state in (matrix, vector):
        state["RMS"] = torch.tensor(0.5)
    torch.save({"state": {0: matrix, 1: vector}, "param_groups": [group]}, tmp_path / "a.pt")
    convert = ("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", target)
    said = run(*convert, code=3).stderr
    assert "a.pt: its " in said and ("beta1 is given" if first_moment else "--to lowbit") in said
    run(*convert, "--lossy", code=3)
    assert not (tmp_path / "b.pt").exists()
    run("convert", tmp_path / "a.pt", tmp_path / "b.pt")
    run("diff", tmp_path / "a.pt", tmp_path / "b.pt")


@pytest.mark.parametrize("dialect", ["bitsandbytes", "adafactor8bit", "megatron", "dion"])
def test_a_dialect_that_it_is_not(tmp_path, dialect):
    """`--from` of another library finds nothing,
    and an optimizer without state is not what was asked for.
    """
    torch.save(stepped()[1].state_dict(), tmp_path / "a.pt")
    run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", "lpmm", "--from", dialect, code=3)
    assert not (tmp_path / "b.pt").exists()
    if dialect == "bitsandbytes":
        convert = (
            "convert",
            tmp_path / "a.pt",
            tmp_path / "b.pt",
            "--to",
            "lowbit",
            "--from",
            dialect,
        )
        said = run(*convert, code=3).stderr
        assert "a.pt: state.0.exp_avg: is not a state that bitsandbytes writes" in said


@pytest.mark.parametrize("target", ["lowbit", "torch", "bitsandbytes", "torchao"])
def test_numbers_of_the_user_s_in_the_state_are_not_left_out_in_silence(tmp_path, target):
    content = stepped()[1].state_dict()
    for state in content["state"].values():
        state["seen"] = 7
    content["state"][0]["word"] = "x"
    torch.save(content, tmp_path / "a.pt")
    said = run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", target).stderr
    assert "'seen' in the state of 2 parameters is not the optimizer's, and is left out" in said
    assert "'word' in the state of 1 parameter is" in said and "step" not in said
    assert "left out" not in run("convert", tmp_path / "a.pt", tmp_path / "c.pt").stderr


@pytest.mark.parametrize("dialect", ["bitsandbytes", "torchao", "adafactor8bit"])
def test_a_tensor_of_the_user_s_in_the_state_is_not_left_out_in_silence(tmp_path, dialect):
    content = stepped()[1].state_dict()
    torch.save(content, tmp_path / "a.pt")
    done = run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", dialect)
    content = torch.load(tmp_path / "b.pt", weights_only=False)
    content["state"][0]["mine"] = torch.ones(64, 96)
    torch.save(content, tmp_path / "c.pt")
    for to in ("lowbit", "torch", dialect):
        done = run("convert", tmp_path / "b.pt", tmp_path / "d.pt", "--to", to, "--force")
        assert "left out" not in done.stderr
        said = run("convert", tmp_path / "c.pt", tmp_path / "d.pt", "--to", to, "--force").stderr
        assert "'mine' in the state of 1 parameter is not the optimizer's" in said


def test_a_setting_that_is_none_is_said(tmp_path):
    """No optimizer takes it: whoever converts hears of it before whoever trains."""
    opt = stepped()[1]
    opt.param_groups[0]["lr"] = None
    torch.save(opt.state_dict(), tmp_path / "a.pt")
    for to in ("lowbit", "torch"):
        done = run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", to, "--force")
        assert "warning: param_groups.0.lr: is None, and stays so: give it a value" in done.stderr
        assert "foreach" not in done.stderr
        assert torch.load(tmp_path / "b.pt")["param_groups"][0]["lr"] is None


def test_a_dimension_that_no_tensor_has(tmp_path, saved):
    to = ("reshard", saved / "adam", tmp_path / "b", "--mesh", "2")
    assert "no tensor has more than 2 dimensions" in run(*to, "--dims", "5", code=2).stderr
    assert not (tmp_path / "b").exists()
    run(*to, "--dims", "1")


def test_a_seed_without_rounding(tmp_path, saved):
    to = ("convert", saved / "adam.pt", tmp_path / "b.pt", "--seed", "3")
    assert "--weights" in run(*to, code=2).stderr


def test_a_seed_is_a_number_of_64_bits(tmp_path, saved):
    to = ("convert", saved / "adam.pt", tmp_path / "b.pt", "--weights", "bfloat16_stochastic")
    for seed in ("99999999999999999999", "18446744073709551616", "-1", "1.5", "0x10", "", "1 "):
        error = run(*to, "--seed", seed, code=2).stderr
        assert f"--seed takes a whole number from 0 to 18446744073709551615, not '{seed}'" in error
    assert not (tmp_path / "b.pt").exists()
    written = []
    for seed in ("0", "8", "010", "10", "18446744073709551615"):
        run(*to, "--seed", seed, "--force")
        written.append(torch.load(tmp_path / "b.pt")["model"]["0.weight"])
    assert torch.equal(written[2], written[3]) and not torch.equal(written[1], written[2])
    assert not torch.equal(written[0], written[4])


def test_force_replaces_pages_alone(saved):
    error = run("inspect", saved / "adam", "--force", code=2).stderr
    assert "--force replaces FILE of --html" in error


def test_a_digest_is_of_what_is_selected(saved):
    all_of, some, others = (
        report("inspect", saved / "adam", "--digest", *more)["digest"]
        for more in ((), ("--include", "*.weight"), ("--include", "*.bias"))
    )
    assert len({all_of, some, others}) == 3


def test_verify_speaks_of_what_is_selected(tmp_path, saved):
    run("reshard", saved / "adam", tmp_path / "b", "--world-size", "2")
    written = tmp_path / "b" / "lowbit.json"
    known = json.loads(written.read_text())
    name = next(n for n in known["tensors"] if n.endswith("weight"))
    del known["tensors"][name]
    written.write_text(json.dumps(known))
    assert run("verify", tmp_path / "b", code=4).returncode == 4
    run("verify", tmp_path / "b", "--exclude", name)


def test_one_file_of_a_directory_is_no_checkpoint(saved, tmp_path):
    run("reshard", saved / "adam", tmp_path / "d", "--world-size", 2)
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp", "lowbit.json"):
        for command in (
            ["inspect", tmp_path / "d" / name],
            ["convert", tmp_path / "d" / name, tmp_path / "b.pt"],
        ):
            said = run(*command, code=3).stderr
            assert said == (
                f"lowbit-ckpt: {tmp_path}/d/{name}: is one file of a directory of "
                f"torch.distributed.checkpoint; give the folder: {tmp_path}/d\n"
            )
    assert not (tmp_path / "b.pt").exists()


def test_force_is_no_advice_where_it_replaces_nothing(saved, tmp_path):
    folder, text = tmp_path / "folder", tmp_path / "notes.txt"
    folder.mkdir()
    (folder / "notes.txt").write_text("x")
    text.write_text("These are notes")
    reshard = ["reshard", saved / "adam", folder, "--world-size", 2]
    for command in (
        reshard,
        ["convert", saved / "adam", text, "--container", "torch"],
        ["convert", saved / "adam", text],
        ["convert", saved / "adam.pt", folder],
    ):
        for more in ([], ["--force"], ["--dry-run"]):
            said = run(*command, *more, code=2).stderr
            assert "choose another name" in said and "--force replaces" not in said
    assert text.read_text() == "These are notes" and os.listdir(folder) == ["notes.txt"]
    (folder / "notes.txt").unlink()
    assert "exists; --force replaces it" in run(*reshard, code=2).stderr
    run(*reshard, "--force")


def test_a_name_that_is_too_long_is_refused_before_the_work(saved, tmp_path):
    for command in (
        ["convert", saved / "adam.pt", tmp_path / ("x" * 300)],
        ["reshard", saved / "adam", tmp_path / ("x" * 300), "--world-size", 2],
    ):
        for more in ([], ["--dry-run"]):
            said = run(*command, *more, code=1).stderr
            assert said.startswith("lowbit-ckpt: cannot write ") and "name too long" in said
            assert ".partial" not in said
    assert os.listdir(tmp_path) == []


def test_reports_have_the_keys_of_the_page(saved, tmp_path):
    """The same for every container, with an optimizer and without."""
    page = (pathlib.Path(__file__).parents[2] / "docs/reference/ckpt-commands.md").read_text()
    rows = [line.split("|") for line in page.split("## Reports")[1].splitlines() if "| `" in line]
    keys = {row[1].strip(" `"): row[2].replace("`", "").replace(" ", "").split(",") for row in rows}
    assert len(keys) == 5
    torch.save({"w": torch.ones(2), "lr": float("nan")}, tmp_path / "w.pt")
    sources = [saved / "adam", saved / "adam.pt", tmp_path / "w.pt"]
    for number, source in enumerate(sources[:3]):
        for container in ("dcp", "safetensors", "torch"):
            made = tmp_path / f"{number}-{container}"
            options = ("--container", container)
            assert set(report("convert", source, made, *options)) == {*keys["convert"]}
            sources.append(made)
    for number, source in enumerate(sources):
        assert set(report("inspect", source)) == {*keys["inspect"]}
        assert set(report("verify", source)) == {*keys["verify"]}
        resharded = report("reshard", source, tmp_path / f"r{number}", "--world-size", 2)
        assert set(resharded) == {*keys["reshard"]}
        assert set(report("diff", source, source)) == {*keys["diff"]}
    found = report("inspect", tmp_path / "w.pt")
    assert (found["dialect"], found["groups"], found["states"]) == (None, [], [])
    assert found["values"] == {"lr": "nan"} and found["algorithm"] == ""
    assert report("diff", sources[2], sources[2], "--bytes")["dialects"] is None


def test_words_that_other_programs_take(saved, tmp_path):
    """A dash for a stream, the command help, an option twice, a number with a sign of percent."""
    for command in (
        ["convert", saved / "adam.pt", "-"],
        ["reshard", saved / "adam", "-", "--world-size", 2],
    ):
        said = run(*command, code=2).stderr
        assert "not written to standard output; name a file or folder" in said
        assert not os.path.exists("-")
    assert "not read from standard input; write it to a file" in run("inspect", "-", code=3).stderr
    assert "lowbit-ckpt --help has the commands" in run("help", code=2).stderr
    said = run("inspect", saved / "adam", "--html", "a", "--html", "b", code=2).stderr
    assert "--html is given more than once" in said
    for number in ("5%", "abc", "nan", ""):
        said = run("diff", saved / "adam", saved / "adam", "--tolerance", number, code=2).stderr
        assert f"--tolerance: takes a number from 0 on, such as 0.02, not '{number}'" in said


def test_a_preset_that_is_nearly_one_says_which(saved, tmp_path):
    wrong = ["--to", "lowbit", "--state-format", "8bits"]
    said = run("convert", saved / "adam", tmp_path / "out", *wrong, code=2).stderr
    assert said.endswith("float32; did you mean 8bit?\n"), said


def test_verify_of_nothing_is_a_mistake(saved):
    said = run("verify", saved / "adam", "--exclude", "*", code=2).stderr
    assert said == f"lowbit-ckpt: nothing of {saved}/adam is selected\n"


def test_names_that_dots_make_alike_are_both_named(tmp_path):
    torch.save({"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}}, tmp_path / "a.pt")
    torch.save({"x": [1, {"0.y": 2}], "x.1": {"0": {"y": torch.ones(1)}}}, tmp_path / "b.pt")
    for name, both, dotted in (
        ("a", "['a.b'] and ['a']['b']", "a.b"),
        ("b", "['x'][1]['0.y'] and ['x.1']['0']['y']", "x.1.0.y"),
    ):
        said = run("convert", tmp_path / f"{name}.pt", tmp_path / "c.safetensors", code=3).stderr
        assert (
            f"{tmp_path}/{name}.pt: {both} are both called {dotted} when keys are joined by dots"
            in said
        )
        assert "rename a key of one and save again" in said
    assert not (tmp_path / "c.safetensors").exists()


@pytest.mark.parametrize("stderr", ["/dev/full", None])
def test_an_error_that_nobody_can_read_keeps_its_exit_code(tmp_path, stderr):
    """A log on a full disk, and a daemon that has closed standard error."""
    for name, value in (("a.pt", 1.0), ("b.pt", 2.0)):
        torch.save({"w": torch.full((4,), value)}, tmp_path / name)
    expected = {("diff", "a.pt", "b.pt"): 4, ("verify", "nowhere.pt"): 3, ("verify",): 2}
    for arguments, code in expected.items():
        line = shlex.join([TOOL, *arguments]) + (f" 2>{stderr}" if stderr else " 2>&-")
        done = subprocess.run(["sh", "-c", f"{line} >/dev/null"], cwd=tmp_path)
        assert done.returncode == code, line


def test_a_name_that_is_not_its_path_is_refused(tmp_path):
    """One bit of `.metadata` would rename a weight."""
    dcp.save({"model": {"0.weight": torch.ones(2)}}, checkpoint_id=tmp_path / "d", no_dist=True)
    file = tmp_path / "d" / ".metadata"
    content = bytearray(file.read_bytes())
    at = content.find(b"\x8c\x080.weight\x94")
    assert at > 0
    content[at + 2] ^= 4
    file.write_bytes(content)
    for command in (["verify"], ["convert", tmp_path / "d"]):
        done = run(*command, tmp_path / ("d" if len(command) == 1 else "x.pt"), code=3)
        assert "has the path model.4.weight for model.0.weight" in done.stderr
    assert not (tmp_path / "x.pt").exists()


@pytest.mark.parametrize("options", [[], ["--bytes"]])
def test_nothing_is_left_to_compare(saved, tmp_path, options):
    """As convert and verify say: two files without a common name would be the same."""
    for name, content in {"a": {"x": torch.ones(2)}, "b": {"y": 3}}.items():
        torch.save(content, tmp_path / name)
    for paths in ((tmp_path / "a", tmp_path / "b"), (saved / "adam.pt", saved / "ao.pt")):
        error = run("diff", *paths, *options, "--exclude", "*", code=2).stderr
        assert error == f"lowbit-ckpt: nothing of {paths[0]} and {paths[1]} is selected\n"
    run("diff", tmp_path / "a", tmp_path / "b", *options, "--exclude", "x", code=4)
    run("diff", saved / "adam.pt", saved / "adam.pt", *options, "--include", "model.*")


def test_options_that_contradict_each_other(tmp_path):
    torch.save({"w": torch.ones(3) / 3}, tmp_path / "a.pt")
    target = ("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--keep")
    done = run(*target, "--weights", "bfloat16", code=2)
    assert "--keep refuses to round, and --weights rounds" in done.stderr
    assert not (tmp_path / "b.pt").exists()
    both = ("diff", tmp_path / "a.pt", tmp_path / "a.pt", "--bytes", "--tolerance", "0.1")
    assert "--bytes compares bytes" in run(*both, code=2).stderr


def test_long_text_is_cut_between_characters(tmp_path):
    for length in range(90, 100):
        torch.save({"said": "a" * length + "é界" * 8, "w": torch.ones(1)}, tmp_path / "a.pt")
        (line,) = [x for x in run("inspect", tmp_path / "a.pt").stdout.splitlines() if "said" in x]
        assert line.endswith("...") and len(line.encode()) < 120


@pytest.mark.parametrize(
    "name", [b"\xff", b"a\xc3", b"\xed\xa0\x80", "\u00e9\u65e5\n\U0001f600".encode()]
)
@pytest.mark.parametrize("part", [(), ("--part", "0/1")])
def test_a_folder_whose_name_is_no_text(saved, tmp_path, name, part):
    """torch keeps the name in the metadata, and Python reads no text that is not UTF-8."""
    target = os.fsdecode(os.fsencode(tmp_path) + b"/" + name)
    run("reshard", saved / "adam.pt", target, "--world-size", 2, *part)
    run("verify", target)
    want = torch.load(saved / "adam.pt")["model"]
    content = {"model": {key: torch.zeros_like(value) for key, value in want.items()}}
    dcp.load(content, checkpoint_id=target)
    for key, value in want.items():
        assert torch.equal(content["model"][key], value), key
    metadata = dcp.FileSystemReader(target).read_metadata()
    assert os.path.basename(metadata.storage_meta.checkpoint_id) == os.path.basename(target)
