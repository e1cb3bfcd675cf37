"""Muon's checkpoints of torch, Keller Jordan, Moonlight and Dion: into lowbit and back, live and by
lowbit-ckpt; what can be read in two ways is refused.
"""

import copy
import json

import pytest
import torch
from torch import nn

import lowbit
from tests.ckpt.convert.muon_peers import (
    BETAS,
    MU,
    NAMES,
    OTHERS,
    SHAPES,
    STEPS,
    average,
    dion,
    grad,
    keller,
    moments,
    moonlight,
    total,
)
from tests.support.peers.files import convert, need_tool, run, same

need_tool()
FILES = {"muon": keller, "moonlight": moonlight, "dion": dion}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(64, 96, bias=False), nn.Linear(96, 64, bias=False)
        self.small = nn.Linear(12, 8, bias=False)
        self.tokens, self.norm = nn.Embedding(100, 64), nn.RMSNorm(64)


def optimizer(**options):
    named = dict(Model().named_parameters())
    groups = [
        {"params": [(n, named[n]) for n in names], "use_muon": of_muon}
        for names, of_muon in ((SHAPES, True), (OTHERS, False))
    ]
    return lowbit.MuonWithAdamW(groups, lr=1.0, **options)


def by_name(opt):
    return {
        n: opt.state[p]
        for g in opt.param_groups
        for n, p in zip(g["param_names"], g["params"], strict=True)
    }


def inspected(tmp_path, content):
    torch.save(content, tmp_path / "inspected.pt")
    run("verify", tmp_path / "inspected.pt")
    return json.loads(run("inspect", tmp_path / "inspected.pt", "--json").stdout)


@pytest.mark.parametrize("name", FILES)
def test_they_are_known(tmp_path, name):
    said = inspected(tmp_path, FILES[name]())
    assert (said["dialect"], said["algorithm"]) == (name, "muon")
    assert [group["settings"]["use_muon"] for group in said["groups"]] == [True, False]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("way", ["live", "tool", "tool and live"])
def test_they_go_on_in_lowbit(tmp_path, name, way):
    """Averages, moments, steps and settings, whatever the file calls them and whether it sums."""
    file = FILES[name]()
    opt = optimizer(state_format="float32")
    if way == "live":
        torch.save(file, tmp_path / "file.pt")
        lowbit.load_optimizer(opt, tmp_path / "file.pt")
    else:
        made = convert(tmp_path, file, "lowbit", "--state-format", "float32")
        if way == "tool":
            opt.load_state_dict(made)
        else:
            torch.save(made, tmp_path / "made.pt")
            lowbit.load_optimizer(opt, tmp_path / "made.pt")
    state = by_name(opt)
    for key in SHAPES:
        torch.testing.assert_close(
            state[key]["momentum_buffer"], average(key), rtol=1e-5, atol=1e-9
        )
        assert float(state[key]["step"]) == (STEPS if name == "dion" else 1)
    for key in OTHERS:
        assert torch.equal(state[key]["exp_avg"], moments(key)[0])
        assert torch.equal(state[key]["exp_avg_sq"], moments(key)[1])
        assert float(state[key]["step"]) == STEPS
    matrices, others = opt.param_groups
    assert matrices["momentum"] == MU and tuple(others["betas"]) == BETAS
    assert matrices["nesterov"] is (name != "dion")
    adjusted = {"muon": "original", "moonlight": "match_rms_adamw", "dion": "match_rms_adamw"}
    assert matrices["adjust_lr_fn"] == adjusted[name]
    rates = {"muon": (0.02, 3e-4), "moonlight": (1e-3, 1e-3), "dion": (0.01, 3e-4)}
    assert (matrices["lr"], others["lr"]) == rates[name]
    decay = {"muon": (0.01, 0.02), "moonlight": (0.1, 0.1), "dion": (0.01, 0.01)}
    assert (matrices["weight_decay"], others["weight_decay"]) == decay[name]
    assert others["eps"] == {"muon": 1e-10, "moonlight": 1e-8, "dion": 1e-8}[name]
    for group in opt.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    opt.step()


