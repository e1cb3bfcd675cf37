"""lowbit's optimizers as torch sees them: signatures, groups, schedulers, scalers, hooks,
state dicts, compilation.
"""

import copy
import importlib.util
import inspect

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import lowbit
from lowbit import ops
from lowbit.config import arguments
from lowbit.state import choose
from tests.optim.small_net import bits, model, set_grads, train
from tests.support.bits import same
from tests.support.plans import plan_row
from tests.support.require import need

PAIRS = [(lowbit.AdamW, torch.optim.AdamW), (lowbit.Adam, torch.optim.Adam)]


@pytest.mark.parametrize(
    "ours, torchs",
    [*PAIRS, (lowbit.AdamW8bit, torch.optim.AdamW), (lowbit.Adam8bit, torch.optim.Adam)],
)
def test_signature_is_torchs_then_ours(ours, torchs):
    mine = list(inspect.signature(ours).parameters.values())
    for theirs in inspect.signature(torchs).parameters.values():
        if theirs.name == "decoupled_weight_decay":  # torch's way to say AdamW in Adam
            continue
        match = next((p for p in mine if p.name == theirs.name), None)
        assert (
            match is not None and match.default == theirs.default and match.kind == theirs.kind
        ), theirs.name
    names = [p.name for p in mine]
    assert names[-7:] == [
        "state_format",
        "param_format",
        "full_precision",
        "seed",
        "overrides",
        "min_numel",
        "state_memory",
    ]


OPTIMIZERS = [
    made
    for made in map(lowbit.__dict__.get, lowbit.__all__)
    if inspect.isclass(made)
    and issubclass(made, torch.optim.Optimizer)
    and made is not lowbit.LowbitOptimizer
]


@pytest.mark.parametrize("cls", OPTIMIZERS, ids=lambda cls: cls.__name__)
def test_common_options_show_their_defaults_and_no_other_is_taken(cls):
    if cls is not lowbit.APOLLOMini:  # which hands its own on to APOLLO
        shown = inspect.signature(cls).parameters
        for name, default in arguments.DEFAULTS.items():
            kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            assert shown[name].default == default and shown[name].kind in kinds, name
        assert not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in shown.values())
    with pytest.raises(TypeError, match=rf"{cls.__name__}.*unexpected keyword argument 'sed'"):
        cls([nn.Parameter(torch.zeros(2))], sed=1)


@pytest.mark.parametrize("ours, torchs", PAIRS)
@pytest.mark.parametrize(
    "bad",
    [
        {"lr": -1.0},
        {"betas": (1.0, 0.9)},
        {"betas": (0.9, -0.1)},
        {"eps": -1e-9},
        {"weight_decay": -0.1},
        {"lr": torch.ones(2)},
    ],
)
def test_bad_hyperparameters_raise_torchs_words(ours, torchs, bad):
    texts = []
    for cls in (ours, torchs):
        with pytest.raises(ValueError) as error:
            cls(model().parameters(), **bad)
        texts.append(str(error.value))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("ours, torchs", PAIRS)
def test_cases_of_torchs_own_suite(ours, torchs):
    """Every keyword combination and every error case that torch's optimizer tests use for the
    class.
    """
    found = importlib.util.find_spec("expecttest") is not None
    need(
        "expecttest", found, "torch's own optimizer cases import expecttest, which is not installed"
    )
    from torch.testing._internal.common_optimizers import optim_db

    info = next(i for i in optim_db if i.optim_cls is torchs)
    tried = 0
    for case in info.optim_inputs_func(device="cpu"):
        if case.kwargs.get("differentiable") or case.kwargs.get("decoupled_weight_decay"):
            continue
        net = model(torch.float32)
        opt = ours(net.parameters(), **case.kwargs)
        train(net, opt, 3)
        assert all(p.isfinite().all() for p in net.parameters()), case.desc
        again = ours(net.parameters(), **case.kwargs)
        again.load_state_dict(opt.state_dict())
        assert same(bits(opt), bits(again)), case.desc
        tried += 1
    for case in info.optim_error_inputs_func(device="cpu", dtype=torch.float32):
        if case.error_on.name != "CONSTRUCTION_ERROR":
            continue
        given = case.optimizer_error_input
        if given.kwargs.get("foreach") or any(
            isinstance(b, torch.Tensor) for b in given.kwargs.get("betas", ())
        ):
            continue  # limits of torch's foreach code, which lowbit does not have
        expect = pytest.warns if issubclass(case.error_type, Warning) else pytest.raises
        with expect(case.error_type):
            ours(given.params or model().parameters(), **given.kwargs)
        tried += 1
    assert tried > 10
    print(f"{tried} cases of torch's suite for {torchs.__name__}")


