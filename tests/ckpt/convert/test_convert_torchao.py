"""torchao's files and directories into others and back,
by its own optimizers and its own arithmetic.
"""

import json
import os
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

import lowbit
from tests.support.peers.files import content_of, convert, need_tool, run, same, scaled_normal
from tests.support.require import need

pytestmark = pytest.mark.product

need_tool()
try:
    import torchao.optim as ao
    from torchao.optim.quant_utils import quantize_4bit_with_qmap, quantize_8bit_with_qmap
    from torchao.optim.subclass_4bit import OptimState4bit
    from torchao.optim.subclass_8bit import OptimState8bit
    from torchao.optim.subclass_fp8 import OptimStateFp8
except ImportError:
    need("torchao", False, "torchao is not installed", module=True)

# Blocks end with rows, or the tensor is small, or no multiple of a block.
SHAPES = [(64, 256), (3, 8, 512), (10,), (15, 17)]
RAGGED = [(64, 72), (5120,), (7, 1280), (65, 67)]
KINDS = {"8bit": (ao.AdamW8bit, 256), "4bit": (ao.AdamW4bit, 128), "fp8": (ao.AdamWFp8, 256)}
OF = {"8bit": OptimState8bit, "4bit": OptimState4bit, "fp8": OptimStateFp8}


@pytest.fixture(autouse=True)
def eager():
    """torchao compiles its step for each shape, which takes seconds."""
    with (
        mock.patch("torch.compile", lambda f, **_: f),
        mock.patch.dict(os.environ, {"TORCHDYNAMO_DISABLE": "1"}),
    ):
        yield


def gradients(params, seed):
    for i, p in enumerate(params):
        p.grad = scaled_normal(p.shape, 100 * seed + i, 1e-2)


def made(kind, shapes, steps=3, named=False):
    params = [torch.nn.Parameter(scaled_normal(s, i, 1.0)) for i, s in enumerate(shapes)]
    given = [(f"layer{i}.weight", p) for i, p in enumerate(params)] if named else params
    optimizer = KINDS[kind][0](given)
    for step in range(steps):
        gradients(params, step)
        optimizer.step()
    return params, optimizer


def inner(x):
    """A state as its class and what is in it."""
    if not hasattr(x, "dequantize") or type(x) is torch.Tensor:
        return x
    return {"class": type(x).__name__, "shape": tuple(x.shape), "dtype": str(x.dtype), **x.__dict__}


def opened(state):
    return {i: {key: inner(x) for key, x in entry.items()} for i, entry in state.items()}


def values(x):
    return x.dequantize() if isinstance(x, tuple(OF.values())) else x


def report(tmp_path, content, to, *options):
    torch.save(content, tmp_path / "in.pt")
    arguments = ("convert", tmp_path / "in.pt", tmp_path / "out.pt", "--to", to, "--json")
    return json.loads(run(*arguments, "--force", *options).stdout)["states"]


@pytest.mark.parametrize("kind", KINDS)
def test_through_lowbit_and_back_every_byte_is_the_same(tmp_path, kind):
    params, optimizer = made(kind, SHAPES, named=True)
    saved = optimizer.state_dict()
    weights = {f"layer{i}.weight": p.detach() for i, p in enumerate(params)}
    between = convert(tmp_path, {"model": weights, "optim": saved}, "lowbit")
    assert between["optim"]["param_groups"][0]["lr"] == 1e-3
    both = convert(tmp_path, between, "torchao", "--keep")
    same(both["model"], weights)
    back = both["optim"]
    same(opened(back["state"]), opened(saved["state"]))
    same(back["param_groups"][0]["lr"], saved["param_groups"][0]["lr"])
    for key, value in saved["param_groups"][0].items():
        assert back["param_groups"][0][key] == value

    # and the peer continues from it as if nothing had happened
    again = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = KINDS[kind][0](again)
    other.load_state_dict(back)
    for side, opt in ((params, optimizer), (again, other)):
        gradients(side, 9)
        opt.step()
    same(list(again), list(params))
    same(opened(other.state_dict()["state"]), opened(optimizer.state_dict()["state"]))


