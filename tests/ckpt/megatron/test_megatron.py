"""Megatron-Core's distributed checkpoints: real ones of 0.16.1 in tests/golden, and odd ones of a
writer that follows its source.
"""

import json
import tarfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import lowbit
from tests.support.files.megatron import SHAPES, flattened, groups, numbers, tensors, write
from tests.support.paths import ROOT
from tests.support.peers.files import need_tool, run

need_tool()
GOLDEN = ROOT / "tests" / "golden" / "megatron_core.tar.xz"
PREFIX = "optimizer.state."


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    folder = tmp_path_factory.mktemp("megatron")
    with tarfile.open(GOLDEN) as archive:
        archive.extractall(folder, filter="data")
    return folder / "small"


def loaded(folder):
    """What torch's own reader, which Megatron-Core's is made of, has of each tensor."""
    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    out = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(out, checkpoint_id=folder, no_dist=True)
    return out


def converted(source, target, *options, to="torch", code=0):
    done = run("convert", source, target, "--to", to, "--force", *options, code=code)
    return done.stderr if code else torch.load(target, weights_only=True)


@pytest.mark.parametrize("name", ["plain_tp2", "reshardable_tp2"])
def test_real_ones_convert_to_equal_numbers(golden, tmp_path, name):
    """Moments, steps and settings; the float32 weights replace the bfloat16 ones."""
    said = json.loads(run("inspect", golden / name, "--json").stdout)
    assert (said["dialect"], said["algorithm"], said["steps"]) == ("megatron", "adam", [3.0])
    run("verify", golden / name)
    want = loaded(golden / name)
    master = "fp32_param" if name == "plain_tp2" else "param"
    made = converted(golden / name, tmp_path / "out.pt")
    params = [
        key.removeprefix(PREFIX + "exp_avg.") for key in want if key.startswith(PREFIX + "exp_avg.")
    ]
    assert len(params) == 7 and set(made["optimizer"]["state"]) == set(params)
    for key in params:
        state = made["optimizer"]["state"][key]
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[moment], want[f"{PREFIX}{moment}.{key}"])
        assert float(state["step"]) == 3 and len(state) == 3
        assert torch.equal(made[key], want[f"{PREFIX}{master}.{key}"])
    (group,) = made["optimizer"]["param_groups"]
    assert group["lr"] == 0.01 and tuple(group["betas"]) == (0.9, 0.999)
    assert group["weight_decay"] == 0.1 and sorted(group["params"]) == sorted(params)


@pytest.mark.parametrize("name", ["plain_tp2", "reshardable_tp2"])
def test_real_ones_go_to_lowbit_and_back(golden, tmp_path, name):
    converted(golden / name, tmp_path / "low.pt", "--state-format", "float32", to="lowbit")
    back = converted(tmp_path / "low.pt", tmp_path / "back.pt")
    made = converted(golden / name, tmp_path / "made.pt")
    assert "the same, by meaning" in run("diff", tmp_path / "made.pt", tmp_path / "back.pt").stdout
    for key, state in made["optimizer"]["state"].items():
        assert torch.equal(back[key], made[key])
        assert all(
            torch.equal(back["optimizer"]["state"][key][s], state[s])
            for s in ("exp_avg", "exp_avg_sq")
        )
        assert float(back["optimizer"]["state"][key]["step"]) == 3


def test_flat_buckets_are_refused(tmp_path):
    """Of the sharding type dp_reshardable. Padding in them is memory that nobody wrote,
    so it is not a finding of verify.
    """
    bucket = (
        "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.float32, "
        "torch.float32).bucket_idx_0."
    )
    content = {
        "fc1.weight": torch.ones(8, 4),
        bucket + "exp_avg": torch.ones(40),
        bucket + "exp_avg_sq": -torch.ones(40),
    }
    source = write(tmp_path / "m", content, {"param_state_sharding_type": "dp_reshardable"})
    run("verify", source)
    error = converted(source, tmp_path / "out.pt", code=3)
    assert "flat buckets of the distributed optimizer" in error and str(source) in error
    assert "--dist-ckpt-optim-fully-reshardable" in error and "tensor, pipeline" in error
    assert "--exclude '*optimizer.*'" in error
    run("convert", source, tmp_path / "out.pt", "--exclude", "*optimizer.*")
    assert list(torch.load(tmp_path / "out.pt")) == ["fc1.weight"]


