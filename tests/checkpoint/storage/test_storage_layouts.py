"""Writer under FSDP2 with tensor parallelism, HSDP and FSDP2, on four ranks: each layout loads what
each other one saved, by both readers.
"""

import pytest

from tests.checkpoint.storage import storage_layouts_worker
from tests.checkpoint.storage.storage_layouts_worker import LAYOUTS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("saved", LAYOUTS)
def test_each_layout_loads_what_each_saved(pool, tmp_path, saved):
    ranks = pool.run(4, storage_layouts_worker.run, saved, str(tmp_path / "run"))
    assert ranks == [dict.fromkeys(LAYOUTS, ([[], []], 16))] * 4
