"""Numbers and arrays of numpy in files of torch.save: copied as they are, and read as numbers where
an optimizer has a number.
"""

import io
import json
import pickle
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import lowbit
from tests.ckpt.opaque.opaque_objects import Called, optimizer, same
from tests.support.peers.files import need_tool, run

pytestmark = pytest.mark.slow

need_tool()


class Numpy1(pickle._Pickler):
    """Names numpy's functions as numpy 1 does, which wrote most files."""

    def save_global(self, obj, name=None):
        module = getattr(obj, "__module__", "") or ""
        if not module.startswith("numpy._core"):
            return super().save_global(obj, name)
        old = module.replace("numpy._core", "numpy.core")
        self.write(pickle.GLOBAL + f"{old}\n{name or obj.__qualname__}\n".encode())
        self.memoize(obj)

    dispatch: ClassVar = {
        **pickle._Pickler.dispatch,
        **dict.fromkeys((type(np.array), type(lambda: 0)), save_global),
    }


class NumpyModule:
    """A pickle module for torch.save."""

    Pickler = Numpy1
    dumps = pickle.dumps


@pytest.fixture(params=["numpy 2", "numpy 1"])
def numpy_save(request):
    def save(content, path):
        module = NumpyModule if request.param == "numpy 1" else pickle
        torch.save(content, path, pickle_module=module)
        with torch.serialization._open_zipfile_reader(io.BytesIO(path.read_bytes())) as z:
            names = z.get_record("data.pkl")
        assert (b"cnumpy.core.multiarray\n" in names) == (request.param == "numpy 1")
        assert (b"cnumpy._core.multiarray\n" in names) == (request.param == "numpy 2")

    return save


def test_numbers_of_numpy(tmp_path, numpy_save):
    given = {
        "double": np.float64(0.1),
        "float": np.float32(2.5),
        "int": np.int64(-7),
        "byte": np.uint8(200),
        "bool": np.bool_(True),
        "best": [np.float64(0.5), 1],
        "complex": np.complex64(1.5 - 2j),
        "wide": np.complex128(complex(0.1, -np.inf)),
        "text": np.str_("aé€😀"),
        "no text": np.str_(""),
        "long": np.str_("x" * 5000),
        "bytes": np.bytes_(b"a\0\xffb"),
        "no bytes": np.bytes_(b""),
    }
    numpy_save(given, tmp_path / "a.pt")
    report = json.loads(run("inspect", tmp_path / "a.pt", "--json").stdout)
    assert any("numpy" in w for w in report["warnings"])
    run("verify", tmp_path / "a.pt")
    run("convert", tmp_path / "a.pt", tmp_path / "s.safetensors")
    run("convert", tmp_path / "s.safetensors", tmp_path / "d", "--container", "dcp")
    for source in ("a.pt", "d"):
        done = run("convert", tmp_path / source, tmp_path / "b.pt", "--force")
        assert "opaque" not in done.stderr
        back = torch.load(tmp_path / "b.pt", weights_only=True)
        assert back == given
        kinds = {"double": float, "int": int, "complex": complex, "text": str, "bytes": bytes}
        assert all(type(back[name]) is kind for name, kind in kinds.items())


@pytest.mark.parametrize(
    "dtype, content",
    [
        ("U1", b"\x00\xd8\x00\x00"),
        ("U3", b"a\0\0\0b"),
        ("U1", b"a\0\0\0b\0\0\0"),
        ("S3", b"abcd"),
        ("S2", b"a"),
    ],
    ids=["a surrogate", "cut", "too long", "bytes too long", "bytes cut"],
)
def test_text_of_numpy_that_is_no_text_stays_opaque(tmp_path, dtype, content):
    np_str = Called(np._core.multiarray.scalar, (np.dtype(dtype), content))
    torch.save({"text": np_str, "w": torch.ones(2)}, tmp_path / "a.pt")
    assert "opaque" in run("inspect", tmp_path / "a.pt").stdout


