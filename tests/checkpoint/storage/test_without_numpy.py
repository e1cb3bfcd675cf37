"""torch does not install numpy, and lowbit needs none: a save and a load of one process, and what
looks at gradients.
"""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import sys
sys.modules["numpy"] = None
import warnings
warnings.filterwarnings("ignore", "Failed to initialize NumPy")
import torch
import torch.distributed.checkpoint as dcp
import lowbit
from lowbit import checkpoint

model = torch.nn.Sequential(torch.nn.Embedding(8, 64), torch.nn.Linear(64, 64))
opt = lowbit.AdamW(lowbit.param_groups(model), lr=1e-2)
run = lambda: model(torch.arange(8)).square().mean()
assert lowbit.check_reproducible(model, run)
run().backward()
opt.step()
state = {"model": model.state_dict(), "optim": opt.state_dict()["state"]}
dcp.save(state, storage_writer=checkpoint.Writer(sys.argv[1]), no_dist=True)
assert checkpoint.verify(sys.argv[1])["ok"]
before = {k: v.clone() for k, v in state["model"].items()}
for p in model.parameters():
    torch.nn.init.zeros_(p)
dcp.load(state, storage_reader=checkpoint.Reader(sys.argv[1]), no_dist=True)
assert all(torch.equal(v, before[k]) for k, v in state["model"].items())
print("done")
"""


def test_a_save_and_a_load(ckpt, tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr
