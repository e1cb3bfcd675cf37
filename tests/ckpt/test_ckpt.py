"""lowbit-ckpt on real directories of torch.distributed.checkpoint, its usage,
and what it replaces.
"""

import pickle
import re
import subprocess
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.ckpt.ckpt_folders import assert_torch_reads, content, inspect, leaves, saved, small
from tests.support.paths import ROOT
from tests.support.peers.files import TOOL, need_tool, run

pytestmark = pytest.mark.slow

need_tool()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 64])
def test_reshard_keeps_every_bit_and_torch_reads_it(tmp_path, ranks):
    state = saved(tmp_path / "a")
    run("reshard", tmp_path / "a", tmp_path / "b", "--world-size", ranks)
    assert_torch_reads(tmp_path / "b", state)
    run("reshard", tmp_path / "b", tmp_path / "c", "--world-size", 1)
    assert_torch_reads(tmp_path / "c", state)
    a, b, c = (inspect(tmp_path / name) for name in "abc")
    assert a["digest"] == b["digest"] == c["digest"] and a["values"] == b["values"] == c["values"]
    large = next(t for t in b["tensors"] if t["shape"] == [1000, 1500])
    assert large["chunks"] == -(-1000 // -(-1000 // ranks))


def test_inspect_tells_what_is_there(tmp_path):
    saved(tmp_path / "a")
    report = inspect(tmp_path / "a")
    assert report["steps"] == [7.0]
    assert report["values"]["optim.param_groups.0.lr"] == 0.125
    assert report["values"]["optim.param_groups.0.betas"] == [0.9, 0.99]
    shapes = {t["name"]: (t["shape"], t["dtype"]) for t in report["tensors"]}
    assert shapes["model.bfloat16"] == ([37, 19], "bfloat16")
    assert report["bytes"] == sum(
        t.numel() * t.element_size() for _, t in leaves(content()) if isinstance(t, torch.Tensor)
    )
    text = run("inspect", tmp_path / "a").stdout
    assert "optim.state.a.b.weight.exp_avg" in text and "step 7" in text


def test_columns_are_as_wide_as_what_is_in_them(tmp_path):
    content = {
        "a": torch.zeros(3),
        "b": torch.zeros(3, dtype=torch.float8_e4m3fn),
        "c": torch.zeros(1, 2, 1, 2, 1, 2, 1, 2),
    }
    torch.save(content, tmp_path / "a.pt")
    lines = run("inspect", tmp_path / "a.pt").stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("name"))
    for column in ("shape", "chunks", "bytes"):
        end = lines[at].index(column) + len(column)
        ends = {"shape": "]", "chunks": "1"}.get(column)
        for line in lines[at + 1 : at + 4]:
            assert line[end:].startswith(" ") or len(line) == end, lines[at : at + 4]
            assert ends is None or line[:end].endswith(ends), lines[at : at + 4]


def test_columns_and_grids_of_chunks(tmp_path):
    """Tensors that were sharded on columns, or on rows and columns,
    as two ranks of a mesh write them.
    """
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

    whole = torch.arange(12 * 10, dtype=torch.int32).reshape(12, 10)
    saved(tmp_path / "a", {f"x{i}": torch.zeros(1) for i in range(1)})
    boxes = [((0, 0), (5, 4)), ((0, 4), (5, 6)), ((5, 0), (7, 4)), ((5, 4), (7, 6))]
    pieces = {
        f"p{i}": whole[o[0] : o[0] + s[0], o[1] : o[1] + s[1]].contiguous()
        for i, (o, s) in enumerate(boxes)
    }
    saved(tmp_path / "b", pieces)
    metadata = pickle.loads((tmp_path / "b" / ".metadata").read_bytes())
    entry = metadata.state_dict_metadata["p0"]
    entry.size = torch.Size(whole.shape)
    entry.chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in boxes]
    infos = {index.fqn: info for index, info in metadata.storage_data.items()}
    metadata.state_dict_metadata = {"x": entry}
    metadata.storage_data = {
        MetadataIndex("x", torch.Size(o)): infos[f"p{i}"] for i, (o, _) in enumerate(boxes)
    }
    metadata.planner_data = {"x": ("x",)}
    (tmp_path / "b" / ".metadata").write_bytes(pickle.dumps(metadata))
    for ranks in (1, 3, 5):
        run("reshard", tmp_path / "b", tmp_path / f"to{ranks}", "--world-size", ranks)
        assert_torch_reads(tmp_path / f"to{ranks}", {"x": whole})
        assert inspect(tmp_path / f"to{ranks}")["digest"] == inspect(tmp_path / "b")["digest"]


