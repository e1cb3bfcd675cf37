"""Every kind of checkpoint that people have, made by torch or the peer itself at 1, 2 and 4 ranks,
small, and what each of them must mean.

    from tests.support.kinds.catalog import KINDS, of

    @pytest.mark.parametrize("kind, world", of(dialect="torch", container="dcp"))
    def test_something(made, kind, world):       # `made` is a fixture of conftest.py
        path = made(kind, world)                 # made once a session, all kinds of a world in one
                                                 launch
        assert same(KINDS[kind].held(path), KINDS[kind].meaning())

What is in a kind does not depend on the world (tests/support/kinds/runs.py says how), so that one
meaning holds for all. A copy of a checkpoint, resharded or converted, can be read back by `held` of
the kind it now is.
"""

from __future__ import annotations

import fcntl
import functools
import importlib.util
import pathlib
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.support.kinds import runs as run
from tests.support.kinds.decode import dequantize
from tests.support.ranks import launch
from tests.support.require import need

WORKER = pathlib.Path(__file__).with_name("worker.py")
WORLDS = (1, 2, 4)
Meaning = dict[tuple[str, str], Tensor]


@dataclass(frozen=True)
class Content:
    """What a checkpoint holds, by names of parameters: state, weights, and the group of each."""

    state: Mapping[str, Mapping[str, Any]]
    model: Mapping[str, Tensor]
    group: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Kind:
    """One kind of checkpoint.

    Attributes:
        dialect: as `convert --from` has it, and a key of `_DIALECTS` in decode.py.
        container: dcp (a directory), torch (a zip file), legacy (a file of pickles) or safetensors.
        worlds: the numbers of ranks that it can be made at.
        params: shapes by name, in the order of the optimizer's numbers.
        by: "torch" or "peer": their own code wrote the bytes of the state; "golden": their own
            bytes in a layout written here; "synthesized": both written here after the layout.
        needs: the package that makes and reads it, beside torch.
        recoverable: whether a reader can know the values; where not, `meaning` must not be asked.
        expected: what it must hold.
    """

    name: str
    dialect: str
    container: str
    worlds: tuple[int, ...]
    params: Mapping[str, tuple[int, ...]]
    by: str
    expected: Callable[[], Content]
    recoverable: bool = True
    needs: str = ""

    @property
    def present(self) -> bool:
        """Whether what it needs is installed."""
        return not self.needs or importlib.util.find_spec(self.needs) is not None

    @property
    def file(self) -> str:
        """The name under a folder; a directory for dcp."""
        ends = {"dcp": "", "torch": ".pt", "legacy": ".pt", "safetensors": ".safetensors"}
        return self.name + ends[self.container]

    def meaning(self) -> Meaning:
        """Float32 values by (parameter, state), under torch's names of the states;
        weights are the state "param".
        """
        assert self.recoverable, f"nobody can know what a checkpoint of the kind {self.name} means"
        return _meaning_of(self.name)

    def held(self, path: pathlib.Path) -> Meaning:
        """The same of a checkpoint of this dialect and container, read by torch and the peer."""
        return self.decoded(read(path, self.container, self.params))

    def decoded(self, content: Content) -> Meaning:
        """What a content means in this kind's dialect."""
        made: Meaning = {}
        for name in {**content.state, **content.model}:
            weight, state = content.model.get(name), dict(content.state.get(name, {}))
            shape = self.params.get(name, () if weight is None else tuple(weight.shape))
            values = dequantize(
                self.dialect, state, shape, weight, dict(content.group.get(name, {}))
            )
            made |= {(name, key): value for key, value in values.items()}
        return made


@functools.cache
def _meaning_of(name: str) -> Meaning:
    return KINDS[name].decoded(KINDS[name].expected())


def same(a: Meaning, b: Meaning) -> bool:
    """The same keys, shapes and bits; prints what differs."""
    wrong = [f"only in one: {key}" for key in a.keys() ^ b.keys()]
    for key in a.keys() & b.keys():
        x, y = a[key].contiguous(), b[key].contiguous()
        if x.shape != y.shape:
            wrong.append(f"{key}: {tuple(x.shape)} and {tuple(y.shape)}")
        elif not torch.equal(x.view(torch.int32), y.view(torch.int32)):
            wrong.append(f"{key}: {int((x != y).sum())} of {x.numel()} values differ")
    print(*wrong[:20], sep="\n")
    return not wrong


