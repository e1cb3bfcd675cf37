"""convert --weights: float32 weights, or float32 masters of 16-bit ones,
to 16-bit weights without masters.
"""

import json
import zlib

import pytest
import torch

import lowbit
from lowbit import ops
from tests.support.peers.files import convert, need_tool, run, same

pytestmark = pytest.mark.slow

need_tool()
SEED = 2**33 + 5
FORMATS = [e["name"] for e in ops.catalog()["param"] if e["dtype"] != "float32"]


def weights_as(format):
    """The options; a seed is refused where nothing is rounded by chance."""
    return "--weights", format, *(("--seed", SEED) if format.endswith("_stochastic") else ())


class Net(torch.nn.Module):
    def __init__(self, norm=True):
        super().__init__()
        self.up = torch.nn.Linear(48, 96)
        self.norm = torch.nn.BatchNorm1d(96) if norm else torch.nn.Identity()
        self.down = torch.nn.Linear(96, 33)

    def forward(self, x):
        return self.down(self.norm(self.up(x)))


def trained(steps=2, norm=True):
    torch.manual_seed(0)
    net = Net(norm)
    opt = torch.optim.AdamW(net.named_parameters(), lr=1e-2)
    for _ in range(steps):
        opt.zero_grad()
        net(torch.randn(16, 48)).square().mean().backward()
        opt.step()
    return net, opt


def checkpoint(norm=True):
    net, opt = trained(norm=norm)
    return net, {"model": net.state_dict(), "optimizer": opt.state_dict()}


def expected(x, format, name):
    """As the operator stores values; the stream of random bits is that of the parameter's name."""
    stored, extra = ops.split(x.contiguous(), format, seed=SEED, stream=zlib.crc32(name.encode()))
    return stored.reshape(x.shape), extra


@pytest.mark.parametrize("format", FORMATS)
def test_every_format(tmp_path, format):
    net, content = checkpoint()
    got = convert(tmp_path, content, "lowbit", *weights_as(format))
    state, group = got["optimizer"]["state"], got["optimizer"]["param_groups"][0]
    key = "param_" + format.removesuffix("_stochastic")
    kept = bool(ops.param_format(format)["compensation"])
    assert group["param_format"] == format or not kept
    for i, (name, p) in enumerate(net.named_parameters()):
        weight = got["model"][name]
        # torch takes no norm whose weights and statistics differ in dtype
        if name.startswith("norm."):
            assert torch.equal(weight, p) and key not in state[i]
            continue
        stored, extra = expected(p.detach(), format, name)
        same(weight, stored)
        assert (key in state[i]) == kept
        if kept:
            same(state[i][key], extra.reshape(state[i][key].shape))
            full = ops.join(weight.contiguous(), state[i][key], format)
            assert (full - p).abs().max() < 1e-3 * p.abs().max()
    assert torch.equal(got["model"]["norm.running_mean"], net.norm.running_mean)


@pytest.mark.parametrize("format", ["bfloat16_split16", "bfloat16_kahan", "bfloat16_split8"])
def test_as_to_master_free_does_it(tmp_path, format):
    """The same weights and the same state beside them, bit for bit,
    in a live model and optimizer.
    """
    net, content = checkpoint(norm=False)
    got = convert(tmp_path, content, "lowbit", "--weights", format)

    def make(params):
        return lowbit.AdamW(params, param_format=format)

    opt = lowbit.to_master_free(net, make)
    same({**net.state_dict()}, {**got["model"]})
    key = f"param_{format}"
    live = {name: opt.state[p].get(key) for name, p in net.named_parameters()}
    saved = got["optimizer"]["state"]
    for i, extra in enumerate(live.values()):
        if extra is None:
            assert key not in saved[i]
        else:
            same(saved[i][key], extra)
    other = Net(norm=False)
    fresh = lowbit.to_master_free(other, make)
    other.load_state_dict(got["model"])
    fresh.load_state_dict(got["optimizer"])
    full = lowbit.get_fp32_model_state_dict(other, fresh)
    for name, p in trained(norm=False)[0].named_parameters():
        assert (full[name] - p).abs().max() <= p.abs().max() * (
            1e-6 if "16" in format[-2:] else 1e-4
        )


