"""What small updates leave of themselves in 16-bit parameters,
and float32 weights out of them and back.
"""

import copy
import json
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import lowbit
from lowbit import ops
from lowbit.state import memory
from lowbit.state.convert import convert_state
from tests.support.paths import GOLDEN

EXTRA = [p["name"] for p in ops.catalog()["param"] if p["compensation"]]
STEPS, LR = 2000, 1e-6


def tracked(param_format, values, grads):
    """Values after STEPS steps of plain Adam, and what float32 weights give with the same state."""
    dtype = getattr(torch, param_format.split("_")[0])
    p = nn.Parameter(values.to(dtype, copy=True))
    opt = lowbit.Adam([p], lr=LR, param_format=param_format, state_format="float32")
    for t in range(STEPS):
        p.grad = grads[t % len(grads)].to(dtype)
        opt.step()
    lay = opt.layouts[p]
    extra = opt.state[p][lay.compensation.key] if lay.compensation else None
    return ops.join(p.detach(), extra, param_format)


def test_small_updates_are_kept():
    """2,000 steps of 1e-6: to the nearest bfloat16 they are lost; compensated,
    split and stochastic parameters keep them.
    """
    generator = torch.Generator().manual_seed(0)
    values = (torch.randn(64, 256, generator=generator) * 0.02).bfloat16().float()
    values[values.abs() < 2.0**-9] = 2.0**-9  # where a bfloat16 step is above an update
    grads = [torch.randn(64, 256, generator=generator).abs() for _ in range(7)]
    half = [g.bfloat16().float() for g in grads]
    exact = tracked("float32", values, half) - values
    rows = []
    for entry in ops.catalog()["param"]:
        name = entry["name"]
        if name == "float32":
            continue
        start = values if name.startswith("bfloat16") else values.half().float()
        moved = tracked(name, start, grads) - start
        error = ((moved - exact).double().square().mean() / exact.double().square().mean()).sqrt()
        share = float(moved.double().mean() / exact.double().mean())
        rows.append((name, share, float(error)))
        if name in ("bfloat16", "float16"):
            assert share < 0.6, f"{name} was expected to lose updates of {LR}"
        elif name.endswith("stochastic"):
            assert abs(share - 1) < 0.02, f"{name} moved {share:.3f} of the way"
        else:
            # 8 bits to the nearest round every update of 1e-6 the same way: off by its share,
            # but moving
            most = 0.15 if name == "bfloat16_split8" else 0.05
            assert error < most, f"{name} is off by {error:.3f}"
    print("\nparameter format            share of the way   rms error")
    for name, share, error in rows:
        print(f"{name:28}{share:12.3f}{error:14.4f}")


@pytest.mark.parametrize("name", [p["name"] for p in ops.catalog()["param"] if p["random"]])
def test_stochastic_rounding_is_unbiased(name):
    """The mean of what a value is stored as is the value, to 4 standard errors,
    subnormals of float16 included.
    """
    for value in (1.0 + 1e-3, 0.1, -3.3e-5, 1.7e-7, -65000.3, 2.0**-20 * 1.2345):
        x = torch.full((200_000,), value, dtype=torch.float32)
        stored, extra = ops.split(x, name, seed=3, stream=1)
        got = ops.join(stored, extra if extra.numel() else None, name).double()
        error = got.std() / np.sqrt(x.numel())
        assert abs(got.mean() - float(x[0])) <= 4 * error + abs(value) * 2**-24, (name, value)


def model(dtype=torch.float32):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(80, 70), nn.BatchNorm1d(70), nn.Linear(70, 70, bias=False))
    net[2].weight.data[0, 0] = 1.5
    net.register_parameter("tied", net[2].weight)
    return net.to(dtype)


