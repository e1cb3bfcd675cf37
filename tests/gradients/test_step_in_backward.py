"""Steps inside of the backward pass, on one device: the bits of ordinary steps, and no more memory
than one layer's gradients.
"""

import copy
import functools
import json
import math
import threading
import time

import pytest
import torch
from torch import nn

import lowbit
from lowbit.gradients import clip
from lowbit.optim.one_step import Step
from tests.gradients.test_gradients import Net, tokens
from tests.support.groups import begin
from tests.support.memory import held_bytes, peak_bytes

MAKERS = {
    "AdamW": lambda ps: lowbit.AdamW(ps, lr=1e-2),
    "AdamW 4 bit": lambda ps: lowbit.AdamW(ps, lr=1e-2, state_format="4bit", min_numel=0),
    "SGD": lambda ps: lowbit.SGD(ps, lr=1e-2, momentum=0.9),
    "Lion": lambda ps: lowbit.Lion(ps, lr=1e-2, min_numel=0),
    "Adafactor": lambda ps: lowbit.Adafactor(ps, lr=1e-2),
    "LAMB": lambda ps: lowbit.LAMB(ps, lr=1e-2),
    "APOLLO": lambda ps: lowbit.APOLLO(ps, lr=1e-2, rank=8),
    "Schedule-Free": lambda ps: begin(lowbit.ScheduleFreeAdamW(ps, lr=1e-2, warmup_steps=3)),
    "cautious": lambda ps: lowbit.AdamW(ps, lr=1e-2, cautious=True),
}


@pytest.fixture(params=["in the hook", "beside", "beside, one waits"], autouse=True)
def where(request, monkeypatch):
    """Where steps run. All tests hold for each; those beside run late, as large ones would."""
    if request.param != "in the hook":
        most = 1 if "one waits" in request.param else None
        released = functools.partial(lowbit.step_in_backward, overlap=True, waiting=most)
        monkeypatch.setattr(lowbit, "step_in_backward", released)
        launch = Step.launch

        def late(step):
            if threading.current_thread() is not threading.main_thread():
                time.sleep(0.005)
            launch(step)

        monkeypatch.setattr(Step, "launch", late)
    return request.param


def build(name="AdamW", dtype=torch.bfloat16):
    net = Net(dtype)
    return net, MAKERS[name]([(n, p) for n, p in net.named_parameters() if p.requires_grad])


def same(net, opt, other, other_opt):
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
        assert all(torch.equal(t, other_opt.state[q][key]) for key, t in opt.state[p].items())


@pytest.mark.parametrize("name", MAKERS)
def test_the_bits_of_an_ordinary_step(name):
    (net, opt), (other, ordinary) = build(name), build(name)
    lowbit.step_in_backward(net, opt)
    for step in range(4):
        net(tokens(step), step % 2 == 0).backward()
        assert all(p.grad is None for p in net.parameters())
        opt.step()
        other(tokens(step), step % 2 == 0).backward()
        ordinary.step()
        ordinary.zero_grad()
    same(net, opt, other, ordinary)
    assert float(opt.state[net.sometimes.weight]["step"]) == 2


def test_loading_a_checkpoint_between_steps():
    (net, opt), (other, ordinary) = build(), build()
    lowbit.step_in_backward(net, opt)
    for step in range(3):
        if step == 1:
            opt.load_state_dict(opt.state_dict())
        net(tokens(step)).backward()
        opt.step()
        other(tokens(step)).backward()
        ordinary.step()
        ordinary.zero_grad()
    same(net, opt, other, ordinary)


def test_closures_and_what_reads_the_weights_behind_a_step():
    """As Lightning steps; an average of weights reads them at once."""
    made = []
    for released in (True, False):
        net, opt = build()
        if released:
            lowbit.step_in_backward(net, opt)
        average = torch.optim.swa_utils.AveragedModel(net)

        def closure(net=net, step=0):
            loss = net(tokens(step))
            loss.backward()
            return loss

        for step in range(3):
            opt.step(functools.partial(closure, step=step))
            average.update_parameters(net)
            opt.zero_grad()
        made += [net, opt, list(average.module.parameters())]
    net, opt, averaged, other, ordinary, expected = made
    same(net, opt, other, ordinary)
    assert all(torch.equal(p, q) for p, q in zip(averaged, expected, strict=True))


