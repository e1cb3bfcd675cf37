"""Micro-batches added up in hooks, on one device: against a slow reference, against float32,
and where the hooks may be.
"""

import gc
import math

import numpy as np
import pytest
import torch
from torch import nn

import lowbit
from lowbit import ops
from lowbit.gradients import accumulate as gradients
from lowbit.gradients.held import by_bytes
from lowbit.state import layout

FORMATS = ("bfloat16_stochastic", "bfloat16", "bfloat16_kahan", "float32")


# ---- the operator, against numbers taken one by one ----


def philox(key, counter):
    """Philox4x32 with 7 rounds, as csrc/core/random.h says."""
    x, k, mask = list(counter), list(key), 0xFFFFFFFF
    for _ in range(7):
        a, b = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [b >> 32 ^ x[1] ^ k[0], b & mask, a >> 32 ^ x[3] ^ k[1], a & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return x


def random16(seed, stream, count, index):
    group = index >> 3 | 128 << 56
    word = philox((seed & 0xFFFFFFFF, count), (group & 0xFFFFFFFF, group >> 32, stream, seed >> 32))
    return word[(index & 7) >> 1] >> 16 * (index & 1) & 0xFFFF


def bits(x):
    return int(np.float32(x).view(np.uint32))


def number(b):
    return np.uint32(b & 0xFFFFFFFF).view(np.float32)


def nearest(x):
    b = bits(x)
    if b & 0x7FFFFFFF > 0x7F800000:
        return 0x7FC0
    return (b + 0x7FFF + (b >> 16 & 1)) >> 16


def stochastic(x, r):
    b = bits(x)
    if b & 0x7FFFFFFF > 0x7F800000:
        return 0x7FC0
    if b & 0x7FFFFFFF == 0x7F800000:
        return b >> 16
    return min((b & 0x7FFFFFFF) + r >> 16, 0x7F7F) | b >> 16 & 0x8000


@np.errstate(all="ignore")
def reference(held, beside, grad, scale, r, format):
    """One element: what is held and beside it, as bits where they are bfloat16."""
    if format == "float32":
        return held + np.float32(scale) * grad, 0
    before = number(held << 16)
    if format == "bfloat16_kahan":
        before = before - number(beside << 16)
    x = before + np.float32(scale) * grad
    if format == "bfloat16_stochastic":
        return stochastic(x, r), 0
    w = nearest(x)
    finite = w & 0x7FFF < 0x7F80
    return w, nearest(number(w << 16) - x) if finite and format == "bfloat16_kahan" else 0


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_operator_against_the_reference(format, grad_dtype):
    rng = torch.Generator().manual_seed(5)
    rows, cols, wide, first = 3, 37, 90, 1000 * 90 + 13  # columns 13.. of rows 1000..
    grad = torch.randn(rows, cols, generator=rng).mul_(2.0).to(grad_dtype)
    grad.view(-1)[:3] = torch.tensor([math.inf, -math.inf, math.nan])
    start = torch.randn(rows, cols, generator=rng)
    start.view(-1)[3:5] = torch.tensor([3.3e38, -3.3e38])
    grad.view(-1)[3:5] = grad.view(-1)[3:5] * 0
    dtype = torch.float32 if format == "float32" else torch.bfloat16
    scale, seed, stream, count = 1 / 3, 7 + (3 << 32), 0xDEADBEEF, 11
    row = torch.tensor([[rows, cols, wide, first, stream, count]])
    results = []
    for isa in ops.catalog()["isas"]:
        ops.set_isa(isa)
        held = start.to(dtype, copy=True)
        beside = [torch.full_like(held, 2.0**-9)] if format == "bfloat16_kahan" else []
        ops.accumulate([held], beside, [grad], row, format, scale=scale, seed=seed)
        results.append([held, *beside])
    ops.set_isa(ops.catalog()["isas"][-1])

    def same(a, b):
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))

    for result in results[1:]:
        assert all(same(a, b) for a, b in zip(results[0], result, strict=True))
    at = start.to(dtype).view(torch.int16 if dtype == torch.bfloat16 else torch.float32)
    for r in range(rows):
        for c in range(cols):
            h = at[r, c].item()
            h = np.float32(h) if format == "float32" else h & 0xFFFF
            want, extra = reference(
                h,
                bits(2.0**-9) >> 16,
                np.float32(grad[r, c].item()),
                scale,
                random16(seed, stream, count, first + r * wide + c),
                format,
            )
            got = results[0][0][r, c]
            if format == "float32":
                assert np.float32(got.item()).tobytes() == np.float32(want).tobytes() or np.isnan(
                    want
                )
                continue
            assert got.view(torch.int16).item() & 0xFFFF == want, (r, c)
            if format == "bfloat16_kahan":
                assert results[0][1][r, c].view(torch.int16).item() & 0xFFFF == extra, (r, c)


