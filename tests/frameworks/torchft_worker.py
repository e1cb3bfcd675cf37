"""One replica of test_torchft.py: trains with torchft's Manager on gloo, and is killed and healed,
or synchronizes now and then.

python tests/frameworks/torchft_worker.py FOLDER REPLICA BEGIN NAME=LIGHTHOUSE...

It runs the cases from number BEGIN on, in their order. A replica that a case has killed is started
again with the number of that case.
"""

from __future__ import annotations

import copy
import json
import os
import pathlib
import signal
import sys
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

import lowbit
from tests.frameworks.frameworks_worker import Net, batch_of, loss_of
from tests.support.digests import digest

STEPS, KILL, ALONE = 7, 2, 2  # commits of a case; the commit of the kill; those without the other
EVERY, SYNCS = 2, 3  # steps in a period; periods
WAIT = timedelta(seconds=120)
OPTIONS = {"lr": 1e-2, "seed": 3, "weight_decay": 0.1}


def net(seed: int, dtype: torch.dtype = torch.bfloat16) -> Net:
    return Net(seed).to(dtype)


def adamw(model: torch.nn.Module) -> lowbit.AdamW:
    return lowbit.AdamW(lowbit.param_groups(model), **OPTIONS)


class Files:
    """What replicas tell each other beside torchft: who is there, and how far."""

    def __init__(self, folder: pathlib.Path, case: str) -> None:
        self.folder, self.case = folder, case

    def path(self, what: str) -> pathlib.Path:
        return self.folder / f"{self.case}.{what}"

    def say(self, what: str) -> None:
        self.path(what).touch()

    def wait(self, *what: str) -> None:
        end = time.monotonic() + WAIT.total_seconds()
        while not all(self.path(each).exists() for each in what):
            assert time.monotonic() < end, f"{self.case}: no {what} in {WAIT}"
            time.sleep(0.01)


def manager_of(replica: int, lighthouse: str, least: int, *, eager: bool, **state):
    from torchft import Manager, ProcessGroupGloo

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    made = Manager(
        pg=ProcessGroupGloo(timeout=WAIT),
        min_replica_size=least,
        use_async_quorum=not eager,
        timeout=WAIT,
        quorum_timeout=WAIT,
        connect_timeout=WAIT,
        init_sync=False,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica_{replica}",
        hostname="localhost",
        **state,
    )
    made.kept_store = store
    return made


def healed(case: str, replica: int, lighthouse: str, files: Files) -> dict:
    """Trains by torchft's OptimizerWrapper. Replica 1 is killed before gradients are reduced, and
    starts with other weights.

    "together": no step is committed without both.
    "alone": replica 0 continues by itself for ALONE steps.
    """
    from torchft import Optimizer

    together = case.startswith("together")
    again = files.path("killed").exists()
    model = net(int(again))  # other weights than those it is to get
    opt = adamw(model)

    def load(saved):
        model.load_state_dict(saved["model"])
        opt.load_state_dict(saved["optim"])

    def save():
        return {"model": model.state_dict(), "optim": opt.state_dict()}

    if again and not together:
        files.wait("alone")
    least = 2 if together else 1
    manager = manager_of(
        replica, lighthouse, least, eager=False, load_state_dict=load, state_dict=save
    )
    optimizer = Optimizer(manager, opt)
    files.say(f"{'again' if again else 'ready'}{replica}")
    if not again:
        files.wait("ready0", "ready1")
    sizes: list[int] = []
    while (step := manager.current_step()) < STEPS:
        if replica == 0 and not together and step == KILL + ALONE:
            files.say("alone")
            files.wait("again1")
            time.sleep(1)  # until the lighthouse has heard of it
        optimizer.zero_grad()  # which asks who takes part
        loss_of(model, batch_of(step, replica)).backward()
        if replica == 1 and step == KILL and not again:
            manager.wait_quorum()
            files.say("killed")
            os.kill(os.getpid(), signal.SIGKILL)
        # torchft 0.2.0's own DistributedDataParallel ends the replica that survives.
        for work in [manager.allreduce(p.grad) for p in model.parameters()]:
            work.wait()
        optimizer.step()
        if replica == 0 and manager.current_step() > step:
            sizes.append(manager.num_participants())
    files.say(f"end{replica}")
    files.wait("end0", "end1")
    out = {"end": digest(opt, STEPS), "participants": sizes}
    manager.shutdown(wait=False)
    if replica == 0:
        out["plain"] = plain(sizes)
    return out


def plain(participants: list[int]) -> dict[str, str]:
    """One process with the mean of the gradients of those that took part in each step."""
    model = net(0)
    opt = adamw(model)
    for step, several in enumerate(participants):
        grads = []
        for replica in range(several):
            model.zero_grad()
            loss_of(model, batch_of(step, replica)).backward()
            grads.append([p.grad for p in model.parameters()])
        for p, *some in zip(model.parameters(), *grads, strict=True):
            p.grad = mean_of(some)
        opt.step()
    return digest(opt, len(participants))


def mean_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    """As torchft takes it: the sum in the tensors' dtype, divided by their number."""
    return sum(tensors[1:], tensors[0].clone()).div_(len(tensors))


