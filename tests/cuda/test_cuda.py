"""The operators on a GPU: the bits of the CPU, in graphs, on other streams, never waiting.

One command on a machine with a GPU: `LOWBIT_REQUIRE=cuda python -m pytest tests/cuda/test_cuda.py`.
Without a GPU, tests/cpp/cuda/test_cuda_emulated.cpp runs the same kernels on the CPU.
"""

import math
from dataclasses import dataclass, field

import pytest
import torch

import lowbit
from lowbit import ops
from tests.cuda.waiting import not_waited_for
from tests.sharding.test_cut import (
    CODED,
    check_columns_inside_blocks,
    check_flat_shards,
    partner,
    run_whole,
)
from tests.support.graphs import captured
from tests.support.plans import fresh_state, plan_row, run_step
from tests.support.require import gpu

pytestmark = pytest.mark.slow

DEVICE = gpu("; the emulator test covers the kernels")
CATALOG = ops.catalog()
STATE = {s["name"]: s for s in CATALOG["state"]}
PARAM = {p["name"]: p for p in CATALOG["param"]}
RULES = {r["name"]: r for r in CATALOG["rules"]}
SHAPES = [[896, 896], [2880, 1408], [1000, 77], [7, 4096], [3, 5, 64], [1000]]
HYPER = [1e-3, 0.9, 0.99, 1e-8, 1e-2]
NAMED = {
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.99,
    "beta3": 0.95,
    "eps": 1e-8,
    "weight_decay": 1e-2,
    "decay_by": 2.0,
}


@dataclass
class Run:
    """Parameters and their state on one device, and the arguments of the operator."""

    rule: str
    params: list[torch.Tensor] = field(default_factory=list)
    grads: list[torch.Tensor] = field(default_factory=list)
    state: list[torch.Tensor] = field(default_factory=list)
    steps: list[torch.Tensor] = field(default_factory=list)
    plan: list[list[int]] = field(default_factory=list)

    def add(
        self, param, grad, param_format, formats, *, first=0, global_cols=None, block=256, stream=1
    ):
        """A parameter with state of zeros; `formats`: a name for each slot of the rule."""
        rows = 1 if param.dim() < 2 else param.shape[0]
        cols = math.prod(param.shape) if param.dim() < 2 else math.prod(param.shape[1:])

        choices = [
            (name, block) if isinstance(name, str) and STATE[name]["scaled"] else name
            for name in formats
        ]
        at = {"first": first, "stream": stream, "global_cols": global_cols}
        row = plan_row(rows, cols, choices, param_format, **at)[0].tolist()
        if param.dim() == 1:
            row[ops.plan_columns()["inner_cols"]] = row[ops.plan_columns()["global_inner_cols"]] = (
                cols  # a vector is a matrix of one row to a factored moment
            )
        state = fresh_state(self.rule, (rows, cols), choices, param_format)
        self.state += [t.to(param.device) for t in state]
        self.params.append(param)
        self.grads.append(grad)
        self.steps.append(param.new_zeros((), dtype=torch.float32))
        self.plan.append(row)

    def to(self, device):
        """A copy there."""
        lists = (self.params, self.grads, self.state, self.steps)
        moved = ([t.detach().to(device, copy=True) for t in tensors] for tensors in lists)
        return Run(self.rule, *moved, list(self.plan))

    def step(self, hyper=HYPER, **options):
        """All phases."""
        plan = torch.tensor(self.plan, dtype=torch.int64)
        names = RULES[self.rule]["hyper"]
        if hyper is HYPER and len(names) != len(HYPER):
            hyper = [NAMED.get(name, 0.5) for name in names]
        lists = (self.params, self.grads, self.state, self.steps)
        run_step(self.rule, *lists, plan, hyper, seed=7, **options)

    def set_grads(self, grads):
        for mine, new in zip(self.grads, grads, strict=True):
            mine.copy_(new)

    def named(self):
        for what in ("params", "state", "steps"):
            for i, t in enumerate(getattr(self, what)):
                yield f"{what}[{i}] {list(t.shape)}", t


def bits(t):
    """A copy on the CPU, as integers."""
    t = t.detach().to("cpu", copy=True).contiguous()
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()])


