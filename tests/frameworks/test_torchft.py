"""torchft by the real package: replicas that are killed and healed, LocalSGD and DiLoCo; the bits
of one process that takes the mean of their gradients.
"""

import importlib.util
import json
import pathlib
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

import lowbit
from tests.support.paths import importing_tests
from tests.support.require import need

WORKER = pathlib.Path(__file__).with_name("torchft_worker.py")
CASES = (
    "together",
    "alone",
    "localsgd",
    "localsgd-resumed",
    "diloco",
    "diloco-resumed",
    "diloco-killed",
)
LIMIT = 600  # seconds: against a replica that waits for ever


def need_torchft():
    present = importlib.util.find_spec("torchft") is not None
    need("frameworks", present, "torchft is not installed: make frameworks")


class Replicas:
    """Two processes and the lighthouses of their cases.
    One that was killed is started again at the case that killed it.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        from torchft.coordination import LighthouseServer

        self.folder = folder
        # "alone" needs one replica for a quorum, and waits this long for another that shows life.
        self.lighthouses = {
            case: LighthouseServer(
                bind="[::]:0",
                min_replicas=1 if case == "alone" else 2,
                join_timeout_ms=60000,
                heartbeat_timeout_ms=3000,
            )
            for case in CASES
        }
        self.processes = [self.start(0), self.start(1)]

    def start(self, replica: int, case: int = 0) -> subprocess.Popen:
        addresses = [f"{name}={each.address()}" for name, each in self.lighthouses.items()]
        command = [sys.executable, str(WORKER), str(self.folder), str(replica), str(case)]
        return subprocess.Popen(
            [*command, *addresses],
            stdout=subprocess.DEVNULL,
            stderr=(self.folder / f"{replica}.log").open("a"),
            env=importing_tests(OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore"),
        )

    def run(self) -> int:
        """Waits until both end; returns how often one was killed."""
        killed, end = 0, time.monotonic() + LIMIT
        while any(process.poll() is None for process in self.processes):
            assert time.monotonic() < end, "replicas wait for each other"
            if self.processes[1].poll() == -signal.SIGKILL:
                killed += 1
                at = max(
                    i for i, case in enumerate(CASES) if (self.folder / f"{case}.killed").exists()
                )
                self.processes[1] = self.start(1, at)
            time.sleep(0.05)
        return killed

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for lighthouse in self.lighthouses.values():
            lighthouse.shutdown()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    need_torchft()
    folder = tmp_path_factory.mktemp("torchft")
    replicas = Replicas(folder)
    try:
        assert replicas.run() == 3
    finally:
        replicas.close()
    files = {f"{case} {r}": folder / f"{case}.{r}.json" for case in CASES for r in range(2)}
    logs = "".join((folder / f"{r}.log").read_text()[-2000:] for r in range(2))
    assert all(file.exists() for file in files.values()), logs
    results = {name: json.loads(file.read_text()) for name, file in files.items()}
    assert not (errors := [each["error"] for each in results.values() if "error" in each]), errors
    return results


@pytest.mark.parametrize("case", ["together", "alone"])
def test_a_killed_replica_is_healed_to_the_bits_of_one_process(case, found):
    """`plain` has the gradients of those that took part in each step, and no kill."""
    first, second = found[f"{case} 0"], found[f"{case} 1"]
    if case == "together":
        assert first["participants"] == [2] * 7
    else:  # in the step that heals it, a replica has no part yet
        assert first["participants"][:5] == [2, 2, 1, 1, 1] and first["participants"][-1] == 2
    assert first["end"] == second["end"] == first["plain"]


@pytest.mark.parametrize("kind", ["localsgd", "diloco"])
def test_periods_resume_exactly(kind, found):
    for replica in range(2):
        whole, resumed = found[f"{kind} {replica}"], found[f"{kind}-resumed {replica}"]
        assert whole["saved"] == resumed["loaded"] != whole["end"]
        assert whole["end"] == resumed["end"] == whole["plain"]


def test_a_replica_killed_between_synchronizations_takes_over_the_other_s_state(found):
    first, second = found["diloco-killed 0"], found["diloco-killed 1"]
    assert (first["end"], second["end"]) == (first["plain"], second["plain"])
    assert first["end"][1] == second["end"][1], "DiLoCo's own optimizer is the same everywhere"


# What overwritten weights would leave wrong


def optimizer(**options):
    model = torch.nn.Linear(64, 64).bfloat16()
    return model, lowbit.AdamW(model.named_parameters(), **options)


@pytest.mark.parametrize(
    "options, key",
    [
        ({"param_format": "bfloat16_kahan"}, "param_bfloat16_kahan"),
        ({"param_format": "bfloat16_split8"}, "param_bfloat16_split8"),
        ({"overrides": {"bias": {"param_format": "bfloat16_split16"}}}, "param_bfloat16_split16"),
    ],
)
def test_correction_bits_are_refused_where_weights_are_overwritten(options, key):
    need_torchft()
    from torchft.local_sgd import DiLoCo, LocalSGD

    model, opt = optimizer(**options)
    message = f"LocalSGD and DiLoCo overwrite the weights, and '{key}' of parameter"
    with pytest.raises(ValueError, match=message), LocalSGD(None, model, opt, 2):
        pass
    manager = SimpleNamespace(_use_async_quorum=False, register_state_dict_fn=lambda *_: None)
    outer = lowbit.SGD(model.named_parameters(), momentum=0.9, **options)
    with pytest.raises(ValueError, match=message), DiLoCo(manager, [model], opt, outer, 2):
        pass

    class Mine(LocalSGD):
        pass

    with pytest.raises(ValueError, match=message), Mine(None, model, opt, 2):
        pass
    model.weight.grad = torch.ones_like(model.weight)
    opt.step()  # nothing of what was refused is left on it
    _, plain = optimizer()
    with DiLoCo(manager, [model], plain, outer, 2):  # which keeps the outer one's weights itself
        pass


def test_schedule_free_is_refused_where_weights_are_overwritten():
    need_torchft()
    from torchft.local_sgd import LocalSGD

    model = torch.nn.Linear(64, 64).bfloat16()
    opt = lowbit.ScheduleFreeAdamW(model.named_parameters())
    with pytest.raises(ValueError, match="one of three copies"), LocalSGD(None, model, opt, 2):
        pass


def test_other_hooks_are_taken():
    calls = []
    model, opt = optimizer(param_format="bfloat16_kahan")
    opt.register_step_post_hook(lambda *_: calls.append(1)).remove()
    opt.register_step_post_hook(lambda *_: calls.append(2))
    model.weight.grad = torch.ones_like(model.weight)
    opt.step()
    assert calls == [2]
