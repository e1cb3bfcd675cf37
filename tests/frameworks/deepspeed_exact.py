"""What a rank does in test_deepspeed_layouts.py: ZeRO over gradients that are the same numbers for
any number of ranks and micro-batches, beside one process.

Every rank and micro-batch has other data: each element's gradient comes from one of them, as a
small integer times a power of two, so that sums and means are exact in every dtype.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import os
import pathlib
import zlib
from unittest import mock

os.environ["DS_ACCELERATOR"] = "cpu"  # read by the import

import deepspeed
import deepspeed.runtime.zero.muon.muon_optimizer  # its first engine would, with torch's compiler
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.utils import groups as deepspeed_groups
from torch import nn
from torch.distributed.fsdp import fully_shard

import lowbit
from lowbit.integrations import deepspeed as integration
from tests.support.digests import digest

HALF, ALL, MORE = 3, 6, 5  # steps: saved, taken, and taken under another layout
SHAPES = {"a": (67, 130), "bias": (67,), "b": (131, 65), "deep": (3, 40, 37), "one": (1,)}
LOSE = 1  # the step whose gradients overflow

RULES = {
    "8bit": functools.partial(lowbit.AdamW, weight_decay=0.1),
    "4bit": functools.partial(lowbit.AdamW, weight_decay=0.1, state_format="4bit"),
    "lpmm4": functools.partial(lowbit.AdamW, state_format="lpmm4"),
    "factored8": functools.partial(lowbit.AdamW, state_format="factored8"),
    "Lion": functools.partial(lowbit.Lion, weight_decay=0.1),
    "LAMB": functools.partial(lowbit.LAMB, weight_decay=0.1),
    "Adafactor": functools.partial(lowbit.Adafactor, beta1=0.9),
    "CAME": lowbit.CAME,
    "Kahan": functools.partial(lowbit.AdamW, param_format="bfloat16_kahan"),
    "split8": functools.partial(lowbit.AdamW, param_format="bfloat16_split8"),
    "APOLLO": functools.partial(lowbit.APOLLO, rank=4),
    "Muon": None,
}
CPU = {"offload_optimizer": {"device": "cpu"}}
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
CLIP, TWO = {"gradient_clipping": 0.25}, {"gradient_accumulation_steps": 2}
# Case: ZeRO's options, dtype of the model, rule, what else is configured.
CASES: dict[str, tuple[dict, str, str, dict]] = {
    "1": ({"stage": 1}, "float32", "8bit", {}),
    "2": ({"stage": 2, "round_robin_gradients": True}, "float32", "4bit", {}),
    "3": ({"stage": 3, "sub_group_size": 4000}, "float32", "8bit", {}),
    "1 offload": ({"stage": 1, **CPU}, "bfloat16", "4bit", CLIP | TWO),
    "2 offload": ({"stage": 2, **CPU}, "bfloat16", "8bit", CLIP | TWO),
    "3 offload": ({"stage": 3, **CPU}, "bfloat16", "4bit", CLIP | TWO),
    "1 float32 sums": ({"stage": 1}, "bfloat16", "8bit", FP32_SUMS | CLIP | TWO),
    "1 float16": ({"stage": 1}, "float16", "8bit", CLIP),
    "2 float16": ({"stage": 2}, "float16", "4bit", TWO),
    "3 float16": ({"stage": 3}, "float16", "8bit", CLIP | TWO),
    "2 float16 offload": ({"stage": 2, **CPU}, "float16", "8bit", CLIP),
    "1 Adafactor": ({"stage": 1}, "float32", "Adafactor", CLIP | TWO),
    "3 Adafactor": ({"stage": 3, "sub_group_size": 4000}, "bfloat16", "Adafactor", CLIP),
    "2 Lion": ({"stage": 2}, "bfloat16", "Lion", TWO),
    "1 LAMB": ({"stage": 1}, "bfloat16", "LAMB", FP32_SUMS),
    "3 LAMB": ({"stage": 3, **CPU}, "float32", "LAMB", {}),
    "2 CAME": ({"stage": 2, "round_robin_gradients": True}, "float32", "CAME", CLIP),
    "1 lpmm4": ({"stage": 1}, "float32", "lpmm4", {}),
    "3 factored8": ({"stage": 3}, "float32", "factored8", CLIP),
}
REFUSED = {
    "Kahan": ({"stage": 2}, "bfloat16", "Kahan", {}),
    "split8": ({"stage": 3}, "bfloat16", "split8", {}),
    "APOLLO": ({"stage": 2}, "float32", "APOLLO", {}),
    "Muon": ({"stage": 3}, "float32", "Muon", {}),
}


class Term(nn.Module):
    """A parameter whose gradient is what the forward pass is given."""

    def __init__(self, name: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        self.weight = nn.Parameter(torch.randn(SHAPES[name], generator=generator))

    def forward(self, grad: torch.Tensor) -> torch.Tensor:
        return (self.weight.float() * grad).sum()


class Terms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.terms = nn.ModuleDict({name: Term(name) for name in SHAPES})

    def forward(self, grads: dict[str, torch.Tensor]) -> torch.Tensor:
        terms = [term(grads[name]) for name, term in self.terms.items()]
        return sum(terms)  # type: ignore[return-value]


def gradient(name: str, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    return torch.randint(-7, 8, SHAPES[name], generator=generator) / 64


def share(name: str, step: int, micro: int, micros: int) -> torch.Tensor:
    """What this rank's micro-batch has of it, so that the mean over all is the gradient."""
    rank, ranks, whole = dist.get_rank(), dist.get_world_size(), gradient(name, step)
    at = torch.arange(whole.numel()).reshape(whole.shape) + step
    mine = (at % ranks == rank) & (at // ranks % micros == micro)
    return torch.where(mine, whole * ranks * micros, 0.0)


def optimizer(model: nn.Module, rule: str):
    """Groups with settings of their own, so that none takes another's."""
    if rule == "Muon":
        return lowbit.MuonWithAdamW(lowbit.muon_param_groups(model), lr=1e-2, seed=3)
    groups: list[list] = [[], []]
    for name, p in model.named_parameters():
        groups[name.endswith(("bias.weight", "one.weight"))].append((name, p))
    first, second = groups
    return RULES[rule](
        [{"params": first}, {"params": second, "lr": 2e-2}], lr=1e-2, seed=3, min_numel=1024
    )


# One process


class Alone:
    """Float32 weights, first in the model's dtype,
    stepped by one process with what ZeRO's ranks have together.
    """

    def __init__(self, rule: str, dtype: str = "float32") -> None:
        self.model = Terms().to(getattr(torch, dtype)).float()
        self.opt, self.steps = optimizer(self.model, rule), 0

    def step(self, number: int) -> None:
        """Without clipping."""
        for name, term in self.model.terms.items():
            term.weight.grad = gradient(name, number)
        self.opt.step()
        self.steps += 1

    def clipped(self, number: int, norm: torch.Tensor | float, limit: float, reader: str) -> None:
        """Clipped by the norm that ZeRO found, in its order of operations."""
        found = {name: gradient(name, number) for name in SHAPES}
        true = math.sqrt(sum(g.square().sum().item() for g in found.values()))
        assert abs(float(norm) - true) <= 1e-5 * true, f"ZeRO's norm is {norm}, not {true}"
        t = torch.as_tensor(norm)  # stage 3 has it in float64
        for name, term in self.model.terms.items():
            grad = found[name]
            if limit and reader == "_of_bf16_optimizer":
                assert limit / (t + 1e-6) < 1
                grad = grad * (limit / (t + 1e-6))
            elif limit:
                grad = grad * (1.0 / ((t + 1e-6) / limit).clamp(min=1.0))
            term.weight.grad = grad
        self.opt.step()
        self.steps += 1

    def digests(self) -> dict[str, str]:
        return digest(self.opt, self.steps)


# ZeRO


@contextlib.contextmanager
def world():
    """DeepSpeed in this process group. Its records of groups go with it."""
    before = dict(vars(deepspeed_groups))
    # Stage 3 compares the numbers of parameters and modules, which count all that a process has
    # had, and some ranks have had more.
    deepspeed.zero.Init.param_id = 0
    DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][:] = [0]
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled
    accelerator = deepspeed.accelerator.get_accelerator()
    try:
        # A CPU without float16 products is told that it has them: nothing here multiplies matrices.
        with mock.patch.object(type(accelerator), "is_fp16_supported", lambda self: True):
            deepspeed.init_distributed(dist_backend="gloo")
            yield
    finally:
        vars(deepspeed_groups).update(before)
        deepspeed.comm.comm.cdb = None
        gc.collect()


