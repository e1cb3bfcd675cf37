"""From lowbit to lowbit: what nobody asked to change stays, byte for byte,
whatever decided its format.
"""

import subprocess

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import lowbit
from tests.support.peers.files import TOOL, need_tool

pytestmark = pytest.mark.long

need_tool()
SHAPES = {
    "embed.weight": (96, 64),
    "up.weight": (64, 130),
    "conv.weight": (32, 8, 5, 7),
    "bias": (64,),
}
SMALL = {**SHAPES, "small.weight": (8, 32)}  # float32 but for min_numel=0
OPTIONS = {
    "lpmm4, rank 1": dict(state_format="lpmm4"),
    "rows": dict(
        state_format={"exp_avg": lowbit.scaled("dynamic8", scale="row"), "exp_avg_sq": "8bit"}
    ),
    "columns": dict(
        state_format={"exp_avg": lowbit.scaled("linear4", scale="column"), "exp_avg_sq": "8bit"}
    ),
    "a tensor": dict(
        state_format={"exp_avg": lowbit.scaled("linear8", scale="tensor"), "exp_avg_sq": "8bit"}
    ),
    "min_numel=0": dict(min_numel=0),
    "min_numel=0, bfloat16": dict(min_numel=0, state_format="bfloat16_stochastic"),
    "min_numel of a state": dict(
        state_format={
            "exp_avg": "8bit",
            "exp_avg_sq": lowbit.scaled("dynamic8_unsigned", min_numel=0),
        }
    ),
    "a higher min_numel": dict(min_numel=1 << 13),
    "overrides": dict(
        overrides=lowbit.override("embed.*", full_precision=True)
        | lowbit.override("small.*", min_numel=0)
        | lowbit.override("up.*", state_format="4bit")
    ),
    "a name": dict(full_precision="embed.*"),
}


def parameters():
    generator = torch.Generator().manual_seed(0)
    return {n: torch.nn.Parameter(torch.randn(s, generator=generator)) for n, s in SMALL.items()}


def trained(**options):
    params = parameters()
    opt = lowbit.AdamW(list(params.items()), **options)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for p in params.values():
            p.grad = torch.randn(p.shape, generator=generator)
        opt.step()
    return opt


def write(opt, folder, container):
    if container == "torch":
        torch.save(opt.state_dict(), folder / "a.pt")
        return folder / "a.pt"
    dcp_save(
        {"optim": opt.state_dict()}, storage_writer=dcp.FileSystemWriter(folder / "a"), no_dist=True
    )
    return folder / "a"


def converted(source, *arguments):
    target = source.with_name("b.pt")
    done = subprocess.run(
        [TOOL, "convert", source, target, "--to", "lowbit", "--container", "torch", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    saved = torch.load(target, weights_only=True)
    return saved.get("optim", saved)


def same(a, b):
    """Bytes of two states, by parameter and key."""
    assert a.keys() == b.keys()
    for p in a:
        assert a[p].keys() == b[p].keys(), p
        for key in a[p]:
            x, y = torch.as_tensor(a[p][key]), torch.as_tensor(b[p][key])
            assert x.dtype == y.dtype and x.shape == y.shape, (p, key)
            assert bytes(x.reshape(-1).view(torch.uint8)) == bytes(
                y.reshape(-1).view(torch.uint8)
            ), (p, key)


@pytest.mark.parametrize("container", ["torch", "dcp"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_state_stays(tmp_path, options, container):
    opt = trained(**options)
    saved = converted(write(opt, tmp_path, container))
    same(saved["state"], opt.state_dict()["state"])
    fresh = lowbit.AdamW(list(parameters().items()), **options)
    fresh.load_state_dict(saved)
    same(fresh.state_dict()["state"], opt.state_dict()["state"])


@pytest.mark.parametrize("container", ["torch", "dcp"])
def test_overrides_outweigh_another_format(tmp_path, container):
    """The target is what an optimizer of the same overrides keeps: only what they do not decide
    gets the new format.
    """
    opt = trained(**OPTIONS["overrides"])
    was = opt.state_dict()["state"]
    saved = converted(write(opt, tmp_path, container), "--state-format", "fp8")["state"]
    names = list(SMALL)
    embed, up, small, conv = (names.index(f"{n}.weight") for n in ("embed", "up", "small", "conv"))
    same({embed: saved[embed], up: saved[up]}, {embed: was[embed], up: was[up]})
    assert "exp_avg_float8_e4m3" in saved[small] and "exp_avg_float8_e4m3" in saved[conv]


def test_a_pattern_of_the_command_line_outweighs_what_the_source_has(tmp_path):
    opt = trained(**OPTIONS["overrides"])
    saved = converted(write(opt, tmp_path, "torch"), "--full-precision", "up.*")["state"]
    assert "exp_avg" in saved[list(SMALL).index("up.weight")]


@pytest.mark.parametrize("given", [True, False])
def test_the_note_on_plain_load_says_what_stays_in_full_precision(tmp_path, given):
    """Who obeys it builds an optimizer that has the tensors of the directory."""
    source = write(trained(full_precision=["embed.*"]), tmp_path, "torch")
    also = ["--full-precision", "embed.*"] if given else []
    done = subprocess.run(
        [TOOL, "convert", source, tmp_path / "d", "--to", "lowbit", "--container", "dcp", *also],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    wanted = "full_precision=['embed.*']" if given else "the same full_precision as the source"
    assert f"the same state_format and {wanted}" in done.stdout, done.stdout
