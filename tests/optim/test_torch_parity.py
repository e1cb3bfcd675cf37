"""With float32 state every optimizer that torch has takes torch's steps,
and continues from torch's state dict.
"""

import copy

import pytest
import torch
from torch import nn

import lowbit

SHAPES = [(33, 40), (7,), (4, 3, 5, 5), ()]
STEPS = 50
CASES = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    ("RMSprop", {}),
    ("RMSprop", {"momentum": 0.9, "weight_decay": 0.1}),
    ("RMSprop", {"centered": True, "alpha": 0.9}),
    ("RMSprop", {"centered": True, "momentum": 0.5, "maximize": True}),
    ("Adagrad", {}),
    ("Adagrad", {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.2}),
    ("Adagrad", {"maximize": True, "eps": 1e-5}),
    ("Adam", {"weight_decay": 0.1}),
    ("Adam", {"amsgrad": True, "betas": (0.8, 0.95)}),
    ("AdamW", {"lr": 1e-2}),
    ("AdamW", {"amsgrad": True, "maximize": True, "eps": 1e-5}),
    ("Adafactor", {}),
    ("Adafactor", {"weight_decay": 0.1, "d": 2.0, "beta2_decay": -0.5, "maximize": True}),
    ("Adafactor", {"lr": 0.05, "eps": (1e-5, 1e-2)}),
]