class Engine:
    """A case under ZeRO, bound."""

    def __init__(self, case: str, rule: str | None = None, weights: dict | None = None) -> None:
        zero, dtype, own, more = {**CASES, **REFUSED}[case]
        self.dtype = getattr(torch, dtype)
        model = Terms()
        if weights is not None:
            model.load_state_dict(weights)
        self.opt = optimizer(model.to(self.dtype), rule or own)
        self.micros = more.get("gradient_accumulation_steps", 1)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": dtype == "bfloat16"},
            "fp16": {"enabled": dtype == "float16", "initial_scale_power": 8, "hysteresis": 1},
            "gradient_clipping": 0.0,
            **more,
        }
        self.engine, *_ = integration.initialize(model=model, optimizer=self.opt, config=config)
        self.reader = integration._reader(self.engine.optimizer).__name__
        self.taken = 0

    def step(self, number: int, lose: bool = False) -> torch.Tensor | float | None:
        """The norm that it found, or None where it skipped the step."""
        skipped = self.engine.skipped_steps
        for micro in range(self.micros):
            grads = {name: share(name, number, micro, self.micros) for name in SHAPES}
            if lose and dist.get_rank() == dist.get_world_size() - 1:
                grads["b"][5, 7] = math.inf
            self.engine.backward(self.engine(grads))
            self.engine.step()
        if self.engine.skipped_steps > skipped:
            return None
        self.taken += 1
        return self.engine.get_global_grad_norm()

    def digests(self) -> dict[str, str]:
        with self.opt.whole_groups():
            return digest(self.opt, self.taken)

    def weights(self) -> dict[str, torch.Tensor]:
        """The model's own, which its next forward pass takes."""
        named = dict(self.engine.module.named_parameters())
        with deepspeed.zero.GatheredParameters(
            list(named.values()), enabled=self.reader == "_of_stage_3"
        ):
            return {name: p.detach().clone() for name, p in named.items()}

    def rounded(self, model: nn.Module) -> bool:
        """Whether the model's weights are the float32 weights of one process in its dtype."""
        want = dict(model.named_parameters())
        return all(torch.equal(p, want[name].to(p.dtype)) for name, p in self.weights().items())