@pytest.mark.parametrize("name", FILES)
def test_eight_bits_are_those_of_the_live_optimizer(tmp_path, name):
    file = FILES[name]()
    torch.save(file, tmp_path / "file.pt")
    live, loaded = optimizer(), optimizer()
    lowbit.load_optimizer(live, tmp_path / "file.pt")
    loaded.load_state_dict(convert(tmp_path, file, "lowbit"))
    for key, kept in by_name(live).items():
        kept["stream"] = by_name(loaded)[key]["stream"]  # of a number: the file has no names
    same(by_name(live), by_name(loaded))
    assert "momentum_buffer_dynamic8" in by_name(live)["up.weight"]
    assert "momentum_buffer" in by_name(live)["small.weight"]


@pytest.mark.parametrize("name", FILES)
def test_to_and_fro(tmp_path, name):
    """What lowbit keeps in float32 comes back: a sum within a rounding or two,
    everything else as it was.
    """
    file = FILES[name]()
    kept = convert(tmp_path, file, "lowbit", "--state-format", "float32")
    back = convert(tmp_path, kept, name)
    assert [set(group) for group in back["param_groups"]] == [
        set(group) for group in file["param_groups"]
    ]
    for ours, theirs in zip(back["param_groups"], file["param_groups"], strict=True):
        assert {k: v for k, v in ours.items() if k != "betas"} == {
            k: v for k, v in theirs.items() if k != "betas"
        }
        assert tuple(ours.get("betas", ())) == tuple(theirs.get("betas", ()))
    for i, key in enumerate(NAMES):
        ours, theirs = back["state"][i], file["state"][i]
        assert list(ours) == list(theirs) or set(ours) == set(theirs)
        for entry, value in theirs.items():
            if not isinstance(value, torch.Tensor):
                assert ours[entry] == value and type(ours[entry]) is type(value)
            elif key in OTHERS or name == "muon":
                assert torch.equal(ours[entry], value)
            else:
                torch.testing.assert_close(ours[entry], value, rtol=3e-7, atol=0)


def test_torchs_muon_both_ways(tmp_path):
    params = [
        nn.Parameter(torch.randn(s, generator=torch.Generator().manual_seed(i)))
        for i, s in enumerate(SHAPES.values())
    ]
    theirs = torch.optim.Muon(params, lr=0.02, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    for t in range(3):
        for p, name in zip(params, SHAPES, strict=True):
            p.grad = torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(t))
        theirs.step()
    file = theirs.state_dict()
    made = convert(tmp_path, file, "lowbit", "--state-format", "float32")
    opt = lowbit.Muon(params, lr=1.0, state_format="float32")
    opt.load_state_dict(made)
    group = opt.param_groups[0]
    assert (
        group["lr"] == 0.02
        and group["momentum"] == 0.9
        and group["adjust_lr_fn"] == "match_rms_adamw"
    )
    assert tuple(group["ns_coefficients"]) == (3.4445, -4.775, 2.0315)
    for p in params:
        assert torch.equal(opt.state[p]["momentum_buffer"], theirs.state[p]["momentum_buffer"])
    back = convert(tmp_path, opt.state_dict(), "torch")
    same(back["state"], file["state"])
    again = torch.optim.Muon(params)
    again.load_state_dict(back)
    assert again.param_groups[0]["lr"] == 0.02
    for to in ("moonlight", "dion"):
        summed = convert(tmp_path, file, to)["state"][0]
        key = "momentum" if to == "dion" else "momentum_buffer"
        torch.testing.assert_close(summed[key] * (1 - 0.9), file["state"][0]["momentum_buffer"])


def stepped(opt, first, last):
    for t in range(first, last):
        for group in opt.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                p.grad = grad(name, t)
        opt.step()
    return opt


@pytest.mark.parametrize(
    ("way", "state_format"), [("lowbit", "float32"), ("lowbit", "8bit"), ("torch", "float32")]
)
def test_normuon_goes_on(tmp_path, way, state_format):
    """From lowbit, by way of the tool, into lowbit: the next steps are those of the first run."""
    options = {"normuon_beta2": 0.95, "cautious_weight_decay": True, "state_format": state_format}
    first = stepped(optimizer(**options), 0, 3)
    made = convert(tmp_path, first.state_dict(), way)
    if way == "torch":
        assert made["state"][0]["second_momentum_buffer"].shape == (96,)
        made = convert(tmp_path, made, "lowbit", "--state-format", state_format)
    second = optimizer(normuon_beta2=0.5, state_format=state_format)
    second.load_state_dict(made)
    for name, kept in by_name(first).items():
        if "second_momentum_buffer" in kept:
            ours = by_name(second)[name]
            assert torch.equal(ours["second_momentum_buffer"], kept["second_momentum_buffer"])
    for ours, theirs in zip(second.param_groups, first.param_groups, strict=True):
        assert ours["normuon_beta2"] == 0.95 and ours["cautious_weight_decay"] is True
        for p, q in zip(ours["params"], theirs["params"], strict=True):
            p.data.copy_(q.data)
    stepped(first, 3, 5), stepped(second, 3, 5)
    for ours, theirs in zip(second.param_groups, first.param_groups, strict=True):
        assert all(map(torch.equal, ours["params"], theirs["params"]))


