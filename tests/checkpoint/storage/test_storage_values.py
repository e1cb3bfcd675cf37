"""What lowbit.checkpoint.Writer saves, Reader loads: values of every kind,
or the save is refused by name.
"""

import collections
import contextlib
import datetime
import io
import pathlib
import pickle
import random
import shutil
import warnings

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from lowbit import checkpoint
from lowbit.checkpoint.native import native

pytestmark = pytest.mark.slow

warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def save(state, path, planner=None, **options):
    dcp.save(
        state, storage_writer=checkpoint.Writer(path, **options), planner=planner, no_dist=True
    )


def load(state, path, planner=None, reader=checkpoint.Reader):
    dcp.load(state, storage_reader=reader(path), planner=planner, no_dist=True)
    return state


def same(a, b):
    """Equal, of the same types."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.requires_grad == b.requires_grad and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, io.BytesIO):
        return a.getvalue() == b.getvalue() and a.tell() == b.tell()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a) and vars_of(a) == vars_of(b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def vars_of(value):
    return getattr(value, "__dict__", None)


def advanced():
    out = io.BytesIO(b"extra \xff state")
    out.seek(3)
    return out


LOADED = {
    "array": np.arange(6, dtype=np.float32).reshape(2, 3),
    "column-major array": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "scalar array": np.array(3, dtype=np.int16),
    "empty array": np.zeros((0, 4), dtype=np.uint8),
    "numpy's generator": np.random.RandomState(3).get_state(),
    "Python's generator": random.Random(3).getstate(),
    "float64": np.float64(0.1),
    "float16": np.float16(0.5),
    "bool_": np.bool_(True),
    "complex": np.complex64(1 + 2j),
    "dtype of numpy": np.dtype(np.float32),
    "BytesIO": advanced(),
    "tuple of a tensor": (torch.arange(5), 3),
    "tuple of a parameter": (torch.nn.Parameter(torch.ones(2, 3)), None),
    "tuple of a view": (torch.arange(12.0).reshape(3, 4).t()[1:3], torch.tensor(7)),
    "tuple of a float8": (
        torch.ones(3).to(torch.float8_e4m3fn).view(torch.uint8),
        torch.ones(2).bfloat16(),
    ),
    "tuple of empty ones": (torch.zeros(0, 4), torch.zeros(())),
    "tuple of a dict": ({"a": torch.ones(2), 3: np.float32(1)},),
    "plain": (
        None,
        True,
        2**70,
        -1.5,
        "text",
        b"\x00\xff",
        (),
        {"a": (1, 2)},
        {1, 2},
        1j,
        torch.Size([2]),
        torch.float8_e4m3fn,
    ),
}


@pytest.mark.parametrize(
    "value", [np.str_("aé€😀"), np.bytes_(b"a\0\xffb"), np.str_(""), np.bytes_(b"")]
)
def test_a_text_of_numpy_comes_back_as_pythons(tmp_path, value):
    """But through torch's reader, which has it from the same bytes."""
    save({"v": value, "w": torch.ones(3)}, tmp_path / "run")
    for reader, want in (
        (checkpoint.Reader, value.item()),
        (dcp.FileSystemReader, value),
    ):
        got = load({"v": None, "w": torch.zeros(3)}, tmp_path / "run", reader=reader)
        assert same(got["v"], want), (reader, got["v"])


@pytest.mark.parametrize("kind", LOADED)
def test_a_value_that_was_saved_is_loaded_equal(tmp_path, kind):
    value = LOADED[kind]
    save({"v": value, "w": torch.ones(3)}, tmp_path / "run")
    for reader in (checkpoint.Reader, dcp.FileSystemReader):
        got = load({"v": None, "w": torch.zeros(3)}, tmp_path / "run", reader=reader)
        assert got["w"].sum() == 3 and same(got["v"], value), (reader, got["v"])
    report = checkpoint.verify(tmp_path / "run")
    assert report["ok"] and not any("opaque" in w for w in report["warnings"]), report


class Own:
    """A class of a user's."""