# What the test runs


def train(cases: list[str], folder: str) -> dict[str, dict]:
    """What is not as in one process after 3 and 6 steps.
    Cases of a stage alone are saved after 3.
    """
    return {case: _train(case, pathlib.Path(folder)) for case in cases}


def _train(case: str, folder: pathlib.Path) -> dict:
    _, dtype, rule, config = CASES[case]
    limit, same = config.get("gradient_clipping", 0.0), []
    loses = dtype == "float16"
    with world():
        one, run = Alone(rule, dtype), Engine(case)
        for number in range(ALL):
            if number == HALF and case in ("1", "2", "3"):
                with run.opt.whole_groups():
                    save(run.opt, run.weights(), folder / case)
            norm = run.step(number, lose=loses and number == LOSE)
            assert (norm is None) == (loses and number == LOSE), f"step {number}: {norm}"
            if norm is not None:
                one.clipped(number, norm, limit, run.reader)
            if number in (HALF - 1, ALL - 1):
                same.append(run.digests() == one.digests() and run.rounded(one.model))
        with run.opt.whole_groups():
            kept = [t for _, p, _, _ in run.opt.members() for t in run.opt.state_of(p).values()]
        return {
            "same": same,
            "reader": run.reader,
            "devices": sorted({t.device.type for t in kept}),
        }


