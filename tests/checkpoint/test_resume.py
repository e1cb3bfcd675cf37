"""A float32 run of torch's AdamW on 4 ranks continues in 8 bits on 2 and on 3: by a conversion, and
by load_optimizer without one.
"""

import pytest
import torch

import lowbit
from lowbit import checkpoint
from lowbit.checkpoint import native
from tests.support.ranks import resume_worker
from tests.support.ranks.resume_worker import OPTIONS, STEPS, Net
from tests.support.require import need

pytestmark = pytest.mark.slow

need("ckpt", native._checkpoint is not None, "lowbit._checkpoint is not built", module=True)


def expected_state(folder):
    """Digests of the same state in one process,
    encoded by load_state_dict from what the reader gives.
    """
    source, net = checkpoint.Checkpoint(folder), Net()
    state = {}
    for i, (name, _) in enumerate(net.named_parameters()):
        state[i] = {}
        for key in ("step", "exp_avg", "exp_avg_sq"):
            found = source.tensors[f"optim.state.{name}.{key}"]
            values = torch.frombuffer(source.read(found.name), dtype=torch.float32)
            state[i][key] = values.reshape(found.shape)
    opt = lowbit.AdamW(net.named_parameters())
    group = {"lr": 0.1, "params": list(range(len(state)))}
    opt.load_state_dict({"state": state, "param_groups": [group]})
    return resume_worker.digests(net, opt)


@pytest.mark.parametrize("wrapper", ["fsdp2", "fsdp1"])
def test_a_float32_run_goes_on_in_8_bits(pool, wrapper, tmp_path):
    saved, made = tmp_path / "float32", tmp_path / "8bit"
    run = pool.run(4, resume_worker.run_train, wrapper, saved)[0]
    report = checkpoint.convert(saved, made, to="lowbit", state_format="8bit", world_size=4)
    assert {s["to"].split(",")[0] for s in report["states"] if s["param"] == "mid.weight"} == {
        "dynamic8",
        "dynamic8_unsigned",
    }
    assert checkpoint.verify(made)["ok"]
    wanted = expected_state(saved)
    assert any("dynamic8_scale" in key for key in wanted)
    for ranks in (2, 3):
        resumed = pool.run(ranks, resume_worker.run_resume, saved, [made])[0]
        for path in (saved, made):
            found = resumed[path]
            assert found["state"] == wanted, f"{path.name} on {ranks} ranks"
            assert found["group"] == OPTIONS
        assert resumed[saved]["after"] == resumed[made]["after"]
        after = resumed[saved]["after"]
        assert after[0] == pytest.approx(run["after"][0], rel=1e-5), "the same weights"
        assert after == pytest.approx(run["after"], rel=0.05), "about the same way from there"
        assert sum(after) < sum(run["before"])
        print(
            f"{wrapper}: float32 {run['after'][-1]:.4f}, 8-bit on {ranks} ranks {after[-1]:.4f} "
            f"after {2 * STEPS} steps"
        )


def test_load_optimizer_alone_resumes(pool, tmp_path):
    """Without a conversion: the live loading by itself, from 4 ranks to 3."""
    saved = tmp_path / "float32"
    run = pool.run(4, resume_worker.run_train, "fsdp2", saved)[0]
    resumed = pool.run(3, resume_worker.run_resume, saved, [])[0][saved]
    assert resumed["state"] == expected_state(saved)
    assert resumed["after"] == pytest.approx(run["after"], rel=0.05)
