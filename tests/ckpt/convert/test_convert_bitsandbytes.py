"""bitsandbytes' files into others and back, by its own optimizers and its own functions."""

import json
import warnings

import numpy as np
import pytest
import torch

import lowbit
from tests.support.peers.files import convert, need_tool, run, same, scaled_normal
from tests.support.require import need

pytestmark = pytest.mark.slow

need_tool()
try:
    import bitsandbytes as bnb
    import bitsandbytes.functional as F
except ImportError:
    need("bitsandbytes", False, "bitsandbytes is not installed", module=True)

WRAPPER = "__bnb_optimizer_quant_state__"
EVEN = [(64, 256), (3, 8, 512), (10,), (15, 17)]  # blocks end with rows, or float32
RAGGED = [(64, 70), (5001,), (7, 600)]
OPTIMIZERS = {
    "AdamW8bit": {},
    "Adam8bit": {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
    "PagedAdamW8bit": {},
    "AdEMAMix8bit": {},
    "Lion8bit": {},
    "SGD8bit": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "RMSprop8bit": {},
    "Adagrad8bit": {},
}


def gradients(params, seed):
    for i, p in enumerate(params):
        p.grad = scaled_normal(p.shape, 100 * seed + i, 1e-2)


def made(name, shapes, steps=3, named=False, **kwargs):
    params = [torch.nn.Parameter(scaled_normal(s, i, 1.0)) for i, s in enumerate(shapes)]
    given = [(f"layer{i}.weight", p) for i, p in enumerate(params)] if named else params
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = getattr(bnb.optim, name)(given, **(OPTIMIZERS.get(name, {}) | kwargs))
        for step in range(steps):
            gradients(params, step)
            optimizer.step()
    return params, optimizer


def plain(state):
    """One parameter's entry as versions before 0.49.2 have it."""
    return {k: v for k, v in state.items() if k != WRAPPER} | state.get(WRAPPER, {})


def report(tmp_path, content, to, *options):
    torch.save(content, tmp_path / "in.pt")
    arguments = ("convert", tmp_path / "in.pt", tmp_path / "out.pt", "--to", to, "--json")
    return json.loads(run(*arguments, "--force", *options).stdout)["states"]


def dequantized(state, number, block=256, part=None):
    state = plain(state)
    codes, scales = state[f"state{number}"], state.get(f"absmax{number}")
    if part is not None:
        codes, scales = codes[part], None if scales is None else scales[part]
    if scales is None:
        return codes.clone()
    return F.dequantize_blockwise(
        codes.contiguous(), absmax=scales.contiguous(), code=state[f"qmap{number}"], blocksize=block
    ).reshape(codes.shape)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_through_lowbit_and_back_every_byte_is_the_same(tmp_path, name):
    params, optimizer = made(name, EVEN, named=True)
    saved = optimizer.state_dict()
    weights = {f"layer{i}.weight": p.detach() for i, p in enumerate(params)}
    between = convert(tmp_path, {"model": weights, "optim": saved}, "lowbit")
    assert not any(WRAPPER in s or "state1" in s for s in between["optim"]["state"].values())
    both = convert(tmp_path, between, "bitsandbytes", "--keep")
    same(both["model"], weights)
    back = both["optim"]
    same(back["state"], saved["state"])
    for group, before in zip(back["param_groups"], saved["param_groups"], strict=True):
        assert {key: group[key] for key in before} == before

    # and the peer continues from it as if nothing had happened
    again = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = type(optimizer)(again, **OPTIMIZERS[name])
    other.load_state_dict(back)
    for side, opt in ((params, optimizer), (again, other)):
        gradients(side, 9)
        opt.step()
    same(list(again), list(params))
    same(other.state_dict()["state"], optimizer.state_dict()["state"])


@pytest.mark.parametrize("name", [*OPTIMIZERS, "LAMB8bit", "LARS8bit"])
def test_its_own_files_stay_as_they_are(tmp_path, name):
    kwargs = {"lr": 0.1, "momentum": 0.9} if name == "LARS8bit" else {}
    saved = made(name, EVEN + RAGGED, **kwargs)[1].state_dict()
    back = convert(tmp_path, saved, "bitsandbytes", "--keep")
    same(back["state"], saved["state"])
    same(back["param_groups"], saved["param_groups"])
    # versions before 0.49.2 had no dict around it, and those before 0.50 a history of norms
    saved["state"] = {i: plain(s) for i, s in saved["state"].items()}
    saved["state"][0]["gnorm_vec"] = torch.rand(100)
    same(convert(tmp_path, saved, "bitsandbytes", "--keep")["state"], saved["state"])


@pytest.mark.parametrize(
    "name, names",
    [
        ("AdamW8bit", {"exp_avg": (1, None), "exp_avg_sq": (2, None)}),
        ("RMSprop8bit", {"square_avg": (1, None)}),
        ("SGD8bit", {"momentum_buffer": (1, None)}),
        ("Adagrad8bit", {"sum": (1, None)}),
        ("AdEMAMix8bit", {"exp_avg": (1, 0), "exp_avg_slow": (1, 1), "exp_avg_sq": (2, None)}),
    ],
)
def test_values_are_those_that_it_reads_itself(tmp_path, name, names):
    saved = made(name, EVEN + RAGGED)[1].state_dict()
    out = convert(tmp_path, saved, "torch")
    for i, entry in saved["state"].items():
        for key, (number, part) in names.items():
            same(out["state"][i][key], dequantized(entry, number, part=part))


def test_settings_are_those_of_torch(tmp_path):
    def group(name, **kwargs):
        return convert(tmp_path, made(name, [(10,)], **kwargs)[1].state_dict(), "torch")[
            "param_groups"
        ][0]

    assert group("SGD8bit", momentum=0.7)["momentum"] == 0.7
    assert group("RMSprop8bit", alpha=0.8)["alpha"] == 0.8
    assert group("Adam8bit", weight_decay=0.3)["decoupled_weight_decay"] is True
    assert group("Adam8bit", betas=(0.5, 0.75))["betas"] == (0.5, 0.75)


def test_shapes_that_nobody_tells(tmp_path):
    """lowbit's codes are matrices: without their shape or the weights nobody knows of more
    dimensions.
    """
    saved = made("AdamW8bit", [(64, 256), (3, 8, 512)])[1].state_dict()
    told = convert(tmp_path, saved, "lowbit")
    assert told["state"][1].pop("shape").tolist() == [3, 8, 512]
    del told["state"][0]["shape"]
    torch.save(told, tmp_path / "in.pt")
    done = run(
        "convert", tmp_path / "in.pt", tmp_path / "out.pt", "--to", "bitsandbytes", "--force"
    )
    assert "does not tell the shapes" in done.stdout + done.stderr
    out = torch.load(tmp_path / "out.pt")["state"]
    same(out[0], saved["state"][0])
    assert plain(out[1])["state1"].shape == (3, 4096)
    same(plain(out[1])["state1"].reshape(3, 8, 512), plain(saved["state"][1])["state1"])


def test_lowbit_loads_it(tmp_path):
    params, optimizer = made("AdamW8bit", EVEN)
    saved = optimizer.state_dict()
    out = convert(tmp_path, saved, "lowbit")
    mine = lowbit.AdamW(params, state_format="8bit")
    mine.load_state_dict(out)
    state = mine.state[params[0]]
    same(state["exp_avg_dynamic8"].reshape(64, 256), plain(saved["state"][0])["state1"])
    same(
        state["exp_avg_sq_dynamic8_unsigned_scale"].reshape(-1), plain(saved["state"][0])["absmax2"]
    )
    assert state["step"] == 3
    gradients(params, 5)
    mine.step()


def test_blocks_that_rows_cut_are_rounded_and_it_is_said(tmp_path):
    params, optimizer = made("AdamW8bit", [(64, 70), (64, 256)])
    saved = optimizer.state_dict()
    rows = report(tmp_path, saved, "lowbit")
    exact = {(row["param"], row["state"]): row["exact"] for row in rows}
    assert exact == {
        ("parameter 0", "exp_avg"): False,
        ("parameter 0", "exp_avg_sq"): False,
        ("parameter 1", "exp_avg"): True,
        ("parameter 1", "exp_avg_sq"): True,
    }
    mine = lowbit.AdamW(params, state_format="8bit")
    mine.load_state_dict(torch.load(tmp_path / "out.pt"))
    fine = lowbit.AdamW(params, state_format="float32")
    fine.load_state_dict(torch.load(tmp_path / "out.pt"))
    for row, key, number in zip(rows, ("exp_avg", "exp_avg_sq"), (1, 2), strict=False):
        before = dequantized(saved["state"][0], number)
        after = fine.state[params[0]][key]
        assert row["max_error"] == pytest.approx((before - after).abs().max().item(), rel=1e-6)
        assert row["relative_error"] == pytest.approx(
            ((before - after).norm() / before.norm()).item(), rel=1e-4
        )
        assert 0 < row["relative_error"] < 0.02
    message = convert(tmp_path, saved, "lowbit", "--keep", code=4, name="kept.pt")
    assert "exp_avg" in message and "--keep" in message


def nearest(x, table, block=256):
    """Codes and scales by exhaustive search, the even code where two are as near."""
    flat = x.numpy().reshape(-1)
    codes, scales = np.empty(flat.size, np.uint8), []
    middle = (table[1:] + table[:-1]) * np.float32(0.5)
    for at in range(0, flat.size, block):
        part = flat[at : at + block]
        most = np.abs(part).max()
        scales.append(most)
        with np.errstate(invalid="ignore"):
            z = part / most
        lower, upper = np.searchsorted(middle, z, "left"), np.searchsorted(middle, z, "right")
        codes[at : at + block] = np.where(np.isnan(z), 0, np.where(lower % 2 == 0, lower, upper))
    return torch.from_numpy(codes).reshape(x.shape), torch.tensor(np.array(scales))


@pytest.mark.parametrize("shape", [(64, 70), (5001,), (64, 256)])
def test_float32_state_is_rounded_to_the_nearest_of_its_own_table(tmp_path, shape):
    first = scaled_normal(shape, 3)
    first.view(-1)[300:600] = 0
    second = scaled_normal(shape, 4).square()
    small = {
        "step": torch.tensor(7.0),
        "exp_avg": torch.rand(63, 65),
        "exp_avg_sq": torch.rand(63, 65),
    }
    content = {
        "state": {0: {"step": torch.tensor(7.0), "exp_avg": first, "exp_avg_sq": second}, 1: small},
        "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "params": [0, 1]}],
    }
    rows = report(tmp_path, content, "bitsandbytes")
    assert [row["exact"] for row in rows] == [False, False, True, True]
    out = torch.load(tmp_path / "out.pt")
    assert out["state"][0]["step"] == 7 and type(out["state"][0]["step"]) is int
    got = out["state"][0][WRAPPER]
    for number, x, signed in ((1, first, True), (2, second, False)):
        table = F.create_dynamic_map(signed=signed)
        same(got[f"qmap{number}"], table)
        codes, scales = nearest(x, table.numpy())
        same(got[f"state{number}"], codes)
        same(got[f"absmax{number}"], scales)
    same(out["state"][1][WRAPPER], {"state1": small["exp_avg"], "state2": small["exp_avg_sq"]})
    message = convert(
        tmp_path, content, "bitsandbytes", "--state-format", "4bit", code=2, name="no"
    )
    assert "8bit or float32" in message
    full_precision = convert(tmp_path, content, "bitsandbytes", "--state-format", "float32")
    same(full_precision["state"][0][WRAPPER], {"state1": first, "state2": second})

    params = [torch.nn.Parameter(torch.rand(shape)), torch.nn.Parameter(torch.rand(63, 65))]
    optimizer = bnb.optim.AdamW8bit(params)
    optimizer.load_state_dict(out)
    gradients(params, 1)
    optimizer.step()
    assert optimizer.state[params[0]]["step"] == 8
    assert all(torch.isfinite(p).all() for p in params)


def of_2048(shape, seed=0):
    """As versions before 0.44 wrote it."""
    entry = {"step": 5, "gnorm_vec": torch.zeros(100)}
    for number, signed in ((1, True), (2, False)):
        x = scaled_normal(shape, seed + number)
        x = x if signed else x.square()
        codes, state = F.quantize_blockwise(x, F.create_dynamic_map(signed=signed), blocksize=2048)
        entry |= {
            f"state{number}": codes,
            f"qmap{number}": state.code,
            f"absmax{number}": state.absmax,
        }
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0, "params": [0]}
    return {"state": {0: entry}, "param_groups": [group]}


