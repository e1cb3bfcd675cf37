"""Clipping: torch's arguments, an accurate norm, the same bits however gradients are cut, and the
same folded into the step.
"""

import contextlib
import inspect
import math
import types
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowbit
from lowbit import ops
from lowbit.gradients import clip
from lowbit.step.lowrank_cuda import CudaWork
from lowbit.step.numbers import capturing, lr_beside, on_device

SHAPES = [(70, 300), (4096,), (3, 5, 7), (1, 1), ()]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def parameters(dtype=torch.float32, seed=0, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for shape in SHAPES:
        p = nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        full_precision = torch.exp(spread * torch.randn(shape, generator=generator))
        p.grad = (torch.randn(shape, generator=generator) * full_precision).to(dtype)
        made.append(p)
    return [*made, nn.Parameter(torch.ones(3, dtype=dtype))]  # the last without a gradient


def exact(ps, power):
    grads = [p.grad.double().abs().reshape(-1) for p in ps if p.grad is not None]
    flat = torch.cat(grads)
    return float(flat.max() if power == math.inf else flat.pow(power).sum() ** (1 / power))


def test_the_signature_is_torchs_and_a_group():
    def of(function):
        return {n: p.default for n, p in inspect.signature(function).parameters.items()}

    torchs = of(nn.utils.clip_grad_norm_)
    assert list(of(lowbit.clip_grad_norm_).items()) == [*torchs.items(), ("group", None)]


@pytest.mark.parametrize("power", [1, 2.0, 3.0, 0.5, math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_is_accurate_in_every_dtype(dtype, power):
    ps = parameters(dtype)
    want = exact(ps, power)
    norm = lowbit.clip_grad_norm_(ps, 1e9, norm_type=power)
    assert norm.dtype == torch.float32 and norm.shape == () and type(norm) is torch.Tensor
    assert float(norm) == pytest.approx(want, rel=2e-7)


@pytest.mark.parametrize("power", [1.0, 2.0, 3.0, math.inf])
def test_float64_gradients_are_taken_as_torch_takes_them(power):
    ours, theirs = parameters(torch.float64), parameters(torch.float64)
    norm = lowbit.clip_grad_norm_(ours, 0.7, power)
    assert float(norm) == pytest.approx(exact(theirs, power), rel=2e-7)
    nn.utils.clip_grad_norm_(theirs, 0.7, power)
    for a, b in zip(ours[:-1], theirs[:-1], strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=0)


def test_torchs_own_norm_of_bfloat16_is_not():
    p = nn.Parameter(torch.zeros(961, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    q = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    q.grad = torch.full_like(q, 0.5)
    want = math.sqrt(961.75)
    assert float(lowbit.clip_grad_norm_([p, q], 1e9)) == pytest.approx(want, rel=1e-7)
    theirs = float(nn.utils.get_total_norm([p.grad, q.grad]))
    assert abs(theirs - want) > 1e-4 * want


@pytest.mark.parametrize("power", [1.0, 2.0, math.inf])
def test_gradients_are_scaled_as_torch_scales_them(power):
    ours, theirs = parameters(), parameters()
    norm = lowbit.clip_grad_norm_(ours, 0.7, power)
    assert float(norm) == pytest.approx(
        float(nn.utils.clip_grad_norm_(theirs, 0.7, power)), rel=1e-5
    )
    for a, b in zip(ours[:-1], theirs[:-1], strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=0)
    assert ours[-1].grad is None
    before = [p.grad.clone() for p in ours[:-1]]
    lowbit.clip_grad_norm_(ours, 1e9)
    assert all(torch.equal(a, p.grad) for a, p in zip(before, ours[:-1], strict=True)), (
        "a short one stays"
    )


def test_16_bit_gradients_are_rounded_once():
    ps = parameters(torch.bfloat16)
    before = [p.grad.clone() for p in ps[:-1]]
    norm, scale = lowbit.clip_scale(ps, 0.7)
    lowbit.clip_grad_norm_(ps, 0.7)
    factor = (1.0 / scale.double()).float()
    for p, g in zip(ps[:-1], before, strict=True):
        assert torch.equal(p.grad, (g.float() * factor).bfloat16())
    assert float(scale) == pytest.approx(float(norm) / 0.7, rel=1e-5)


def test_the_norm_does_not_depend_on_the_cut_or_the_order():
    generator = torch.Generator().manual_seed(3)
    for dtype in DTYPES:
        flat = torch.randn(100_000, generator=generator).mul_(torch.logspace(-6, 3, 100_000))
        p = nn.Parameter(torch.zeros(100_000, dtype=dtype))
        p.grad = flat.to(dtype)
        want = {power: clip.total_norm(p, power) for power in (1.0, 2.0, 3.0, math.inf)}
        for _ in range(5):
            ends = torch.randint(0, 100_000, (7,), generator=generator).sort().values.tolist()
            shuffled = p.grad[torch.randperm(100_000, generator=generator)]
            parts = []
            for a, b in zip([0, *ends], [*ends, 100_000], strict=True):
                parts.append(nn.Parameter(torch.zeros(b - a, dtype=dtype)))
                parts[-1].grad = shuffled[a:b]
            for power, norm in want.items():
                assert torch.equal(clip.total_norm(parts, power), norm), (dtype, power)


def test_sums_are_exact_for_every_isa():
    """Against integers of any length: values over all exponents, alike, alternating between far
    apart, the largest and the smallest.
    """
    rng = torch.Generator().manual_seed(6)
    n = 64 * 5 + 17
    spread = torch.randn(n, generator=rng) * 2.0 ** torch.randint(-90, 63, (n,), generator=rng)
    alike = torch.rand(n, generator=rng) + 1
    cases = [spread, alike, alike * 2.0**-75, alike * 1.8e19 / 2, alike * 2.0**-63, torch.zeros(n)]
    cases += [alike * 2.0**k for k in (-70, -64, 40, 55, 60, 62)]
    cases += [torch.where(torch.arange(n) % 9 > 0, alike * 2.0**k, 0.0) for k in (0, 62)]
    cases += [
        torch.where(torch.arange(n) % 5 > 0, alike * 2.0**k, alike * 2.0 ** (k - j))
        for k in (0, 62)
        for j in (7, 10, 11, 12, 40)
    ]
    for x in cases:
        terms = (x * x).to(torch.float64).tolist()  # of float32 squares
        want = sum(int(t * 2.0**149) for t in terms)
        for isa in ops.catalog()["isas"]:
            ops.set_isa(isa)
            for dtype in (torch.float32, torch.bfloat16):
                y = x.to(dtype)
                exact = (
                    want
                    if dtype == torch.float32
                    else sum(int(t * 2.0**149) for t in (y.float() * y.float()).double().tolist())
                )
                words = ops.exact_powers([y], 2).tolist()
                assert words[17:] == [0, 0]
                assert sum(w << 16 * i for i, w in enumerate(words[:17])) == exact, isa


def test_every_device_has_the_same_words_and_value():
    """The operators of torch that serve other devices, here on the CPU, against the one of C++."""
    generator = torch.Generator().manual_seed(4)
    for dtype in DTYPES:
        for exponent in (-25, -4, 0, 4, 15):
            x = torch.randn(5000, generator=generator) * 10.0**exponent
            x[:3] = torch.tensor([0.0, -0.0, torch.finfo(dtype).tiny])
            x = x.to(dtype)
            for power in (1, 2):
                here = ops.exact_powers([x], power)
                there = clip.carried(clip.exact_terms(x, float(power)))
                value = clip.root(here, float(power))
                with mock.patch("torch.compiler.is_compiling", lambda: True):
                    assert torch.equal(clip.root(there, float(power)), value)
                    assert torch.equal(clip.root(here * 1024, 1.0), clip.root(there * 1024, 1.0))


@pytest.mark.parametrize("power", [1.0, 2.0, 3.0, math.inf])
def test_complex_gradients_count_by_their_magnitudes(power, monkeypatch):
    """As in torch, and on a device without the operator of C++ too."""
    for device in ("cpu", "another"):
        if device == "another":
            taken = lambda grads, power: clip.exact_terms(grads[0], float(power))  # noqa: E731
            monkeypatch.setattr(ops, "exact_powers", taken)
        for dtype in (torch.complex64, torch.complex128):
            ours, theirs = (nn.Parameter(torch.zeros(5, 7, dtype=dtype)) for _ in range(2))
            grad = torch.randn(7, 5, dtype=dtype, generator=torch.Generator().manual_seed(6))
            ours.grad, theirs.grad = grad.clone().t().conj(), grad.t().conj().resolve_conj()
            norm = lowbit.clip_grad_norm_([ours], 0.5, power)
            wanted = nn.utils.clip_grad_norm_([theirs], 0.5, power)
            torch.testing.assert_close(norm, wanted.float(), rtol=1e-6, atol=0)
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-7)


def test_infinities_and_nan():
    for values, want in (
        ([math.inf, 1.0], math.inf),
        ([math.nan, 1.0], math.nan),
        ([math.inf, math.nan], math.nan),
    ):
        for power in (1.0, 2.0, 3.0, math.inf):
            p = nn.Parameter(torch.zeros(2))
            p.grad = torch.tensor(values)
            torch.testing.assert_close(
                clip.total_norm(p, power), torch.tensor(want), equal_nan=True
            )
            with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped"):
                lowbit.clip_grad_norm_([p], 1.0, power, error_if_nonfinite=True)
    ours, theirs = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    ours.grad, theirs.grad = (torch.tensor([math.inf, 2.0, -3.0]) for _ in range(2))
    lowbit.clip_grad_norm_(ours, 1.0)
    nn.utils.clip_grad_norm_(theirs, 1.0)
    torch.testing.assert_close(ours.grad, theirs.grad, equal_nan=True)


def test_nothing_to_clip_and_arguments_out_of_range():
    assert float(lowbit.clip_grad_norm_([], 1.0)) == 0.0
    assert float(lowbit.clip_grad_norm_([nn.Parameter(torch.ones(3))], 1.0)) == 0.0
    empty = nn.Parameter(torch.ones(0, 4))
    empty.grad = torch.ones(0, 4)
    assert all(float(clip.total_norm(empty, power)) == 0.0 for power in (2.0, math.inf, 3.0))
    with pytest.raises(ValueError, match="norm_type must be positive, not 0"):
        lowbit.clip_grad_norm_(parameters(), 1.0, 0)
    with pytest.raises(ValueError, match="max_norm must be at least 0, not -1"):
        lowbit.clip_grad_norm_(parameters(), -1)


RULES = {
    "AdamW": lambda ps: lowbit.AdamW(ps, lr=1e-2),
    "Adam, weight decay": lambda ps: lowbit.Adam(ps, lr=1e-2, weight_decay=0.1, maximize=True),
    "SGD": lambda ps: lowbit.SGD(ps, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "Lion": lambda ps: lowbit.Lion(ps, lr=1e-2),
    "RMSprop": lambda ps: lowbit.RMSprop(ps, lr=1e-2, centered=True),
    "Adafactor": lambda ps: lowbit.Adafactor(ps, lr=1e-2),
    "LAMB": lambda ps: lowbit.LAMB(ps, lr=1e-2),
    "APOLLO": lambda ps: lowbit.APOLLO(ps, lr=1e-2, rank=8),
}


@pytest.mark.parametrize("rule", RULES)
def test_folded_into_the_step_it_leaves_the_same_bits(rule):
    ours, theirs = parameters(), parameters()
    one, two = RULES[rule](ours), RULES[rule](theirs)
    for step in range(3):
        for p, q in zip(ours[:-1], theirs[:-1], strict=True):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            q.grad = p.grad.clone()
        norm, scale = lowbit.clip_scale(ours, 0.3)
        before = [p.grad.clone() for p in ours[:-1]]
        one.step(grad_scale=scale)
        assert all(torch.equal(a, p.grad) for a, p in zip(before, ours[:-1], strict=True))
        assert torch.equal(lowbit.clip_grad_norm_(theirs, 0.3), norm)
        two.step()
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)
        assert all(torch.equal(t, two.state[q][key]) for key, t in one.state[p].items())


def test_folded_into_the_step_bfloat16_gradients_are_not_rounded_again():
    far, near = 0.0, 0.0
    ours, theirs, truth = (parameters(torch.bfloat16) for _ in range(3))
    for p, q, r in zip(ours, theirs, truth, strict=True):
        for t in (p, q, r):
            t.data = torch.zeros_like(t, dtype=torch.float32)
            t.grad_dtype = None
    kwargs = {"lr": 1.0}
    one, two = lowbit.SGD(ours[:-1], **kwargs), lowbit.SGD(theirs[:-1], **kwargs)
    norm, scale = lowbit.clip_scale(ours, 0.3)
    one.step(grad_scale=scale)
    lowbit.clip_grad_norm_(theirs, 0.3)
    two.step()
    for p, q, r in zip(ours[:-1], theirs[:-1], truth[:-1], strict=True):
        want = -r.grad.double() / (float(norm) + 1e-6) * 0.3
        near += float((p.detach().double() - want).square().sum())
        far += float((q.detach().double() - want).square().sum())
    assert near < 1e-6 * far


def test_with_torchs_grad_scaler():
    ours, theirs = parameters(), parameters()
    one, two = lowbit.AdamW(ours, lr=1e-2), lowbit.AdamW(theirs, lr=1e-2)
    a, b = (torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2))
    for step in range(4):
        for ps, scaler in ((ours, a), (theirs, b)):
            scaler.scale(torch.ones(()))
            for p in ps[:-1]:
                p.grad = 1024.0 * torch.randn(
                    p.shape, generator=torch.Generator().manual_seed(step)
                )
                if step == 2:
                    p.grad.view(-1)[0] = math.inf
        norm, scale = lowbit.clip_scale(ours, 0.3, grad_scale=a.get_scale())
        a.step(one, grad_scale=scale)
        a.update(1024.0)
        b.unscale_(two)
        assert torch.equal(lowbit.clip_grad_norm_(theirs, 0.3), norm)
        b.step(two)
        b.update(1024.0)
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)
        assert (
            float(one.state[p]["step"])
            == float(two.state[q]["step"])
            == (3 if p.grad is not None else 0)
        )


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_scale_of_another_dtype_or_shape_leaves_those_of_the_norm(dtype, shape):
    given = torch.full(shape, 1024.0, dtype=dtype)
    found = lowbit.clip_scale(parameters(), 0.3, grad_scale=given)
    for there, wanted in zip(
        found, lowbit.clip_scale(parameters(), 0.3, grad_scale=1024.0), strict=True
    ):
        assert (there.dtype, there.shape) == (torch.float32, ()) and torch.equal(there, wanted)


@pytest.mark.parametrize("count", [0, 2])
def test_a_scale_is_one_number(count):
    with pytest.raises(ValueError, match=f"grad_scale should be one number, not {count}"):
        lowbit.clip_scale(parameters(), 0.3, grad_scale=torch.ones(count))


def test_a_number_is_float32_on_a_gpu():
    """A device without memory stands for it, as its kernels read float32 alone."""
    gpu = torch.device("meta")
    for device in ("cpu", "meta"):
        for shape in ((), (1,)):
            number = torch.ones(shape, dtype=torch.float64, device=device)
            assert on_device(number, gpu).dtype == torch.float32


def test_a_number_that_the_host_knows_is_not_copied_to_a_gpu():
    """A copy would wait for all that the GPU has to do; a device without memory stands for it."""
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    number = torch.tensor(3.0)
    with Watch():
        there = on_device(number, torch.device("meta"))
    assert (there.device.type, there.dtype, there.dim()) == ("meta", torch.float32, 0)
    assert "aten.full.default" in seen and not any("copy" in name for name in seen), seen
    assert on_device(number, torch.device("cpu")) is number and on_device(None, "cpu") is None


def test_a_norm_is_divided_by_tensors():
    """A number of the host as divisor is another operation on a GPU, whose result differs in the
    last bit.
    """
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "div" in str(func) or "mul" in str(func):
                seen.append((str(func), *(type(arg) for arg in args)))
            return func(*args, **(kwargs or {}))

    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    norm = torch.ones((), device="meta")
    with Watch():
        clip.divisor_for(norm, 0.3)
        lowbit.clip_scale([p], 0.3, grad_scale=3.0)
    assert seen == [("aten.div.Tensor", torch.Tensor, torch.Tensor)] * 3
    for bound in (0.0, math.inf, 1e300):  # beyond float32
        wanted = ((torch.tensor(2.0) + 1e-6) / bound).clamp(min=1.0)
        assert torch.equal(clip.divisor_for(torch.tensor(2.0), bound), wanted)
    norms = torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 10
    for one in norms:
        assert torch.equal(clip.divisor_for(one, 0.3), ((one + 1e-6) / 0.3).clamp(min=1.0))


def test_a_number_that_the_host_knows_is_not_captured(monkeypatch):
    """A graph would step with it for ever."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"number on the CPU \(3.0\).*every replay"):
        on_device(torch.tensor(3.0), torch.device("cuda"))


def test_a_gpu_that_is_not_used_is_not_asked(monkeypatch):
    """It would make a context there, for every rank of a job on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert not capturing() and not capturing(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert capturing() and not capturing(torch.device("cpu"))


def test_a_learning_rate_in_a_tensor_of_the_host_is_not_captured(monkeypatch):
    """A schedule that writes to it would change no replay."""
    rate, gpu = torch.tensor(0.5), torch.device("cuda")
    work = types.SimpleNamespace(group={"lr": rate}, value=types.SimpleNamespace(device=gpu))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert lr_beside(rate, gpu) is rate and CudaWork.lr.fget(work) == 0.5
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for read in (lambda: lr_beside(rate, gpu), lambda: CudaWork.lr.fget(work)):
        with pytest.raises(RuntimeError, match=r"learning rate .* \(0.5\).*every replay"):
            read()
    assert lr_beside(rate, torch.device("cpu")) is rate


class Group:
    """A process group as far as the choice of a device goes."""

    def __init__(self, *types):
        self._device_types = [torch.device(each) for each in types]


@pytest.mark.parametrize(
    "types, has, where",
    [
        (["cpu"], "nothing", "cpu"),
        (["cpu", "meta"], "nothing", "cpu"),
        (["cpu", "meta"], "cpu", "cpu"),
        (["meta"], "nothing", "meta"),
        (["meta"], "cpu", "meta"),
        (["meta"], "meta", "meta"),
    ],
)
def test_ranks_meet_on_a_device_that_their_group_alone_decides(monkeypatch, types, has, where):
    """A rank with its parameters elsewhere, or with none,
    would wait on another backend than the others.
    """
    accelerator = torch.device("meta")  # stands for one
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: accelerator)
    found = []
    monkeypatch.setattr(
        clip.sharding, "reduce_over", lambda wanted: found.extend(t.device.type for t, *_ in wanted)
    )
    sums = clip.NormSums(math.inf)
    if has != "nothing":
        sums.parts[()] = [sums._none(torch.device(has))]
    monkeypatch.setattr(clip, "_check_group", lambda *_: None, raising=False)
    with contextlib.suppress(NotImplementedError):  # "meta" has no numbers to bring home
        sums.norm(Group(*types))
    assert found == [where]
