"""A state saved and loaded by one rank through lowbit.checkpoint.Writer and Reader,
and what a test does to the files.
"""

import warnings

import torch.distributed.checkpoint as dcp

from lowbit import checkpoint
from tests.checkpoint.storage import storage_worker

warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def save(state, path, **options):
    dcp.save(state, storage_writer=checkpoint.Writer(path, **options), no_dist=True)


def load(state, path, **options):
    reader = checkpoint.Reader(path, **options)
    dcp.load(state, storage_reader=reader, no_dist=True)
    return reader


def flipped(path, name, at=0.5):
    """Flips one bit of a tensor's values, in the file where they lie. Returns the file's name."""
    values = bytes(checkpoint.Checkpoint(path).read(name))
    for file in sorted(path.glob("*.distcp")):
        content = bytearray(file.read_bytes())
        if content.count(values) == 1:
            content[content.index(values) + int(at * (len(values) - 1))] ^= 16
            file.write_bytes(content)
            return file.name
    raise AssertionError("the values lie in no file")


def holds(path, seed):
    """Whether a checkpoint has the state of that seed."""
    state = storage_worker.state(0, seed + 1)
    load(state, path)
    return storage_worker.wrong(state, seed) == []
