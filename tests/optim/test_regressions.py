"""What was wrong once."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import lowbit
from tests.optim import tensor_parallel_worker


@pytest.mark.usefixtures("ckpt")
def test_tensor_parallelism(pool):
    """Gradients that are sums yet to be taken were stepped by their local part, and clipped before
    they were added; column shards did not load from a directory.
    """
    found = pool.run(2, tensor_parallel_worker.found, pool.folder)[0]
    assert found["between copies"] == 0
    assert found["from one process"] < 1e-5
    assert found["probed"] and found["clipped"] and found["columns loaded"]


def test_seven_dimensions_step():
    p = nn.Parameter(torch.randn(2, 2, 2, 2, 2, 2, 2))
    opt = lowbit.AdamW([p], lr=0.1)
    p.grad = torch.ones_like(p)
    before = p.detach().clone()
    opt.step()
    assert (p != before).all()
    full_precision = nn.Parameter(torch.randn(2, 2, 2, 2, 2, 2, 128))
    rank1 = {"exp_avg": lowbit.scaled("dynamic8", scale="rank1")}
    with pytest.raises(ValueError, match="at most 6"):
        lowbit.AdamW([full_precision], state_format=rank1)


def test_a_group_that_is_refused_leaves_no_state():
    """State of its parameters before the refused one stayed, and `state_dict()` raised KeyError."""
    body, head = nn.Linear(64, 64, bias=False), nn.Linear(64, 64)
    opt = lowbit.Muon(body.named_parameters(), lr=0.1)
    with pytest.raises(ValueError, match="bias"):
        opt.add_param_group({"params": list(head.named_parameters())})
    assert opt.state.keys() == {body.weight} and len(opt.param_groups) == 1
    assert opt.state_dict()["state"].keys() == {0}


def test_a_model_goes_elsewhere_after_its_optimizer_was_made(monkeypatch):
    """torch swaps parameters that are DTensors in `to_empty()` and `to()`, and no tensor that has
    weak references. `param_groups` kept its names by them.
    """
    monkeypatch.setattr(torch.__future__, "get_swap_module_params_on_conversion", lambda: True)
    model = nn.Linear(64, 64, device="meta")
    opt = lowbit.AdamW(lowbit.param_groups(model), lr=0.1)
    p = model.weight
    model.to_empty(device="cpu")
    assert model.weight is p and p.device.type == "cpu"
    nn.init.ones_(p)
    p.grad = torch.ones_like(p)
    opt.step()
    assert (p < 1).all()


def test_a_stream_that_is_loaded_in_place_counts():
    """The plan was kept by the identity of the stream's tensor."""

    def made(name):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(64, 256).bfloat16())
        return p, lowbit.AdamW([(name, p)], lr=1e-3)

    (p, a), (q, b) = made("one"), made("two")
    for opt, w in ((a, p), (b, q)):
        w.grad = torch.ones_like(w)
        opt.step()
    with torch.no_grad():
        q.copy_(p)
        for key, value in a.state[p].items():
            b.state[q][key].copy_(value)
    a.step()
    b.step()
    assert torch.equal(p, q)


def test_what_is_beside_a_weight_is_not_dropped_in_silence():
    p = nn.Parameter(torch.randn(64, 256).bfloat16())
    a = lowbit.AdamW([p], param_format="bfloat16_split8")
    p.grad = torch.ones_like(p)
    a.step()
    b = lowbit.AdamW([nn.Parameter(p.detach().clone())], param_format="bfloat16_split16")
    with pytest.raises(ValueError, match="param_bfloat16_split8"):
        b.load_state_dict(a.state_dict())
    half = nn.Parameter(p.detach().half())
    with pytest.raises(ValueError, match="param_bfloat16_split8"):
        lowbit.AdamW([half], param_format="float16_split8").load_state_dict(a.state_dict())


def test_an_import_does_not_import_the_compiler():
    """Which takes longer than all the rest."""
    code = "import sys, torch; had = set(sys.modules); import lowbit, lowbit.checkpoint; "
    code += "print([m for m in set(sys.modules) - had if m.startswith(('torch._dynamo', 'sympy'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_one_nan_for_every_scale_of_rank_1():
    p = nn.Parameter(torch.zeros(8, 16, 64))
    rank1 = {"exp_avg": lowbit.scaled("dynamic8", scale="rank1")}
    opt = lowbit.AdamW([p], state_format=rank1)
    p.grad = torch.ones_like(p)
    p.grad.view(torch.int32)[1, 2, 3] = 0x7FC12345
    opt.step()
    for d in range(3):
        scale = opt.state[p][f"exp_avg_dynamic8_scale_rank1_{d}"].view(torch.int32)
        assert (scale > 0x7F800000).sum() == 1 and 0x7FC00000 in scale.tolist()


def test_amsgrad_by_torchaos_name_is_8_bit_too():
    p = nn.Parameter(torch.randn(64, 256))
    opt = lowbit.AdamW4bit([p], amsgrad=True, block_size=64)
    assert "max_exp_avg_sq_power1_4_unsigned" in opt.state[p]
    q = nn.Parameter(p.detach().clone())
    assert lowbit.AdamW8bit([q], block_size=128).state[q]["exp_avg_dynamic8_scale"].shape == (64, 2)


@pytest.mark.usefixtures("ckpt")
def test_load_optimizer_keeps_every_setting(tmp_path):
    p = nn.Parameter(torch.randn(64, 256))
    saved = lowbit.Adafactor([("w", p)], beta1=0.9, d=2.0, decay_by="rho")
    p.grad = torch.ones_like(p)
    saved.step()
    torch.save(saved.state_dict(), tmp_path / "optim.pt")
    fresh = lowbit.Adafactor([("w", nn.Parameter(p.detach().clone()))], beta1=0.5)
    lowbit.load_optimizer(fresh, tmp_path / "optim.pt")
    group = fresh.param_groups[0]
    assert (group["beta1"], group["d"], group["decay_by"]) == (0.9, 2.0, "rho")