class Periodic:
    """One replica under LocalSGD or DiLoCo: its model, the optimizer of its own steps, and DiLoCo's
    of what replicas agree on.
    """

    def __init__(self, kind: str, seed: int = 0) -> None:
        self.model = net(seed)
        self.inner = adamw(self.model)
        self.outer = None
        if kind == "diloco":
            options = {"lr": 0.7, "momentum": 0.9, "nesterov": True, "seed": 4}
            self.outer = lowbit.SGD(lowbit.param_groups(self.model), **options)

    def save(self) -> dict:
        return {"model": self.model.state_dict(), "inner": self.inner.state_dict()}

    def load(self, saved: dict) -> None:
        self.model.load_state_dict(saved["model"])
        self.inner.load_state_dict(saved["inner"])

    def step(self, number: int, replica: int) -> None:
        loss_of(self.model, batch_of(number, replica)).backward()
        self.inner.step()
        self.inner.zero_grad()

    def digests(self, steps: int, syncs: int) -> list[dict[str, str]]:
        return [digest(self.inner, steps), *([digest(self.outer, syncs)] if self.outer else [])]


def periodic(case: str, replica: int, lighthouse: str, files: Files) -> dict:
    """Trains by LocalSGD or DiLoCo, saving after the first synchronization; or resumes from there;
    or with a kill before the second one.
    """
    from torchft.local_sgd import DiLoCo, LocalSGD

    kind, _, what = case.partition("-")
    again = files.path("killed").exists()
    here = Periodic(kind, seed=int(again or what == "resumed"))
    manager = manager_of(
        replica, lighthouse, 2, eager=True, load_state_dict=here.load, state_dict=here.save
    )
    path = files.folder / f"{kind}.{replica}.pt"
    out, steps = {}, 0
    if what == "resumed":
        saved = torch.load(path)
        here.load(saved)
        if here.outer:
            here.outer.load_state_dict(saved["outer"])
        manager.load_state_dict(saved["torchft"])
        steps = EVERY
        out["loaded"] = here.digests(steps, manager.current_step())
    if kind == "diloco":
        context = DiLoCo(manager, [here.model], here.inner, here.outer, EVERY)
    else:
        context = LocalSGD(manager, here.model, here.inner, EVERY)
    with context:
        if again:
            steps = EVERY
        while manager.current_step() < SYNCS:
            here.step(steps, replica)
            steps += 1
            if what == "killed" and replica == 1 and steps == EVERY + 1 and not again:
                files.say("killed")
                os.kill(os.getpid(), signal.SIGKILL)
            if steps == EVERY and not what:
                out["saved"] = here.digests(steps, manager.current_step())
                outer = here.outer.state_dict() if here.outer else None
                torch.save({**here.save(), "outer": outer, "torchft": manager.state_dict()}, path)
    out["end"] = here.digests(EVERY * SYNCS, SYNCS)
    files.say(f"end{replica}")
    files.wait("end0", "end1")
    manager.shutdown(wait=False)
    out["plain"] = plain_periods(kind, what == "killed")[replica]
    return out


@torch.no_grad()
def plain_periods(kind: str, killed: bool) -> list[list[dict[str, str]]]:
    """Both replicas in one process. One that was killed takes over the other's weights and state
    before it synchronizes.
    """
    several = [Periodic(kind), Periodic(kind)]
    for sync in range(SYNCS):
        begin = [p.clone() for p in several[0].model.parameters()]
        for number in range(EVERY * sync, EVERY * (sync + 1)):
            for replica, each in enumerate(several):
                with torch.enable_grad():
                    each.step(number, replica)
        if killed and sync == 1:
            several[1].load(copy.deepcopy(several[0].save()))
        members = [list(each.model.parameters()) for each in several]
        for before, *ps in zip(begin, *members, strict=True):
            new = mean_of([before - p if kind == "diloco" else p for p in ps])
            for p in ps:
                if kind == "diloco":
                    p.copy_(before)
                    p.grad = new.clone()
                else:
                    p.copy_(new)
        for each in several:
            if each.outer:
                each.outer.step()
                each.outer.zero_grad()
    return [each.digests(EVERY * SYNCS, SYNCS) for each in several]


CASES = {
    "together": healed,
    "alone": healed,
    "localsgd": periodic,
    "localsgd-resumed": periodic,
    "diloco": periodic,
    "diloco-resumed": periodic,
    "diloco-killed": periodic,
}


def main() -> None:
    folder, replica, begin, *addresses = sys.argv[1:]
    torch.set_num_threads(1)
    given = dict(each.split("=", 1) for each in addresses)
    for number, (case, run) in enumerate(CASES.items()):
        if number < int(begin) or case not in given:
            continue
        files = Files(pathlib.Path(folder), case)
        try:
            found = run(case, int(replica), given[case], files)
        except Exception:
            found = {"error": traceback.format_exc()}
        files.path(f"{replica}.json").write_text(json.dumps(found))
    os._exit(0)  # threads of torchft's servers may wait for ever


if __name__ == "__main__":
    main()
