"""What a rank does in test_deepspeed.py of tests/frameworks: ZeRO beside one process,
from the same gradients.

torchrun --nproc-per-node N tests/frameworks/deepspeed_worker.py OUT FOLDER train|resume CASE...
"""

from __future__ import annotations

import json
import pathlib
import sys
import traceback

import deepspeed
import torch
import torch.distributed as dist

import lowbit
from lowbit.integrations import deepspeed as integration
from tests.frameworks.frameworks_worker import Net, batch_of, loss_of
from tests.support.digests import digest
from tests.support.ranks.leaving import leave

HALF, ALL = 3, 6  # steps
OPTIONS = {"lr": 1e-2, "seed": 3, "weight_decay": 0.1}
# Case: (ZeRO's stage and options, dtype of the model, lowbit's options).
CASES = {
    "1": ({"stage": 1}, "float32", {}),
    "1 bf16": ({"stage": 1}, "bfloat16", {}),
    "2": ({"stage": 2, "round_robin_gradients": True}, "float32", {"state_format": "4bit"}),
    "2 bf16": ({"stage": 2}, "bfloat16", {}),
    "2 offload": ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, "float32", {}),
    "3": ({"stage": 3, "sub_group_size": 4000}, "float32", {}),
    "3 bf16": ({"stage": 3}, "bfloat16", {"state_format": "4bit"}),
}


def engine_of(case: str, seed: int):
    zero, dtype, options = CASES[case]
    net = Net(seed)
    if dtype == "bfloat16":
        net = net.bfloat16()
    opt = lowbit.AdamW(lowbit.param_groups(net), **OPTIONS, **options)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype == "bfloat16"},
        "gradient_clipping": 0.0,
    }
    engine, *_ = deepspeed.initialize(model=net, optimizer=opt, config=config)
    integration.bind(engine)
    return engine, opt


def digests(opt, steps: int) -> dict[str, str]:
    with opt.whole_groups():
        return digest(opt, steps)


def train(case: str, folder: pathlib.Path) -> dict:
    engine, opt = engine_of(case, 0)
    out = {}
    for step in range(ALL):
        if step == HALF:
            out["saved"] = digests(opt, HALF)
            engine.save_checkpoint(str(folder / case), tag="half")
        stepped(engine, step)
    return {**out, "end": digests(opt, ALL), "plain": plain(case)}


def stepped(engine, step: int) -> None:
    engine.backward(loss_of(engine, batch_of(step, dist.get_rank())))
    engine.step()


def plain(case: str) -> list[dict[str, str]]:
    """One process that steps float32 weights, of which the model has a copy in its dtype,
    after half and all steps.
    """
    _, dtype, options = CASES[case]
    net, masters = Net(0), Net(0)
    if dtype == "bfloat16":
        net = net.bfloat16()
        masters.load_state_dict(net.state_dict())
    opt = lowbit.AdamW(lowbit.param_groups(masters), **OPTIONS, **options)
    made = []
    for step in range(ALL):
        if step == HALF:
            made.append(digest(opt, HALF))
        grads = []
        for rank in range(2):
            net.zero_grad()
            loss_of(net, batch_of(step, rank)).backward()
            grads.append([p.grad for p in net.parameters()])
        # Of two numbers the sum is rounded once, whoever adds them, and half of it is exact.
        for a, b, master in zip(*grads, masters.parameters(), strict=True):
            master.grad = ((a + b) / 2).float()
        opt.step()
        net.load_state_dict(masters.state_dict())
    return [*made, digest(opt, ALL)]


def resume(case: str, folder: pathlib.Path) -> dict:
    engine, opt = engine_of(case, 1)
    engine.load_checkpoint(str(folder / case), tag="half")
    out = {"loaded": digests(opt, HALF)}
    for step in range(HALF, ALL):
        stepped(engine, step)
    return {**out, "end": digests(opt, ALL)}


def main() -> None:
    out, folder, what, *cases = sys.argv[1:]
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
        False  # which would be compiled; gloo does without
    )
    deepspeed.init_distributed(dist_backend="gloo")
    torch.set_num_threads(1)
    found = {}
    for case in cases:
        try:
            found[case] = {"train": train, "resume": resume}[what](case, pathlib.Path(folder))
        except Exception:
            found[case] = {"error": traceback.format_exc()}
    if dist.get_rank() == 0:
        pathlib.Path(out).write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main()
