"""lowbit.checkpoint: the library behind lowbit-ckpt, from Python."""

import json
import os
import pathlib
import pickle
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import lowbit
from lowbit import checkpoint
from lowbit.checkpoint import native
from tests.checkpoint.gil import STEPS, steps_during
from tests.support.require import need
from tests.support.trained import trained

pytestmark = pytest.mark.slow

need("ckpt", native._checkpoint is not None, "lowbit._checkpoint is not built", module=True)


def command(*arguments):
    """What the program prints."""
    done = subprocess.run(["lowbit-ckpt", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory of a model and its AdamW, and both."""
    net, opt = trained(steps=3)
    path = tmp_path_factory.mktemp("saved") / "run"
    state = {"model": net.state_dict(), "optim": opt.state_dict(), "note": "first"}
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path, net, opt


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A directory of 256 MiB, so that work on it takes a while."""
    path = tmp_path_factory.mktemp("large") / "run"
    dcp.save(
        {f"w{i}": torch.full((2048, 4096), float(i)) for i in range(8)},
        checkpoint_id=path,
        no_dist=True,
    )
    return path


def test_reports_are_those_of_the_command_line(saved, tmp_path):
    path, _, _ = saved
    assert checkpoint.inspect(path, digest=True) == command("inspect", path, "--json", "--digest")
    assert checkpoint.verify(path) == command("verify", path, "--json")
    report = checkpoint.reshard(path, tmp_path / "three", world_size=3)
    assert report["ranks"] == 3 and report["tensors"] == len(checkpoint.inspect(path)["tensors"])
    digest = checkpoint.inspect(tmp_path / "three", digest=True)["digest"]
    assert digest == checkpoint.inspect(path, digest=True)["digest"]
    assert sorted(p.name for p in (tmp_path / "three").glob("*.distcp")) == [
        f"__{r}_0.distcp" for r in range(3)
    ]


class Evil:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (os.system, (f"touch {self.marker}",))


def test_values_that_are_no_plain_data_pass_where_that_is_asked_for(tmp_path):
    path, marker = tmp_path / "run", tmp_path / "executed"
    dcp.save({"x": torch.ones(3), "lr": Evil(marker)}, checkpoint_id=path, no_dist=True)
    with pytest.raises(checkpoint.CheckpointError, match=r"posix\.system") as caught:
        checkpoint.verify(path)
    assert caught.value.code == 3
    report = checkpoint.verify(path, opaque=True)
    assert report["ok"] and report == command("verify", path, "--opaque", "--json")
    assert not marker.exists()


def test_what_differs_is_named(saved, tmp_path):
    path, _, _ = saved
    checkpoint.reshard(path, tmp_path / "b", world_size=2)
    assert checkpoint.diff(path, tmp_path / "b")["same"]
    state = {"model": {"0.weight": torch.zeros(2, 2)}}
    for name in ("c", "d"):
        dcp.save(state, checkpoint_id=tmp_path / name, no_dist=True)
        state["model"]["0.weight"][1, 0] = 1.0
    report = checkpoint.diff(tmp_path / "c", tmp_path / "d", bytes=True)
    assert not report["same"] and report["differences"][0]["name"] == "model.0.weight"


def test_paths_of_any_kind(saved):
    path, _, _ = saved
    same = checkpoint.inspect(path)["bytes"]
    for form in (str(path), os.fsencode(path), pathlib.PurePath(path)):
        assert checkpoint.inspect(form)["bytes"] == same


def damaged(path, tmp_path, name):
    """A copy whose tensor `name` has one flipped bit."""
    copy = tmp_path / "damaged"
    checkpoint.reshard(path, copy, world_size=1)
    file = copy / "__0_0.distcp"
    values = bytes(checkpoint.Checkpoint(copy).read(name))
    content = bytearray(file.read_bytes())
    assert content.count(values) == 1
    content[content.index(values) + len(values) // 2] ^= 4
    file.write_bytes(content)
    return copy


def test_errors_carry_their_place(saved, tmp_path):
    copy = damaged(saved[0], tmp_path, "model.0.weight")
    work = [
        lambda: checkpoint.verify(copy),
        lambda: checkpoint.inspect(copy, digest=True),
        lambda: checkpoint.Checkpoint(copy).read("model.0.weight"),
    ]
    for one in work:
        with pytest.raises(checkpoint.CheckpointError, match="checksum") as caught:
            one()
        e = caught.value
        assert (e.code, e.file, e.tensor) == (3, "__0_0.distcp", "model.0.weight")
        assert "data" in e.item and isinstance(e, RuntimeError) and str(e) == e.text
        again = pickle.loads(pickle.dumps(e))
        assert (again.text, again.tensor) == (e.text, e.tensor)
    (copy / "__0_0.distcp").write_bytes((copy / "__0_0.distcp").read_bytes()[:1000])
    with pytest.raises(checkpoint.CheckpointError, match="cut off") as caught:
        checkpoint.inspect(copy)
    assert caught.value.file == "__0_0.distcp" and caught.value.tensor and caught.value.code == 3
    with pytest.raises(checkpoint.CheckpointError, match="cannot open") as caught:
        checkpoint.inspect(tmp_path / "nothing")
    assert caught.value.code == 3


def test_what_is_read_in_part_is_checked_in_the_end(saved, tmp_path):
    """The first rows are before the flipped bit: reading them cannot notice it, `finish` must."""
    copy = checkpoint.Checkpoint(damaged(saved[0], tmp_path, "model.0.weight"))
    copy.read("model.0.weight", 0, 2)
    with pytest.raises(checkpoint.CheckpointError, match="checksum") as caught:
        copy.finish()
    assert caught.value.file == "__0_0.distcp" and "data" in caught.value.item


def test_a_damaged_checkpoint_is_not_loaded_in_silence(saved, tmp_path):
    path, net, _ = saved
    copy = damaged(path, tmp_path, "optim.state.0.exp_avg")
    with pytest.raises(checkpoint.CheckpointError, match="checksum") as caught:
        lowbit.load_optimizer(lowbit.AdamW(net.named_parameters()), copy)
    assert caught.value.tensor == "optim.state.0.exp_avg"


def test_progress(large, tmp_path):
    calls = []
    done = checkpoint.inspect(
        large, digest=True, progress=lambda *c: calls.append((*c, threading.get_ident()))
    )
    size = done["bytes"]
    assert calls[-1][:2] == (size, size)
    assert [c[0] for c in calls] == sorted(c[0] for c in calls)
    assert {c[1] for c in calls} == {size}
    assert {c[2] for c in calls} == {threading.get_ident()}, (
        "the callback is called where it was given"
    )
    start = time.monotonic()
    times = []
    checkpoint.verify(large, progress=lambda done, total: times.append(time.monotonic()))
    assert len(times) <= 3 + 10 * (time.monotonic() - start), "at most ten times a second"


class Stop(Exception):
    pass


@pytest.mark.parametrize("kind", ["raises", "says no"])
def test_stopping_leaves_nothing(large, tmp_path, kind):
    def stop(done, total):
        if kind == "raises":
            raise Stop
        return False

    expected = Stop if kind == "raises" else checkpoint.CheckpointError
    with pytest.raises(expected):
        checkpoint.reshard(large, tmp_path / "out", world_size=2, progress=stop)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(expected):
        checkpoint.inspect(large, digest=True, progress=stop)


def test_ctrl_c_stops(large, tmp_path):
    """In a process of its own: a signal to this one would reach pytest."""
    code = """
        import os, signal, sys
        signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
        from lowbit import checkpoint
        def once(done, total):
            os.kill(os.getpid(), signal.SIGINT)
        try:
            checkpoint.reshard(sys.argv[1], sys.argv[2], world_size=2, progress=once)
        except KeyboardInterrupt:
            print("stopped", signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(large), str(tmp_path / "out")],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "stopped True\n", done.stderr
    assert done.returncode == 0 and list(tmp_path.iterdir()) == []


def test_other_threads_run_meanwhile(large):
    """While one thread computes a digest, this one counts. Where the machine had no time for it,
    once more: one that is kept from running never does.
    """
    for _ in range(20):
        finished = threading.Event()

        def work(finished=finished):
            checkpoint.inspect(large, digest=True)
            finished.set()

        worker = threading.Thread(target=work)
        worker.start()
        ticks, longest, last = 0, 0.0, time.monotonic()
        while not finished.is_set():
            time.sleep(0.001)
            now = time.monotonic()
            ticks, longest, last = ticks + 1, max(longest, now - last), now
        worker.join()
        if ticks >= 5:
            return
    raise AssertionError(f"{ticks} ticks, the longest {longest:.3f} s")


def test_reading_releases_the_gil(large):
    """Reads of 32 MiB in one thread, and steps of another's interpreter in the middle of them."""
    source = checkpoint.Checkpoint(large)
    assert steps_during(lambda i: source.read(f"w{i % 8}"), 400) >= STEPS


def test_threads_ask_for_the_model_at_once(saved):
    """In a process of its own: a model that one thread replaces under another is a crash."""
    script = """
        import sys, threading
        from lowbit import checkpoint
        for _ in range(100):
            source, begin, found = checkpoint.Checkpoint(sys.argv[1]), threading.Barrier(8), []
            def work():
                begin.wait()
                found.append([(p.name, [s.stored_as for s in p.states]) for p in source.params])
            threads = [threading.Thread(target=work) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(found) == 8 and found[0] and all(one == found[0] for one in found)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(saved[0])],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_a_checkpoint_is_read_by_parts(saved):
    path, net, _ = saved
    with_rows = checkpoint.Checkpoint(path)
    weight = net[0].weight.detach()
    found = with_rows.tensors["model.0.weight"]
    assert (found.path, found.dtype, found.shape) == (("model", "0.weight"), "float32", (300, 256))
    rows = torch.frombuffer(with_rows.read("model.0.weight", 3, 70), dtype=torch.float32)
    assert torch.equal(rows.reshape(67, 256), weight[3:70])
    box = torch.frombuffer(
        with_rows.read_box("model.0.weight", (7, 100), (50, 28)), dtype=torch.float32
    )
    assert torch.equal(box.reshape(50, 28), weight[7:57, 100:128])
    step = torch.frombuffer(with_rows.read("optim.state.0.step"), dtype=torch.float32)
    assert step.item() == 3
    assert with_rows.values["note"] == "first"
    assert with_rows.values["optim.param_groups.0.betas"] == (0.9, 0.999)
    assert with_rows.read("model.0.weight", 5, 5) == bytearray()
    for begin, end in ((-1, 3), (0, 301), (5, 3)):
        with pytest.raises(ValueError, match="not inside"):
            with_rows.read("model.0.weight", begin, end)
    with pytest.raises(KeyError, match="no tensor"):
        with_rows.read("model.9.weight")
    with_rows.finish()


def test_a_missing_module_says_what_to_install(monkeypatch, saved):
    monkeypatch.setattr(native, "_checkpoint", None)
    monkeypatch.setattr(native, "_missing", "no module named lowbit._checkpoint")
    path, net, _ = saved
    for work in (
        lambda: checkpoint.inspect(path),
        lambda: checkpoint.Checkpoint(path),
        lambda: lowbit.load_optimizer(lowbit.AdamW(net.named_parameters()), path),
    ):
        with pytest.raises(ImportError, match=r"libfmt-dev .* pip install"):
            work()


def test_options_reach_the_module_as_they_were_given(saved, tmp_path):
    """Options travel as JSON: each keeps its type, and what does not fit is refused by its name."""
    path = saved[0]
    assert checkpoint.verify(path, threads=np.int64(2), finite=np.bool_(False))["ok"]
    assert checkpoint.diff(path, path, tolerance=float("inf"))["same"]
    assert checkpoint.inspect(path, include="model.*")["tensors"]
    assert checkpoint.convert(path, tmp_path / "b", to="lowbit", seed=2**64 - 1, dry_run=True)
    for threads in ("2", 2.0, 1 << 40, None):
        with pytest.raises(TypeError, match="threads must be a whole number"):
            checkpoint.verify(path, threads=threads)
    for work in (
        lambda: checkpoint.convert(path, tmp_path / "b", seed=-1),
        lambda: checkpoint.convert(path, tmp_path / "b", to=8),
        lambda: checkpoint.inspect(path, include=[3]),
        lambda: native.native().inspect(os.fsencode(path), '{"healthy": true}', None),
        lambda: native.native().inspect(os.fsencode(path), "[]", None),
        lambda: native.native().inspect(str(path), "{}", None),
    ):
        with pytest.raises(TypeError, match=r"seed|to must be text|include|healthy|object|bytes"):
            work()
    with pytest.raises(ValueError, match="float"):
        checkpoint.diff(path, path, tolerance=float("nan"))
    with pytest.raises(UnicodeEncodeError):
        checkpoint.inspect(path, include="\udc80")


def test_a_bar_is_drawn_and_goes(saved, capsys):
    pytest.importorskip("tqdm")
    assert checkpoint.inspect(saved[0], digest=True, progress=True)["digest"]
    assert capsys.readouterr().err == "", "no terminal, no bar"


# Loading


def digest_of(opt):
    return {(i, key): t for i, p in enumerate(opt.state) for key, t in sorted(opt.state[p].items())}


def test_what_does_not_fit_changes_nothing(saved, tmp_path):
    path, _, _ = saved
    other = nn.Sequential(nn.Linear(256, 300), nn.Linear(300, 65))  # the second does not fit
    opt = lowbit.AdamW(other.named_parameters(), lr=5.0)
    before = {key: t.clone() for key, t in digest_of(opt).items()}
    with pytest.raises(ValueError, match="expected floating point"):
        lowbit.load_optimizer(opt, path)
    after = digest_of(opt)
    assert opt.param_groups[0]["lr"] == 5.0
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_state_is_written_where_it_is(saved):
    """One copy: the tensors after loading are those of before."""
    path, net, old = saved
    opt = lowbit.AdamW(net.named_parameters())
    before = {
        key: t.data_ptr()
        for key, t in digest_of(opt).items()
        if key[1] not in ("step", "stream", "shape")
    }
    lowbit.load_optimizer(opt, path)
    assert before == {key: t.data_ptr() for key, t in digest_of(opt).items() if key in before}
    expected = lowbit.AdamW(net.named_parameters())
    expected.load_state_dict(old.state_dict())
    for key, t in digest_of(expected).items():
        assert torch.equal(t, digest_of(opt)[key]), key


@pytest.mark.parametrize(
    "state_format",
    ["8bit", "4bit", "fp8", "float32", "bfloat16", lowbit.scaled("dynamic8", scale="row")],
    ids=str,
)
def test_pieces_give_the_same_bits(saved, monkeypatch, state_format):
    from lowbit.state import convert as adopt

    path, net, old = saved
    expected = lowbit.AdamW(net.named_parameters(), state_format=state_format)
    expected.load_state_dict(old.state_dict())
    for piece in (1, 1000, 1 << 30):
        monkeypatch.setattr(adopt, "PIECE", piece)
        opt = lowbit.AdamW(net.named_parameters(), state_format=state_format)
        lowbit.load_optimizer(opt, path)
        found = digest_of(opt)
        assert all(torch.equal(t, found[key]) for key, t in digest_of(expected).items())


def test_two_optimizers_are_not_guessed_between(tmp_path):
    nets = [nn.Linear(64, 64) for _ in range(2)]
    opts = [torch.optim.Adam(net.named_parameters()) for net in nets]
    for net, opt in zip(nets, opts, strict=True):
        net(torch.ones(1, 64)).sum().backward()
        opt.step()
    state = {"generator": opts[0].state_dict(), "critic": opts[1].state_dict()}
    dcp.save(state, checkpoint_id=tmp_path / "gan", no_dist=True)
    with pytest.raises(ValueError, match="2 optimizers, 'critic', 'generator'"):
        lowbit.load_optimizer(lowbit.Adam(nets[0].named_parameters()), tmp_path / "gan")
