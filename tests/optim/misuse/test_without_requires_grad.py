"""Tensors that require no gradient and are given one are stepped, as by torch."""

import copy

import pytest
import torch

import lowbit


def stepped(opt, p, steps=3):
    for i in range(steps):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
        opt.step()
    return p.detach().clone()


@pytest.mark.parametrize("make", [lowbit.AdamW, lowbit.SGD, lowbit.Adafactor, lowbit.LAMB])
def test_the_bits_are_those_of_a_parameter(make):
    value = torch.randn(64, 64, generator=torch.Generator().manual_seed(9))
    plain, parameter = value.clone(), torch.nn.Parameter(value.clone())
    options = {"lr": 1e-2, **({"momentum": 0.9} if make is lowbit.SGD else {})}
    one, other = make([plain], **options), make([parameter], **options)
    assert torch.equal(stepped(one, plain), stepped(other, parameter))
    assert not torch.equal(plain, value)
    assert list(one.state[plain]) == list(other.state[parameter])


def test_it_is_as_torch_steps_it():
    value = torch.randn(8, generator=torch.Generator().manual_seed(9))
    mine, theirs = value.clone(), value.clone()
    a, b = lowbit.AdamW([mine], lr=1e-2), torch.optim.AdamW([theirs], lr=1e-2)
    torch.testing.assert_close(stepped(a, mine), stepped(b, theirs), rtol=1e-5, atol=1e-6)


def test_beside_parameters_it_has_no_state_until_it_has_a_gradient():
    frozen, p = torch.randn(64, 64), torch.nn.Parameter(torch.randn(64, 64))
    opt = lowbit.AdamW([frozen, p])
    before = frozen.clone()
    stepped(opt, p)
    assert frozen not in opt.state and torch.equal(frozen, before)
    stepped(opt, frozen, 1)
    assert float(opt.state[frozen]["step"]) == 1.0 and not torch.equal(frozen, before)
    assert float(opt.state[p]["step"]) == 4.0


def test_its_state_is_saved_and_loaded():
    p = torch.randn(64, 64)
    opt = lowbit.AdamW([p])
    stepped(opt, p)
    q = p.clone()
    resumed = lowbit.AdamW([q])
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert torch.equal(stepped(opt, p, 1), stepped(resumed, q, 1))
    assert float(resumed.state[q]["step"]) == 4.0