def test_a_learning_rate_that_changes_before_the_step_ends():
    (net, opt), (other, ordinary) = build(), build()
    for o in (opt, ordinary):
        for group in o.param_groups:
            group["lr"] = torch.tensor(1e-2)
    lowbit.step_in_backward(net, opt)
    for step in range(3):
        net(tokens(step)).backward()
        opt.param_groups[0]["lr"].fill_(1e-2 / (2 + step))  # in place, as schedulers do
        opt.step()
        other(tokens(step)).backward()
        ordinary.step()
        ordinary.zero_grad()
        ordinary.param_groups[0]["lr"].fill_(1e-2 / (2 + step))
    same(net, opt, other, ordinary)


def test_a_pass_that_raised_leaves_nothing_behind():
    """`reset` waits: the next pass reads whole weights, and a checkpoint that is loaded stays."""
    net, opt = build()
    released = lowbit.step_in_backward(net, opt)
    kept, state = copy.deepcopy((net.state_dict(), opt.state_dict()))
    handle = net.embed.weight.register_hook(lambda g: 1 // 0)  # the last gradient
    with pytest.raises(ZeroDivisionError):
        net(tokens(0)).backward()
    handle.remove()
    released.reset()
    opt.zero_grad()
    stepped = net.one.weight.detach().clone()
    assert not torch.equal(stepped, kept["one.weight"])
    net.load_state_dict(kept)
    opt.load_state_dict(state)
    time.sleep(0.05)
    assert all(torch.equal(v, kept[k]) for k, v in net.state_dict().items())


def test_a_forward_pass_reads_whole_weights():
    """Also where `opt.step()` has not come yet."""
    found = []
    for released in (True, False):
        net, opt = build()
        if released:
            lowbit.step_in_backward(net, opt)
        for step in range(2):
            loss = net(tokens(step))
            found.append(loss.item())
            if step == 0:
                loss.backward()
                if not released:
                    opt.step()
    assert found[:2] == found[2:]


def test_sparse_gradients_are_refused_with_the_same_words():
    net = nn.Embedding(64, 128, sparse=True)
    opt = lowbit.AdamW(net.parameters(), lr=1e-2)
    lowbit.step_in_backward(net, opt)
    with pytest.raises(RuntimeError, match="sparse=False"):
        net(torch.tensor([1])).sum().backward()


def test_schedulers():
    made = []
    for released in (True, False):
        net = Net()
        opt = lowbit.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
        if released:
            lowbit.step_in_backward(net, opt)
        schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 0.3, total_steps=6)  # gives it momentum
        for step in range(5):
            net(tokens(step)).backward()
            opt.step()
            opt.zero_grad()
            schedule.step()
        made += [net, opt]
    same(*made)
    assert (
        "momentum_buffer_dynamic8" in made[1].state[made[0].one.weight]
        or "momentum_buffer" in made[1].state[made[0].one.weight]
    )


def test_holding_micro_batches():
    (net, opt), (other, ordinary) = build(), build()
    released = lowbit.step_in_backward(net, opt)
    for step in range(3):
        with released.hold():
            net(tokens(2 * step)).backward()
        assert net.one.weight.grad is not None
        net(tokens(2 * step + 1)).backward()
        opt.step()
        for i in range(2):
            other(tokens(2 * step + i)).backward()
        ordinary.step()
        ordinary.zero_grad()
    same(net, opt, other, ordinary)


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_with_accumulation(rounding):
    """It steps on the last micro-batch; what that one does not use is stepped by opt.step()."""
    (net, opt), (other, ordinary) = build(), build()
    one, two = (lowbit.accumulate(m, rounding=rounding, average=3) for m in (net, other))
    lowbit.step_in_backward(net, opt)
    for step in range(3):
        for i in range(3):
            before = net.one.weight.detach().clone()
            for m, accumulator in ((net, one), (other, two)):
                with accumulator.micro(last=i == 2):
                    m(tokens(3 * step + i), use=i < 2).backward()
            opt.state_dict()  # waits for steps beside
            assert torch.equal(before, net.one.weight) == (i < 2)
        assert net.one.weight.grad is None and net.sometimes.weight.grad is not None
        for o in (opt, ordinary):
            o.step()
            o.zero_grad()
    same(net, opt, other, ordinary)