def test_normuon_gets_another_format(tmp_path):
    """Its second moments stay what they are, and other Muons have no place for them."""
    first = stepped(optimizer(normuon_beta2=0.95, state_format="float32"), 0, 3)
    made = convert(tmp_path, first.state_dict(), "lowbit", "--state-format", "8bit")
    assert "momentum_buffer_dynamic8" in made["state"][0]
    rows = by_name(first)["up.weight"]["second_momentum_buffer"]
    assert torch.equal(made["state"][0]["second_momentum_buffer"], rows)
    said = convert(tmp_path, first.state_dict(), "muon", code=3)
    assert "keeps no second_momentum_buffer; --lossy" in said


def test_dion_counts_the_steps_of_a_whole_group(tmp_path):
    """AdamW's parameters have to agree. Muon does not step by the count: its matrices need not."""
    opt = stepped(optimizer(state_format="float32"), 0, 2)
    matrix, norm = opt.param_groups[0]["params"][0], opt.param_groups[1]["params"][1]
    for p in (matrix, norm):
        p.grad = None
    opt.step()
    said = convert(tmp_path, opt.state_dict(), "dion", code=3)
    assert "norm.weight: has made 2 steps, another of its group 3; Dion" in said
    opt.state[norm]["step"].fill_(3)
    made = convert(tmp_path, opt.state_dict(), "dion")
    assert [group["step"] for group in made["param_groups"]] == [3, 3]


# ---- what can be read in two ways ----


def without(file, *keys):
    file = copy.deepcopy(file)
    for group in file["param_groups"]:
        for key in keys:
            group.pop(key, None)
    return file


def matrices_only(settings):
    state = {i: {"momentum_buffer": total(name)} for i, name in enumerate(SHAPES)}
    return {"state": state, "param_groups": [{**settings, "params": [0, 1, 2]}]}


def test_a_sum_or_an_average_is_refused(tmp_path):
    """Groups as several versions of Muon have them, of which some sum and some average."""
    old = matrices_only(
        {"lr": 0.02, "weight_decay": 0.0, "momentum": MU, "nesterov": True, "ns_steps": 5}
    )
    said = convert(tmp_path, old, "lowbit", code=3)
    assert "muon or moonlight" in said and "--from" in said
    averaged = convert(tmp_path, old, "lowbit", "--from", "muon", "--state-format", "float32")
    summed = convert(tmp_path, old, "lowbit", "--from", "moonlight", "--state-format", "float32")
    assert torch.equal(averaged["state"][0]["momentum_buffer"], total("up.weight"))
    torch.testing.assert_close(summed["state"][0]["momentum_buffer"], average("up.weight"))
    torch.save(old, tmp_path / "old.pt")
    opt = lowbit.Muon([nn.Parameter(torch.zeros(s)) for s in SHAPES.values()])
    with pytest.raises(ValueError, match="muon or moonlight"):
        lowbit.load_optimizer(opt, tmp_path / "old.pt")


def test_an_sgd_or_a_muon_is_refused(tmp_path):
    few = matrices_only({"lr": 0.02, "weight_decay": 0.0, "momentum": MU})
    said = convert(tmp_path, few, "lowbit", code=3)
    assert "torch or muon" in said and "--from" in said
    assert (
        "ns_coefficients" in convert(tmp_path, few, "lowbit", "--from", "muon")["param_groups"][0]
    )
    assert "dampening" in convert(tmp_path, few, "lowbit", "--from", "torch")["param_groups"][0]