@pytest.mark.parametrize("shape", [(8, 2048), (64, 70)])
def test_blocks_of_2048(tmp_path, shape):
    content = of_2048(shape)
    out = convert(tmp_path, content, "torch")["state"][0]
    for number, key in ((1, "exp_avg"), (2, "exp_avg_sq")):
        same(out[key], dequantized(content["state"][0], number, 2048))
    # version 0.50 would take the scales for those of blocks of 256
    convert(tmp_path, content, "bitsandbytes", "--keep", code=4, name="kept.pt")
    rows = report(tmp_path, content, "bitsandbytes")
    assert [row["exact"] for row in rows] == [False, False]
    new = torch.load(tmp_path / "out.pt")["state"][0]
    assert new["absmax1"].numel() == -(-new["state1"].numel() // 256)
    codes, scales = nearest(out["exp_avg"], new["qmap1"].numpy())
    same(new["state1"], codes)
    same(new["absmax1"], scales)
    same(
        convert(tmp_path, content, "bitsandbytes", "--block", "2048", "--keep")["state"],
        content["state"],
    )
    if shape == (8, 2048):  # the blocks are of the same elements
        mine = convert(tmp_path, content, "lowbit", "--keep")
        same(mine["state"][0]["exp_avg_dynamic8"], content["state"][0]["state1"])
        back = convert(tmp_path, mine, "bitsandbytes", "--block", "2048", "--keep")["state"][0]
        del content["state"][0]["gnorm_vec"]
        same(plain(back), content["state"][0])


def test_one_scale_for_a_tensor(tmp_path):
    """block_wise=False of versions before 0.50."""
    table = F.create_dynamic_map(signed=True)
    codes = torch.randint(0, 256, (64, 70), dtype=torch.uint8)
    most, following = torch.tensor([0.37]), torch.tensor([0.5])
    entry = {"step": 2, "state1": codes, "qmap1": table, "max1": most, "new_max1": following}
    group = {"lr": 1e-4, "betas": (0.9, 0.99), "eps": 0.0, "weight_decay": 0, "params": [0]}
    content = {"state": {0: entry}, "param_groups": [group]}
    out = convert(tmp_path, content, "torch")
    same(out["state"][0]["exp_avg"], table[codes.long()] * most)
    new = convert(tmp_path, content, "bitsandbytes")["state"][0]
    assert "max1" not in new and new["absmax1"].numel() == 18
    convert(tmp_path, content, "bitsandbytes", "--keep", code=4, name="kept.pt")


def test_what_cannot_be_recovered_is_refused(tmp_path):
    def refused(change, name="AdamW8bit", shapes=((64, 70),)):
        content = made(name, shapes)[1].state_dict()
        change(content["state"][0][WRAPPER], content)
        return convert(tmp_path, content, "torch", code=3, name="no.pt")

    cast = refused(lambda s, c: s.update(absmax1=s["absmax1"].bfloat16()))
    assert "absmax1: is bfloat16, not float32" in cast
    assert "max2: is missing" in refused(lambda s, c: s.pop("absmax2"))
    assert "not a number of blocks" in refused(lambda s, c: s.update(absmax1=torch.rand(17)))
    assert "not [256]" in refused(lambda s, c: s.update(qmap1=torch.rand(255)))
    assert "another state" in refused(lambda s, c: s.update(state2=s["state2"].reshape(70, 64)))
    assert "no parameter groups" in refused(lambda s, c: c.pop("param_groups"), "Lion8bit")

    # Scales of a kernel that put two blocks into one slot, and state that lies otherwise in memory.
    def early(s, c):
        flat = s["absmax1"].view(-1)
        flat[17:35] = flat[18:36].clone()
        flat[35] = 0

    assert "share one scale" in refused(early, "AdEMAMix8bit")
    turned = refused(lambda s, c: s.update(state1=s["state1"].t().contiguous().t()))
    assert "strides" in turned


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW32bit"])
@pytest.mark.parametrize("left_out", ["state1", "state2"])
def test_one_state_of_two_is_refused(tmp_path, name, left_out):
    """Alone it would be taken for RMSprop's."""
    content = made(name, [(64, 256)])[1].state_dict()
    said = convert(tmp_path, content, "torch", "--exclude", f"*.{left_out}", code=3)
    assert f"{left_out} is missing" in said.replace(": is", " is")


def test_scales_of_a_second_state_tell_of_it(tmp_path):
    """Before 0.45 groups had no t_alpha."""
    content = made("AdamW8bit", [(64, 256)])[1].state_dict()
    for key in ("alpha", "t_alpha", "t_beta3"):
        del content["param_groups"][0][key]
    said = convert(tmp_path, content, "torch", "--exclude", "*.state2", code=3)
    assert "state2 is missing" in said


def test_what_it_does_not_keep_is_refused_or_left_out(tmp_path):
    p = torch.nn.Parameter(torch.rand(64, 70))
    optimizer = torch.optim.AdamW([p], amsgrad=True)
    gradients([p], 1)
    optimizer.step()
    saved = optimizer.state_dict()
    assert "max_exp_avg_sq" in convert(tmp_path, saved, "bitsandbytes", code=3, name="no.pt")
    out = convert(tmp_path, saved, "bitsandbytes", "--lossy")
    assert set(out["state"][0][WRAPPER]) == {
        f"{k}{i}" for k in ("state", "qmap", "absmax") for i in (1, 2)
    }
    norms = torch.optim.Adadelta([p])
    gradients([p], 1)
    norms.step()
    assert "no optimizer" in convert(
        tmp_path, norms.state_dict(), "bitsandbytes", code=3, name="no.pt"
    )


def test_in_a_directory(tmp_path):
    """torch.distributed.checkpoint makes text of the numbers of parameters."""
    import torch.distributed.checkpoint as dcp

    optimizer = made("AdamW8bit", [(64, 256), (10,), (15, 17)])[1]
    dcp.save({"optim": optimizer.state_dict()}, checkpoint_id=tmp_path / "in", no_dist=True)
    run("convert", tmp_path / "in", tmp_path / "out.pt", "--to", "torch", "--container", "torch")
    out = torch.load(tmp_path / "out.pt")["optim"]["state"]
    for i, entry in optimizer.state_dict()["state"].items():
        same(out[i if i in out else str(i)]["exp_avg"], dequantized(entry, 1))
    run("convert", tmp_path / "in", tmp_path / "there", "--to", "lowbit")
    run("convert", tmp_path / "there", tmp_path / "back", "--to", "bitsandbytes")
    run("diff", tmp_path / "in", tmp_path / "back", "--include", "*__bnb*")