def test_with_torchs_grad_scaler():
    (net, opt), (other, ordinary) = build(dtype=torch.float32), build(dtype=torch.float32)
    a, b = (torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2) for _ in range(2))
    released = lowbit.step_in_backward(net, opt, scaler=a)
    for step in range(4):
        a.scale(net(tokens(step))).backward()
        a.step(released)
        a.update()
        b.scale(other(tokens(step))).backward()
        b.step(ordinary)
        b.update()
        ordinary.zero_grad()
    assert a.get_scale() == b.get_scale() == 1024.0
    same(net, opt, other, ordinary)
    handle = net.one.weight.register_hook(lambda g: g * math.inf)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    a.scale(net(tokens(9))).backward()
    handle.remove()
    a.step(released)
    a.update()
    assert a.get_scale() == 512.0
    changed = {n for n, p in net.named_parameters() if not torch.equal(p, before[n])}
    assert "one.weight" not in changed and "one.bias" in changed, "each by itself, as documented"
    a.scale(net(tokens(10))).backward()
    a.step(released)
    assert not torch.equal(net.one.weight, before["one.weight"])


def test_a_grad_scaler_under_another_default_dtype():
    net, opt = build(dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu")
    released = lowbit.step_in_backward(net, opt, scaler=scaler)
    scaler.scale(net(tokens(0))).backward()
    try:
        torch.set_default_dtype(torch.bfloat16)
        scaler.step(released)
    finally:
        torch.set_default_dtype(torch.float32)
    assert opt.state[net.one.weight]["step"] == 1


def moved(groups):
    groups[1]["params"].append(groups[0]["params"].pop())


@pytest.mark.parametrize("how", ["alone", "clipped", "scaled"])
@pytest.mark.parametrize(
    "edit",
    [lambda groups: groups.pop(0), lambda groups: groups[0]["params"].pop(), moved],
    ids=["a group leaves", "a parameter leaves", "a parameter moves"],
)
def test_groups_that_are_edited_between_steps(edit, how):
    made = []
    for in_backward in (False, True):
        torch.manual_seed(0)
        layers = nn.ModuleList([nn.Linear(16, 16, bias=False) for _ in range(3)])
        rates = zip(layers, (1.0, 0.5, 0.25), strict=True)
        opt = lowbit.SGD([{"params": [layer.weight], "lr": lr} for layer, lr in rates])
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if how == "scaled" else None
        stepped = opt
        if in_backward:
            bound = 1e6 if how == "clipped" else None  # of which no gradient comes near
            stepped = lowbit.step_in_backward(layers, opt, scaler=scaler, max_norm=bound)
        for i in range(4):
            if i == 2:
                edit(opt.param_groups)
            loss = sum(layer(torch.full((1, 16), 1.0 + i)).sum() for layer in layers)
            (loss if scaler is None else scaler.scale(loss)).backward()
            stepped.step() if scaler is None else scaler.step(stepped)
            if scaler is not None:
                scaler.update()
            opt.zero_grad()
        made.append(layers)
    for layer, other in zip(*made, strict=True):
        assert torch.equal(layer.weight, other.weight)
        left, right = layer.weight.grad, other.weight.grad
        assert (left is None) == (right is None), "what no step takes keeps its gradient"
        assert left is None or torch.equal(left, right)


def test_clipping_by_the_norm_of_the_step_before():
    (net, opt), (other, ordinary) = build(), build()
    released = lowbit.step_in_backward(net, opt, max_norm=0.01)
    scale = None
    for step in range(4):
        net(tokens(step), step != 2).backward()
        opt.step()
        other(tokens(step), step != 2).backward()
        norm, following = lowbit.clip_scale(other.parameters(), 0.01)
        assert torch.equal(norm, released.norm)
        ordinary.step(grad_scale=scale)
        ordinary.zero_grad()
        scale = following
        assert float(scale) > 1
    same(net, opt, other, ordinary)


def test_a_captured_step_clips_by_the_norm_of_the_replay_before(monkeypatch):
    """A graph knows addresses: what divides gradients stays where the capture found it. The first
    step has nothing to read there.
    """
    net, opt = build()
    released = lowbit.step_in_backward(net, opt, max_norm=0.01)
    with monkeypatch.context() as patched:
        patched.setattr("lowbit.gradients.hooks.capturing", lambda device: True)
        with pytest.raises(RuntimeError, match="captures the first step"):
            net(tokens(0)).backward()
        assert all(int(state["step"]) == 0 for state in opt.state.values())
    released.reset()
    opt.zero_grad()
    given, options = [], opt.call_options

    def noted(step_group, grad_scale, found_inf):
        given.append(grad_scale)
        return options(step_group, grad_scale, found_inf)

    monkeypatch.setattr(opt, "call_options", noted)
    seen = {}
    for step in range(5):
        if step > 2:
            released.load_state_dict({"norm": 0.5 if step == 3 else None})
        given.clear()
        net(tokens(step)).backward()
        seen[step] = [(id(t), float(t)) if t is not None else None for t in given]
        opt.step()
    assert set(seen.pop(0)) == {None}
    assert len({at for step in seen.values() for at, _ in step}) == 1
    one, two, three, four = ({by for _, by in step} for step in seen.values())
    assert one != two and len(one) == len(two) == 1
    assert three == {float(clip.divisor_for(torch.tensor(0.5), 0.01))} and four == {1.0}


def test_a_resumed_run_clips_by_the_norm_before_it():
    """And without the norm, its first step is another."""

    def trained(net, opt, steps, clipping=None):
        released = lowbit.step_in_backward(net, opt, max_norm=0.01)
        if clipping is not None:
            released.load_state_dict(clipping)
        for step in steps:
            net(tokens(step)).backward()
            opt.step()
        state = json.loads(json.dumps(released.state_dict()))
        released.remove()
        return state

    (net, opt), (other, stopped) = build(), build()
    assert trained(net, opt, [])["norm"] is None
    trained(net, opt, range(4))
    clipping = trained(other, stopped, range(2))
    assert clipping["norm"] > 0.01
    unclipped, begun = copy.deepcopy((other, stopped.state_dict()))
    trained(other, stopped, [2, 3], clipping)
    same(net, opt, other, stopped)
    named = [(n, p) for n, p in unclipped.named_parameters() if p.requires_grad]
    again = MAKERS["AdamW"](named)
    again.load_state_dict(begun)
    trained(unclipped, again, [2, 3])
    assert not torch.equal(unclipped.one.weight, net.one.weight)


def test_clipping_with_what_has_no_hook_and_with_a_scaler():
    net, opt = build(dtype=torch.float32)
    extra = nn.Parameter(torch.ones(3))
    opt.add_param_group({"params": [("extra", extra)]})
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    released = lowbit.step_in_backward(net, opt, scaler=scaler, max_norm=0.5)
    grads = {}
    for name, p in net.named_parameters():
        if p.requires_grad:
            p.register_hook(lambda g, name=name: grads.__setitem__(name, g.clone()))
    scaler.scale(net(tokens(0)) + extra.square().sum()).backward()
    assert extra.grad is not None
    total = torch.cat([g.flatten() for g in [*grads.values(), extra.grad]]).double().norm() / 64
    scaler.step(released)
    scaler.update()
    assert float(released.norm) == pytest.approx(float(total), rel=1e-6)
    assert float(opt.state[extra]["step"]) == 1
    assert not hasattr(opt, "grad_scale") and not hasattr(opt, "found_inf")


@pytest.mark.parametrize("clears", [False, True])
def test_what_a_closure_leaves_without_a_hook_counts_in_the_norm(clears):
    """A layer that was unfrozen later, as Lightning's finetuning does, whose closures clear."""
    net, opt = build()
    extra = nn.Parameter(torch.ones(3))
    opt.add_param_group({"params": [("extra", extra)]})
    released = lowbit.step_in_backward(net, opt, max_norm=1e9)
    extra.grad = torch.full_like(extra, 1e3 if clears else 0.0)  # of before

    def closure():
        if clears:
            opt.zero_grad()
        loss = net(tokens(0)) + extra.square().sum()
        loss.backward()
        return loss

    other, _ = build()
    other(tokens(0)).backward()
    twos = nn.Parameter(torch.ones(3))
    twos.grad = torch.full((3,), 2.0)
    opt.step(closure)
    assert torch.equal(released.norm, clip.total_norm([*other.parameters(), twos]))


def test_a_backward_pass_that_raises_is_no_part_of_the_next_norm():
    net, opt = build()
    released = lowbit.step_in_backward(net, opt, max_norm=1e9)
    handle = net.one.bias.register_hook(lambda g: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        net(tokens(0)).backward()
    handle.remove()
    opt.zero_grad()
    released.reset()
    copy, _ = build()
    copy.load_state_dict(net.state_dict())
    copy(tokens(1)).backward()
    net(tokens(1)).backward()
    opt.step()
    assert torch.equal(released.norm, clip.total_norm(copy.parameters()))


def test_the_largest_gradient_as_text():
    """As torch and `clip_scale` take it."""
    (net, opt), (other, _) = build(), build()
    released = lowbit.step_in_backward(net, opt, max_norm=1.0, norm_type="inf")
    net(tokens(0)).backward()
    opt.step()
    other(tokens(0)).backward()
    assert torch.equal(released.norm, clip.total_norm(other.parameters(), math.inf))


def test_a_step_that_zero_grad_gave_up_counts_no_more():
    """Neither in the next norm nor for the scaler, nor where a closure calls it."""
    net, opt = build(dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    released = lowbit.step_in_backward(net, opt, scaler=scaler, max_norm=1e9)
    handle = net.one.bias.register_hook(lambda g: g * math.inf)
    scaler.scale(net(tokens(0))).backward()
    handle.remove()
    opt.zero_grad()
    opt.state_dict()  # waits for steps beside
    copy, _ = build(dtype=torch.float32)
    copy.load_state_dict(net.state_dict())
    copy(tokens(1)).backward()
    scaler.scale(net(tokens(1))).backward()
    scaler.step(released)
    scaler.update()
    assert scaler.get_scale() == 64.0
    torch.testing.assert_close(released.norm, clip.total_norm(copy.parameters()))

    extra = nn.Parameter(torch.ones(3))
    opt.add_param_group({"params": [("extra", extra)]})
    extra.grad = torch.full_like(extra, 1e9)
    opt.step(opt.zero_grad)
    assert float(released.norm) == 0.0


def test_a_step_without_gradients_ends_too():
    """On another rank there may be some, and the norm is a collective."""
    net, opt = build()
    released = lowbit.step_in_backward(net, opt, max_norm=1.0)
    opt.step()
    assert released.norm is not None and float(released.norm) == 0.0


def test_wrong_places_are_refused():
    net, opt = build()
    with pytest.raises(TypeError, match="takes an optimizer of lowbit, not AdamW"):
        lowbit.step_in_backward(net, torch.optim.AdamW(net.parameters()))
    with pytest.raises(ValueError, match="no parameter of this model; build it after"):
        lowbit.step_in_backward(Net(), opt)
    with pytest.raises(ValueError, match="max_norm must be at least 0"):
        lowbit.step_in_backward(net, opt, max_norm=-1.0)
    released = lowbit.step_in_backward(net, opt)
    with pytest.raises(ValueError, match="stepped in the backward pass already"):
        lowbit.step_in_backward(net, opt)
    with pytest.raises(ValueError, match=r"call lowbit.accumulate before lowbit.step_in_backward"):
        lowbit.accumulate(net)
    released.remove()
    net(tokens(0)).backward()
    assert net.one.weight.grad is not None
    lowbit.accumulate(net)
    lowbit.step_in_backward(net, opt)


def deep(layers=24, width=256, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False, dtype=dtype) for _ in range(layers)))


@pytest.mark.parametrize("accumulation", [False, True])
@pytest.mark.parametrize("where", ["in the hook"], indirect=True)  # allocations of this thread
def test_peak_memory(accumulation, where):
    """Weights, state and one layer's gradients, and 5 %: by every allocation that torch makes."""

    def measure(in_backward):
        model = deep()
        opt = lowbit.AdamW(model.named_parameters(), lr=1e-3)
        accumulator = lowbit.accumulate(model) if accumulation else None
        if in_backward:
            lowbit.step_in_backward(model, opt)
        x = torch.randn(4, 256).bfloat16()

        def step():
            for last in (False, True) if accumulator else (True,):
                with accumulator.micro(last) if accumulator else torch.enable_grad():
                    model(x).square().mean().backward()
            opt.step()
            opt.zero_grad()

        step()
        weights = list(model.parameters())
        kept = [t for p in weights for t in opt.state[p].values()]
        layer = held_bytes(weights[0])
        return held_bytes(*weights, *kept), layer, peak_bytes(step)

    resident, layer, above = measure(True)
    _, _, ordinary = measure(False)
    print(
        f"weights and state {resident / 1e6:.2f} MB, one layer's gradients {layer / 1e6:.2f}; "
        f"above that {above / 1e6:.2f} in backward, {ordinary / 1e6:.2f} after"
    )
    assert ordinary > 24 * layer
    # the buffers of the micro-batches before are there; the sum is freed as it is used
    if accumulation:
        assert above < 24 * layer + layer + 0.05 * resident
    else:
        assert resident + above < 1.05 * (resident + layer)


def test_norms_do_not_keep_gradients():
    net, opt = build()
    released = lowbit.step_in_backward(net, opt, max_norm=1.0)
    net(tokens(0)).backward()
    assert all(
        t.numel() == clip.ops.power_words()
        for found in released._sums.parts.values()
        for t in found
    )
