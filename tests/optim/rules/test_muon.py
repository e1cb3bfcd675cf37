"""Muon: torch's steps with float32 state, the same bits however it is computed,
and what is refused.
"""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import lowbit
from lowbit import ops
from lowbit.config import muon
from tests.golden.make_muon import CASES, LR, STEPS
from tests.support.bits import bits, same
from tests.support.paths import GOLDEN

ISAS = lowbit.catalog()["isas"]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("isa_restored")]


def drawn(*shape, seed=0, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def train(make, shapes, steps=3, dtype=torch.float32, names=True, **options):
    """The parameters and the optimizer after some steps."""
    params = [nn.Parameter(drawn(*shape, seed=i).to(dtype)) for i, shape in enumerate(shapes)]
    named = [(f"p{i}", p) for i, p in enumerate(params)]
    opt = make(named if names else params, **options)
    for t in range(steps):
        for i, p in enumerate(params):
            p.grad = drawn(*p.shape, seed=100 * t + i + 7, scale=0.1).to(dtype)
        opt.step()
    return params, opt


# ---- torch's Muon ----


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("orthogonalize, near", [("torch", 2e-4), ("exact", 2e-3)])
def test_float32_state_reproduces_torch(name, orthogonalize, near):
    """The golden trajectories are torch's.
    A value that is rounded to the other bfloat16 moves the matrix by some 1e-4.
    """
    golden = np.load(GOLDEN / "muon.npz")
    params = [nn.Parameter(torch.from_numpy(golden[f"p{i}"])) for i in range(3)]
    opt = lowbit.Muon(
        params, lr=LR, state_format="float32", orthogonalize=orthogonalize, **CASES[name]
    )
    for t in range(STEPS):
        for i, p in enumerate(params):
            p.grad = torch.from_numpy(golden[f"g{i}"][t]).float()
        opt.step()
    for i, p in enumerate(params):
        want = torch.from_numpy(golden[f"{name}_p{i}"])
        moved = (want - torch.from_numpy(golden[f"p{i}"])).abs().max()
        assert (p.detach() - want).abs().max() <= near + 1e-2 * moved
        assert (p.detach() - want).square().mean().sqrt() <= near / 4
        buffer = torch.from_numpy(golden[f"{name}_m{i}"])
        torch.testing.assert_close(opt.state[p]["momentum_buffer"], buffer, rtol=1e-6, atol=1e-7)


def test_torchs_state_dict_goes_on():
    (p,), theirs = train(torch.optim.Muon, [(64, 80)], names=False, lr=LR)
    ours = nn.Parameter(p.detach().clone())
    opt = lowbit.Muon([ours], lr=LR, state_format="float32", orthogonalize="torch")
    opt.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert opt.param_groups[0]["momentum"] == 0.95 and opt.state[ours]["step"] > 0
    for t in range(3):
        for q, o in ((p, theirs), (ours, opt)):
            q.grad = drawn(64, 80, seed=t, scale=0.1)
            o.step()
    assert (ours - p).abs().max() <= 5e-4
    eight = lowbit.Muon([ours], lr=LR)
    eight.load_state_dict(copy.deepcopy(theirs.state_dict()))
    buffer, codes = (
        theirs.state[p]["momentum_buffer"],
        eight.state[ours]["momentum_buffer_dynamic8"],
    )
    read = ops.dequantize(
        codes, eight.state[ours]["momentum_buffer_dynamic8_scale"], "dynamic8", 256, 80
    )
    assert (read - buffer).norm() <= 0.02 * buffer.norm()


@pytest.mark.parametrize(
    "bad",
    [
        {"lr": -1.0},
        {"lr": torch.ones(2)},
        {"momentum": -0.1},
        {"weight_decay": -1.0},
        {"adjust_lr_fn": "half"},
    ],
)
def test_bad_arguments_raise_torchs_words(bad):
    texts = []
    for cls in (lowbit.Muon, torch.optim.Muon):
        with pytest.raises(ValueError) as error:
            cls([nn.Parameter(torch.zeros(4, 4))], **bad)
        texts.append(str(error.value))
    assert texts[0] == texts[1]


# ---- bits ----

SHAPES = [(64, 96), (96, 64), (77, 130), (130, 77), (4, 24, 40), (3, 40, 24)]


@pytest.mark.parametrize(
    "options", [{}, {"dtype": torch.bfloat16}, {"state_format": "float32"}], ids=str
)
def test_bits_do_not_depend_on_threads_and_instruction_set(options):
    found = []
    for isa in ISAS:
        for threads in (1, 2):
            ops.set_isa(isa)
            torch.set_num_threads(threads)
            params, opt = train(lowbit.Muon, SHAPES, lr=LR, min_numel=0, **options)
            found.append(bits(params, opt))
    assert all(same(one, found[0]) for one in found[1:])


def test_the_product_is_a_chain():
    a, b = drawn(37, 150, seed=1).bfloat16(), drawn(29, 150, seed=2).bfloat16()
    want = torch.zeros(37, 29)
    for k in range(150):
        want = want + a[:, k, None].float() * b[None, :, k].float()
    for isa in ISAS:
        ops.set_isa(isa)
        assert torch.equal(ops.bfloat16_product(a, b), want)


@pytest.mark.parametrize("name", ["quintic", "polar_express", "deepseek"])
@pytest.mark.parametrize("shape", [(40, 100), (100, 40)])
def test_named_coefficients_orthogonalize(name, shape):
    coefficients, factor = muon.schedule(name, 8)
    x = drawn(*shape).bfloat16()
    ops.newton_schulz(x, coefficients, factor, 1e-7)
    low, high = {"quintic": (0.6, 1.3), "polar_express": (0.9, 1.1), "deepseek": (0.95, 1.05)}[name]
    values = torch.linalg.svdvals(x.float())
    assert low <= values.min() and values.max() <= high


def test_schedules():
    assert muon.schedule("quintic", 2).coefficients == [*muon.QUINTIC, *muon.QUINTIC]
    assert muon.schedule(muon.QUINTIC, 2) == muon.schedule("quintic", 2)
    assert len(muon.schedule("deepseek", 5).coefficients) == 30
    assert muon.schedule("deepseek", 5).coefficients[-3:] == [2.0, -1.5, 0.5]
    assert muon.schedule([(1, 2, 3), (4, 5, 6)], 5).coefficients == [1, 2, 3, 4, 5, 6]
    polar = muon.schedule("polar_express", 10)
    assert polar.factor == 1.01 and polar.coefficients[-3:] == [1.875, -1.25, 0.375]
    assert len(polar.coefficients) == 30


def apart(shapes, parts, whole, **options):
    """Whether a whole parameter steps as the matrices of `parts` do by themselves;
    the gradients are the whole's.
    """
    value, grads = drawn(*shapes), [drawn(*shapes, seed=50 + t, scale=0.1) for t in range(3)]
    joined = nn.Parameter(value.clone())
    several = [nn.Parameter(part.clone()) for part in parts(value)]
    one = lowbit.Muon([joined], lr=LR, **whole, **options)
    each = lowbit.Muon(several, lr=LR, **options)
    for grad in grads:
        joined.grad = grad
        for p, part in zip(several, parts(grad), strict=True):
            p.grad = part.contiguous()
        one.step()
        each.step()
    assert one.state[joined]["step"] == each.state[several[0]]["step"] == 3
    return all(torch.equal(a, b) for a, b in zip(parts(joined.detach()), several, strict=True))


@pytest.mark.parametrize("state_format", ["float32", "8bit", "linear8"])
@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
@pytest.mark.parametrize("split, rows", [(3, [128] * 3), ((256, 64, 64), [256, 64, 64])])
def test_a_split_matrix_steps_as_its_parts(state_format, adjust, split, rows):
    options = {"state_format": state_format, "adjust_lr_fn": adjust, "min_numel": 0}
    assert apart((384, 128), lambda t: t.split(rows), {"split": split}, **options)
    assert not apart((384, 128), lambda t: t.split(rows), {}, **options)


def test_a_batch_steps_as_its_matrices():
    options = {"state_format": "float32", "adjust_lr_fn": "match_rms_adamw"}
    assert apart((4, 24, 40), lambda t: list(t), {}, **options)
    assert apart((4, 40, 24), lambda t: list(t), {}, **options)
    halves = lambda t: [half for one in t for half in one.split(20)]  # noqa: E731
    assert apart((3, 40, 24), halves, {"split": 2}, **options)
    assert apart((3, 24, 256), lambda t: list(t), {}, min_numel=0)  # whole blocks of 8-bit state


def test_split_by_name():
    shapes = [(96, 40), (96, 40)]
    params, opt = train(lowbit.Muon, shapes, split={"p1": 3}, lr=LR)
    plain, _ = train(lowbit.Muon, shapes, lr=LR)
    assert torch.equal(params[0], plain[0]) and not torch.equal(params[1], plain[1])
    assert [opt.layouts[p].pieces for p in params] == [(96,), (32, 32, 32)]


@pytest.mark.filterwarnings("ignore:.*rounded to nearest")
def test_bfloat16_parameters():
    """Every parameter format steps near the float32 one, and those with a compensation nearer."""
    exact, _ = train(lowbit.Muon, [(64, 128)], steps=30, lr=1e-3)
    errors = {}
    for name in ("auto", "nearest", "bfloat16_kahan", "bfloat16_split8", "bfloat16_split16"):
        (p,), opt = train(
            lowbit.Muon, [(64, 128)], steps=30, lr=1e-3, dtype=torch.bfloat16, param_format=name
        )
        errors[name] = float((p.detach().float() - exact[0].detach()).square().mean().sqrt())
        assert errors[name] < 1e-2, errors
        assert bool(opt.layouts[p].compensation) == ("kahan" in name or "split" in name)
    assert errors["bfloat16_split16"] < errors["nearest"]


def test_eight_bit_state_is_small_and_near():
    whole, _ = train(lowbit.Muon, [(256, 512)], steps=8, state_format="float32", lr=LR)
    quantized, opt = train(lowbit.Muon, [(256, 512)], steps=8, lr=LR)
    assert sum(t.nbytes for t in opt.state[quantized[0]].values()) <= 1.02 * 256 * 512 + 64
    moved = (whole[0] - drawn(256, 512)).norm()
    assert (whole[0] - quantized[0]).norm() <= 0.05 * moved


# ---- what surrounds a step ----


def test_scaler_maximize_and_tensor_rates():
    plain, _ = train(lowbit.Muon, [(40, 60)], steps=1, lr=LR)
    p = nn.Parameter(drawn(40, 60))
    other = lowbit.Muon([("p0", p)], lr=torch.tensor(LR), maximize=True)
    p.grad = drawn(40, 60, seed=7, scale=0.1) * -8
    other.step(grad_scale=8.0)
    assert torch.equal(p, plain[0])
    before = bits([p], other)
    other.found_inf = torch.ones(1)
    other.step()
    assert same(bits([p], other), before)
    del other.found_inf
    other.param_groups[0]["lr"] = 0.0
    other.step()
    assert torch.equal(p, plain[0]) and other.state[p]["step"] == 2


def test_what_is_not_finite_shows():
    p = nn.Parameter(drawn(8, 600))
    opt = lowbit.Muon([p])
    p.grad = drawn(8, 600)
    p.grad[3, 5] = torch.inf
    opt.step()
    assert p.isnan().all()


def test_transposed_parameters_and_missing_gradients():
    p, q = nn.Parameter(drawn(60, 40).t()), nn.Parameter(drawn(8, 8))
    straight = nn.Parameter(p.detach().contiguous())
    for one in (p, straight):
        opt = lowbit.Muon([one, q], lr=LR)
        one.grad = drawn(40, 60, seed=9)
        opt.step()
    assert torch.equal(p, straight) and torch.equal(q, drawn(8, 8))


def test_state_dict_and_pickle_go_on():
    params, opt = train(lowbit.Muon, SHAPES, lr=LR, split={"p0": 2})
    copied = [nn.Parameter(p.detach().clone()) for p in params]
    again = lowbit.Muon([(f"p{i}", p) for i, p in enumerate(copied)], lr=LR, split={"p0": 2})
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    third = pickle.loads(pickle.dumps(opt))
    loaded = [p for group in third.param_groups for p in group["params"]]
    for some, one in ((params, opt), (copied, again), (loaded, third)):
        for i, p in enumerate(some):
            p.grad = drawn(*p.shape, seed=i + 300)
        one.step()
    assert same(bits(params, opt), bits(copied, again))
    assert same(bits(params, opt), bits(loaded, third))


def test_statistics_count_the_momentum():
    _, opt = train(lowbit.Muon, [(64, 128), (4, 24, 40)], lr=LR)
    stats = opt.stats(probe=True)
    assert list(stats["parameters"]["p0"]["states"]) == ["momentum_buffer"]
    assert stats["total"]["bytes"]["codes"] == 64 * 128


@pytest.mark.parametrize(
    "shape, options, words",
    [
        ((7,), {}, "shape (7,), and Muon only supports matrices"),
        ((2, 3, 4, 5), {}, "use lowbit.MuonWithAdamW(lowbit.muon_param_groups(model))"),
        ((8, 8), {"split": 3}, "8 rows, which split=3 does not divide evenly"),
        ((8, 8), {"split": (4, 3)}, "8 rows, and split=(4, 3) has 7"),
        ((2, 8, 8), {"split": (5, 3)}, "a batch of 2 matrices"),
        ((8, 8), {"ns_coefficients": "quintick"}, "one of quintic, polar_express, deepseek"),
        ((8, 8), {"ns_coefficients": (1.0, 2.0)}, "three numbers"),
        ((8, 8), {"ns_steps": 100}, "less than 100"),
        ((8, 8), {"orthogonalize": "exactly"}, "one of auto, exact, torch"),
    ],
)
def test_refusals(shape, options, words):
    with pytest.raises(ValueError) as error:
        lowbit.Muon([("w", nn.Parameter(torch.zeros(shape)))], **options)
    assert words in str(error.value)


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(4, 0), (0, 4), (0, 0), (2, 3, 0), (2, 0, 3), (0, 2, 3)])
@pytest.mark.parametrize(
    "options", [{}, {"orthogonalize": "exact"}, {"normuon_beta2": 0.9}, {"min_numel": 0}]
)
def test_a_matrix_without_numbers_is_stepped(shape, adjust, options):
    alone, _ = train(lowbit.Muon, [(8, 8)], lr=LR, adjust_lr_fn=adjust, **options)
    both, _ = train(lowbit.Muon, [(8, 8), shape], lr=LR, adjust_lr_fn=adjust, **options)
    assert both[1].shape == shape and torch.equal(both[0], alone[0])


