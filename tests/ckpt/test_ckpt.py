"""lowbit-ckpt on real directories of torch.distributed.checkpoint, and on broken and hostile ones."""

import json
import os
import pickle
import re
import shutil
import signal
import struct
import subprocess
import time
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from paths import ROOT
from require import need

TOOL = shutil.which("lowbit-ckpt") or ""
need(
    "ckpt",
    bool(TOOL),
    "lowbit-ckpt is not on PATH: run make where its libraries are installed",
    module=True,
)


def run(*arguments, code=0):
    done = subprocess.run([TOOL, *map(str, arguments)], capture_output=True, text=True, timeout=600)
    assert done.returncode == code, f"{arguments}: exit {done.returncode}, {done.stderr}"
    return done


def inspect(path):
    return json.loads(run("inspect", path, "--json", "--digest").stdout)


def content(seed=0):
    """Every dtype that torch can save, awkward shapes, nested and flat names, and values that are no tensors."""
    generator = torch.Generator().manual_seed(seed)
    floats = torch.randn(37, 19, generator=generator)
    tensors = {
        str(dtype).removeprefix("torch."): floats.mul(10).to(dtype)
        for dtype in (
            torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32,
            torch.int64, torch.bool, torch.complex64, torch.uint16, torch.uint32, torch.float8_e4m3fn, torch.float8_e5m2,
        )
    }  # fmt: skip
    shapes = {
        "scalar": torch.tensor(3.5),
        "one": torch.randn(1),
        "empty": torch.empty(0, 5),
        "empty_row": torch.empty(4, 0),
        "thin": torch.randn(3, 1),
        "deep": torch.randn(5, 3, 2, 4),
        "transposed": torch.randn(6, 9).t(),
        "sliced": torch.randn(40, 8)[3:31, ::2],
        "large": torch.randn(1000, 1500),
    }
    return {
        "model": {"layers": [{"weight": t} for t in shapes.values()], **tensors},
        "optim": {"state": {"a.b.weight": {"step": torch.tensor(7.0), "exp_avg": torch.randn(8, 8)}},
                  "param_groups": [{"lr": 0.125, "betas": (0.9, 0.99), "name": "x", "none": None, "flag": True, "params": ["a.b.weight"]}]},
    }  # fmt: skip


def saved(path, state=None):
    state = content() if state is None else state
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return state


def leaves(value, path=()):
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from leaves(item, (*path, i))
    else:
        yield path, value


def same(a, b):
    if isinstance(a, torch.Tensor):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(
                a.contiguous().reshape(-1).view(torch.uint8),
                b.contiguous().reshape(-1).view(torch.uint8),
            )
        )
    return type(a) is type(b) and a == b


def blank(value):
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    return [blank(item) for item in value] if isinstance(value, list) else value


def assert_torch_reads(path, state):
    target = blank(state)
    dcp.load(target, checkpoint_id=path, no_dist=True)
    wanted = dict(leaves(state))
    for key, got in leaves(target):
        assert same(wanted[key], got), key


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


def test_columns_and_grids_of_chunks(tmp_path):
    """Tensors that were sharded on columns, or on rows and columns, as two ranks of a mesh write them."""
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
    """`use_collectives=False` leaves one metadata file for each rank; torch's own converter reads only the first."""
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


# Broken and hostile input: one line, exit 3, no output.


def refused(tmp_path, *words):
    for command in (
        ("inspect", tmp_path / "a", "--digest"),
        ("reshard", tmp_path / "a", tmp_path / "out", "--world-size", 2),
    ):
        done = run(*command, code=3)
        assert done.stderr.startswith("lowbit-ckpt: ") and done.stderr.count("\n") == 1, done.stderr
        assert all(word in done.stderr for word in words), done.stderr
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith((".", "out"))) == [], (
        "something was left behind"
    )
    return done.stderr


@pytest.fixture
def source(tmp_path):
    saved(
        tmp_path / "a",
        {"x": torch.arange(4096.0).reshape(64, 64), "y": torch.arange(10), "lr": 0.5},
    )
    return tmp_path


def edit(tmp_path, change):
    """Lets `change` edit the unpickled metadata."""
    path = tmp_path / "a" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def first(metadata, fqn="x"):
    return next(info for index, info in metadata.storage_data.items() if index.fqn == fqn)


def test_a_callable_in_the_metadata_is_named_and_not_called(source):
    marker = source / "executed"
    path = source / "a" / ".metadata"
    body = path.read_bytes()
    evil = (
        b"\x80\x04cposix\nsystem\n(X"
        + struct.pack("<I", len(f"touch {marker}"))
        + f"touch {marker}".encode()
        + b"tR0"
    )
    path.write_bytes(evil + body[2:])
    refused(source, "posix.system", "allowlist")
    assert not marker.exists()


