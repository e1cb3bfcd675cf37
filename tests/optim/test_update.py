"""Update rules against references in float64, for every state format and parameter format that the
catalog lists, on every instruction set.
"""

import numpy as np
import pytest
import torch

import lowbit
from lowbit import ops
from tests.optim.reference import HYPER, REFERENCE, VARIANTS, WRITES_UPDATES, family_of, hyper_of
from tests.support.plans import fresh_state, plan_row, run_step, slot_columns

CATALOG = ops.catalog()
ISAS = CATALOG["isas"]
RULES = [r["name"] for r in CATALOG["rules"]]
PARAMS = CATALOG["param"]
STATES = {s["name"]: s for s in CATALOG["state"]}
SHAPE = (4, 300)  # two whole blocks and a short one

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

# ---- what is run ----


def layouts(rule):
    """Formats of the rule's slots, every state format at least once: a signed one in all slots, an
    unsigned one where its sign allows it, beside its signed partner, or float32 where it has none.
    A rule without slots has one layout."""
    slots = ops.rule(rule)["slots"]
    made = []
    for name, f in STATES.items():
        partner = name.removesuffix("_unsigned")
        if f["signed"]:
            formats = [name] * len(slots)
        else:
            other = partner if partner != name and partner in STATES else "float32"
            formats = [other if slot["signed"] else name for slot in slots]
        if name in formats or not slots:
            made.append(formats)
        if not slots:
            break
    return made


def unusual_layouts(rule):
    """Formats under cross-tile scales, other block lengths,
    and rounded by chance: every format once.
    """
    slots = ops.rule(rule)["slots"]
    made = []
    for i, (name, f) in enumerate(STATES.items()):
        if not any(f["signed"] or not slot["signed"] for slot in slots) or name == "float32":
            continue
        choice = {"format": name, "stochastic": i % 2 == 0}
        if f["scaled"]:
            kinds = ["block", "row", "column", "tensor", "rank1"] if f["cross_tile"] else ["block"]
            choice["scale"] = kinds[i // 2 % len(kinds)]
            if choice["scale"] == "block":
                choice["block"] = (32, 64, 512, 2048)[i % 4]
        for slot in slots:
            if not slot["signed"] and f["signed"] and not ops.has_zero(name):
                choice["stochastic"] = (
                    False  # would become negative; lowbit.config.presets refuses it
                )
        made.append([choice if f["signed"] or not slot["signed"] else "float32" for slot in slots])
    return made


def name_of(choice):
    return choice if isinstance(choice, str) else "/".join(str(v) for v in choice.values())


class Run:
    """One parameter under one rule; keeps everything as the operator sees it."""

    def __init__(
        self, rule, formats, param="float32", shape=SHAPE, seed=0, grad_dtype=torch.float32
    ):
        self.rule, self.shape, self.param = rule, shape, ops.param_format(param)
        self.columns = [slot_columns(choice) for choice in formats]
        self.formats = [CATALOG["state"][index] for index, *_ in self.columns]
        self.name = f"{rule}, {' + '.join(name_of(c) for c in formats)}, {param} parameters"
        self.generator, self.grad_dtype = torch.Generator().manual_seed(seed), grad_dtype
        self.p = torch.randn(shape, generator=self.generator).to(
            getattr(torch, self.param["dtype"])
        )
        self.state, self.step = fresh_state(rule, shape, formats, param), torch.zeros(())
        self.plan = plan_row(*shape, formats, param, stream=7)

    def grad(self):
        return torch.randn(self.shape, generator=self.generator).mul_(0.1).to(self.grad_dtype)

    def values(self):
        """The state decoded, float64: slots, factors, numbers."""
        out, at = [], int(bool(self.param["compensation"]))
        for f, (_, block, kind, _) in zip(self.formats, self.columns, strict=True):
            assert kind < 2
            if kind:
                out.append(
                    ops.dequantize(*self.state[at : at + 2], f["name"], block, self.shape[1])
                )
                at += 2
            else:
                out.append(self.state[at].float())
                at += 1
        return [x.double().numpy() for x in (*out, *self.state[at:])]

    def advance(self, grad, hyper=None, **kwargs):
        advance([self], [grad], hyper, **kwargs)

    def tensors(self):
        return [self.p, *self.state, self.step]

    def bits(self):
        return [t.detach().clone().reshape(-1).view(torch.uint8) for t in self.tensors()]


def advance(runs, grads, hyper=None, **kwargs):
    """One step of runs of one rule, in one call."""
    rule = runs[0].rule
    hyper = hyper_of(rule) if hyper is None else hyper
    run_step(
        rule,
        [r.p for r in runs],
        grads,
        [t for r in runs for t in r.state],
        [r.step for r in runs],
        torch.cat([r.plan for r in runs]),
        list(hyper.values()),
        **kwargs,
    )


def same(a, b):
    return all(
        torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8))
        for x, y in zip(a.tensors(), b.tensors(), strict=True)
    )