# Reading back


def read(path: pathlib.Path, container: str, params: Mapping[str, tuple[int, ...]]) -> Content:
    """What torch and safetensors find in a checkpoint."""
    if container == "dcp":
        return _by_name(nested(path), params)
    if container == "safetensors":
        from safetensors.torch import load_file

        return Content({}, load_file(path), {})
    return _by_name(load_file_of_torch(path), params)


def load_file_of_torch(path: pathlib.Path) -> Any:
    """torch.load of a file whose classes may be of packages that are not here,
    or no longer are where they were.
    """
    from tests.support.kinds import peers
    from tests.support.peers.files import stand_in_for_yacs

    data = path.read_bytes()
    stand_in_for_yacs()
    if b"OptimState" not in data:
        return torch.load(path, weights_only=False)
    with peers.prototype_torchao(writing=False):
        return torch.load(path, weights_only=False)


def merged_metadata(path: pathlib.Path) -> Any:
    """The metadata of a directory; where each rank has its own, all of them together,
    which torch itself never does.
    """
    if (path / ".metadata").exists():
        return pickle.loads((path / ".metadata").read_bytes())
    parts = [pickle.loads(p.read_bytes()) for p in sorted(path.glob("__*.metadata"))]
    whole = parts[0]
    for part in parts[1:]:
        for key, entry in part.state_dict_metadata.items():
            mine = whole.state_dict_metadata.setdefault(key, entry)
            if mine is not entry and hasattr(entry, "chunks"):
                mine.chunks += [c for c in entry.chunks if c not in mine.chunks]
        whole.storage_data |= part.storage_data
        whole.planner_data |= part.planner_data or {}
    return whole


