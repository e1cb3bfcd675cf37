"""What went wrong for users of other optimizers, tried with lowbit's. Each case has the name that
tests/repo/field_cases.md has for it, with the report that it comes from.
"""

import copy
import io
import pathlib
import pickle
import re
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import lowbit

ROOT = pathlib.Path(__file__).parents[2]

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
FORMATS = ["8bit", "4bit", "fp8", "companded8", "factored8", "bfloat16", "float32"]


def net(dtype=torch.float32, seed=0, inside=80):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, inside), nn.GELU(), nn.Linear(inside, 64)).to(dtype)


def train(model, opt, steps=2, seed=0, scheduler=None):
    torch.manual_seed(seed)
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        model(torch.randn(8, 64, dtype=dtype)).float().square().mean().backward()
        opt.step()
        opt.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return model, opt


def values(model, opt):
    """All weights and state, by place."""
    made = {f"w.{k}": v.detach().clone() for k, v in model.state_dict().items()}
    for i, state in opt.state_dict()["state"].items():
        made.update({f"{i}.{k}": v.clone() for k, v in state.items() if torch.is_tensor(v)})
    return made


def same(a, b):
    assert a.keys() == b.keys()
    for key, t in a.items():
        assert t.dtype == b[key].dtype and torch.equal(t, b[key]), key