@pytest.mark.parametrize("name", EXTRA)
def test_float32_weights_out_and_back(name):
    dtype = getattr(torch, name.split("_")[0])
    net = model()
    wanted = {key: value.clone() for key, value in net.state_dict().items()}
    opt = lowbit.to_master_free(net, lambda p: lowbit.AdamW(p, param_format=name), dtype=dtype)
    assert net[0].weight.dtype == dtype
    out = lowbit.get_fp32_model_state_dict(net, opt)
    assert set(out) == set(wanted)
    step = {"split8": 2.0**-15, "split16": 2.0**-22, "kahan": 2.0**-16}[name.split("_")[1]]
    for key, value in out.items():
        if value.is_floating_point():
            assert value.dtype == torch.float32
            error = (value - wanted[key]).abs().max() / wanted[key].abs().max().clamp(min=1e-3)
            assert error <= step * 1.01, f"{key}: {error}"
        else:
            assert torch.equal(value, wanted[key])
    assert torch.equal(out["tied"], out["2.weight"]), "a tied name gives the full value too"
    again = model(dtype)  # an optimizer that never stepped takes them as well
    fresh = lowbit.AdamW(again.named_parameters(), param_format=name)
    lowbit.set_fp32_model_state_dict(again, fresh, out)
    back = lowbit.get_fp32_model_state_dict(again, fresh)
    for key, value in out.items():
        torch.testing.assert_close(
            back[key], value, rtol=0, atol=float(value.double().abs().max()) * step
        )
    with pytest.raises(ValueError, match="no 'nothing'"):
        lowbit.set_fp32_model_state_dict(again, fresh, {"nothing": torch.zeros(1)})
    with pytest.raises(ValueError, match="the model's"):
        lowbit.set_fp32_model_state_dict(again, fresh, {"0.weight": torch.zeros(1)})


@pytest.mark.parametrize("name", EXTRA)
def test_what_is_kept_beside_is_saved_and_loaded(name):
    dtype = getattr(torch, name.split("_")[0])
    nets = [model(dtype) for _ in range(2)]
    opts = [lowbit.AdamW(net.named_parameters(), param_format=name, lr=1e-4) for net in nets]

    def advance(net, opt, seed):
        generator = torch.Generator().manual_seed(seed)
        for p in net.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(dtype)
        opt.step()

    for t in range(3):
        advance(nets[0], opts[0], t)
    nets[1].load_state_dict(nets[0].state_dict())
    opts[1].load_state_dict(copy.deepcopy(opts[0].state_dict()))
    for t in range(3, 6):
        for net, opt in zip(nets, opts, strict=True):
            advance(net, opt, t)
    for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(p, q)
        for key, value in opts[0].state[p].items():
            assert torch.equal(value, opts[1].state[q][key]), key


def test_export_and_import_of_what_is_not_a_plain_weight():
    """Extra state, frozen parameters, a submodule called module; the copy is not a view; rounded
    weights and wrong dtypes are refused.
    """

    class Counted(nn.Linear):
        taken = None

        def get_extra_state(self):
            return {"calls": 3}

        def set_extra_state(self, state):
            self.taken = state

    net = nn.ModuleDict(
        {"module": Counted(80, 70), "frozen": nn.Linear(70, 70).requires_grad_(False)}
    )
    wanted = copy.deepcopy(net.state_dict())
    opt = lowbit.to_master_free(net, lambda p: lowbit.AdamW(p, param_format="bfloat16_split16"))
    assert net["frozen"].weight.dtype == torch.bfloat16
    out = lowbit.get_fp32_model_state_dict(net, opt)
    assert set(out) == set(wanted) and out["module._extra_state"] == {"calls": 3}
    torch.testing.assert_close(out["module.weight"], wanted["module.weight"], rtol=2e-7, atol=0)
    assert torch.equal(out["frozen.weight"], wanted["frozen.weight"].bfloat16().float())
    lowbit.set_fp32_model_state_dict(net, opt, out)
    assert net["module"].taken == {"calls": 3}
    before = copy.deepcopy(lowbit.get_fp32_model_state_dict(net, opt))
    bad = {"frozen.weight": torch.zeros(70, 70), "module.weight": torch.zeros(70, 80).bfloat16()}
    with pytest.raises(ValueError, match="not float32"):
        lowbit.set_fp32_model_state_dict(net, opt, bad)
    after = lowbit.get_fp32_model_state_dict(net, opt)
    assert all(torch.equal(after[key], before[key]) for key in before if "extra" not in key)

    plain = nn.Linear(80, 70)  # float32 throughout: still a copy
    out = lowbit.get_fp32_model_state_dict(plain, lowbit.AdamW(plain.named_parameters()))
    assert out["weight"].data_ptr() != plain.weight.data_ptr()


