"""A parameter whose gradient comes in two parts: a weight that is used twice under reentrant
checkpointing, two backward passes, and one that was frozen when the hooks were made.
"""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.utils.checkpoint import checkpoint

import lowbit


def layer():
    torch.manual_seed(0)
    return nn.Linear(8, 8)


def loss_of(net, reentrant):
    """Uses the layer twice; checkpointed, each use is a backward pass within the backward pass."""
    torch.manual_seed(1)
    x = torch.randn(4, 8).requires_grad_()
    for _ in range(2):
        x = checkpoint(lambda v: net(v).tanh(), x, use_reentrant=True) if reentrant else net(x)
    return x.square().mean()


def torchs(losses):
    """The gradients of torch, of the losses of two micro-batches, divided by two."""
    net = layer()
    for _ in range(2):
        for loss in losses(net):
            (loss / 2).backward()
    return [p.grad for p in net.parameters()]


@pytest.mark.parametrize("rounding", ["stochastic", "kahan", "nearest"])
@pytest.mark.parametrize("parts", ["reentrant", "two passes"])
def test_an_average_is_taken_once(rounding, parts):
    def losses(net):
        if parts == "reentrant":
            return [loss_of(net, True)]
        return [loss_of(net, False), net(torch.ones(8)).mean()]

    net = layer()
    buffers = "bf16" if rounding == "kahan" else "float32"
    accumulator = lowbit.accumulate(net, buffers, rounding=rounding, average=2)
    for i in range(2):
        with accumulator.micro(last=i == 1):
            for loss in losses(net):
                loss.backward()
                assert (net.weight.grad is not None) == (i == 1), "it may be clipped in the context"
    assert not any(p._backward_hooks for p in net.parameters())
    for p, want in zip(net.parameters(), torchs(losses), strict=True):
        torch.testing.assert_close(
            p.grad.float(), want, rtol=2e-2 if buffers == "bf16" else 1e-5, atol=1e-3
        )


class Undefined(torch.autograd.Function):
    """Gives its weight no gradient."""

    @staticmethod
    def forward(ctx, x, weight):
        return x * weight.sum()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def test_a_second_pass_without_a_gradient_adds_nothing():
    net = layer()
    accumulator = lowbit.accumulate(net, "float32", average=2)
    x = torch.ones(8, requires_grad=True)
    with accumulator.micro(last=True):
        net(x).sum().backward()
        Undefined.apply(x, net.weight).sum().backward()
    assert torch.equal(net.weight.grad, torch.full((8, 8), 0.5))


def test_a_step_in_the_backward_pass_refuses_a_second_part():
    net = layer()
    opt = lowbit.AdamW(net.named_parameters(), lr=0.1)
    released = lowbit.step_in_backward(net, opt)
    with pytest.raises(RuntimeError, match=r"'(weight|bias)' got a second gradient after it was"):
        loss_of(net, True).backward()
    released.reset()
    opt.zero_grad()
    loss_of(net, False).backward()
    with pytest.raises(RuntimeError, match=r"call opt.step\(\) after each backward pass"):
        loss_of(net, False).backward()
    released.reset()
    opt.zero_grad()
    for _ in range(2):
        loss_of(net, False).backward()
        opt.step()
    with released.hold():
        loss_of(net, True).backward()  # adds up
    loss_of(net, False).backward()
    opt.step()


@pytest.mark.parametrize("rounding", ["stochastic", "exact"])
def test_a_parameter_that_was_unfrozen_is_refused(rounding):
    net = nn.Sequential(layer(), layer())
    net[0].requires_grad_(False)
    accumulator = lowbit.accumulate(net, rounding=rounding, average=2)
    x = torch.ones(2, 8)
    for i in range(2):
        with accumulator.micro(last=i == 1):
            net(x).sum().backward()
    net.zero_grad()
    net[0].requires_grad_(True)
    with (
        pytest.raises(RuntimeError, match=r"'0.weight' was frozen when lowbit.accumulate was"),
        accumulator.micro(last=False),
    ):
        net(x).sum().backward()
    accumulator.remove()
    accumulator = lowbit.accumulate(net, rounding=rounding, average=2)
    for i in range(2):
        with accumulator.micro(last=i == 1):
            net(x).sum().backward()
    assert net[0].weight.grad is not None