def flat(path: pathlib.Path) -> dict[str, Any]:
    """All that a directory holds, by torch's own `dcp.load` in one process. Subclasses of torchao
    come out as the values that they stand for.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    if any(b"torchao" in file.read_bytes() for file in path.glob("*.distcp")):
        import torchao.optim  # noqa: F401 - registers its classes with torch.load
    metadata = merged_metadata(path)

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return metadata

    target: dict[str, Any] = {}
    for key, entry in metadata.state_dict_metadata.items():
        tensor = isinstance(entry, TensorStorageMetadata)
        target[key] = _filler(entry.size, entry.properties.dtype) if tensor else None
    dcp.load(target, storage_reader=Reader(path), no_dist=True)
    return target


def _filler(size: Iterable[int], dtype: torch.dtype) -> Tensor:
    """Bytes that no checkpoint is full of, so that what was not loaded shows."""
    made = torch.empty(tuple(size), dtype=dtype)
    if made.numel():
        made.reshape(-1).view(torch.uint8).fill_(0xA5 if dtype != torch.bool else 1)
    return made


def nested(path: pathlib.Path) -> dict[str, Any]:
    """The same, nested as it was saved: every item under the path that torch keeps of it."""
    values, paths = flat(path), merged_metadata(path).planner_data
    whole: dict[Any, Any] = {}
    for key, value in values.items():
        *outer, last = paths[key]
        place = whole
        for step in outer:
            place = place.setdefault(step, {})
        place[last] = value
    return whole


def _by_name(content: Mapping[str, Any], params: Mapping[str, tuple[int, ...]]) -> Content:
    """State dicts of every form: under some key or alone, by number or by name,
    nested or flattened.
    """
    places = [content.get(key) for key in ("optim", "optimizer")] + [content]
    optim = next((p for p in places if isinstance(p, Mapping) and _has_state(p)), {})
    model = content.get("model", content if not optim else {})
    model = content.get("master", model)
    names = list(params)
    state: dict[str, dict[str, Any]] = {}
    for key, value in optim.get("state", {}).items():
        name = names[int(key)] if str(key).isdigit() else key
        state[name] = dict(value)
    for key, value in optim.items():  # flattened: "state.<name>.<what>"
        for name in names if key.startswith("state.") else ():
            if key.startswith(f"state.{name}."):
                state.setdefault(name, {})[key.removeprefix(f"state.{name}.")] = value
    group: dict[str, Any] = {}
    groups = optim.get("param_groups", [])
    for said in groups.values() if isinstance(groups, Mapping) else groups:
        for key in said.get("params", ()):
            name = names[int(key)] if str(key).isdigit() else key
            group[name] = {k: v for k, v in said.items() if k != "params"}
    # DistributedDataParallel's own state dict has its wrapper in the names.
    weights = {k.removeprefix("module."): v for k, v in model.items() if isinstance(v, Tensor)}
    return Content(state, weights, group)


def _has_state(place: Mapping[str, Any]) -> bool:
    return "state" in place or any(str(key).startswith("state.") for key in place)


# Making


def make(folder: pathlib.Path, world: int, names: Iterable[str]) -> None:
    """Makes kinds at a number of ranks in one launch, each under `folder`."""
    peers = ("torchao.optim", "bitsandbytes")
    present = tuple(name for name in peers if importlib.util.find_spec(name.split(".")[0]))
    files = (KINDS[name].file for name in names)
    launch.run(WORKER, world if world > 1 else 0, folder, *files, timeout=900, imported=present)


class Made:
    """Makes all kinds of a world under `root` where the first of them is asked for, and keeps them:
    once, for all processes that run tests.
    """

    def __init__(self, root: pathlib.Path) -> None:
        self._root = root

    def __call__(self, name: str, world: int) -> pathlib.Path:
        """The checkpoint; tests must leave it as it is."""
        kind = KINDS[name]
        assert world in kind.worlds
        need(kind.needs, kind.present, f"the kind {name} is made by the package {kind.needs}")
        folder = self._root / f"kinds{world}"
        said = folder / "said"  # empty, or what went wrong: not again for every test
        with (self._root / f"kinds{world}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not said.exists():
                folder.mkdir()
                wanted = [k.name for k in KINDS.values() if world in k.worlds and k.present]
                try:
                    make(folder, world, wanted)
                    said.write_text("")
                except Exception as error:
                    said.write_text(f"{type(error).__name__}: {error}")
        assert said.read_text() == ""
        return folder / kind.file


def of(*, worlds: Iterable[int] = WORLDS, **wanted: str | tuple[str, ...]) -> list[tuple[str, int]]:
    """Pairs of a kind's name and a world, for `parametrize`; by any attribute,
    with one value or several.
    """
    chosen = []
    for kind in KINDS.values():
        fits = (
            getattr(kind, attribute) in ((value,) if isinstance(value, str) else value)
            for attribute, value in wanted.items()
        )
        if all(fits):
            chosen += [(kind.name, world) for world in kind.worlds if world in worlds]
    return chosen


# The kinds

KINDS: dict[str, Kind] = {}
_NEEDS = {"bitsandbytes": "bitsandbytes", "torchao": "torchao"}


@functools.cache
def _shapes(which: str) -> dict[str, tuple[int, ...]]:
    """Shapes by name in an optimizer's order."""
    net = run.Net(run.is_even(which))
    named = dict(net.named_parameters())
    return {name: tuple(named[name].shape) for name in run.order(net)}


def _add(
    name: str,
    which: str,
    dialect: str = "torch",
    container: str = "dcp",
    worlds: tuple[int, ...] = WORLDS,
    *,
    by: str = "torch",
    state: bool = True,
    model: bool = True,
) -> None:
    """A kind that holds a run of tests/support/kinds/runs.py."""

    def expected() -> Content:
        return Content(
            run.plain_state(which) if state else {},
            run.plain_model(which) if model else {},
            {},
        )

    needs = _NEEDS.get(dialect, "")
    KINDS[name] = Kind(name, dialect, container, worlds, _shapes(which), by, expected, needs=needs)


def _add_content(
    name: str,
    dialect: str,
    by: str,
    params: Mapping[str, tuple[int, ...]] | None = None,
    recoverable: bool = True,
) -> None:
    """A file of tests/support/kinds/peers.py."""
    params = _shapes("adamw") if params is None else params

    def expected() -> Content:
        from tests.support.kinds import peers

        return _by_name(peers.CONTENT[name](), params)

    needs = _NEEDS.get(dialect, "") if by == "peer" else ""
    KINDS[name] = Kind(name, dialect, "torch", (1,), params, by, expected, recoverable, needs)


