"""What tests share."""

import os
import tempfile

import pytest
from require import need

__all__ = ["need"]

try:
    import hypothesis
except ImportError:  # a machine with a GPU may have none, and no test that needs it
    pass
else:
    # Every run looks at the same examples: what passed passes again. Others are drawn by pytest --hypothesis-profile=default, the option's word being the last.
    hypothesis.settings.register_profile(
        "same", derandomize=True, database=None, deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],  # the machine is, not the example
    )  # fmt: skip
    hypothesis.settings.load_profile("same")


# Minutes to half a minute each, and the longest first: two workers then end together, neither with one of these. By itself xdist begins with files of many tests.
LONGEST = (
    "test_wrappers", "test_recipes", "test_processors", "test_elastic", "test_world", "test_state", "test_frameworks", "test_cpp_front", "test_kinds_convert",
    "test_kinds_tool", "test_bench", "test_convert_torchao", "test_kernel_table", "test_checkpoint_python", "test_memory", "test_sharding", "test_gradients_sharded",
    "test_resume", "test_flat_shards", "test_reshard",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    place = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONGEST)))


@pytest.fixture(scope="session")
def processes():
    """The ranks of every file, so that torch is imported once by each."""
    from pool import Pool

    pool = Pool("")
    yield pool
    pool.close()


@pytest.fixture
def ckpt():
    """Where lowbit reads files itself; a machine without the libraries of lowbit-ckpt builds the package without that."""
    from lowbit import reader

    need("ckpt", reader._checkpoint is not None, "lowbit was built without its checkpoint module")  # fmt: skip


@pytest.fixture(scope="module")
def pool(processes):
    """`pool.run(ranks, module, function, *arguments)`, and a folder for the cases of this file."""
    with tempfile.TemporaryDirectory() as processes.folder:
        yield processes


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """`made(kind, world)`: the path of a checkpoint of tests/kinds.py, made once a session."""
    from kinds import Made

    root = tmp_path_factory.getbasetemp()
    return Made(root.parent if "PYTEST_XDIST_WORKER" in os.environ else root)