def assert_same(cuda, cpu):
    for (name, a), (_, b) in zip(cuda.named(), cpu.named(), strict=True):
        different = int((bits(a) != bits(b)).sum())
        assert different == 0, f"{name}: {different} elements differ from the CPU"


def coded(rule="adamw"):
    """The 8-bit format of its sign for each slot."""
    return ["dynamic8" if s["signed"] else "dynamic8_unsigned" for s in RULES[rule]["slots"]]


def make_run(
    rule="adamw",
    param_format="bfloat16_stochastic",
    grad=torch.bfloat16,
    full_precision=None,
    shapes=SHAPES,
    device=DEVICE,
):
    """A parameter for each shape; its state coded if it has two dimensions,
    unless `full_precision`.
    """
    torch.manual_seed(3)
    run = Run(rule)
    for i, shape in enumerate(shapes):
        param = torch.randn(shape).to(getattr(torch, PARAM[param_format]["dtype"])).to(device)
        formats = coded(rule)
        if full_precision or len(shape) < 2:
            formats = [full_precision or "float32"] * len(formats)
        grads = torch.zeros(shape, dtype=grad, device=device)
        run.add(param, grads, param_format, formats, stream=i)
    return run


def random_grads(run, seed, size=1e-2):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(g.shape, generator=generator).mul_(size).to(g.dtype) for g in run.grads]


def assert_same_steps(cuda, steps):
    cpu = cuda.to("cpu")
    for t in range(steps):
        grads = random_grads(cuda, t)
        for run in (cuda, cpu):
            run.set_grads(grads)
            run.step()
    assert_same(cuda, cpu)