def test_batch_norms_stay_float32_and_the_model_runs():
    net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU())
    net(torch.randn(2, 3, 8, 8)).sum().backward()
    opt = lowbit.to_master_free(net, lambda p: lowbit.AdamW(p, param_format="bfloat16_split16"))
    assert net[0].weight.dtype == torch.bfloat16 and net[1].weight.dtype == torch.float32
    assert all(p.grad is None for p in net[0].parameters()), "float32 gradients would not fit"
    net(torch.randn(2, 3, 8, 8).bfloat16()).float().square().sum().backward()
    opt.step()
    assert all(torch.isfinite(p).all() for p in net.parameters())


@pytest.fixture
def parameters_are_made_anew():
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    yield
    torch.__future__.set_overwrite_module_params_on_conversion(before)


def test_weights_keep_their_low_bits_where_conversion_makes_other_parameters(
    parameters_are_made_anew,
):
    net = model()
    before, wanted = list(net.parameters()), {k: v.clone() for k, v in net.state_dict().items()}
    opt = lowbit.to_master_free(net, lambda p: lowbit.AdamW(p, param_format="bfloat16_split16"))
    assert not {*map(id, before)} & {*map(id, net.parameters())}
    assert net[0].weight.dtype == torch.bfloat16 and net[1].weight.dtype == torch.float32
    for key, value in lowbit.get_fp32_model_state_dict(net, opt).items():
        largest = float(wanted[key].abs().max())
        torch.testing.assert_close(value, wanted[key], rtol=0, atol=largest * 2.0**-22)


def test_an_optimizer_of_the_parameters_before_is_refused(parameters_are_made_anew):
    net = nn.Linear(64, 64)
    before = list(net.named_parameters())
    with pytest.raises(ValueError, match="has 'weight' as it was before the conversion"):
        lowbit.to_master_free(net, lambda _: lowbit.AdamW(before))


@pytest.mark.parametrize("name", [n for n in EXTRA if "stochastic" not in n])
def test_a_step_of_nothing_changes_nothing(name):
    """lr = 0, as checkpointing and trainers use it to make state: every weight stays,
    -0 keeps its sign.
    """
    dtype = getattr(torch, name.split("_")[0])
    p = nn.Parameter(torch.cat([torch.randn(4094), torch.tensor([0.0, -0.0])]).to(dtype))
    opt = lowbit.AdamW([p], lr=0.0, param_format=name)
    before = p.detach().view(torch.int16).clone()
    p.grad = torch.randn(4096).to(dtype)
    opt.step()
    assert torch.equal(p.detach().view(torch.int16), before)


def test_split_is_flashoptims():
    """Through the operators: the words, corrections and weights of FlashOptim's kernels
    (tests/golden/README.md).
    """
    golden = json.loads((GOLDEN / "flashoptim_split.json").read_text())
    x = torch.from_numpy(np.array(golden["x"], np.uint32).view(np.float32))
    for name in ("bfloat16_split8", "bfloat16_split16", "float16_split8", "float16_split16"):
        stored, extra = ops.split(x, name)
        finite = stored.isfinite()
        assert finite.sum() >= 80
        words = stored.view(torch.int16).numpy().view(np.uint16)
        corrections = extra.numpy().view(np.int16 if name.endswith("16") else np.int8).reshape(-1)
        weights = np.array(golden[f"{name}_weight"], np.uint32).view(np.float32)
        got = ops.join(stored, extra, name).numpy()
        rows = finite.numpy()
        np.testing.assert_array_equal(words[rows], np.array(golden[f"{name}_stored"])[rows])
        np.testing.assert_array_equal(corrections[rows], np.array(golden[f"{name}_extra"])[rows])
        np.testing.assert_array_equal(got[rows], weights[rows])
        assert not corrections[~rows].any()


