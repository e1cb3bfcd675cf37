"""The dynamic loss scale of DeepSpeed's runs in float16: an object in its files, plain values
elsewhere. The package's own are in tests/frameworks/test_deepspeed_checkpoints.py."""

import pytest
import torch

from tests.support.files.deepspeed import (
    DynamicLossScaler,
    LossScaler,
    named_as_deepspeed,
    small_run,
    write_universal,
    write_zero,
)
from tests.support.peers.files import need_tool, run

need_tool()
KINDS = ["zero 1", "zero 2", "zero 3", "universal 1", "universal 3"]


def write(kind, folder, scaler, **more):
    of = small_run(dtype=torch.float16, loss_scaler=scaler, **more)
    kind, stage = kind.split()
    return (write_zero if kind == "zero" else write_universal)(folder, of, int(stage), ranks=2)


def converted(source, target, *options):
    said = run("convert", source, target, *options)
    return torch.load(target, weights_only=True), said.stdout + said.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_kept_by_name(tmp_path, kind):
    want = vars(DynamicLossScaler())
    folder = write(kind, tmp_path / "step", DynamicLossScaler())
    run("verify", folder)
    assert "deepspeed.optimizer.loss_scaler.cur_scale = 4096" in run("inspect", folder).stdout
    for to in ((), ("--to", "lowbit"), ("--to", "torch")):
        made, said = converted(folder, tmp_path / "out.pt", "--force", *to)
        assert made["deepspeed"]["optimizer"]["loss_scaler"] == want and "loss scale" not in said


@pytest.mark.parametrize("way", [(), ("--to", "lowbit", "--state-format", "float32"), ("dcp",)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_universal_checkpoint_has_the_object_again(tmp_path, kind, way):
    source = write(kind, tmp_path / "step", DynamicLossScaler())
    if way == ("dcp",):
        run("convert", source, tmp_path / "dcp")
        source = tmp_path / "dcp"
    elif way:
        run("convert", source, tmp_path / "low.pt", *way)
        source = tmp_path / "low.pt"
    run("convert", source, tmp_path / "universal", "--container", "universal")
    with named_as_deepspeed():
        made = torch.load(
            tmp_path / "universal" / "zero" / "optimizer_state.pt", weights_only=False
        )
    assert type(made["loss_scaler"]) is DynamicLossScaler and made["dynamic_loss_scale"] is True
    assert vars(made["loss_scaler"]) == vars(DynamicLossScaler())
    assert "the same, by meaning" in run("diff", tmp_path / "step", tmp_path / "universal").stdout
    models = torch.load(tmp_path / "universal" / "mp_rank_00_model_states.pt", weights_only=True)
    assert "loss_scaler" not in models and models["mine"] == 5


def test_a_fixed_scale_is_the_configuration_s(tmp_path):
    made, said = converted(write("zero 2", tmp_path / "step", LossScaler()), tmp_path / "out.pt")
    assert "optimizer" not in made["deepspeed"] and "loss scale" not in said


def test_what_is_not_the_usual_one_is_named(tmp_path):
    odd = DynamicLossScaler()
    odd.history = [torch.ones(3)]
    folder = write("zero 2", tmp_path / "step", odd)
    made, said = converted(folder, tmp_path / "out.pt")
    assert "the dynamic loss scale is kept in an object" in said and "DynamicLossScaler" in said
    assert "optimizer" not in made["deepspeed"]
    run("convert", folder, tmp_path / "universal", "--container", "universal")


def test_a_part_of_it_is_not_written(tmp_path):
    folder = write("zero 2", tmp_path / "step", DynamicLossScaler())
    done = run(
        "convert",
        folder,
        tmp_path / "u",
        "--container",
        "universal",
        "--exclude",
        "*.cur_hysteresis",
    )
    assert (
        "deepspeed.optimizer.loss_scaler is left out: it lacks cur_hysteresis"
        in done.stdout + done.stderr
    )
    made = torch.load(tmp_path / "u" / "zero" / "optimizer_state.pt", weights_only=True)
    assert "loss_scaler" not in made


@pytest.mark.parametrize(
    "mine", [1.5, {"cur_scale": 8, "of": torch.ones(2)}], ids=["number", "dict"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_scaler_of_the_user_stays_beside_it(tmp_path, kind, mine):
    """In the client state of engine.save_checkpoint, which has any names."""
    more = {"client_state": {"mine": 5, "loss_scaler": mine}}
    source = write(kind, tmp_path / "step", DynamicLossScaler(), **more)
    run("convert", source, tmp_path / "low.pt", "--to", "lowbit", "--state-format", "float32")
    run("convert", tmp_path / "low.pt", tmp_path / "universal", "--container", "universal")
    made = torch.load(tmp_path / "universal" / "mp_rank_00_model_states.pt", weights_only=True)
    if isinstance(mine, dict):
        assert made["loss_scaler"]["cur_scale"] == 8 and made["loss_scaler"]["of"].tolist() == [
            1,
            1,
        ]
    else:
        assert made["loss_scaler"] == mine
    with named_as_deepspeed():
        kept = torch.load(
            tmp_path / "universal" / "zero" / "optimizer_state.pt", weights_only=False
        )
    assert vars(kept["loss_scaler"]) == vars(DynamicLossScaler())