@pytest.mark.parametrize("kind", KINDS)
def test_plain_states_do_not_say_what_kind_comes_back(tmp_path, kind):
    """lowbit has 8-bit codes of what torchao keeps in float32, here of most parameters."""
    params, optimizer = made(kind, [(64, 256), (65, 67), (71, 67), (65, 71)], named=True)
    weights = {f"layer{i}.weight": p.detach() for i, p in enumerate(params)}
    saved = {"model": weights, "optim": optimizer.state_dict()}
    back = convert(tmp_path, convert(tmp_path, saved, "lowbit"), "torchao")["optim"]["state"]
    assert [type(back[i]["exp_avg"]) for i in range(4)] == [OF[kind]] + 3 * [torch.Tensor]
    same(inner(back[0]["exp_avg"]), inner(saved["optim"]["state"][0]["exp_avg"]))


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_that_it_reads_itself(tmp_path, kind):
    saved = made(kind, SHAPES + RAGGED)[1].state_dict()
    out = convert(tmp_path, saved, "torch")
    for i, entry in saved["state"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            same(out["state"][i][key], values(entry[key]))
    same(opened(convert(tmp_path, saved, "torchao", "--keep")["state"]), opened(saved["state"]))


def test_every_module_that_the_classes_have_been_in(tmp_path):
    from tests.support.kinds import peers

    for kind in KINDS:
        saved = made(kind, [(64, 256)])[1].state_dict()
        with peers.prototype_torchao(writing=True):
            torch.save(saved, tmp_path / "in.pt")
        assert b"prototype.low_bit_optim" in (tmp_path / "in.pt").read_bytes()
        run("convert", tmp_path / "in.pt", tmp_path / "out.pt", "--to", "torchao", "--force")
        same(opened(torch.load(tmp_path / "out.pt")["state"]), opened(saved["state"]))


def test_to_bitsandbytes_and_back_codes_are_relabelled(tmp_path):
    saved = made("8bit", SHAPES + RAGGED)[1].state_dict()
    there = convert(tmp_path, saved, "bitsandbytes", "--keep")
    for i, entry in saved["state"].items():
        got = there["state"][i]["__bnb_optimizer_quant_state__"]
        for number, key in ((1, "exp_avg"), (2, "exp_avg_sq")):
            if isinstance(entry[key], OptimState8bit):
                same(got[f"state{number}"], entry[key].codes)
                same(got[f"absmax{number}"], entry[key].scale)
                same(got[f"qmap{number}"], entry[key].qmap)
            else:
                same(got[f"state{number}"], entry[key])
    back = convert(tmp_path, there, "torchao", "--keep")
    same(opened(back["state"]), opened(saved["state"]))


@pytest.mark.parametrize("kind", KINDS)
def test_lowbit_loads_it(tmp_path, kind):
    params, optimizer = made(kind, SHAPES)
    out = convert(tmp_path, optimizer.state_dict(), "lowbit")
    mine = lowbit.AdamW(params, state_format=kind)
    mine.load_state_dict(out)
    fine = lowbit.AdamW(params, state_format="float32")
    fine.load_state_dict(out)
    for p in params:
        same(fine.state[p]["exp_avg_sq"], values(optimizer.state[p]["exp_avg_sq"]))
    key = {"8bit": "dynamic8", "4bit": "dynamic4", "fp8": "float8_e4m3"}[kind]
    before = optimizer.state[params[0]]["exp_avg"]
    same(mine.state[params[0]][f"exp_avg_{key}_scale"].reshape(-1), before.scale)
    gradients(params, 5)
    mine.step()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(64, 256), (64, 72), (5120,)])
