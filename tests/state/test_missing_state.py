"""A flattened state dict that lacks a parameter, or is of another format: torch makes empty entries
of what it lacks.
"""

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import lowbit

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def trained(state_format="8bit"):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 64)).bfloat16()
    opt = lowbit.AdamW(model.named_parameters(), lr=1e-2, state_format=state_format)
    model(torch.randn(8, 128).bfloat16()).float().square().mean().backward()
    opt.step()
    opt.zero_grad()
    return model, opt


def test_the_parameter_is_named_and_nothing_changes():
    saved = get_optimizer_state_dict(*trained(), options=FLAT)
    lacking = {key: t for key, t in saved.items() if not key.startswith("state.2.weight")}
    model, opt = trained()
    before = {key: t.clone() for key, t in opt.state[model[0].weight].items()}
    with pytest.raises(ValueError, match=r"no 'step', .* more entries for state\['2.weight'\]"):
        set_optimizer_state_dict(model, opt, lacking, options=FLAT)
    after = opt.state[model[0].weight]
    assert all(torch.equal(t, after[key]) for key, t in before.items())


def test_its_advice_works():
    saved = get_optimizer_state_dict(*trained(), options=FLAT)
    model, _ = trained()
    opt = lowbit.AdamW(model.named_parameters(), lr=1e-2)
    fresh = get_optimizer_state_dict(model, opt, options=FLAT)
    mixed = {k: fresh[k] if k.startswith("state.2.weight") else t for k, t in saved.items()}
    set_optimizer_state_dict(model, opt, mixed, options=FLAT)
    assert opt.state_of(model[2].weight)["step"] == 0
    assert opt.state_of(model[0].weight)["step"] == 1


@pytest.mark.parametrize("state_format", ["4bit", "float32"])
def test_another_format_is_said_and_the_advice_works(ckpt, tmp_path, state_format):
    saved = get_optimizer_state_dict(*trained(state_format), options=FLAT)
    model, opt = trained()
    before = {key: t.clone() for key, t in opt.state[model[0].weight].items()}
    said = r"has no .*'exp_avg_dynamic8'.* for state\['0.weight'\]: .* another state_format"
    with pytest.raises(ValueError, match=f"{said}.*lowbit.load_optimizer"):
        set_optimizer_state_dict(model, opt, saved, options=FLAT)
    after = opt.state[model[0].weight]
    assert all(torch.equal(t, after[key]) for key, t in before.items())

    torch.save(saved, tmp_path / "optim.pt")
    fresh = lowbit.AdamW(model.named_parameters(), lr=1e-2)
    lowbit.load_optimizer(fresh, tmp_path / "optim.pt", model=model)
    scale = fresh.state[model[0].weight]["exp_avg_dynamic8_scale"]
    assert torch.allclose(scale, before["exp_avg_dynamic8_scale"], rtol=0.2)  # the same training