def arrays():
    """Of every plain dtype, and of shapes that a writer may get wrong."""
    kinds = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
    out = {kind: np.arange(-3, 3).astype(kind) for kind in kinds}
    out |= {
        "empty": np.zeros((0, 3)),
        "none": np.array(1.5),
        "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    }
    return {**out, "nan": np.array([np.nan, np.inf]), "listed": [np.arange(3), "x"]}


def test_arrays_of_numpy(tmp_path, numpy_save):
    """As `rng_state.pth` has them: a run continues with the same numbers, through any container."""
    _, opt = optimizer()
    given = {"numpy": np.random.get_state(), **arrays()}
    numpy_save({"rng": given, "optimizer": opt.state_dict()}, tmp_path / "a.pt")
    shown = run("inspect", tmp_path / "a.pt").stdout
    assert "<numpy.ndarray uint32 [624]>" in shown and "<numpy.ndarray float64 [2, 3]>" in shown
    assert run("verify", tmp_path / "a.pt").stderr == ""
    run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", "lowbit")
    run("convert", tmp_path / "a.pt", tmp_path / "d", "--container", "dcp")
    run("convert", tmp_path / "d", tmp_path / "c.pt")
    run("reshard", tmp_path / "a.pt", tmp_path / "r", "--world-size", "2")
    run("convert", tmp_path / "r", tmp_path / "e.pt")
    for path in ("b.pt", "c.pt", "e.pt"):
        assert run("diff", tmp_path / "a.pt", tmp_path / path, "--include", "rng*").stdout
        back = torch.load(tmp_path / path, weights_only=False)["rng"]
        assert set(back) == set(given)  # directories sort names
        for name, value in given.items():
            assert same(value, back[name]), (path, name, back[name])
        np.random.set_state(back["numpy"])
    # torch's allowlist has the names that the file had.
    names = (tmp_path / "b.pt").read_bytes()
    source = (tmp_path / "a.pt").read_bytes()
    for name in (b"cnumpy.core.multiarray\n", b"cnumpy._core.multiarray\n"):
        assert (name in names) == (name in source)
    # JSON has no place for them.
    error = run("convert", tmp_path / "a.pt", tmp_path / "s.safetensors", code=3).stderr
    assert "holds arrays of numbers that are not read" in error and "rng.numpy (" in error
    run("convert", tmp_path / "a.pt", tmp_path / "s.safetensors", "--exclude", "rng*")


UNREAD = {
    "other byte order": np.ones(3, ">f4"),
    "long double": np.ones(3, np.longdouble),
    "records": np.zeros(3, dtype=[("a", "f4"), ("b", "i4")]),
    "masked": np.ma.masked_array(np.ones(3), mask=[0, 1, 0]),
    "matrix": np.asmatrix(np.eye(2)),
}


@pytest.mark.parametrize("kind", UNREAD)
def test_arrays_that_cannot_be_read_are_data(tmp_path, kind):
    """Weights may be arrays: nothing but the user leaves them out."""
    _, opt = optimizer()
    torch.save({"optimizer": opt.state_dict(), "x": [UNREAD[kind]]}, tmp_path / "a.pt")
    for more in ([], ["--to", "lowbit"], ["--container", "safetensors"], ["--container", "dcp"]):
        error = run("convert", tmp_path / "a.pt", tmp_path / "b", *more, code=3).stderr
        assert "arrays of numbers that are not read" in error and "(numpy." in error, error
        assert "--exclude" in error and not (tmp_path / "b").exists()
    error = run("reshard", tmp_path / "a.pt", tmp_path / "b", "--world-size", "2", code=3).stderr
    assert "arrays of numbers" in error
    run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--exclude", "x*")


@pytest.mark.parametrize("dtype", ["U1", "S1", "M8[D]", "O"])
def test_arrays_of_anything_but_numbers_are_left_out(tmp_path, dtype):
    torch.save({"w": torch.ones(2), "x": np.zeros(2, dtype)}, tmp_path / "a.pt")
    done = run("convert", tmp_path / "a.pt", tmp_path / "b.pt")
    assert "x: is opaque (numpy.ndarray [2]) and is left out" in done.stderr


def test_other_arrays_differ(tmp_path):
    torch.save({"x": np.arange(3), "w": torch.ones(2)}, tmp_path / "a.pt")
    torch.save({"x": np.arange(1, 4), "w": torch.ones(2)}, tmp_path / "b.pt")
    assert (
        "x: has another value" in run("diff", tmp_path / "a.pt", tmp_path / "b.pt", code=4).stdout
    )


@pytest.mark.parametrize("place", [("state", 0, "exp_avg"), ("param_groups", 0, "lr")])
def test_an_array_in_an_optimizer(tmp_path, place):
    """Where a tensor is expected it is none: copied as it is, and never left out."""
    _, opt = optimizer()
    content = {"optimizer": opt.state_dict(), "w": torch.ones(3)}
    entry = content["optimizer"][place[0]][place[1]]
    entry[place[2]] = np.arange(3.0)
    torch.save(content, tmp_path / "a.pt")
    for to in ("lowbit", "torch"):
        error = run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", to, code=3).stderr
        assert (
            ".".join(map(str, place)) in error and "is opaque (numpy.ndarray float64 [3])" in error
        )
    run("convert", tmp_path / "a.pt", tmp_path / "b.safetensors", code=3)
    assert not (tmp_path / "b.pt").exists() and not (tmp_path / "b.safetensors").exists()
    run("convert", tmp_path / "a.pt", tmp_path / "b.pt")
    back = torch.load(tmp_path / "b.pt", weights_only=False)["optimizer"][place[0]][place[1]]
    assert same(entry[place[2]], back[place[2]])


NUMBERS = {
    "f2": (0.1, float(np.float16(0.1))), "f4": (0.1, float(np.float32(0.1))), "f8": (0.1, 0.1),
    "i1": (-3, -3), "u1": (200, 200), "i4": (-70000, -70000), "i8": (2**62 + 1, 2**62 + 1),
    "u8": (2**64 - 1, 2**64 - 1), "?": (True, True),
}  # fmt: skip


@pytest.mark.parametrize("scalar", [False, True], ids=["array", "scalar"])
@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers_of_every_dtype_as_settings(tmp_path, kind, scalar):
    """An array of no dimensions is the number that it holds, to the last bit, in any container."""
    given, wanted = NUMBERS[kind]
    _, opt = optimizer()
    number = np.array(given, dtype=kind)
    content = {"optimizer": opt.state_dict(), "w": torch.ones(3), "mine": np.array(1.5)}
    content["optimizer"]["param_groups"][0] |= {"weight_decay": number[()] if scalar else number}
    torch.save(content, tmp_path / "a.pt")
    dcp.save(content, checkpoint_id=tmp_path / "d", no_dist=True)
    for source in ("a.pt", "d"):
        for to in ("torch", "lowbit"):
            run("convert", tmp_path / source, tmp_path / "b.pt", "--to", to, "--force")
            back = torch.load(tmp_path / "b.pt", weights_only=False)
            value = back["optimizer"]["param_groups"][0]["weight_decay"]
            assert type(value) is type(wanted) and value == wanted
            assert same(back["mine"], np.array(1.5))  # which is not a setting
        assert json.loads(run("inspect", tmp_path / source, "--json").stdout)["dialect"] == "torch"
        run("convert", tmp_path / source, tmp_path / "s.safetensors", "--force")
        run("convert", tmp_path / "s.safetensors", tmp_path / "t.pt", "--force")
        back = torch.load(tmp_path / "t.pt", weights_only=True)
        assert (
            back["optimizer"]["param_groups"][0]["weight_decay"] == wanted and back["mine"] == 1.5
        )


def test_arrays_of_no_dimensions_inside_settings(tmp_path):
    """A pair of betas, an infinite limit and a half that is not normal;
    one with dimensions stays refused.
    """
    _, opt = optimizer()
    group = opt.param_groups[0]
    group["betas"] = (np.array(0.8), np.array(0.9, "f4"))
    group["mine"] = [np.array(np.inf, "f2"), np.array(2.0**-24, "f2"), np.array(-1.5, "f2")]
    group["lr"] = np.array(0.5)
    torch.save(opt.state_dict(), tmp_path / "a.pt")
    run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", "lowbit")
    back = torch.load(tmp_path / "b.pt", weights_only=True)["param_groups"][0]
    assert back["betas"] == (0.8, float(np.float32(0.9))) and back["lr"] == 0.5
    assert back["mine"] == [float("inf"), 2.0**-24, -1.5]
    model, _ = optimizer()
    loaded = lowbit.AdamW(model.parameters())
    lowbit.load_optimizer(loaded, tmp_path / "a.pt")
    assert loaded.param_groups[0]["lr"] == 0.5 and loaded.param_groups[0]["betas"] == back["betas"]
    group["lr"] = np.array([0.5])
    torch.save(opt.state_dict(), tmp_path / "a.pt")
    error = run("convert", tmp_path / "a.pt", tmp_path / "c.pt", "--to", "lowbit", code=3).stderr
    assert "param_groups.0.lr: is opaque (numpy.ndarray float64 [1])" in error


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("number", [np.array(5.0), np.array(5, "f4"), np.array(5), np.int64(5)])
def test_numbers_of_numpy_in_the_state(tmp_path, number, flat):
    """A count of steps, and a number of the user's, read as the numbers that they are;
    without --to they stay arrays.
    """
    model, opt = optimizer()
    content = opt.state_dict()
    moment = content["state"][0]["exp_avg"]
    for state in content["state"].values():
        state |= {"step": number, "mine": np.array(7)}
    if flat:
        items = {f"state.{n}.{k}": v for n, s in content["state"].items() for k, v in s.items()}
        groups = {
            f"param_groups.{n}.{k}": v
            for n in (0, 1)
            for k, v in content["param_groups"][0].items()
            if k != "params"
        }
        content = items | groups
    torch.save(content, tmp_path / "a.pt")
    dcp.save(content, checkpoint_id=tmp_path / "d", no_dist=True)
    for source in ("a.pt", "d"):
        assert json.loads(run("inspect", tmp_path / source, "--json").stdout)["dialect"] == "torch"
        for to in ("torch", "lowbit", "bitsandbytes")[: 2 if flat else 3]:
            run("convert", tmp_path / source, tmp_path / "b.pt", "--to", to, "--force")
            back = torch.load(tmp_path / "b.pt", weights_only=True)
            assert (back["state.0.step"] if flat else back["state"][0]["step"]) == 5
        run("convert", tmp_path / source, tmp_path / "s.safetensors", "--force")
        run("convert", tmp_path / "s.safetensors", tmp_path / "t.pt", "--to", "torch", "--force")
        back = torch.load(tmp_path / "t.pt", weights_only=True)
        assert (back["state.0.step"] if flat else back["state"][0]["step"]) == 5
    run("convert", tmp_path / "a.pt", tmp_path / "c.pt")
    back = torch.load(tmp_path / "c.pt", weights_only=False)
    assert same(back["state.0.mine"] if flat else back["state"][0]["mine"], np.array(7))
    if not flat:
        loaded = lowbit.AdamW(model.parameters(), state_format="float32")
        lowbit.load_optimizer(loaded, tmp_path / "a.pt")
        assert loaded.state_dict()["state"][0]["step"] == 5
        assert torch.equal(loaded.state_dict()["state"][0]["exp_avg"], moment)


def test_an_array_of_no_dimensions_is_no_moment(tmp_path):
    """Not even of a parameter without dimensions, whose moment is a tensor."""
    _, opt = optimizer()
    content = opt.state_dict()
    content["state"][0]["exp_avg"] = np.array(1.0)
    torch.save(content, tmp_path / "a.pt")
    error = run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", "lowbit", code=3).stderr
    assert "state.0.exp_avg: is opaque (numpy.ndarray float64 [])" in error


def test_numpy_in_the_settings_of_a_group(tmp_path):
    _, opt = optimizer()
    opt.param_groups[0]["lr"] = np.float64(0.5)
    torch.save(opt.state_dict(), tmp_path / "a.pt")
    run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", "lowbit")
    assert torch.load(tmp_path / "b.pt")["param_groups"][0]["lr"] == 0.5


def test_an_array_that_is_the_whole_file(tmp_path):
    torch.save(np.arange(3), tmp_path / "a.pt")
    error = run("convert", tmp_path / "a.pt", tmp_path / "b.safetensors", code=3).stderr
    assert "would be without them: the whole (numpy.ndarray int64 [3])" in error