def test_float32_state_is_rounded_by_its_own_arithmetic(tmp_path, kind, shape):
    first = scaled_normal(shape, 3)
    first.view(-1)[:600] = 0
    second = scaled_normal(shape, 4).square()
    small = {
        "step": torch.tensor(7.0),
        "exp_avg": torch.rand(63, 65),
        "exp_avg_sq": torch.rand(63, 65),
    }
    content = {
        "state": {0: {"step": torch.tensor(7.0), "exp_avg": first, "exp_avg_sq": second}, 1: small},
        "param_groups": [{"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "params": [0, 1]}],
    }
    rows = report(tmp_path, content, "torchao", "--state-format", kind)
    assert [row["exact"] for row in rows] == [False, False, True, True]
    out = torch.load(tmp_path / "out.pt")
    block = KINDS[kind][1]
    for row, key, x, signed in zip(
        rows, ("exp_avg", "exp_avg_sq"), (first, second), (True, False), strict=False
    ):
        own = OF[kind].zeros(x.shape, *(() if kind == "fp8" else (signed,)), block_size=block)
        own.copy_(x)
        same(inner(out["state"][0][key]), inner(own))
        wrong = (own.dequantize() - x).abs().max().item()
        assert row["max_error"] == pytest.approx(wrong, rel=1e-6)
    same(out["state"][1], small)
    params = [torch.nn.Parameter(torch.rand(shape)), torch.nn.Parameter(torch.rand(63, 65))]
    optimizer = KINDS[kind][0](params)
    optimizer.load_state_dict(out)
    gradients(params, 1)
    optimizer.step()
    assert optimizer.state[params[0]]["step"] == 8


def test_ties_go_where_torchao_puts_them(tmp_path):
    """Values on the middle between two entries, and the floats beside it, of both tables."""
    for kind, count, quantize in (
        ("8bit", 256, quantize_8bit_with_qmap),
        ("4bit", 16, quantize_4bit_with_qmap),
    ):
        state = {}
        tables = {}
        for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            table = OF[kind].zeros((4096,), signed).qmap
            tables[key] = table
            middle = (table[1:] + table[:-1]) / 2
            x = torch.cat(
                [middle, *(torch.nextafter(middle, torch.tensor(s)) for s in (2.0, -2.0))]
            )
            x = torch.cat([x, torch.zeros(-len(x) % 127)]).reshape(-1, 127)
            x = torch.cat([x, torch.ones(len(x), 1)], 1)  # each block of 128 has the scale 1
            state[key] = torch.cat([x.reshape(-1), torch.ones(-x.numel() % 8192)])[:8192]
        content = {
            "state": {0: {"step": torch.tensor(1.0), **state}},
            "param_groups": [{"lr": 0.01, "params": [0]}],
        }
        options = ("--state-format", kind, "--block", "128")
        got = convert(tmp_path, content, "torchao", *options)["state"][0]
        for key, table in tables.items():
            codes = quantize(state[key], table)
            if kind == "4bit":
                codes = (codes[::2] << 4) | codes[1::2]
            same(got[key].codes, codes)
            assert got[key].block_size == 128 and (got[key].scale == 1).all()
        assert count == len(table)


def test_blocks_of_2048(tmp_path):
    x = scaled_normal((8, 2048), 1)
    state = OptimState8bit.zeros(x.shape, True, 2048)
    state.copy_(x)
    second = OptimState8bit.zeros(x.shape, False, 2048)
    second.copy_(x.square())
    content = {
        "state": {0: {"step": torch.tensor(1.0), "exp_avg": state, "exp_avg_sq": second}},
        "param_groups": [{"lr": torch.tensor(0.01), "params": [0]}],
    }
    mine = convert(tmp_path, content, "lowbit", "--keep")
    same(mine["state"][0]["exp_avg_dynamic8"], state.codes)
    assert mine["param_groups"][0]["lr"] == 0.01
    back = convert(tmp_path, mine, "torchao", "--keep")
    same(opened(back["state"]), opened(content["state"]))
    new = convert(tmp_path, content, "torchao", "--block", "256")["state"][0]["exp_avg"]
    own = OptimState8bit.zeros(x.shape, True, 256)
    own.copy_(state.dequantize())
    same(inner(new), inner(own))
    convert(tmp_path, content, "torchao", "--block", "256", "--keep", code=4, name="kept.pt")
    convert(tmp_path, content, "bitsandbytes", "--keep", code=4, name="kept.pt")
    same(
        convert(tmp_path, content, "bitsandbytes", "--keep", "--block", "2048")["state"][0][
            "__bnb_optimizer_quant_state__"
        ]["absmax1"],
        state.scale,
    )


def test_blocks_that_rows_cut_are_rounded_and_it_is_said(tmp_path):
    saved = made("8bit", RAGGED)[1].state_dict()
    rows = report(tmp_path, saved, "lowbit")
    # rows of 72, a vector (which lowbit keeps in float32), rows of 5 blocks, float32 that it has no
    # reason to keep
    assert [row["exact"] for row in rows] == [False, False, True, True, True, True, False, False]
    message = convert(tmp_path, saved, "lowbit", "--keep", code=4, name="kept.pt")
    assert "--keep" in message
    # between kinds there is no way but rounding
    rows = report(tmp_path, saved, "torchao", "--state-format", "fp8")
    assert [row["exact"] for row in rows] == [False] * 6 + [True] * 2
    assert all(0 < row["relative_error"] < 0.05 for row in rows[:6])
    convert(tmp_path, saved, "torchao", "--state-format", "fp8", "--keep", code=4, name="kept.pt")


def test_a_table_of_its_own_is_kept_and_decoded(tmp_path):
    """Tables are made under the default dtype: those of a bfloat16 run are not those of others."""
    params, optimizer = made("8bit", [(64, 256)])
    state = optimizer.state[params[0]]["exp_avg"]
    state.qmap = state.qmap.bfloat16().float()
    saved = optimizer.state_dict()
    same(convert(tmp_path, saved, "torch")["state"][0]["exp_avg"], state.dequantize())
    same(opened(convert(tmp_path, saved, "torchao", "--keep")["state"]), opened(saved["state"]))
    message = convert(tmp_path, saved, "lowbit", "--keep", code=4, name="kept.pt")
    assert "own table" in message


def test_what_torchao_has_not_is_refused(tmp_path):
    p = torch.nn.Parameter(torch.rand(64, 64))
    for optimizer in (torch.optim.SGD([p], 0.1, momentum=0.9), torch.optim.RMSprop([p])):
        gradients([p], 1)
        optimizer.step()
        message = convert(tmp_path, optimizer.state_dict(), "torchao", code=3, name="no.pt")
        assert "Adam and AdamW only" in message
    saved = made("8bit", [(64, 256)])[1].state_dict()
    message = convert(tmp_path, saved, "torchao", "--state-format", "log8", code=2, name="no.pt")
    assert "8bit, 4bit, fp8 or float32" in message


def test_what_does_not_belong_together_is_refused(tmp_path):
    def refused(change):
        saved = made("4bit", [(64, 256)])[1].state_dict()
        change(saved["state"][0]["exp_avg"])
        return convert(tmp_path, saved, "torch", code=3, name="no.pt")

    assert "do not part" in refused(lambda s: setattr(s, "scale", torch.rand(127)))
    assert "codes of the shape" in refused(lambda s: setattr(s, "codes", s.codes[:-1].clone()))
    assert "not [16]" in refused(lambda s: setattr(s, "qmap", torch.rand(17)))
    assert "not float32" in refused(lambda s: setattr(s, "scale", s.scale.bfloat16()))
    assert "says that its blocks" in refused(lambda s: setattr(s, "block_size", 64))
    assert "without qmap" in refused(lambda s: s.__dict__.pop("qmap"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_directory(tmp_path, kind):
    saved = made(kind, SHAPES)[1].state_dict()
    dcp.save({"optim": saved}, checkpoint_id=tmp_path / "in", no_dist=True)
    run("convert", tmp_path / "in", tmp_path / "out.pt", "--to", "torchao", "--keep")
    out = torch.load(tmp_path / "out.pt")["optim"]["state"]
    same(opened({int(i): entry for i, entry in out.items()}), opened(saved["state"]))
    for end in ("pt", "safetensors"):
        refused = run("convert", tmp_path / "in", tmp_path / f"parts.{end}", code=3)
        assert "which --to torchao joins" in refused.stderr
    run("convert", tmp_path / "in", tmp_path / "torch", "--to", "torch")
    run("convert", tmp_path / "in", tmp_path / "lowbit", "--to", "lowbit", "--keep")
    wanted = {}
    for i, entry in saved["state"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            wanted[f"optim.state.{i}.{key}"] = torch.empty(entry[key].shape)
    dcp.load(wanted, checkpoint_id=tmp_path / "torch", no_dist=True)
    for i, entry in saved["state"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            same(wanted[f"optim.state.{i}.{key}"], values(entry[key]))


def test_a_directory_of_ranks(made, tmp_path):
    """FSDP2 on two ranks: one subclass for each, blocks of its own,
    and plain ones where a part is not a multiple of a block.
    """
    from tests.support.kinds import catalog

    for kind in KINDS:
        of = catalog.KINDS[f"torchao_{kind}"]
        need("torchao", of.present, "torchao is not installed")
        path = made(of.name, 2)
        run("convert", path, tmp_path / f"{kind}.pt", "--to", "torch")
        out = torch.load(tmp_path / f"{kind}.pt")
        found = {}
        optim = next(out[key] for key in ("optim", "optimizer") if key in out)
        for name, entry in optim["state"].items():
            found |= {(name, key): x for key, x in entry.items()}
        meaning = {k: v for k, v in of.meaning().items() if k[1] != "param"}
        assert content_of(found) == content_of({k: v for k, v in meaning.items()})