REFUSED = {
    "date": (datetime.datetime(2026, 1, 1), "datetime"),
    "own class": (Own(), "Own"),
    "array of objects": (np.array([None, 1], dtype=object), "dtype"),
    "structured array": (np.zeros(2, dtype=[("a", "f4")]), "dtype"),
    "big-endian array": (np.zeros(2, dtype=">f4"), "byte order"),
    "function": (len, "len"),
    "sparse in a tuple": ((torch.eye(2).to_sparse(),), "sparse"),
    "quantized in a tuple": (
        (torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8),),
        "quantized",
    ),
    "deque": (collections.deque([1]), "deque"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_value_that_could_not_be_loaded_is_not_saved(tmp_path, kind):
    value, named = REFUSED[kind]
    state = {"first": torch.ones(3), "deep": {"value": value}}
    with pytest.raises(dcp.api.CheckpointException, match=r"deep\.value") as caught:
        save(state, tmp_path / "run")
    said = str(caught.value)
    assert named in said and "opaque=True" in said and not (tmp_path / "run").exists()
    # For torch's reader alone, by a word: ours names it, and loads the rest.
    save(state, tmp_path / "run", opaque=True)
    got = load({"first": torch.zeros(3)}, tmp_path / "run")
    assert got["first"].sum() == 3
    with pytest.raises(dcp.api.CheckpointException, match=r"deep\.value is not plain data"):
        load({"deep": {"value": None}}, tmp_path / "run")
    with pytest.raises(checkpoint.CheckpointError, match=r"deep\.value.*is opaque"):
        checkpoint.verify(tmp_path / "run")


def quantized():
    return torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8)


def subclass():
    class Sub(torch.Tensor):
        pass

    return torch.ones(4).as_subclass(Sub)


@pytest.mark.parametrize("make", [quantized, subclass])
def test_a_tensor_that_could_not_be_loaded_is_not_saved(tmp_path, make):
    state = {"first": torch.ones(3), "q": make()}
    with pytest.raises(dcp.api.CheckpointException, match=r"q is a .*opaque=True"):
        save(state, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("writer", ["lowbit", "torch"])
def test_one_tensor_of_an_odd_dtype_does_not_hide_the_rest(tmp_path, writer):
    path = tmp_path / "run"
    state = {"first": torch.ones(3), "q": quantized()}
    if writer == "lowbit":
        save(state, path, opaque=True)
    else:
        dcp.save(state, checkpoint_id=path, no_dist=True)
    assert load({"first": torch.zeros(3)}, path)["first"].sum() == 3
    with pytest.raises(dcp.api.CheckpointException, match="q is not plain data"):
        load({"q": None}, path)
    assert "first" in checkpoint.Checkpoint(path).tensors
    checkpoint.inspect(path)
    checkpoint.verify(path, opaque=True)
    checkpoint.reshard(path, tmp_path / "again", world_size=2)
    checkpoint.convert(path, tmp_path / "x.pt", exclude=["q"])


def test_a_sharded_tensor_of_an_odd_dtype_does_not_hide_the_rest(tmp_path):
    """Several parts of a quantized tensor are one that is refused by name,
    by whatever would put them together.
    """
    path = tmp_path / "run"
    save({"first": torch.ones(3), "q": torch.arange(12, dtype=torch.uint8)}, tmp_path / "one")
    checkpoint.reshard(tmp_path / "one", path, world_size=3, manifest=False)
    metadata = dcp.FileSystemReader(path).read_metadata()
    metadata.state_dict_metadata["q"].properties.dtype = torch.quint8
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert load({"first": torch.zeros(3)}, path)["first"].sum() == 3
    said = r"q: is a tensor of torch\.quint8 in 3 parts, which is not read"
    with pytest.raises(dcp.api.CheckpointException, match=said):
        load({"q": None}, path)
    for work in (
        lambda: checkpoint.verify(path),
        lambda: checkpoint.reshard(path, tmp_path / "again", world_size=2),
        lambda: checkpoint.convert(path, tmp_path / "again", container="dcp"),
        lambda: checkpoint.convert(path, tmp_path / "x.pt"),
    ):
        with pytest.raises(checkpoint.CheckpointError, match="q"):
            work()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "run"]
    checkpoint.inspect(path)
    checkpoint.reshard(path, tmp_path / "again", world_size=2, exclude=["q"])
    assert load({"first": torch.zeros(3)}, tmp_path / "again")["first"].sum() == 3
    # A part that is cut off is found, though nothing reads its values.
    other = tmp_path / "other"
    shutil.copytree(path, other)
    assert checkpoint.diff(path, other)["same"]
    last = other / "__2_0.distcp"
    last.write_bytes(last.read_bytes()[:-100])
    with pytest.raises(checkpoint.CheckpointError, match="__2_0"):
        checkpoint.inspect(other)


