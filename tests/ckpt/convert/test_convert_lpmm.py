"""lpmm's files into others and back. lpmm needs CUDA to be built, so the files are put together
here (tests/support/peers/files.py) around the arrays that its own code left (its two CUDA functions
that pack codes replaced by CPU ones: tests/golden/README.md)."""

import numpy as np
import pytest
import torch

import lowbit
from lowbit import checkpoint
from tests.support.peers.files import (
    ADAM,
    CfgNode,
    content_of,
    convert,
    lpmm_config,
    lpmm_file,
    lpmm_groups,
    lpmm_rank1,
    need_tool,
    run,
    same,
    scaled_normal,
    stand_in_for_yacs,
)
from tests.support.peers.golden import arrays, entries, nearest, unpack

pytestmark = pytest.mark.slow

need_tool()
stand_in_for_yacs()
FIRST, SECOND = "dynamic4", "power1_4_unsigned"
GOLDEN = arrays()
SHAPE = (41, 130)


def golden(case, key):
    return torch.from_numpy(GOLDEN[f"lpmm_{case}/{key}"].copy())


def golden_entry(case):
    first = lpmm_groups(
        golden(case, "exp_avg_qstate.qmap"),
        SHAPE,
        golden(case, "exp_avg_qstate.overhead.max1").reshape(-1),
    )
    entry = {
        "step": torch.tensor(3.0),
        "exp_avg": golden(case, "exp_avg"),
        "exp_avg_qstate": first,
    }
    qmap = golden(case, "exp_avg_sq_qstate.qmap")
    if case == "Factor4":
        entry["exp_avg_sq_row"] = golden(case, "exp_avg_sq_row")
        entry["exp_avg_sq_col"] = golden(case, "exp_avg_sq_col")
        entry["exp_avg_sq_qstate"] = {"enable": True, "overhead": {}, "qmap": qmap}
    elif case == "AdamW_rank1":
        dims = [golden(case, f"exp_avg_sq_qstate.overhead.max_dims.{d}") for d in (0, 1)]
        entry["exp_avg_sq"] = golden(case, "exp_avg_sq")
        entry["exp_avg_sq_qstate"] = lpmm_rank1(qmap, SHAPE, dims)
    else:
        most = golden(case, "exp_avg_sq_qstate.overhead.max1").reshape(-1)
        entry["exp_avg_sq"] = golden(case, "exp_avg_sq")
        entry["exp_avg_sq_qstate"] = lpmm_groups(qmap, SHAPE, most)
    return entry


def decoded(entry, name):
    """What lpmm reads back, by its own words: a map's entry times the scale."""
    qstate = entry[f"{name}_qstate"]
    codes = unpack(entry[name].numpy(), 4)[: SHAPE[0] * SHAPE[1]]
    values = qstate["qmap"].numpy()[codes]
    over = qstate["overhead"]
    if over["max1"] is not None:
        scale = np.repeat(over["max1"].numpy().reshape(-1), 128)[: values.size]
    else:
        rows, cols = (m.numpy() for m in over["max_dims"])
        scale = np.minimum(rows, cols).reshape(-1)
    return (values * scale).reshape(SHAPE)


@pytest.mark.parametrize("case", ["AdamW_group4", "AdamW_rank1", "Factor4"])
def test_golden_states_are_read_as_lpmm_reads_them(tmp_path, case):
    entry = golden_entry(case)
    to = "lowbit" if case == "Factor4" else "torch"
    options = ["--state-format", "float32"] if to == "lowbit" else []
    state = convert(tmp_path, lpmm_file([entry]), to, *options)["state"][0]
    np.testing.assert_array_equal(state["exp_avg"].numpy(), decoded(entry, "exp_avg"))
    if case == "Factor4":
        for name in ("exp_avg_sq_row", "exp_avg_sq_col"):
            assert torch.equal(state[name], entry[name])
    else:
        np.testing.assert_array_equal(state["exp_avg_sq"].numpy(), decoded(entry, "exp_avg_sq"))
    assert state["step"] == 3


