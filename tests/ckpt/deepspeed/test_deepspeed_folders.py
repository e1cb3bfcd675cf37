"""DeepSpeed's folders, ZeRO's and Universal ones, in lowbit-ckpt: files that a writer of
tests/support makes by the package's source. The package's own are in
tests/frameworks/test_deepspeed_checkpoints.py."""

import json
import os
import pathlib
import re
import shutil

import pytest
import torch
from torch import nn

import lowbit
from tests.support.files.deepspeed import (
    Run,
    fragment_address,
    model_states,
    named_as_deepspeed,
    optimizer_states,
    rank_file,
    save,
    small_run,
    write_universal,
    write_zero,
)
from tests.support.peers.files import need_tool, run

pytestmark = pytest.mark.slow

need_tool()


def write(kind: str, folder: pathlib.Path, of=None, **more) -> pathlib.Path:
    of = small_run() if of is None else of
    kind, stage = kind.split()
    return (write_zero if kind == "zero" else write_universal)(
        folder, of, int(stage), **{"ranks": 3, **more}
    )


def converted(folder, *options):
    target = folder.parent / "out.pt"
    target.unlink(missing_ok=True)
    run("convert", folder, target, *options)
    return torch.load(target, weights_only=True)


def check_same(made, of):
    """The checkpoint is that of the run: every tensor and number, in its own shape and dtype."""
    for name, p in of.params.items():
        state = made["optim"]["state"][name]
        assert torch.equal(made["model"][name], p) and made["model"][name].dtype == torch.float32
        assert {k: v.shape for k, v in state.items() if k != "step"} == dict.fromkeys(
            of.moments[name], p.shape
        )
        assert all(torch.equal(state[k], v) for k, v in of.moments[name].items())
        assert state["step"] == of.step
    for name, p in {**of.frozen, **of.buffers}.items():
        kept = made["model"][name]
        assert kept.dtype == (p.to(of.dtype).dtype if name in of.frozen else p.dtype)
        assert torch.equal(kept, p.to(kept.dtype)) and kept.shape == p.shape
    for name, owner in of.shared.items():
        assert torch.equal(made["model"][name], of.params[owner])
    groups = made["optim"]["param_groups"]
    assert [group["params"] for group in groups] == [list(group) for group in of.groups]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert groups[0]["betas"] == (0.9, 0.999)
    assert made["deepspeed"]["mine"] == 5 and made["deepspeed"]["global_steps"] == of.step


