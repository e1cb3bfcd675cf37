"""Update rules of one element against slow float64 twins, on every instruction set. A rule knows no format and no format knows a rule, so AdamW
is tried with every format of state and parameters, and every rule with a few. Rules that measure the tensor first: tests/test_measured.py."""

import math

import numpy as np
import pytest
import torch
from plans import plan_row

from lowbit import ops

CATALOG = ops.catalog()
ISAS = CATALOG["isas"]
RULES = [r["name"] for r in CATALOG["rules"] if r["rounds"] == 0]
PARAMS = CATALOG["param"]
SHAPE = (9, 531)  # two whole blocks and a short one
HYPER = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.99, "eps": 1e-7, "weight_decay": 0.05}
ADAM = list(HYPER.values())
HYPER |= {"momentum": 0.8, "dampening": 0.1, "nesterov": 0, "decoupled": 0, "dampen_first": 0}
HYPER |= {"alpha": 0.9, "least_variance": 1 / 16, "lr_decay": 0.1}
HYPER |= {"beta3": 0.999, "t_alpha": 4, "t_beta3": 3}


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


def decay(p, g, h, decoupled):
    """Parameter and gradient after weight decay."""
    return (
        (p * (1 - h["lr"] * h["weight_decay"]), g) if decoupled else (p, g + h["weight_decay"] * p)
    )


def sgd(p, g, s, t, h):
    """torch.optim.SGD without momentum; decoupled as arXiv:1711.05101's SGDW."""
    p, d = decay(p, g, h, h["decoupled"])
    return p - h["lr"] * d, []


def sgd_momentum(p, g, s, t, h):
    """torch.optim.SGD: the first buffer is the gradient itself, unless dampen_first."""
    p, d = decay(p, g, h, h["decoupled"])
    buffer = h["momentum"] * s[0] + (1 - h["dampening"]) * d
    if t == 1 and not h["dampen_first"]:
        buffer = d
    d = d + h["momentum"] * buffer if h["nesterov"] else buffer
    return p - h["lr"] * d, [buffer]


def lion(p, g, s, t, h):
    """arXiv:2302.06675."""
    p, _ = decay(p, g, h, True)
    p = p - h["lr"] * np.sign(h["beta1"] * s[0] + (1 - h["beta1"]) * g)
    return p, [h["beta2"] * s[0] + (1 - h["beta2"]) * g]


def rmsprop(p, g, s, t, h, *, centered, momentum):
    """torch.optim.RMSprop; the variance is least_variance of the square average or more."""
    _, g = decay(p, g, h, False)
    v = h["alpha"] * s[0] + (1 - h["alpha"]) * g * g
    state, variance = [v], v
    if centered:
        average = h["alpha"] * s[-1] + (1 - h["alpha"]) * g
        variance = np.maximum(v - average**2, h["least_variance"] * v)
    d = g / (np.sqrt(variance) + h["eps"])
    if momentum:
        d = h["momentum"] * s[1] + d
        state.append(d)
    return p - h["lr"] * d, state + ([average] if centered else [])


def adagrad(p, g, s, t, h):
    """torch.optim.Adagrad."""
    _, g = decay(p, g, h, False)
    total = s[0] + g * g
    return p - h["lr"] / (1 + (t - 1) * h["lr_decay"]) * g / (np.sqrt(total) + h["eps"]), [total]


def ademamix(p, g, s, t, h):
    """arXiv:2409.03137 with both schedules."""
    p, _ = decay(p, g, h, True)
    alpha, beta3 = h["alpha"], h["beta3"]
    if h["t_alpha"]:
        alpha = min(t * alpha / h["t_alpha"], alpha)
    if h["t_beta3"]:
        ln1, ln3, at = math.log(h["beta1"]), math.log(beta3), t / h["t_beta3"]
        if at < 1:
            beta3 = min(math.exp(ln1 * ln3 / ((1 - at) * ln3 + at * ln1)), beta3)
    fast = h["beta1"] * s[0] + (1 - h["beta1"]) * g
    slow = beta3 * s[1] + (1 - beta3) * g
    v = h["beta2"] * s[2] + (1 - h["beta2"]) * g * g
    m = fast / (1 - h["beta1"] ** t) + alpha * slow
    p = p - h["lr"] * m / (np.sqrt(v) / math.sqrt(1 - h["beta2"] ** t) + h["eps"])
    return p, [fast, slow, v]


