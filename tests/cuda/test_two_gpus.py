"""What lies on another GPU than the parameters is refused by its device, before anything is
launched: a kernel would read memory that is not there.

Needs no GPU: the tensors only say that they are on one (tests/cuda/gpu_stand_in.py). Steps on a
second GPU are in tests/cuda/test_cuda.py."""

import types

import pytest
import torch

import lowbit
from lowbit import ops
from lowbit.step.lowrank_cuda import CudaWork
from lowbit.step.numbers import lr_beside
from tests.cuda.gpu_stand_in import on_gpu
from tests.support.plans import fresh_state, plan_row

pytestmark = pytest.mark.slow

ROWS, COLS = 4, 64


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch):
    """torch starts CUDA for a tensor that says it is there, which a build without CUDA refuses."""
    if torch.version.cuda is None:
        monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


class Call:
    """A step whose tensors are all on cuda:0; `elsewhere` moves one to cuda:1."""

    def __init__(self, rule="adamw", formats=("dynamic8", "dynamic8_unsigned")):
        choices = [(name, 64) if name.startswith("dynamic8") else name for name in formats]
        self.rule, self.plan = rule, plan_row(ROWS, COLS, choices, "bfloat16_stochastic")
        state = fresh_state(rule, (ROWS, COLS), choices, "bfloat16_stochastic")
        self.lists = {
            "params": [torch.zeros(ROWS, COLS).bfloat16()],
            "grads": [torch.zeros(ROWS, COLS).bfloat16()],
            "state": state,
            "steps": [torch.zeros(())],
            "workspace": list(ops.workspace(rule, self.plan, torch.device("cpu")).values()),
        }
        self.numbers = {name: torch.zeros(()) for name in ("lr", "grad_scale", "found_inf")}

    def step(self, elsewhere="", index=0):
        lists = {
            name: [on_gpu(t, int(name == elsewhere and i == index)) for i, t in enumerate(tensors)]
            for name, tensors in self.lists.items()
        }
        numbers = {name: on_gpu(t, int(name == elsewhere)) for name, t in self.numbers.items()}
        rule = next(r for r in ops.catalog()["rules"] if r["name"] == self.rule)
        hyper = [0.5] * len(rule["hyper"])
        torch.ops.lowbit.step(
            ops.rule(self.rule)["index"],
            *(lists[k] for k in ("params", "grads", "state", "steps", "workspace")),
            self.plan,
            hyper,
            **numbers,
        )


@pytest.mark.parametrize("what", ["lr", "grad_scale", "found_inf"])
def test_numbers_of_another_gpu(what):
    with pytest.raises(
        RuntimeError, match=rf"{what} is on cuda:1 and the parameters are on cuda:0"
    ):
        Call().step(what)


def test_the_step_of_another_gpu():
    with pytest.raises(
        RuntimeError, match="the step of parameter 0 is on cuda:1 and the parameter is on cuda:0"
    ):
        Call().step("steps")


@pytest.mark.parametrize("what, index", [("grads", 0), ("state", 0), ("state", 3)])
def test_tensors_of_another_gpu(what, index):
    with pytest.raises(
        RuntimeError, match=r"on another device than the parameter \(cuda:1 and cuda:0\)"
    ):
        Call().step(what, index)


def test_workspace_of_another_gpu():
    call = Call("adafactor", ())
    assert len(call.lists["workspace"]) == 7
    with pytest.raises(
        RuntimeError,
        match="workspace tensor 'floats' is on cuda:1 and the parameters are on cuda:0",
    ):
        call.step("workspace", 6)


def test_workspace_of_the_cpu_is_refused_too():
    call = Call("adafactor", ())
    workspace = [on_gpu(t, 0) for t in call.lists["workspace"]]
    lists = [call.lists[k] for k in ("params", "grads", "state", "steps")]
    rule = next(r for r in ops.catalog()["rules"] if r["name"] == call.rule)
    with pytest.raises(
        RuntimeError,
        match="workspace tensor 'totals' is on cuda:0 and the parameters are on the CPU",
    ):
        torch.ops.lowbit.step(
            rule["index"], *lists, workspace, call.plan, [0.5] * len(rule["hyper"])
        )