KINDS = ["zero 1", "zero 2", "zero 3", "universal 1", "universal 3"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_one_checkpoint(tmp_path, kind):
    of = small_run(dtype=torch.bfloat16, shared={"tied.weight": "a.weight"})
    folder = write(kind, tmp_path / "step", of)
    run("verify", folder)
    report = json.loads(run("inspect", folder, "--json").stdout)
    assert (report["container"], report["dialect"], report["algorithm"]) == (
        kind.split()[0],
        "torch",
        "adam",
    )
    assert report["steps"] == [3.0]
    check_same(converted(folder), of)


@pytest.mark.parametrize("ranks", [1, 2, 5, 16])
@pytest.mark.parametrize("stage", [2, 3])
def test_any_number_of_ranks(tmp_path, stage, ranks):
    """16 ranks leave some without a slice of the small group."""
    of = small_run()
    check_same(converted(write_zero(tmp_path / "step", of, stage, ranks, "bf16_")), of)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_parameter_without_elements(tmp_path, stage, ranks):
    """No rank of stages 1 and 2 names a slice of it."""
    torch.manual_seed(3)
    of = Run(
        [
            {"none": torch.zeros(0, 7), "a": torch.randn(33, 17)},
            {"b": torch.randn(5), "e": torch.zeros(0)},
        ]
    )
    folder = write_zero(tmp_path / "step", of, stage, ranks)
    run("verify", folder)
    check_same(converted(folder), of)
    run("convert", folder, tmp_path / "universal", "--container", "universal")
    assert "the same, by meaning" in run("diff", folder, tmp_path / "universal").stdout
    live = lowbit.AdamW(
        [(name, nn.Parameter(torch.zeros_like(p))) for name, p in of.params.items()]
    )
    lowbit.load_optimizer(live, folder)
    assert all(state["step"] == 3 for state in live.state.values())


def one_group(**more):
    """More parameters than ranks, of different lengths."""
    sizes = {"a": (33, 17), "b": (5,), "c": (1,), "d": (64, 3), "e": (), "f": (19,)}
    torch.manual_seed(2)
    return Run([{name: torch.randn(shape) for name, shape in sizes.items()}], **more)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("padded_to", [1, 4])
def test_parameters_that_were_dealt_out_are_where_they_lie(tmp_path, stage, ranks, padded_to):
    """param_slice_mappings of DeepSpeed 0.19.8 are wrong under round_robin_gradients,
    but for parameter_alignment.
    """
    of = one_group(round_robin=True, padded_to=padded_to)
    folder = write_zero(tmp_path / "step", of, stage, ranks)
    made = converted(folder)
    for name, p in of.params.items():
        state = made["optim"]["state"][name]
        assert torch.equal(made["model"][name], p), name
        assert all(torch.equal(state[k], v) for k, v in of.moments[name].items()), name


def test_parameters_in_another_order_are_refused(tmp_path):
    """A folder with the model_states.pt of another save, whose parameters have the same shapes."""
    folder = write_zero(tmp_path / "step", small_run(), 2, 3)

    def swapped(content):
        group = content["param_shapes"][0]
        group.move_to_end("a.weight")

    edited(folder / "mp_rank_00_model_states.pt", swapped)
    error = run("convert", folder, tmp_path / "x.pt", code=3).stderr
    assert "the order of the parameters in param_shapes" in error and "group 0" in error
    assert not (tmp_path / "x.pt").exists()


def test_the_two_folders_of_one_run_are_the_same(tmp_path):
    of = small_run()
    a, b = write_zero(tmp_path / "a", of, 2, 2), write_universal(tmp_path / "b", of, 1)
    assert "the same, by meaning" in run("diff", a, b).stdout
    run("reshard", a, tmp_path / "dcp", "--world-size", "3")
    assert "the same, by meaning" in run("diff", tmp_path / "dcp", b).stdout


@pytest.mark.parametrize("kind", ["zero 2", "zero 3", "universal 1", "universal 3"])
def test_into_a_live_optimizer_and_into_8_bits(tmp_path, kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 96), nn.Linear(96, 64, bias=False))
    params = dict(model.named_parameters())
    of = small_run(frozen={}, buffers={})
    of.groups = [
        {"0.weight": params["0.weight"].data, "1.weight": params["1.weight"].data},
        {"0.bias": params["0.bias"].data},
    ]
    of.__post_init__()
    folder = write(kind, tmp_path / "step", of)
    opt = lowbit.AdamW(
        [
            {
                "params": [("0.weight", params["0.weight"]), ("1.weight", params["1.weight"])],
                "weight_decay": 0.1,
            },
            {"params": [("0.bias", params["0.bias"])], "weight_decay": 0.0},
        ]
    )
    lowbit.load_optimizer(opt, folder)
    run("convert", folder, tmp_path / "8bit.pt", "--to", "lowbit", "--state-format", "8bit")
    other = lowbit.AdamW([{"params": [(n, params[n]) for n in group]} for group in of.groups])
    lowbit.load_optimizer(other, tmp_path / "8bit.pt")
    for name in of.params:
        mine, theirs = opt.state[params[name]], other.state[params[name]]
        assert mine.keys() == theirs.keys() and mine["step"] == of.step
        assert all(torch.equal(mine[k], theirs[k]) for k in mine), name


