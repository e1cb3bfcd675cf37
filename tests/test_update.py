"""Update rules against slow float64 twins, for every state format and parameter format that the catalog lists, on every instruction set."""

import math

import numpy as np
import pytest
import torch
from plans import plan_row

from lowbit import ops

CATALOG = ops.catalog()
ISAS = CATALOG["isas"]
RULES = [r["name"] for r in CATALOG["rules"]]
PARAMS = CATALOG["param"]
SHAPE = (9, 531)  # two whole blocks and a short one
HYPER = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.99, "eps": 1e-7, "weight_decay": 0.05}


def adam(p, g, s, t, h, *, decoupled, amsgrad):
    """arXiv:1412.6980, arXiv:1711.05101 and AMSGrad as torch.optim has them, in float64."""
    if decoupled:
        p = p * (1 - h["lr"] * h["weight_decay"])
    else:
        g = g + h["weight_decay"] * p
    m = h["beta1"] * s[0] + (1 - h["beta1"]) * g
    v = h["beta2"] * s[1] + (1 - h["beta2"]) * g * g
    state = [m, v]
    if amsgrad:
        state.append(np.maximum(s[2], v))
    denominator = np.sqrt(state[-1]) / math.sqrt(1 - h["beta2"] ** t) + h["eps"]
    return p - h["lr"] / (1 - h["beta1"] ** t) * m / denominator, state


def apollo_inner(p, g, s, t, h):
    """The direction inside the subspace, arXiv:2412.05270: written to the "parameter", of which nothing is left."""
    m = h["beta1"] * s[0] + (1 - h["beta1"]) * g
    v = h["beta2"] * s[1] + (1 - h["beta2"]) * g * g
    return m / (np.sqrt(v) + h["eps"]), [m, v]


REFERENCE = {
    "apollo_inner": apollo_inner,
    "adamw": lambda *a: adam(*a, decoupled=True, amsgrad=False),
    "adam": lambda *a: adam(*a, decoupled=False, amsgrad=False),
    "adamw_amsgrad": lambda *a: adam(*a, decoupled=True, amsgrad=True),
    "adam_amsgrad": lambda *a: adam(*a, decoupled=False, amsgrad=True),
}


def rule_named(name):
    return next(r for r in CATALOG["rules"] if r["name"] == name)


def layouts(rule):
    """Every uniform choice of state format: wide ones for all slots, coded ones where their sign allows it, float32 elsewhere."""
    wide = [s["name"] for s in CATALOG["state"] if not s["scaled"]]
    coded = [s["name"] for s in CATALOG["state"] if s["scaled"]]
    slots = rule_named(rule)["slots"]
    for name in wide:
        yield [name] * len(slots)
    for name in coded:
        signed = state_named(name)["signed"]
        yield [name if signed or not slot["signed"] else "float32" for slot in slots]
        others = [c for c in coded if state_named(c)["signed"] != signed]
        for other in others if signed else []:
            yield [name if slot["signed"] else other for slot in slots]


def state_named(name):
    return next(s for s in CATALOG["state"] if s["name"] == name)


CASES = [(rule, formats) for rule in RULES for formats in layouts(rule)]


class Run:
    """One parameter under one rule; keeps everything as the operator sees it."""

    def __init__(
        self, rule, formats, param="float32", shape=SHAPE, seed=0, grad_dtype=torch.float32
    ):
        self.rule, self.formats, self.shape = rule, [state_named(f) for f in formats], shape
        self.param = next(p for p in PARAMS if p["name"] == param)
        generator = torch.Generator().manual_seed(seed)
        self.generator, self.grad_dtype = generator, grad_dtype
        self.p = torch.randn(shape, generator=generator).to(getattr(torch, self.param["dtype"]))
        self.state, self.step = [], torch.zeros(())
        rows, cols = shape
        for f in self.formats:
            zeros = torch.zeros(shape)
            if f["scaled"]:
                self.state += ops.encode(zeros, f["name"], f["block"])
            else:
                self.state.append(zeros.to(getattr(torch, f["dtype"])))
        self.plan = plan_row(rows, cols, formats, param, stream=7)

    def grad(self):
        return torch.randn(self.shape, generator=self.generator).mul_(0.1).to(self.grad_dtype)

    def values(self):
        """The state decoded, float64."""
        out, at = [], 0
        for f in self.formats:
            if f["scaled"]:
                out.append(
                    ops.decode(*self.state[at : at + 2], f["name"], f["block"], self.shape[1])
                )
                at += 2
            else:
                out.append(self.state[at].float())
                at += 1
        return [x.double().numpy() for x in out]

    def advance(self, grad, hyper=HYPER, **kwargs):
        names = rule_named(self.rule)["hyper"]
        values = [hyper[name] for name in names]
        ops.step(self.rule, [self.p], [grad], self.state, [self.step], self.plan, values, **kwargs)

    def bits(self):
        return [
            t.detach().clone().view(torch.uint8)
            for t in (self.p, *self.state, self.step.reshape(1))
        ]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.bits(), b.bits(), strict=True))


