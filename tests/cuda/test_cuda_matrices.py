"""Optimizers of whole matrices on a GPU, low rank and Muon: the bits of the CPU, in graphs,
never waiting.

With tests/cuda/test_cuda.py: `LOWBIT_REQUIRE=cuda python -m pytest tests/cuda/test_cuda*.py`.
Without a GPU, tests/cpp/cuda/test_cuda_lowrank.cpp and test_cuda_muon.cpp run the same kernels on
the CPU.
"""

import pytest
import torch

import lowbit
from lowbit import ops
from tests.cuda.waiting import not_waited_for
from tests.support.require import gpu

pytestmark = pytest.mark.slow

DEVICE = gpu("; the emulator tests cover the kernels")
LOWRANK = {
    "apollo": lambda params, **o: lowbit.APOLLO(params, rank=20, update_proj_gap=2, **o),
    "narrow": lambda params, **o: lowbit.APOLLO(params, rank=4, scale_front=True, **o),
    "quarter": lambda params, **o: lowbit.APOLLO(params, rank="quarter", disable_nl=True, **o),
    "torch": lambda params, **o: lowbit.APOLLO(
        params, rank=8, projection="torch", update_proj_gap=2, **o
    ),
    "mini": lambda params, **o: lowbit.APOLLOMini(params, update_proj_gap=2, **o),
    "fira": lambda params, **o: lowbit.Fira(params, rank=24, update_proj_gap=3, alpha=0.5, **o),
}
MATRICES = [(70, 640), (600, 264), (1100, 1200), (300, 48), (48, 48), (33,), (5, 7)]


class Twins:
    """The same parameters under the same optimizer on the GPU and on the CPU."""

    def __init__(self, make, dtype=torch.bfloat16, shapes=MATRICES, **options):
        rng = torch.Generator().manual_seed(5)
        start = [torch.randn(shape, generator=rng).to(dtype) for shape in shapes]
        self.params = {d: [torch.nn.Parameter(p.to(d)) for p in start] for d in (DEVICE, "cpu")}
        self.opts = {d: make(p, lr=1e-2, **options) for d, p in self.params.items()}
        self.rng = rng

    def set_grads(self, size=1.0):
        for here, there in zip(self.params["cpu"], self.params[DEVICE], strict=True):
            here.grad = (torch.randn(here.shape, generator=self.rng) * size).to(here.dtype)
            if there.grad is None:
                there.grad = here.grad.to(DEVICE)
            else:
                there.grad.copy_(here.grad)

    def step(self, size=1.0):
        self.set_grads(size)
        for opt in self.opts.values():
            opt.step()

    def differing(self):
        wrong = []
        for here, there in zip(self.params["cpu"], self.params[DEVICE], strict=True):
            pairs = {"parameter": (here, there)}
            of_cpu, of_gpu = self.opts["cpu"].state[here], self.opts[DEVICE].state[there]
            assert of_cpu.keys() == of_gpu.keys()
            pairs |= {key: (of_cpu[key], of_gpu[key]) for key in of_cpu}
            for name, (a, b) in pairs.items():
                if not torch.equal(
                    *(t.detach().cpu().reshape(-1).view(torch.uint8) for t in (a, b))
                ):
                    wrong.append(f"{name} of {tuple(here.shape)}")
        return wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("make", LOWRANK.values(), ids=LOWRANK)
def test_low_rank_steps_have_the_bits_of_the_cpu(make, dtype):
    twins = Twins(make, dtype)
    for step in range(5):
        twins.step(size=30.0 if step == 3 else 1.0)  # the limiter divides
        assert twins.differing() == []


@pytest.mark.parametrize("param_format", ["bfloat16_kahan", "bfloat16_split8", "bfloat16_split16"])
@pytest.mark.parametrize("make", [LOWRANK["apollo"], LOWRANK["fira"]], ids=["apollo", "fira"])
def test_low_rank_parameter_formats(make, param_format):
    twins = Twins(make, param_format=param_format, weight_decay=0.1, maximize=True)
    for _ in range(3):
        twins.step()
    assert twins.differing() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_low_rank_steps_where_memory_is_not_aligned(dtype):
    """Rows of a multiple of 8 values that do not begin on 16 bytes."""
    twins = Twins(LOWRANK["apollo"], dtype, shapes=[(70, 640), (600, 264)])
    for params in twins.params.values():
        for p in params:
            p.data = torch.cat([p.new_zeros(1), p.detach().view(-1)])[1:].view(p.shape)
            assert p.data_ptr() % 16
    for _ in range(3):
        twins.step()
    assert twins.differing() == []


