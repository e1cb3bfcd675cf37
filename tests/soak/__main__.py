"""A run that is disturbed at random, beside one that is not: after each disturbance the last
checkpoint must have the bytes of the undisturbed run at its step.

    python -m tests.soak --minutes 60 --log build/soak.log

A round resumes from the last checkpoint on another number of ranks, under another instruction set.
It is killed, or one of its ranks is; a rank is late, or is stopped for a while at any place; a save
is asynchronous, meets a full disk, or a disk that takes its time; or lowbit-ckpt reshards what lies
there, or converts it to another container and back.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from typing import Any, TextIO

import torch

import lowbit
from tests.soak import worker

EVENTS = ["none", "kill", "kill one", "late", "stop", "async", "full", "slow", "reshard", "convert"]
CONTAINERS = ("dcp", "torch", "safetensors")
RANKS = (1, 2, 3)
STEPS = 6
TIMEOUT = 240  # seconds of a round


class Reference:
    """The run that nothing disturbs, as digests by step."""

    def __init__(self, rule: str) -> None:
        self.model, self.opt = worker.build(rule)
        self.digests = [digest(worker.content(self.model, self.opt, 0))]

    def at(self, number: int) -> str:
        while len(self.digests) <= number:
            worker.step(self.model, self.opt, len(self.digests))
            self.digests.append(digest(worker.content(self.model, self.opt, len(self.digests))))
        return self.digests[number]


def digest(value: Any) -> str:
    """Of all names, dtypes and bytes in a state dict but its settings and the number of steps."""
    made = hashlib.blake2b(digest_size=16)

    def add(name: str, part: Any) -> None:
        if isinstance(part, dict):
            for key in sorted(part, key=str):
                if key != "param_groups":
                    add(f"{name}.{key}", part[key])
        elif isinstance(part, torch.Tensor):
            made.update(f"{name} {part.dtype} {tuple(part.shape)}".encode())
            made.update(part.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())

    add("model", value["model"])
    add("optim", value["optim"])
    return made.hexdigest()


def port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def run_round(
    rule: str, event: str, path: str, ranks: int, isa: str, full: str, chance: random.Random
) -> None:
    """One round; raises if a rank fails that nothing killed."""
    env = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port()),
        "WORLD_SIZE": str(ranks),
        "LOWBIT_ISA": isa,
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",  # an abort says where each thread was
    }
    command = [sys.executable, "-m", "tests.soak.worker", rule, event, path, str(STEPS)]
    command += [str(chance.randrange(1 << 30)), full]
    running = [
        subprocess.Popen(
            command,
            env={**env, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        if event.startswith("kill"):
            wait_for_a_save(running[0])
            time.sleep(chance.random() * 0.3)
            for each in running if event == "kill" else [chance.choice(running)]:
                each.send_signal(signal.SIGKILL)
            time.sleep(0.5)
        else:
            if event == "stop":
                stop_for_a_while(running, chance)
            for each in running:
                said, _ = each.communicate(timeout=TIMEOUT)
                if each.returncode != 0:
                    raise AssertionError(f"{rule}, {event}: a rank failed:\n{said[-3000:]}")
    finally:
        for each in running:
            if each.poll() is None:
                each.kill()
            each.wait()
            if each.stdout is not None:
                each.stdout.close()


def wait_for_a_save(first: subprocess.Popen[str]) -> None:
    """Waits until rank 0 has said that it saved, so that a kill meets a later step or save."""
    assert first.stdout is not None
    for line in first.stdout:
        if line.startswith("saved"):
            return


def stop_for_a_while(running: list[subprocess.Popen[str]], chance: random.Random) -> None:
    """Stops a rank and lets it continue, some times: no signal that it could see, as on a machine
    that swaps or a disk that hangs.
    """
    for _ in range(chance.randrange(2, 6)):
        time.sleep(chance.random())
        one = chance.choice(running)
        one.send_signal(signal.SIGSTOP)
        time.sleep(chance.random())
        one.send_signal(signal.SIGCONT)


def check(rule: str, path: str, reference: Reference) -> int:
    """The step of the checkpoint; raises where it is not what the undisturbed run had then."""
    done = subprocess.run(["lowbit-ckpt", "verify", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    model, opt = worker.build(rule)
    number = worker.load(model, opt, path, lowbit.checkpoint.Reader)
    found = digest(worker.content(model, opt, number))
    assert found == reference.at(number), f"{rule}: other bytes at step {number}"
    return number


def tool(*words: str) -> None:
    done = subprocess.run(["lowbit-ckpt", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def replace(path: str, event: str, ranks: int, chance: random.Random) -> None:
    """What lies there, as lowbit-ckpt writes it for other ranks, or by way of another container."""
    made, between = f"{path}-made", f"{path}-between"
    if event == "reshard":
        tool("reshard", path, made, "--world-size", str(ranks))
    else:
        tool("convert", path, between, "--container", chance.choice(CONTAINERS))
        tool("convert", between, made, "--container", "dcp", "--world-size", str(ranks))
        shutil.rmtree(between) if os.path.isdir(between) else os.remove(between)
    shutil.rmtree(path)
    os.rename(made, path)


def small_disk(folder: pathlib.Path) -> str:
    """A disk of 64 KiB; "" where none can be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    made = subprocess.run(command, capture_output=True)
    return str(folder) if made.returncode == 0 else ""


def soak(seconds: float, seed: int, log: TextIO) -> Counter[str]:
    chance, seen, began = random.Random(seed), Counter[str](), time.monotonic()
    isas = lowbit.catalog()["isas"]
    with tempfile.TemporaryDirectory(prefix="lowbit-soak-") as folder:
        full = small_disk(pathlib.Path(folder, "full"))
        events = [e for e in EVENTS if e != "full" or full]
        references = {rule: Reference(rule) for rule in worker.RULES}
        try:
            while time.monotonic() - began < seconds:
                rule, event = chance.choice(list(worker.RULES)), chance.choice(events)
                ranks, isa = chance.choice(RANKS), chance.choice(isas)
                path = os.path.join(folder, rule.replace(" ", "-"))
                if event in ("reshard", "convert") and os.path.exists(path):
                    replace(path, event, ranks, chance)
                else:
                    run_round(rule, event, path, ranks, isa, full, chance)
                number = check(rule, path, references[rule])
                seen.update([event, f"{ranks} ranks", isa, "rounds"])
                at = time.monotonic() - began
                print(
                    f"{at:7.1f} s  {rule:16} {event:8} on {ranks}, {isa:10} step {number}: same",
                    file=log,
                    flush=True,
                )
        finally:
            if full:
                subprocess.run(["umount", full], check=True)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak")
    parser.add_argument("--minutes", type=float, default=60, help="60 by default")
    parser.add_argument("--seed", type=int, default=0, help="of the events; 0 by default")
    parser.add_argument("--log", type=pathlib.Path, help="standard output by default")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    log = given.log.open("w") if given.log else sys.stdout
    seen = soak(given.minutes * 60, given.seed, log)
    total = ", ".join(f"{n} {what}" for what, n in sorted(seen.items()))
    print(f"{given.minutes:g} minutes, 0 bytes differ: {total}", file=log, flush=True)
    if given.log:
        print(given.log.read_text().splitlines()[-1])


if __name__ == "__main__":
    main()