def test_all_on_one_gpu_gets_as_far_as_the_library():
    """Nothing is refused by its device: what is missing here is CUDA itself."""
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA, and would step memory of the host")
    with pytest.raises(RuntimeError, match="lowbit::step on CUDA: "):
        Call().step()


def test_accumulation():
    held, beside, grad = torch.zeros(8).bfloat16(), torch.zeros(8).bfloat16(), torch.zeros(8)
    plan = torch.tensor([[1, 8, 8, 0, 0, 0]])

    def add(of_beside, of_grad):
        lists = ([on_gpu(held, 0)], [on_gpu(beside, of_beside)], [on_gpu(grad, of_grad)])
        ops.accumulate(*lists, plan, "bfloat16_kahan", scale=1.0, seed=0)

    with pytest.raises(RuntimeError, match="buffer 0 is on cuda:0 and its gradient on cuda:1"):
        add(0, 1)
    with pytest.raises(RuntimeError, match="compensation of buffer 0, on its device"):
        add(1, 0)


def test_codes_and_scales():
    codes, scales = ops.quantize(torch.zeros(2, 64), "dynamic8", 64)
    with pytest.raises(RuntimeError, match="codes are on cuda:0 and scales on cuda:1"):
        ops.dequantize(on_gpu(codes, 0), on_gpu(scales, 1), "dynamic8", 64, 64)


def test_a_learning_rate_goes_to_every_gpu_of_a_model(monkeypatch):
    """One tensor of a schedule, parameters on two GPUs: each batch is given it where its parameters
    are.
    """
    moved = []

    def to(t, device):
        moved.append((t.device.index, device.index))
        return t

    monkeypatch.setattr(torch.Tensor, "to", to)
    lr = on_gpu(torch.tensor(1e-3), 0)
    for index in (0, 1):
        lowbit.optim.stepping.lr_beside(lr, torch.device("cuda", index))
    on_host = torch.tensor(1e-3)
    assert lowbit.optim.stepping.lr_beside(on_host, torch.device("cuda", 1)) is on_host
    assert moved == [(0, 0), (0, 1)]


def test_muons_matrices():
    x, moments = torch.zeros(4, 8).bfloat16(), torch.zeros(4)
    with pytest.raises(RuntimeError, match=r"the moments of rows .* on cuda:0, not 4 on cuda:1"):
        ops.normalize_rows(on_gpu(x, 0), on_gpu(moments, 1), 0.95)
    with pytest.raises(RuntimeError, match=r"on one device with rows"):
        ops.bfloat16_product(on_gpu(x, 0), on_gpu(x, 1))
    if torch.version.cuda is None:  # what is missing here is CUDA itself
        with pytest.raises(RuntimeError, match="lowbit::newton_schulz on CUDA: "):
            ops.newton_schulz(on_gpu(x, 0), [1.0, 2.0, 3.0], 1.0, 1e-7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_learning_rates_on_a_gpu_are_float32(dtype, monkeypatch):
    """Kernels read nothing else. On the CPU a float64 stays what it is."""
    there, same = on_gpu(torch.tensor(1e-3), 0), on_gpu(torch.tensor(1e-3, dtype=dtype), 0)
    device, asked = torch.device("cuda", 0), []

    def to(t, what):
        asked.append(what)
        return there if what is torch.float32 else t

    monkeypatch.setattr(torch.Tensor, "to", to)
    work = types.SimpleNamespace(group={"lr": same}, value=there)
    for lr in (lr_beside(same, device), CudaWork.lr.fget(work)):
        assert lr is there
    assert asked == [torch.float32, device] * 2
    on_host = torch.tensor(1e-3, dtype=torch.float64)
    assert lr_beside(on_host, device) is on_host