def test_a_scale_that_is_nan_is_that_of_its_row(tmp_path):
    """The least of two is NaN where one is, in torch as in numpy."""
    entry = golden_entry("AdamW_rank1")
    entry["exp_avg_sq_qstate"]["overhead"]["max_dims"][0][2] = float("nan")
    got = convert(tmp_path, lpmm_file([entry]), "torch")["state"][0]["exp_avg_sq"]
    np.testing.assert_array_equal(got.numpy(), decoded(entry, "exp_avg_sq"))
    assert got[2].isnan().all() and not got[0].isnan().any()


@pytest.mark.parametrize("case", ["AdamW_group4", "AdamW_rank1", "Factor4"])
def test_its_own_files_stay_as_they_are(tmp_path, case):
    file = lpmm_file([golden_entry(case)], lpmm_config(rank1=case == "AdamW_rank1"))
    back = convert(tmp_path, file, "lpmm")
    same(back, file)
    assert type(back["qconfig"]) is CfgNode and back["qconfig"].QUANT.M.BITS == 4


def packed(x):
    """lpmm's codes and scales of a tensor of whole groups, and the codes of nothing behind them;
    the last byte, which lpmm leaves as memory had it, is 0.
    """
    states = {}
    for name, format, values in x:
        table = entries(format)
        most = np.abs(values.numpy().reshape(-1, 128)).max(axis=1)
        codes = nearest(
            (values.numpy().reshape(-1, 128) / most[:, None]).reshape(-1), table, tie_up=False
        )
        filler = nearest(np.zeros(-codes.size % 2048, np.float32), table, tie_up=False)
        codes = np.concatenate([codes, filler]).astype(np.uint8)
        data = np.concatenate([codes[::2] | codes[1::2] << 4, np.zeros(1, np.uint8)])
        states[name] = torch.from_numpy(data.view(np.int8).copy())
        states[f"{name}_qstate"] = lpmm_groups(table, tuple(values.shape), most)
    return states


def moments(shape, seed=0):
    return [
        ("exp_avg", FIRST, scaled_normal(shape, seed)),
        ("exp_avg_sq", SECOND, scaled_normal(shape, seed + 1).square()),
    ]


def test_through_lowbit_and_back(tmp_path):
    """Rows of whole groups: the same codes in every file."""
    entry = {"step": torch.tensor(3.0), **packed(moments((40, 256)))}
    file = lpmm_file([entry])
    file["param_groups"][0]["param_names"] = ["w"]
    ours = convert(tmp_path, file, "lowbit")
    state = ours["state"][0]
    n = 40 * 128
    assert (
        state["exp_avg_dynamic4"].reshape(-1).tolist()
        == entry["exp_avg"][:n].view(torch.uint8).tolist()
    )
    assert torch.equal(
        state["exp_avg_sq_power1_4_unsigned_scale"].reshape(-1, 1),
        entry["exp_avg_sq_qstate"]["overhead"]["max1"],
    )
    opt = lowbit.AdamW(
        [p := torch.nn.Parameter(torch.randn(40, 256))],
        state_format={
            "exp_avg": lowbit.scaled(FIRST, block=128),
            "exp_avg_sq": lowbit.scaled(SECOND, block=128),
        },
    )
    opt.load_state_dict(ours)
    assert torch.equal(opt.state[p]["exp_avg_dynamic4"], state["exp_avg_dynamic4"])
    torch.save({"w": torch.zeros(40, 256)}, tmp_path / "model.pt")
    back = convert(tmp_path, ours, "lpmm", "--keep", "--model", tmp_path / "model.pt")
    same(back["state"], {0: entry})
    group = back["param_groups"][0]
    assert group["fused"] is False and group["factor_second_moment"] is False
    quant = back["qconfig"].QUANT
    assert quant.M.SCALE_TYPE.DEFAULT == "group" and quant.SQM.QUANT_TYPE.DEFAULT == "power-1"
    assert quant.M.BITS == quant.SQM.BITS == 4 and quant.SQM.SIGNED is False


def adam(values, **more):
    state = {"step": torch.tensor(3.0), **{name: x for name, _, x in values}}
    return {"state": {0: state}, "param_groups": [{**ADAM, "params": [0], **more}]}