def test_options_that_decide_the_layout_stay():
    p = nn.Parameter(drawn(8, 8))
    opt = lowbit.Muon([p])
    opt.param_groups[0]["split"] = 2
    with pytest.raises(ValueError, match="split=2, but its state was laid out for None"):
        opt.step()


# ---- together with AdamW ----


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.position_embedding = nn.Parameter(torch.randn(16, 32))
        self.conv = nn.Conv1d(32, 32, 3)
        self.qkv = nn.Linear(32, 96)
        self.norm = nn.LayerNorm(32)
        self.router = nn.Linear(32, 4, bias=False)
        self.experts = nn.Parameter(torch.randn(4, 32, 48))
        self.gate = nn.Linear(32, 1)
        self.lm_head = nn.Linear(32, 50, bias=False)


def grouped(groups):
    return {
        name: (g["use_muon"], g.get("full_precision", False))
        for g in groups
        for name in g["param_names"]
    }


def test_groups_of_a_model():
    found = grouped(lowbit.muon_param_groups(Model(), lr=0.5))
    assert {name for name, (of_muon, _) in found.items() if of_muon} == {
        "qkv.weight",
        "router.weight",
        "experts",
    }
    assert not any(full for _, full in found.values())
    wide = grouped(lowbit.muon_param_groups(Model(), embeddings="float32", heads="float32"))
    assert {name for name, (_, full) in wide.items() if full} == {"embed.weight", "lm_head.weight"}
    assert {n: of_muon for n, (of_muon, _) in wide.items()} == {
        n: of_muon for n, (of_muon, _) in found.items()
    }
    assert len(found) == len(list(Model().parameters()))
    routed = grouped(lowbit.muon_param_groups(Model(), adamw=["router.*"]))
    assert routed.pop("router.weight") == (False, False) and found.pop("router.weight")
    assert routed == found
    with pytest.raises(ValueError, match=r"adamw='rooter.\*' matches the name of no parameter"):
        lowbit.muon_param_groups(Model(), adamw="rooter.*")
    with pytest.raises(TypeError, match="takes the model, not list"):
        lowbit.muon_param_groups([])