@pytest.mark.parametrize("ours, torchs", PAIRS)
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
def test_float32_state_follows_torch(ours, torchs, amsgrad, maximize):
    a, b = model(torch.float32), model(torch.float32)
    options = {"lr": 3e-3, "weight_decay": 0.02, "amsgrad": amsgrad, "maximize": maximize}
    train(a, ours(a.parameters(), state_format="float32", **options), 20)
    train(b, torchs(b.parameters(), **options), 20)
    for x, y in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=2e-7)


def test_8bit_state_stays_near_float32():
    a, b = model(torch.float32), model(torch.float32)
    train(a, lowbit.AdamW(a.parameters(), lr=1e-3), 30)
    train(b, torch.optim.AdamW(b.parameters(), lr=1e-3), 30)
    moved = sum(
        (x - y).norm()
        for x, y in zip(model(torch.float32).parameters(), b.parameters(), strict=True)
    )
    apart = sum((x - y).norm() for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert apart < 0.1 * moved


def test_tensor_and_float_lr_and_names_and_group_dicts():
    results = []
    for lr in (1e-3, torch.tensor(1e-3, dtype=torch.float64)):
        net = model()
        opt = lowbit.AdamW(
            [
                {"params": list(net[0].named_parameters()), "lr": lr},
                {"params": list(net[2].named_parameters())},
            ],
            lr=lr,
        )
        assert opt.param_groups[0]["param_names"] == ["weight", "bias"]
        train(net, opt)
        results.append([p.detach().clone() for p in net.parameters()])
    assert same(*results)


def test_order_of_parameters_does_not_matter_when_they_have_names():
    nets, opts = [], []
    for flip in (1, -1):
        net = model()
        opt = lowbit.AdamW(list(net.named_parameters())[::flip])
        train(net, opt)
        nets.append(net)
        opts.append(opt)
    for (_, a), (_, b) in zip(nets[0].named_parameters(), nets[1].named_parameters(), strict=True):
        assert torch.equal(a, b)


def test_closure_hooks_and_zero_grad():
    net = model(torch.float32)
    opt = lowbit.AdamW(net.parameters())
    seen = []
    opt.register_step_pre_hook(lambda *_: seen.append("pre"))
    opt.register_step_post_hook(lambda *_: seen.append("post"))
    opt.register_state_dict_post_hook(lambda *_: seen.append("state"))
    opt.register_load_state_dict_pre_hook(lambda *_: seen.append("load pre"))
    opt.register_load_state_dict_post_hook(lambda *_: seen.append("load post"))

    def closure():
        opt.zero_grad()
        loss = net(torch.ones(3, 96)).square().mean()
        loss.backward()
        return loss

    first = opt.step(closure)
    for _ in range(20):
        last = opt.step(closure)
    assert last < first
    opt.load_state_dict(opt.state_dict())
    assert seen[:2] == ["pre", "post"] and seen[-3:] == ["state", "load pre", "load post"]


SCHEDULERS = {
    "LambdaLR": {"lr_lambda": lambda t: 0.9**t},
    "MultiplicativeLR": {"lr_lambda": lambda t: 0.9},
    "StepLR": {"step_size": 2},
    "MultiStepLR": {"milestones": [2]},
    "ConstantLR": {},
    "LinearLR": {},
    "ExponentialLR": {"gamma": 0.9},
    "CosineAnnealingLR": {"T_max": 5},
    "CosineAnnealingWarmRestarts": {"T_0": 2},
    "PolynomialLR": {},
    "CyclicLR": {"base_lr": 1e-4, "max_lr": 1e-3, "cycle_momentum": True},
    "OneCycleLR": {"max_lr": 1e-3, "total_steps": 10},
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name):
    net = model()
    opt = lowbit.AdamW(net.parameters(), lr=1e-3)
    scheduler = getattr(lr_scheduler, name)(opt, **SCHEDULERS[name])
    lrs = set()
    for step in range(5):
        set_grads(net, step)
        opt.step()
        scheduler.step()
        lrs.add(opt.param_groups[0]["lr"])
    assert len(lrs) > 1 or name == "ConstantLR"
    again = getattr(lr_scheduler, name)(
        lowbit.AdamW(model().parameters(), lr=1e-3), **SCHEDULERS[name]
    )
    again.load_state_dict(scheduler.state_dict())


def test_reduce_on_plateau():
    opt = lowbit.AdamW(model().parameters(), lr=1e-3)
    scheduler = lr_scheduler.ReduceLROnPlateau(opt, patience=0)
    for _ in range(3):
        scheduler.step(1.0)
    assert opt.param_groups[0]["lr"] < 1e-3


def test_grad_scaler_skips_a_step_with_infinities():
    net = model(torch.float32)
    opt = lowbit.AdamW(net.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plain = copy.deepcopy(net)
    opt2 = lowbit.AdamW(plain.parameters())
    x = torch.randn(8, 96)
    for step in range(4):
        opt.zero_grad()
        opt2.zero_grad()
        scaler.scale(net(x).square().mean()).backward()
        plain(x).square().mean().backward()
        if step == 2:
            net[0].weight.grad[0, 0] = float("inf")
            before = bits(opt)
            scaler.step(opt)
            assert same(before, bits(opt)), "a skipped step changes nothing, not even the counter"
        else:
            scaler.step(opt)
            opt2.step()
        scaler.update()
    assert scaler.get_scale() == 512.0
    for a, b in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_clipping():
    net = model()
    set_grads(net, 0)
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
    assert norm > 1
    lowbit.AdamW(net.parameters()).step()


def test_state_exists_at_construction():
    net = model()
    net.register_parameter("never", nn.Parameter(torch.ones(80, 80)))
    net.register_parameter("frozen", nn.Parameter(torch.ones(80, 80), requires_grad=False))
    opt = lowbit.AdamW(net.named_parameters())
    assert set(opt.state) == {p for p in net.parameters() if p.requires_grad}
    assert set(opt.state[net.never]) == set(opt.state[net[0].weight])
    opt.add_param_group({"params": [("more", nn.Parameter(torch.ones(70, 70)))]})
    assert len(opt.state) == 6


def test_meta_parameters_get_state_when_they_exist():
    with torch.device("meta"):
        net = nn.Linear(96, 128)
    opt = lowbit.AdamW(net.parameters())
    assert not opt.state
    net.to_empty(device="cpu")
    for p in net.parameters():
        nn.init.ones_(p)
    opt2 = lowbit.AdamW(net.parameters())
    opt2.step()
    assert opt2.state[net.weight]["step"] == 0  # no gradients


def test_a_step_that_only_initialises_counts_nothing():
    """What torch.distributed.checkpoint does to an optimizer without state: lr 0, zero gradients,
    one step.
    """
    net = model()
    opt = lowbit.AdamW(net.parameters(), lr=0.0)
    opt.state.clear()
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    opt.step()
    assert all(opt.state[p]["step"] == 0 for p in net.parameters())
    opt.step()
    assert all(opt.state[p]["step"] == 1 for p in net.parameters())


def test_wide_rules():
    net = nn.ModuleDict(
        {
            "tokens": nn.Embedding(300, 64),
            "body": nn.Linear(64, 96),
            "lm_head": nn.Linear(64, 300, bias=False),
        }
    )
    net["lm_head"].weight = net["tokens"].weight
    groups = lowbit.param_groups(net, lr=2e-3)  # tied
    assert [g["param_names"] for g in groups] == [["body.weight", "body.bias"], ["tokens.weight"]]
    opt = lowbit.AdamW(groups)
    assert all("exp_avg_dynamic8" in opt.state[net[n].weight] for n in ("tokens", "body"))
    opt = lowbit.AdamW(lowbit.param_groups(net, embeddings="float32", heads="8bit"))
    assert (
        "exp_avg" in opt.state[net["tokens"].weight]
        and "exp_avg_dynamic8" in opt.state[net["body"].weight]
    )
    opt = lowbit.AdamW(net.named_parameters(), full_precision=["body.*"])
    assert (
        "exp_avg" in opt.state[net["body"].weight]
        and "exp_avg_dynamic8" in opt.state[net["tokens"].weight]
    )
    for shape, full_precision in (
        ((4096,), True),
        ((63, 64), True),
        ((64, 64), False),
        ((512, 15), True),
        ((256, 16), False),
        ((2, 3, 1024), False),
    ):
        assert choose.is_full_precision(shape, None, ()) == full_precision
    assert not choose.is_full_precision((0, 64), None, (), 0), "as csrc/policy has it"
    assert all(choose.is_full_precision(*of) for of in (((0, 64), None, ()), ((0,), None, (), 0)))
    mixed = lowbit.AdamW(
        [net["body"].weight], state_format={"exp_avg": "dynamic8", "exp_avg_sq": "float32"}
    )
    assert {"exp_avg_dynamic8", "exp_avg_sq"} < set(mixed.state[net["body"].weight])


class Untied(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.body = nn.Embedding(300, 64), nn.Linear(64, 96)
        self.head = nn.Linear(96, 300, bias=False)

    def forward(self, x):
        return self.head(self.body(self.tokens(x)))


@pytest.mark.parametrize(
    "formats, kept",
    [
        ({}, ("exp_avg_dynamic8", "exp_avg_dynamic8")),
        ({"embeddings": "float32"}, ("exp_avg", "exp_avg_dynamic8")),
        ({"heads": "float32"}, ("exp_avg_dynamic8", "exp_avg")),
        ({"embeddings": "float32", "heads": "float32"}, ("exp_avg", "exp_avg")),
        ({"heads": "bfloat16_stochastic"}, ("exp_avg_dynamic8", "exp_avg_bfloat16")),
        ({"embeddings": "4bit", "heads": "float32"}, ("exp_avg_dynamic4", "exp_avg")),
        ({"embeddings": "float32", "full_precision": ()}, ("exp_avg", "exp_avg_dynamic8")),
    ],
)
def test_embeddings_and_heads_keep_what_is_said(formats, kept):
    net = Untied()
    opt = lowbit.AdamW(lowbit.param_groups(net, **formats))
    for weight, key in zip((net.tokens.weight, net.head.weight), kept, strict=True):
        assert key in opt.state[weight]
    assert "exp_avg_dynamic8" in opt.state[net.body.weight]
    assert sorted(n for g in opt.param_groups for n in g["param_names"]) == sorted(
        n for n, _ in net.named_parameters()
    )


def test_embeddings_are_never_stepped_in_a_subspace():
    net = Untied()
    opt = lowbit.APOLLO(lowbit.param_groups(net, rank=8), rank=8)
    for weight in (net.tokens.weight, net.head.weight):
        assert opt.state[weight]["exp_avg_dynamic8"].shape == weight.shape
    assert "update_norm" in opt.state[net.body.weight]


@pytest.mark.parametrize(
    "options, words",
    [
        ({"state_format": "9bit"}, "8bit"),
        ({"state_format": {"exp_ave": "8bit"}}, "exp_ave"),
        ({"state_format": "dynamic8_unsigned"}, "negative"),
        ({"param_format": "float32"}, "bfloat16"),
        ({"param_format": "nope"}, "no parameter format"),
        ({"differentiable": True}, "not supported"),
    ],
)
def test_settings_that_make_no_sense(options, words):
    with pytest.raises(ValueError, match=words):
        lowbit.AdamW(model().parameters(), **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_parameters_of_other_dtypes_are_refused_by_name(dtype):
    with pytest.raises(ValueError, match=f"'w' is {str(dtype).removeprefix('torch.')}"):
        lowbit.AdamW([("w", nn.Parameter(torch.ones(70, 70, dtype=dtype)))])


def test_sparse_gradients_are_refused():
    net = nn.Embedding(300, 64, sparse=True)
    opt = lowbit.AdamW(net.parameters())
    net(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse=False"):
        opt.step()


def test_gradients_that_are_strided_otherwise_and_channels_last():
    a, b = (
        nn.Parameter(
            torch.randn(64, 32, 3, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
        )
        for _ in range(2)
    )
    b.data = b.data.to(memory_format=torch.channels_last)
    results = []
    for p in (a, b):
        opt = lowbit.AdamW([("w", p)])
        for step in range(3):
            grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).bfloat16()
            p.grad = grad.to(memory_format=torch.channels_last) if p is b else grad
            opt.step()
        results.append([p.detach().contiguous(), *(t for _, t in sorted(opt.state[p].items()))])
    assert same(*results) and not b.is_contiguous()


def test_torchs_random_state_is_untouched_and_seeds_matter():
    finals = []
    for seed in (0, 0, 1):
        net = model()
        opt = lowbit.AdamW(net.named_parameters(), seed=seed)
        before = torch.random.get_rng_state()
        train(net, opt)
        assert torch.equal(before, torch.random.get_rng_state())
        finals.append(bits(opt))
    assert same(finals[0], finals[1]) and not same(finals[0], finals[2])


def test_state_that_was_moved_is_found():
    net = model()
    opt = lowbit.AdamW(net.parameters())
    train(net, opt)
    for state in opt.state.values():  # as offloading code does it
        for key in list(state):
            state[key] = state[key].clone()
    train(net, opt, first=5)
    assert opt.state[net[0].weight]["step"] == 10


def step_call():
    p = torch.randn(64, 300)
    codes, scales = ops.quantize(torch.zeros(64, 300), "dynamic8", 256)
    codes2, scales2 = ops.quantize(torch.zeros(64, 300), "dynamic8_unsigned", 256)
    plan = plan_row(64, 300, ["dynamic8", "dynamic8_unsigned"], stream=7)
    return (
        ops.rule("adamw")["index"],
        [p],
        [torch.randn(64, 300)],
        [codes, scales, codes2, scales2],
        [torch.zeros(())],
        [],
        plan,
        [1e-3, 0.9, 0.999, 1e-8, 1e-2],
    )


def test_opcheck():
    torch.library.opcheck(torch.ops.lowbit.step.default, step_call())
    number = ops.state_format("dynamic8")["index"]
    torch.library.opcheck(torch.ops.lowbit.quantize.default, (torch.randn(8, 300), number, 256))
    codes, scales = ops.quantize(torch.randn(8, 300), "dynamic8", 256)
    torch.library.opcheck(torch.ops.lowbit.dequantize.default, (codes, scales, number, 256, 300))


def test_the_operator_is_traced_without_a_graph_break():
    rule, params, grads, state, steps, scratch, plan, hyper = step_call()
    eager = [t.clone() for t in (*params, *state, *steps)]

    def run(params, grads, state, steps):
        torch.ops.lowbit.step(rule, params, grads, state, steps, scratch, plan, hyper)
        return params[0] * 2

    torch.compile(run, fullgraph=True, backend="aot_eager")(params, grads, state, steps)
    run([eager[0]], grads, eager[1:5], [eager[5]])
    assert same(eager, [*params, *state, *steps])


def check_steps(compiled, nets, opts, count):
    """The first optimizer, whose step is compiled, ends with the bits of the second."""
    for step in range(count):
        for net in nets:
            set_grads(net, step)
        compiled()
        opts[1].step()
    assert same(bits(opts[0]), bits(opts[1]))


def test_a_compiled_step_equals_the_eager_one():
    nets = [model(), model()]
    opts = [lowbit.AdamW(net.named_parameters(), lr=torch.tensor(1e-3)) for net in nets]
    torch._dynamo.reset()
    compiled = torch.compile(lambda: opts[0].step(), backend="aot_eager")
    check_steps(compiled, nets, opts, 3)


@pytest.mark.parametrize(
    "cls, options",
    [
        (lowbit.Adafactor, {}),
        (lowbit.AdamW, {"cautious": True}),
        (lowbit.AdamW, {"state_format": "lpmm4"}),
    ],
)
def test_a_compiled_step_that_measures_before_it_updates(cls, options):
    """Dynamo has no values of a plan, from which the size of a workspace follows."""
    nets = [model(), model()]
    opts = [cls(net.named_parameters(), **options) for net in nets]
    assert any(lay.phases for lay in opts[0].layouts.values())
    torch._dynamo.reset()
    compiled = torch.compile(opts[0].step, backend="eager")
    check_steps(compiled, nets, opts, 2)


def test_a_compiled_step_of_parameters_that_share_memory():
    nets = [model(), model()]
    for net in nets:
        net.tied = torch.nn.Parameter(torch.empty(0))
        net.tied.data = next(p for p in net.parameters() if p.dim() == 2).data.t()
    opts = [lowbit.SGD(net.named_parameters(), lr=0.1) for net in nets]
    torch._dynamo.reset()
    check_steps(torch.compile(opts[0].step, backend="eager"), nets, opts, 2)