COVERED: dict[str, dict[str, int]] = {}


def cover(rule, test, count):
    COVERED.setdefault(rule, {}).setdefault(test, 0)
    COVERED[rule][test] += count


@pytest.fixture(scope="module", autouse=True)
def report():
    yield
    columns = list(dict.fromkeys(c for row in COVERED.values() for c in row))
    print(
        f"\n\ncombinations of {len(STATES)} state formats and {len(PARAMS)} parameter formats, on "
        f"{', '.join(ISAS)}"
    )
    print(f"{'rule':28}" + "".join(f"{c:>15}" for c in columns))
    for rule in RULES:
        cells = "".join(f"{COVERED.get(rule, {}).get(c, 0):>15}" for c in columns)
        print(f"{rule:28}{cells}")


def test_every_rule_has_a_reference():
    assert sorted(REFERENCE) == sorted(RULES), (
        "write the new rule's equations into REFERENCE of tests/optim/reference.py, in float64"
    )


def sensitive(rule, p, g, state, t, hyper, want):
    """How far the reference's own results move when what it is given moves by a few float32
    roundings: where numbers cancel, more.
    """
    e = 3e-7
    moved_p, moved = REFERENCE[rule](
        p, g * (1 + e), [s * (1 - e if i % 2 else 1 + e) for i, s in enumerate(state)], t, hyper
    )
    other_p, other = REFERENCE[rule](
        p, g * (1 - e), [s * (1 - e if i % 2 else 1 + e) for i, s in enumerate(state)], t, hyper
    )
    return [
        np.maximum(np.abs(a - w), np.abs(b - w))
        for a, b, w in zip([moved_p, *moved], [other_p, *other], want, strict=True)
    ]


def check_codes(f, block, got, want, what):
    """Coded values: as numpy's float64 values are coded,
    but for values that float32 has moved over the middle of two codes.
    """
    codes = ops.quantize(torch.from_numpy(want.astype(np.float32)), f["name"], block)
    again = ops.dequantize(*codes, f["name"], block, want.shape[1]).double().numpy()
    top = np.maximum(np.abs(want).max(axis=1, keepdims=True), 1e-300)
    bend, slack = {
        "linear": (lambda x: x / top, 2e-6),
        "sqrt": (lambda x: np.sqrt(np.maximum(x, 0) / top), 1.5e-3),
        "softsign": (lambda x: 2 * (x / top) / (1 + np.abs(x / top)), 1.5e-3),
        "log2": (lambda x: np.log2(np.maximum(np.abs(x), 1e-300)), 1e-3),
    }[f["domain"]]
    a, b, w = bend(got), bend(again), bend(want)
    flipped = (np.abs(a - b) > slack) | (np.sign(got) != np.sign(again))
    far = np.abs(np.abs(a - w) - np.abs(b - w)) > 2 * slack
    far &= (got != 0) & (again != 0) | (f["domain"] != "log2")  # zero lies apart there
    assert flipped.mean() < 0.02 and not (flipped & far).any(), (
        f"{what}: {flipped.sum()} codes differ, {(flipped & far).sum()} "
        "of values that are not in the middle"
    )


CASES = [(rule, {}) for rule in RULES] + [
    (rule, change) for rule in RULES for change in VARIANTS.get(family_of(rule), [])
]


@pytest.mark.parametrize(
    "rule, change", CASES, ids=lambda x: x if isinstance(x, str) else ",".join(x) or "default"
)
def test_step_equals_float64(rule, change):
    """Each step from the state as stored: parameters to float32 accuracy,
    state to the format's own rounding.
    """
    hyper = hyper_of(rule, **change)
    runs = [Run(rule, formats) for formats in layouts(rule)[:: 1 if not change else 5]]
    for t in range(1, 5):
        before, p = [r.values() for r in runs], [r.p.double().numpy() for r in runs]
        grads = [r.grad() for r in runs]
        advance(runs, grads, hyper)
        for run, grad, old, old_p in zip(runs, grads, before, p, strict=True):
            g = grad.double().numpy()
            want_p, want = REFERENCE[rule](old_p, g, old, t, hyper)
            slack = sensitive(rule, old_p, g, old, t, hyper, [want_p, *want])
            # m and v are rounded a few times in float32 before p: relative to the step taken,
            # not to p
            what = f"{run.name}, step {t}"
            step = np.abs(want_p - old_p).max()
            limit = 3e-7 * np.abs(want_p) + 2e-6 * step + 4 * slack[0]
            error = np.abs(run.p.double().numpy() - want_p)
            assert (error <= limit).all(), (
                f"{what}: p is off by {(error / limit).max()} of what it may"
            )
            got = run.values()
            slots = len(run.formats)
            for k, (have, wish) in enumerate(zip(got, want, strict=True)):
                where = f"{what}, state {k}"
                f = run.formats[k] if k < slots else STATES["float32"]
                if f["name"] == "float32":
                    bound = 3e-6 * np.abs(wish) + 1e-8 + 4 * slack[1 + k]  # m cancels
                    assert (np.abs(have - wish) <= bound).all(), where
                elif f["name"] == "bfloat16":
                    np.testing.assert_allclose(
                        have, wish, rtol=2**-8 * 1.01, atol=1e-9, err_msg=where
                    )
                else:
                    check_codes(f, run.columns[k][1], have, wish, where)
    assert all(run.step == 4 for run in runs)
    cover(rule, "float64", len(runs) * 4)


