"""Converting: float32 state of torch becomes what a live optimizer here would make of it,
byte for byte, and comes back.
"""

import json
import math
import os
import random
import re
import shutil
import subprocess
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import lowbit
from lowbit.config import presets
from tests.support.bits import equal
from tests.support.peers.files import TOOL, need_tool

pytestmark = pytest.mark.slow

need_tool()
SHAPES = {
    "wide.weight": (16, 64),
    "wide.bias": (64,),
    "up.weight": (96, 130),
    "odd.weight": (67, 131),
    "conv.weight": (32, 8, 5, 7),
    "scale": (),
    "empty": (0, 32),
    "long": (5000,),
}


def run(*arguments, code=0):
    """The tool's report, or its error where it should end with another code."""
    done = subprocess.run(
        [TOOL, "convert", *map(str, arguments), "--json"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == code, (done.returncode, done.stderr, done.stdout[:500])
    return json.loads(done.stdout) if code == 0 else done.stderr


def parameters(shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in shapes.items()
    }


def step(opt, params, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in params.values():
        p.grad = torch.randn(p.shape, generator=generator) * 10 ** torch.randint(
            -3, 2, p.shape, generator=generator
        )
    opt.step()


def trained(shapes=None, make=torch.optim.AdamW, named=True, **options):
    params = parameters(shapes or SHAPES)
    opt = make(list(params.items()) if named else list(params.values()), **options)
    for seed in range(3):
        step(opt, params, seed)
    return params, opt


def by_name(opt):
    """The state dict as get_optimizer_state_dict has it."""
    saved = opt.state_dict()
    names = [name for group in saved["param_groups"] for name in group["param_names"]]
    return {
        "state": {names[i]: state for i, state in saved["state"].items()},
        "param_groups": [
            {
                **{k: v for k, v in g.items() if k != "param_names"},
                "params": [names[i] for i in g["params"]],
            }
            for g in saved["param_groups"]
        ],
    }


def flattened(nested):
    flat = {}
    for name, state in nested["state"].items():
        flat |= {f"state.{name}.{key}": value for key, value in state.items()}
    for group in nested["param_groups"]:
        for name in group["params"]:
            flat |= {f"param_groups.{name}.{k}": v for k, v in group.items() if k != "params"}
    return flat


def save(kind, opt, path):
    state = {
        "raw": opt.state_dict,
        "nested": lambda: by_name(opt),
        "flat": lambda: flattened(by_name(opt)),
    }
    dcp.save({"optim": state[kind]()}, checkpoint_id=path, no_dist=True)


def held(path):
    """Everything in a directory, by flat name."""
    content = {}
    _load_state_dict(
        content,
        storage_reader=dcp.FileSystemReader(path),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    flat = {}

    def walk(at, name):
        if isinstance(at, list) and at and isinstance(at[0], dict):
            at = dict(enumerate(at))
        if isinstance(at, dict):
            for key, value in at.items():
                walk(value, f"{name}.{key}" if name else str(key))
        else:
            flat[name] = at

    walk(content, "")
    return flat


def live(old, state_format, **options):
    """What a live optimizer makes of the same state."""
    params = parameters(SHAPES)
    opt = lowbit.AdamW(list(params.items()), state_format=state_format, **options)
    opt.load_state_dict(old.state_dict())
    return params, opt


@pytest.mark.parametrize(
    "state_format",
    ["8bit", "4bit", "3bit", "fp8", "log8", "companded8", "lpmm4", "bfloat16", "float32"],
)
def test_bytes_are_those_of_a_live_optimizer(tmp_path, state_format):
    _, old = trained()
    save("nested", old, tmp_path / "torch")
    report = run(
        tmp_path / "torch", tmp_path / "lowbit", "--to", "lowbit", "--state-format", state_format
    )
    got = held(tmp_path / "lowbit")
    _, opt = live(old, state_format)
    want = {
        f"optim.state.{name}.{key}": value
        for name, state in by_name(opt)["state"].items()
        for key, value in state.items()
    }
    assert {key for key in got if key.startswith("optim.state.")} == set(want)
    for key, value in want.items():
        assert equal(got[key], value), key
    assert report["from"] == "torch" and report["to"] == "lowbit"
    rounded = [s for s in report["states"] if not s["exact"]]
    assert bool(rounded) == (state_format != "float32")
    assert all(0 <= s["relative_error"] < 1 and s["max_error"] >= 0 for s in rounded)


@pytest.mark.parametrize("kind", ["raw", "nested", "flat"])
def test_every_layout_of_keys_loads_into_a_live_optimizer_and_steps_on(tmp_path, kind):
    _, old = trained(weight_decay=0.05, lr=3e-3)
    save(kind, old, tmp_path / "torch")
    run(tmp_path / "torch", tmp_path / "lowbit", "--to", "lowbit", "--state-format", "8bit")
    params, opt = live(old, "8bit")
    others = parameters(SHAPES)
    loaded = lowbit.AdamW(list(others.items()))
    lowbit.load_optimizer(loaded, tmp_path / "lowbit")
    assert loaded.param_groups[0]["weight_decay"] == 0.05 and loaded.param_groups[0]["lr"] == 3e-3
    step(opt, params, 9)
    step(loaded, others, 9)
    assert all(torch.equal(params[name], others[name]) for name in params)
    for name in params:
        for key, value in opt.state[params[name]].items():
            assert equal(value, loaded.state[others[name]][key]), (name, key)


def test_torch_loads_it_in_place(tmp_path):
    """dcp.load wants every key that the live state dict has."""
    _, old = trained()
    save("nested", old, tmp_path / "torch")
    run(tmp_path / "torch", tmp_path / "lowbit", "--to", "lowbit", "--state-format", "4bit")
    opt = lowbit.AdamW(list(parameters(SHAPES).items()), state_format="4bit")
    target = {"optim": by_name(opt)}
    dcp.load(target, checkpoint_id=tmp_path / "lowbit", no_dist=True)
    _, want = live(old, "4bit")
    for name, state in by_name(want)["state"].items():
        assert all(equal(v, target["optim"]["state"][name][k]) for k, v in state.items()), name


@pytest.mark.parametrize("kind", ["raw", "nested", "flat"])
def test_float32_comes_back_as_it_was(tmp_path, kind):
    _, old = trained()
    save(kind, old, tmp_path / "torch")
    run(
        tmp_path / "torch",
        tmp_path / "lowbit",
        "--to",
        "lowbit",
        "--state-format",
        "float32",
        "--keep",
    )
    report = run(tmp_path / "lowbit", tmp_path / "back", "--to", "torch", "--keep")
    assert all(s["exact"] for s in report["states"])
    before, after = held(tmp_path / "torch"), held(tmp_path / "back")
    # Names are told twice where a live optimizer that knows them would.
    assert set(after) - set(before) <= {"optim.param_groups.0.param_names"}
    assert set(before) <= set(after)
    for key, value in before.items():
        if isinstance(value, torch.Tensor):
            assert equal(value, after[key]), key
        else:
            assert value == after[key] and type(value) is type(after[key]), key


def test_codes_come_back_as_their_values(tmp_path):
    shapes = {"up.weight": (96, 130), "conv.weight": (32, 8, 5, 7), "bias": (70,)}
    _, old = trained(shapes)
    save("nested", old, tmp_path / "torch")
    run(tmp_path / "torch", tmp_path / "lowbit", "--to", "lowbit", "--state-format", "8bit")
    run(tmp_path / "lowbit", tmp_path / "back", "--to", "torch")
    got = held(tmp_path / "back")
    for i, name in enumerate(["up.weight", "conv.weight"]):
        values = old.state_dict()["state"][i]["exp_avg"]
        codes, scales = lowbit.ops.quantize(values.flatten(1), "dynamic8", 256)
        cols = math.prod(values.shape[1:])
        wanted = lowbit.ops.dequantize(codes, scales, "dynamic8", 256, cols).reshape(values.shape)
        assert equal(got[f"optim.state.{name}.exp_avg"], wanted)
    assert equal(got["optim.state.bias.exp_avg"], old.state_dict()["state"][2]["exp_avg"])


def test_shapes_that_nobody_tells(tmp_path):
    """Codes without their shape: the weights tell it, by --model."""
    shapes = {"up.weight": (96, 130)}
    _, old = trained(shapes)
    save("nested", old, tmp_path / "torch")
    run(tmp_path / "torch", tmp_path / "told", "--to", "lowbit", "--state-format", "8bit")
    run(tmp_path / "told", tmp_path / "lowbit", "--exclude", "*.shape")
    weights = {name: p.detach() for name, p in parameters(shapes).items()}
    dcp.save({"model": weights}, checkpoint_id=tmp_path / "model", no_dist=True)
    assert "--model" in run(tmp_path / "lowbit", tmp_path / "back", "--to", "torch", code=3)
    assert not (tmp_path / "back").exists()
    run(tmp_path / "lowbit", tmp_path / "back", "--to", "torch", "--model", tmp_path / "model")
    run(tmp_path / "told", tmp_path / "other", "--to", "torch")
    assert equal(
        held(tmp_path / "back")["optim.state.up.weight.exp_avg"],
        held(tmp_path / "other")["optim.state.up.weight.exp_avg"],
    )


def test_relabelling_keeps_every_byte(tmp_path):
    _, old = trained()
    save("nested", old, tmp_path / "torch")
    run(tmp_path / "torch", tmp_path / "a", "--to", "lowbit", "--state-format", "8bit")
    report = run(tmp_path / "a", tmp_path / "b", "--to", "lowbit", "--keep", "--world-size", "3")
    assert all(s["exact"] for s in report["states"]) and report["ranks"] == 3
    a, b = held(tmp_path / "a"), held(tmp_path / "b")
    assert set(a) == set(b)
    assert all(equal(v, b[k]) if isinstance(v, torch.Tensor) else v == b[k] for k, v in a.items())
    assert "would be rounded" in run(
        tmp_path / "torch", tmp_path / "c", "--to", "lowbit", "--keep", code=4
    )


def test_factored_moments_are_means(tmp_path):
    _, old = trained()
    save("nested", old, tmp_path / "torch")
    run(tmp_path / "torch", tmp_path / "lowbit", "--to", "lowbit", "--state-format", "factored4")
    got, opt = (
        held(tmp_path / "lowbit"),
        lowbit.AdamW(list(parameters(SHAPES).items()), state_format="factored4"),
    )
    want = {
        f"optim.state.{n}.{k}": v
        for n, state in by_name(opt)["state"].items()
        for k, v in state.items()
    }
    assert {k: v.shape for k, v in want.items()} == {
        k: got[k].shape for k in got if k.startswith("optim.state.")
    }
    conv = by_name(old)["state"]["conv.weight"]["exp_avg_sq"].double()
    torch.testing.assert_close(
        got["optim.state.conv.weight.exp_avg_sq_row"], conv.mean(-1).float(), rtol=1e-6, atol=0
    )
    torch.testing.assert_close(
        got["optim.state.conv.weight.exp_avg_sq_col"], conv.mean(-2).float(), rtol=1e-6, atol=0
    )


OTHERS = {
    "SGD": {"momentum": 0.9},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Adagrad": {},
    "Adafactor": {},
    "Adam": {"amsgrad": True, "weight_decay": 0.1},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers_go_both_ways(tmp_path, name):
    shapes = {k: v for k, v in SHAPES.items() if k not in ("empty", "scale")}
    _, old = trained(shapes, getattr(torch.optim, name), **OTHERS[name])
    save("nested", old, tmp_path / "torch")
    run(tmp_path / "torch", tmp_path / "lowbit", "--to", "lowbit", "--state-format", "8bit")
    got = held(tmp_path / "lowbit")
    opt = getattr(lowbit, name)(list(parameters(shapes).items()), **OTHERS[name])
    opt.load_state_dict(old.state_dict())
    want = {
        f"optim.state.{n}.{k}": v
        for n, state in by_name(opt)["state"].items()
        for k, v in state.items()
    }
    assert set(want) == {key for key in got if key.startswith("optim.state.")}
    assert all(equal(v, got[k]) for k, v in want.items())
    settings_of = opt.state_dict()["param_groups"][0]
    for key, value in settings_of.items():
        if key not in ("params", "param_names"):
            assert got[f"optim.param_groups.0.{key}"] == value, key
    run(
        tmp_path / "torch",
        tmp_path / "full_precision",
        "--to",
        "lowbit",
        "--state-format",
        "float32",
    )
    run(tmp_path / "full_precision", tmp_path / "back", "--to", "torch")
    before, after = held(tmp_path / "torch"), held(tmp_path / "back")
    for key, value in before.items():
        assert (
            equal(value, after[key]) if isinstance(value, torch.Tensor) else value == after[key]
        ), key


def test_the_presets_are_those_of_python(tmp_path):
    """Every preset, by what the tool writes into a group and names its states."""
    shapes = {"w": (64, 64)}
    _, old = trained(shapes)
    save("nested", old, tmp_path / "torch")
    for name in presets.known():
        run(tmp_path / "torch", tmp_path / name, "--to", "lowbit", "--state-format", name)
        opt = lowbit.AdamW(list(parameters(shapes).items()), state_format=name)
        want = {f"optim.state.w.{k}": v for k, v in opt.state_dict()["state"][0].items()}
        got = {k: v for k, v in held(tmp_path / name).items() if k.startswith("optim.state.")}
        assert {k: (v.shape, v.dtype) for k, v in want.items()} == {
            k: (v.shape, v.dtype) for k, v in got.items()
        }, name
    named = re.search(
        r"presets are ([^;]*)",
        run(tmp_path / "torch", tmp_path / "x", "--to", "lowbit", "--state-format", "9bit", code=2),
    )
    assert set(named[1].strip().split(", ")) == set(presets.known())


def test_blocks_and_wide_names(tmp_path):
    _, old = trained()
    save("nested", old, tmp_path / "torch")
    run(
        tmp_path / "torch",
        tmp_path / "out",
        "--to",
        "lowbit",
        "--state-format",
        "8bit",
        "--block",
        64,
        "--full-precision",
        "conv*",
    )
    got = held(tmp_path / "out")
    assert got["optim.state.up.weight.exp_avg_dynamic8_scale"].shape == (96, 3)
    assert "optim.state.conv.weight.exp_avg" in got
    spec = {
        s: lowbit.scaled(f, block=64)
        for s, f in (("exp_avg", "dynamic8"), ("exp_avg_sq", "dynamic8_unsigned"))
    }
    _, opt = live(old, spec, full_precision=("conv*",))
    want = {
        f"optim.state.{n}.{k}": v for n, s in by_name(opt)["state"].items() for k, v in s.items()
    }
    assert all(equal(v, got[k]) for k, v in want.items())
    assert got["optim.param_groups.0.state_format.exp_avg.block"] == 64


def test_dry_run_says_it_and_writes_nothing(tmp_path):
    _, old = trained()
    save("nested", old, tmp_path / "torch")
    report = run(tmp_path / "torch", tmp_path / "out", "--to", "lowbit", "--dry-run")
    assert report["dry_run"] and len(report["states"]) == 2 * len(SHAPES)
    assert os.listdir(tmp_path) == ["torch"]
    assert {s["to"] for s in report["states"] if s["param"] == "up.weight"} == {
        "dynamic8, blocks of 256",
        "dynamic8_unsigned, blocks of 256",
    }


@pytest.mark.parametrize("named", [True, False])
def test_files_of_torch_go_both_ways(tmp_path, named):
    """Numbers stay numbers: torch's own load_state_dict takes the file at both ends."""
    _, old = trained(named=named)
    torch.save({"model": {}, "optimizer": old.state_dict()}, tmp_path / "torch.pt")
    run(tmp_path / "torch.pt", tmp_path / "lowbit.pt", "--to", "lowbit", "--state-format", "8bit")
    params = parameters(SHAPES)
    opt = lowbit.AdamW(list(params.items()) if named else list(params.values()))
    opt.load_state_dict(old.state_dict())
    saved = torch.load(tmp_path / "lowbit.pt", weights_only=True)["optimizer"]
    for i, state in opt.state_dict()["state"].items():
        assert set(state) == set(saved["state"][i])
        assert all(equal(v, saved["state"][i][k]) for k, v in state.items()), i
    loaded = lowbit.AdamW(list(params.items()) if named else list(params.values()))
    loaded.load_state_dict(saved)
    run(tmp_path / "torch.pt", tmp_path / "f.pt", "--to", "lowbit", "--state-format", "float32")
    run(tmp_path / "f.pt", tmp_path / "back.pt", "--to", "torch")
    back = torch.load(tmp_path / "back.pt", weights_only=True)["optimizer"]
    torch.optim.AdamW(list(params.items()) if named else list(params.values())).load_state_dict(
        back
    )
    for i, state in old.state_dict()["state"].items():
        assert all(equal(v, back["state"][i][k]) for k, v in state.items()), i


def test_what_is_refused(tmp_path):
    _, old = trained({"w": (64, 64)})
    save("nested", old, tmp_path / "torch")
    source, out = tmp_path / "torch", tmp_path / "out"
    assert "no dialect is named" in run(source, out, "--to", "nobody", code=2)
    error = run(source, out, "--to", "megatron", code=2)
    assert "megatron can only be read; these can be written: torch, " in error
    assert "megatron" not in error.partition(":")[2].partition("written: ")[2]
    assert "no preset" in run(source, out, "--to", "lowbit", "--state-format", "9bit", code=2)
    assert "unsigned" in run(
        source, out, "--to", "lowbit", "--state-format", "dynamic8_unsigned", code=2
    )
    assert "power of two" in run(source, out, "--to", "lowbit", "--block", 100, code=2)
    assert "--to" in run(source, out, "--state-format", "8bit", code=2)
    run(source, out, "--include", "nothing*", code=2)
    dcp.save({"model": {"w": torch.zeros(3)}}, checkpoint_id=tmp_path / "model", no_dist=True)
    assert "no optimizer state" in run(tmp_path / "model", out, "--to", "lowbit", code=3)
    two = {"a": by_name(old), "b": by_name(old)}
    dcp.save(two, checkpoint_id=tmp_path / "two", no_dist=True)
    assert "2 optimizer state dicts" in run(tmp_path / "two", out, "--to", "lowbit", code=3)
    assert not out.exists()
    run(tmp_path / "two", out, "--to", "lowbit", "--include", "a.*")
    assert all(key.startswith("a.") for key in held(out))
    assert "--force" in run(source, out, "--to", "lowbit", code=2)
    run(source, out, "--to", "lowbit", "--force")


def test_not_finite_values_are_told(tmp_path):
    _, old = trained({"w": (64, 64)})
    next(iter(old.state.values()))["exp_avg"][3, 5] = math.inf
    save("nested", old, tmp_path / "torch")
    report = run(tmp_path / "torch", tmp_path / "out", "--to", "lowbit")
    assert [s["max_error"] for s in report["states"] if s["state"] == "exp_avg"] == ["infinite"]


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    shape=st.one_of(
        st.tuples(st.integers(60, 90), st.integers(66, 300)),
        st.lists(st.integers(0, 9), max_size=4).map(tuple),
        st.tuples(st.integers(20, 40), st.integers(3, 9), st.integers(5, 9), st.integers(4, 9)),
        st.tuples(st.integers(1, 4), st.integers(66000, 140001)),
    ),
    state_format=st.sampled_from(["8bit", "4bit", "3bit", "5bit", "log8", "lpmm4"]),
    world=st.integers(1, 4),
)
def test_any_shape(tmp_path_factory, shape, state_format, world):
    path = tmp_path_factory.mktemp("shape")
    _, old = trained({"w": shape})
    save("nested", old, path / "torch")
    run(
        path / "torch",
        path / "out",
        "--to",
        "lowbit",
        "--state-format",
        state_format,
        "--world-size",
        world,
    )
    opt = lowbit.AdamW(list(parameters({"w": shape}).items()), state_format=state_format)
    opt.load_state_dict(old.state_dict())
    got = held(path / "out")
    for key, value in opt.state_dict()["state"][0].items():
        assert equal(value, got[f"optim.state.w.{key}"]), key
    shutil.rmtree(path)


def test_killed_at_any_moment(tmp_path):
    """A convert that is killed leaves its source as it was, and nothing that `verify` takes for a
    checkpoint but a whole one.
    """
    source, there, whole = tmp_path / "a", tmp_path / "b", tmp_path / "whole"
    state = {
        f"l{i}.weight": {
            "step": torch.tensor(3.0),
            "exp_avg": torch.randn(1024, 512),
            "exp_avg_sq": torch.rand(1024, 512),
        }
        for i in range(6)
    }
    groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "params": list(state)}]
    dcp.save(
        {"optim": {"state": state, "param_groups": groups}}, checkpoint_id=source, no_dist=True
    )
    before = {f.name: f.read_bytes() for f in source.iterdir()}
    command = ["--to", "lowbit", "--state-format", "8bit"]
    begin = time.monotonic()
    run(source, whole, *command)
    duration = time.monotonic() - begin
    wanted = {f.name: f.read_bytes() for f in whole.glob("*.distcp")}  # .metadata names its folder
    moments, killed = random.Random(7), 0
    for i in range(100):
        # One file and a directory appear in different ways.
        target = there if i % 2 else tmp_path / "b.pt"
        process = subprocess.Popen(
            [TOOL, "convert", source, target, *command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(moments.uniform(0, duration))
        process.kill()
        was_killed = process.wait() != 0
        killed += was_killed
        # The first took longer than these do,
        # or less long: one in four or five is to come to its end.
        duration *= 1.03 if was_killed else 0.9
        for left in tmp_path.iterdir():
            if left in (source, whole):
                continue
            judged = subprocess.run([TOOL, "verify", left], capture_output=True).returncode
            if left != target:
                assert judged != 0, left.name
            else:
                assert judged == 0
                if left.is_dir():
                    assert {f.name: f.read_bytes() for f in left.glob("*.distcp")} == wanted
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    assert killed > 50  # most of them were in the middle of it
    assert {f.name: f.read_bytes() for f in source.iterdir()} == before
