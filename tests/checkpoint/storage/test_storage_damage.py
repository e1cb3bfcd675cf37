"""Damage that lowbit.checkpoint.Reader finds: flipped bits, a false lowbit.json,
and files that would run code.
"""

import json
import os
import pickle
import random
import re
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lowbit import checkpoint
from tests.checkpoint.storage import storage_worker
from tests.checkpoint.storage.storage_files import flipped, load, save

pytestmark = pytest.mark.slow


def saved(folder, digests):
    """A directory of one rank, with or without lowbit.json."""
    path = folder / "run"
    save(storage_worker.state(0), path)
    if not digests:
        (path / "lowbit.json").unlink()
    return path


@pytest.mark.parametrize(
    "name", ["model.0.float32", "model.3.uint8", "model.4.bfloat16", "model.5.float32"]
)
@pytest.mark.parametrize("digests", [True, False])
def test_a_flipped_bit_is_found_by_load(tmp_path, name, digests):
    path = saved(tmp_path, digests)
    file = flipped(path, name, random.Random(name).random())
    with pytest.raises(dcp.api.CheckpointException) as caught:
        load(storage_worker.state(0, 3), path)
    assert file in str(caught.value) and name in str(caught.value)
    assert "damaged" in str(caught.value)


@pytest.mark.parametrize("digests", [True, False])
def test_a_flipped_bit_is_found_by_the_rank_that_reads_it(pool, tmp_path, digests):
    path = saved(tmp_path, digests)
    file = flipped(path, "model.0.float32", 0.9)
    for said in pool.run(3, storage_worker.refusal, str(path), 0):
        assert re.search(rf"{file}.*model\.0\.float32.*damaged", said), said


def test_a_flipped_bit_anywhere_is_found_or_changes_nothing(tmp_path):
    """In values, headers, digests and metadata alike: what is loaded is what was saved,
    or the load is refused, by names.
    """
    chance = random.Random(1)
    path = tmp_path / "run"
    save(storage_worker.state(0), path)
    found, names = {}, [*checkpoint.Checkpoint(path).tensors, *checkpoint.Checkpoint(path).values]
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for _ in range(25):
            damaged = bytearray(whole)
            damaged[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
            file.write_bytes(damaged)
            state = storage_worker.state(0, 3)
            try:
                load(state, path)
            except dcp.api.CheckpointException as error:
                said = str(error)
                named = any(name in said for name in names)
                if file.suffix == ".distcp":
                    assert file.name in said and named, said
                else:  # a key of `.metadata` that is another one now is missed by its name alone
                    assert file.name in said or (file.name == ".metadata" and named), said
                found[file.name] = found.get(file.name, 0) + 1
            else:
                assert storage_worker.wrong(state) == [], file.name
        file.write_bytes(whole)
    # What no digest covers: padding, names of files that nobody opens,
    # digests of cells that nobody reads, the id of a save.
    assert all(found.get(file.name, 0) >= 10 for file in path.iterdir()), found


def lied(path, change):
    """Changes what lowbit.json says of the tensor model.0.float32."""
    recorded = json.loads((path / "lowbit.json").read_text())
    change(recorded["tensors"]["model.0.float32"])
    (path / "lowbit.json").write_text(json.dumps(recorded))


def _one_digest(entry):
    del entry["tiles"]


def _no_digits(entry):
    del entry["tiles"]
    entry["chunks"] = {"0,0": ""}


LIES = [
    (_one_digest, "damaged"),
    (_no_digits, "damaged"),
    (lambda e: e["tiles"].update({"0,0": [1, 1, "0" * 16]}), "damaged"),
    (lambda e: e["tiles"].update({"0,0": [600, 300, "0" * 16 * 600 * 300]}), "damaged"),
    (lambda e: e["tiles"].update({"0,0": [2**63, 2, ""]}), "not laid out"),
    (lambda e: e["tiles"].update({"0,0": [65536, 65536, "0" * 16]}), "not laid out"),
    (lambda e: e["tiles"].update({"0,0": [-1, 4, ""]}), "not laid out"),
    (lambda e: e.update(tiles={}, chunks={"0,1": "0" * 32}), "no digest"),
    (lambda e: e.update(shape=[2**62, 2**62]), "different checkpoints"),
    (lambda e: e.update(dtype="int32"), "different checkpoints"),
]


@pytest.mark.parametrize("number", range(len(LIES)))
def test_a_false_lowbit_json_lets_no_damage_through(tmp_path, number):
    change, said = LIES[number]
    path = tmp_path / "run"
    save(storage_worker.state(0), path)
    flipped(path, "model.0.float32", 0.3)
    lied(path, change)
    with pytest.raises(dcp.api.CheckpointException, match=said):
        load(storage_worker.state(0, 3), path)


class Evil:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def test_nothing_of_a_file_is_executed(tmp_path):
    marker, path = tmp_path / "marker", tmp_path / "run"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": torch.ones(3), "evil": Evil(marker)}, checkpoint_id=path, no_dist=True)
    state = {"w": torch.zeros(3), "evil": None}
    with pytest.raises(dcp.api.CheckpointException, match="evil is not plain data"):
        load(state, path)
    assert not marker.exists()
    part = {"w": torch.zeros(3)}
    load(part, path)
    assert part["w"].tolist() == [1, 1, 1] and not marker.exists()
    # The metadata itself, which torch's reader unpickles.
    (path / ".metadata").write_bytes(pickle.dumps(Evil(marker)))
    with pytest.raises(dcp.api.CheckpointException, match=r"posix\.system"):
        load(part, path)
    assert not marker.exists()


def test_verify_holds_the_digests_of_parts_too(tmp_path):
    """A load of a part is held to them: what verify passes, loads."""
    path = tmp_path / "run"
    save(storage_worker.state(0), path)
    assert checkpoint.verify(path)["ok"]

    def flip(entry):
        (key,) = entry["tiles"]
        down, across, digits = entry["tiles"][key]
        entry["tiles"][key] = [down, across, digits[:-1] + "0f"[digits[-1] == "0"]]

    lied(path, flip)
    report = checkpoint.verify(path)
    assert not report["ok"]
    (found,) = report["findings"]
    assert "the digests of its parts are others" in found["what"]
    assert found["tensor"] == "model.0.float32"
    lied(path, lambda entry: entry["tiles"].update({"1,1": [1, 1, "0" * 16]}))
    report = checkpoint.verify(path)
    assert any("parts of chunks that are not there" in f["what"] for f in report["findings"])