def test_metadata_of_each_rank(tmp_path):
    """`use_collectives=False` leaves one metadata file for each rank;
    torch's own converter reads only the first.
    """
    state = {"x": torch.arange(24.0).reshape(6, 4)}
    saved(tmp_path / "a", {"x": state["x"]})
    run("reshard", tmp_path / "a", tmp_path / "b", "--world-size", 2)
    metadata = pickle.loads((tmp_path / "b" / ".metadata").read_bytes())
    for rank in (0, 1):
        part = pickle.loads(pickle.dumps(metadata))
        entry = part.state_dict_metadata["x"]
        entry.chunks = [entry.chunks[rank]]
        part.storage_data = {
            i: s for i, s in part.storage_data.items() if s.relative_path.startswith(f"__{rank}_")
        }
        (tmp_path / "b" / f"__{rank}.metadata").write_bytes(pickle.dumps(part))
    (tmp_path / "b" / ".metadata").unlink()
    run("reshard", tmp_path / "b", tmp_path / "c", "--world-size", 1)
    assert_torch_reads(tmp_path / "c", state)
    (tmp_path / "b" / "__1.metadata").unlink()
    assert (
        "missing"
        in run("reshard", tmp_path / "b", tmp_path / "d", "--world-size", 1, code=3).stderr
    )


@pytest.fixture
def source(tmp_path):
    return small(tmp_path)


def test_usage(tmp_path, source):
    assert run("inspect", code=2).stderr
    run("reshard", source / "a", source / "b", "--world-size", 0, code=2)
    run("reshard", source / "a", source / "b", "--world-size", 2)
    assert "exists" in run("reshard", source / "a", source / "b", "--world-size", 3, code=2).stderr
    before = inspect(source / "b")["digest"]
    run("reshard", source / "a", source / "b", "--world-size", 3, "--force")
    assert inspect(source / "b")["digest"] == before and inspect(source / "b")["files"] == 3
    assert run("--version").stdout.startswith("lowbit-ckpt ")
    run("inspect", source / "nothing", code=3)


