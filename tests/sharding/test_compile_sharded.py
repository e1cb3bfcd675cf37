"""torch.compile(opt.step) over parameters of FSDP2 leaves the bits of a step that is not
compiled.
"""

import pytest

from tests.sharding import compile_worker

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "name, backend",
    [("AdamW", "eager"), ("LAMB", "eager"), ("APOLLO", "eager"), ("AdamW", "inductor")],
)
def test_a_compiled_step_of_sharded_parameters(pool, name, backend):
    assert pool.run(2, compile_worker.same, name, backend) == [True, True]
