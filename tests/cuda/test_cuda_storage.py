"""lowbit.checkpoint.Writer and Reader with tensors on a GPU: saved, staged through pinned memory by
async_save, and loaded into the CPU and back.

`LOWBIT_REQUIRE=cuda python -m pytest tests/cuda/test_cuda_storage.py`. What needs no GPU is in
tests/checkpoint/test_storage*.py.
"""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lowbit import checkpoint
from tests.support.require import gpu

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ckpt")]

gpu(stand_in=False)

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int64)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """A process group of this process, which async_save needs: gloo for the plans,
    NCCL for the mesh.
    """
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=0, world_size=1
    )
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


def state(seed, device, mesh=None):
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for dtype in DTYPES:
        for shape in ((257, 130), (3,), (), (0, 4)):
            t = (torch.rand(shape, generator=generator) * 100).to(dtype).to(device)
            out[f"{dtype}.{shape}"] = (
                distribute_tensor(t, mesh, [Shard(0)]) if mesh and t.dim() else t
            )
    out["strided"] = (torch.rand(64, 48, generator=generator).to(device)).t()
    return {"model": out, "step": seed}


def same(got, want):
    def bytes_of(t):
        t = t.full_tensor() if isinstance(t, DTensor) else t
        return t.detach().cpu().contiguous().flatten().view(torch.uint8)

    bad = [
        n
        for n, t in want["model"].items()
        if not torch.equal(bytes_of(t), bytes_of(got["model"][n]))
    ]
    return bad == [] and got["step"] == want["step"]


@pytest.mark.parametrize("saved", ["cuda", "cpu"])
@pytest.mark.parametrize("loaded", ["cuda", "cpu"])
@pytest.mark.parametrize("reader", [checkpoint.Reader, dcp.FileSystemReader])
def test_gpu_and_cpu_load_what_either_saved(tmp_path, saved, loaded, reader):
    want = state(0, saved)
    dcp.save(want, storage_writer=checkpoint.Writer(tmp_path / "run"), no_dist=True)
    got = state(1, loaded)
    places = {name: t.data_ptr() for name, t in got["model"].items()}
    dcp.load(got, storage_reader=reader(tmp_path / "run"), no_dist=True)
    assert same(got, want)
    assert {name: t.data_ptr() for name, t in got["model"].items()} == places
    assert {t.device.type for t in got["model"].values()} == {loaded}
    assert checkpoint.verify(tmp_path / "run")["ok"]


def test_a_flipped_bit_is_found_on_the_way_to_the_gpu(tmp_path):
    dcp.save(
        {"w": torch.ones(300, 300, device="cuda")},
        storage_writer=checkpoint.Writer(tmp_path / "run"),
        no_dist=True,
    )
    file = tmp_path / "run" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(dcp.api.CheckpointException, match="w"):
        dcp.load(
            {"w": torch.zeros(300, 300, device="cuda")},
            storage_reader=checkpoint.Reader(tmp_path / "run"),
            no_dist=True,
        )


@pytest.mark.parametrize("sharded", [False, True])
def test_async_saves_keep_one_pinned_copy(tmp_path, one_rank, sharded):
    """What is written is the state of the call, whatever the training does to it meanwhile; the
    copy's memory is taken once.
    """
    mesh = one_rank if sharded else None
    writer = checkpoint.Writer()
    live, kept = state(0, "cuda", mesh), []
    for seed in range(3):
        now = state(seed, "cuda", mesh)
        for name, t in live["model"].items():
            t.copy_(now["model"][name]) if t.numel() else None
        live["step"] = seed
        saving = dcp.async_save(live, checkpoint_id=tmp_path / f"run{seed}", storage_writer=writer)
        for t in live["model"].values():
            t.zero_() if t.numel() else None
        saving.result()
        copies = [
            t.to_local() if isinstance(t, DTensor) else t for t in writer._kept["model"].values()
        ]
        assert all(t.device.type == "cpu" for t in copies)
        # torch pins no tensor without a dimension
        assert all(t.is_pinned() for t in copies if t.numel() and t.dim())
        kept.append([t.data_ptr() for t in copies])
    assert kept[0] == kept[1] == kept[2]
    for seed in range(3):
        got = state(9, "cuda", mesh)
        dcp.load(got, storage_reader=checkpoint.Reader(tmp_path / f"run{seed}"))
        assert same(got, state(seed, "cuda", mesh))
        assert checkpoint.verify(tmp_path / f"run{seed}")["ok"]


def test_more_than_one_batch_of_copies(tmp_path, monkeypatch):
    """Tensors of a GPU are copied to the host some at a time."""
    from lowbit.checkpoint.storage import writer

    monkeypatch.setattr(writer, "COPIED", 1 << 16)
    want = {f"{i}": torch.rand(100, 100, device="cuda") for i in range(20)}
    dcp.save(want, storage_writer=checkpoint.Writer(tmp_path / "run"), no_dist=True)
    got = {name: torch.zeros_like(t) for name, t in want.items()}
    dcp.load(got, storage_reader=checkpoint.Reader(tmp_path / "run"), no_dist=True)
    assert all(torch.equal(got[name], want[name]) for name in want)
