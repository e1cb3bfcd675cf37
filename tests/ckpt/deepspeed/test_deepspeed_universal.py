"""A Universal Checkpoint of any other checkpoint, written by lowbit-ckpt."""

import re

import pytest
import torch

from tests.ckpt.deepspeed.folders import check_same, converted
from tests.support.files.deepspeed import small_run, write_zero
from tests.support.peers.files import need_tool, run

pytestmark = pytest.mark.slow

need_tool()

SOURCES = {
    "a file": ["--container", "torch"],
    "a directory": ["--container", "dcp"],
    "8 bits": ["--to", "lowbit", "--state-format", "8bit"],
    "safetensors": ["--container", "safetensors"],
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_universal_checkpoint_is_made_of_any_source(tmp_path, source):
    of = small_run()
    of.groups[0]["a.weight"] = torch.randn(128, 64)  # enough for 8 bits
    of.__post_init__()
    run("convert", write_zero(tmp_path / "step", of, 2, 3), tmp_path / "source", *SOURCES[source])
    shown = run(
        "convert", tmp_path / "source", tmp_path / "universal", "--container", "universal"
    ).stdout
    run("verify", tmp_path / "universal")
    assert "the same, by meaning" in run("diff", tmp_path / "source", tmp_path / "universal").stdout
    made = converted(tmp_path / "universal")
    if source == "8 bits":
        assert (
            "dynamic8" in shown
            and made["optim"]["state"]["a.weight"]["exp_avg"].dtype == torch.float32
        )
    else:
        check_same(made, of)


def test_the_files_are_those_of_the_package(tmp_path):
    """Names, keys and types of what DeepSpeed reads, beside a folder that its source describes."""
    of = small_run()
    run(
        "convert",
        write_zero(tmp_path / "step", of, 1, 2),
        tmp_path / "made",
        "--container",
        "universal",
    )
    for name in of.params:
        for state in ("fp32", "exp_avg", "exp_avg_sq"):
            ours = torch.load(tmp_path / "made" / "zero" / name / f"{state}.pt", weights_only=True)
            assert ours.keys() == {"cat_dim", "param"} and ours["cat_dim"] == 0
            assert torch.equal(ours["param"], of.tensor(name, state))
        step = torch.load(tmp_path / "made" / "zero" / name / "step.pt", weights_only=True)
        assert step == 3 and step.dtype == torch.float32 and step.shape == ()
    common = torch.load(tmp_path / "made" / "zero" / "optimizer_state.pt", weights_only=True)
    assert common["param_groups"] == common["optimizer_state_dict"]["param_groups"]
    assert [group["params"] for group in common["param_groups"]] == [[0], [1]]
    assert common["optimizer_state_dict"]["state"][0]["step"] == 3
    kept = {"f.weight", "n.running_mean", "n.num_batches_tracked"}
    # Stage 3 looks for the second name; what the first one has is not written again.
    for file, module in (("mp_rank_00", kept), ("zero_pp_rank_0_mp_rank_00", set())):
        model = torch.load(tmp_path / "made" / f"{file}_model_states.pt", weights_only=True)
        assert [list(group) for group in model["param_shapes"]] == [
            list(group) for group in of.groups
        ]
        assert model["module"].keys() == module
        assert (model["global_steps"], model["mine"], model["dp_world_size"]) == (3, 5, 1)


def test_tensors_beside_the_weights_of_another_checkpoint_are_kept(tmp_path):
    """--model has buffers and frozen parameters; what it has elsewhere is none of the model's."""
    content = plain()
    beside = {"bn.running_mean": torch.randn(4), "f": torch.randn(3, 3)}
    weights = {"w": content.pop("model")["w"], **beside}
    torch.save(content, tmp_path / "a.pt")
    for name, model in {
        "bare": weights,
        "nested": {"net": weights, "ema": {"w2": torch.ones(2)}, "epoch": 3},
    }.items():
        torch.save(model, tmp_path / f"{name}.pt")
        run(
            "convert",
            tmp_path / "a.pt",
            tmp_path / name,
            "--container",
            "universal",
            "--model",
            tmp_path / f"{name}.pt",
        )
        made = converted(tmp_path / name)["model"]
        assert made.keys() == weights.keys()
        assert all(torch.equal(made[key], t) for key, t in weights.items())


def test_records_of_another_save_are_not_kept(tmp_path):
    """What DeepSpeed writes for itself is said of the new folder."""
    shapes = [{"x": torch.ones(2)}]
    theirs = {"param_shapes": shapes, "dp_world_size": 0, "shared_params": {"t": "w"}, "mine": 5}
    torch.save(plain(deepspeed=theirs), tmp_path / "a.pt")
    said = run("convert", tmp_path / "a.pt", tmp_path / "u", "--container", "universal").stderr
    assert "place for it: deepspeed.dp_world_size, deepspeed.param_shapes, deepspeed.shar" in said
    run("verify", tmp_path / "u")
    made = converted(tmp_path / "u")
    assert made["model"].keys() == {"w"} and made["deepspeed"]["mine"] == 5


@pytest.mark.parametrize("both", [True, False])
def test_weights_in_both_checkpoints_are_no_buffers(tmp_path, both):
    content = plain()
    weights = {"w": content["model"]["w"], "f": torch.randn(3)}
    content["model"] = weights if both else content["model"]
    torch.save(content, tmp_path / "a.pt")
    torch.save(weights, tmp_path / "m.pt")
    run(
        "convert",
        tmp_path / "a.pt",
        tmp_path / "u",
        "--container",
        "universal",
        "--model",
        tmp_path / "m.pt",
    )
    model = torch.load(tmp_path / "u" / "mp_rank_00_model_states.pt", weights_only=True)
    assert model["module"].keys() == {"f"}
    run("verify", tmp_path / "u")


def plain(**more):
    weight = torch.randn(4, 5)
    state = {
        "step": torch.tensor(2.0),
        "exp_avg": torch.randn(4, 5),
        "exp_avg_sq": torch.rand(4, 5),
        **more.pop("state", {}),
    }
    group = {
        "lr": 0.1,
        "betas": (0.9, 0.99),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "amsgrad": False,
        "params": ["w"],
    }
    return {
        "model": {"w": weight},
        "optim": {"state": {"w": state}, "param_groups": [group]},
        **more,
    }


UNWRITABLE = {
    "no weights": (plain(model={}), "no weight of that name.*--model"),
    "numbers": (
        plain(
            optim={
                **plain()["optim"],
                "state": {0: plain()["optim"]["state"]["w"]},
                "param_groups": [{**plain()["optim"]["param_groups"][0], "params": [0]}],
            }
        ),
        "numbers its parameters",
    ),
    "another state": (
        plain(state={"max_exp_avg_sq": torch.rand(4, 5)}),
        "max_exp_avg_sq has no place",
    ),
    "another optimizer": (
        plain(
            optim={
                "state": {"w": {"momentum_buffer": torch.rand(4, 5)}},
                "param_groups": [{"lr": 0.1, "momentum": 0.9, "params": ["w"]}],
            }
        ),
        "has no exp_avg",
    ),
    "a weight of another shape": (
        plain(model={"w": torch.randn(5, 4)}),
        "not a float32 tensor of the weight's shape",
    ),
    **{
        f"a step of {step}": (
            plain(state={"step": torch.tensor(step, dtype=torch.float64)}),
            "w: .*(not a whole number|not a number of steps that float32 holds)",
        )
        for step in (float("nan"), 1e30, -3.0, 2.5, 16777218.0)
    },
    "a name that leads out": (
        plain(
            model={"../w": torch.randn(4, 5)},
            optim={
                "state": {"../w": plain()["optim"]["state"]["w"]},
                "param_groups": [{**plain()["optim"]["param_groups"][0], "params": ["../w"]}],
            },
        ),
        "not a folder name",
    ),
}


@pytest.mark.parametrize("what", UNWRITABLE)
def test_what_deepspeed_would_not_load_is_not_written(tmp_path, what):
    content, message = UNWRITABLE[what]
    torch.save(content, tmp_path / "a.pt")
    for more in ([], ["--dry-run"]):
        error = run(
            "convert", tmp_path / "a.pt", tmp_path / "u", "--container", "universal", *more, code=3
        ).stderr
        assert re.search(message, error), error
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pt"]


def test_only_torch_s_state_has_a_place(tmp_path):
    torch.save(plain(), tmp_path / "a.pt")
    error = run(
        "convert",
        tmp_path / "a.pt",
        tmp_path / "u",
        "--container",
        "universal",
        "--to",
        "lowbit",
        code=2,
    ).stderr
    assert "leave --to out" in error
    run("convert", tmp_path / "a.pt", tmp_path / "u", "--container", "universal")
    assert (
        "exists; --force"
        in run(
            "convert", tmp_path / "a.pt", tmp_path / "u", "--container", "universal", code=2
        ).stderr
    )
    run("convert", tmp_path / "a.pt", tmp_path / "u", "--container", "universal", "--force")


def test_the_optimizer_that_is_chosen_stays_the_one(tmp_path):
    content = plain(other=plain()["optim"])
    torch.save(content, tmp_path / "a.pt")
    options = "--container", "universal", "--optimizer", "optim"
    run("convert", tmp_path / "a.pt", tmp_path / "u", *options)
    made = torch.load(tmp_path / "u" / "zero" / "w" / "exp_avg.pt", weights_only=True)["param"]
    assert torch.equal(made, content["optim"]["state"]["w"]["exp_avg"])


def test_the_weights_of_two_models_are_not_mixed_up(tmp_path):
    content = {"ema": {"w": torch.zeros(4, 5)}, **plain()}
    torch.save(content, tmp_path / "a.pt")
    torch.save(content["model"], tmp_path / "m.pt")
    command = "convert", tmp_path / "a.pt", tmp_path / "u", "--container", "universal", "--force"
    error = run(*command, code=3).stderr
    assert "w: its weight may be any of ema.w, model.w" in error
    assert "--exclude 'ema.*' or --exclude 'model.*', or give a file" in error
    for options in (["--exclude", "ema.*"], ["--model", tmp_path / "m.pt"]):
        run(*command, *options)
        made = torch.load(tmp_path / "u" / "zero" / "w" / "fp32.pt", weights_only=True)["param"]
        assert torch.equal(made, content["model"]["w"])
    torch.save({"net": {"w": torch.zeros(4, 5)}, **content}, tmp_path / "m.pt")
    error = run(*command, "--model", tmp_path / "m.pt", code=3).stderr
    assert "net.w, ema.w, model.w in --model" in error


def test_the_same_weights_twice_are_one_model_s(tmp_path):
    content = plain()
    torch.save({"state_dict": content["model"], **content}, tmp_path / "a.pt")
    run("convert", tmp_path / "a.pt", tmp_path / "u", "--container", "universal")
    made = torch.load(tmp_path / "u" / "zero" / "w" / "fp32.pt", weights_only=True)["param"]
    assert torch.equal(made, content["model"]["w"])


def test_weights_in_the_place_of_their_names_are_the_optimizer_s(tmp_path):
    """Beside them, and below them, names that end alike are of another model."""
    content = plain()
    weight = content.pop("model")["w"]
    torch.save({"ema": {"w": torch.zeros(4, 5)}, "w": weight, **content}, tmp_path / "a.pt")
    below = {"model": {"x.w": torch.zeros(4, 5), "w": weight}}
    torch.save({**below, **content}, tmp_path / "b.pt")
    for name in ("a.pt", "b.pt"):
        run("convert", tmp_path / name, tmp_path / "u", "--container", "universal", "--force")
        made = torch.load(tmp_path / "u" / "zero" / "w" / "fp32.pt", weights_only=True)["param"]
        assert torch.equal(made, weight)
