"""NorMuon's row moments and cautious weight decay, beside a plain twin of both."""

import copy
import re

import numpy as np
import pytest
import torch
from torch import nn

import lowbit
from lowbit import ops
from lowbit.config import muon
from tests.optim.rules.test_muon import ISAS, LR, SHAPES, apart, drawn, train
from tests.support.bits import bits, same

BETA2 = 0.9
MOMENTS = "second_momentum_buffer"

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("isa_restored")]


def last_sum(x):
    """The sum over the last dimension in ascending order."""
    return np.add.accumulate(x, axis=-1)[..., -1]


def even_rows(o, v, beta2):
    """NorMuon's rows of an orthogonalized matrix (arXiv:2510.05491), and the moments after:
    csrc/core/muon/row_moment.h in NumPy.
    """
    one = np.float32(1)
    squares = last_sum(o.double().numpy() ** 2)
    mean = (squares / o.shape[1]).astype(np.float32)
    if 1 - beta2 < 0.5:
        v = v + np.float32(1 - beta2) * (mean - v)
    else:  # torch's lerp, from the nearer end
        v = mean + (np.float32(1 - beta2) - one) * (mean - v)
    s = one / (np.sqrt(v) + np.float32(1e-10))
    long = s.astype(np.float64)
    rescale = np.sqrt(last_sum(squares)) / (np.sqrt(last_sum(long * long * squares)) + 1e-10)
    factor = (long * rescale).astype(np.float32)
    return torch.from_numpy(o.float().numpy() * factor[:, None]).bfloat16(), v


def twin(value, grads, *, momentum=0.95, weight_decay=0.1, beta2=None, cautious=False):
    """A float32 matrix after some steps, and its row moments."""
    p, m = value.clone(), torch.zeros_like(value)
    v = np.zeros(len(value), dtype=np.float32)
    ratio = muon.ratio(None, *value.shape)
    for g in grads:
        m = m + torch.tensor(1 - momentum) * (g - m)
        u = m + torch.tensor(momentum - 1) * (m - g)
        o = u.bfloat16()
        ops.newton_schulz(o, *muon.schedule("quintic", 5), 1e-7)
        if beta2 is not None:
            o, v = even_rows(o, v, beta2)
        o = o.float()
        decayed = p * torch.tensor(1 - LR * weight_decay)
        p = torch.where((o * p >= 0) | torch.tensor(not cautious), decayed, p)
        p = p - torch.tensor(LR * ratio) * o
    return p, v


@pytest.mark.parametrize(
    "options", [{}, {"beta2": BETA2}, {"cautious": True}, {"beta2": 0.3, "cautious": True}], ids=str
)
@pytest.mark.parametrize("shape", [(40, 100), (100, 40), (1, 70)])
def test_ten_steps_have_the_bits_of_the_twin(shape, options):
    value, grads = drawn(*shape), [drawn(*shape, seed=9 + t, scale=0.1) for t in range(10)]
    p = nn.Parameter(value.clone())
    given = {
        "normuon_beta2": options.get("beta2"),
        "cautious_weight_decay": options.get("cautious", False),
    }
    opt = lowbit.Muon([p], lr=LR, state_format="float32", **given)
    for grad in grads:
        p.grad = grad
        opt.step()
    want, moments = twin(value, grads, **options)
    assert torch.equal(p.detach(), want)
    assert (MOMENTS in opt.state[p]) == ("beta2" in options)
    if "beta2" in options:
        assert opt.state[p][MOMENTS].numpy().tobytes() == moments.tobytes()


def test_rows_get_like_sizes_and_the_norm_stays():
    x = (drawn(60, 200) * torch.logspace(-2, 0, 60)[:, None]).bfloat16()
    before, moments = x.float(), torch.zeros(60)
    ops.normalize_rows(x, moments, 0.95)
    rows = x.float().norm(dim=1)
    assert (
        rows.max() <= 1.01 * rows.min() and before.norm(dim=1).max() > 50 * before.norm(dim=1).min()
    )
    torch.testing.assert_close(x.float().norm(), before.norm(), rtol=2e-3, atol=0)
    zero = torch.zeros(3, 4, dtype=torch.bfloat16)
    ops.normalize_rows(zero, moments[:3], 0.95)
    assert not zero.any()