def test_a_callable_in_a_value_is_shown_as_opaque_and_copied(tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.system, (f"touch {tmp_path / 'executed'}",))

    saved(tmp_path / "a", {"x": torch.ones(3), "lr": Evil()})
    assert inspect(tmp_path / "a")["values"]["lr"] == "<not plain data>"
    run("reshard", tmp_path / "a", tmp_path / "b", "--world-size", 2)
    assert not (tmp_path / "executed").exists()


def test_a_truncated_data_file(source):
    file = next((source / "a").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-100])
    refused(source, file.name, "cut off")


@pytest.mark.parametrize("keep", [0, 1, 100, -1, -50])
def test_a_truncated_metadata(source, keep):
    path = source / "a" / ".metadata"
    path.write_bytes(path.read_bytes()[:keep])
    refused(source, ".metadata")


def test_a_hole_in_the_chunk_map(source):
    run("reshard", source / "a", source / "four", "--world-size", 4)
    shutil.rmtree(source / "a")
    (source / "four").rename(source / "a")

    def drop(metadata):
        entry = metadata.state_dict_metadata["x"]
        gone = entry.chunks.pop(2)
        index = next(i for i in metadata.storage_data if i.fqn == "x" and i.offset == gone.offsets)
        del metadata.storage_data[index]

    edit(source, drop)
    refused(source, "x", "a part is missing")


def test_overlapping_chunks(source):
    def overlap(metadata):
        entry = metadata.state_dict_metadata["x"]
        entry.chunks = [
            type(entry.chunks[0])(torch.Size([o, 0]), torch.Size([n, 64]))
            for o, n in ((0, 40), (30, 24))
        ]
        info = first(metadata)
        metadata.storage_data = {i: s for i, s in metadata.storage_data.items() if i.fqn != "x"}
        for chunk in entry.chunks:
            metadata.storage_data[type(next(iter(metadata.storage_data)))("x", chunk.offsets)] = (
                info
            )

    edit(source, overlap)
    refused(source, "overlap")


@pytest.mark.parametrize(
    "path", ["../secret", "/etc/passwd", "..", "", "a/b", "sub/../__0_0.distcp", "link"]
)
def test_paths_out_of_the_folder(source, path):
    (source / "secret").write_bytes(b"secret" * 1000)
    (source / "a" / "link").symlink_to(source / "secret")
    edit(source, lambda m: setattr(first(m), "relative_path", path))
    error = refused(source)
    assert "leads out" in error or "is a link" in error


@pytest.mark.parametrize(
    "field, value, words",
    [
        ("offset", 10**12, "cut off"),
        ("length", 10**15, "cut off"),
        ("offset", -1, "offset"),
        ("offset", 1, ""),
        ("length", 22, ""),
    ],
)
def test_items_that_are_not_where_they_are_said_to_be(source, field, value, words):
    edit(source, lambda m: setattr(first(m), field, value))
    refused(source, words)


def test_metadata_that_disagrees_with_the_items(source):
    before = (source / "a" / ".metadata").read_bytes()
    edit(
        source, lambda m: m.state_dict_metadata["x"].properties.__setattr__("dtype", torch.float16)
    )
    refused(source, "float32", "float16")
    (source / "a" / ".metadata").write_bytes(before)

    def reshape(metadata):
        entry = metadata.state_dict_metadata["x"]
        entry.size = torch.Size([32, 128])
        entry.chunks = [type(entry.chunks[0])(torch.Size([0, 0]), torch.Size([32, 128]))]

    edit(source, reshape)
    refused(source, "[64, 64]", "[32, 128]")


def test_every_flipped_byte_of_the_data_is_noticed_or_harmless(source):
    """Flips bytes all over the data file: each is refused, or leaves every value as it was."""
    file = next((source / "a").glob("*.distcp"))
    whole, digest = file.read_bytes(), inspect(source / "a")["digest"]
    refusals = 0
    for at in range(0, len(whole), 211):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        done = subprocess.run(
            [TOOL, "inspect", source / "a", "--digest"], capture_output=True, text=True
        )
        assert done.returncode in (0, 3), (at, done.stderr)
        refusals += done.returncode == 3
        assert done.returncode == 3 or digest in done.stdout, at
    assert refusals > len(whole) // 211 * 0.8  # tensor bytes are most of the file
    file.write_bytes(whole)
    assert inspect(source / "a")["digest"] == digest


def test_a_save_that_did_not_finish(source):
    (source / "a" / ".metadata").unlink()
    refused(source, "did not finish")


