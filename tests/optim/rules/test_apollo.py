"""APOLLO, APOLLO-Mini, Fira and Adafactor with a rank: the authors' trajectories, state that
continues, what trainers ask of an optimizer, and layouts.
"""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import lowbit
from lowbit.step import buckets, lowrank
from tests.support.paths import GOLDEN
from tests.support.peers import lowrank as reference

LOWRANK = GOLDEN / "lowrank.bin"
MAKERS = {
    "apollo": lambda params, **o: lowbit.APOLLO(params, rank=8, update_proj_gap=2, **o),
    "mini": lambda params, **o: lowbit.APOLLOMini(params, update_proj_gap=2, **o),
    "fira": lambda params, **o: lowbit.Fira(params, rank=8, update_proj_gap=2, alpha=0.5, **o),
    "adafactor": lambda params, **o: lowbit.Adafactor(
        params, rank=8, update_proj_gap=2, fira_margin=0.01, decay_by="alpha", **o
    ),
}
SHAPES = [(70, 640), (600, 64), (48, 48), (33,), (6, 40, 20), (5, 7)]
every = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def build(case, value):
    _, _, method, rank, hyper = case
    p = nn.Parameter(torch.from_numpy(value.copy()))
    options = {**reference.COMMON, "rank": rank, "state_format": "float32"}
    if method == "fira":
        return p, lowbit.Fira([p], alpha=hyper["scale"], **options)
    names = {"gap": "update_proj_gap"}
    more = {names.get(k, k): v for k, v in hyper.items() if k != "tensor"}
    kind = "tensor" if hyper.get("tensor") else "channel"
    return p, lowbit.APOLLO([p], projection="torch", scale_type=kind, **options, **more)


@pytest.mark.parametrize("case", reference.CASES, ids=lambda c: c[0])
@pytest.mark.parametrize("given", [True, False], ids=["given P", "own P"])
def test_the_authors_trajectories(case, given, monkeypatch):
    arrays = reference.golden(LOWRANK)[case[0]]
    fira = case[2] == "fira"
    p, opt = build(case, arrays[0])
    if fira and given:
        opt.state[p]["projection"].copy_(torch.from_numpy(arrays[1 + reference.STEPS].copy()))
        monkeypatch.setattr(lowrank.Matrix, "_singular_vectors", lambda *_: None)
    for g in arrays[1 : 1 + reference.STEPS]:
        p.grad = torch.from_numpy(g.copy())
        opt.step()
    p4, exp_avg, exp_avg_sq, norm = arrays[-4:]
    off = np.abs(p.detach().numpy() - p4).max()
    # the authors' singular vectors are of float32, 1e-5 off
    assert off <= (2e-6 if fira and not given else 5e-7), off
    state = opt.state[p]
    if given:
        for key, want in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq), ("update_norm", norm)):
            assert np.abs(state[key].numpy() - want).max() <= 1e-6 * np.abs(want).max(), key


def test_seeds_of_the_refreshes():
    assert [lowrank.refresh_seed(1, k) for k in (0, 1, 2)] == [
        1,
        505211975917066638,
        7574884091489552460,
    ]
    assert lowrank.refresh_seed(12345, 1) == 5510110880054540551


class Run:
    def __init__(self, make, dtype=torch.float32, **options):
        self.generator = torch.Generator().manual_seed(5)
        values = [self.random(shape).to(dtype) for shape in SHAPES]
        self.params = [(f"p{i}", nn.Parameter(v)) for i, v in enumerate(values)]
        self.opt = make(self.params, lr=1e-2, weight_decay=0.1, **options)

    def random(self, shape):
        return torch.randn(shape, generator=self.generator)

    def advance(self, steps=1, factor=1.0):
        for _ in range(steps):
            for _, p in self.params:
                p.grad = (self.random(p.shape) * 0.1).to(p.dtype) * factor
            self.opt.step()
        return self

    def bits(self):
        tensors = [t for _, p in self.params for t in (p.detach(), *self.opt.state[p].values())]
        return [t.reshape(-1).clone().view(torch.uint8) for t in tensors]

    def same(self, other):
        return all(torch.equal(a, b) for a, b in zip(self.bits(), other.bits(), strict=True))


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_loaded_state_continues(make, dtype, tmp_path):
    stochastic = lowbit.scaled("dynamic8", rounding="stochastic")
    formats = {"exp_avg": stochastic, "exp_avg_sq": lowbit.scaled("dynamic4_unsigned", scale="row")}
    if make is MAKERS["adafactor"]:
        formats = lowbit.scaled("dynamic4_unsigned", scale="row")
    for state_format in ("8bit", formats):
        a = Run(make, dtype, state_format=state_format).advance(3)
        torch.save(a.opt.state_dict(), tmp_path / "s")
        b = Run(make, dtype, state_format=state_format)
        b.generator.set_state(a.generator.get_state())
        for (_, p), (_, q) in zip(a.params, b.params, strict=True):
            q.data.copy_(p.data)
        b.opt.load_state_dict(torch.load(tmp_path / "s", weights_only=True))
        assert a.same(b)
        assert a.advance(4).same(b.advance(4))