def test_a_state_dict_that_a_planner_builds_has_the_order_of_the_file(tmp_path):
    state = {
        "z": torch.ones(2),
        "m": {"b": 1, "a": torch.ones(3), "c": "x"},
        "a": [torch.ones(1), 2],
    }
    save(state, tmp_path / "run")

    def built(reader):
        out = {}
        planner = dcp.default_planner._EmptyStateDictLoadPlanner()
        dcp.state_dict_loader._load_state_dict(
            out, storage_reader=reader(tmp_path / "run"), planner=planner, no_dist=True
        )
        return out

    mine, theirs = built(checkpoint.Reader), built(dcp.FileSystemReader)
    assert same(mine, theirs)
    assert (
        [list(mine), list(mine["m"])]
        == [list(theirs), list(theirs["m"])]
        != [sorted(mine), sorted(mine["m"])]
    )


def test_a_tensor_without_values_is_named(tmp_path):
    """In a save, and in the copy that an async one begins with."""
    state = {"first": torch.ones(3), "deep": {"w": torch.ones(3, device="meta")}}
    with pytest.raises(dcp.api.CheckpointException, match=r"deep\.w lies on the meta device"):
        save(state, tmp_path / "run")
    for keep in (True, False):
        writer = checkpoint.Writer(tmp_path / "run", cache_staged_state_dict=keep)
        with pytest.raises(ValueError, match=r"deep\.w lies on the meta device"):
            writer.stage(state)
    assert not (tmp_path / "run").exists()


def test_a_save_that_ends_while_the_next_is_staged(tmp_path):
    """Its thread forgets the copy between two looks of the thread that trains."""

    class Ending(checkpoint.Writer):
        @property
        def _staged(self):
            found, self.seen = self.seen, None
            return found

        @_staged.setter
        def _staged(self, copy):
            self.seen = copy

    writer, state = Ending(tmp_path / "run"), {"w": torch.ones(3)}
    first = writer.stage(state)
    second = writer.stage({"w": torch.zeros(3)})
    assert torch.equal(first["w"], state["w"]) and torch.equal(second["w"], torch.zeros(3))


def test_complex32(tmp_path):
    path = tmp_path / "run"
    t = torch.complex(torch.randn(4, 3), torch.randn(4, 3)).to(torch.complex32)
    save({"c": t}, path)
    for reader in (checkpoint.Reader, dcp.FileSystemReader):
        got = load({"c": torch.zeros_like(t)}, path, reader=reader)["c"]
        assert torch.equal(torch.view_as_real(got), torch.view_as_real(t))
    checkpoint.verify(path)
    assert checkpoint.diff(path, path)["same"]
    checkpoint.reshard(path, tmp_path / "again", world_size=2)
    assert (
        load({"c": torch.zeros_like(t)}, tmp_path / "again")["c"]
        .view(torch.int32)
        .equal(t.view(torch.int32))
    )


def test_a_dict_of_tensors_as_one_value(tmp_path):
    """What a planner that flattens nothing makes of a nested state dict: one pickled value of
    each.
    """
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    state = {
        "model": model.state_dict(),
        "groups": [{"lr": 0.1, "params": [0, 1]}],
        "w": torch.ones(2),
    }
    as_it_is = {"flatten_state_dict": False, "flatten_sharded_tensors": False}
    save(state, tmp_path / "run", planner=dcp.DefaultSavePlanner(**as_it_is))
    got = {"model": None, "groups": None, "w": torch.zeros(2)}
    load(got, tmp_path / "run", planner=dcp.DefaultLoadPlanner(**as_it_is))
    assert same(got, state) and got["model"]._metadata == state["model"]._metadata


