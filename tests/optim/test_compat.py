"""Names that people know from bitsandbytes and torchao, and what the peers' optimizers of that name
do wrong: each defect is held to not be ours.
"""

import copy
import inspect

import pytest
import torch
from torch import nn

import lowbit

MATRIX = (32, 128)  # enough for 8-bit state


def stepped(make, value=1.0, grad=0.0, steps=1):
    p = nn.Parameter(torch.full(MATRIX, value))
    opt = make([p])
    for _ in range(steps):
        p.grad = torch.full(MATRIX, grad)
        opt.step()
    return p.detach(), opt.state[p]


def test_adam_is_not_adamw():
    """bitsandbytes decouples the decay of "Adam" too. A zero gradient tells: L2 decay goes through
    the moments, so the step is lr, not lr * decay.
    """
    adam, _ = stepped(lambda p: lowbit.Adam8bit(p, lr=1e-2, weight_decay=0.1))
    adamw, _ = stepped(lambda p: lowbit.AdamW8bit(p, lr=1e-2, weight_decay=0.1))
    torch.testing.assert_close(adam, torch.full(MATRIX, 1 - 1e-2), rtol=1e-5, atol=0)
    torch.testing.assert_close(adamw, torch.full(MATRIX, 1 - 1e-3), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name, by", [("RMSprop8bit", 0.01**0.5), ("Adagrad8bit", 1.0)])
def test_decay_is_in_numerator_and_denominator(name, by):
    """bitsandbytes' CUDA kernels put the decayed gradient into the state but the raw one on top:
    with no gradient nothing decays.
    """
    p, _ = stepped(lambda p: getattr(lowbit, name)(p, lr=1e-2, weight_decay=0.1, eps=0.0))
    torch.testing.assert_close(p, torch.full(MATRIX, 1 - 1e-2 / by), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name, key", [("RMSprop8bit", "square_avg"), ("Adagrad8bit", "sum")])
def test_sums_of_squares_take_the_unsigned_map(name, key):
    """bitsandbytes keeps them in the signed map: half the codes wasted,
    and what is small is 0 and divides by eps.
    """
    p = nn.Parameter(torch.zeros(MATRIX))
    opt = getattr(lowbit, name)([p], lr=1e-2)
    p.grad = torch.full(MATRIX, 1.0)
    p.grad[:, 1::2] = 1e-5  # its square is 1e-10 of the block's largest
    opt.step()
    codes = opt.state[p][key + "_dynamic8_unsigned"]
    assert (codes > 0).all() and (codes[:, ::2] == 255).all()
    p.grad.fill_(1e-5)
    before = p.detach().clone()
    opt.step()
    assert (p.detach() - before).abs().max() < 1e-2, "a square that is lost steps by g / eps"


def test_sgd_obeys_dampening_and_nesterov():
    """bitsandbytes' SGD takes both and ignores them, and refuses momentum=0."""
    plain, _ = stepped(lambda p: lowbit.SGD8bit(p, lr=0.1, momentum=0.9), grad=1.0, steps=2)
    damped, _ = stepped(
        lambda p: lowbit.SGD8bit(p, lr=0.1, momentum=0.9, dampening=0.5), grad=1.0, steps=2
    )
    ahead, _ = stepped(
        lambda p: lowbit.SGD8bit(p, lr=0.1, momentum=0.9, nesterov=True), grad=1.0, steps=2
    )
    without, _ = stepped(lambda p: lowbit.SGD8bit(p, lr=0.1), grad=1.0, steps=2)
    for got, want in ((plain, 2.9), (damped, 2.4), (ahead, 1.9 + 2.71), (without, 2.0)):
        torch.testing.assert_close(got, torch.full(MATRIX, 1 - 0.1 * want), rtol=1e-4, atol=1e-5)


def test_lion_does_not_hide_an_overflow():
    """The sign of an infinite momentum is as good as any other: the weight would move for ever,
    and the momentum never come back.
    """
    p, _ = stepped(lambda p: lowbit.Lion8bit(p), grad=float("inf"))
    assert p.isnan().all()


@pytest.mark.parametrize(
    "name",
    [
        "AdamW8bit",
        "Adam8bit",
        "Lion8bit",
        "SGD8bit",
        "RMSprop8bit",
        "Adagrad8bit",
        "AdEMAMix8bit",
        "LAMB8bit",
        "LARS8bit",
    ],
)
def test_names_of_bitsandbytes_keep_codes(name):
    options = {"momentum": 0.9} if name in ("SGD8bit", "LARS8bit") else {}
    _, state = stepped(lambda p: getattr(lowbit, name)(p, lr=1e-3, **options), grad=0.1)
    assert any(t.dtype == torch.uint8 for t in state.values())


@pytest.mark.parametrize(
    "name, bits, block",
    [("AdamW4bit", 4, 64), ("Adam4bit", 4, 128), ("AdamWFp8", 8, 128), ("AdamFp8", 8, 256)],
)
def test_names_of_torchao_take_its_keywords(name, bits, block):
    seen = list(inspect.signature(getattr(lowbit, name)).parameters)
    assert seen[:6] == ["params", "lr", "betas", "eps", "weight_decay", "amsgrad"]
    assert seen.index("block_size") == seen.index("bf16_stochastic_round") - 1 < len(seen) - 1
    p = nn.Parameter(torch.ones(32, 256, dtype=torch.bfloat16))
    opt = getattr(lowbit, name)([p], lr=2.5e-3, block_size=block, bf16_stochastic_round=False)
    p.grad = torch.full_like(p, 0.1)
    opt.step()
    assert (p < 1).all(), "0.9975 is nearer to 1 - 2^-8 than to 1"
    codes = [t for k, t in opt.state[p].items() if t.dtype == torch.uint8]
    scales = [t for k, t in opt.state[p].items() if k.endswith("_scale")]
    assert [t.shape[1] for t in codes] == [256 * bits // 8] * 2
    assert [t.shape[1] for t in scales] == [256 // block] * 2


@pytest.mark.parametrize("name", ["AdamW8bit", "Adam4bit", "AdamWFp8"])
def test_block_size_is_of_amsgrads_state_in_any_group(name):
    """Also of groups that are added later, to a copy."""
    plain, own, later = (nn.Parameter(torch.ones(32, 256)) for _ in range(3))
    groups = [{"params": [plain], "amsgrad": False}, {"params": [own]}]
    opt = copy.deepcopy(getattr(lowbit, name)(groups, amsgrad=True, block_size=64))
    opt.add_param_group({"params": [later], "amsgrad": True})
    for group, states in zip(opt.param_groups, (2, 3, 3), strict=True):
        scales = [t for k, t in opt.state[group["params"][0]].items() if k.endswith("_scale")]
        assert [t.shape for t in scales] == [(32, 4)] * states


@pytest.mark.parametrize("block", [0, False])
def test_a_block_size_of_nothing_is_refused(block):
    """It was the preset's, in silence."""
    with pytest.raises(ValueError, match=f"block_size={block} should be a power of two from 32"):
        lowbit.AdamW8bit([nn.Parameter(torch.ones(MATRIX))], block_size=block)


def test_block_size_is_of_no_group():
    group = {"params": [nn.Parameter(torch.ones(MATRIX))], "block_size": 64}
    with pytest.raises(ValueError, match="block_size=64 is for a whole optimizer"):
        lowbit.AdamW8bit([group])
    group = {"params": [nn.Parameter(torch.ones(MATRIX))], "bf16_stochastic_round": False}
    with pytest.raises(ValueError, match=r"for a whole optimizer, .* param_format='nearest'"):
        lowbit.AdamW8bit([group])


@pytest.mark.parametrize("name", ["AdamW8bit", "Lion8bit", "AdamW", "LAMB"])
def test_keywords_of_bitsandbytes_are_named_with_what_replaces_them(name):
    make = getattr(lowbit, name)
    with pytest.raises(
        TypeError,
        match=(
            rf"lowbit.{name} .* bitsandbytes' optim_bits, min_8bit_size: "
            r".*state_format=.*min_numel="
        ),
    ):
        make([nn.Parameter(torch.ones(MATRIX))], optim_bits=8, min_8bit_size=4096)
    for keyword in ("block_wise", "is_paged", "percentile_clipping"):
        with pytest.raises(TypeError, match=f"in place of {keyword} write "):
            make([nn.Parameter(torch.ones(MATRIX))], **{keyword: 1})
    assert list(inspect.signature(make).parameters)[:3] == ["params", "lr", "betas"]


@pytest.mark.parametrize("keyword", ["optim_bits", "min_8bit_size", "is_paged"])
def test_keywords_of_bitsandbytes_are_named_in_a_group_too(keyword):
    """torchtitan puts every option there. A state dict that has one loads."""

    def group(**options):
        return {"params": [nn.Parameter(torch.ones(MATRIX))], **options}

    opt = lowbit.AdamW([group(args="the program's own")])
    said = f"^a parameter group of lowbit.AdamW takes .*in place of {keyword} write "
    with pytest.raises(TypeError, match=said):
        opt.add_param_group(group(**{keyword: 1}))
    with pytest.raises(TypeError, match=said):
        lowbit.AdamW([group(**{keyword: 1})])
    assert len(opt.param_groups) == 1
    saved = opt.state_dict()
    saved["param_groups"][0] |= {keyword: 1, "lr": 0.5}
    opt.load_state_dict(saved)
    assert opt.param_groups[0]["lr"] == 0.5


RULES = ["Adam", "AdamW", "AdEMAMix", "Adagrad", "LAMB", "LARS", "Lion", "RMSprop", "SGD"]
BITSANDBYTES = [
    *(rule + bits for rule in RULES for bits in ("", "8bit", "32bit")),
    *(
        f"Paged{rule}{bits}"
        for rule in ("Adam", "AdamW", "AdEMAMix", "Lion")
        for bits in ("", "8bit", "32bit")
    ),
    "PytorchLARS",
    "GlobalOptimManager",
]


def test_names_of_transformers_are_near_ours():
    for name, meant in (("lamb_8bit", "LAMB8bit"), ("schedule_free_adamw", "ScheduleFreeAdamW")):
        with pytest.raises(AttributeError, match=f"did you mean '{meant}'"):
            getattr(lowbit, name)


@pytest.mark.parametrize("name", BITSANDBYTES)
def test_a_name_of_bitsandbytes_is_there_or_says_what_to_write(name):
    """Also where it is imported, and what it says runs."""
    if name in lowbit.__all__:
        return
    assert not hasattr(lowbit, name)
    with pytest.raises(AttributeError, match=f"^lowbit has no {name}: write ") as raised:
        getattr(lowbit, name)
    with pytest.raises(ImportError, match=f"^lowbit has no {name}: write "):
        exec(f"from lowbit import {name}")
    written = str(raised.value).partition("write ")[2].partition(" (")[0]
    if name == "GlobalOptimManager":
        options = eval(f"dict({written.partition(', or ')[0]})")
        assert options == {"overrides": {"*.NAME": {"full_precision": True}}}
        return
    opt = eval(written.replace("...", "[nn.Parameter(torch.ones(MATRIX))]"))
    assert name.startswith("Paged") == (opt.state_memory == "managed")
    assert opt.param_groups[0]["state_format"] == (
        "float32" if "8bit" not in name and name != "PytorchLARS" else "8bit"
    )


@pytest.mark.parametrize(
    "name, right",
    [
        ("AdamW8Bit", "AdamW8bit"),
        ("Adamw", "AdamW"),
        ("param_group", "param_groups"),
        ("foo", None),
        ("Optimizer", None),
        ("_AdamW", None),
    ],
)
def test_a_name_that_is_nearly_one_says_which(name, right):
    with pytest.raises(
        AttributeError,
        match=f"no attribute '{name}'" + (f"; did you mean '{right}'" if right else "$"),
    ):
        getattr(lowbit, name)
    if right:
        with pytest.raises(ImportError, match=f"; did you mean '{right}'"):
            exec(f"from lowbit import {name}")


def test_a_name_of_torch_that_is_not_here_is_not_taken_for_another():
    with pytest.raises(
        AttributeError, match=r"'RAdam'; of torch's optimizers it has .*Adam, AdamW, .*SGD$"
    ):
        lowbit.RAdam  # noqa: B018


def test_the_room_of_the_optimizers_says_where_they_are():
    """bitsandbytes, torchao and torch have theirs in `optim`."""
    for act in ("lowbit.optim.AdamW8bit", "from lowbit.optim import AdamW8bit"):
        with pytest.raises((AttributeError, ImportError), match=r"write lowbit\.AdamW8bit$"):
            exec(act)
    with pytest.raises(ImportError, match="has no PagedAdamW32bit: write lowbit"):
        from lowbit.optim import PagedAdamW32bit  # noqa: F401
    with pytest.raises(AttributeError, match="'RAdam'; of torch's optimizers it has"):
        lowbit.optim.RAdam  # noqa: B018
    with pytest.raises(AttributeError, match=r"^module 'lowbit.optim' has no attribute 'nothing'$"):
        lowbit.optim.nothing  # noqa: B018