def test_codes_are_written_as_lpmm_writes_them(tmp_path):
    values = moments((48, 128))
    file = convert(tmp_path, adam(values), "lpmm")
    same(file["state"][0], {"step": torch.tensor(3.0), **packed(values)})
    small = convert(tmp_path, adam(moments((64, 64))), "lpmm")["state"][0]  # 4096 are not enough
    assert small["exp_avg"].shape == (64, 64)
    assert small["exp_avg_qstate"]["enable"] is False and small["exp_avg_qstate"]["overhead"] == {}


def test_rank_1(tmp_path):
    """Over the least of the largest magnitudes of an element's row and column; read back, it is
    what the maxima make of the codes.
    """
    values = moments(SHAPE)
    file = convert(tmp_path, adam(values), "lpmm", "--state-format", "4bit-rank1")
    entry = file["state"][0]
    x = values[1][2].numpy()
    rows, cols = x.max(axis=1, keepdims=True), x.max(axis=0, keepdims=True)
    kept = entry["exp_avg_sq_qstate"]["overhead"]
    np.testing.assert_array_equal(kept["max_dims"][0].numpy(), rows)
    np.testing.assert_array_equal(kept["max_dims"][1].numpy(), cols)
    assert isinstance(kept["max_dims"], list) and kept["scaled_shape"] == torch.Size(SHAPE)
    table = entries(SECOND)
    codes = nearest((x / np.minimum(rows, cols)).reshape(-1), table, tie_up=False)
    np.testing.assert_array_equal(unpack(entry["exp_avg_sq"].numpy(), 4)[: x.size], codes)
    assert file["qconfig"].QUANT.SQM.SCALE_TYPE.DEFAULT == "rank1"
    back = convert(tmp_path, file, "torch")["state"][0]
    np.testing.assert_array_equal(back["exp_avg_sq"].numpy(), decoded(entry, "exp_avg_sq"))


def test_a_shape_that_the_file_does_not_tell(tmp_path):
    """5000 or 5001 values: groups of 128 look the same."""
    x = scaled_normal((5120,), 0)
    values = [("exp_avg", FIRST, x), ("exp_avg_sq", SECOND, x.square())]
    entry = {"step": torch.tensor(3.0), **packed(values)}
    file = lpmm_file([entry])
    file["param_groups"][0]["param_names"] = ["bias"]
    assert "shape" in convert(tmp_path, file, "torch", code=3)
    torch.save({"bias": torch.zeros(5001)}, tmp_path / "model.pt")
    state = convert(tmp_path, file, "torch", "--model", tmp_path / "model.pt")["state"][0]
    assert state["exp_avg"].shape == (5001,)
    assert (state["exp_avg"] - x[:5001]).abs().max() < x.abs().max() * 0.2


def test_diff_takes_the_shape_that_the_file_does_not_tell(tmp_path):
    entry, numel = golden_entry("AdamW_group4"), SHAPE[0] * SHAPE[1]
    for name in ("exp_avg", "exp_avg_sq"):
        qmap, most = (
            golden("AdamW_group4", f"{name}_qstate.{key}") for key in ("qmap", "overhead.max1")
        )
        entry[f"{name}_qstate"] = lpmm_groups(qmap, (numel,), most.reshape(-1))
    file = lpmm_file([entry])
    file["param_groups"][0]["param_names"] = ["bias"]
    ours, theirs, model = (tmp_path / f"{name}.pt" for name in ("ours", "theirs", "model"))
    torch.save(file, theirs)
    torch.save({"bias": torch.zeros(numel)}, model)
    checkpoint.convert(theirs, ours, to="torch", model=model)
    untold = checkpoint.diff(theirs, ours)["differences"]
    assert len(untold) == 2 and all("--model PATH gives it" in found["what"] for found in untold)
    for pair in ((theirs, ours), (ours, theirs), (theirs, theirs)):
        report = checkpoint.diff(*pair, model=model)
        assert report["same"] and report["by"] == "meaning", report
    assert "the same, by meaning" in run("diff", theirs, ours, "--model", model).stdout
    state = torch.load(ours)
    state["state"][0]["exp_avg"][7] += 1
    torch.save(state, ours)
    (found,) = checkpoint.diff(theirs, ours, model=model)["differences"]
    assert found["name"] == "bias.exp_avg" and found["count"] == 1 and found["first"] == [7]
    assert "--model" in run("diff", theirs, ours, "--model", model, "--bytes", code=2).stderr
    torch.save({"bias": torch.zeros(4000)}, model)
    error = run("diff", theirs, ours, "--model", model, code=3).stderr
    assert "theirs.pt: " in error and "without --model, tensors are compared one by one" in error