@pytest.mark.parametrize(
    "body, word",
    [
        (b"\x80\x04r\x00\x00\x00\x08.", "empty stack"),
        (b"\x80\x04Nr\xff\xff\xff\x7f.", "memo"),
        (b"\x80\x04" + b"(" * 5_000_000 + b".", "deep"),
        (b"\x80\x04B\xff\xff\xff\xff.", "ends inside"),
        (b"\x80\x04\x8a\xff" + b"\x01" * 255 + b".", "expected a Metadata"),
        (b"\x80\x04N0.", "opcode"),
        (b"\x80\x04NN.", "exactly one"),
        (b"\x80\x04N.N.", "behind its STOP"),
        (b"\x80\x04}(K\x01u.", "without a value"),
        (b"\x80\x04h\x05.", "memo"),
        (b"\x80\x04i" + b"os\nsystem\n.", "opcode"),
        (b"\x80\x04\x82\x01.", "opcode"),
        (b"\x80\x04N.", "Metadata"),
    ],
)
def test_pickle_bombs_and_tricks(source, body, word):
    (source / "a" / ".metadata").write_bytes(body)
    refused(source, word)


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
    error = run("convert", tmp_path / "outer.zip" / "w.pt", tmp_path / "outer.zip", "--container", "torch", "--force", code=2)  # fmt: skip
    assert (
        "is the source; choose another target" in error.stderr
        and (tmp_path / "outer.zip").read_bytes() == before
    )
    error = run("inspect", source / "a", "--html", tmp_path / "w.pt", "--force", code=2).stderr
    assert "is a checkpoint, which no page replaces" in error


def test_a_damaged_item_is_said_with_its_file(source):
    run("reshard", source / "a", source / "b", "--world-size", 3)
    file = source / "b" / "__1_0.distcp"
    whole = file.read_bytes()
    for at in range(len(whole) // 2, len(whole)):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        error = run("verify", source / "b", code=3).stderr
        if "checksum" in error:
            break
    assert error.startswith("lowbit-ckpt: __1_0.distcp: ") and "the file is damaged" in error


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_what_may_not_be_read_is_no_damage(source):
    os.chmod(source, 0o700)
    for path in (source, source / "a", source / "nothing"):
        try:
            done = subprocess.run(
                [TOOL, "verify", path], user=65534, capture_output=True, text=True
            )
        except PermissionError:
            pytest.skip("another user may not run lowbit-ckpt here")
        assert done.returncode == 1 and "Permission denied" in done.stderr


def test_a_killed_reshard_leaves_the_old_folder_whole(tmp_path):
    saved(
        tmp_path / "a",
        {"x": torch.zeros(64 << 20, dtype=torch.uint8).reshape(8192, -1), "y": torch.ones(4)},
    )
    run("reshard", tmp_path / "a", tmp_path / "b", "--world-size", 2)
    before = inspect(tmp_path / "b")["digest"]
    for delay in (0.0, 0.01, 0.03):
        for target, force in ((tmp_path / "new", []), (tmp_path / "b", ["--force"])):
            process = subprocess.Popen(
                [TOOL, "reshard", tmp_path / "a", target, "--world-size", "3", *force],
                stdout=subprocess.DEVNULL,
            )
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
            process.wait()
            shutil.rmtree(tmp_path / "new") if (tmp_path / "new" / ".metadata").exists() else None
            assert not (tmp_path / "new").exists()
            assert inspect(tmp_path / "b")["digest"] == before


def test_the_version_is_the_packages():
    import lowbit

    assert run("--version").stdout.splitlines()[0] == f"lowbit-ckpt {lowbit.__version__}"


def test_the_version_says_the_license_and_every_library_of_the_notices():
    _, license, *libraries = run("--version").stdout.splitlines()
    assert license.endswith("License: Apache-2.0") and libraries.pop(0) == "Built with:"
    printed = [re.fullmatch(r"  (\S+) (\d+(?:\.\d+)+) \((\S+)\)", line).group(1, 3) for line in libraries]  # fmt: skip
    notices = (ROOT / "THIRD_PARTY_NOTICES").read_text()
    noted = re.findall(r"^={80}\n(.+?): .*\n.*\nLicense: (\S+)", notices, re.M)
    in_the_package_alone = {"libstdc++, libgcc and glibc's start files", "NVIDIA CUDA Runtime"}  # fmt: skip
    assert printed == [x for x in noted if x[0] not in in_the_package_alone]


def test_inspect_names_what_low_bit_state_is(tmp_path):
    """Codes, scales, means and what lies beside weights, of formats that the tool has not heard of one by one."""
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
        "codes, dynamic4", "scales, dynamic4", "codes, power1_4_unsigned", "scales, power1_4_unsigned",
        "kept beside weights", "codes, power1_5", "scales, power1_5", "factored moments, float32",
        "step counters", "random streams", "shapes of parameters",
    }  # fmt: skip


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