@pytest.mark.parametrize("rounding", ["stochastic", "exact", "after the pass"])
def test_a_parameter_that_was_added_is_refused(rounding):
    """Such as an adapter's: nothing would divide its gradients."""
    net = nn.Sequential(layer())
    later = rounding == "after the pass"
    accumulator = lowbit.accumulate(
        net, average=2, **({"hooks": False} if later else {"rounding": rounding})
    )
    net.append(net[0])
    net.append(layer().requires_grad_(False))
    x = torch.ones(2, 8)
    for i in range(2):  # what is shared or frozen is not new
        with accumulator.micro(last=i == 1):
            net(x).sum().backward()
            if later:
                accumulator.add()
    net.zero_grad()
    net.append(layer())
    with torch.no_grad():
        net(x)  # validation goes on
    with (
        pytest.raises(RuntimeError, match=r"'3\.weight' was added to the model after"),
        accumulator.micro(last=False),
    ):
        net(x).sum().backward()
    if later:
        net(x).sum().backward()
        with pytest.raises(RuntimeError, match=r"'3\.weight' was added to the model after"):
            accumulator.add()
    accumulator.remove()
    lowbit.accumulate(net)


def test_an_unfrozen_parameter_after_the_backward_pass():
    net = layer()
    net.bias.requires_grad_(False)
    accumulator = lowbit.accumulate(net, hooks=False)
    net.bias.requires_grad_(True)
    net(torch.ones(8)).sum().backward()
    with pytest.raises(RuntimeError, match="'bias' was frozen"):
        accumulator.add()


def test_counts_are_saved_under_names_without_wrappers():
    net = layer()
    compiled = lowbit.accumulate(torch.compile(net), average=2)
    for i in range(2):
        with compiled.micro(last=i == 1):
            net(torch.ones(8)).sum().backward()
    saved = compiled.state_dict()
    compiled.remove()
    assert saved == {"added": {"weight": 2, "bias": 2}}
    again = lowbit.accumulate(net, average=2)
    again.load_state_dict({"added": {"_orig_mod.weight": 2, "module.bias": 2}})  # of 1.0
    assert again.state_dict() == saved
    with pytest.raises(KeyError, match="no count for 'bias'"):
        again.load_state_dict({"added": {"weight": 7}})
    assert again.state_dict() == saved


def test_counts_of_a_layer_called_module():
    net = layer()
    net.module = layer()
    accumulator = lowbit.accumulate(net, average=2)
    for i in range(2):
        with accumulator.micro(last=i == 1):
            net(torch.ones(8)).sum().backward()
    saved = accumulator.state_dict()
    want = {"weight": 2, "bias": 2, "module.weight": 0, "module.bias": 0}
    assert saved == {"added": want}
    accumulator.remove()
    accumulator = lowbit.accumulate(net, average=2)
    accumulator.load_state_dict(saved)
    assert accumulator.state_dict() == saved


def test_what_autograd_returns_is_not_divided():
    net = layer()
    accumulator = lowbit.accumulate(net, "float32", average=4)
    for i in range(4):
        with accumulator.micro(last=i == 3):
            net(torch.ones(8)).sum().backward()
            (found,) = torch.autograd.grad(net(2 * torch.ones(8)).sum(), net.weight)
            assert torch.equal(found, torch.full((8, 8), 2.0))


def test_validation_goes_on_after_a_parameter_was_unfrozen():
    net = layer()
    net.bias.requires_grad_(False)
    lowbit.accumulate(net)
    net.bias.requires_grad_(True)
    with torch.no_grad():
        net(torch.ones(8))
    with pytest.raises(RuntimeError, match="'bias' was frozen"):
        net(torch.ones(8))


def test_a_step_that_is_given_up_leaves_no_trace():
    """By zero_grad(), by remove(), and by an exception in a micro-batch."""
    net = layer()
    opt = lowbit.AdamW(net.named_parameters(), lr=0.1)
    released = lowbit.step_in_backward(net, opt)
    net(torch.ones(8)).sum().backward()
    opt.zero_grad()
    net(torch.ones(8)).sum().backward()
    released.remove()
    lowbit.step_in_backward(net, opt)
    net(torch.ones(8)).sum().backward()
    opt.step()
    net = layer()
    opt = lowbit.AdamW(net.named_parameters(), lr=0.1)
    accumulator = lowbit.accumulate(net, average=2)
    lowbit.step_in_backward(net, opt)
    for broken in (True, False):
        try:
            for i in range(2):
                with accumulator.micro(last=i == 1):
                    net(torch.ones(8)).sum().backward()
                    if broken and i == 1:
                        raise KeyError
        except KeyError:
            net.zero_grad()
    opt.step()


def test_tensor_parallel_parameters_are_averaged_once(one_rank):
    net = layer()
    net.weight = nn.Parameter(distribute_tensor(net.weight.detach(), one_rank, [Replicate()]))
    net.bias = nn.Parameter(distribute_tensor(net.bias.detach(), one_rank, [Replicate()]))
    x = distribute_tensor(torch.ones(8), one_rank, [Replicate()])
    accumulator = lowbit.accumulate(net, "float32", average=2)
    for i in range(2):
        with accumulator.micro(last=i == 1):
            for _ in range(2):
                net(x).sum().backward()
    assert torch.equal(net.weight.grad.full_tensor(), torch.full((8, 8), 2.0))