@pytest.mark.parametrize("make", LOWRANK.values(), ids=LOWRANK)
def test_low_rank_steps_under_a_scaler(make):
    """Scaled gradients, a step that is left out, a learning rate on the device,
    and not finite gradients.
    """
    twins = Twins(make)
    for step in range(5):
        twins.set_grads()
        if step == 3:
            for params in twins.params.values():
                params[0].grad[3, 5] = float("inf")
                params[1].grad[7, 2] = float("nan")
        for device, opt in twins.opts.items():
            opt.grad_scale = torch.tensor(3.0, device=device)
            opt.found_inf = torch.tensor(float(step == 1), device=device)
            opt.param_groups[0]["lr"] = torch.tensor(0.0 if step == 2 else 3e-3, device=device)
            opt.step()
        assert twins.differing() == []


def test_more_matrices_than_a_launch_serves():
    shapes = [(10 + i % 30, 5 + i % 17) for i in range(150)]
    for make in (LOWRANK["narrow"], LOWRANK["mini"]):
        twins = Twins(make, shapes=shapes)
        for _ in range(3):
            twins.step()
        assert twins.differing() == []


@pytest.mark.parametrize("name", ["apollo", "narrow", "mini", "fira"])
def test_low_rank_steps_do_not_wait(name):
    twins = Twins(LOWRANK[name])
    twins.step()  # Fira finds its subspace, and reads how often it was stepped
    for _ in range(2):
        twins.set_grads()
        twins.opts["cpu"].step()
        with not_waited_for():
            twins.opts[DEVICE].step()
    assert twins.differing() == []


@pytest.mark.parametrize("name", ["apollo", "narrow", "mini"])
def test_low_rank_steps_in_a_graph(name):
    """A replay counts the step, and draws another projection where it is due."""
    twins = Twins(LOWRANK[name])
    twins.step()
    twins.set_grads()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        twins.opts[DEVICE].step()
    for _ in range(4):
        graph.replay()
        twins.opts["cpu"].step()
        assert twins.differing() == []
        twins.set_grads()


def test_fira_in_a_graph_is_refused():
    twins = Twins(LOWRANK["fira"])
    twins.step()
    twins.set_grads()
    refused = pytest.raises(RuntimeError, match="cannot be captured")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        twins.opts[DEVICE].step()


def test_a_step_that_somebody_set_is_read_again():
    """Fira and torch's generator go by the number of the step, which the host counts by itself."""
    for name in ("torch", "fira"):
        twins = Twins(LOWRANK[name], shapes=[(70, 640)])
        twins.step()
        for opt in twins.opts.values():
            for state in opt.state.values():
                state["step"].fill_(5.0)
        twins.step()
        twins.step()
        assert twins.differing() == []


# ---- Muon ----

HIDDEN = [(512, 2048), (2048, 512), (77, 1000), (1000, 77), (4, 96, 160), (384, 128)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"normuon_beta2": 0.95, "cautious_weight_decay": True}, {"state_format": "float32"}],
    ids=str,
)
def test_muons_exact_steps_have_the_bits_of_the_cpu(dtype, options):
    def make(params, lr):
        named = [(f"p{i}", p) for i, p in enumerate(params)]
        split = {"p4": 2, "p5": 3}
        return lowbit.Muon(named, lr=lr, orthogonalize="exact", split=split, **options)

    twins = Twins(make, dtype, shapes=HIDDEN)
    for _ in range(3):
        twins.step()
        assert twins.differing() == []


@pytest.mark.parametrize("rows, cols, depth", [(64, 64, 512), (193, 77, 1000), (33, 130, 7)])
def test_the_product_of_bfloat16_has_the_bits_of_the_cpu(rows, cols, depth):
    a, b = (torch.randn(n, depth).bfloat16() for n in (rows, cols))
    assert torch.equal(
        ops.bfloat16_product(a.to(DEVICE), b.to(DEVICE)).cpu(), ops.bfloat16_product(a, b)
    )