def test_any_cut_gives_the_same_bits():
    grad, start = torch.randn(40, 300), torch.randn(40, 300).bfloat16()
    whole = start.clone()
    ops.accumulate([whole], [], [grad], torch.tensor([[1, 12000, 12000, 0, 5, 2]]), FORMATS[0])
    for rows, cols in (
        (slice(0, 13), slice(0, 300)),
        (slice(13, 40), slice(0, 300)),
        (slice(0, 40), slice(7, 133)),
    ):
        part = start[rows, cols].clone()
        plan = [*part.shape, 300, rows.start * 300 + cols.start, 5, 2]
        ops.accumulate(
            [part], [], [grad[rows, cols].contiguous()], torch.tensor([plan]), FORMATS[0]
        )
        assert torch.equal(part, whole[rows, cols])


def test_its_random_bits_are_no_steps_own():
    """The weights' rounding at step n and the gradients' at addition n must not go together."""
    x = torch.full((1, 4096), 1.0 + 2.0**-9)
    stored, _ = ops.split(x, "bfloat16_stochastic", seed=3, stream=9)
    held = torch.zeros(1, 4096, dtype=torch.bfloat16)
    ops.accumulate([held], [], [x], torch.tensor([[1, 4096, 4096, 0, 9, 0]]), FORMATS[0], seed=3)
    both = (stored > 1) == (held > 1)
    assert 0.55 < float(both.float().mean()) < 0.7  # 0.25 of them go up each: 0.625 by chance


def test_wrong_arguments_are_named():
    one, plan = torch.zeros(8, dtype=torch.bfloat16), torch.tensor([[1, 8, 8, 0, 0, 0]])
    with pytest.raises(RuntimeError, match="no parameter format is named 'int7'"):
        ops.accumulate([one], [], [one], plan, "int7")
    with pytest.raises(
        RuntimeError, match="buffer 0 must be a contiguous tensor of bfloat16 with 8"
    ):
        ops.accumulate([one[:4]], [], [one], plan, "bfloat16")
    with pytest.raises(RuntimeError, match="1 buffers, 1 gradients, 0 compensation tensors"):
        ops.accumulate([one], [], [one], plan, "bfloat16_kahan")
    with pytest.raises(RuntimeError, match="gradient 0 must be float32, bfloat16 or float16"):
        ops.accumulate([one], [], [one.double()], plan, "bfloat16")
    two = torch.cat([plan, plan])
    for others in ([one, one], [one, torch.zeros(12, dtype=torch.bfloat16)[:8], one]):
        rows = torch.cat([two, plan])[: len(others)]
        with pytest.raises(
            RuntimeError, match="two buffers overlap; add to them in calls of their own"
        ):
            ops.accumulate(others, [], [torch.ones_like(one)] * len(others), rows, "bfloat16")
        assert not one.any(), "a refused call adds nothing"


# ---- accuracy ----


def micro_gradients(count, noise=0.1, size=20000):
    """Gradients that differ by `noise` of their mean, bfloat16, and what their float64 sum is."""
    rng = torch.Generator().manual_seed(1)
    mean = torch.randn(size, generator=rng)
    made = [mean * (1 + noise * torch.randn(size, generator=rng)) for _ in range(count)]
    made = [g.bfloat16() for g in made]
    return made, sum(g.double() for g in made)


def run(module_grads, **kwargs):
    p = nn.Parameter(torch.zeros(module_grads[0].numel(), dtype=torch.bfloat16))
    module = nn.ParameterList([p])
    accumulator = lowbit.accumulate(module, **kwargs)
    for i, g in enumerate(module_grads):
        with accumulator.micro(last=i == len(module_grads) - 1):
            p.backward(g)
    return p.grad.double()