def test_what_cannot_be_converted_says_why(tmp_path):
    factors = dion()
    factors["state"][0]["Q"] = torch.zeros(64, 8)
    assert "Q: is nothing that Dion's Muon keeps" in convert(tmp_path, factors, "lowbit", code=3)
    lion = dion()
    lion["param_groups"][1]["algorithm"] = "lion"
    assert "algorithm of its group is 'lion'" in convert(tmp_path, lion, "lowbit", code=3)
    assert "momentum is missing" in convert(
        tmp_path, without(moonlight(), "momentum"), "lowbit", code=3
    )
    ratio = convert(tmp_path, keller(), "moonlight", code=3)
    assert "has one group, and those here differ in lr" in ratio
    adam = torch.optim.AdamW([nn.Parameter(torch.ones(4, 4))])
    adam.param_groups[0]["params"][0].grad = torch.ones(4, 4)
    adam.step()
    assert "no optimizer that keeps these states" in convert(
        tmp_path, adam.state_dict(), "dion", code=3
    )


@pytest.mark.parametrize("to", ["bitsandbytes", "torchao", "flashoptim", "lpmm", "adafactor8bit"])
@pytest.mark.parametrize("name", FILES)
def test_libraries_without_muon_take_none(tmp_path, name, to):
    said = convert(tmp_path, FILES[name](), to, code=3)
    assert "no optimizer that keeps these states" in said or "these are states of muon" in said


def test_warnings(tmp_path):
    torch.save(dion("spectral_norm"), tmp_path / "dion.pt")
    done = run("convert", tmp_path / "dion.pt", tmp_path / "out.pt", "--to", "lowbit")
    assert "sqrt(rows / columns)" in done.stdout + done.stderr
    one_rank = keller()
    del one_rank["state"][1]
    torch.save(one_rank, tmp_path / "rank.pt")
    done = run("convert", tmp_path / "rank.pt", tmp_path / "out2.pt", "--to", "lowbit")
    assert "1 of 3 matrices have no momentum" in done.stdout + done.stderr


@pytest.mark.parametrize(
    "of_muon, key, value",
    [
        (True, "momentum", 0.5),
        (True, "nesterov", False),
        (True, "ns_steps", 3),
        (False, "betas", (0.5, 0.9)),
        (False, "eps", 1e-3),
    ],
)
def test_groups_of_other_settings_are_not_one(tmp_path, of_muon, key, value):
    """Moonlight's Muon has one group: settings that differ would become those of the first."""
    named = dict(Model().named_parameters())
    groups = []
    for names, use in ((SHAPES, True), (OTHERS, False)):
        for n in names:
            groups.append({"params": [(n, named[n])], "use_muon": use, "weight_decay": 0.1})
    opt = lowbit.MuonWithAdamW(groups, lr=1e-3, state_format="float32")
    content = stepped(opt, 0, 2).state_dict()
    for group in content["param_groups"]:
        group["lr"] = 1e-3
    assert len(convert(tmp_path, content, "moonlight")["param_groups"]) == 1
    last = [g for g in content["param_groups"] if g["use_muon"] is of_muon][-1]
    last[key] = value
    assert f"those here differ in {key}" in convert(tmp_path, content, "moonlight", code=3)


def test_dion_keeps_what_its_groups_say(tmp_path):
    """Convolutions as matrices, cautious decay, and what the user put there."""
    file = dion()
    for group in file["param_groups"]:
        group.update(flatten=True, cautious_wd=True, mine="a")
    same(convert(tmp_path, file, "dion")["param_groups"], file["param_groups"])
    made = convert(tmp_path, file, "lowbit", "--state-format", "float32")
    assert all(group["cautious_weight_decay"] is True for group in made["param_groups"])
    back = convert(tmp_path, made, "dion")["param_groups"]
    for group in back:
        assert group["flatten"] is True and group["cautious_wd"] is True and group["mine"] == "a"


@pytest.mark.parametrize("name", FILES)
def test_a_users_own_settings_stay(tmp_path, name):
    file = FILES[name]()
    for group in file["param_groups"]:
        group["mine"] = "a"
    for to in ("lowbit", *FILES):
        if (name, to) in (("muon", "moonlight"), ("dion", "moonlight")):  # of several rates
            continue
        for group in convert(tmp_path, file, to)["param_groups"]:
            assert group["mine"] == "a"
            assert to == "dion" or "flatten" not in group


def test_other_newton_schulz_steps_are_warned_of(tmp_path):
    for steps in (3, 5):
        opt = stepped(optimizer(ns_steps=steps), 0, 1)
        torch.save(opt.state_dict(), tmp_path / "in.pt")
        for to in ("muon", "dion"):
            said = run("convert", tmp_path / "in.pt", tmp_path / "out.pt", "--to", to, "--force")
            assert ("five Newton-Schulz steps" in said.stderr) is (steps == 3)
