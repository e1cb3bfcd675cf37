"""The model that a load goes by: what it carries of a file,
and that lowbit's own tensors come out of it bit for bit.
"""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import lowbit
from lowbit import checkpoint

pytestmark = pytest.mark.usefixtures("ckpt")


class Scaled(nn.Module):
    """A matrix and a number of no dimensions."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(64, 256))
        self.scale = nn.Parameter(torch.tensor(0.5))


def stepped(net, opt):
    for p in net.parameters():
        p.grad = torch.randn_like(p)
    opt.step()
    return opt


def saved(kind, tmp_path, net, opt):
    path = tmp_path / kind.replace(" ", "-")
    if kind == "file":
        torch.save({"optimizer": opt.state_dict()}, path)
        return path
    options = StateDictOptions(flatten_optimizer_state_dict=kind == "flat directory")
    state = get_optimizer_state_dict(net, opt, options=options)
    dcp.save({"optim": state}, checkpoint_id=path, no_dist=True)
    return path


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Scaled()


@pytest.mark.parametrize("kind", ["file", "directory", "flat directory"])
def test_settings_keep_their_kinds(kind, net, tmp_path):
    """A learning rate that is a tensor stays one, with its dtype, and betas are a tuple."""
    lr = torch.tensor(7e-3, dtype=torch.float64)
    old = stepped(net, torch.optim.AdamW(net.named_parameters(), lr=lr, betas=(0.8, 0.9)))
    opt = lowbit.AdamW(net.named_parameters(), state_format="float32")
    lowbit.load_optimizer(opt, saved(kind, tmp_path, net, old))
    group = opt.param_groups[0]
    assert torch.equal(group["lr"], lr) and group["lr"].dtype == torch.float64
    assert group["betas"] == (0.8, 0.9) and isinstance(group["betas"], tuple)


@pytest.mark.parametrize("kind", ["file", "directory", "flat directory"])
@pytest.mark.parametrize(
    "state_format", ["8bit", "4bit", "bfloat16", lowbit.scaled("dynamic8", scale="row")], ids=str
)
@pytest.mark.parametrize("param_format", ["bfloat16_kahan", "bfloat16_split16"])
def test_own_tensors_come_bit_for_bit(kind, state_format, param_format, net, tmp_path):
    net.to(torch.bfloat16)
    options = {"state_format": state_format, "param_format": param_format}
    old = stepped(net, lowbit.AdamW(net.named_parameters(), **options))
    path = saved(kind, tmp_path, net, old)
    opt = lowbit.AdamW(net.named_parameters(), **options)
    lowbit.load_optimizer(opt, path)
    for p in net.parameters():
        assert set(opt.state[p]) == set(old.state[p])
        for key, value in old.state[p].items():
            assert torch.equal(opt.state[p][key], value) and opt.state[p][key].dtype == value.dtype
    own = {t.key for p in checkpoint.Checkpoint(path).params for s in p.states for t in s.own}
    told = {"step", "stream", "shape"}
    assert own == {key for state in old.state.values() for key in state} - told


def test_values_that_nothing_tells_are_refused(net, tmp_path):
    net.to(torch.bfloat16)
    old = stepped(net, lowbit.AdamW(net.named_parameters(), param_format="bfloat16_kahan"))
    found = checkpoint.Checkpoint(saved("file", tmp_path, net, old))
    beside = next(s for p in found.params for s in p.states if s.name.startswith("param_"))
    with pytest.raises(checkpoint.CheckpointError, match="cannot be recovered"):
        found.read_state(beside)


def test_a_number_beside_the_moments_is_kept(net, tmp_path):
    options = {"state_format": "float32", "beta1": 0.9}
    old = stepped(net, lowbit.Adafactor(net.named_parameters(), **options))
    opt = lowbit.Adafactor(net.named_parameters(), **options)
    lowbit.load_optimizer(opt, saved("file", tmp_path, net, old))
    for p in net.parameters():
        assert all(torch.equal(opt.state[p][key], value) for key, value in old.state[p].items())