def test_bits_do_not_depend_on_threads_and_instruction_set():
    found = []
    for isa in ISAS:
        for threads in (1, 2):
            ops.set_isa(isa)
            torch.set_num_threads(threads)
            found.append(
                bits(
                    *train(
                        lowbit.Muon,
                        SHAPES,
                        lr=LR,
                        min_numel=0,
                        normuon_beta2=BETA2,
                        cautious_weight_decay=True,
                    )
                )
            )
    assert all(same(one, found[0]) for one in found[1:])


def test_parts_step_as_matrices_of_their_own():
    options = {"state_format": "float32", "normuon_beta2": BETA2, "cautious_weight_decay": True}
    assert apart((384, 128), lambda t: t.split([256, 64, 64]), {"split": (256, 64, 64)}, **options)
    assert apart((4, 24, 40), lambda t: list(t), {}, **options)
    halves = lambda t: [half for one in t for half in one.split(20)]  # noqa: E731
    assert apart((3, 40, 24), halves, {"split": 2}, **options)


def test_state_goes_on():
    options = {"lr": LR, "normuon_beta2": BETA2}
    params, opt = train(lowbit.Muon, SHAPES, **options)
    copied = [nn.Parameter(p.detach().clone()) for p in params]
    again = lowbit.Muon([(f"p{i}", p) for i, p in enumerate(copied)], **options)
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    for some, one in ((params, opt), (copied, again)):
        for i, p in enumerate(some):
            p.grad = drawn(*p.shape, seed=i + 300)
        one.step()
    assert same(bits(params, opt), bits(copied, again))
    assert [tuple(opt.state[p][MOMENTS].shape) for p in params] == [shape[:-1] for shape in SHAPES]


def test_it_may_begin_later():
    params, opt = train(lowbit.Muon, [(40, 60)], lr=LR)
    opt.param_groups[0]["normuon_beta2"] = BETA2
    params[0].grad = drawn(40, 60, seed=5)
    opt.step()
    assert opt.state[params[0]][MOMENTS].min() > 0


def test_an_overflow_leaves_the_moments():
    params, opt = train(lowbit.Muon, [(40, 60)], lr=LR, normuon_beta2=BETA2)
    before = bits(params, opt)
    opt.found_inf = torch.ones(1)
    opt.step()
    assert same(bits(params, opt), before)


def test_plain_state_goes_on_as_plain():
    """As torch's optimizers, which take the groups' settings from the state dict."""
    _, plain = train(lowbit.Muon, [(40, 60)], lr=LR)
    p = nn.Parameter(drawn(40, 60))
    opt = lowbit.Muon([("p0", p)], lr=LR, normuon_beta2=BETA2)
    opt.load_state_dict(plain.state_dict())
    assert opt.param_groups[0]["normuon_beta2"] is None
    p.grad = drawn(40, 60, seed=5)
    opt.step()
    opt.param_groups[0]["normuon_beta2"] = BETA2
    opt.step()
    assert opt.state[p][MOMENTS].min() > 0 and opt.state[p]["step"] == 5


@pytest.mark.parametrize("beta2", [1.0, -0.1])
def test_refusals(beta2):
    words = re.escape(f"normuon_beta2 should be None or in [0, 1) but is: {beta2}")
    with pytest.raises(ValueError, match=words):
        lowbit.Muon([nn.Parameter(torch.zeros(8, 8))], normuon_beta2=beta2)
    with pytest.raises(ValueError, match=words):
        lowbit.Muon([{"params": [nn.Parameter(torch.zeros(8, 8))], "normuon_beta2": beta2}])


def test_muon4_leaves_inputs_alone_that_are_never_active():
    """Their columns have gradients of zero. In blocks with other columns momentum stays zero,
    so the weights stay.
    """

    def trained(state_format):
        p = nn.Parameter(drawn(96, 128, seed=1))
        opt = lowbit.Muon([("p", p)], lr=0.1, weight_decay=0.0, state_format=state_format)
        before = p.detach().clone()
        for t in range(4):
            p.grad = drawn(96, 128, seed=t)
            p.grad[:, 5] = 0
            opt.step()
        return (p.detach() - before).abs(), opt.state[p]

    moved, state = trained("muon4")
    assert state["momentum_buffer_linear4_scale"].shape == (96, 4)
    assert moved[:, 5].max() == 0 and (moved[:, :5] > 0).all()
    assert trained(lowbit.scaled("power1_4", block=32))[0][:, 5].min() > 0, "a map without a zero"