def refused() -> dict[str, str]:
    said = {}
    for case in REFUSED:
        with world():
            try:
                Engine(case)
            except ValueError as error:
                said[case] = str(error)
    return said


def save(opt, weights: dict[str, torch.Tensor], folder: pathlib.Path) -> None:
    optim = lowbit.flat.get_state_dict(opt, param_names=True)
    dcp.save({"optim": optim, "model": weights}, checkpoint_id=folder)


def save_sharded(folder: str) -> None:
    """By FSDP2, after 3 steps."""
    model, opt = sharded("8bit", None)
    for number in range(HALF):
        stepped(model, opt, number)
    weights = {name: p.detach().full_tensor() for name, p in model.named_parameters()}
    save(opt, weights, pathlib.Path(folder) / "FSDP2")


def sharded(rule: str, weights: dict | None):
    """Under FSDP2, or as it is in one process."""
    model = Terms()
    if weights is not None:
        model.load_state_dict(weights)
    if dist.get_world_size() > 1:
        for term in model.terms.values():
            fully_shard(term)
        fully_shard(model)
    return model, optimizer(model, rule)


def stepped(model: nn.Module, opt, number: int) -> None:
    model({name: share(name, number, 0, 1) for name in SHAPES}).backward()
    opt.step()
    opt.zero_grad()


def resume(pairs: list[tuple[str, str]], folder: str) -> list[str]:
    """What is not as in one process after loading each source under a target, and 2 steps later."""
    wrong = []
    for source, target in pairs:
        rule = "8bit" if source == "FSDP2" else CASES[source][2]
        weights = Terms().state_dict()
        dcp.load({"model": weights}, checkpoint_id=pathlib.Path(folder) / source)
        one = Alone(rule)
        for number in range(HALF):
            one.step(number)
        with contextlib.ExitStack() as stack:
            if target in CASES:
                stack.enter_context(world())
                run = Engine(target, rule, weights)
                run.taken, opt = HALF, run.opt
            else:
                model, opt = sharded(rule, weights)
            load(opt, pathlib.Path(folder) / source)
            for number in range(HALF, MORE + 1):
                found = run.digests() if target in CASES else digest(opt, number)
                if found != one.digests():
                    wrong.append(f"{source} by {target} at step {number}")
                if number < MORE:
                    run.step(number) if target in CASES else stepped(model, opt, number)
                    one.step(number)
    return wrong


def load(opt, folder: pathlib.Path) -> None:
    with opt.whole_groups():
        saved = {"optim": lowbit.flat.get_state_dict(opt)}
        dcp.load(saved, checkpoint_id=folder)
        lowbit.flat.set_state_dict(opt, saved["optim"])


def state_bytes() -> dict[str, float]:
    """Of state for each parameter under CPU offload. Of DeepSpeedCPUAdam only the kernel is a
    stand-in: it would be compiled for minutes.
    """
    kernel = mock.patch.object(deepspeed.ops.adam.cpu_adam, "CPUAdamBuilder", mock.MagicMock())
    found = {}
    with world(), kernel:
        for make in (lowbit.AdamW, deepspeed.ops.adam.DeepSpeedCPUAdam):
            model = nn.Linear(512, 1024, bias=False)
            config = {
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": 2, **CPU},
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
            }
            opt = make(model.parameters(), lr=1e-3)
            start = integration.initialize if make is lowbit.AdamW else deepspeed.initialize
            engine, *_ = start(model=model, optimizer=opt, config=config)
            engine.backward(engine(torch.ones(1, 512)).sum())
            engine.step()
            tensors = [t for group in opt.param_groups for t in group["params"]]
            kept = torch.utils._pytree.tree_leaves([opt.state[t] for t in tensors])
            held = sum(t.numel() * t.element_size() for t in kept if isinstance(t, torch.Tensor))
            found[make.__name__] = held / sum(t.numel() for t in tensors)
    return found
