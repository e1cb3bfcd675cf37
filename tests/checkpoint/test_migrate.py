"""A float32 run continues in 8 bits: torch AdamW for 100 steps,
its file or its directory loaded into lowbit, 100 more.
"""

import copy
import pathlib
import re
import subprocess
import sysconfig

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import lowbit
from tests.support.peers.files import TOOL

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ckpt")]
CONTEXT, STEPS = 16, 100


class NextByte(nn.Module):
    """The next byte of text from the last sixteen."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, 24)
        self.up, self.mid, self.head = (
            nn.Linear(24 * CONTEXT, 192),
            nn.Linear(192, 192),
            nn.Linear(192, 256),
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.up(self.tokens(ids).flatten(1)))
        return self.head(F.gelu(self.mid(x)))


@pytest.fixture(scope="module")
def text():
    stdlib = pathlib.Path(sysconfig.get_paths()["stdlib"])
    content = b"".join(
        (stdlib / name).read_bytes() for name in ("argparse.py", "typing.py", "datetime.py")
    )
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).long()


def train(net, opt, text, first):
    """STEPS steps from step `first` on; returns the mean loss of the last twenty."""
    losses = []
    windows = text.unfold(0, CONTEXT + 1, 1)
    for step in range(first, first + STEPS):
        generator = torch.Generator().manual_seed(step)
        rows = windows[torch.randint(len(windows), (128,), generator=generator)]
        loss = F.cross_entropy(net(rows[:, :-1]).float(), rows[:, -1])
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return sum(losses[-20:]) / 20


OPTIONS = {"lr": 3e-3, "weight_decay": 0.05}


def float32_run(seed):
    torch.manual_seed(seed)
    net = NextByte()
    return net, torch.optim.AdamW(net.named_parameters(), **OPTIONS)


def load(kind, tmp_path, net, old, opt):
    if kind == "torch.save":
        torch.save({"model": net.state_dict(), "optimizer": old.state_dict()}, tmp_path / "run.pt")
        lowbit.load_optimizer(opt, tmp_path / "run.pt")
    elif kind.startswith("directory"):
        options = StateDictOptions(flatten_optimizer_state_dict="flattened" in kind)
        state = get_optimizer_state_dict(net, old, options=options)
        dcp.save({"optim": state}, checkpoint_id=tmp_path / "run", no_dist=True)
        lowbit.load_optimizer(opt, tmp_path / "run")
    elif kind == "raw directory":
        dcp.save({"optim": old.state_dict()}, checkpoint_id=tmp_path / "run", no_dist=True)
        lowbit.load_optimizer(opt, tmp_path / "run")
    else:
        opt.load_state_dict(old.state_dict())


KINDS = ["load_state_dict", "torch.save", "directory", "directory, flattened", "raw directory"]


@pytest.fixture(scope="module")
def runs(text):
    """The first float32 run after STEPS steps, and the losses of three that continue."""
    straight = []
    for seed in range(3):
        net, opt = float32_run(seed)
        train(net, opt, text, 0)
        if seed == 0:
            half = copy.deepcopy((net.state_dict(), opt.state_dict()))
        straight.append(train(net, opt, text, STEPS))
    return half, straight


@pytest.fixture
def half(runs):
    """The first float32 run after STEPS steps: its network and its optimizer."""
    net, opt = float32_run(0)
    net.load_state_dict(runs[0][0])
    opt.load_state_dict(runs[0][1])
    return net, opt


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_goes_on(runs, half, text, tmp_path, dtype):
    """However it is loaded, it is the same optimizer. The resumed loss lies within the spread of
    three float32 runs, widened by half of it on each side: three runs show two thirds of a spread.
    """
    net, old = half
    net.to(dtype)
    loaded = []
    for kind in KINDS:
        opt = lowbit.AdamW(net.named_parameters(), **OPTIONS)
        folder = tmp_path / kind
        folder.mkdir()
        load(kind, folder, net, old, opt)
        state, group = opt.state[net.up.weight], opt.param_groups[0]
        assert state["step"] == STEPS and "exp_avg_dynamic8" in state, kind
        assert {key: group[key] for key in OPTIONS} == OPTIONS, kind
        loaded.append(opt)
    for kind, opt in zip(KINDS, loaded, strict=True):
        for p in net.parameters():
            assert set(opt.state[p]) == set(loaded[0].state[p]), kind
            assert all(
                torch.equal(t, loaded[0].state[p][key]) for key, t in opt.state[p].items()
            ), kind
    loss = train(net, loaded[0], text, STEPS)
    low, high = min(runs[1]), max(runs[1])
    print(
        f"\nfloat32, 3 seeds, after 200 steps {[f'{x:.3f}' for x in runs[1]]}; 8-bit from 100 on, "
        f"{dtype}: {loss:.5f}"
    )
    margin = (high - low) / 2
    assert low - margin <= loss <= high + margin, f"{loss} outside {low}..{high}"


def test_moments_are_encoded_to_the_nearest_code(half):
    net, old = half
    opt = lowbit.AdamW(net.named_parameters(), **OPTIONS)
    opt.load_state_dict(old.state_dict())
    for slot, format in (("exp_avg", "dynamic8"), ("exp_avg_sq", "dynamic8_unsigned")):
        want = lowbit.ops.quantize(old.state[net.mid.weight][slot], format, 256)
        got = [opt.state[net.mid.weight][f"{slot}_{format}{end}"] for end in ("", "_scale")]
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert torch.equal(opt.state[net.head.bias]["exp_avg"], old.state[net.head.bias]["exp_avg"])


def test_what_cannot_be_loaded_says_why(tmp_path):
    net, old = float32_run(0)
    opt = lowbit.AdamW(net.named_parameters())
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        lowbit.load_optimizer(opt, tmp_path / "nothing")
    with pytest.raises(
        TypeError, match=r"optimizer of lowbit.*not into torch\.optim\.adamw\.AdamW"
    ):
        lowbit.load_optimizer(old, tmp_path / "nothing")
    with pytest.raises(
        TypeError, match=r"path of a checkpoint, not builtins\.dict; opt\.load_state_dict"
    ):
        lowbit.load_optimizer(opt, old.state_dict())
    torch.save({"model": net.state_dict()}, tmp_path / "model.pt")
    with pytest.raises(ValueError, match="holds no optimizer state dict"):
        lowbit.load_optimizer(opt, tmp_path / "model.pt")
    dcp.save({"model": net.state_dict()}, checkpoint_id=tmp_path / "model", no_dist=True)
    with pytest.raises(ValueError, match="holds no optimizer state"):
        lowbit.load_optimizer(opt, tmp_path / "model")
    dcp.save(
        {"optim": get_optimizer_state_dict(net, old)},
        checkpoint_id=tmp_path / "optim",
        no_dist=True,
    )
    with pytest.raises(ValueError, match="names its parameters"):
        lowbit.load_optimizer(lowbit.AdamW(net.parameters()), tmp_path / "optim")
    lowbit.load_optimizer(lowbit.AdamW(net.parameters()), tmp_path / "optim", model=net)
    other = lowbit.AdamW(nn.Linear(8, 8).named_parameters())
    with pytest.raises(
        ValueError, match=r"optim has no parameter 'weight' \(2 missing of 2\); the first name"
    ):
        lowbit.load_optimizer(other, tmp_path / "optim")


def test_parameters_of_groups_cut_otherwise_are_found_by_name(tmp_path):
    """torch numbers parameters group by group,
    and matrices of one shape would be taken for each other.
    """
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    old = torch.optim.AdamW(net.named_parameters())
    for p in net.parameters():
        p.grad = torch.randn_like(p)
    old.step()
    torch.save(old.state_dict(), tmp_path / "run.pt")
    named = list(net.named_parameters())
    opt = lowbit.AdamW([{"params": named[2:]}, {"params": named[:2]}], state_format="float32")
    lowbit.load_optimizer(opt, tmp_path / "run.pt")
    for _, p in named:
        assert torch.equal(opt.state[p]["exp_avg"], old.state[p]["exp_avg"])


@pytest.mark.parametrize("coded", [False, True])
def test_a_whole_second_moment_becomes_factored_as_the_message_says(tmp_path, coded):
    model = nn.Linear(128, 64)
    old = torch.optim.AdamW(model.parameters())
    eight = lowbit.AdamW(model.parameters())
    model(torch.ones(2, 128)).sum().backward()
    old.step()
    eight.step()
    torch.save((eight if coded else old).state_dict(), tmp_path / "torch.pt")
    opt = lowbit.AdamW(model.named_parameters(), state_format="factored8")
    with pytest.raises(ValueError, match="whole there and factored here") as raised:
        lowbit.load_optimizer(opt, tmp_path / "torch.pt", model=model)
    command = re.search("lowbit-ckpt (.* PRESET)", str(raised.value))[1]
    named = {"FILE": tmp_path / "torch.pt", "NEW": tmp_path / "new.pt", "PRESET": "factored8"}
    subprocess.run([TOOL, *(named.get(word, word) for word in command.split())], check=True)
    lowbit.load_optimizer(opt, tmp_path / "new.pt", model=model)
    mean = old.state[model.weight]["exp_avg_sq"].mean(1)
    rounding = {"rtol": 0.05, "atol": 0.0} if coded else {}
    torch.testing.assert_close(opt.state[model.weight]["exp_avg_sq_row"], mean, **rounding)