@pytest.mark.parametrize("grad", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("param_format", list(PARAM))
def test_twenty_steps(param_format, grad):
    # A warp has several tiles; it takes the CPU a while.
    large = param_format == "bfloat16_stochastic"
    shapes = [s for s in SHAPES if large or math.prod(s) < 1 << 20]
    cuda = make_run(param_format=param_format, grad=grad, shapes=shapes)
    cpu = cuda.to("cpu")
    for t in range(20):
        grads = random_grads(cuda, t)
        for run in (cuda, cpu):
            run.set_grads(grads)
            run.step()
        if t in (0, 19):
            assert_same(cuda, cpu)


@pytest.mark.parametrize("full_precision", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("rule", list(RULES))
def test_rules_and_wide_state(rule, full_precision):
    cuda = make_run(
        rule, full_precision=full_precision, shapes=[[64, 264], [33, 77], [5, 4096], [1000]]
    )
    assert_same_steps(cuda, 5)


@pytest.mark.parametrize("block", [32, 128, 256, 512, 2048])
def test_blocks_and_shards(block):
    """Short blocks, local parts that begin anywhere in the whole, misaligned memory."""
    cuda = Run("adamw")
    parts = [(9, 520, 0, 520), (9, 520, 3, 1021), (4, 300, 300, 900), (3, 512, 1 << 36, 512)]
    for i, (rows, cols, first, global_cols) in enumerate(parts):
        memory = torch.randn(rows * cols + 1, device=DEVICE).bfloat16()
        where = {"first": first, "global_cols": global_cols, "block": block, "stream": i}
        for param in (memory[:-1].clone(), memory[1:]):
            param = param.view(rows, cols)
            cuda.add(param, torch.zeros_like(param), "bfloat16_stochastic", coded(), **where)
    assert any(p.data_ptr() % 16 for p in cuda.params)
    assert_same_steps(cuda, 4)


@pytest.mark.parametrize("entry", CODED, ids=lambda e: e["name"])
def test_every_format(entry):
    """Blocks of two lengths, both roundings, and every scale that is measured."""
    name, signed = entry["name"], entry["signed"]
    slot = [s["signed"] for s in RULES["adamw"]["slots"]].index(signed)
    ways = [{"format": name, "block": b, "stochastic": b == 64} for b in (64, 512)]
    if entry["cross_tile"]:
        ways += [{"format": name, "scale": kind} for kind in ("row", "column", "tensor", "rank1")]
    cuda = Run("adamw")
    torch.manual_seed(2)
    for i, way in enumerate(ways):
        formats = ["float32", "float32"]
        formats[slot] = way
        param = torch.randn(33, 700, device=DEVICE).bfloat16()
        cuda.add(param, torch.zeros_like(param), "bfloat16_stochastic", formats, stream=i)
    assert_same_steps(cuda, 3)


@pytest.mark.parametrize("entry", CODED, ids=lambda e: e["name"])
def test_rows_and_blocks_that_are_cut(entry):
    formats = partner(entry)
    whole = run_whole(formats, 4)
    check_flat_shards(formats, whole, DEVICE)
    check_columns_inside_blocks(formats, whole, DEVICE)


def test_values_at_the_edges():
    """NaN, infinities, zeros and subnormals in gradients and parameters."""
    edges = [float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-45, 1e-39, 3e38, -3e38]

    def plant(t, start, stride):
        part = t.view(-1)[start::stride]
        part.copy_(torch.tensor(edges).repeat(part.numel())[: part.numel()])

    cuda = make_run(shapes=[[64, 256], [16, 77], [600]])
    for p in cuda.params:
        plant(p, 5, 97)
    cpu = cuda.to("cpu")
    for t in range(4):
        for run in (cuda, cpu):
            grads = random_grads(run, t)
            for g in grads:
                plant(g, 3 + t, 501)
            run.set_grads(grads)
            run.step()
    assert_same(cuda, cpu)


def test_a_thousand_tensors():
    """More than one launch of the job table; every kernel in one call; empty shards among them."""
    cuda = Run("adamw")
    torch.manual_seed(1)
    for i in range(1000):
        shape = [(0, 64), (3, 77), (8, 256), (40,), (2, 1000)][i % 5]
        param_format = list(PARAM)[i % 3]
        formats = ["float32"] * 2 if len(shape) == 1 else coded()
        dtype = getattr(torch, PARAM[param_format]["dtype"])
        param = torch.randn(shape, device=DEVICE).to(dtype)
        cuda.add(param, torch.zeros_like(param), param_format, formats, stream=i)
    assert_same_steps(cuda, 3)


@pytest.mark.parametrize("name", [s["name"] for s in CATALOG["state"] if s["scaled"]])
@pytest.mark.parametrize("block", [32, 64, 256, 2048])
def test_encode_decode(name, block):
    torch.manual_seed(0)
    x = torch.randn(300, 1037) * torch.logspace(-40, 37, 300)[:, None]
    x[3] = 0.0
    x[5, 7], x[6, 300], x[7, 1036] = float("nan"), float("inf"), float("-inf")
    codes, scales = ops.quantize(x, name, block)
    on_cuda = ops.quantize(x.to(DEVICE), name, block)
    assert torch.equal(on_cuda[0].cpu(), codes) and torch.equal(bits(on_cuda[1]), bits(scales))

    values = ops.dequantize(codes, scales, name, block, 1037)
    on_cuda = ops.dequantize(codes.to(DEVICE), scales.to(DEVICE), name, block, 1037).cpu()
    assert torch.equal(values.isnan(), on_cuda.isnan())
    assert torch.equal(bits(values.nan_to_num()), bits(on_cuda.nan_to_num()))


@pytest.fixture(scope="module")
def floats():
    """Every 16th float of either sign up to 1, in blocks whose scale is 1, here and there: made
    once, it takes longer than what is done with it.
    """
    values = torch.arange(0, 0x3F800000, 16, dtype=torch.int32).view(torch.float32)
    rows = -(-values.numel() // 254)
    made = torch.ones(rows, 256)
    made[:, 1:-1] = torch.nn.functional.pad(values, (0, rows * 254 - values.numel())).view(
        rows, 254
    )
    both = [made, made.clone()]
    both[1][:, 1:-1].neg_()
    return [(x, x.to(DEVICE)) for x in both]


@pytest.mark.parametrize("name", [s["name"] for s in CATALOG["state"] if s["scaled"]])
def test_codes_of_floats_everywhere(name, floats):
    for here, there in floats:
        on_cuda = ops.quantize(there, name, 256)[0].cpu()
        assert torch.equal(on_cuda, ops.quantize(here, name, 256)[0])


def test_lr_scale_and_found_inf_on_the_device():
    cuda = make_run(shapes=[[64, 256], [16, 77], [600]])
    cpu = cuda.to("cpu")
    # lr, grad_scale, found_inf
    calls = [(1e-3, 1024.0, 0.0), (3e-3, 512.0, 1.0), (0.0, 512.0, 0.0), (2e-3, 512.0, 0.0)]
    for t, call in enumerate(calls):
        before = [bits(p) for p in cuda.params]
        for run in (cuda, cpu):
            run.set_grads(random_grads(run, t, size=10.0))
            lr, scale, found = (torch.tensor(x, device=run.params[0].device) for x in call)
            run.step(lr=lr, grad_scale=scale, found_inf=found, maximize=True)
        assert_same(cuda, cpu)
        kept = all(torch.equal(a, bits(p)) for a, p in zip(before, cuda.params, strict=True))
        assert kept == (call[0] == 0.0 or call[2] == 1.0)
    assert [float(s) for s in cuda.steps] == [3.0] * 3  # the step with found_inf does not count


@pytest.mark.parametrize("rule", ["adamw", "adafactor_momentum", "came"])
def test_graph_capture(rule):
    """A captured step, in all its phases, replays with new gradients, another lr,
    and its own count of steps.
    """
    cuda = make_run(rule, shapes=[[896, 896], [1000, 77], [1000]])
    cpu = cuda.to("cpu")
    lr = torch.tensor(1e-3, device=DEVICE)
    rates = [1e-3, 1e-3, 5e-4, 0.0, 2e-4]

    def first():
        cuda.set_grads(random_grads(cuda, 0))
        cuda.step(lr=lr)

    graph = captured(first, lambda: cuda.step(lr=lr))
    for t in range(1, 5):
        cuda.set_grads(random_grads(cuda, t))
        lr.fill_(rates[t])
        graph.replay()
    for t in range(5):
        cpu.set_grads(random_grads(cpu, t))
        cpu.step(lr=torch.tensor(rates[t]))
    assert_same(cuda, cpu)


def test_another_stream():
    """The step is ordered behind what its own stream does, and only that."""
    cuda = make_run(shapes=[[896, 896], [1000]])
    cpu = cuda.to("cpu")
    grads = [g.to(DEVICE) for g in random_grads(cuda, 0)]
    cuda.step()  # gradients of zero; loads the kernels
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), not_waited_for() as over:
        cuda.set_grads(grads)  # on another stream than this one the step would not see them
        cuda.step()
    torch.cuda.current_stream().synchronize()
    assert not over.query(), "another stream waits for the step"
    stream.synchronize()
    cpu.step()
    cpu.set_grads([g.cpu() for g in grads])
    cpu.step()
    assert_same(cuda, cpu)


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("cls", [lowbit.AdamW, lowbit.Lion, lowbit.Adafactor])
def test_a_step_on_another_stream_takes_that_steps_gradients(cls, in_graph):
    """They are other tensors in each step, as `zero_grad` leaves them, and the earlier ones are
    still there; the stream of the table changes, as in torch's warm-up for a graph.
    """
    torch.manual_seed(0)
    shapes = [(64, 96), (80, 1, 4), (300,)]
    values = [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]
    grads = [[torch.randn(shape, dtype=torch.bfloat16) for shape in shapes] for _ in range(8)]
    trained = {}
    for device in ("cpu", "cuda"):
        named = [(str(i), v.to(device, copy=True)) for i, v in enumerate(values)]
        opt = cls(named, lr=1e-2, min_numel=0)
        kept, side = [], torch.cuda.Stream()
        for step, at in enumerate(grads):
            for (_, p), g in zip(named, at, strict=True):
                p.grad = g.to(device, copy=True)
                kept.append(p.grad)
            torch.cuda.synchronize()
            if device == "cuda" and in_graph and step == 2:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    opt.step()
                graph.replay()
            else:
                with torch.cuda.stream(side if step in (3, 4, 6) else torch.cuda.current_stream()):
                    opt.step()
            torch.cuda.synchronize()
        trained[device] = [p.cpu() for _, p in named]
    for on_cpu, on_cuda in zip(trained["cpu"], trained["cuda"], strict=True):
        assert torch.equal(bits(on_cuda), bits(on_cpu))


@pytest.mark.parametrize("rule", ["adamw", "adafactor_momentum", "came"])
def test_nothing_waits_for_the_device(rule):
    cuda = make_run(rule, shapes=[[896, 896], [1000, 77], [1000]])
    lr, scale, found = (torch.tensor(x, device=DEVICE) for x in (1e-3, 2.0, 0.0))
    cuda.step(lr=lr, grad_scale=scale, found_inf=found)
    with not_waited_for():
        cuda.step(lr=lr, grad_scale=scale, found_inf=found)
        cuda.step()
    torch.cuda.synchronize()
    assert [float(s) for s in cuda.steps] == [3.0] * 3


def test_more_than_two_to_the_31_elements():
    """The last rows of a parameter of over 2^31 elements, against those rows alone on the CPU."""
    rows, cols, tail = (1 << 19) + 3, 4096, 4
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free GPU memory")
    torch.manual_seed(0)
    cuda, cpu = Run("adamw"), Run("adamw")
    param = torch.randn(rows, cols, device=DEVICE, dtype=torch.bfloat16)
    grad = torch.randn(rows, cols, device=DEVICE, dtype=torch.bfloat16)
    last = (param[-tail:].cpu(), grad[-tail:].cpu())
    cpu.add(*last, "bfloat16_stochastic", coded(), first=(rows - tail) * cols)
    cuda.add(param, grad, "bfloat16_stochastic", coded())
    for _ in range(2):
        cuda.step()
        cpu.step()
    for a, b in zip([*cuda.params, *cuda.state], [*cpu.params, *cpu.state], strict=True):
        assert torch.equal(bits(a[-tail:]), bits(b))


def test_optimizer_trains_the_same_on_both():
    """lowbit.AdamW over a model with the same gradients: the same weights and state."""
    models = {}
    for device in (DEVICE, "cpu"):
        torch.manual_seed(0)
        layers = (torch.nn.Linear(256, 512), torch.nn.LayerNorm(512), torch.nn.Linear(512, 77))
        models[device] = torch.nn.Sequential(*layers).to(device, torch.bfloat16)
    optimizers = {d: lowbit.AdamW(m.parameters(), lr=1e-2) for d, m in models.items()}
    for t in range(5):
        generator = torch.Generator().manual_seed(t)
        for a, b in zip(models[DEVICE].parameters(), models["cpu"].parameters(), strict=True):
            b.grad = torch.randn(b.shape, generator=generator).bfloat16()
            a.grad = b.grad.to(DEVICE)
        for optimizer in optimizers.values():
            optimizer.step()
    states = {d: o.state_dict()["state"] for d, o in optimizers.items()}
    for a, b in zip(models[DEVICE].parameters(), models["cpu"].parameters(), strict=True):
        assert torch.equal(bits(a), bits(b))
    for i, of_cpu in states["cpu"].items():
        assert states[DEVICE][i].keys() == of_cpu.keys()
        for key, value in of_cpu.items():
            assert torch.equal(states[DEVICE][i][key].cpu(), value), f"parameter {i}: {key}"


def test_a_scale_that_the_host_knows_does_not_wait():
    p = torch.nn.Parameter(torch.randn(256, 256, device=DEVICE).bfloat16())
    p.grad = torch.randn_like(p)
    opt = lowbit.AdamW([p])
    opt.step(grad_scale=2.0)
    with not_waited_for():
        opt.step(grad_scale=3.0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_second_device():
    cuda = make_run(shapes=[[64, 256], [600]], device="cuda:1")
    cpu = cuda.to("cpu")
    for run in (cuda, cpu):
        run.set_grads(random_grads(run, 0))
        run.step()
    assert_same(cuda, cpu)


# ---- gradients outside of a step ----


@pytest.mark.parametrize("format", ["bfloat16_stochastic", "bfloat16", "bfloat16_kahan", "float32"])
def test_added_gradients_have_the_bits_of_the_cpu(format):
    rng = torch.Generator().manual_seed(1)
    for grad_dtype in (torch.float32, torch.bfloat16, torch.float16):
        for rows, cols, full_precision, first in (
            (1, 100_003, 100_003, 0),
            (37, 90, 200, 13),
            (64, 256, 256, 256),
        ):
            grad = torch.randn(rows, cols, generator=rng).to(grad_dtype)
            held = torch.randn(rows, cols, generator=rng)
            held = held.to(torch.float32 if format == "float32" else torch.bfloat16)
            beside = [torch.zeros_like(held)] if format == "bfloat16_kahan" else []
            plan = torch.tensor([[rows, cols, full_precision, first, 5, 2]])
            there, also = held.to(DEVICE), [t.to(DEVICE) for t in beside]
            ops.accumulate([held], beside, [grad], plan, format, scale=1 / 3, seed=4)
            ops.accumulate([there], also, [grad.to(DEVICE)], plan, format, scale=1 / 3, seed=4)
            assert torch.equal(there.cpu(), held)
            assert all(torch.equal(a.cpu(), b) for a, b in zip(also, beside, strict=True))


@pytest.mark.parametrize("bound", [0.5, 0.3])
@pytest.mark.parametrize("power", [1.0, 2.0, math.inf])
def test_norms_have_the_bits_of_the_cpu_and_clipping_does_not_wait(power, bound):
    rng = torch.Generator().manual_seed(2)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        here, there = [], []
        for shape in SHAPES:
            p = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
            p.grad = torch.randn(shape, generator=rng).mul_(3.0).to(dtype)
            here.append(p)
            q = torch.nn.Parameter(p.detach().to(DEVICE))
            q.grad = p.grad.to(DEVICE)
            there.append(q)
        warm = [torch.nn.Parameter(q.detach()) for q in there]  # its operators' kernels are loaded
        for p, q in zip(warm, there, strict=True):
            p.grad = q.grad.clone()
        lowbit.clip_grad_norm_(warm, bound, power)
        with not_waited_for(0.2):
            norm = lowbit.clip_grad_norm_(there, bound, power)
        assert torch.equal(lowbit.clip_grad_norm_(here, bound, power), norm.cpu())
        for p, q in zip(here, there, strict=True):
            assert torch.equal(p.grad, q.grad.cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_exact_means(dtype):
    """Every pattern of 16 bits as an addend, kept as words or added at once: the CPU's bits."""
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    kinds = (torch.bfloat16, torch.float16)
    rows = [
        torch.stack([patterns, patterns.roll(12345), patterns.roll(-777)]).view(k) for k in kinds
    ]
    rows.append(torch.randn(3, 65536))
    for addends in rows:
        made = []
        for device in ("cpu", DEVICE):
            words = torch.zeros(65536, dtype=torch.int64, device=device)
            kept = torch.empty(65536, dtype=dtype, device=device)
            at_once = torch.empty_like(kept)
            given = addends.to(device)
            ops.mean_add([words], [given], 6)
            ops.mean_of([words], [given.flip(0)], [kept], 6, 6)
            ops.mean_of([], [given], [at_once], 6, 5)
            made.append([t.cpu().view(torch.uint8) for t in (words, kept, at_once)])
        assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


def test_exact_training():
    made = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(300, 256).bfloat16().to(device))
        module = torch.nn.ParameterList([p])
        opt = lowbit.AdamW([("w", p)], lr=1e-2)
        accumulator = lowbit.accumulate(module, rounding="exact", average=3)
        for step in range(3):
            for index in (2, 0, 1):
                generator = torch.Generator().manual_seed(3 * step + index)
                grad = torch.randn(300, 256, generator=generator).bfloat16()
                with accumulator.micro(index=index):
                    p.backward(grad.to(device))
            opt.step()
            opt.zero_grad()
        made.append([p.detach().cpu(), *(t.cpu() for t in opt.state[p].values())])
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


def test_accumulation_and_steps_in_backward():
    made = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(300, 256).bfloat16().to(device))
        module = torch.nn.ParameterList([p])
        opt = lowbit.AdamW([("w", p)], lr=1e-2)
        accumulator = lowbit.accumulate(module, average=3)
        lowbit.step_in_backward(module, opt, max_norm=1.0)
        for step in range(3):
            for i in range(3):
                grad = torch.randn(300, 256, generator=torch.Generator().manual_seed(3 * step + i))
                with accumulator.micro(last=i == 2):
                    p.backward(grad.bfloat16().to(device))
            assert p.grad is None
            opt.step()
        made.append([p.detach().cpu(), *(t.cpu() for t in opt.state[p].values())])
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))
