"""The messages of lowbit.checkpoint and load_optimizer that docs/troubleshooting.md lists:
tests/ckpt and tests/optim have those of its other sections.
"""

import datetime
import re
import subprocess
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp

import lowbit
from lowbit import checkpoint
from lowbit.checkpoint.object_store import Opened
from lowbit.checkpoint.storage.group_names import check_group_names
from lowbit.checkpoint.storage.partial_folder import PartialFolder
from lowbit.checkpoint.storage.state_samples import check_state_samples
from tests.support.paths import ROOT
from tests.support.peers.files import TOOL, need_tool


def stepped(*groups):
    """AdamW of numbered parameters, so many in each group."""
    opt = torch.optim.AdamW(
        [{"params": [torch.nn.Parameter(torch.ones(3)) for _ in range(n)]} for n in groups]
    )
    for group in opt.param_groups:
        for p in group["params"]:
            p.grad = torch.ones(3)
    opt.step()
    return opt


def numbered(folder):
    torch.save(stepped(2).state_dict(), folder / "a.pt")
    lowbit.load_optimizer(lowbit.AdamW(stepped(1, 1).param_groups), folder / "a.pt")


def several(folder):
    torch.save({name: stepped(1).state_dict() for name in "ab"}, folder / "a.pt")
    lowbit.load_optimizer(lowbit.AdamW(stepped(1).param_groups), folder / "a.pt")


def opaque(folder):
    state = {"when": datetime.datetime(2026, 1, 2)}
    try:
        dcp.save(state, storage_writer=checkpoint.Writer(folder / "run"), no_dist=True)
    except dcp.api.CheckpointException as error:
        raise error.failures[0][0] from None


def two_saves(folder):
    other, done = [], threading.Event()
    thread = threading.Thread(
        target=lambda: (other.append(PartialFolder(str(folder / "run"), True)), done.wait())
    )
    thread.start()
    try:
        while not other:
            assert thread.is_alive()
        PartialFolder(str(folder / "run"), True)
    finally:
        done.set()
        thread.join()
        other[0].drop()


def stages(folder):
    check_group_names([{"optim.param_groups": "a"}, {"optim.param_groups": "b"}])


def replicas(folder):
    check_state_samples([{("state.0.exp_avg", (0,)): "a"}, {("state.0.exp_avg", (0,)): "b"}])


def options(folder):
    pytest.importorskip("fsspec")
    with Opened("memory://bucket/run", {"a": 1}):
        Opened("memory://bucket/run", {"a": 2})


def url(folder):
    need_tool()
    done = subprocess.run(
        [TOOL, "inspect", "s3://bucket/run"], capture_output=True, text=True, timeout=600
    )
    raise ValueError(done.stderr.removeprefix("lowbit-ckpt: ").strip())


MISTAKES = (numbered, several, opaque, two_saves, stages, replicas, options, url)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_page_lists_the_message(mistake, tmp_path):
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    rows = re.findall(r"^\| `(.*?)` \|", page[page.index("## From Python") :], re.M)
    assert len(rows) == len(MISTAKES)
    with pytest.raises((ValueError, checkpoint.CheckpointError)) as raised:
        mistake(tmp_path)
    said = str(raised.value)
    found = [row for row in rows if re.match(".*".join(map(re.escape, row.split("..."))), said)]
    assert found == [rows[MISTAKES.index(mistake)]], said