def test_load_optimizer(tmp_path):
    """By name into a model of the same names; into another one not at all."""

    class Model(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.embedding = nn.Embedding(12, 4)
            setattr(self, name, nn.Linear(4, 8))

    source = write(tmp_path / "m", tensors(), {"param_groups": groups()})
    model = Model("fc1")
    opt = lowbit.AdamW(model.named_parameters(), lr=1.0, state_format="float32")
    lowbit.load_optimizer(opt, source)
    for name, p in model.named_parameters():
        assert torch.equal(opt.state[p]["exp_avg"], numbers(name, "exp_avg"))
        assert torch.equal(opt.state[p]["exp_avg_sq"], numbers(name, "exp_avg_sq"))
        assert float(opt.state[p]["step"]) == 3
    assert opt.param_groups[0]["lr"] == 0.01 and tuple(opt.param_groups[0]["betas"]) == (0.9, 0.95)
    other = lowbit.AdamW(Model("linear_fc1").named_parameters(), lr=1.0)
    with pytest.raises(ValueError, match="linear_fc1"):
        lowbit.load_optimizer(other, source)


@pytest.mark.parametrize("grid", [(1, 1), (2, 1), (1, 2), (4, 2)])
def test_flattened_tensors_of_older_versions(tmp_path, grid):
    content = tensors()
    for name in content:
        if name.startswith(PREFIX):
            cut = grid[: content[name].ndim]
            content[name] = flattened(content[name], cut)
    made = converted(
        write(tmp_path / "m", content, {"param_groups": groups()}), tmp_path / "out.pt"
    )
    for name in SHAPES:
        assert torch.equal(made["optimizer"]["state"][name]["exp_avg"], numbers(name, "exp_avg"))
        assert torch.equal(made[name], numbers(name, "param"))


def test_several_optimizers_keep_their_settings(tmp_path):
    first, second = ["embedding.weight"], ["fc1.weight", "fc1.bias"]
    content = tensors(prefix="chained_0.", of=first) | tensors(prefix="chained_1.", of=second)
    said = {
        0: {"param_groups": groups()},
        1: {"param_groups": {0: {**groups()[0], "lr": 0.5, "step": 7}}},
    }
    made = converted(write(tmp_path / "m", content, said), tmp_path / "out.pt")["optimizer"]
    assert [g["lr"] for g in made["param_groups"]] == [0.01, 0.5]
    assert [g["params"] for g in made["param_groups"]] == [first, sorted(second)]
    assert float(made["state"]["fc1.bias"]["step"]) == 7


def test_float32_weights_need_no_master(tmp_path):
    """Such as a router's among bfloat16 ones: Megatron-Core's plain optimizer keeps none."""
    content = {**tensors(), "fc1.bias": numbers("fc1.bias", "param")}
    del content[PREFIX + "fp32_param.fc1.bias"]
    made = converted(
        write(tmp_path / "m", content, {"param_groups": groups()}), tmp_path / "out.pt"
    )
    assert torch.equal(made["fc1.bias"], numbers("fc1.bias", "param"))
    assert len(made["optimizer"]["state"]) == 3


def test_what_cannot_be_known_is_refused(tmp_path):
    out = tmp_path / "out.pt"

    def refused(name, content, optimizer, **more):
        return converted(write(tmp_path / name, content, optimizer, **more), out, code=3)

    error = refused("decay", tensors(), {"param_groups": groups(weight_decay=0.0)})
    assert "weight_decay differs between the groups (0.1, 0.0)" in error and "--lossy" in error
    made = converted(tmp_path / "decay", out, "--lossy")
    assert (
        made["optimizer"]["param_groups"][0]["weight_decay"] == 0 and "0 for weight decay" in error
    )
    some = {**groups(), 1: {**groups()[1], "maximize": False}}
    assert "maximize is not in all groups" in refused("some", tensors(), {"param_groups": some})
    out.unlink()
    assert "numbers of steps" in refused("steps", tensors(), {"param_groups": groups(step=4)})
    assert "no groups of the optimizer" in refused("none", tensors(), {})
    stepless = {0: {k: v for k, v in groups()[0].items() if k != "step"}}
    assert "how many steps" in refused("stepless", tensors(), {"param_groups": stepless})
    alone = refused("alone", tensors(), None, common=None)
    assert "in common.pt or in the item" in alone and "neither can be read" in alone
    content = tensors()
    del content["fc1.bias"]
    assert "no weight of that name" in refused("weight", content, {"param_groups": groups()})
    for lost in ("exp_avg_sq.fc1.bias", "exp_avg.embedding.weight", "fp32_param.fc1.weight"):
        content = tensors()
        del content[PREFIX + lost]
        error = refused(lost, content, {"param_groups": groups()})
        assert "has not the states that" in error and "the checkpoint is not whole" in error
    content = {**tensors(), PREFIX + "exp_avg.fc1.weight": torch.zeros(3, 5, 2)}
    assert "none of its weight's, [8, 4]" in refused("shape", content, {"param_groups": groups()})
    plain = {0: {**groups()[0], "bias_correction": False}}
    assert "bias_correction=False" in refused("uncorrected", tensors(), {"param_groups": plain})
    (tmp_path / "alone" / "common.pt").write_bytes(b"PK\x03\x04 no zip")
    run("inspect", tmp_path / "alone", code=3)
    assert not out.exists()


def test_groups_that_the_user_says(tmp_path):
    """Weight decay of a part of the parameters,
    as Megatron has it of most runs: kept for each of them.
    """
    source = write(tmp_path / "m", tensors(), {"param_groups": groups(weight_decay=0.0)})
    out = tmp_path / "out.pt"
    error = converted(source, out, code=3)
    assert "whose parameters are in which of groups 0, 1" in error and "--group N=PATTERN" in error
    made = converted(source, out, "--group", "1=*.bias")["optimizer"]
    weights = sorted(set(SHAPES) - {"fc1.bias"})
    want = [(0.1, 1.0, weights), (0.0, 0.0, ["fc1.bias"])]
    assert [
        (g["weight_decay"], g["wd_mult"], sorted(g["params"])) for g in made["param_groups"]
    ] == want
    assert all(g["lr_mult"] == 1 and g["max_lr"] == 0.01 for g in made["param_groups"])
    made = converted(source, out, "--group", "0=*.weight", to="lowbit")["optimizer"]
    assert [(g["weight_decay"], sorted(g["params"])) for g in made["param_groups"]] == [
        (w, p) for w, _, p in want
    ]
    report = lowbit.checkpoint.convert(source, out, to="torch", group=["1=*.bias"], force=True)
    assert not [text for text in report["warnings"] if "wd_mult" in text]
    # The next step is that of torch's AdamW with these groups.
    named = {name: nn.Parameter(numbers(name, "param")) for name in SHAPES}
    split = [{"params": [named[n] for n in of], "weight_decay": w} for w, _, of in want]
    opt = torch.optim.AdamW(split, lr=0.01, betas=(0.9, 0.95))
    saved = torch.load(out, weights_only=True)["optimizer"]
    order = [n for _, _, of in want for n in of]
    for group, mine in zip(saved["param_groups"], opt.state_dict()["param_groups"], strict=True):
        group["params"] = mine["params"]
    saved["state"] = {i: saved["state"][n] for i, n in enumerate(order)}
    opt.load_state_dict(saved)
    low = lowbit.AdamW(
        [
            {"params": [(n, nn.Parameter(numbers(n, "param"))) for n in of], "weight_decay": 9.0}
            for _, _, of in want
        ],
        lr=0.01,
        state_format="float32",
    )
    lowbit.load_optimizer(low, out)
    for name, p in named.items():
        p.grad = numbers(name, "exp_avg") * 0.1
    opt.step()
    assert [g["weight_decay"] for g in low.param_groups] == [0.1, 0.0]
    for group in low.param_groups:
        for name, p in zip(group["param_names"], group["params"], strict=True):
            p.grad = named[name].grad.clone()
    low.step()
    for group in low.param_groups:
        for name, p in zip(group["param_names"], group["params"], strict=True):
            torch.testing.assert_close(p, named[name], rtol=1e-6, atol=1e-7)


def test_groups_of_several_optimizers_and_of_other_steps(tmp_path):
    """Groups are numbered over all optimizers, as they are in the common state."""
    first, second = ["embedding.weight", "fc1.weight"], ["fc1.bias"]
    content = tensors(prefix="chained_0.", of=first) | tensors(prefix="chained_1.", of=second)
    said = {
        0: {"param_groups": groups(lr=0.5, step=4)},
        1: {"param_groups": {0: {**groups()[0], "step": 7}}},
    }
    source = write(tmp_path / "m", content, said)
    assert "--group N=PATTERN" in converted(source, tmp_path / "out.pt", code=3)
    made = converted(source, tmp_path / "out.pt", "--group", "1=embedding*")["optimizer"]
    assert [(g["lr"], g["params"]) for g in made["param_groups"]] == [
        (0.01, ["fc1.weight"]),
        (0.5, ["embedding.weight"]),
        (0.01, second),
    ]
    assert [float(made["state"][n]["step"]) for n in (*first, *second)] == [4, 3, 7]
    # Group 1 is of the first optimizer, which has no bias.
    error = converted(source, tmp_path / "out.pt", "--group", "1=*.bias", "--force", code=2)
    assert "matches no parameter of that group's optimizer, chained_0" in error


def test_two_counts_of_steps_are_refused(tmp_path):
    said = {"param_groups": groups(), "state": {"common_step": 9}}
    source = write(tmp_path / "m", tensors(), said)
    error = converted(source, tmp_path / "out.pt", code=3)
    assert "counts 3.0 steps of an optimizer, and 9.0 as its common_step" in error
    same = write(tmp_path / "same", tensors(), {**said, "state": {"common_step": 3}})
    assert (
        float(converted(same, tmp_path / "out.pt")["optimizer"]["state"]["fc1.bias"]["step"]) == 3
    )


def test_groups_that_cannot_be(tmp_path):
    source = write(tmp_path / "m", tensors(), {"param_groups": groups(weight_decay=0.0)})
    three = {**groups(weight_decay=0.0), 2: {**groups()[0], "weight_decay": 0.2}}
    more = write(tmp_path / "more", tensors(), {"param_groups": three})
    out = tmp_path / "out.pt"
    for given, of, text in (
        ("*.bias", source, "takes N=PATTERN"),
        ("1=", source, "takes N=PATTERN"),
        ("2=*.bias", source, "names a group that is not there: the common state has 0, 1"),
        ("1=*.beta", source, "matches no parameter"),
        ("2=*.bias", more, "more than one of them has no pattern"),
    ):
        assert text in converted(of, out, "--group", given, code=2)
    both = ("--group", "1=*.bias", "--group", "0=*")
    assert "fc1.bias: --group puts it into groups 0 and 1" in converted(source, out, *both, code=2)
    converted(source, out, "--group", "1=*.bias")
    error = run(
        "convert", out, tmp_path / "x.pt", "--to", "lowbit", "--group", "1=*.bias", code=2
    ).stderr
    assert "has no optimizer of Megatron-Core" in error
    assert "say to what" in run("convert", out, tmp_path / "x.pt", "--group", "1=a", code=2).stderr


def test_settings_of_megatron_alone_hinder_nothing(tmp_path):
    """wd_mult is in weight_decay already: where only it differs, it is left out by name."""
    source = write(tmp_path / "m", tensors(), {"param_groups": groups()})
    done = run("convert", source, tmp_path / "out.pt", "--to", "torch")
    assert "wd_mult differs between the groups (1.0, 0.0)" in done.stdout + done.stderr
    (group,) = torch.load(tmp_path / "out.pt", weights_only=True)["optimizer"]["param_groups"]
    assert group["max_lr"] == 0.01 and "wd_mult" not in group


def test_a_target_without_common_pt_is_not_written(tmp_path):
    """Steps and settings are in common.pt alone: with the optimizer's tensors it is refused, of
    weights a warning says it.
    """
    source = write(tmp_path / "m", tensors(), {"param_groups": groups()})
    targets = {"reshard": [tmp_path / "r", "--world-size", "2"], "convert": [tmp_path / "c"]}
    for command, options in targets.items():
        for more in ([], ["--dry-run"]):
            error = run(command, source, *options, *more, code=3).stderr
            assert "steps and settings are in common.pt" in error and str(source) in error
            assert "--to torch" in error and not options[0].exists()
        done = run(command, source, *options, "--exclude", "optimizer.*")
        assert "common.pt is left out" in done.stdout + done.stderr and options[0].exists()
    weights = {name: x for name, x in tensors().items() if not name.startswith("optimizer.")}
    done = run("reshard", write(tmp_path / "w", weights, {}), tmp_path / "x", "--world-size", "2")
    assert "common.pt is left out" in done.stdout + done.stderr
    plain = write(tmp_path / "p", weights, {}, common=None)
    done = run("reshard", plain, tmp_path / "y", "--world-size", "2")
    assert "common.pt" not in done.stdout + done.stderr


def test_only_megatron_s_own_common_pt_is_read(tmp_path):
    """Any other file of that name is not part of the checkpoint;
    and a link leads out of the folder.
    """
    weights = {"common": torch.ones(4)}
    for metadata in (None, "{}", "no JSON"):
        plain = tmp_path / f"plain{metadata}"
        dcp.save(dict(weights), checkpoint_id=plain, no_dist=True)
        (plain / "common.pt").write_text("hello")
        if metadata is not None:
            (plain / "metadata.json").write_text(metadata)
        run("inspect", plain)
        run("verify", plain)
    source = write(tmp_path / "m", tensors(), {"param_groups": groups()})
    (source / "common.pt").rename(tmp_path / "common.pt")
    (source / "common.pt").symlink_to(tmp_path / "common.pt")
    assert "is a link, which is not followed" in converted(source, tmp_path / "out.pt", code=3)


def test_files_of_the_older_format(tmp_path, monkeypatch):
    """Each rank's file by itself: of several ranks no tensor is whole,
    and flat buffers tell no places.
    """
    model = nn.Linear(8, 4)
    opt = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    opt.step()
    inner = {
        "optimizer": opt.state_dict(),
        "fp32_from_fp16_params": [[p.detach() for p in model.parameters()]],
    }
    folder = tmp_path / "iter_0000003"
    for rank in range(2):
        file = folder / f"mp_rank_{rank:02}" / "model_optim_rng.pt"
        file.parent.mkdir(parents=True)
        torch.save(
            {"iteration": 3, "model": {"language_model": model.state_dict()}, "optimizer": inner},
            file,
        )
        if rank == 0:
            made = converted(file, tmp_path / "x.pt", to="lowbit")
            assert len(made["optimizer"]["optimizer"]["state"]) == 2
            (tmp_path / "x.pt").unlink()
    assert "give one rank's file" in run("inspect", folder, code=3).stderr
    assert "is the file of one of 2 model-parallel ranks" in converted(
        file, tmp_path / "x.pt", code=3
    )
    (tmp_path / "link").symlink_to(file.parent)
    live = lowbit.AdamW(model.parameters())
    with monkeypatch.context() as there:
        there.chdir(file.parent)
        for spelled in (
            "model_optim_rng.pt",
            "../mp_rank_01//model_optim_rng.pt",
            f"{file.parent}//model_optim_rng.pt",
            "../../link/model_optim_rng.pt",
        ):
            assert "one of 2 model-parallel ranks" in converted(spelled, tmp_path / "x.pt", code=3)
            with pytest.raises(
                ValueError, match=r"^[^:]*: is the file of one of 2 model-parallel ranks"
            ):
                lowbit.load_optimizer(live, spelled)
    buffers = {
        0: {(torch.bfloat16, torch.float32): {"param": torch.ones(9), "exp_avg": torch.ones(9)}}
    }
    torch.save(buffers, file.parent / "distrib_optim.pt")
    error = converted(file.parent / "distrib_optim.pt", tmp_path / "x.pt", code=3)
    assert "distrib_optim.pt" in error
    assert not (tmp_path / "x.pt").exists()