@pytest.mark.parametrize("rule", RULES)
def test_every_isa_gives_the_same_bits(rule):
    """All state formats x all parameter formats; and all formats under other scales,
    blocks and rounding.
    """
    cases = [(formats, p["name"]) for formats in layouts(rule) for p in PARAMS]
    cases += [
        (formats, PARAMS[i % len(PARAMS)]["name"])
        for i, formats in enumerate(unusual_layouts(rule))
    ]
    seen = []
    grads = None
    for isa in ISAS:
        ops.set_isa(isa)
        runs = [Run(rule, formats, param, (3, 300)) for formats, param in cases]
        if grads is None:
            grads = [
                [runs[0].grad().to(dtype)] * len(runs) for dtype in (torch.bfloat16, torch.float32)
            ]
        for grad in grads:
            advance(runs, grad)
        seen.append(runs)
    for isa, runs in zip(ISAS, seen, strict=True):
        for a, b in zip(seen[0], runs, strict=True):
            assert same(a, b), f"{a.name}: {isa} is not {ISAS[0]}"
    for run in seen[0]:
        assert run.p.isfinite().all(), f"{run.name}: not finite"
    cover(rule, "same bits", len(cases))


def coded_layout(rule):
    """A layout with codes, where the rule has slots."""
    return next(
        (f for f in layouts(rule) if f and all(STATES[x]["scaled"] for x in f)), layouts(rule)[0]
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_gradients_are_exact(dtype):
    """A 16-bit gradient gives the bits of the same gradient widened to float32,
    subnormals included.
    """
    for rule in RULES:
        narrow, full_precision = (Run(rule, coded_layout(rule), grad_dtype=dtype) for _ in range(2))
        for t in range(3):
            grad = narrow.grad() * (10.0 ** -(3 * t))
            grad[0, :4] = torch.tensor([0.0, -0.0, 6e-8, -6e-5]).to(dtype)
            narrow.advance(grad)
            full_precision.advance(grad.float())
            assert same(narrow, full_precision), rule


@pytest.mark.parametrize("rule", RULES)
def test_lr_zero_leaves_the_parameter(rule):
    """Every bit of it, of what is kept beside it, and every NaN."""
    cases = [(formats, "bfloat16_stochastic") for formats in layouts(rule)]
    cases += [(coded_layout(rule), p["name"]) for p in PARAMS]
    for special in (False, True):  # a NaN makes every sum one
        runs = [Run(rule, formats, param, (2, 150)) for formats, param in cases]
        for run in runs:
            bits = run.p.view(torch.int32 if run.p.dtype == torch.float32 else torch.int16)
            bits[0, 0] = torch.iinfo(bits.dtype).min  # -0.0
            if special:
                bits[0, 1] = torch.iinfo(bits.dtype).max  # a NaN that is not the canonical one
            if run.param["compensation"]:
                run.state[0].view(torch.uint8).reshape(-1)[::3] = 17
        count = [1 + bool(run.param["compensation"]) for run in runs]
        before = [
            [t.clone() for t in run.tensors()[:n]] for run, n in zip(runs, count, strict=True)
        ]
        for lr in (None, torch.tensor(0.0)):
            grads = [run.grad() for run in runs]
            advance(runs, grads, hyper_of(rule, lr=0.0 if lr is None else 1.0), lr=lr)
        for run, old in zip(runs, before, strict=True):
            for a, b in zip(run.tensors(), old, strict=False):
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), run.name
            assert run.step == 2, run.name
    cover(rule, "lr 0", len(cases))


