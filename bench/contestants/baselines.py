"""Baselines: torch's optimizers and those of other packages,
each in the configuration its authors recommend for speed.
"""

from __future__ import annotations

import pathlib

import torch

from bench.contestants.contestant import Contestant, InGraph, size_of


class Torch(Contestant):
    name = "torch fused, float32"
    dtype = torch.float32

    def optimizer(self, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, fused=True)


class TorchForeach(Torch):
    """torch's default where nothing is fused: a pass over memory for each operator."""

    name = "torch foreach, float32"

    def optimizer(self, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, foreach=True)

    def traffic(self) -> int:
        # weight decay rw p; lerp rw m, r g; decay rw v; addcmul rw v, r g; root r v, w new (which
        # is read first); division and eps rw it; addcdiv rw p, r m, r it
        return 21 * 4 * sum(p.numel() for p in self.params)


class TorchInGraph(InGraph, Torch):
    name = "torch fused, float32, in a CUDA graph"

    def optimizer(self, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, fused=True, capturable=True)


class TorchBfloat16(Torch):
    name = "torch fused, bf16 nearest"
    dtype = torch.bfloat16


class Torchao(Contestant):
    name = "torchao AdamW8bit compiled, bf16 stochastic"
    package = "torchao"
    one_shape = True

    def optimizer(self, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        from torchao.optim import AdamW8bit

        return AdamW8bit(params, bf16_stochastic_round=True)


class Bitsandbytes(Contestant):
    name = "bitsandbytes AdamW8bit, bf16 nearest"
    package = "bitsandbytes"

    def optimizer(self, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(params)


class FlashOptim(Contestant):
    name = "FlashOptim AdamW, bf16 + 8 bits"
    package = "flashoptim"
    devices = ("cuda",)  # Triton kernels

    def optimizer(self, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        from flashoptim import FlashAdamW

        return FlashAdamW(params, lr=1e-3, master_weight_bits=24)


class Adafactor8bit(Contestant):
    name = "adafactor8bit, bf16 stochastic"
    package = "adafactor8bit"

    def optimizer(self, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        from adafactor8bit import Adafactor8Bit

        return Adafactor8Bit(params, stochastic_round_writeback=True)


class DeepSpeed(Contestant):
    name = "DeepSpeedCPUAdam, float32"
    package = "deepspeed"
    dtype = torch.float32
    devices = ("cpu",)

    def missing(self, device: str) -> str | None:
        if reason := super().missing(device):
            return reason
        from torch.utils.cpp_extension import _get_build_directory

        if list(pathlib.Path(_get_build_directory("cpu_adam", verbose=False)).glob("cpu_adam*.so")):
            return None
        return (
            "deepspeed is installed, but its kernel is not built yet, which takes minutes: "
            '`python -c "from deepspeed.ops.op_builder import CPUAdamBuilder as B; B().load()"`'
        )

    def optimizer(self, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(params)


class DeepSpeedBfloat16(DeepSpeed):
    name = "DeepSpeedCPUAdam, bf16 nearest"
    dtype = torch.bfloat16  # its state stays float32


class Torchastic(Contestant):
    name = "torchastic AdamW (eager), bf16 stochastic"
    package = "torchastic"

    def optimizer(self, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        from torchastic import AdamW

        return AdamW(params)


class Eager(Contestant):
    """A loop of eager torch operators with temporaries: bfloat16 state, float32 arithmetic,
    stochastic rounding by random low bits.
    """

    name = "eager loop, bf16 stochastic"

    def prepare(self, params: list[torch.nn.Parameter]) -> None:
        self.params, self.count = params, 0
        self.state = [(torch.zeros_like(p.data), torch.zeros_like(p.data)) for p in params]
        self.step()

    @torch.no_grad()
    def step(self) -> None:
        self.count += 1
        rest1, rest2 = 1 - 0.9**self.count, (1 - 0.999**self.count) ** 0.5
        for p, (m16, v16) in zip(self.params, self.state, strict=True):
            assert p.grad is not None
            g, m, v = p.grad.float(), m16.float(), v16.float()
            m.lerp_(g, 0.1)
            v.mul_(0.999).addcmul_(g, g, value=0.001)
            weights = p.float().mul_(1 - 1e-5)
            weights.addcdiv_(m, v.sqrt().div_(rest2).add_(1e-8), value=-1e-3 / rest1)
            for target, source in ((p, weights), (m16, m), (v16, v)):
                round_stochastically(target, source)

    def state_bytes(self) -> int:
        return sum(2 * 2 * p.numel() for p in self.params)


def round_stochastically(target: torch.Tensor, source: torch.Tensor) -> None:
    """Rounds float32 to bfloat16: adds random low bits, then truncates."""
    bits = torch.randint_like(source, 0, 1 << 16, dtype=torch.int32)
    bits.add_(source.view(torch.int32)).bitwise_and_(-65536)
    target.copy_(bits.view(torch.float32))


class Copy(Contestant):
    """The lower bound: a copy of as many bytes as an 8-bit step on bfloat16 weights moves,
    half read and half written.
    """

    name = "copy of the bytes of an 8-bit step"
    # per parameter: weights 2 + 2, gradient 2, two states 1 + 1 each,
    # a float32 scale for 256 of them
    step_bytes = 10.0625

    def prepare(self, params: list[torch.nn.Parameter]) -> None:
        self.params = params
        size = int(sum(p.numel() for p in params) * self.step_bytes / 2)
        self.source = torch.ones(size, dtype=torch.uint8, device=params[0].device)
        self.target = torch.ones_like(self.source)

    def step(self) -> None:
        self.target.copy_(self.source)

    def state_bytes(self) -> int:
        return 0

    def traffic(self) -> int:
        return 2 * self.source.numel()


class InPlace(Contestant):
    """As many bytes, each read and written once: a copy reads the lines that it is about to write,
    too, and counts them only as written.
    """

    name = "inversion in place of the bytes of an 8-bit step"

    def prepare(self, params: list[torch.nn.Parameter]) -> None:
        self.params = params
        size = int(sum(p.numel() for p in params) * Copy.step_bytes / 2)
        self.target = torch.ones(size // 8, dtype=torch.int64, device=params[0].device)

    def step(self) -> None:
        self.target.bitwise_not_()

    def state_bytes(self) -> int:
        return 0

    def traffic(self) -> int:
        return 2 * size_of(self.target)