@pytest.mark.parametrize("noise", [0.1, 1.0])
def test_256_micro_batches_are_unbiased_and_more_accurate_than_bfloat16_addition(noise):
    """Where micro-batches agree: with noise as large as the mean, it keeps rounding to the nearest
    from losing anything (docs/bits/gradients-details.md).
    """
    grads, want = micro_gradients(256, noise)
    plain = grads[0].clone()
    for g in grads[1:]:
        plain += g

    def of(x):
        x = x.double()
        return abs(float((x * want).sum() / want.square().sum()) - 1), float(
            (x - want).norm() / want.norm()
        )

    found = {
        "plain": of(plain),
        **{r: of(run(grads, rounding=r)) for r in ("stochastic", "nearest", "kahan")},
        "float32": of(run(grads, dtype="float32")),
    }
    print(", ".join(f"{k}: bias {b:.1e} error {e:.1e}" for k, (b, e) in found.items()))
    assert found["nearest"] == found["plain"]
    assert found["stochastic"][0] < 1e-3 and found["kahan"][0] < 1e-3
    assert found["float32"][1] < 1e-5 and found["kahan"][1] < 2.5e-3
    if noise == 0.1:
        assert found["plain"][0] > 2e-2
        assert found["stochastic"][1] < found["plain"][1] / 2
        assert found["kahan"][1] < found["plain"][1] / 20


def test_averaging_divides_in_float32():
    grads, want = micro_gradients(12)
    got = run(grads, average=12, dtype="float32")
    assert float((got - want / 12).norm() / want.norm() * 12) < 1e-6
    got = run(grads, average=12)
    assert abs(float((got * want).sum() / want.square().sum()) * 12 - 1) < 1e-3


# ---- the hooks ----


