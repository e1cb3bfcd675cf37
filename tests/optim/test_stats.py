"""`stats()`: every number against one that is found the slow way."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowbit
from lowbit import ops
from lowbit.optim.codes import ORDINARY, count_codes, ends_of, unpack
from lowbit.optim.codes import values_of as meanings_of
from lowbit.optim.report import COMPONENTS
from lowbit.state import quantize as coding
from tests.support.groups import begin, params_for

FORMATS = {entry["name"]: entry for entry in lowbit.catalog()["state"]}
PRESETS = [entry["name"] for entry in lowbit.catalog()["presets"]]


def model(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(70, 130), nn.Linear(130, 40, bias=False)).to(dtype)


def set_grads(net, seed, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    for p in net.parameters():
        spread = torch.exp(torch.randn(p.shape, generator=generator))  # entries of all sizes
        p.grad = (size * spread * torch.randn(p.shape, generator=generator)).to(p.dtype)
        p.grad[..., :3] = 0


def trained(dtype=torch.bfloat16, steps=2, **options):
    net = model(dtype)
    opt = lowbit.AdamW(net.named_parameters(), **options)
    for step in range(steps):
        set_grads(net, step)
        opt.step()
    set_grads(net, 99)
    return net, opt


def values_of(opt, p):
    """Each slot of a parameter and its values."""
    lay = opt.layouts[p]
    return {
        slot.name: (
            slot,
            coding.dequantize_slot(
                [opt.state[p][e.key].clone() for e in slot.entries(lay.part)], lay, slot
            ),
        )
        for slot in lay.slots
    }


@pytest.mark.parametrize("name", [n for n, entry in FORMATS.items() if entry["scaled"]])
def test_ends_are_the_extreme_values(name):
    """Codes of a block's largest magnitudes and of its smallest values lie at the ends,
    and no code lies beyond.
    """
    info, ends = FORMATS[name], ends_of(name)
    bits, generator = info["bits"], torch.Generator().manual_seed(0)
    x = torch.randn((4, 2048), generator=generator)
    x = x if info["signed"] else x.abs()
    codes, scales = ops.quantize(x, name, 2048)
    values = ops.dequantize(codes, scales, name, 2048, 2048)
    numbers = unpack(codes, bits, 2048)
    assert torch.isin(numbers, ends).any()
    for row in range(4):
        inner = values[row][~torch.isin(numbers[row], ends) & (values[row] != 0)]
        for end in values[row][torch.isin(numbers[row], ends)]:
            assert len(inner) == 0 or end > inner.max() or end < inner.min()


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8, 16])
def test_unpack(bits):
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 1 << bits, (3, 13))
    single = (codes[:, :, None] >> np.arange(bits)) & 1
    packed = np.packbits(single.reshape(3, -1).astype(np.uint8), axis=1, bitorder="little")
    assert np.array_equal(unpack(torch.from_numpy(packed), bits, 13).numpy(), codes)


@pytest.mark.parametrize("name", PRESETS)
def test_bytes(name):
    net, opt = trained(state_format=name)
    stats = opt.stats()
    assert list(stats["parameters"]) == ["0.weight", "0.bias", "1.weight"]
    for (key, p), entry in zip(net.named_parameters(), stats["parameters"].values(), strict=True):
        state = opt.state[p]
        expected = dict.fromkeys(COMPONENTS, 0)
        expected["parameter"] = p.nbytes
        for kept, t in state.items():
            if kept in ("step", "stream", "shape"):
                kind = "numbers"
            elif "_scale" in kept:
                kind = "scales"
            elif kept.endswith(("_row", "_col")):
                kind = "factors"
            else:
                kind = "codes" if t.dtype == torch.uint8 else "full_precision"
            expected[kind] += t.nbytes
        assert entry["bytes"] == expected, key
        assert entry["values"] == p.numel()
        everything = p.nbytes + sum(t.nbytes for t in state.values())
        assert entry["bytes_per_value"] == everything / p.numel()
    total = stats["total"]
    for component in COMPONENTS:
        assert total["bytes"][component] == sum(
            e["bytes"][component] for e in stats["parameters"].values()
        )
    assert total["values"] == sum(p.numel() for p in net.parameters())
    assert total["bytes_per_value"] == sum(total["bytes"].values()) / total["values"]


@pytest.mark.filterwarnings("ignore:.*rounded to nearest", "ignore:rounding to nearest")
@pytest.mark.parametrize("entry", [e for e in lowbit.catalog()["param"]], ids=lambda e: e["name"])
def test_bytes_beside_the_parameter(entry):
    net, opt = trained(getattr(torch, entry["dtype"]), param_format=entry["name"])
    for p, made in zip(net.parameters(), opt.stats(probe=True)["parameters"].values(), strict=True):
        assert made["bytes"]["compensation"] == entry["compensation_bytes"] * p.numel()
        assert made["param_format"] == entry["name"] and 0 <= made["lost"] <= made["updates"] <= 1


@pytest.mark.parametrize("name", PRESETS)
def test_use_of_codes(name):
    net, opt = trained(state_format=name)
    stats = opt.stats()
    sums = {}
    for p, entry in zip(net.parameters(), stats["parameters"].values(), strict=True):
        slots = values_of(opt, p)
        assert set(entry["states"]) == set(slots)
        for key, (slot, values) in slots.items():
            made = entry["states"][key]
            assert (made["format"], made["scale"], made["block"]) == (
                slot.format,
                slot.scale,
                slot.block,
            )
            if not slot.coded:
                assert not {"saturated", "zero", "used"} & set(made)
                continue
            bits, values = FORMATS[slot.format]["bits"], values.numpy().reshape(p.shape[0], -1)
            packed = opt.state[p][slot.key].numpy()
            single = np.unpackbits(packed, axis=1, bitorder="little")[:, : bits * values.shape[1]]
            codes = (single.reshape(*values.shape, bits).astype(int) << np.arange(bits)).sum(-1)
            ends = np.isin(codes, ends_of(slot.format).numpy()) & (values != 0)
            assert made["saturated"] == ends.mean()
            assert made["zero"] == (values == 0).mean()
            assert made["used"] == len(np.unique(codes)) / 2**bits
            if made["zero"]:  # the columns without gradients, in a map that has a zero
                assert made["zero"] >= (values[:, :3] == 0).mean() * 3 / values.shape[1]
            tally = sums.setdefault(key, np.zeros(3))
            tally += [ends.sum(), (values == 0).sum(), values.size]
    for key, (ends, zeros, size) in sums.items():
        total = stats["total"]["states"][key]
        assert (total["saturated"], total["zero"]) == (ends / size, zeros / size)


SCALES = [0.0, 1e-45, 1e-38, 1e-30, 2.0**-80, 1.0, 2.0**80, 1e38, math.inf, math.nan]


@pytest.mark.parametrize("name", PRESETS)
def test_codes_that_do_not_tell_whether_they_mean_0(name):
    """Scales at which values underflow, overflow or are not finite, mixed with others."""
    net, opt = trained(state_format=name)
    p = net[0].weight
    for key, t in opt.state[p].items():
        if "_scale" in key:
            numbers = torch.tensor(SCALES).to(t.dtype)
            t.reshape(len(t), -1)[:] = numbers[torch.arange(len(t)) % len(SCALES), None]
    made = opt.stats()["parameters"]["0.weight"]["states"]
    for key, (slot, values) in values_of(opt, p).items():
        if slot.coded:
            codes = unpack(opt.state[p][slot.key], FORMATS[slot.format]["bits"], 70)
            ends = torch.isin(codes, ends_of(slot.format)) & (values != 0)
            assert made[key]["saturated"] == int(ends.sum()) / values.numel()
            assert made[key]["zero"] == int((values == 0).sum()) / values.numel()
            assert made[key]["used"] == len(codes.unique()) / 2 ** FORMATS[slot.format]["bits"]


@pytest.mark.parametrize("name", [n for n, entry in FORMATS.items() if entry["scale_numbers"] == 1])
def test_between_ordinary_scales_a_code_tells_whether_it_means_0(name):
    """Every code at both ends of the range, as far as the format's scales reach."""
    bits, dtype = FORMATS[name]["bits"], getattr(torch, FORMATS[name]["scale_dtype"])
    codes = torch.from_numpy(
        np.packbits(
            ((np.arange(1 << bits)[:, None] >> np.arange(bits)) & 1)
            .astype(np.uint8)
            .reshape(1, -1),
            axis=1,
            bitorder="little",
        )
    )
    assert torch.equal(unpack(codes, bits, 1 << bits)[0], torch.arange(1 << bits))
    limits = torch.finfo(dtype)
    for scale in (
        max(ORDINARY[0], limits.smallest_normal * limits.eps),
        min(ORDINARY[1], limits.max),
    ):
        scales = torch.full((1, 2048), scale, dtype=dtype)[:, : -(-(1 << bits) // 2048)]
        values = ops.dequantize(codes, scales.contiguous(), name, 2048, 1 << bits)[0]
        assert torch.equal(values == 0, meanings_of(name) == 0)


@pytest.mark.parametrize("begin, end", [(0, 13), (3, 13), (4, 4), (8, 9), (5, 6)])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_codes_are_counted(bits, begin, end):
    generator = torch.Generator().manual_seed(bits)
    packed = torch.randint(0, 256, (5, -(-13 * bits // 8)), dtype=torch.uint8, generator=generator)
    wanted = np.bincount(unpack(packed, bits, 13)[:, begin:end].reshape(-1), minlength=1 << bits)
    if begin < end:
        assert np.array_equal(count_codes(packed, bits, begin, end).numpy(), wanted)


@pytest.mark.parametrize("name", PRESETS)
def test_pieces_give_the_same_numbers(name, monkeypatch):
    _, opt = trained(state_format=name, param_format="bfloat16_split8_stochastic")
    whole = opt.stats(probe=True)
    for module in (lowbit.optim.stats, lowbit.optim.codes):
        monkeypatch.setattr(module, "_AT_ONCE", 500)  # some rows each
    monkeypatch.setattr(lowbit.optim.stats, "_IN_CACHE", 130)
    pieces = opt.stats(probe=True)
    for part in [*whole["parameters"], "total"]:
        a, b = (s["parameters"].get(part, s["total"]) for s in (whole, pieces))
        for state, kept in a["states"].items():
            assert list(b["states"][state]) == list(kept)
            for key, value in kept.items():
                near = pytest.approx(value, rel=1e-12) if key == "rms_error" else value
                assert b["states"][state][key] == near
        assert {k: v for k, v in a.items() if k != "states"} == {
            k: v for k, v in b.items() if k != "states"
        }


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("name", PRESETS)
def test_probe(name, decay):
    """Against torch's own AdamW on the decoded state, and against the step that is then made."""
    net, opt = trained(lr=1e-3, weight_decay=decay, state_format=name)
    before = {p: p.detach().float() for p in net.parameters()}
    decoded = {p: {key: values for key, (_, values) in values_of(opt, p).items()} for p in before}
    kept = [t.clone() for p in before for t in (p, p.grad, *opt.state[p].values())]
    rng = torch.get_rng_state()
    stats = opt.stats(probe=True)
    assert torch.equal(rng, torch.get_rng_state())
    now = [t for p in before for t in (p, p.grad, *opt.state[p].values())]
    assert all(torch.equal(a, b) for a, b in zip(kept, now, strict=True)), (
        "the probe changed something"
    )
    opt.step()
    sums = {}
    for p, entry in zip(before, stats["parameters"].values(), strict=True):
        if "exp_avg_sq" not in decoded[p]:  # factored: torch has no such rule
            continue
        copy = nn.Parameter(before[p].clone())
        torchs = torch.optim.AdamW([copy], lr=1e-3, weight_decay=decay, foreach=False)
        torchs.state[copy] = {"step": torch.tensor(2.0), **decoded[p]}
        copy.grad = p.grad.float()
        torchs.step()
        for key, (_, values) in values_of(opt, p).items():
            want, got = torchs.state[copy][key].double(), values.double()
            made, off = entry["states"][key], (got - want).abs()
            # Where storing is exact what torch rounds otherwise in float32 is all there is.
            assert made["rms_error"] == pytest.approx(
                float(off.norm() / want.norm()), rel=1e-3, abs=1e-6
            )
            one = torch.where(off == 0, 0.0, off / want.abs())
            near = one[want.abs() > 1e-30].max()
            assert made["max_error"] == pytest.approx(float(near), rel=1e-2, abs=1e-4)
            tally = sums.setdefault(key, np.zeros(2))
            tally += [float(off.square().sum()), float(want.square().sum())]
        moved = copy.detach() != before[p]
        lost = moved & (p.detach().float() == before[p])
        assert entry["updates"] == pytest.approx(float(moved.double().mean()), abs=2e-3)
        assert entry["lost"] == pytest.approx(float(lost.double().mean()), abs=2e-3)
    if "factored" not in name:
        for key, (error, exact) in sums.items():
            total = stats["total"]["states"][key]["rms_error"]
            assert total == pytest.approx(math.sqrt(error / exact), rel=1e-3, abs=1e-6)
        values = stats["total"]["values"]
        for share in ("updates", "lost"):
            several = stats["parameters"].values()
            assert stats["total"][share] == pytest.approx(
                sum(e[share] * e["values"] for e in several) / values
            )


def test_probe_of_factored_state():
    """Against float32 first moments under the same factored rule."""
    net, opt = trained(lr=1e-3, state_format="factored8")
    weight = net[0].weight
    lay = opt.layouts[weight]
    exact = 0.9 * values_of(opt, weight)["exp_avg"][1].double() + 0.1 * weight.grad.double()
    entry = opt.stats(probe=True)["parameters"]["0.weight"]
    opt.step()
    off = values_of(opt, weight)["exp_avg"][1].double() - exact
    assert entry["states"]["exp_avg"]["rms_error"] == pytest.approx(
        float(off.norm() / exact.norm()), rel=1e-3
    )
    assert entry["rule"] == lay.rule == "adamw_factored" and list(entry["states"]) == ["exp_avg"]


@pytest.mark.filterwarnings("ignore:.*rounded to nearest", "ignore:rounding to nearest")
def test_updates_lost_to_rounding():
    """Rounded to nearest, steps far below the spacing of the weights all vanish;
    stochastically only most of them.
    """
    lost = {}
    beside = [
        e["name"]
        for e in lowbit.catalog()["param"]
        if e["dtype"] == "bfloat16" and e["compensation"]
    ]
    for kind in ("bfloat16", "bfloat16_stochastic", *beside):
        _, opt = trained(lr=1e-6, steps=0, param_format=kind, weight_decay=0.0)
        for p in (p for group in opt.param_groups for p in group["params"]):
            p.data.fill_(1.0)
            p.grad.fill_(-1.0)
        total = opt.stats(probe=True)["total"]
        assert total["updates"] == 1.0
        lost[kind] = total["lost"]
    assert not any(lost[kind] for kind in beside if "split8" not in kind)  # what is beside counts
    assert lost["bfloat16"] == 1.0 and 0.99 < lost["bfloat16_stochastic"] < 1.0
    _, opt = trained(torch.float32)
    total = opt.stats(probe=True)["total"]
    assert total["updates"] > 0.9 and total["lost"] == 0.0


def test_parameters_without_gradients_are_not_probed():
    net, opt = trained()
    net[0].weight.grad = None
    stats = opt.stats(probe=True)
    assert "lost" not in stats["parameters"]["0.weight"] and "lost" in stats["parameters"]["0.bias"]
    assert "rms_error" not in stats["parameters"]["0.weight"]["states"]["exp_avg"]
    opt.zero_grad()
    stats = opt.stats(probe=True)
    assert "rms_error" not in str(stats["total"])


def test_non_finite_state_is_seen():
    net, opt = trained()
    net[0].weight.grad[0, 0] = float("nan")
    made = opt.stats(probe=True)["parameters"]["0.weight"]["states"]["exp_avg"]
    assert math.isnan(made["rms_error"]) and math.isnan(made["max_error"])


@pytest.mark.parametrize("rank", [0, 1])
def test_of_sharded_parameters_the_local_part_is_meant(rank):
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    net, opt = trained()
    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        whole = net[0].weight.detach()
        p = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None))
        p.grad = distribute_tensor(net[0].weight.grad, mesh, [Shard(0)], src_data_rank=None)
        opt = lowbit.AdamW([("w", p)])
        local = nn.Parameter(whole.chunk(2)[rank].clone())
        local.grad = net[0].weight.grad.chunk(2)[rank].clone()
        alone = lowbit.AdamW([("w", local)])
        made, same = (o.stats(probe=True)["parameters"]["w"] for o in (opt, alone))
        assert made["values"] == local.numel() and made["bytes"] == same["bytes"]
        for o in (opt, alone):
            o.step()
        a, b = (o.stats()["parameters"]["w"]["states"] for o in (opt, alone))
        assert a == b
    finally:
        dist.destroy_process_group()


def test_every_rule_can_be_probed():
    for name in lowbit.__all__:
        cls = getattr(lowbit, name)
        if not isinstance(cls, type) or not issubclass(cls, lowbit.LowbitOptimizer):
            continue
        if cls is lowbit.LowbitOptimizer:
            continue
        net = model()
        opt = begin(cls(params_for(cls, net)))
        for step in range(2):
            set_grads(net, step)
            opt.step()
        stats = opt.stats(probe=True)
        for entry in stats["parameters"].values():
            for kept in entry["states"].values():
                in_passes = entry["rule"] in ("apollo_inner", "muon_momentum")
                assert in_passes or 0 <= kept["rms_error"] < 0.3, (name, kept)
        params = [p for group in opt.param_groups for p in group["params"]]
        everything = sum(p.nbytes + sum(t.nbytes for t in opt.state[p].values()) for p in params)
        assert sum(stats["total"]["bytes"].values()) == everything


def test_prints_as_a_table():
    _, opt = trained()
    stats = opt.stats(probe=True)
    assert type(dict(stats)) is dict and isinstance(stats, lowbit.Stats)
    lines = stats.table().splitlines()
    assert lines[0].split()[:3] == ["values", "bytes", "each"]
    text = "\n".join(lines)
    for word in (
        "0.weight",
        "total",
        "dynamic8_unsigned",
        f"{stats['total']['bytes_per_value']:.3f}",
        "%",
    ):
        assert word in text
    assert lowbit.AdamW([nn.Parameter(torch.ones(3))]).stats().table().count("\n") == 4
