"""What tests share."""

import pytest
from require import need

__all__ = ["need"]


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """`made(kind, world)`: the path of a checkpoint of tests/kinds.py, made once a session."""
    from kinds import Made

    return Made(tmp_path_factory.mktemp)