def test_updates_far_below_a_step_of_the_weight():
    """Weights of 1..2 and updates of 1e-6, 1/7800 of a bfloat16 step: 16 more bits keep them,
    chance keeps them on average, 8 more bits lose most.
    """
    names = [p["name"] for p in ops.catalog()["param"]]
    generator = torch.Generator().manual_seed(1)
    values = (1 + torch.rand(1024, generator=generator) * 0.9).bfloat16()
    params = [
        nn.Parameter(values.to(getattr(torch, n.split("_")[0]), copy=True)).detach() for n in names
    ]
    params = [nn.Parameter(p) for p in params]
    opt = lowbit.Adam(
        [{"params": [p], "param_format": n} for n, p in zip(names, params, strict=True)],
        lr=LR,
        state_format="float32",
    )
    for _ in range(1000):
        grad = (1 + torch.randn(1024, generator=generator)).bfloat16()
        for p in params:
            p.grad = grad.to(p.dtype)
        opt.step()
    moved = {}
    for name, p in zip(names, params, strict=True):
        lay = opt.layouts[p]
        extra = opt.state[p][lay.compensation.key] if lay.compensation else None
        moved[name] = (ops.join(p.detach(), extra, name) - values.float()).double()
    exact = moved["float32"]
    print("\nparameter format            share of the way   rms error   bias / standard error")
    for name, way in moved.items():
        error = way - exact
        share = float(way.mean() / exact.mean())
        rms = float((error.square().mean() / exact.square().mean()).sqrt())
        bias = float(error.mean() / (error.std() / error.numel() ** 0.5 + 1e-30))
        print(f"{name:28}{share:12.3f}{rms:14.4f}{bias:14.1f}")
        if name in ("bfloat16", "float16"):
            assert abs(share) < 0.05, f"{name} was expected to lose the updates"
        elif name == "bfloat16_split8_stochastic":
            # p + c / 127 * h is rounded to float32, alike for all weights with the same c: a drift
            # of up to 1/16 of these updates
            assert abs(share - 1) < 0.06, f"{name} moved {share:.3f} of the way"
        elif name.endswith("stochastic"):
            assert abs(bias) < 4, f"{name} is off by {bias:.1f} standard errors"
        elif name.endswith("split16") or name == "float16_kahan":
            assert rms < 0.05, f"{name} is off by {rms:.3f}"


def test_sharded_models_are_converted_and_stay_sharded(one_rank):
    """fully_shard's parameters become 16-bit where they are; what comes out are DTensors;
    whole tensors are taken too.
    """
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    net = nn.Sequential(nn.Linear(80, 70), nn.Linear(70, 70))
    wanted = {key: value.clone() for key, value in net.state_dict().items()}
    for module in (net[0], net[1], net):
        fully_shard(module, mesh=one_rank)
    opt = lowbit.to_master_free(net, lambda p: lowbit.AdamW(p, param_format="bfloat16_split16"))
    first = lowbit.get_fp32_model_state_dict(net, opt)
    net(torch.randn(4, 80).bfloat16()).float().square().sum().backward()
    opt.step()
    lowbit.set_fp32_model_state_dict(net, opt, wanted)
    for out in (first, lowbit.get_fp32_model_state_dict(net, opt)):
        for key, value in out.items():
            assert isinstance(value, DTensor) and value.dtype == torch.float32
            torch.testing.assert_close(value.full_tensor(), wanted[key], rtol=2e-7, atol=0)


def test_new_memory_is_not_taken_for_correction_bits(monkeypatch):
    """Newly allocated state holds anything before it is filled: only bits that the optimizer had
    are warned of.
    """
    p = nn.Parameter(torch.ones(64, 96, dtype=torch.bfloat16))
    saved = {"step": 1, "exp_avg": torch.zeros(64, 96), "exp_avg_sq": torch.zeros(64, 96)}
    opt = lowbit.AdamW([p], param_format="bfloat16_split16")
    monkeypatch.setattr(
        memory, "empty", lambda lay, entry, *_: torch.full(entry.local, 3).to(entry.dtype)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = convert_state(p, opt.layouts[p], saved, 0)({}, True)
    assert not made[opt.layouts[p].compensation.key].any()


def test_float64_values_are_not_narrowed():
    net = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    third = torch.tensor([1 / 3], dtype=torch.float64)
    net.register_buffer("positions", third.clone())
    net.frozen = torch.nn.Parameter(third.clone(), requires_grad=False)
    opt = lowbit.AdamW(net.named_parameters(), param_format="bfloat16_split16")
    whole = lowbit.get_fp32_model_state_dict(net, opt)
    assert torch.equal(whole["positions"], third) and torch.equal(whole["frozen"], third)
    with torch.no_grad():
        net.positions.zero_()
        net.frozen.zero_()
    lowbit.set_fp32_model_state_dict(net, opt, whole)
    assert torch.equal(net.positions, third) and torch.equal(net.frozen, third)
    lowbit.set_fp32_model_state_dict(net, opt, {"positions": third.float()})
    assert torch.equal(net.positions, third.float().double())