def test_random_bits_depend_on_the_seed(tmp_path):
    _, content = checkpoint()
    a, b, c = (
        convert(tmp_path, content, "lowbit", "--weights", "bfloat16_stochastic", "--seed", seed)
        for seed in (1, 1, 2)
    )
    same(a, b)
    assert not torch.equal(a["model"]["up.weight"], c["model"]["up.weight"])


def with_masters(dtype=torch.bfloat16):
    net, opt = trained()
    state = opt.state_dict()
    for i, p in enumerate(net.parameters()):
        state["state"][i]["master_param"] = p.detach().clone()
    model = {k: v.to(dtype) if v.is_floating_point() else v for k, v in net.state_dict().items()}
    return net, {"model": model, "optimizer": state}


def test_masters_in_the_optimizer(tmp_path):
    """Transformer Engine's FusedAdam and others."""
    net, content = with_masters()
    got = convert(tmp_path, content, "lowbit", "--weights", "bfloat16_split16")
    for i, (name, p) in enumerate(net.named_parameters()):
        state = got["optimizer"]["state"][i]
        assert "master_param" not in state
        if not name.startswith("norm."):
            full = ops.join(
                got["model"][name].contiguous(), state["param_bfloat16_split16"], "bfloat16_split16"
            )
            assert (full - p).abs().max() <= p.abs().max() * 2e-7


def test_lists_of_masters(tmp_path):
    """Apex's FP16_Optimizer, whose lists are in the order of the groups."""
    net, content = with_masters()
    masters = [s.pop("master_param") for s in content["optimizer"]["state"].values()]
    content["fp16"] = {"fp32_from_fp16": [masters], "overflow": False}
    got = convert(tmp_path, content, "lowbit", "--weights", "bfloat16_kahan")
    assert "fp32_from_fp16" not in got["fp16"]
    for name, p in net.named_parameters():
        if not name.startswith("norm."):
            same(got["model"][name], p.detach().to(torch.bfloat16))


def test_flat_formats_need_no_optimizer(tmp_path):
    net, _ = checkpoint()
    torch.save(net.state_dict(), tmp_path / "in.pt")

    run("convert", tmp_path / "in.pt", tmp_path / "out.pt", "--weights", "bfloat16", "--quiet")
    got = torch.load(tmp_path / "out.pt")
    same(got["up.weight"], net.up.weight.detach().to(torch.bfloat16))
    assert got["norm.weight"].dtype == got["norm.running_var"].dtype == torch.float32
    run("convert", tmp_path / "in.pt", tmp_path / "no.pt", "--weights", "bfloat16_kahan", code=3)


def numbered(content):
    del content["optimizer"]["param_groups"][0]["param_names"]


def other_shape(content):
    content["optimizer"]["state"][0]["master_param"] = torch.zeros(3)


def not_float32(content):
    content["optimizer"]["state"][0]["master_param"] = torch.zeros(96, 48, dtype=torch.float16)


def no_weight(content):
    del content["model"]["up.weight"]


@pytest.mark.parametrize(
    "change, message",
    [
        (numbered, "does not tell its name"),
        (other_shape, "has the shape [3]"),
        (not_float32, "is not a float32 tensor"),
        (no_weight, "has no weight up.weight"),
    ],
)
def test_masters_whose_weight_cannot_be_told(tmp_path, change, message):
    _, content = with_masters()
    change(content)
    assert message in convert(tmp_path, content, "lowbit", "--weights", "bfloat16", code=3)


def test_what_is_refused(tmp_path):
    _, content = checkpoint()
    assert "the formats are bfloat16" in convert(
        tmp_path, content, "lowbit", "--weights", "bf16", code=2
    )
    error = convert(tmp_path, content, "torch", "--weights", "bfloat16_kahan", code=3)
    assert "torch cannot store the compensation" in error
    numbered(content)
    error = convert(tmp_path, content, "lowbit", "--weights", "bfloat16_split8", code=3)
    assert "only their numbers" in error
    done = convert(tmp_path, content, "lowbit", "--weights", "bfloat16")
    assert done["model"]["up.weight"].dtype == torch.bfloat16