def test_together_is_each_alone():
    models = []
    for way in ("together", "alone"):
        torch.manual_seed(0)
        model = Model()
        groups = lowbit.muon_param_groups(model)
        if way == "together":
            opts = [lowbit.MuonWithAdamW(groups, lr=LR, adamw_lr=1e-3, weight_decay=0.05)]
        else:
            ours = [{k: v for k, v in g.items() if k != "use_muon"} for g in groups]
            opts = [
                lowbit.Muon(ours[:1], lr=LR, weight_decay=0.05),
                lowbit.AdamW(ours[1:], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.05),
            ]
        for t in range(3):
            for i, p in enumerate(model.parameters()):
                p.grad = drawn(*p.shape, seed=10 * t + i)
            for opt in opts:
                opt.step()
        models.append((model, opts))
    for a, b in zip(models[0][0].parameters(), models[1][0].parameters(), strict=True):
        assert torch.equal(a, b)
    opt = models[0][1][0]
    again = lowbit.MuonWithAdamW(lowbit.muon_param_groups(models[0][0]))
    again.load_state_dict(opt.state_dict())
    assert [g["lr"] for g in again.param_groups] == [LR, 1e-3, 1e-3]
    assert pickle.loads(pickle.dumps(opt))._adamw == opt._adamw


def test_groups_say_which_rule():
    p = nn.Parameter(torch.zeros(8, 8))
    with pytest.raises(ValueError, match="no use_muon"):
        lowbit.MuonWithAdamW([p])
    with pytest.raises(ValueError, match=r"use lowbit\.MuonWithAdamW"):
        lowbit.Muon([{"params": [p], "use_muon": False}])


@pytest.mark.parametrize("whose", ["torch", "lowbit"])
def test_checkpoints_load(ckpt, whose, tmp_path):
    make = torch.optim.Muon if whose == "torch" else lowbit.Muon
    (p,), saved = train(make, [(64, 128)], lr=LR)
    torch.save({"optimizer": saved.state_dict()}, tmp_path / "saved.pt")
    q = nn.Parameter(p.detach().clone())
    opt = lowbit.Muon([("p0", q)], lr=1.0)
    lowbit.load_optimizer(opt, tmp_path / "saved.pt")
    assert opt.param_groups[0]["lr"] == LR
    for one, o in ((p, saved), (q, opt)):
        one.grad = drawn(64, 128, seed=5, scale=0.1)
        o.step()
    assert (p - q).norm() <= (0 if whose == "lowbit" else 0.05 * LR * 64**0.5)