for _name in (
    "fsdp2_nested",
    "fsdp2_flattened",
    "fsdp1_sharded",
    "fsdp1_dtensor",
    "ddp",
    "raw",
    "tp_fsdp2",
    "async_save",
    "no_collectives",
    "two_threads",
    "file_per_item",
    "zstd",
    "master",
):
    _add(_name, "adamw")
_add("fsdp2_optim_only", "adamw", model=False)
_add("hsdp", "adamw", worlds=(2, 4))
_add("fsdp1_full", "adamw flat", container="torch")
for _name in ("fsdp2_full", "ddp_file"):
    _add(_name, "adamw", container="torch")
_add("zip_file", "adamw", container="torch", worlds=(1,))
_add("legacy_file", "adamw", container="legacy", worlds=(1,))
_add("optimizer_file", "adamw", container="torch", worlds=(1,), model=False)
_add("model_file", "adamw", container="torch", worlds=(1,), state=False)
_add("safetensors_model", "adamw", container="safetensors", worlds=(1,), state=False)
_add_content("shared_file", "torch", "torch", params={})
for _name in ("master_file", "master_in_state_file"):
    _add_content(_name, "torch", "torch")
for _name in ("adam", "amsgrad", "sgd", "adafactor"):
    _add(_name, _name)
    _add(f"{_name}_file", _name, container="torch", worlds=(1,))
for _preset in ("8bit", "4bit", "fp8", "log8", "factored4", "kahan"):
    _add(f"lowbit_{_preset}", f"lowbit {_preset}", "lowbit", by="peer")
    _add(f"lowbit_{_preset}_file", f"lowbit {_preset}", "lowbit", "torch", (1,), by="peer")
_add("bnb", "bnb", "bitsandbytes", by="peer")
_add("bnb_file", "bnb", "bitsandbytes", "torch", (1,), by="peer")
_add_content("bnb_plain_file", "bitsandbytes", "peer")
_add_content("bnb_2048_file", "bitsandbytes", "synthesized")
for _preset in ("8bit", "4bit", "fp8"):
    _add(f"torchao_{_preset}", f"ao {_preset}", "torchao", by="peer")
    _add(f"torchao_{_preset}_file", f"ao {_preset}", "torchao", "torch", (1,), by="peer")
    _add_content(f"torchao_{_preset}_prototype_file", "torchao", "peer", _shapes("ao 8bit"))
_add_content("torchao_8bit_2048_file", "torchao", "peer", _shapes("ao 8bit"))
for _name in (
    "014",
    "014_plain",
    "013",
    "013_compressed",
    "014_float16",
    "014_float32",
    "014_32bit",
):
    _add_content(f"flashoptim_{_name}_file", "flashoptim", "synthesized")
_add_content("flashoptim_golden_file", "flashoptim", "golden", {"w": (70,)})
for _name in ("group", "rank1", "factor"):
    _add_content(f"lpmm_{_name}_file", "lpmm", "golden", {"w": (41, 130), "b": (41,)})
for _name in ("f0", "f1", "f2", "al8", "al16"):
    _add_content(
        f"adafactor8bit_{_name}_file",
        "adafactor8bit",
        "synthesized",
        {**_shapes("adafactor"), "table": (5000,)},
    )
for _name in ("al8", "uf4", "d8"):
    _add_content(f"adafactor8bit_golden_{_name}_file", "adafactor8bit", "golden", {"w": (96, 64)})
# Its code without CUDA left nothing but each block's maximum.
_add_content(
    "adafactor8bit_f1_fallback_file", "adafactor8bit", "golden", {"w": (96, 64)}, recoverable=False
)


def _flash_even() -> Content:
    from tests.support.kinds import peers

    both = {name: peers.flash_even(name) for name in peers.EVEN}
    state = {name: entry for name, (_, entry) in both.items()}
    group = {"master_bytewidth": 3}
    return Content(state, {name: w for name, (w, _) in both.items()}, dict.fromkeys(both, group))


KINDS["flashoptim"] = Kind(
    "flashoptim",
    "flashoptim",
    "dcp",
    WORLDS,
    {"body.linear.weight": (64, 256), "body.conv.weight": (64, 64, 2, 2)},
    "synthesized",
    _flash_even,
)
