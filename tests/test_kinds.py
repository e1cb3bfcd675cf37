"""The checkpoints of tests/kinds.py are what they say: torch and the peers read them back, and the same content at every number of ranks."""

import kinds_peers
import numpy as np
import pytest
import torch
from kinds import KINDS, of, same
from kinds_decode import decode
from peer_golden import arrays

KNOWN = [(kind, world) for kind, world in of() if KINDS[kind].recoverable]


@pytest.mark.parametrize("kind, world", KNOWN)
def test_what_was_made_is_what_was_meant(made, kind, world):
    """By torch's own loader, and the peer's decoder where it has one."""
    assert same(KINDS[kind].held(made(kind, world)), KINDS[kind].meaning())