def test_every_rule_has_a_slow_twin():
    assert sorted(REFERENCE) == sorted(RULES), (
        "write the new rule's equations into REFERENCE, in float64"
    )


@pytest.mark.parametrize(
    "rule, formats", CASES, ids=lambda x: x if isinstance(x, str) else "+".join(x)
)
def test_step_equals_float64(rule, formats):
    """Each step from the state as stored: parameters to float32 accuracy, state to the format's own rounding."""
    run = Run(rule, formats)
    for t in range(1, 6):
        before, p = run.values(), run.p.double().numpy()
        grad = run.grad()
        want_p, want_state = REFERENCE[rule](p, grad.double().numpy(), before, t, HYPER)
        run.advance(grad)
        # m and v are rounded a few times in float32 before p: relative to the step taken, not to p
        lr, rtol = (0.1, 1e-6) if rule == "apollo_inner" else (HYPER["lr"], 3e-7)  # N itself
        np.testing.assert_allclose(run.p.double().numpy(), want_p, rtol=rtol, atol=2e-6 * lr * 10)
        for format, got, want in zip(run.formats, run.values(), want_state, strict=True):
            if format["name"] == "float32":
                np.testing.assert_allclose(got, want, rtol=3e-6, atol=4e-9)  # m cancels
            elif format["name"] == "bfloat16":
                np.testing.assert_allclose(got, want, rtol=2**-8 * 1.01, atol=1e-12)
            else:
                codes = ops.encode(
                    torch.from_numpy(want.astype(np.float32)), format["name"], format["block"]
                )
                again = ops.decode(*codes, format["name"], format["block"], SHAPE[1]).numpy()
                assert (
                    np.abs(got - again) > 1e-5 * np.abs(again) + 1e-12
                ).mean() < 1e-3  # rounding at a midpoint
    assert run.step == 5


@pytest.mark.parametrize("param", [p["name"] for p in PARAMS])
@pytest.mark.parametrize(
    "rule, formats", CASES, ids=lambda x: x if isinstance(x, str) else "+".join(x)
)
def test_every_isa_gives_the_same_bits(rule, formats, param):
    before = ops.catalog()["isa"]
    runs = []
    for isa in ISAS:
        ops.set_isa(isa)
        run = Run(rule, formats, param, grad_dtype=torch.bfloat16)
        for _ in range(4):
            run.advance(run.grad())
        runs.append(run)
    ops.set_isa(before)
    assert all(same(runs[0], other) for other in runs[1:])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_gradients_are_exact(rule, dtype):
    """A 16-bit gradient gives the bits of the same gradient widened to float32, subnormals included."""
    formats = next(f for r, f in CASES if r == rule and any(state_named(x)["scaled"] for x in f))
    narrow, wide = (Run(rule, formats, grad_dtype=dtype) for _ in range(2))
    for t in range(3):
        grad = narrow.grad() * (10.0 ** -(3 * t))
        grad[0, :4] = torch.tensor([0.0, -0.0, 6e-8, -6e-5]).to(dtype)
        narrow.advance(grad)
        wide.advance(grad.float())
        assert same(narrow, wide)


@pytest.mark.parametrize(
    "rule, formats", CASES, ids=lambda x: x if isinstance(x, str) else "+".join(x)
)
@pytest.mark.parametrize("param", [p["name"] for p in PARAMS])
def test_lr_zero_leaves_the_parameter(rule, formats, param):
    run = Run(rule, formats, param)
    bits = run.p.view(torch.int32 if run.p.dtype == torch.float32 else torch.int16)
    bits[0, 0] = torch.iinfo(bits.dtype).min  # -0.0
    bits[0, 1] = torch.iinfo(bits.dtype).max  # a NaN that is not the canonical one
    before = bits.clone()
    for lr in (None, torch.tensor(0.0)):
        hyper = HYPER | {"lr": 0.0 if lr is None else 1.0}
        run.advance(run.grad(), hyper, lr=lr)
    assert torch.equal(bits, before) and run.step == 2