def test_state_is_small_and_named():
    run = Run(MAKERS["apollo"])
    wide, tall, square, vector, cube, small = (run.opt.state[p] for _, p in run.params)
    assert sorted(wide) == [
        "exp_avg_dynamic8",
        "exp_avg_dynamic8_scale",
        "exp_avg_sq_dynamic8_unsigned",
        "exp_avg_sq_dynamic8_unsigned_scale",
        "shape",
        "step",
        "stream",
        "update_norm",
    ]
    assert wide["exp_avg_dynamic8"].shape == (8, 640) and tall["exp_avg"].shape == (600, 8)
    assert square["exp_avg"].shape == (48, 8) and vector["exp_avg"].shape == (33,)
    assert "update_norm" not in cube and small["exp_avg"].shape == (5, 7)
    fira = Run(MAKERS["fira"])
    shapes = [tuple(fira.opt.state[p]["projection"].shape) for _, p in fira.params[:3]]
    assert shapes == [(70, 8), (64, 8), (48, 8)]
    quarter = lowbit.APOLLO([nn.Parameter(torch.zeros(64, 40))], rank="quarter")
    assert next(iter(quarter.state.values()))["exp_avg"].shape == (64, 10)
    plain = lowbit.APOLLO([nn.Parameter(torch.zeros(640, 400))], full_precision=True)
    assert next(iter(plain.state.values()))["exp_avg"].shape == (640, 400)


@every
def test_what_trainers_do(make):
    plain = Run(make).advance(3)
    assert plain.same(Run(make, maximize=True).advance(3, factor=-1.0))
    tensor = Run(make)
    tensor.opt.param_groups[0]["lr"] = torch.tensor(1e-2, dtype=torch.float64)
    assert plain.same(tensor.advance(3))
    scaled = Run(make)  # as GradScaler does
    scaled.opt.grad_scale, scaled.opt.found_inf = torch.tensor(1024.0), torch.tensor(0.0)
    assert plain.same(scaled.advance(3, factor=1024.0))
    before = scaled.bits()
    scaled.opt.found_inf = torch.tensor(1.0)
    scaled.advance()
    assert all(torch.equal(a, b) for a, b in zip(before, scaled.bits(), strict=True))
    still = Run(make)
    weights = [p.detach().clone() for _, p in still.params]
    still.opt.param_groups[0]["lr"] = 0.0
    still.advance(2)
    assert all(torch.equal(w, p) for w, (_, p) in zip(weights, still.params, strict=True))
    assert float(still.opt.state[still.params[0][1]]["step"]) == 2.0
    twin = copy.deepcopy(plain)
    assert twin.advance(2).same(plain.advance(2))


@every
def test_transposed_parameters_and_threads(make):
    a, b = Run(make), Run(make)
    for _, p in b.params[:3]:
        p.data = p.data.t().contiguous().t()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        a.advance(3)
        torch.set_num_threads(3)
        b.advance(3)
    finally:
        torch.set_num_threads(threads)
    assert a.same(b)


@every
def test_every_isa_gives_the_same_bits(make):
    catalog = lowbit.catalog()
    try:
        runs = []
        for isa in catalog["isas"]:
            lowbit.ops.set_isa(isa)
            runs.append(Run(make, torch.bfloat16).advance(3))
    finally:
        lowbit.ops.set_isa(catalog["isa"])
    assert all(run.same(runs[0]) for run in runs)