REFERENCE = {
    "adamw": lambda *a: adam(*a, decoupled=True, amsgrad=False),
    "adam": lambda *a: adam(*a, decoupled=False, amsgrad=False),
    "adamw_amsgrad": lambda *a: adam(*a, decoupled=True, amsgrad=True),
    "adam_amsgrad": lambda *a: adam(*a, decoupled=False, amsgrad=True),
    "sgd": sgd,
    "sgd_momentum": sgd_momentum,
    "lion": lion,
    "rmsprop": lambda *a: rmsprop(*a, centered=False, momentum=False),
    "rmsprop_momentum": lambda *a: rmsprop(*a, centered=False, momentum=True),
    "rmsprop_centered": lambda *a: rmsprop(*a, centered=True, momentum=False),
    "rmsprop_centered_momentum": lambda *a: rmsprop(*a, centered=True, momentum=True),
    "adagrad": adagrad,
    "ademamix": ademamix,
}
# Settings beside HYPER under which a rule takes another path.
VARIANTS = [
    ("sgd", {"decoupled": 1}),
    ("sgd_momentum", {"nesterov": 1}),
    ("sgd_momentum", {"decoupled": 1, "dampen_first": 1}),
    ("sgd_momentum", {"decoupled": 1, "nesterov": 1}),
    ("lion", {"beta1": 0.0}),
    ("rmsprop_centered", {"least_variance": 0.0}),
    ("rmsprop_centered_momentum", {"alpha": 0.0, "least_variance": 0.25}),
    ("ademamix", {"t_alpha": 0, "t_beta3": 0}),
    ("ademamix", {"t_beta3": 100, "beta3": 0.9999}),
    ("ademamix", {"t_alpha": 1000, "beta1": 0.0, "t_beta3": 0}),
]


def rule_named(name):
    return next(r for r in CATALOG["rules"] if r["name"] == name)


def state_named(name):
    return next(s for s in CATALOG["state"] if s["name"] == name)


# A format for signed and one for unsigned slots. FEW: a code of a byte, packed codes, blocks of 32 with scales of 16 bits.
FEW = [("dynamic8", "dynamic8_unsigned"), ("dynamic4", "linear4_unsigned"), ("companded8", "companded8_unsigned")]  # fmt: skip


def pairs():
    """Every format that has scales, beside a partner for the other sign."""
    coded = {s["name"]: s["signed"] for s in CATALOG["state"] if s["scaled"]}
    for name, signed in coded.items():
        if signed:
            yield name, next(u for u in (name + "_unsigned", "log8") if u in coded)
        elif name.removesuffix("_unsigned") not in coded:
            yield "dynamic8", name
    yield "float32", "dynamic8_unsigned"
    yield "dynamic8", "float32"
    yield "dynamic8", "dynamic8"


def layouts(rule):
    """Formats for the slots of a rule."""
    slots = rule_named(rule)["slots"]
    wide = [(s["name"],) * 2 for s in CATALOG["state"] if not s["scaled"]]
    choices = [*wide, *(pairs() if rule == "adamw" else FEW)]
    return [list(x) for x in dict.fromkeys(tuple(c[0 if slot["signed"] else 1] for slot in slots) for c in choices)]  # fmt: skip


CASES = [(rule, formats) for rule in RULES for formats in layouts(rule)]


def one_coded(rule):
    """The rule's first layout with a coded slot."""
    of_rule = [formats for r, formats in CASES if r == rule]
    return next((f for f in of_rule if any(state_named(x)["scaled"] for x in f)), of_rule[0])


# Every format of state, every rule, and every format of parameters.
PARAM_CASES = [
    *((rule, formats, "bfloat16_stochastic") for rule, formats in CASES),
    *((rule, one_coded(rule), "float32") for rule in RULES),
    *(("adamw", one_coded("adamw"), p["name"]) for p in PARAMS),
]


def case_id(x):
    return x if isinstance(x, str) else "+".join(x) or "stateless"


class Run:
    """One parameter under one rule; keeps everything as the operator sees it."""

    def __init__(
        self, rule, formats, param="float32", shape=SHAPE, seed=0, grad_dtype=torch.float32
    ):
        self.rule, self.formats, self.shape = rule, [state_named(f) for f in formats], shape
        self.param = next(p for p in PARAMS if p["name"] == param)
        generator = torch.Generator().manual_seed(seed)
        self.generator, self.grad_dtype = generator, grad_dtype
        self.p, extra = ops.split(torch.randn(shape, generator=generator), param)
        self.state, self.step = [], torch.zeros(())
        rows, cols = shape
        for f in self.formats:
            zeros = torch.zeros(shape)
            if f["scaled"]:
                self.state += ops.encode(zeros, f["name"], f["block"])
            else:
                self.state.append(zeros.to(getattr(torch, f["dtype"])))
        self.extra = [extra] if self.param["extra"] else []
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
        state = [*self.extra, *self.state]
        ops.step(self.rule, [self.p], [grad], state, [self.step], self.plan, values, **kwargs)

    def bits(self):
        return [
            t.detach().clone().view(torch.uint8)
            for t in (self.p, *self.extra, *self.state, self.step.reshape(1))
        ]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.bits(), b.bits(), strict=True))


