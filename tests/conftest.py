"""What tests share."""

import os
import tempfile

import pytest

from tests.support.require import need

pytest_plugins = ["tests.support.selection", "tests.support.drawn"]


@pytest.fixture(scope="session")
def processes():
    """The ranks of every file, so that torch is imported once by each."""
    from tests.support.ranks.pool import Pool

    pool = Pool("")
    yield pool
    pool.close()


@pytest.fixture
def isa_restored():
    """The instruction set and the number of threads are afterwards what they were before."""
    import torch

    from lowbit import ops

    before, threads = ops.catalog()["isa"], torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    ops.set_isa(before)


@pytest.fixture
def one_thread(isa_restored):
    """One thread, which for small tensors is faster."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def ckpt():
    """Where lowbit reads files itself;
    a machine without the libraries of lowbit-ckpt builds the package without that.
    """
    from lowbit.checkpoint import native

    need("ckpt", native._checkpoint is not None, "lowbit was built without its checkpoint module")


@pytest.fixture
def one_rank():
    """A mesh of this process alone."""
    import gc

    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    gc.collect()  # gloo aborts where a sharded tensor outlives it
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def pool(processes):
    """`pool.run(ranks, function, *arguments)`, and a folder for the cases of this file."""
    with tempfile.TemporaryDirectory() as processes.folder:
        yield processes


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """`made(kind, world)`: the path of a checkpoint of tests/support/kinds, made once."""
    from tests.support.kinds.catalog import Made

    root = tmp_path_factory.getbasetemp()
    return Made(root.parent if "PYTEST_XDIST_WORKER" in os.environ else root)


@pytest.fixture(params=["in C", "in Python"])
def compared(request, monkeypatch):
    """Objects are compared by lowbit._tensors, or in Python where it was not built."""
    from lowbit.step import objects

    if request.param == "in C":
        need("tensors", objects.module is not None, "lowbit was built without its module _tensors")
    else:
        monkeypatch.setattr(objects, "module", None)
