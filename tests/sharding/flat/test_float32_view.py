"""bind(export="fp32"): a save and a load give back the very values of the formats named."""

import copy
import pickle

import pytest
import torch

import lowbit
from lowbit.flat import FlatSlice, bind

SHAPE = (8, 512)

# log8, log16 and log8_signed keep a block's smallest magnitude too; unsigned maps hold no momentum
FORMATS = [
    entry["name"]
    for entry in lowbit.catalog()["state"]
    if not entry["name"].startswith("log") and not entry["name"].endswith("_unsigned")
]


def bound(vector, format):
    opt = lowbit.AdamW([vector], state_format=format)
    count = vector.numel()
    held = FlatSlice(vector, "a", SHAPE, 0, count, start=0, ranges=[(0, count)])
    bind(opt, [held], export="fp32")
    return opt


@pytest.mark.filterwarnings("ignore:.*signed")
@pytest.mark.parametrize("format", [*FORMATS, "8bit", "4bit", "lpmm4"])
def test_values_come_back(format):
    torch.manual_seed(0)
    vector = torch.nn.Parameter(torch.randn(SHAPE).flatten())
    opt = bound(vector, format)
    for _ in range(3):
        vector.grad = torch.randn_like(vector)
        opt.step()
    saved = copy.deepcopy(opt.state_dict())
    again = bound(torch.nn.Parameter(vector.detach().clone()), format)
    again.load_state_dict(copy.deepcopy(saved))
    loaded = again.state_dict()["state"][0]
    assert loaded.keys() == saved["state"][0].keys() == {"step", "exp_avg", "exp_avg_sq"}
    for key, value in saved["state"][0].items():
        assert torch.equal(loaded[key], value), key


@pytest.mark.parametrize("again", [copy.deepcopy, pickle.dumps])
def test_a_bound_optimizer_is_not_copied(again):
    opt = bound(torch.nn.Parameter(torch.zeros(SHAPE).flatten()), "8bit")
    with pytest.raises(TypeError, match="flat slices, such as that of 'a', cannot be copied"):
        again(opt)