@pytest.mark.parametrize("rule", RULES)
def test_a_bad_gradient_never_turns_finite(rule):
    cases = [(formats, "bfloat16_stochastic") for formats in layouts(rule)]
    cases += [(coded_layout(rule), p["name"]) for p in PARAMS]
    for bad in (float("nan"), float("inf"), -float("inf")):
        runs = [Run(rule, formats, param) for formats, param in cases]
        grad = runs[0].grad()
        grad[2, 290] = bad
        advance(runs, [grad] * len(runs))
        for _ in range(3):
            for run in runs:
                what = f"{run.name}, gradient {bad}"
                assert not run.p[2, 290].isfinite(), what
                for k, s in enumerate(run.values()[: len(run.formats)]):
                    assert not np.isfinite(s[2, 290]), f"{what}, state {k}"
            advance(runs, [runs[0].grad()] * len(runs))
    cover(rule, "bad gradient", 3 * len(cases))


@pytest.mark.parametrize("rule", RULES)
def test_a_zero_gradient_never_moves_its_weight(rule):
    """Of rules without decay, whose signed state is kept in formats that have a zero."""
    slots = ops.rule(rule)["slots"]
    cases = [
        formats
        for formats in layouts(rule)
        if all(
            ops.has_zero(f) or not slot["signed"] for f, slot in zip(formats, slots, strict=True)
        )
    ]
    coded = coded_layout(rule)
    for i, slot in enumerate(slots):
        if slot["weight"]:  # the weight moves toward a copy that codes round
            cases = [[*formats[:i], "float32", *formats[i + 1 :]] for formats in cases]
            coded = [*coded[:i], "float32", *coded[i + 1 :]]
    runs = [Run(rule, formats, "bfloat16_stochastic", shape=(2, 300)) for formats in cases]
    runs += [
        Run(rule, coded, p["name"], shape=(2, 300)) for p in PARAMS if all(map(ops.has_zero, coded))
    ]
    # the update of no gradient is 0
    still = [run.p[:, 7].clone() * (rule not in WRITES_UPDATES) for run in runs]
    for _ in range(20):
        grad = runs[0].grad()
        grad[:, 7] = 0
        advance(runs, [grad] * len(runs), hyper_of(rule, weight_decay=0.0))
    for run, old in zip(runs, still, strict=True):
        assert torch.equal(run.p[:, 7], old), run.name
        assert (run.p[:, 8] != 0).all() and run.p.isfinite().all(), run.name
    cover(rule, "zero gradient", len(runs))


def test_scaler_and_maximize():
    for rule in RULES:
        for formats in (coded_layout(rule), layouts(rule)[0]):
            plain, scaled, negated, skipped = (Run(rule, formats) for _ in range(4))
            for _ in range(3):
                grad = plain.grad()
                plain.advance(grad)
                scaled.advance(
                    grad * 1024, grad_scale=torch.tensor(1024.0), found_inf=torch.tensor(0.0)
                )
                negated.advance(-grad, maximize=True)
                skipped.advance(grad, found_inf=torch.tensor(1.0))
            assert same(plain, scaled) and same(plain, negated), plain.name
            untouched = Run(rule, formats)
            assert same(skipped, untouched), f"{plain.name}: found_inf: nothing at all happens"
            tensor_lr, float_lr = Run(rule, formats), Run(rule, formats)
            grad = float_lr.grad()
            float_lr.advance(grad, hyper_of(rule, lr=0.25))
            tensor_lr.advance(grad, hyper_of(rule, lr=9.0), lr=torch.tensor(0.25))
            assert same(float_lr, tensor_lr), plain.name


def test_chance_makes_no_second_moment_negative():
    """A signed format without a zero, rounded by chance, would take small positive values below
    zero, and their root is NaN: refused.
    """
    seen = set()
    for name, f in STATES.items():
        if not f["scaled"] or not f["signed"]:
            continue
        spec = lowbit.scaled(name, rounding="stochastic")
        p = torch.nn.Parameter(torch.ones(64, 128))
        if not ops.has_zero(name):
            seen.add(name)
            lowbit.AdamW([p], state_format={"exp_avg": spec})
            with pytest.raises(ValueError, match=f"exp_avg_sq is never negative.*{name}_unsigned"):
                lowbit.AdamW([p], state_format=spec)
            continue
        opt = lowbit.AdamW([p], state_format=spec)
        for i in range(3):
            p.grad = torch.randn(64, 128, generator=torch.Generator().manual_seed(i))
            opt.step()
        assert p.isfinite().all(), name
    assert "power1_4" in seen and "dynamic8" not in seen


def test_many_parameters_equal_one_by_one():
    """One call over parameters of many shapes, with any number of threads,
    gives each the bits it gets alone.
    """
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
