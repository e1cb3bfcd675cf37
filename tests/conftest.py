"""What tests share."""

import os
import tempfile
import time

import pytest
from require import need

try:
    import hypothesis
except ImportError:  # a machine with a GPU may have none, and no test that needs it
    pass
else:
    # Every run looks at the same examples: what passed passes again. Others are drawn by pytest
    # --hypothesis-profile=default, the option's word being the last.
    hypothesis.settings.register_profile(
        "same",
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],  # the machine is, not the example
    )
    hypothesis.settings.load_profile("same")


# Whole products of rules, formats, wrappers and dialects, each of whose parts other tests see too.
# They come last: on a slow machine a time limit leaves out these (LOWBIT_UNTIL).
PRODUCTS = (
    "test_matrix",
    "test_kinds_convert",
    "test_convert_torchao",
    "test_matrix_products",
    "test_matrix_rows",
    "test_placed_state",
    "test_flat_shards",
    "test_drawn_placements",
    "test_storage_bench",
)
# Minutes to half a minute each, and the longest first: two workers then end together, neither with
# one of these. By itself xdist begins with files of many tests.
LONGEST = (
    "test_wrappers",
    "test_exact",
    "test_recipes",
    "test_torchtitan_model",
    "test_processors",
    "test_elastic",
    "test_world",
    "test_state",
    "test_added_format",
    "test_frameworks",
    "test_rehearsal",
    "test_cpp_front",
    "test_kinds_tool",
    "test_bench",
    "test_kernel_table",
    "test_checkpoint_python",
    "test_memory",
    "test_sharding",
    "test_gradients_sharded",
    "test_resume",
    "test_reshard",
    "test_pipeline",
    "test_policy",
    "test_recover",
    "test_state_home",
)
# What `make test` leaves to `make test MARK=` and to CI, beside tests/frameworks: half a minute or
# so each, to see again on every framework, recipe or peer what others see once.
LONG = (
    "test_bench",
    "test_rehearsal",
    "test_convert_torchao",
    "test_cpp_front",
    "test_elastic",
    "test_exact",
    "test_flat_shards",
    "test_help",
    "test_hostile",
    "test_kernel_table",
    "test_kinds",
    "test_kinds_convert",
    "test_kinds_tool",
    "test_matrix",
    "test_matrix_rows",
    "test_matrix_products",
    "test_memory",
    "test_muon_grid",
    "test_pipeline",
    "test_convert_lowbit",
    "test_ema_sharded",
    "test_object_stores",
    "test_object_stores_s3",
    "test_placed_state",
    "test_policy",
    "test_processors",
    "test_recipes",
    "test_drawn_placements",
    "test_recover",
    "test_reshard",
    "test_world",
    "test_wrappers",
    "test_torch_storage_cases",
    "test_storage_bench",
    "test_state_home",
)
# What `make check` leaves out: those,
# and files that start many processes or take more than five seconds of a core.
SLOW = (
    *LONGEST,
    *PRODUCTS,
    "test_archives",
    "test_ckpt",
    "test_ckpt_broken",
    "test_convert",
    "test_convert_adafactor8bit",
    "test_convert_adafactor8bit_rank",
    "test_convert_bitsandbytes",
    "test_convert_flashoptim",
    "test_convert_lpmm",
    "test_convert_lowbit",
    "test_convert_weights",
    "test_cuda",
    "test_cuda_matrices",
    "test_cuda_memory",
    "test_cross_tile_scales",
    "test_fsdp1",
    "test_hostile",
    "test_kinds",
    "test_migrate",
    "test_operator_leak",
    "test_presence",
    "test_state_memory",
    "test_threads",
    "test_torch_cases",
    "test_zero_redundancy",
    "test_compile_sharded",
    "test_friendly",
    "test_globs",
    "test_hostile_folders",
    "test_object_stores",
    "test_object_stores_s3",
    "test_opaque",
    "test_opaque_folders",
    "test_opaque_numpy",
    "test_float64",
    "test_verify_lowbit",
    "test_muon",
    "test_muon_grid",
    "test_muon_options",
    "test_muon_sharding",
    "test_ckpt_misuse",
    "test_docs",
    "test_help",
    "test_param",
    "test_help_and_pages",
    "test_estimate",
    "test_flat_slices",
    "test_large_metadata",
    "test_parts",
    "test_shared_reads",
    "test_slow_mean",
    "test_two_gpus",
    "test_ema_sharded",
    "test_reproducible",
    "test_refusals",
    "test_group_options",
    "test_update",
    "test_waiting",
    "test_full_disk",
    "test_kill_one_rank",
    "test_storage",
    "test_storage_damage",
    "test_storage_folder",
    "test_storage_reads",
    "test_storage_values",
    "test_torch_storage_cases",
    "test_storage_memory",
    "test_deepspeed_folders",
    "test_torch_optimizer_info",
    "test_other_files",
    "test_storage_layouts",
    "test_cuda_storage",
)


def of_frameworks(path):
    """Whether a file needs what `make frameworks` installs: CI does so after `make check`."""
    return path.parent.name == "frameworks"


def pytest_ignore_collect(collection_path, config):
    """The files of tests that are left out are not even imported: some need seconds for other
    libraries.
    """
    if config.option.markexpr == "product":
        return (collection_path.is_file() and collection_path.stem not in PRODUCTS) or None
    left_out = {"not slow": SLOW, "not long": LONG}.get(config.option.markexpr)
    if left_out is None:
        return None
    return of_frameworks(collection_path) or collection_path.stem in left_out or None


def pytest_collection_modifyitems(items):
    place = {name: i for i, name in enumerate(LONGEST)}
    place |= {name: len(LONGEST) + 1 + i for i, name in enumerate(PRODUCTS)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONGEST)))
    for item in items:
        if item.path.stem in SLOW or of_frameworks(item.path):
            item.add_marker("slow")
        if item.path.stem in LONG or of_frameworks(item.path):
            item.add_marker("long")
        if item.path.stem in PRODUCTS:
            item.add_marker("product")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """LOWBIT_UNTIL: seconds since 1970 after which no test of PRODUCTS begins. It is said, as every
    skipped test is; on a machine of the usual speed none is left out."""
    until = float(os.environ.get("LOWBIT_UNTIL", "inf"))
    if time.time() > until and item.path.stem in PRODUCTS:
        pytest.skip("no time left for whole products: make matrix runs them")


@pytest.fixture(scope="session")
def processes():
    """The ranks of every file, so that torch is imported once by each."""
    from pool import Pool

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


@pytest.fixture(scope="module")
def pool(processes):
    """`pool.run(ranks, module, function, *arguments)`, and a folder for the cases of this file."""
    with tempfile.TemporaryDirectory() as processes.folder:
        yield processes


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """`made(kind, world)`: the path of a checkpoint of tests/support/kinds.py,
    made once a session.
    """
    from kinds import Made

    root = tmp_path_factory.getbasetemp()
    return Made(root.parent if "PYTEST_XDIST_WORKER" in os.environ else root)


@pytest.fixture(params=["in C", "in Python"])
def compared(request, monkeypatch):
    """Objects are compared by lowbit._tensors, or in Python where it was not built."""
    from require import need

    from lowbit.step import objects

    if request.param == "in C":
        need("ckpt", objects.compiled is not None, "lowbit was built without its module _tensors")
    else:
        monkeypatch.setattr(objects, "compiled", None)