def test_values_share_no_more_than_they_did(tmp_path):
    """Two views of one storage are two views of one storage again; the record is there once."""
    base = torch.arange(100_000.0)
    save({"v": (base[:10], base[10:20], base)}, tmp_path / "run")
    got = load({"v": None}, tmp_path / "run")["v"]
    assert same(got, (base[:10], base[10:20], base))
    assert len({t.untyped_storage().data_ptr() for t in got}) == 1


@contextlib.contextmanager
def checksums(kept):
    """Whether torch.save computes CRC-32s: torch's switch for faster saves."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(kept)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


@pytest.mark.parametrize(("crc", "digests"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("where", ["tensor", "bytes", "BytesIO"])
def test_a_damaged_value_is_found(tmp_path, where, crc, digests):
    state = {"v": (torch.arange(1000), b"Z" * 100, io.BytesIO(b"Y" * 100)), "w": torch.ones(1)}
    with checksums(crc):
        save(state, tmp_path / "run")
    if not digests:
        (tmp_path / "run" / "lowbit.json").unlink()
    (file,) = (tmp_path / "run").glob("*.distcp")
    content = bytearray(file.read_bytes())
    values = {
        "tensor": torch.arange(1000).numpy().tobytes(),
        "bytes": b"Z" * 100,
        "BytesIO": b"Y" * 100,
    }[where]
    content[content.index(values) + len(values) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(dcp.api.CheckpointException, match=rf"{file.name}.*v\b.*damaged") as caught:
        load({"v": None}, tmp_path / "run")
    assert "FileSystemReader" not in str(caught.value)  # which would load it in silence
    if not crc:  # as torch does
        unverified = checkpoint.Reader(tmp_path / "run", verify=False)
        got = {"v": None, "w": torch.zeros(1)}
        dcp.load(got, storage_reader=unverified, no_dist=True)
        assert got["v"] is not None and not same(got["v"], state["v"])


def test_a_value_that_is_too_large_is_called_so(tmp_path):
    """The order of a sampler: plain data, but not as one value."""
    with pytest.raises(
        dcp.api.CheckpointException, match=r"order is too large for one value"
    ) as caught:
        save({"order": list(range(4_300_000))}, tmp_path / "run")
    assert "save it as a tensor" in str(caught.value) and "not plain data" not in str(caught.value)


def test_the_check_of_a_value_copies_no_tensor():
    def kib(field):
        return int(pathlib.Path("/proc/self/status").read_text().split(field + ":")[1].split()[0])

    out = io.BytesIO()
    torch.save((torch.ones(16 << 20), 1), out)
    archive = out.getvalue()
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = kib("VmRSS")
    native().check_value("v", archive)
    assert kib("VmHWM") - before < 8 << 10


def test_the_copy_of_an_async_save_has_the_values_of_every_layout():
    """Plain tensors are copied by their bytes, past the caches; views of other layouts are not."""
    torch.manual_seed(0)
    numbers = torch.randn(3, dtype=torch.complex64)
    state = {
        "large": torch.randn(1 << 18),
        "unaligned": torch.randn((1 << 18) + 1)[1:],
        "weight": torch.nn.Parameter(torch.randn(5, 7, dtype=torch.bfloat16)),
        "columns": torch.randn(8, 6).t(),
        "negative": torch._neg_view(torch.randn(9)),
        "conjugate": numbers.conj(),
        "imaginary": numbers.conj().imag,
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(7.0),
    }
    writer = checkpoint.Writer("run")
    for _ in range(2):
        copied = writer.stage(state)
        for name, t in state.items():
            assert torch.equal(copied[name], t), name
            assert (
                copied[name].untyped_storage().data_ptr() != t.untyped_storage().data_ptr()
                or not t.numel()
            )
        del copied  # its save has ended
        with torch.no_grad():
            for t in state.values():
                t.mul_(3)