def test_the_optimizer_that_is_chosen_stays_the_one(tmp_path):
    _, content = checkpoint()
    content["other"] = trained()[1].state_dict()
    options = "--optimizer", "optimizer", "--weights", "bfloat16_split8"
    got = convert(tmp_path, content, "lowbit", *options)
    assert got["model"]["up.weight"].dtype == torch.bfloat16
    assert "param_bfloat16_split8" in got["optimizer"]["state"][0]
    same(got["other"], content["other"])


@pytest.mark.parametrize("target", ["step", "step.pt"])
def test_a_directory_says_the_new_format(tmp_path, target):
    """Its items are copied as they are, but for what is changed."""
    _, content = checkpoint()
    torch.save(content, tmp_path / "in.pt")
    lowbit_dir = tmp_path / "lowbit"
    run("convert", tmp_path / "in.pt", lowbit_dir, "--to", "lowbit", "--container", "dcp")
    run("convert", lowbit_dir, tmp_path / target, "--weights", "bfloat16_split8")
    run("convert", tmp_path / target, tmp_path / "out.pt")
    got = torch.load(tmp_path / "out.pt")["optimizer"]
    assert got["param_groups"][0]["param_format"] == "bfloat16_split8"
    assert "param_bfloat16_split8" in got["state"][0]


@pytest.mark.parametrize("source", ["flat.pt", "flat", "flat.safetensors"])
def test_flattened_settings_say_the_new_format(tmp_path, source):
    net, content = checkpoint(norm=False)
    old = content["optimizer"]
    names = [name for name, _ in net.named_parameters()]
    flat = {
        f"state.{name}.{key}": value
        for name, i in zip(names, old["param_groups"][0]["params"], strict=True)
        for key, value in old["state"][i].items()
    }
    for name in names:
        for key, value in old["param_groups"][0].items():
            if key not in ("params", "param_names"):
                flat[f"param_groups.{name}.{key}"] = value
    content["optimizer"] = flat
    torch.save(content, tmp_path / "in.pt")
    run(
        "convert",
        tmp_path / "in.pt",
        tmp_path / source,
        "--to",
        "lowbit",
        *(["--container", "dcp"] if source == "flat" else []),
    )
    options = "--container", "torch", "--weights", "bfloat16_split8"
    run("convert", tmp_path / source, tmp_path / "out.pt", *options)
    got = torch.load(tmp_path / "out.pt")["optimizer"]
    formats = {key: value for key, value in got.items() if key.endswith("param_format")}
    assert formats == {f"param_groups.{name}.param_format": "bfloat16_split8" for name in names}
    assert got["state.up.weight.param_bfloat16_split8"].shape == (96, 48)


def averages(content):
    return {key: x.float() * 0 + 7 for key, x in content["model"].items()}


@pytest.mark.parametrize("masters", [False, True])
def test_averages_are_not_taken_for_the_model(tmp_path, masters):
    _, content = with_masters() if masters else checkpoint()
    content = {"ema": averages(content), **content}
    options = "--weights", "bfloat16"
    error = convert(tmp_path, content, "lowbit", *options, code=3)
    assert "up.weight: its weight may be any of ema.up.weight, model.up.weight" in error
    assert "with --exclude 'ema.*' or --exclude 'model.*'\n" in error
    got = convert(tmp_path, content, "lowbit", *options, "--exclude", "ema.*")
    assert got["model"]["up.weight"].dtype == torch.bfloat16 and "ema" not in got
    assert "master_param" not in got["optimizer"]["state"][0]


@pytest.mark.parametrize("masters", [False, True])
def test_names_as_the_optimizer_has_them_are_the_model_s(tmp_path, masters):
    """Nothing else is named exactly so."""
    _, content = with_masters() if masters else checkpoint()
    model = content.pop("model")
    content = {"ema": averages({"model": model}), **model, **content}
    got = convert(tmp_path, content, "lowbit", "--weights", "bfloat16")
    assert got["up.weight"].dtype == torch.bfloat16
    assert torch.equal(got["ema"]["up.weight"], content["ema"]["up.weight"])
    for wrapper in ("module.", "_orig_mod."):
        wrapped = {wrapper + key: x for key, x in model.items()}
        content = {"model": wrapped, "optimizer": content["optimizer"]}
        got = convert(tmp_path, content, "lowbit", "--weights", "bfloat16")
        assert got["model"][f"{wrapper}up.weight"].dtype == torch.bfloat16