def through_file(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# Loading and resuming


@pytest.mark.parametrize("state_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume_keeps_dtypes_and_bits(state_format, dtype):
    model, opt = train(net(dtype), lowbit.AdamW(net(dtype).parameters()), 0)
    opt = lowbit.AdamW(model.parameters(), lr=1e-2, state_format=state_format)
    train(model, opt)
    other = net(dtype, seed=5)
    other.load_state_dict(model.state_dict())
    again = lowbit.AdamW(other.parameters(), lr=1.0, state_format=state_format)
    again.load_state_dict(through_file(opt.state_dict()))
    same(values(model, opt), values(other, again))
    same(values(*train(model, opt, seed=3)), values(*train(other, again, seed=3)))


@pytest.mark.parametrize("kept", ["bfloat16_kahan", "bfloat16_split8", "bfloat16_split16"])
def test_correction_bits_of_weights_resume(kept):
    """What bfloat16 weights lack of float32 is state: the run continues with the same bits."""
    model = net(torch.bfloat16)
    opt = lowbit.AdamW(model.parameters(), lr=1e-4, param_format=kept)
    train(model, opt, 5)
    other = net(torch.bfloat16, seed=5)
    other.load_state_dict(through_file(model.state_dict()))
    again = lowbit.AdamW(other.parameters(), lr=1e-4, param_format=kept)
    again.load_state_dict(through_file(opt.state_dict()))
    same(values(*train(model, opt, 5, 3)), values(*train(other, again, 5, 3)))


def test_state_of_another_version_of_an_option_is_loaded():
    """A checkpoint of a version that did not know an entry of the groups."""
    model = net()
    opt = lowbit.AdamW(model.parameters(), lr=1e-2)
    train(model, opt)
    saved = through_file(opt.state_dict())
    for key in ("maximize", "capturable", "differentiable", "fused", "foreach", "seed"):
        saved["param_groups"][0].pop(key)
    other = net()
    other.load_state_dict(model.state_dict())
    again = lowbit.AdamW(other.parameters(), lr=1e-2)
    again.load_state_dict(saved)
    same(values(*train(model, opt, seed=3)), values(*train(other, again, seed=3)))


def test_a_load_between_backward_and_step():
    model = net()
    opt = lowbit.AdamW(model.parameters())
    train(model, opt)
    saved = copy.deepcopy(opt.state_dict())
    model(torch.randn(4, 64)).square().mean().backward()
    opt.load_state_dict(saved)
    opt.step()
    assert all(s["step"] == 3 for s in opt.state.values())


def test_a_checkpoint_before_the_first_step_is_whole():
    """Moments exist before a step, so a template of a load has places for all of them."""
    fresh = lowbit.AdamW(net().parameters())
    assert all("exp_avg" in "".join(s) for s in fresh.state_dict()["state"].values())


def test_raw_state_dicts_through_dcp(tmp_path):
    model = net()
    opt = lowbit.AdamW(model.parameters())
    train(model, opt)
    dcp.save({"optim": opt.state_dict()}, checkpoint_id=tmp_path / "a", no_dist=True)
    other = net()
    other.load_state_dict(model.state_dict())
    again = lowbit.AdamW(other.parameters())
    state = {"optim": again.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "a", no_dist=True)
    again.load_state_dict(state["optim"])
    same(values(model, opt), values(other, again))


def test_the_object_that_was_loaded_is_the_one_in_use(tmp_path):
    """A save after a load saves what is trained, not what was loaded."""
    model = net()
    opt = lowbit.AdamW(model.parameters())
    train(model, opt)
    state = {"optim": opt.state_dict()}
    dcp.save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    dcp.load(state, checkpoint_id=tmp_path / "a", no_dist=True)
    opt.load_state_dict(state["optim"])
    train(model, opt, 3)
    assert all(s["step"] == 5 for s in opt.state_dict()["state"].values())


@pytest.mark.parametrize("flat", [False, True])
def test_torch_functions_from_a_fresh_optimizer(flat):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model = net()
    opt = lowbit.AdamW(model.parameters(), lr=1e-2)
    train(model, opt)
    saved = get_state_dict(model, opt, options=options)
    other = net(seed=1)
    again = lowbit.AdamW(other.parameters(), lr=1e-2)
    set_state_dict(
        other, again, model_state_dict=saved[0], optim_state_dict=saved[1], options=options
    )
    same(values(model, opt), values(other, again))


def test_full_state_with_cpu_offload():
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model = net()
    opt = lowbit.AdamW(model.parameters())
    train(model, opt)
    saved = get_optimizer_state_dict(model, opt, options=options)
    again = lowbit.AdamW(model.parameters())
    set_optimizer_state_dict(model, again, saved, options=options)
    same(values(model, opt), values(model, again))


def test_frozen_parameters_in_torch_functions():
    model = net()
    model[0].weight.requires_grad_(False)
    opt = lowbit.AdamW(p for p in model.parameters() if p.requires_grad)
    train(model, opt)
    saved = get_optimizer_state_dict(model, opt)
    again = lowbit.AdamW(p for p in model.parameters() if p.requires_grad)
    set_optimizer_state_dict(model, again, saved)
    same(values(model, opt), values(model, again))


def test_another_number_of_parameters_is_refused():
    opt = lowbit.AdamW(net().parameters())
    fewer = lowbit.AdamW(list(net().parameters())[:3])
    with pytest.raises(ValueError, match=r"doesn't match|parameter group"):
        fewer.load_state_dict(opt.state_dict())


def test_moments_of_another_shape_are_refused():
    opt = lowbit.AdamW(net().parameters())
    other = lowbit.AdamW(net(inside=96).parameters())
    before = copy.deepcopy(other.state_dict()["state"])
    with pytest.raises(ValueError, match=r"80|shape"):
        other.load_state_dict(opt.state_dict())
    assert all(torch.equal(v, other.state_dict()["state"][0][k]) for k, v in before[0].items())


def test_a_scheduler_resumes():
    def build(model):
        opt = lowbit.AdamW(model.parameters(), lr=1e-2)
        return opt, torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)

    model = net()
    opt, schedule = build(model)
    train(model, opt, 3, scheduler=schedule)
    other = net()
    other.load_state_dict(model.state_dict())
    again, after = build(other)
    again.load_state_dict(through_file(opt.state_dict()))
    after.load_state_dict(schedule.state_dict())
    train(model, opt, 3, 7, schedule), train(other, again, 3, 7, after)
    assert opt.param_groups[0]["lr"] == again.param_groups[0]["lr"]
    same(values(model, opt), values(other, again))


def test_a_state_dict_is_no_view_of_a_running_optimizer_after_deepcopy():
    model = net()
    opt = lowbit.AdamW(model.parameters())
    train(model, opt)
    saved = copy.deepcopy(opt.state_dict())
    before = {k: v.clone() for k, v in saved["state"][0].items()}
    train(model, opt)
    assert all(torch.equal(v, saved["state"][0][k]) for k, v in before.items())


def test_pickle_and_deepcopy_of_an_optimizer():
    model = net()
    opt = lowbit.AdamW(model.parameters())
    train(model, opt)
    for copied in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        ours, theirs = opt.state_dict()["state"], copied.state_dict()["state"]
        assert all(torch.equal(v, theirs[i][k]) for i, s in ours.items() for k, v in s.items())


def test_weights_only_load_needs_no_allowlist():
    model = net()
    for cls in (lowbit.AdamW, lowbit.Adafactor, lowbit.Muon, lowbit.CAME, lowbit.Lion):
        params = [model[0].weight] if cls is lowbit.Muon else model.parameters()
        through_file(cls(params, lr=1e-3).state_dict())


# The step


@pytest.mark.parametrize("state_format", FORMATS)
@pytest.mark.parametrize("rate", [0.0, torch.tensor(0.0)], ids=["number", "tensor"])
def test_a_rate_of_zero_leaves_weights(state_format, rate):
    """Rows without a gradient too: 0 / 0 is nowhere computed."""
    p = nn.Parameter(torch.randn(64, 128))
    before = p.detach().clone()
    opt = lowbit.AdamW([p], lr=rate, state_format=state_format, capturable=torch.is_tensor(rate))
    for _ in range(3):
        p.grad = torch.zeros_like(p)
        p.grad[0] = 1.0
        opt.step()
    assert torch.equal(before, p)


@pytest.mark.parametrize("state_format", FORMATS)
def test_zero_gradients_stay_finite(state_format):
    p = nn.Parameter(torch.randn(64, 128))
    opt = lowbit.AdamW([p], lr=1e-2, state_format=state_format)
    for _ in range(50):
        p.grad = torch.zeros_like(p)
        opt.step()
    assert torch.isfinite(p).all()


RULES = [
    cls
    for cls in map(lowbit.__dict__.get, lowbit.__all__)
    if isinstance(cls, type)
    and issubclass(cls, torch.optim.Optimizer)
    and not issubclass(cls, lowbit.MuonWithAdamW)
    and cls is not lowbit.LowbitOptimizer
]


@pytest.mark.parametrize("cls", RULES, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("shape", [(64, 128), (8, 4, 3, 3), (40, 1, 4)], ids=str)
def test_a_row_and_a_column_without_gradients_stay_finite(cls, shape):
    """A dead unit and blank pixels: means of both are tiny, and their product underflows."""
    torch.manual_seed(0)
    for scale in (1.0, 1e-6):
        p = nn.Parameter(torch.randn(shape))
        try:
            opt = cls([p], lr=1e-2, min_numel=0)
        except ValueError:
            pytest.skip("matrices only")
        if cls is lowbit.ScheduleFreeAdamW:
            opt.train()
        for _ in range(3):
            p.grad = scale * torch.randn(shape)
            p.grad[3] = 0
            p.grad[..., 1] = 0
            opt.step()
        assert torch.isfinite(p).all()


@pytest.mark.parametrize("scale", [1e-16, 1e-10, 1e15, 3e18])
@pytest.mark.parametrize("state_format", FORMATS)
def test_gradients_of_any_size(scale, state_format):
    """Adam's update does not depend on the scale of gradients, and eps is small beside it."""
    p = nn.Parameter(torch.zeros(64, 128))
    opt = lowbit.AdamW([p], lr=1e-3, eps=1e-30, weight_decay=0, state_format=state_format)
    torch.manual_seed(0)
    for _ in range(5):
        p.grad = (torch.randn(64, 128).sign() * scale).float()
        opt.step()
    assert torch.isfinite(p).all() and p.abs().max() <= 6e-3


def test_weight_decay_reaches_bfloat16():
    """lr * weight_decay = 1e-4 is below what bfloat16 tells apart: by chance it still decays."""
    p = nn.Parameter(torch.ones(256, 1024, dtype=torch.bfloat16))
    opt = lowbit.AdamW([p], lr=1e-3, weight_decay=0.1)
    for _ in range(100):
        p.grad = torch.zeros_like(p)
        opt.step()
    assert p.float().mean().item() == pytest.approx(0.99, abs=1e-3)


@pytest.mark.parametrize("cls", [lowbit.AdamW, lowbit.Adafactor, lowbit.CAME, lowbit.Lion])
def test_stochastic_rounding_is_not_overridden(cls):
    p = nn.Parameter(torch.ones(64, 256, dtype=torch.bfloat16))
    opt = cls([p], lr=1e-4, weight_decay=0.0)
    for _ in range(3):
        p.grad = torch.ones_like(p)
        opt.step()
    assert 1 < len(p.detach().float().unique()) < 5


def test_float32_state_is_not_rounded_to_the_weights():
    """State in full precision beside bfloat16 weights has bits that bfloat16 has not."""
    model = net(torch.bfloat16)
    opt = lowbit.AdamW(model.parameters(), state_format="float32")
    train(model, opt, 4)
    t = opt.state[model[0].weight]["exp_avg"]
    assert t.dtype == torch.float32 and not torch.equal(t, t.bfloat16().float())


def test_full_precision_by_name_is_kept():
    """An override of bits for embeddings that has no effect."""
    model = net()
    opt = lowbit.AdamW(model.named_parameters(), full_precision=["0.*"])
    assert "exp_avg" in opt.state[model[0].weight]
    assert "exp_avg_dynamic8" in opt.state[model[2].weight]


def test_lamb_with_float32_state():
    model = net()
    before = model[0].weight.detach().clone()
    train(model, lowbit.LAMB(model.parameters(), state_format="float32"))
    assert not torch.equal(before, model[0].weight)


def test_gradients_with_other_strides():
    a, b = (nn.Parameter(torch.ones(64, 128)) for _ in range(2))
    grad = torch.randn(128, 64)
    a.grad, b.grad = grad.t(), grad.t().contiguous()
    for p in (a, b):
        lowbit.AdamW([p]).step()
    assert torch.equal(a, b)


def test_a_weight_that_is_not_contiguous():
    wide = torch.randn(64, 256)
    p, q = nn.Parameter(wide[:, ::2]), nn.Parameter(wide[:, ::2].clone())
    p.grad = q.grad = torch.randn(64, 128)
    try:
        lowbit.AdamW([p]).step()
    except (ValueError, RuntimeError) as error:
        assert "contiguous" in str(error)
        return
    lowbit.AdamW([q]).step()
    assert torch.equal(p, q)


def test_several_groups_with_tensors_as_rates():
    model = net()
    groups = [
        {"params": [p], "lr": torch.tensor(10.0**-i)} for i, p in enumerate(model.parameters())
    ]
    opt = lowbit.AdamW(groups)
    train(model, opt)
    assert [float(g["lr"]) for g in opt.param_groups] == pytest.approx([1, 0.1, 0.01, 0.001])


def test_rates_that_a_schedule_changes_every_step_count():
    model, other = net(), net()
    opt = lowbit.AdamW(model.parameters(), lr=1.0, state_format="4bit")
    fixed = lowbit.AdamW(other.parameters(), lr=1.0, state_format="4bit")
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: 1e-3 / (n + 1))
    train(model, opt, 1, scheduler=schedule), train(other, fixed, 1)
    first = (model[0].weight - net()[0].weight).abs().max()
    train(model, opt, 1, scheduler=schedule)
    assert first <= 2e-3 and (model[0].weight - other[0].weight).abs().max() > 0.5


@pytest.mark.parametrize("fused", [None, True, False])
@pytest.mark.parametrize("foreach", [None, False])
def test_found_inf_without_a_scale_skips_the_step(fused, foreach):
    p = nn.Parameter(torch.ones(64, 128))
    opt = lowbit.AdamW([p], fused=fused, foreach=foreach)
    p.grad = torch.full_like(p, float("inf"))
    opt.grad_scale, opt.found_inf = None, torch.tensor(1.0)
    opt.step()
    assert torch.equal(p, torch.ones(64, 128))


def test_a_grad_scaler_skips_and_goes_on():
    p = nn.Parameter(torch.ones(64, 128))
    opt = lowbit.AdamW([p], lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    for grad in (float("inf"), 4.0):
        p.grad = torch.full_like(p, grad)
        scaler.step(opt)
        scaler.update()
    assert torch.isfinite(p).all() and opt.state[p]["step"] == 1


def test_a_parameter_that_gets_no_gradient_at_first():
    model = net()
    opt = lowbit.AdamW(model.parameters())
    model[0](torch.randn(4, 64)).square().mean().backward()
    opt.step()
    assert opt.state[model[2].weight]["step"] == 0
    train(model, opt)
    assert opt.state[model[2].weight]["step"] == 2 and opt.state[model[0].weight]["step"] == 3


def test_no_parameter_has_a_gradient():
    opt = lowbit.AdamW(net().parameters())
    opt.step()
    assert all(s["step"] == 0 for s in opt.state.values())


def test_empty_and_scalar_parameters():
    params = [nn.Parameter(torch.zeros(s)) for s in [(0,), (0, 5), (), (1,), (1, 4096), (4096, 1)]]
    for cls in (lowbit.AdamW, lowbit.Adafactor, lowbit.LAMB, lowbit.Lion, lowbit.CAME):
        opt = cls(params, lr=1e-3)
        for p in params:
            p.grad = torch.ones_like(p)
        opt.step()
        through_file(opt.state_dict())
    assert all(torch.isfinite(p).all() for p in params)


def test_degenerate_matrices_under_muon():
    params = [nn.Parameter(torch.randn(1, 64)), nn.Parameter(torch.randn(64, 1))]
    opt = lowbit.Muon(params, lr=1e-2)
    for p in params:
        p.grad = torch.randn_like(p)
    opt.step()
    assert all(torch.isfinite(p).all() for p in params)


def test_muon_of_zero_gradients_is_finite():
    p = nn.Parameter(torch.randn(64, 48))
    opt = lowbit.Muon([p], lr=1e-2)
    p.grad = torch.zeros_like(p)
    opt.step()
    assert torch.isfinite(p).all()


def test_muon_refuses_vectors():
    with pytest.raises(ValueError, match=r"2|matri"):
        lowbit.Muon([nn.Parameter(torch.zeros(64))])


def test_sparse_gradients_are_refused_or_exact():
    emb = nn.Embedding(100, 64, sparse=True)
    opt = lowbit.AdamW(emb.parameters())
    emb(torch.tensor([1, 2])).sum().backward()
    with pytest.raises((RuntimeError, ValueError), match="sparse"):
        opt.step()


def test_closures_and_hooks():
    model = net()
    opt = lowbit.AdamW(model.parameters())
    calls = []
    opt.register_step_pre_hook(lambda *_: calls.append("pre"))
    opt.register_step_post_hook(lambda *_: calls.append("post"))

    def closure():
        opt.zero_grad()
        loss = model(torch.randn(4, 64)).square().mean()
        loss.backward()
        return loss

    assert float(opt.step(closure)) > 0 and calls == ["pre", "post"]


def test_a_step_inside_inference_mode_is_no_silent_loss():
    p = nn.Parameter(torch.ones(64, 128))
    opt = lowbit.AdamW([p], lr=1e-2)
    p.grad = torch.ones_like(p)
    with torch.inference_mode():
        opt.step()
    assert not torch.equal(p, torch.ones(64, 128))


def test_zero_grad_both_ways():
    model = net()
    opt = lowbit.AdamW(model.parameters())
    model(torch.randn(4, 64)).sum().backward()
    opt.zero_grad(set_to_none=False)
    assert all((p.grad == 0).all() for p in model.parameters())
    opt.zero_grad()
    assert all(p.grad is None for p in model.parameters())


# Options


def test_settings_as_text_of_a_config_are_refused():
    for given in ({"lr": "1e-4"}, {"eps": "1e-8"}, {"betas": ("0.9", "0.95")}):
        with pytest.raises(TypeError, match="should be"):
            lowbit.AdamW(net().parameters(), **given)


def test_names_of_options_that_are_nearly_right():
    with pytest.raises(TypeError, match="did you mean"):
        lowbit.AdamW(net().parameters(), state_fromat="8bit")
    with pytest.warns(UserWarning, match="did you mean"):
        lowbit.AdamW([{"params": net().parameters(), "weight_decya": 0.0}])


def test_a_parameter_twice_is_refused():
    p = nn.Parameter(torch.zeros(4))
    with pytest.raises(ValueError, match="more than one parameter group"):
        lowbit.AdamW([{"params": [p]}, {"params": [p]}])
    with pytest.warns(UserWarning, match="duplicate"):
        lowbit.AdamW([p, p])


def test_unknown_options_of_groups_travel():
    model = net()
    opt = lowbit.AdamW([{"params": model.parameters(), "lr_scale": 0.5}])
    assert through_file(opt.state_dict())["param_groups"][0]["lr_scale"] == 0.5


def test_memory_is_what_was_promised():
    """An optimizer in 8 bits that a wrapper turned into one in 32."""
    model = nn.Linear(1024, 1024, bias=False)
    opt = lowbit.AdamW(model.parameters())
    held = sum(t.nbytes for t in opt.state[model.weight].values())
    assert held < 2.1 * model.weight.numel()
    opt.load_state_dict(through_file(opt.state_dict()))
    assert sum(t.nbytes for t in opt.state[model.weight].values()) == held


def test_to_another_dtype_after_the_optimizer_was_built():
    model = net()
    opt = lowbit.AdamW(model.parameters())
    model.bfloat16()
    try:
        train(model, opt)
    except (RuntimeError, ValueError) as error:
        assert "float32" in str(error) or "bfloat16" in str(error)


def test_parameters_that_were_replaced_are_named():
    model = net()
    opt = lowbit.AdamW(model.named_parameters())
    model[0].weight = nn.Parameter(torch.zeros(80, 64))
    with warnings.catch_warnings(record=True):
        train(model, opt)
    assert torch.equal(model[0].weight, torch.zeros(80, 64))


@pytest.mark.parametrize("state_format", FORMATS)
def test_a_weight_without_a_gradient_beside_others_stays(state_format):
    """Its codes mean zero exactly, whatever the scale of its block: what is left is not divided by
    eps.
    """
    for rule in (lowbit.AdamW, lowbit.Lion):
        p = nn.Parameter(torch.full((4, 512), 0.5))
        opt = rule([p], lr=1e-3, weight_decay=0, min_numel=0, state_format=state_format)
        for _ in range(40):
            p.grad = torch.ones_like(p)
            p.grad[:, ::7] = 0
            opt.step()
        assert (p[:, ::7] == 0.5).all() and (p[:, 1::7] < 0.48).all()


def test_muon_resumes_with_bfloat16_weights():
    """Momentum comes back as it was, and from float32 of torch's Muon by its meaning."""
    p = nn.Parameter(torch.randn(64, 128, dtype=torch.bfloat16))
    p.grad = torch.randn_like(p)
    opt = lowbit.Muon([p])
    opt.step()
    again = lowbit.Muon([p])
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert all(torch.equal(again.state[p][key], t) for key, t in opt.state[p].items())
    again.step()
    torchs = torch.optim.Muon([p])
    torchs.step()
    held = torchs.state_dict()
    held["state"][0]["momentum_buffer"] = held["state"][0]["momentum_buffer"].float()
    fresh = lowbit.Muon([p])
    fresh.load_state_dict(held)
    fresh.step()
    assert p.isfinite().all()


def test_more_than_a_thousand_parameters_step_as_each_alone():
    torch.manual_seed(0)
    many = [nn.Parameter(torch.randn(3, 40)) for _ in range(1100)]
    alone = [nn.Parameter(p.detach().clone()) for p in (many[0], many[1025], many[-1])]
    opts = [lowbit.AdamW([p], lr=1e-2, min_numel=0) for p in alone]
    opt = lowbit.AdamW(many, lr=1e-2, min_numel=0)
    for _ in range(2):
        for p in many:
            p.grad = torch.randn_like(p)
        for p, whole in zip(alone, (many[0], many[1025], many[-1]), strict=True):
            p.grad = whole.grad.clone()
        for each in (opt, *opts):
            each.step()
    assert torch.equal(alone[0], many[0])
    assert torch.equal(alone[1], many[1025]) and torch.equal(alone[2], many[-1])


def test_the_page_names_tests_that_there_are():
    page = (ROOT / "tests/repo/field_cases.md").read_text()
    names = re.findall(r"`(test_\w+)[`\[]", page)
    paths = re.findall(r"`(tests/[\w/]+\.\w+)`", page)
    assert len(names) >= 40 and len(paths) >= 40
    assert all(name in globals() for name in names)
    assert all((ROOT / path).exists() for path in paths)
    rows = [line for line in page.splitlines() if line.startswith("| ") and "`" in line]
    assert len(rows) >= 70 and all(line.count("|") == 4 for line in rows)
