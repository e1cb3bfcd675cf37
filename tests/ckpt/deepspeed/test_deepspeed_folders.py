"""DeepSpeed's folders, ZeRO's and Universal ones, read by lowbit-ckpt: files that a writer of
tests/support makes by the package's source. The package's own are in
tests/frameworks/test_deepspeed_checkpoints.py.
"""

import json
import shutil

import pytest
import torch
from torch import nn

import lowbit
from tests.ckpt.deepspeed.folders import KINDS, check_same, converted, edited, optimizer, write
from tests.support.files.deepspeed import (
    Run,
    model_states,
    rank_file,
    save,
    small_run,
    write_universal,
    write_zero,
)
from tests.support.peers.files import need_tool, run

pytestmark = pytest.mark.slow

need_tool()


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
    for to in ("torch", "lowbit"):
        said = run("convert", folder, tmp_path / f"{to}.pt", "--to", to).stderr
        assert "adam_w_mode" in said and said.count("warning: ") == 1, said
    done = run("convert", write("zero 2", tmp_path / "torch"), tmp_path / "y.pt", "--to", "torch")
    assert "adam_w_mode" not in done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["zero 2", "universal 3"])
@pytest.mark.parametrize(
    "version, kept",
    [
        ("0.18.4", False),
        ("0.19.0", False),
        ("0.19.1+1a2b3c", False),
        (None, False),
        ("0.19.1", True),
        ("0.20.0+1a2b3c", True),
    ],
)
def test_an_old_deepspeed_does_not_save_how_adam_decays(tmp_path, kind, version, kept):
    """Before 0.19.1 `_configure_basic_optimizer` takes adam_w_mode out of the user's dict, which is
    saved as ds_config afterwards."""

    def made(type_, params):
        folder = own_adam(tmp_path, kind, {"optimizer": {"type": type_, "params": params}})
        for file in folder.glob("*_model_states.pt"):
            edited(file, lambda c: c.update(ds_version=version))
        said = run("convert", folder, tmp_path / "x.pt", "--to", "torch", "--force").stderr
        shutil.rmtree(folder)
        assert said.count("warning: ") == said.count("before 0.19.1 removed adam_w_mode")
        groups = torch.load(tmp_path / "x.pt", weights_only=True)["optim"]["param_groups"]
        return groups[0].get("decoupled_weight_decay"), said.count("warning: ")

    assert made("Adam", {"lr": 1e-3}) == ((True, 0) if kept else (None, 1))
    assert made("Adam", {"adam_w_mode": False}) == (False, 0)
    assert made("AdamW", {}) == (True, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_s_empty_extra_state_is_no_placeholder(tmp_path, kind):
    """Transformer Engine's without fp8, and a frozen parameter without elements."""
    of = small_run(frozen={"f.weight": torch.randn(5, 9), "f.none": torch.zeros(0, 4)})
    folder = write(kind, tmp_path / "step", of)
    state = torch.empty(0, dtype=torch.uint8)
    for file in folder.glob("*_model_states.pt"):
        edited(file, lambda c: c["module"].update({"l._extra_state": state}))
    if kind == "universal 1":
        save({"param": state.float()}, folder / "zero" / "l._extra_state" / "fp32.pt")
    made = converted(folder)
    check_same(made, of)
    assert torch.equal(made["model"]["l._extra_state"], state)


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_tied_to_a_frozen_weight_is_kept(tmp_path, kind):
    """As under LoRA with tied embeddings."""
    of = small_run(shared={"tied.weight": "f.weight"})
    check_same(converted(write(kind, tmp_path / "step", of)), of)


MERGED = {
    "vocabulary": (lambda t: t[:30], {"vocab_tensor": True, "cat_dim": 0}),
    "experts": (lambda t: torch.cat([t, t]), {"is_expert_param": True, "ep_num_experts": 66}),
}


@pytest.mark.parametrize("what", MERGED)
def test_ds_to_universal_changes_the_first_dimension(tmp_path, what):
    """param_shapes say that of a rank: with the padding of a vocabulary, and a rank's experts."""
    of = small_run()
    folder = write("universal 1", tmp_path / "step", of)
    change, marks = MERGED[what]
    file = {s: folder / "zero" / "a.weight" / f"{s}.pt" for s in ("fp32", "exp_avg", "exp_avg_sq")}
    for state in file:
        save({**marks, "param": change(of.tensor("a.weight", state))}, file[state])
    made = converted(folder)
    assert torch.equal(made["model"]["a.weight"], change(of.params["a.weight"]))
    for state, moment in of.moments["a.weight"].items():
        assert torch.equal(made["optim"]["state"]["a.weight"][state], change(moment))

    def refused(state, **content):
        before = file[state].read_bytes()
        save({**marks, **content}, file[state])
        error = run("convert", folder, tmp_path / "x.pt", code=3).stderr
        file[state].write_bytes(before)
        return error

    weight = change(of.params["a.weight"])
    assert "and fp32.pt says" in refused("exp_avg", param=of.moments["a.weight"]["exp_avg"])
    for wrong in ({"param": weight[:, :5]}, dict.fromkeys(marks, 0) | {"param": weight}):
        assert "mp_rank_00_model_states.pt says [33, 17]" in refused("fp32", **wrong)


def test_a_parameter_without_elements_has_its_weight_alone(tmp_path):
    """ds_to_universal finds no fragments of it, and takes the weight from the module."""
    torch.manual_seed(3)
    of = Run(
        [
            {"none": torch.zeros(0, 7), "a": torch.randn(33, 17), "c": torch.randn(3)},
            {"b": torch.randn(5), "e": torch.zeros(0)},
        ]
    )
    folder = write("universal 1", tmp_path / "step", of)
    for name in ("none", "e"):
        for file in (folder / "zero" / name).glob("*.pt"):
            if file.stem != "fp32":
                file.unlink()
    made = converted(folder)
    assert all(torch.equal(made["model"][name], p) for name, p in of.params.items())
    assert made["optim"]["state"].keys() == {"a", "b", "c"}
    live = lowbit.AdamW(
        [(name, nn.Parameter(torch.zeros_like(p))) for name, p in of.params.items()]
    )
    lowbit.load_optimizer(live, folder)
    assert torch.equal(
        live.state[live.param_groups[0]["params"][3]]["exp_avg"], of.moments["b"]["exp_avg"]
    )


def test_only_files_of_the_state_s_name_are_the_state(tmp_path):
    """A copy beside it is another state, and what the system made is none."""
    folder = write("universal 1", tmp_path / "step")
    (folder / "zero" / ".DS_Store").touch()
    (folder / "zero" / "a.weight" / "._exp_avg.pt").touch()
    check_same(converted(folder), small_run())
    for name in ("a.weight", "b.weight"):
        file = folder / "zero" / name / "exp_avg.pt"
        file.rename(file.with_name("exp_avg.old.pt"))
    error = run("convert", folder, tmp_path / "x.pt", "--to", "lowbit", code=3).stderr
    assert "exp_avg.old" in error


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