class Tied(torch.nn.Module):
    def __init__(self, first):
        super().__init__()
        for name in (first, {"embed": "head", "head": "embed"}[first]):
            layer = (
                torch.nn.Embedding(64, 96) if name == "embed" else torch.nn.Linear(96, 64, False)
            )
            setattr(self, name, layer)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x))


def tied(first="embed", masters=False, named=True):
    torch.manual_seed(0)
    net = Tied(first)
    opt = torch.optim.AdamW(net.named_parameters() if named else net.parameters(), lr=1e-2)
    net(torch.tensor([1, 2])).square().mean().backward()
    opt.step()
    content = {"model": net.state_dict(), "optimizer": opt.state_dict()}
    if masters:
        content["optimizer"]["state"][0]["master_param"] = net.head.weight.detach() + 1e-3
        narrow = net.head.weight.detach().bfloat16()
        content["model"] = dict.fromkeys(content["model"], narrow)
    return content


@pytest.mark.parametrize("first", ["embed", "head"])
@pytest.mark.parametrize("masters", [False, True])
def test_tied_weights_stay_one(tmp_path, first, masters):
    """The optimizer names one of the two; load_state_dict copies both, one after the other."""
    content = tied(first, masters)
    if masters:
        full = content["optimizer"]["state"][0]["master_param"]
    else:
        full = content["model"]["head.weight"].clone()
    format = "bfloat16_split8"
    got = convert(tmp_path, content, "lowbit", *weights_as(format))
    expected_weight, extra = expected(full, format, f"{first}.weight")
    same(got["model"]["embed.weight"], expected_weight)
    same(got["model"]["head.weight"], expected_weight)
    storages = {x.untyped_storage().data_ptr() for x in got["model"].values()}
    assert len(storages) == 1
    state = got["optimizer"]["state"]
    same(state[0]["param_bfloat16_split8"], extra.reshape(64, 96))
    net = Tied(first).bfloat16()
    net.load_state_dict(got["model"])
    same(net.embed.weight.detach(), expected_weight)


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("target", ["out", "out.safetensors"])
def test_tied_weights_in_other_containers_are_equal(tmp_path, target, masters):
    torch.save(tied(masters=masters), tmp_path / "in.pt")
    container = ["--container", "dcp"] if target == "out" else []
    options = "--weights", "bfloat16_stochastic", *container
    report = run("convert", tmp_path / "in.pt", tmp_path / target, *options, "--json")
    (row,) = [r for r in json.loads(report.stdout)["states"] if r["state"] == "weight"]
    assert row["max_error"] > 0
    run("convert", tmp_path / target, tmp_path / "out.pt", "--container", "torch")
    model = torch.load(tmp_path / "out.pt")["model"]
    assert model["head.weight"].dtype == torch.bfloat16
    same(model["head.weight"], model["embed.weight"])


def test_tied_weights_of_numbered_parameters_round_alike(tmp_path):
    content = tied(named=False)
    got = convert(tmp_path, content, "torch", "--weights", "bfloat16_stochastic")["model"]
    same(got["head.weight"], got["embed.weight"])
    assert len({x.untyped_storage().data_ptr() for x in got.values()}) == 1


def test_views_of_one_storage_are_not_tied(tmp_path):
    whole = torch.randn(2, 64, 96)
    torch.save({"a.w": whole[0], "b.w": whole[1]}, tmp_path / "in.pt")
    run("convert", tmp_path / "in.pt", tmp_path / "out.pt", "--weights", "bfloat16")
    got = torch.load(tmp_path / "out.pt")
    same(got["a.w"], whole[0].bfloat16())
    same(got["b.w"], whole[1].bfloat16())