@pytest.mark.parametrize(
    "command", [["inspect", "a"], ["inspect", "a", "--json"], ["completion", "bash"], ["--help"]]
)
def test_an_output_that_the_disk_does_not_take_is_an_error(source, command):
    with open("/dev/full", "w") as full:
        done = subprocess.run([TOOL, *command], cwd=source, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1 and b"cannot write" in done.stderr


def test_force_replaces_no_file_but_a_checkpoint(source, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print('three days of work')\n")
    for command in (
        ["convert", source / "a", script, "--container", "torch"],
        ["inspect", source / "a", "--html", script],
    ):
        assert "neither a checkpoint nor a page" in run(*command, "--force", code=2).stderr
    assert script.read_text().startswith("print")
    for name in ("b.pt", "b.safetensors"):
        (tmp_path / name).touch()
        for _ in range(2):  # an empty file, then what it became
            run("convert", source / "a", tmp_path / name, "--force")
    for _ in range(2):
        run("inspect", source / "a", "--html", tmp_path / "page.html", "--force")


def test_force_replaces_no_part_of_the_source(source, tmp_path):
    """The folder's own files, the zip around a file; a page that lies there is none of it."""
    for name in (".metadata", "__0_0.distcp"):
        path = source / "a" / name
        before = path.read_bytes()
        error = run("convert", source / "a", path, "--container", "torch", "--force", code=2).stderr
        assert "lies in the source" in error or "neither a checkpoint nor a page" in error
        run("inspect", source / "a", "--html", path, "--force", code=2)
        assert path.read_bytes() == before
    for _ in range(2):
        run("inspect", source / "a", "--html", source / "a" / "page.html", "--force")
    run("verify", source / "a")
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    with zipfile.ZipFile(tmp_path / "outer.zip", "w") as z:
        z.write(tmp_path / "w.pt", "w.pt")
    before = (tmp_path / "outer.zip").read_bytes()
    error = run(
        "convert",
        tmp_path / "outer.zip" / "w.pt",
        tmp_path / "outer.zip",
        "--container",
        "torch",
        "--force",
        code=2,
    )
    assert (
        "is the source; choose another target" in error.stderr
        and (tmp_path / "outer.zip").read_bytes() == before
    )
    error = run("inspect", source / "a", "--html", tmp_path / "w.pt", "--force", code=2).stderr
    assert "is a checkpoint, which no page replaces" in error


def test_the_version_is_the_packages():
    import lowbit

    assert run("--version").stdout.splitlines()[0] == f"lowbit-ckpt {lowbit.__version__}"


def test_the_version_says_the_license_and_every_library_of_the_notices():
    _, license, *libraries = run("--version").stdout.splitlines()
    assert license.endswith("License: Apache-2.0") and libraries.pop(0) == "Built with:"
    printed = [
        re.fullmatch(r"  (\S+) (\d+(?:\.\d+)+) \((\S+)\)", line).group(1, 3) for line in libraries
    ]
    notices = (ROOT / "THIRD_PARTY_NOTICES").read_text()
    noted = re.findall(r"^={80}\n(.+?): .*\n.*\nLicense: (\S+)", notices, re.M)
    in_the_package_alone = {"libstdc++, libgcc and glibc's start files", "NVIDIA CUDA Runtime"}
    assert printed == [x for x in noted if x[0] not in in_the_package_alone]


def test_inspect_names_what_low_bit_state_is(tmp_path):
    """Codes, scales, means and what lies beside weights,
    of formats that the tool has not heard of one by one.
    """
    import lowbit

    params = [
        ("w", torch.nn.Parameter(torch.randn(64, 256).bfloat16())),
        ("v", torch.nn.Parameter(torch.randn(64, 256))),
    ]
    first = lowbit.scaled("power1_5", scale="rank1")
    opts = [
        lowbit.AdamW(params[:1], state_format="4bit", param_format="bfloat16_split16"),
        lowbit.AdamW(params[1:], state_format={"exp_avg": first, "exp_avg_sq": "factored"}),
    ]
    state = {name: opt.state[p] for opt, (name, p) in zip(opts, params, strict=True)}
    dcp.save({"optim": {"state": state}}, checkpoint_id=tmp_path / "c", no_dist=True)
    kinds = set(inspect(tmp_path / "c")["bytes_by_kind"])
    assert kinds == {
        "codes, dynamic4",
        "scales, dynamic4",
        "codes, power1_4_unsigned",
        "scales, power1_4_unsigned",
        "kept beside weights",
        "codes, power1_5",
        "scales, power1_5",
        "factored moments, float32",
        "step counters",
        "random streams",
        "shapes of parameters",
    }


def test_inspect_names_every_format_of_the_catalog(tmp_path):
    """Each by its whole name: 'float8_e4m3_unsigned', not 'float8_e4m3'."""
    from lowbit import ops

    formats = [
        f["name"] for f in ops.catalog()["state"] if f["name"] not in ("float32", "bfloat16")
    ]
    assert "uniform8" in formats
    for format in formats:
        leaves = {f"exp_avg_{format}": torch.zeros(8), f"exp_avg_{format}_scale": torch.zeros(1)}
        path = tmp_path / format
        dcp.save({"optim": {"state": {"w": leaves}}}, checkpoint_id=path, no_dist=True)
        kinds = inspect(path)["bytes_by_kind"]
        assert set(kinds) == {f"codes, {format}", f"scales, {format}"}, kinds