@pytest.mark.parametrize("named", [True, False])
def test_a_live_optimizer_tells_the_shape(tmp_path, named):
    """Rows of 96 are shorter than groups, and their strides do not tell how many there are."""
    entry = {"step": torch.tensor(3.0), **packed(moments((48, 96)))}
    file = lpmm_file([entry])
    if named:
        file["param_groups"][0]["param_names"] = ["w"]
    torch.save(file, tmp_path / "lpmm.pt")
    torch.save({"w": torch.zeros(48, 96)}, tmp_path / "model.pt")
    there = convert(tmp_path, file, "torch", "--model", tmp_path / "model.pt")["state"][0]
    p = torch.nn.Parameter(torch.zeros(48, 96))
    opt = lowbit.AdamW([("w", p)], state_format="float32")
    lowbit.load_optimizer(opt, tmp_path / "lpmm.pt")
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(opt.state[p][name], there[name])
    for rows, compared in ((60, "more"), (46, "fewer"), (0, "fewer")):
        other = lowbit.AdamW([("w", torch.nn.Parameter(torch.zeros(rows, 96)))])
        said = rf"4608 codes, its parameter of the shape \[{rows}, 96\] {compared} elements"
        with pytest.raises(ValueError, match=said):
            lowbit.load_optimizer(other, tmp_path / "lpmm.pt")


def test_shapes_that_no_parameter_has_are_not_told(tmp_path):
    torch.save(
        lpmm_file([{"step": torch.tensor(3.0), **packed(moments((48, 96)))}]), tmp_path / "a"
    )
    opened = checkpoint.Checkpoint(tmp_path / "a")
    for number in (-1, 1):
        with pytest.raises(IndexError, match=f"no parameter {number}: the checkpoint has 1"):
            opened.tell_shapes({number: (48, 96)})
    for shape in ((-48, -96), (2**33, 2**31)):
        with pytest.raises(ValueError, match="parameter 0 cannot have the shape"):
            opened.tell_shapes({0: shape})
    assert opened.params[0].shape is None
    opened.tell_shapes({0: (48, 96)})
    assert opened.params[0].shape == (48, 96)


def test_a_shape_that_two_models_tell(tmp_path):
    x = scaled_normal((5120,), 0)
    values = [("exp_avg", FIRST, x), ("exp_avg_sq", SECOND, x.square())]
    file = lpmm_file([{"step": torch.tensor(3.0), **packed(values)}])
    file["param_groups"][0]["param_names"] = ["bias"]
    file |= {"ema": {"bias": torch.zeros(5001)}, "model": {"bias": torch.ones(5000)}}
    error = convert(tmp_path, file, "torch", code=3)
    assert "may be any of ema.bias, model.bias" in error and "--exclude 'ema.*'" in error
    state = convert(tmp_path, file, "torch", "--exclude", "ema.*")["state"][0]
    assert state["exp_avg"].shape == (5000,)
    file["ema"] = {"bias": torch.zeros(5000)}  # of the same shape: no question
    assert convert(tmp_path, file, "torch")["state"][0]["exp_avg"].shape == (5000,)


def broken(change):
    entry = golden_entry("AdamW_group4")
    change(entry, entry["exp_avg_sq_qstate"])
    return lpmm_file([entry])


def other_scales(entry, qstate):
    qstate["overhead"]["max0"] = torch.ones(42, 1)


def no_map(entry, qstate):
    qstate["qmap"] = None


def short(entry, qstate):
    entry["exp_avg_sq"] = entry["exp_avg_sq"][:-2]


def long_map(entry, qstate):
    qstate["qmap"] = torch.linspace(0, 1, 17)


def falling_map(entry, qstate):
    qstate["qmap"] = qstate["qmap"].flip(0)