@pytest.mark.parametrize(
    "rule, formats", CASES, ids=lambda x: x if isinstance(x, str) else "+".join(x)
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_gradient_never_turns_finite(rule, formats, bad):
    run = Run(rule, formats, "bfloat16_stochastic")
    grad = run.grad()
    grad[3, 300] = bad
    run.advance(grad)
    for _ in range(5):
        assert not run.p[3, 300].isfinite()
        assert all(not np.isfinite(s[3, 300]) for s in run.values())
        run.advance(run.grad())


@pytest.mark.parametrize(
    "rule, formats", CASES, ids=lambda x: x if isinstance(x, str) else "+".join(x)
)
def test_a_zero_gradient_never_moves_its_weight(rule, formats):
    run = Run(rule, formats, "bfloat16_stochastic", shape=(2, 300))
    still = run.p[:, 7] * (rule != "apollo_inner")  # which writes a direction, 0 here
    for _ in range(500):
        grad = run.grad()
        grad[:, 7] = 0
        run.advance(grad, HYPER | {"weight_decay": 0.0})
    assert torch.equal(run.p[:, 7], still)


@pytest.mark.parametrize("rule", RULES)
def test_scaler_and_maximize(rule):
    formats = next(f for r, f in CASES if r == rule and any(state_named(x)["scaled"] for x in f))
    plain, scaled, negated, skipped = (Run(rule, formats) for _ in range(4))
    for _ in range(3):
        grad = plain.grad()
        plain.advance(grad)
        scaled.advance(grad * 1024, grad_scale=torch.tensor(1024.0), found_inf=torch.tensor(0.0))
        negated.advance(-grad, maximize=True)
        skipped.advance(grad, found_inf=torch.tensor(1.0))
    assert same(plain, scaled) and same(plain, negated)
    assert same(skipped, Run(rule, formats)), "found_inf: nothing at all happens"
    tensor_lr, float_lr = Run(rule, formats), Run(rule, formats)
    grad = float_lr.grad()
    float_lr.advance(grad, HYPER | {"lr": 0.25})
    tensor_lr.advance(grad, HYPER | {"lr": 9.0}, lr=torch.tensor(0.25))
    assert same(float_lr, tensor_lr)


def test_many_parameters_equal_one_by_one():
    """One call over parameters of many shapes, with any number of threads, gives each the bits it gets alone."""
    shapes = [(1, 1), (3, 77), (64, 1024), (1, 5000), (200, 16), (0, 40), (17, 257)]
    formats = ["dynamic8", "dynamic8_unsigned"]

    threads = torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        many = [
            Run("adamw", formats, "bfloat16_stochastic", s, seed=i) for i, s in enumerate(shapes)
        ]
        single = [
            Run("adamw", formats, "bfloat16_stochastic", s, seed=i) for i, s in enumerate(shapes)
        ]
        for _ in range(3):
            grads = [run.grad() for run in many]
            ops.step(
                "adamw",
                [r.p for r in many],
                grads,
                [s for r in many for s in r.state],
                [r.step for r in many],
                torch.cat([r.plan for r in many]),
                list(HYPER.values()),
            )
            for run, grad in zip(single, grads, strict=True):
                run.advance(grad)
        assert all(same(a, b) for a, b in zip(many, single, strict=True))
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda r: r.update(rule="adamx"), "no update rule"),
        (lambda r: r["hyper"].pop(), "hyperparameters"),
        (lambda r: r["grads"].__setitem__(0, r["grads"][0][:, :-1]), "gradient of parameter 0"),
        (
            lambda r: r["grads"].__setitem__(0, r["grads"][0].double()),
            "must be float32, bfloat16 or float16",
        ),
        (lambda r: r["state"].__setitem__(0, r["state"][0].int()), "dtype"),
        (lambda r: r["state"].pop(), "list of state tensors ends"),
        (lambda r: r["plan"].__setitem__((0, 13), 100), "block length"),
        (lambda r: r["plan"].__setitem__((0, 5), 99), "no format"),
        (lambda r: r["plan"].__setitem__((0, 0), 10), "elements, expected"),
        (lambda r: r.update(params=[r["params"][0].t().contiguous().t()]), "not contiguous"),
    ],
)
def test_a_wrong_call_is_refused_before_anything_is_written(change, message):
    run = Run("adamw", ["dynamic8", "dynamic8_unsigned"])
    call = {
        "rule": "adamw",
        "params": [run.p],
        "grads": [run.grad()],
        "state": list(run.state),
        "steps": [run.step],
        "plan": run.plan.clone(),
        "hyper": list(HYPER.values()),
    }
    before = run.bits()
    change(call)
    with pytest.raises(RuntimeError, match=message):
        ops.step(*call.values())
    assert all(torch.equal(a, b) for a, b in zip(before, run.bits(), strict=True))