def own_adam(tmp_path, kind, config, **more):
    """A folder with groups as FusedAdam and CPUAdam of DeepSpeed 0.19.8 keep them."""
    of = small_run()
    group = {"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, **more}
    of.settings = lambda i: {**group, "weight_decay": 0.1 if i == 0 else 0.0}
    folder = write(kind, tmp_path / "step", of)
    for file in folder.glob("*_model_states.pt"):
        edited(file, lambda c: c.update(ds_config=config))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_deepspeed_s_adam_keeps_its_mathematics(tmp_path, kind):
    """Which of the two decays weights it has is in ds_config alone: `adam_w_mode` counts for the
    name Adam, in any case.
    """

    def decoupled(type_, params):
        config = {"optimizer": {"type": type_, "params": params}}
        made = converted(own_adam(tmp_path, kind, config), "--to", "lowbit")
        shutil.rmtree(tmp_path / "step")
        return [group.get("decoupled_weight_decay") for group in made["optim"]["param_groups"]]

    assert decoupled("Adam", {"lr": 1e-3, "adam_w_mode": False}) == [False, False]
    assert decoupled("Adam", {"adam_w_mode": True}) == decoupled("adam", {}) == [True, True]
    assert decoupled("AdamW", {"adam_w_mode": False}) == [True, True]
    folder = own_adam(tmp_path, kind, {"optimizer": {"type": "Adam"}}, bias_correction=False)
    error = run("convert", folder, tmp_path / "x.pt", "--to", "torch", code=3).stderr
    assert "bias_correction=False" in error
    live = lowbit.AdamW([("a.weight", nn.Parameter(torch.zeros(33, 17)))])
    with pytest.raises(ValueError, match="bias_correction=False"):
        lowbit.load_optimizer(live, folder)


@pytest.mark.parametrize("config", ["ds.json", {"train_batch_size": 1}])
def test_a_decay_that_no_file_tells_is_warned_of(tmp_path, config):
    """The configuration is a path, or the optimizer is the user's own."""
    folder = own_adam(tmp_path, "zero 2", config)
    done = run("convert", folder, tmp_path / "x.pt", "--to", "torch")
    assert "adam_w_mode" in done.stdout + done.stderr
    done = run("convert", write("zero 2", tmp_path / "torch"), tmp_path / "y.pt", "--to", "torch")
    assert "adam_w_mode" not in done.stdout + done.stderr


@pytest.mark.parametrize("stage", [1, 2])
def test_what_several_ranks_of_a_model_keep_for_themselves_is_named(tmp_path, stage):
    """Tensor parallel ranks share buffers and frozen parameters in a way that no file says."""
    folder = write(f"universal {stage}", tmp_path / "step")
    for name in ("f.weight", "n.running_mean", "n.num_batches_tracked"):
        shutil.rmtree(folder / "zero" / name)
    shutil.copy(folder / "mp_rank_00_model_states.pt", folder / "mp_rank_01_model_states.pt")
    said = json.loads(run("inspect", folder, "--json").stdout)["warnings"]
    assert len(said) == 1 and "of 2 model_states.pt are not read" in said[0], said
    assert all(name in said[0] for name in ("f.weight", "n.running_mean", "n.num_batches_tracked"))
    assert converted(folder)["model"].keys() == small_run().params.keys()


def test_several_ranks_of_a_model_with_all_tensors_in_files_are_whole(tmp_path):
    folder = write("universal 1", tmp_path / "step")
    shutil.copy(folder / "mp_rank_00_model_states.pt", folder / "mp_rank_01_model_states.pt")
    assert json.loads(run("inspect", folder, "--json").stdout)["warnings"] == []
    assert torch.equal(converted(folder)["model"]["f.weight"], small_run().frozen["f.weight"])


# A Universal Checkpoint of anything


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
        "no float32 tensor of the weight's shape",
    ),
    **{
        f"a step of {step}": (
            plain(state={"step": torch.tensor(step, dtype=torch.float64)}),
            "w: .*(no whole number|no count of steps that float32 holds)",
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
        "no name of a folder",
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


# What is refused


def edited(path, change):
    """A file with its content changed."""
    with named_as_deepspeed():
        content = torch.load(path, weights_only=False)
    change(content)
    save(content, path)


def optimizer(content):
    return content["optimizer_state_dict"]


def set_fragment(content, numel, start):
    optimizer(content)["param_slice_mappings"][0]["a.weight"] = fragment_address(numel, start)


def reshape(content):
    content["param_shapes"][0]["a.weight"] = torch.Size([33, 18])


EDITS = {
    "a slice beyond its vector": (
        "zero 1",
        rank_file(0),
        lambda c: set_fragment(c, 10**15, 0),
        "elements 0 to 1000000000000000 of a vector of",
    ),
    "a slice that starts below": (
        "zero 1",
        rank_file(0),
        lambda c: set_fragment(c, 10, -4),
        "no two numbers",
    ),
    "a slice that is too short": (
        "zero 1",
        rank_file(0),
        lambda c: set_fragment(c, 10, 0),
        "a.weight: the files hold",
    ),
    "a slice of an unknown parameter": (
        "zero 1",
        rank_file(1),
        lambda c: optimizer(c)["param_slice_mappings"][1].update(x=fragment_address(1, 0)),
        "slice of x, which",
    ),
    "paddings of another group": (
        "zero 1",
        rank_file(0),
        lambda c: optimizer(c).update(param_alignment_paddings=[[0], [0, 0]]),
        "param_alignment_paddings have no 2 numbers for the parameters of group 0",
    ),
    "no slices": (
        "zero 1",
        rank_file(0),
        lambda c: optimizer(c).pop("param_slice_mappings"),
        "does not say where parameters lie",
    ),
    "another shape": (
        "zero 1",
        "mp_rank_00_model_states.pt",
        reshape,
        "a.weight: the files hold 561 of its 594 elements",
    ),
    "another shape in stage 3": (
        "zero 3",
        "zero_pp_rank_0_mp_rank_00_model_states.pt",
        reshape,
        "where the shapes of",
    ),
    "a shape that overflows": (
        "zero 3",
        "zero_pp_rank_0_mp_rank_00_model_states.pt",
        lambda c: c["param_shapes"][0].update({"a.weight": torch.Size([2**40, 2**40])}),
        "a.weight",
    ),
    "more ranks than files": (
        "zero 2",
        rank_file(0),
        lambda c: optimizer(c).update(partition_count=[5, 5]),
        "the file of rank 3 is missing",
    ),
    "fewer ranks than files": (
        "zero 2",
        rank_file(0),
        lambda c: optimizer(c).update(partition_count=[2, 2]),
        "has files of 3 ranks",
    ),
    "groups cut apart": (
        "zero 2",
        rank_file(0),
        lambda c: optimizer(c).update(partition_count=[3, 1]),
        "mixture-of-experts layers",
    ),
    "another step on a rank": (
        "zero 2",
        rank_file(1),
        lambda c: optimizer(c)["base_optimizer_state"]["state"][0].update(step=torch.tensor(9.0)),
        "another one than on the ranks before",
    ),
    "another dtype on a rank": (
        "zero 2",
        rank_file(1),
        lambda c: optimizer(c)["base_optimizer_state"]["state"][0].update(
            exp_avg=optimizer(c)["base_optimizer_state"]["state"][0]["exp_avg"].bfloat16()
        ),
        "is float32 in some files and bfloat16",
    ),
    "a moment that one rank lacks": (
        "zero 2",
        rank_file(2),
        lambda c: optimizer(c)["base_optimizer_state"]["state"][0].pop("exp_avg"),
        "exp_avg: the files hold",
    ),
    "a moment that is too short": (
        "zero 2",
        rank_file(0),
        lambda c: optimizer(c)["base_optimizer_state"]["state"][0].update(exp_avg=torch.ones(3)),
        "not that of the flat vector",
    ),
    "quantized slices": (
        "zero 2",
        rank_file(0),
        lambda c: optimizer(c)["base_optimizer_state"]["state"].update(
            {0: {"a.weight": {"exp_avg_dynamic8": torch.ones(4, dtype=torch.uint8)}}}
        ),
        'bind.engine, export="fp32"',
    ),
    "groups of other vectors": (
        "zero 2",
        rank_file(0),
        lambda c: optimizer(c)["base_optimizer_state"]["param_groups"][0].update(params=[7]),
        "do not number the 2 flat vectors",
    ),
    "a group too few": (
        "zero 2",
        rank_file(0),
        lambda c: optimizer(c)["base_optimizer_state"].update(
            param_groups=optimizer(c)["base_optimizer_state"]["param_groups"][:1]
        ),
        "have 1 of the 2 flat vectors",
    ),
    "an elastic checkpoint": (
        "zero 1",
        rank_file(0),
        lambda c: optimizer(c).update(
            base_optimizer_state=[{"exp_avg": torch.ones(4), "exp_avg_sq": torch.ones(4)}] * 2
        ),
        "an elastic checkpoint.*elastic_checkpoint false",
    ),
    "no shapes": (
        "zero 2",
        "mp_rank_00_model_states.pt",
        lambda c: c.pop("param_shapes"),
        "has no param_shapes",
    ),
    "no master": (
        "zero 3",
        rank_file(0),
        lambda c: optimizer(c).update(fp32_flat_groups=[]),
        "offloaded to NVMe",
    ),
    "a frozen slice": (
        "zero 3",
        "zero_pp_rank_1_mp_rank_00_model_states.pt",
        lambda c: c.update(frozen_param_fragments=None),
        "no slice of the frozen f.weight",
    ),
    "a placeholder": (
        "zero 3",
        "zero_pp_rank_0_mp_rank_00_model_states.pt",
        lambda c: c["module"].update({"gone": torch.zeros(0)}),
        "placeholder of gone",
    ),
    "a universal shape": (
        "universal 1",
        "mp_rank_00_model_states.pt",
        reshape,
        "has the shape .33, 17., and .* says .33, 18.",
    ),
    "a universal flat shape": (
        "universal 3",
        "zero_pp_rank_0_mp_rank_00_model_states.pt",
        reshape,
        "a.weight: the files hold 561 of its 594 elements",
    ),
    "a universal parameter without a group": (
        "universal 1",
        "mp_rank_00_model_states.pt",
        lambda c: c["param_shapes"][0].pop("a.weight"),
        "zero/a.weight is of no parameter that .*mp_rank_00_model_states.pt names",
    ),
    "no step": (
        "universal 3",
        "zero/optimizer_state.pt",
        lambda c: c["optimizer_state_dict"]["state"][0].pop("step"),
        "and no step in",
    ),
}


@pytest.mark.parametrize("what", EDITS)
def test_a_contradiction_is_one_clear_error(tmp_path, what):
    kind, file, change, message = EDITS[what]
    folder = write(kind, tmp_path / "step")
    edited(folder / file, change)
    error = run("inspect", folder, code=3).stderr
    assert len(error.splitlines()) == 1
    assert re.search(message, error), error


FILES = {
    "a rank is missing": (
        "zero 1",
        lambda f: (f / rank_file(1)).unlink(),
        "the file of rank 1 is missing",
    ),
    "the last rank is missing": (
        "zero 3",
        lambda f: (f / rank_file(2)).unlink(),
        "the file of rank 2 is missing",
    ),
    "two saves": (
        "zero 1",
        lambda f: shutil.copy(f / rank_file(0), f / rank_file(0, "bf16_")),
        "has two files of rank 0",
    ),
    "no model": (
        "zero 1",
        lambda f: (f / "mp_rank_00_model_states.pt").unlink(),
        "tells the parameters' names",
    ),
    "tensor parallelism": (
        "zero 1",
        lambda f: shutil.copy(f / rank_file(0), f / "zero_pp_rank_0_mp_rank_01_optim_states.pt"),
        "several parts of the model.*ds_to_universal",
    ),
    "a pipeline": (
        "zero 1",
        lambda f: (f / "layer_00-model_states.pt").touch(),
        "a pipeline's layers.*ds_to_universal",
    ),
    "experts": (
        "zero 1",
        lambda f: (f / "layer_0_expert_0_mp_rank_00_model_states.pt").touch(),
        "mixture-of-experts.*ds_to_universal",
    ),
    "a rank's file is a link": (
        "zero 1",
        lambda f: ((f / rank_file(1)).rename(f / "x"), os.symlink("x", f / rank_file(1))),
        "is a link, which is not followed",
    ),
    "a frozen rank's file": (
        "zero 3",
        lambda f: (f / "zero_pp_rank_2_mp_rank_00_model_states.pt").unlink(),
        "zero_pp_rank_2_mp_rank_00_model_states",
    ),
    "a weight is missing": (
        "universal 1",
        lambda f: (f / "zero" / "a.weight" / "fp32.pt").unlink(),
        "no zero/a.weight/fp32.pt",
    ),
    "a parameter is missing": (
        "universal 3",
        lambda f: shutil.rmtree(f / "zero" / "a.weight"),
        "no zero/a.weight/fp32.pt",
    ),
    "a parameter has no state": (
        "universal 1",
        lambda f: [
            (f / "zero" / "b.weight" / f"{s}.pt").unlink()
            for s in ("exp_avg", "exp_avg_sq", "step")
        ],
        "zero/b.weight has not the files that zero/a.weight has",
    ),
    "a first parameter has no state": (
        "universal 1",
        lambda f: [
            (f / "zero" / "a.weight" / f"{s}.pt").unlink()
            for s in ("exp_avg", "exp_avg_sq", "step")
        ],
        "zero/b.weight has not the files that zero/a.weight has",
    ),
    "a moment is missing": (
        "universal 3",
        lambda f: (f / "zero" / "a.weight" / "exp_avg_sq.pt").unlink(),
        "zero/b.weight has not the files that zero/a.weight has",
    ),
    "a step is missing": (
        "universal 1",
        lambda f: (f / "zero" / "a.bias" / "step.pt").unlink(),
        "zero/a.bias has not the files that zero/s has",
    ),
    "a group has no state": (
        "universal 1",
        lambda f: [
            (f / "zero" / p / f"{s}.pt").unlink()
            for p in ("s", "a.bias")
            for s in ("exp_avg", "exp_avg_sq", "step")
        ],
        "zero/a.bias has not the files that zero/b.weight has",
    ),
    "a parameter's folder is a link": (
        "universal 1",
        lambda f: ((f / "zero" / "s").rename(f / "s"), os.symlink("../s", f / "zero" / "s")),
        "is a link, which is not followed",
    ),
    "the parameters are a link": (
        "universal 1",
        lambda f: ((f / "zero").rename(f / "z"), os.symlink("z", f / "zero")),
        "is a link, which is not followed",
    ),
    "a parameter too many": (
        "universal 1",
        lambda f: shutil.copytree(f / "zero" / "s", f / "zero" / "t"),
        "zero/t is of no parameter",
    ),
    "no model beside it": (
        "universal 1",
        lambda f: (f / "mp_rank_00_model_states.pt").unlink(),
        "no .*model_states.pt",
    ),
    "an empty file": (
        "universal 1",
        lambda f: (f / "zero" / "s" / "exp_avg.pt").write_bytes(b""),
        "exp_avg.pt",
    ),
}


@pytest.mark.parametrize("what", FILES)
def test_a_folder_that_is_not_whole_is_one_clear_error(tmp_path, what):
    kind, change, message = FILES[what]
    folder = write(kind, tmp_path / "step")
    change(folder)
    error = run("inspect", folder, code=3).stderr
    assert len(error.splitlines()) == 1 and re.search(message, error), error


def test_a_flipped_bit_is_found(tmp_path):
    """Each rank's vector is read through many parameters' slices;
    its checksum is verified all the same.
    """
    folder = write("zero 2", tmp_path / "step")
    file = folder / rank_file(1)
    content = bytearray(file.read_bytes())
    vector = optimizer_states(small_run(), 2, 3, 1)["optimizer_state_dict"]["base_optimizer_state"][
        "state"
    ][0]["exp_avg"]
    content[content.index(vector.numpy().tobytes()) + 5] ^= 4
    file.write_bytes(content)
    error = run("convert", folder, tmp_path / "x.pt", code=3).stderr
    assert rank_file(1) in error and not (tmp_path / "x.pt").exists()
    run("verify", folder, code=3)


def test_one_rank_s_file_says_what_it_is(tmp_path):
    file = write("zero 2", tmp_path / "step") / rank_file(0)
    shown = run("inspect", file).stdout
    assert "one rank's slices of flat vectors" in shown and "torch adam" not in shown
    for command in (
        ["convert", file, tmp_path / "x.pt"],
        ["reshard", file, tmp_path / "x", "--world-size", "2"],
    ):
        assert "give the folder" in run(*command, code=3).stderr
    opt = lowbit.AdamW([("a", nn.Parameter(torch.zeros(4)))])
    with pytest.raises(ValueError, match="one rank's slices of flat vectors"):
        lowbit.load_optimizer(opt, file)


def test_a_model_without_a_stepped_optimizer(tmp_path):
    """Its vectors have no state yet."""
    folder = write("zero 2", tmp_path / "step")
    for rank in range(3):
        edited(
            folder / rank_file(rank),
            lambda c: optimizer(c)["base_optimizer_state"].update(state={}),
        )
    made = converted(folder)
    assert torch.equal(made["model"]["a.weight"], small_run().params["a.weight"])
    assert model_states(small_run(), 2, 3)["param_shapes"][0].keys() == set(
        made["optim"]["param_groups"][0]["params"]
    )