def no_layout(entry, qstate):
    del qstate["overhead"]["scaled_shape"]


def cast_codes(entry, qstate):
    entry["exp_avg_sq"] = torch.ones(qstate["overhead"]["scaled_shape"])


@pytest.mark.parametrize(
    "change, message",
    [
        (cast_codes, "its codes are float32, which lpmm casts them to"),
        (other_scales, "rank1-group"),
        (no_map, "linear maps are not read"),
        (short, "3071 codes' bytes where 3073 belong"),
        (long_map, "not a power of two"),
        (falling_map, "does not rise"),
        (no_layout, "no scaled_shape"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path, change, message):
    error = convert(tmp_path, broken(change), "torch", code=3)
    assert message in error and "exp_avg_sq" in error


def test_scales_along_dimensions_that_the_parameter_lacks(tmp_path):
    """Strides are not needed to see it. The tool once divided by a size that it had not read."""
    entry = golden_entry("AdamW_rank1")
    del entry["exp_avg_sq_qstate"]["overhead"]["stride"], entry["exp_avg_qstate"]
    entry["exp_avg"] = torch.zeros(SHAPE[0])
    error = convert(tmp_path, lpmm_file([entry]), "torch", code=3)
    assert "exp_avg_sq: is of the shape [41, 130], its parameter [41]" in error


def test_what_lpmm_cannot_keep(tmp_path):
    values = moments((48, 128))
    content = adam(values)
    content["state"][0]["max_exp_avg_sq"] = values[1][2]
    assert "keeps no max_exp_avg_sq" in convert(tmp_path, content, "lpmm", code=3)
    assert "4bit-rank1" in convert(tmp_path, adam(values), "lpmm", "--state-format", "8bit", code=2)
    assert "without rounding" in convert(tmp_path, adam(values), "lpmm", "--keep", code=4)


def test_nothing_is_called(tmp_path):
    """A node of a configuration may hold settings, nothing else."""
    config = lpmm_config()
    config["evil"] = print
    error = convert(tmp_path, lpmm_file([golden_entry("AdamW_group4")], config), "torch", code=3)
    assert "print" in error and "nothing was executed" in error
    assert content_of(lpmm_config()) == content_of(lpmm_config())


def fused(values):
    """A file of its fused step: two codes a byte, scales in a row."""
    entry = {"step": torch.tensor(3.0), **packed(values)}
    for name, _, x in values:
        entry[name] = entry[name][: x.numel() // 2].clone()
        scales = entry[f"{name}_qstate"]["overhead"]["max1"].reshape(-1)
        entry[f"{name}_qstate"]["overhead"] = {"max1": scales}
    file = lpmm_file([entry])
    file["param_groups"][0] |= {"fused": True, "param_names": ["w"]}
    return file | {"model": {"w": torch.zeros(values[0][2].shape)}}


def test_what_is_written_anew_is_not_fused(tmp_path):
    file = fused(moments((40, 256)))
    torch.save({"w": torch.zeros(40, 256)}, tmp_path / "model.pt")
    same(convert(tmp_path, {"optim": file}, "lpmm")["optim"]["state"], file["state"])
    made = convert(
        *(tmp_path, file, "lpmm", "--state-format", "4bit", "--model", tmp_path / "model.pt")
    )
    assert "scaled_shape" in made["state"][0]["exp_avg_qstate"]["overhead"]
    assert made["param_groups"][0]["fused"] is False


def test_full_precision_of_its_own_file(tmp_path):
    values = moments((40, 256))
    entry = {"step": torch.tensor(3.0), **packed(values)}
    file = lpmm_file([entry, entry])
    file["param_groups"][0]["param_names"] = ["w", "v"]
    torch.save({"w": torch.zeros(40, 256), "v": torch.zeros(40, 256)}, tmp_path / "model.pt")
    model = ("--model", tmp_path / "model.pt")
    made = convert(tmp_path, file, "lpmm", "--full-precision", "w", *model)["state"]
    assert made[0]["exp_avg"].dtype == torch.float32 and made[0]["exp_avg"].shape == (40, 256)
    assert made[0]["exp_avg_qstate"]["enable"] is False
    same(made[1], entry)
