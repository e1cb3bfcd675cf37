"""`set_optimizer_state_dict` with `full_state_dict=True`: torch fills the keys that were not saved
with the optimizer's own tensors. State of another format is converted all the same, or refused.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import lowbit
from tests.support import bits
from tests.support.ranks import forked

pytestmark = pytest.mark.slow

SAVED = {
    "torch": lambda net: torch.optim.AdamW(net.parameters(), lr=1e-2),
    "4bit": lambda net: adamw(net, state_format="4bit"),
    "float32": lambda net: adamw(net, state_format="float32"),
    "factored": lambda net: adamw(net, state_format="factored8"),
}


def adamw(net, **options):
    return lowbit.AdamW(net.named_parameters(), lr=1e-2, **options)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 96))


def saved(kind):
    net = network()
    opt = SAVED[kind](net)
    for _ in range(3):
        net(torch.arange(64)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return get_optimizer_state_dict(net, opt, options=StateDictOptions(full_state_dict=True))


def loaded(state, net, **options):
    opt = adamw(net)
    set_optimizer_state_dict(net, opt, state, options=StateDictOptions(**options))
    return opt


@pytest.mark.parametrize("kind", ["torch", "4bit", "float32"])
def test_state_of_another_format_is_converted(kind):
    state, net, other = saved(kind), network(), network()
    opt = loaded(state, net, full_state_dict=True)
    assert all(opt.state[p]["exp_avg_dynamic8_scale"].any() for p in net.parameters() if p.ndim > 1)
    expected = loaded(state, other)
    assert bits.same(bits.bits(net.parameters(), opt), bits.bits(other.parameters(), expected))


def test_state_that_cannot_be_converted_is_refused():
    with pytest.raises(ValueError, match="it has no exp_avg_sq"):
        loaded(saved("factored"), network(), full_state_dict=True)


def stepped(net, opt, steps=1, rows=None):
    """Steps with gradients of the first `rows`, by default of all."""
    for _ in range(steps):
        for p in net.parameters():
            p.grad = p.detach() + 1
            if rows is not None:
                p.grad[rows:] = 0
        opt.step()
    return net


def damped(library, net, **options):
    """SGD that dampens every gradient but the first, of which torch counts no steps."""
    return library.SGD(net.parameters(), lr=1e-2, momentum=0.9, dampening=0.5, **options)


def from_torchs_sgd(net, **options):
    """SGD with what torch's has after two steps of a few rows, and the weights of its third."""
    whole = network()
    opt = damped(torch.optim, whole)
    stepped(whole, opt, 2, rows=5)
    state = get_optimizer_state_dict(whole, opt, options=StateDictOptions(full_state_dict=True))
    if options.get("broadcast_from_rank0") and dist.get_rank():
        state = {}
    with torch.no_grad():
        for p, q in zip(net.parameters(), whole.parameters(), strict=True):
            p.copy_(
                distribute_tensor(q, p.device_mesh, p.placements) if hasattr(p, "placements") else q
            )
    ours = damped(lowbit, net, state_format="float32")
    options = StateDictOptions(full_state_dict=True, **options)
    set_optimizer_state_dict(net, ours, state, options=options)
    return ours, stepped(whole, opt)


def test_a_momentum_of_torchs_sgd_has_had_its_first_step():
    net = network()
    opt, expected = from_torchs_sgd(net)
    stepped(net, opt)
    for p, q in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q)
        assert opt.state[p]["step"] == 2  # and one before it at least


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [damped, lambda library, net: library.Lion(net.parameters())])
def test_state_before_the_first_step_stays_there(make, dtype):
    net, other = network().to(dtype), network().to(dtype)
    opt, expected = make(lowbit, net), make(lowbit, other)
    options = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(
        net, opt, get_optimizer_state_dict(net, opt, options=options), options=options
    )
    stepped(net, opt, 2)
    stepped(other, expected, 2)
    assert bits.same(bits.bits(net.parameters(), opt), bits.bits(other.parameters(), expected))


def test_a_parameter_that_torchs_sgd_did_not_step_has_its_first_step_ahead():
    whole, net = network(), network()
    opt = damped(torch.optim, whole)
    whole[1].weight.grad = torch.ones_like(whole[1].weight)
    opt.step()
    net.load_state_dict(whole.state_dict())
    ours = damped(lowbit, net, state_format="float32")
    options = StateDictOptions(full_state_dict=True, strict=False)
    state = get_optimizer_state_dict(whole, opt, options=options)
    set_optimizer_state_dict(net, ours, state, options=options)
    stepped(whole, opt, 2)
    stepped(net, ours, 2)
    for p, q in zip(net.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def on_two_ranks(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    state = saved("4bit")
    alone, net = network(), network()
    expected = loaded(state, alone)
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    opt = loaded(state, net, full_state_dict=True)
    for p, q in zip(alone.parameters(), net.parameters(), strict=True):
        for key, value in opt.state[q].items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            assert bits.equal(whole, expected.state[p][key]), key
    for broadcast in (False, True):
        shards = network()
        fully_shard(shards, mesh=init_device_mesh("cpu", (2,)))
        opt, momentum = from_torchs_sgd(shards, broadcast_from_rank0=broadcast)
        stepped(shards, opt)
        for p, q in zip(shards.parameters(), momentum.parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), q)
    said = ""
    try:
        loaded(state if rank == 0 else {}, net, full_state_dict=True, broadcast_from_rank0=True)
    except ValueError as error:
        said = str(error)
    print(rank, said)
    dist.destroy_process_group()


def test_sharded_state_is_converted_and_a_broadcast_of_it_refused(tmp_path):
    started = [forked.start(on_two_ranks, rank, str(tmp_path / "store")) for rank in range(2)]
    printed = [text.read() for _, text in started]
    for process, _ in started:
        process.join()
        assert process.exitcode == 0, printed
    assert "broadcast_from_rank0=True sends only what this optimizer keeps" in printed[0], printed
    assert "rank 0 refused the state that is loaded" in printed[1], printed