class Net(nn.Module):
    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 32, dtype=dtype)
        self.one = nn.Linear(32, 32, dtype=dtype)
        self.sometimes = nn.Linear(32, 32, dtype=dtype)
        self.never = nn.Linear(4, 4, dtype=dtype)
        self.frozen = nn.Linear(32, 32, dtype=dtype).requires_grad_(False)
        self.head = nn.Linear(32, 50, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight  # shared

    def forward(self, tokens, use=True):
        x = self.one(self.embed(tokens)).tanh()
        x = self.sometimes(x) if use else x
        return self.head(self.frozen(x)).float().square().mean()


def tokens(i):
    return torch.randint(0, 50, (4, 9), generator=torch.Generator().manual_seed(i))


def grads_of(net):
    return {name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()}


def test_one_micro_batch_leaves_the_gradients_of_none():
    for kwargs in ({}, {"rounding": "kahan"}, {"dtype": "float32"}):
        dtype = torch.float32 if kwargs.get("dtype") else torch.bfloat16
        net = Net(dtype)
        net(tokens(0)).backward()
        want = grads_of(net)
        net.zero_grad()
        accumulator = lowbit.accumulate(net, **kwargs)
        for _ in range(2):
            with accumulator.micro(last=True):
                net(tokens(0)).backward()
            got = grads_of(net)
            assert got["never.weight"] is None and got["frozen.weight"] is None
            assert all(got[k] is g is None or torch.equal(got[k], g) for k, g in want.items())
            net.zero_grad()


@pytest.mark.parametrize("rounding", ["stochastic", "kahan", "nearest"])
def test_unused_and_shared_parameters(rounding):
    """Every parameter is checked against additions by the operator in the same order,
    whichever micro-batches use it.
    """
    net = Net()
    used = (True, False, True, False)
    separate = []
    for i, use in enumerate(used):
        net(tokens(i), use).backward()
        separate.append(grads_of(net))
        net.zero_grad()
    accumulator = lowbit.accumulate(net, rounding=rounding, seed=4)
    for i, use in enumerate(used):
        with accumulator.micro(last=i == 3):
            net(tokens(i), use).backward()
        assert i == 3 or all(p.grad is None for p in net.parameters())
    got = grads_of(net)
    assert got["never.weight"] is None
    for name, p in net.named_parameters():
        if got[name] is None:
            continue
        present = [g[name] for g in separate if g[name] is not None]
        assert len(present) == (2 if name.startswith("sometimes") else 4)
        held, beside = present[0].clone(), []
        if rounding == "kahan":
            beside = [torch.zeros_like(held)]
        for count, g in enumerate(present[1:], 1):
            plan = torch.tensor([[1, p.numel(), p.numel(), 0, layout.stream_of(name, 0), count]])
            ops.accumulate([held], beside, [g], plan, gradients._FORMATS[rounding], seed=4)
        assert torch.equal(got[name], held), name
    assert "head.weight" not in got and float(got["embed.weight"].abs().sum()) > 0


def test_random_bits_go_on_from_a_saved_count():
    def go(net, accumulator, begin, end):
        made = []
        for i in range(begin, end):
            for j in range(3):
                with accumulator.micro(last=j == 2):
                    net(tokens(10 * i + j)).backward()
            made.append(grads_of(net))
            net.zero_grad()
        return made

    net = Net()
    accumulator = lowbit.accumulate(net)
    want = go(net, accumulator, 0, 1)
    saved = accumulator.state_dict()
    want = go(net, accumulator, 1, 2)
    accumulator.remove()
    again = lowbit.accumulate(net)
    fresh = go(net, again, 1, 2)
    again.load_state_dict(saved)
    got = go(net, again, 1, 2)
    assert all(torch.equal(got[0][k], g) for k, g in want[0].items() if g is not None)
    assert any(not torch.equal(fresh[0][k], g) for k, g in want[0].items() if g is not None)


@pytest.mark.parametrize("param, buffer", [(torch.float32, "bf16"), (torch.bfloat16, "float32")])
def test_buffers_of_another_dtype(param, buffer):
    net = Net(param)
    accumulator = lowbit.accumulate(net, buffer)
    opt = lowbit.AdamW(net.named_parameters())
    for step in range(2):
        for i in range(3):
            with accumulator.micro(last=i == 2):
                net(tokens(i)).backward()
        assert {p.grad.dtype for p in net.parameters() if p.grad is not None} == {
            gradients._DTYPES[buffer]
        }
        opt.step()
        opt.zero_grad(set_to_none=step == 0)
    accumulator.remove()
    net.zero_grad()
    net(tokens(0)).backward()


def test_gradients_that_were_zeroed_instead_of_freed():
    net = Net()
    accumulator = lowbit.accumulate(net, "float32")
    results = []
    for _ in range(2):
        for i in range(3):
            with accumulator.micro(last=i == 2):
                net(tokens(i)).backward()
        results.append(grads_of(net))
        net.zero_grad(set_to_none=False)
    for name, g in results[0].items():
        assert g is None or torch.allclose(g, results[1][name], atol=1e-6), name


def of_one(**kwargs):
    """An accumulator over one number,
    and a function that runs a step of micro-batches with these gradients; None raises.
    """
    p = nn.Parameter(torch.zeros(1))
    accumulator = lowbit.accumulate(nn.ParameterList([p]), "float32", **kwargs)

    def step(*grads):
        for i, g in enumerate(grads):
            with accumulator.micro(last=i == len(grads) - 1):
                if g is None:
                    raise KeyError("a bad batch")
                p.backward(torch.tensor([g]))

    return p, accumulator, step


def test_random_bits_are_not_captured(monkeypatch):
    """Every replay of a CUDA graph would draw those of the capture. Other roundings draw none."""
    monkeypatch.setattr("lowbit.gradients.held.capturing", lambda device: True)
    grads = [torch.full((8,), 0.3, dtype=torch.bfloat16)] * 3
    with pytest.raises(RuntimeError, match="'0' is rounded at random while a CUDA graph"):
        run(grads)
    for options in ({"rounding": "kahan"}, {"rounding": "nearest"}, {"dtype": "float32"}):
        run(grads, **options)


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_a_micro_batch_that_raises_takes_its_step_back(rounding):
    p, accumulator, step = of_one()
    with pytest.raises(KeyError, match="a bad batch"):
        step(1.0, None)
    p.grad = None
    step(1.0)
    assert p.grad.tolist() == [1.0]
    p.grad = None
    with accumulator.micro(last=False):
        p.backward(torch.tensor([5.0]))
    accumulator.reset()
    step(1.0, 2.0)
    assert p.grad.tolist() == [3.0]
    made = []  # and again it has the bits of one that went well
    for broken in (False, True):
        net = Net()
        accumulator = lowbit.accumulate(net, rounding=rounding)
        for attempt in range(broken, -1, -1):
            try:
                for i in range(4):
                    with accumulator.micro(last=i == 3):
                        net(tokens(i)).backward()
                        1 // (attempt != i - 2)
            except ZeroDivisionError:
                net.zero_grad()
        made.append(grads_of(net))
    assert all(g is made[1][k] is None or torch.equal(g, made[1][k]) for k, g in made[0].items())


@pytest.mark.parametrize("average", [None, 2])
def test_gradients_that_were_not_cleared_count_once_and_undivided(average):
    p, _, step = of_one(average=average)
    for n in (1.0, 2.0, 3.0):
        step(1.0, 1.0)
        assert p.grad.tolist() == [n if average else 2 * n], "as torch adds up loss / average"


def test_an_accumulator_that_was_dropped_leaves_its_parameters_free():
    net = Net()
    dropped = lowbit.accumulate(net, hooks=False)
    with pytest.raises(ValueError, match="has an accumulator already"):
        lowbit.accumulate(net)
    del dropped
    gc.collect()
    lowbit.accumulate(net)


def test_after_the_backward_pass():
    net, other = Net(), Net()
    hooked, behind = lowbit.accumulate(net), lowbit.accumulate(other, hooks=False)
    for i in range(3):
        with hooked.micro(last=i == 2):
            net(tokens(i)).backward()
        other(tokens(i)).backward()
        behind.add()
    behind.finish()
    got = grads_of(other)
    assert all(g is None is got[k] or torch.equal(g, got[k]) for k, g in grads_of(net).items())


def test_gradients_are_added_in_one_call(monkeypatch):
    """On a GPU a call takes one launch for up to 256 buffers. Large gradients are freed before
    buffers for the next ones are made.
    """
    net, calls = Net(), []
    plain = ops.accumulate
    monkeypatch.setattr(
        ops,
        "accumulate",
        lambda buffers, *args, **kwargs: (
            calls.append(len(buffers)),
            plain(buffers, *args, **kwargs),
        ),
    )
    accumulator = lowbit.accumulate(net, average=3, hooks=False)
    net(tokens(0)).backward()
    given = sum(p.grad is not None for p in net.parameters())
    accumulator.add()
    assert given > 2 and calls == [given]
    params = [torch.zeros(n) for n in (3, 1, 4, 1, 5)]
    for p in params:
        p.grad = torch.zeros_like(p)
    assert [[p.numel() for p in group] for group in by_bytes(params, 16)] == [[3, 1], [4], [1, 5]]
    assert list(by_bytes([])) == []


def test_the_names_of_torchastic():
    net, other = Net(), Net()
    accumulator = lowbit.accumulate(net)
    lowbit.StochasticAccumulator.assign_hooks(other)
    for i in range(3):
        with accumulator.micro(last=i == 2):
            net(tokens(i)).backward()
        other(tokens(i)).backward()
    lowbit.StochasticAccumulator.reassign_grad_buffer(other)
    got = grads_of(other)
    assert all(g is None is got[k] or torch.equal(g, got[k]) for k, g in grads_of(net).items())
    with pytest.raises(ValueError, match="assign_hooks was not called"):
        lowbit.StochasticAccumulator.reassign_grad_buffer(Net())


def test_wrong_places_are_refused():
    net = Net()
    with pytest.raises(ValueError, match="dtype should be 'bf16' or 'float32' but is: 'int8'"):
        lowbit.accumulate(net, "int8")
    with pytest.raises(ValueError, match="rounding should be one of 'stochastic'"):
        lowbit.accumulate(net, rounding="up")
    with pytest.raises(ValueError, match="average should be the number of micro-batches"):
        lowbit.accumulate(net, average=0)
    with pytest.raises(ValueError, match=r"average should be .* but is: 2.5"):
        lowbit.accumulate(net, average=2.5)
    accumulator = lowbit.accumulate(net)
    with pytest.raises(ValueError, match=r"'embed.weight' has an accumulator already"):
        lowbit.accumulate(net)
    with (
        accumulator.micro(last=False),
        pytest.raises(RuntimeError, match="do not nest"),
        accumulator.micro(last=True),
    ):
        pass
    net.one.weight = nn.Parameter(net.one.weight.detach().clone())
    with pytest.raises(RuntimeError, match=r"'one.weight' will never run: the model has another"):
        net(tokens(0))
    accumulator.remove()
    lowbit.accumulate(net).remove()
    double = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    for rounding in ("stochastic", "exact"):
        with pytest.raises(ValueError, match=r"'1.weight' is torch.float64: .* float32, bfloat16"):
            lowbit.accumulate(double, rounding=rounding)
    sparse = nn.Embedding(5, 3, sparse=True)
    lowbit.accumulate(sparse)
    with pytest.raises(RuntimeError, match="dense gradients"):
        sparse(torch.tensor([1])).sum().backward()