def params(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def advance(pairs, opts, t):
    for i, pair in enumerate(pairs):
        generator = torch.Generator().manual_seed(1000 * t + i)
        grad = torch.randn(pair[0].shape, generator=generator) * 0.3
        for p in pair:
            p.grad = grad.clone()
    for opt in opts:
        opt.step()


def same(ours, torchs):
    for a, b in zip(ours, torchs, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name, options", CASES, ids=str)
def test_steps_are_torchs(name, options):
    ours, torchs = params(), params()
    a = getattr(lowbit, name)(ours, state_format="float32", **options)
    b = getattr(torch.optim, name)(torchs, **options)
    for t in range(STEPS):
        advance(list(zip(ours, torchs, strict=True)), (a, b), t)
    same(ours, torchs)


@pytest.mark.parametrize("name, options", CASES, ids=str)
def test_torchs_state_dict_goes_on(name, options):
    """Ten steps by torch, then both: ours from torch's state dict,
    float32 and with a tensor for a learning rate.
    """
    torchs = params()
    b = getattr(torch.optim, name)(torchs, **options)
    for t in range(10):
        advance([(p,) for p in torchs], (b,), t)
    ours = [nn.Parameter(p.detach().clone()) for p in torchs]
    a = getattr(lowbit, name)(ours, state_format="float32", **options)
    a.load_state_dict(copy.deepcopy(b.state_dict()))
    for group in a.param_groups:
        group["lr"] = torch.tensor(group["lr"])
    for t in range(10, 20):
        advance(list(zip(ours, torchs, strict=True)), (a, b), t)
    same(ours, torchs)


@pytest.mark.parametrize(
    "name, options",
    [c for c in CASES if c[1].keys() & {"momentum", "centered", "amsgrad"}],
    ids=str,
)
def test_the_rule_follows_loaded_settings(name, options):
    """As in torch, the settings are the loaded ones: into an optimizer that was built with the
    defaults.
    """
    torchs = params()
    b = getattr(torch.optim, name)(torchs, **options)
    for t in range(3):
        advance([(p,) for p in torchs], (b,), t)
    ours = [nn.Parameter(p.detach().clone()) for p in torchs]
    a = getattr(lowbit, name)(ours, state_format="float32")
    a.load_state_dict(copy.deepcopy(b.state_dict()))
    for t in range(3, 9):
        advance(list(zip(ours, torchs, strict=True)), (a, b), t)
    same(ours, torchs)
    back = getattr(lowbit, name)(ours, state_format="float32", **options)
    back.load_state_dict(getattr(torch.optim, name)(params()).state_dict())
    advance([(p,) for p in ours], (back,), 9)


@pytest.mark.parametrize(
    "name, key, values",
    [
        ("SGD", "momentum", (0, 0.9)),
        ("SGD", "momentum", (0.9, 0)),
        ("RMSprop", "momentum", (0, 0.5)),
    ],
)
def test_the_rule_follows_settings_that_change(name, key, values):
    """Schedulers write into groups; OneCycleLR gives an SGD without momentum one."""
    ours, torchs = params(), params()
    a = getattr(lowbit, name)(ours, state_format="float32", **{key: values[0]})
    b = getattr(torch.optim, name)(torchs, **{key: values[0]})
    for t in range(6):
        if t == 3:
            a.param_groups[0][key] = b.param_groups[0][key] = values[1]
            for state in b.state.values():
                if name == "RMSprop":  # which torch forgets
                    state.setdefault("momentum_buffer", torch.zeros_like(state["square_avg"]))
        advance(list(zip(ours, torchs, strict=True)), (a, b), t)
    same(ours, torchs)
    again = getattr(lowbit, name)(ours, state_format="float32")
    again.load_state_dict(copy.deepcopy(a.state_dict()))
    assert again.param_groups[0][key] == values[1]
    advance([(p,) for p in ours], (again,), 6)


def test_one_cycle_gives_sgd_a_momentum():
    ours, torchs = params(), params()
    opts = lowbit.SGD(ours, state_format="float32"), torch.optim.SGD(torchs)
    cycles = [torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10) for o in opts]
    for t in range(8):
        advance(list(zip(ours, torchs, strict=True)), opts, t)
        for cycle in cycles:
            cycle.step()
    same(ours, torchs)
    assert "momentum_buffer" in opts[0].state[ours[0]]


@pytest.mark.parametrize("kind", ["file", "directory"])
@pytest.mark.usefixtures("ckpt")
def test_load_optimizer_takes_torchs_sgd(kind, tmp_path):
    """Which counts no steps: its directory is known by the momentum."""
    import torch.distributed.checkpoint as dcp

    torchs = params()
    b = torch.optim.SGD(
        [(f"p{i}", p) for i, p in enumerate(torchs)], lr=0.1, momentum=0.9, dampening=0.5
    )
    for t in range(3):
        advance([(p,) for p in torchs], (b,), t)
    if kind == "file":
        torch.save(b.state_dict(), tmp_path / "run")
    else:
        dcp.save({"optim": b.state_dict()}, checkpoint_id=tmp_path / "run", no_dist=True)
    ours = [nn.Parameter(p.detach().clone()) for p in torchs]
    a = lowbit.SGD([(f"p{i}", p) for i, p in enumerate(ours)], state_format="float32")
    lowbit.load_optimizer(a, tmp_path / "run")
    for t in range(3, 6):
        advance(list(zip(ours, torchs, strict=True)), (a, b), t)
    same(ours, torchs)


@pytest.mark.parametrize("momentum", [0, 0.9])
def test_centered_rmsprop_in_few_bits_takes_bounded_steps(momentum):
    """Gradients that hardly vary: v - a^2 is then less than v's last bit,
    and the step would be g / eps.
    """
    p = nn.Parameter(torch.zeros(64, 128))
    opt = lowbit.RMSprop([p], lr=1e-3, centered=True, momentum=momentum, alpha=0.9)
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(p.shape, generator=generator)
    longest = 0.0
    for _ in range(100):
        p.grad = mean * (1 + 0.01 * torch.randn(p.shape, generator=generator))
        before = p.detach().clone()
        opt.step()
        longest = max(longest, (p.detach() - before).abs().max().item())
    first = 1 / (1 - 0.9) ** 0.5  # RMSprop corrects no bias
    assert longest < 1e-3 * 8**0.5 * first / (1 - momentum)


@pytest.mark.parametrize("name", sorted({name for name, _ in CASES}))
def test_arguments_are_torchs(name):
    """Names, order and defaults of what torch takes."""
    import inspect

    skip = {"self", "params"}
    ours = inspect.signature(getattr(lowbit, name).__init__).parameters
    torchs = inspect.signature(getattr(torch.optim, name).__init__).parameters
    positional = [p.name for p in torchs.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
    assert [p for p in ours][: len(positional)] == positional
    for key, p in torchs.items():
        assert key in skip or (ours[key].default == p.default and ours[key].kind == p.kind), key


@pytest.mark.parametrize(
    "name",
    [
        "SGD",
        "RMSprop",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adafactor",
        "Lion",
        "AdEMAMix",
        "CAME",
        "LAMB",
        "LARS",
    ],
)
def test_8_bit_state_follows_float32_and_resumes(name):
    """The default state comes close to float32's path, and a state dict continues bit for bit."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(64, 128, generator=generator)
    wide, narrow = (nn.Parameter(values.clone()) for _ in range(2))
    extra = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
    make = getattr(lowbit, name)
    a, b = make([wide], state_format="float32", **extra), make([narrow], **extra)
    for t in range(20):
        advance([(wide, narrow)], (a, b), t)
    moved = (wide.detach() - values).norm()
    apart = (wide.detach() - narrow.detach()).norm()
    assert apart < 0.25 * moved
    assert (apart == 0) == (name == "Adafactor"), "its means are float32"
    again = nn.Parameter(narrow.detach().clone())
    c = make([again], **extra)
    c.load_state_dict(copy.deepcopy(b.state_dict()))
    for t in range(20, 24):
        advance([(narrow, again)], (b, c), t)
    assert torch.equal(narrow, again)


@pytest.mark.parametrize("shape", [(64, 128), (128,)], ids=str)
def test_adafactor_state_of_bfloat16_weights_is_loaded(shape):
    """torch's means have the dtype of the weight there, and float32 here."""
    p, q = (nn.Parameter(torch.ones(shape, dtype=torch.bfloat16)) for _ in range(2))
    theirs, ours = torch.optim.Adafactor([p]), lowbit.Adafactor([q])
    p.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    theirs.step()
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    there, here = theirs.state[p], ours.state[q]
    for name, key in (("row_var", "variance_row"), ("col_var", "variance_col"), ("variance",) * 2):
        if name in there:
            assert there[name].dtype == torch.bfloat16 and here[key].dtype == torch.float32
            assert torch.equal(here[key].flatten(), there[name].float().flatten())
    assert here["step"] == 1
