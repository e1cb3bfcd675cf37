"""torchtitan, imported where there is no GPU, with its Trainer and its DeepSeek-V3.

torchtitan takes a machine without a GPU for one with CUDA, and asks the device for its memory.
Kernels of a dispatcher need triton, which torch for CPUs has not, and charts need TensorBoard.
"""

from __future__ import annotations

import sys
import types
from unittest import mock

import torch.distributed as dist

if not hasattr(dist, "set_timeout"):  # torchtitan 0.3 is written for the torch after 2.13
    dist.set_timeout = dist.distributed_c10d._set_pg_timeout  # type: ignore[attr-defined]

for _name in ("torchtitan.distributed.minimal_async_ep.kernels", "torch.utils.tensorboard"):
    sys.modules.setdefault(_name, mock.MagicMock())


def _nothing(*_: object, **__: object) -> None: ...


_device = types.SimpleNamespace(
    set_device=_nothing,
    synchronize=_nothing,
    empty_cache=_nothing,
    reset_peak_memory_stats=_nothing,
    current_device=lambda: 0,
    device_count=lambda: 1,
    memory_stats=lambda _: {},
    get_device_name=lambda _: "CPU",
    get_device_properties=lambda _: types.SimpleNamespace(total_memory=1),
)
with (
    mock.patch("torch._utils._get_available_device_type", lambda: "cpu"),
    mock.patch("torch._utils._get_device_module", lambda _: _device),
):
    import torchtitan.models.deepseek_v3.config_registry
    import torchtitan.tools.utils
    import torchtitan.trainer

    import lowbit.integrations.torchtitan  # noqa: F401
assert torchtitan.tools.utils.device_type == "cpu"
