"""lowbit-ckpt reshard on every kind of checkpoint of tests/support/kinds, read back by torch."""

import subprocess

import pytest
import torch

from tests.support.kinds.catalog import KINDS, flat, of, same
from tests.support.peers.files import TOOL, need_tool
from tests.support.selection import WHOLE

pytestmark = pytest.mark.product

need_tool()

DIRECTORIES = of(container="dcp")
ALL_TO = (1, 2, 3, 4, 7)
TO = {1: (4,), 2: (3,), 4: (1, 2, 7)}
TO_ALL = ("fsdp2_nested", "hsdp")  # hsdp is not of 1 rank


def bits_equal(a, b):
    """The same keys, dtypes, shapes, bits and values of two directories as torch has read them;
    says what differs.
    """
    assert a.keys() == b.keys()
    for key, x in a.items():
        y = b[key]
        if isinstance(x, torch.Tensor):
            assert (x.dtype, x.shape) == (y.dtype, y.shape), key
            x, y = (t.contiguous().reshape(-1).view(torch.uint8) for t in (x, y))
            assert torch.equal(x, y), key
        else:
            assert x == y, key


def targets(kind, world):
    """A third of the product, in which each two of a kind, its ranks and the ranks after meet."""
    return ALL_TO if WHOLE or kind in TO_ALL else TO[world]


@pytest.mark.parametrize("kind, world", DIRECTORIES)
def test_reshard_keeps_every_bit(made, tmp_path, kind, world):
    """torch loads what was resharded: the same bits of every tensor and the same values,
    and the same meaning.
    """
    source = made(kind, world)
    by_torch = KINDS[kind].dialect != "torchao"  # it cannot read a torchao item into bytes
    held = flat(source) if by_torch else {}
    for ranks in targets(kind, world):
        to = tmp_path / str(ranks)
        subprocess.run([TOOL, "reshard", source, to, "--world-size", str(ranks)], check=True)
        if by_torch:
            bits_equal(held, flat(tmp_path / str(ranks)))
    assert same(KINDS[kind].held(tmp_path / str(ranks)), KINDS[kind].meaning())


def test_every_pair_is_resharded():
    cells = [(kind, world, to) for kind, world in DIRECTORIES for to in targets(kind, world)]
    kinds = {kind for kind, _ in DIRECTORIES}
    assert {(world, to) for _, world, to in cells} == {(w, to) for w in TO for to in ALL_TO}
    assert {(kind, to) for kind, _, to in cells} == {(kind, to) for kind in kinds for to in ALL_TO}
    assert {(kind, world) for kind, world, _ in cells} == {*DIRECTORIES}
    assert WHOLE or len(cells) < 0.4 * len(DIRECTORIES) * len(ALL_TO)