@every
def test_a_remainder_of_16_bits_makes_a_bfloat16_weight_nearly_a_float32_one(make):
    rng = torch.Generator().manual_seed(2)
    start = torch.randn(70, 90, generator=rng).bfloat16()
    wide, split = nn.Parameter(start.float()), nn.Parameter(start.clone())
    kept = make([split], lr=1e-2, param_format="bfloat16_split16")
    opts = [make([wide], lr=1e-2), kept]
    for _ in range(3):
        split.grad = torch.randn(70, 90, generator=rng).bfloat16()
        wide.grad = split.grad.float()
        for opt in opts:
            opt.step()
    beside = kept.state[split]["param_bfloat16_split16"]
    joined = lowbit.ops.join(split.detach(), beside, "bfloat16_split16")
    assert torch.allclose(joined, wide, rtol=1e-6, atol=1e-7)
    assert not torch.allclose(split.float(), wide, rtol=1e-4)


@every
def test_a_bucket_holds_any_number_of_parameters(make, monkeypatch):
    a = Run(make).advance(2)
    monkeypatch.setattr(buckets, "BUCKET_NUMEL", 1)
    assert a.same(Run(make).advance(2))


def test_a_projection_that_is_not_finite_keeps_the_old_one():
    p = nn.Parameter(torch.zeros(20, 30))
    opt = lowbit.Fira([p], rank=2, update_proj_gap=1)
    p.grad = torch.randn(20, 30)
    opt.step()
    kept = opt.state[p]["projection"].clone()
    p.grad[3, 4] = float("inf")
    opt.step()
    assert torch.equal(kept, opt.state[p]["projection"])
    assert p[:, 4].isnan().any()


def test_it_learns():
    torch.manual_seed(0)
    x, y = torch.randn(256, 64), torch.randn(256, 32)
    for name, make in MAKERS.items():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 32))
        lr = {"mini": 1e-3, "adafactor": 0.1}.get(name, 1e-2)
        opt = make(model.named_parameters(), lr=lr)
        losses = []
        for _ in range(60):
            opt.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            opt.step()
            losses.append(loss.item())
        assert losses[-1] < 0.8 * losses[0], (name, losses[0], losses[-1])


@pytest.mark.parametrize(
    "options, words",
    [
        ({"rank": 0}, "rank should be"),
        ({"update_proj_gap": 0}, "update_proj_gap should be"),
        ({"update_proj_gap": 1.5}, "update_proj_gap should be"),
        ({"scale_type": "row"}, "scale_type should be"),
        ({"projection": "svd"}, "projection should be"),
        ({"gamma": 0.5}, "gamma should be"),
    ],
)
def test_arguments_out_of_range(options, words):
    with pytest.raises(ValueError, match=words):
        lowbit.APOLLO([nn.Parameter(torch.zeros(2, 2))], **options)


@every
def test_dtensors_on_one_rank(make, one_rank):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    results = []
    for placement in (None, Shard(0), Replicate()):
        torch.manual_seed(0)

        def drawn(shape, placement=placement):
            value = torch.randn(shape)
            return value if placement is None else distribute_tensor(value, one_rank, [placement])

        params = [(f"p{i}", nn.Parameter(drawn(s))) for i, s in enumerate(SHAPES[:3])]
        opt = make(params)
        for _ in range(3):
            for _, p in params:
                p.grad = drawn(p.shape)
            opt.step()
        again = make(params)
        again.load_state_dict(opt.state_dict())
        tensors = [t for _, p in params for t in (p.detach(), *again.state[p].values())]
        results.append([getattr(t, "full_tensor", lambda t=t: t)() for t in tensors])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_cut_columns_are_refused_with_the_numbers(monkeypatch):
    from lowbit import sharding

    cut = sharding.Part((64, 600), (64, 300), (0, 300), ((1, None),))
    monkeypatch.setattr(sharding, "part", lambda p, what: cut)
    with pytest.raises(
        ValueError, match=r"'w' of 600 columns is cut at columns 300\.\.600.*dimension 0"
    ):
        lowbit.APOLLO([("w", nn.Parameter(torch.zeros(64, 600)))], rank=8)