def test_every_rule_has_a_slow_twin():
    assert sorted(REFERENCE) == sorted(RULES), (
        "write the new rule's equations into REFERENCE, in float64"
    )


@pytest.mark.parametrize("rule, formats", CASES, ids=case_id)
def test_step_equals_float64(rule, formats):
    """Each step from the state as stored: parameters to float32 accuracy, state to the format's own rounding."""
    check_against_float64(Run(rule, formats), HYPER)


@pytest.mark.parametrize("rule, change", VARIANTS, ids=str)
def test_settings_equal_float64(rule, change):
    slots = rule_named(rule)["slots"]
    check_against_float64(Run(rule, ["float32"] * len(slots)), HYPER | change)


def check_against_float64(run, hyper):
    for t in range(1, 6):
        before, p = run.values(), run.p.double().numpy()
        grad = run.grad()
        want_p, want_state = REFERENCE[run.rule](p, grad.double().numpy(), before, t, hyper)
        run.advance(grad, hyper)
        # m and v are rounded a few times in float32 before p: relative to the step taken, not to p
        np.testing.assert_allclose(
            run.p.double().numpy(), want_p, rtol=3e-7, atol=2e-6 * hyper["lr"] * 10
        )
        for format, got, want in zip(run.formats, run.values(), want_state, strict=True):
            # what is signed cancels: relative to the terms that were added
            atol = 4e-9 + (2e-7 * np.abs(want).max() if (want < 0).any() else 0.0)
            if format["name"] == "float32":
                np.testing.assert_allclose(got, want, rtol=3e-6, atol=atol)
            elif format["name"] == "bfloat16":
                np.testing.assert_allclose(got, want, rtol=2**-8 * 1.01, atol=atol)
            else:
                codes = ops.encode(
                    torch.from_numpy(want.astype(np.float32)), format["name"], format["block"]
                )
                again = ops.decode(*codes, format["name"], format["block"], SHAPE[1]).numpy()
                # a scale of two numbers follows the least value of its block, which cancels too
                rtol, most = (1e-5, 1e-3) if format["scale_numbers"] == 1 else (1e-3, 1e-2)
                differ = np.abs(got - again) > rtol * np.abs(again) + 1e-12
                assert differ.mean() < most  # rounding at a midpoint
    assert run.step == 5


@pytest.mark.parametrize("rule, formats, param", PARAM_CASES, ids=case_id)
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
    formats = one_coded(rule)
    narrow, wide = (Run(rule, formats, grad_dtype=dtype) for _ in range(2))
    for t in range(3):
        grad = narrow.grad() * (10.0 ** -(3 * t))
        grad[0, :4] = torch.tensor([0.0, -0.0, 6e-8, -6e-5]).to(dtype)
        narrow.advance(grad)
        wide.advance(grad.float())
        assert same(narrow, wide)


@pytest.mark.parametrize("rule, formats, param", PARAM_CASES, ids=case_id)
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


@pytest.mark.parametrize("rule, formats", CASES, ids=case_id)
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


def holds_zero(name):
    """Whether a format has a code for 0; lpmm's linear and power maps for signed values have none."""
    entry = state_named(name)
    if not entry["scaled"]:
        return True
    codes = ops.encode(torch.tensor([[1.0, 0.0, -1.0]]), name, entry["block"])
    return not entry["signed"] or ops.decode(*codes, name, entry["block"], 3)[0, 1] == 0


@pytest.mark.parametrize(
    "rule, formats", [c for c in CASES if all(map(holds_zero, c[1]))], ids=case_id
)
def test_a_zero_gradient_never_moves_its_weight(rule, formats):
    run = Run(rule, formats, "bfloat16_stochastic", shape=(2, 300))
    still = run.p[:, 7].clone()
    for _ in range(500):
        grad = run.grad()
        grad[:, 7] = 0
        run.advance(grad, HYPER | {"weight_decay": 0.0})
    assert torch.equal(run.p[:, 7], still)


@pytest.mark.parametrize("rule", RULES)
def test_scaler_and_maximize(rule):
    formats = one_coded(rule)
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
                ADAM,
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
        "hyper": list(ADAM),
    }
    before = run.bits()
    change(call)
    with pytest.raises(RuntimeError, match=message):
        ops.step(*call.values())
    assert all(torch.equal(a, b) for a, b in zip(before, run.bits(), strict=True))
