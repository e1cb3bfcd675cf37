"""adafactor-8bit's files, of all its generations, into others and back. Its package builds CUDA
code where it is imported, so the files are put together here (tests/support/peers/files.py): around
the arrays that 0.4.6 left, and by the formulas of the older ones."""

import functools

import numpy as np
import pytest
import torch

import lowbit
from tests.support.peers.files import (
    adafactor_file,
    adam_file,
    convert,
    need_tool,
    run,
    same,
    scaled_normal,
)
from tests.support.peers.golden import arrays, entries

pytestmark = pytest.mark.slow

need_tool()
GOLDEN = arrays()
F = np.float32


def blocks_of(x, block=2048):
    flat = x.numpy().reshape(-1)
    return np.pad(flat, (0, -flat.size % block)).reshape(-1, block)


def names(x, q, scale, shape, **more):
    """Keys of one quantized tensor."""
    pad = q.size - int(np.prod(shape)) if q.dtype != np.int16 else 0
    return {
        f"{x}_q": torch.from_numpy(q),
        f"{x}_scale": torch.from_numpy(scale.astype(F)),
        **{f"{x}_{key}": torch.from_numpy(value.astype(F)) for key, value in more.items()},
        f"{x}_shape": torch.Size(shape),
        f"{x}_pad": pad,
    }


def linear(x, name):
    """0.1.0 to 0.1.2."""
    b = blocks_of(x)
    scale = np.maximum(b.max(axis=1), F(1e-12))
    q = np.rint(b / scale[:, None] * 255).astype(np.uint8)
    return names(name, q, scale, x.shape)


def logs(x):
    return np.log2(np.maximum(blocks_of(x), F(2.0**-126))).astype(F)


def divided(x, name, *, cuda=True):
    """0.1.3 to 0.2.0: by its CUDA kernels, or by the fallback,
    which divides by 255 a second time.
    """
    high = logs(x)
    scale = np.maximum((high.max(axis=1) + 126) / F(255), F(1e-12))
    steps = (high + 126) / scale[:, None] * (1 if cuda else 255)
    q = np.clip(np.floor(steps + 0.5), 0, 255).astype(np.uint8)
    return names(name, q, scale, x.shape)


def fixed(x, name):
    """0.2.1 to 0.3.1."""
    high = logs(x)
    scale = high.max(axis=1) + 126
    q = np.rint((high + 126) * 255 / scale[:, None]).astype(np.uint8)
    return {
        k: v.reshape(-1) if k.endswith("_q") else v
        for k, v in names(name, q, scale, x.shape).items()
    }


MEANS = {
    "linear": lambda q, s, _: q * s / 255,
    "divided": lambda q, s, _: np.exp2(q * s - 126),
    "fixed": lambda q, s, _: np.exp2(q * s / 255 - 126),
}
MAKERS = {"linear": linear, "divided": divided, "fixed": fixed}
SETTINGS = {"linear": {}, "divided": {}, "fixed": {"m_block_size": 128}}


def factored(kind, shape=(80, 130), seed=0):
    v = scaled_normal(shape, seed).square()
    row, col = v.mean(dim=-1, keepdim=True), v.mean(dim=-2, keepdim=True)
    make = MAKERS[kind]
    step = 3.0 if kind == "linear" else 3
    entry = {"step": step, "is_quantized": True, "block_size": 2048}
    return {**entry, **make(row, "row_var"), **make(col, "col_var")}, row, col


@pytest.mark.parametrize("kind", MAKERS)
def test_generations_are_told_apart(tmp_path, kind):
    entry, row, col = factored(kind)
    vector = scaled_normal((5000,), 5).square()
    own = {
        "step": entry["step"],
        "is_quantized": True,
        "block_size": 2048,
        **MAKERS[kind](vector, "variance"),
    }
    file = adafactor_file([entry, own], **SETTINGS[kind])
    state = convert(tmp_path, file, "torch")["state"]
    close = {
        "linear": {"rtol": 0, "atol": 1},
        "divided": {"rtol": 0.2, "atol": 0},
        "fixed": {"rtol": 0.2, "atol": 0},
    }[kind]
    for got, name, x, source in (
        (state[0]["row_var"], "row_var", row, entry),
        (state[0]["col_var"], "col_var", col, entry),
        (state[1]["variance"], "variance", vector, own),
    ):
        q = source[f"{name}_q"].numpy().reshape(-1, 2048).astype(F)
        s = source[f"{name}_scale"].numpy()[:, None]
        expected = MEANS[kind](q, s, None).reshape(-1)[: x.numel()]
        assert got.shape == x.shape
        np.testing.assert_allclose(got.numpy().reshape(-1), expected, rtol=1e-4)
        if kind != "linear":
            np.testing.assert_allclose(got.numpy(), x.numpy(), **close)
    assert state[0]["step"] == 3


def golden_entry(case):
    kind = case.split("_")[-1]
    left = {k.partition("/")[2]: v for k, v in GOLDEN.items() if k.startswith(f"af046_{case}/")}
    moment = case.split("_")[1]
    return {
        "step": 3,
        "is_quantized": True,
        "block_size": 2048,
        "variance_q": torch.from_numpy(left["variance_q"].copy()),
        "variance_scale": torch.from_numpy(left["variance_scale"].copy()),
        "variance_min_log": torch.from_numpy(left["variance_min_log"].copy()),
        "variance_shape": torch.Size((96, 64)),
        "variance_pad": 0,
        "m_q": torch.from_numpy(left["m_q"].copy()),
        "m_scale": torch.from_numpy(left["m_scale"].copy()),
        "m_block_size": 256,
        "m_quant_type": moment,
        "v_quant_type": kind,
    }


def momentum_of(entry):
    q, kind = entry["m_q"].numpy(), entry["m_quant_type"]
    if kind.endswith("4"):
        q = np.stack([q >> 4, q & 15], axis=1).reshape(-1)
    table = {
        "uf8": (np.arange(256) - 128).astype(F) / 128,
        "uf4": (np.arange(16) - 8).astype(F) / 8,
        "d8": entries("dynamic8"),
        "d4": entries("dynamic4"),
    }[kind]
    return (table[q] * np.repeat(entry["m_scale"].numpy(), 256)).reshape(96, 64)


def variance_of(entry):
    q = entry["variance_q"].numpy()
    steps = 254
    if q.dtype == np.int16:
        q, steps = q.view(np.uint16), 65534
    s, low = entry["variance_scale"].numpy()[:, None], entry["variance_min_log"].numpy()[:, None]
    return np.where(q == 0, 0, np.exp2((q.astype(F) - 1) * s / steps + low)).reshape(96, 64)


CASES = ["adamw_uf8_al8", "adamw_uf4_al16", "adamw_d8_al16"]
ADAMW = {"relative_step": False, "scale_parameter": False}


@pytest.mark.parametrize("case", CASES)
def test_golden_states_are_read_as_they_are_read_there(tmp_path, case):
    """Its AdamW keeps what torch calls exp_avg and exp_avg_sq."""
    entry = golden_entry(case)
    state = convert(tmp_path, adafactor_file([entry], **ADAMW), "torch")["state"][0]
    np.testing.assert_array_equal(state["exp_avg"].numpy(), momentum_of(entry))
    np.testing.assert_allclose(state["exp_avg_sq"].numpy(), variance_of(entry), rtol=2e-5)


def test_its_own_file_stays_as_it_is(tmp_path):
    file = adafactor_file([golden_entry("adamw_uf8_al8")], **ADAMW)
    same(convert(tmp_path, file, "adafactor8bit", "--keep"), file)
    file = adafactor_file([golden_entry("adamw_uf4_al16")], **ADAMW)
    assert "without rounding" in convert(tmp_path, file, "adafactor8bit", "--keep", code=4)
    back = convert(tmp_path, file, "adafactor8bit")["state"][0]
    assert back["m_quant_type"] == "uf8" and back["v_quant_type"] == "al8"


def test_through_lowbit_and_back(tmp_path):
    """Blocks of 2048 that end with rows are log8's; what is written from them is what was there."""
    v, m = scaled_normal((4, 2048), 0).square(), scaled_normal((4, 2048), 1)
    file = convert(tmp_path, adam_file(m, v), "adafactor8bit")
    entry = file["state"][0]
    assert entry["variance_q"].shape == (4, 2048) and entry["variance_q"].min() > 0
    got = convert(tmp_path, file, "torch")["state"][0]
    np.testing.assert_allclose(got["exp_avg_sq"].numpy(), v.numpy(), rtol=0.06)
    assert (got["exp_avg"] - m).abs().max() <= m.abs().max() / 128
    ours = convert(tmp_path, file, "lowbit")
    state = ours["state"][0]
    assert torch.equal(state["exp_avg_sq_log8"], entry["variance_q"])
    assert torch.equal(state["exp_avg_sq_log8_scale"][:, 0], entry["variance_scale"])
    p = torch.nn.Parameter(torch.zeros(4, 2048))
    opt = lowbit.AdamW([p], state_format={"exp_avg_sq": lowbit.scaled("log8", block=2048)})
    opt.load_state_dict(ours)
    assert torch.equal(opt.state[p]["exp_avg_sq_log8"], entry["variance_q"])
    assert state.pop("shape").tolist() == [4, 2048]
    assert "--model" in convert(tmp_path, ours, "adafactor8bit", code=3)  # rows and columns alone
    torch.save({"w": torch.zeros(4, 2048)}, tmp_path / "model.pt")
    back = convert(tmp_path, ours, "adafactor8bit", "--model", tmp_path / "model.pt")["state"][0]
    for key in ("variance_q", "variance_scale", "variance_min_log"):
        same(back[key], entry[key])


def test_a_shape_that_two_models_tell(tmp_path):
    ones = torch.ones(4, 2048)
    file = convert(tmp_path, adam_file(ones, ones.clone()), "adafactor8bit")
    file |= {"ema": {"w": torch.zeros(2, 4096)}, "model": {"w": torch.ones(4, 2048)}}
    error = convert(tmp_path, file, "torch", code=3)
    assert "may be any of ema.w, model.w" in error and "--exclude 'ema.*'" in error
    file["ema"] = {"w": torch.zeros(4, 2048)}  # of the same shape: no question
    assert convert(tmp_path, file, "torch")["state"][0]["exp_avg"].shape == (4, 2048)


def test_factored_states_of_torch(tmp_path):
    row, col = torch.rand(80, 1) + 0.1, torch.rand(1, 130) + 0.1
    content = {
        "state": {
            0: {"step": torch.tensor(3.0), "row_var": row, "col_var": col},
            1: {"step": torch.tensor(3.0), "variance": torch.rand(7)},
        },
        "param_groups": [
            {
                "lr": 1e-2,
                "beta2_decay": -0.8,
                "eps": (None, 1e-3),
                "d": 1.0,
                "weight_decay": 0.0,
                "params": [0, 1],
            }
        ],
    }
    file = convert(tmp_path, content, "adafactor8bit")
    entry = file["state"][0]
    assert entry["row_var_shape"] == torch.Size((80, 1)) and entry["row_var_pad"] == 2048 - 80
    assert entry["step"] == 3 and entry["is_quantized"] is True
    assert file["state"][1]["is_quantized"] is False and "variance" in file["state"][1]
    back = convert(tmp_path, file, "torch")["state"]
    torch.testing.assert_close(back[0]["row_var"], row, rtol=0.01, atol=0)
    torch.testing.assert_close(back[0]["col_var"], col, rtol=0.01, atol=0)
    assert torch.equal(back[1]["variance"], content["state"][1]["variance"])


def momentum4(kind, blocks):
    """Momentum of 0.2.x in blocks of 128, the first of two codes highest."""
    x = scaled_normal((blocks, 128), 3).numpy()
    most = np.maximum(np.abs(x).max(axis=1), F(1e-12))
    if kind == "int4":
        scale = most / 7
        q = np.clip(np.rint(x / scale[:, None]), -8, 7) + 8
        value = (q - 8) * scale[:, None]
    else:
        table = np.array([
            -1, -.6961928, -.52507306, -.3895074, -.27408478, -.17286907, -.07958022, 0,
            .07958022, .17286907, .27408478, .3895074, .52507306, .6961928, .8641379, 1,
        ], F)  # fmt: skip
        q = np.abs(x[..., None] / most[:, None, None] - table).argmin(axis=-1)
        scale, value = most, table[q] * most[:, None]
    q = q.astype(np.uint8).reshape(-1)
    return q[::2] << 4 | q[1::2], scale.astype(F), value


@pytest.mark.parametrize("kind", ["int4", "table"])
def test_momentum_of_02(tmp_path, kind):
    packed, scale, value = momentum4(kind, 81)
    entry, *_ = factored("fixed", (81, 128))
    entry |= {"m_q": torch.from_numpy(packed), "m_scale": torch.from_numpy(scale)}
    file = adafactor_file([entry], m_block_size=128)
    got = convert(tmp_path, file, "lowbit", "--state-format", "float32")["state"][0]["exp_avg"]
    np.testing.assert_allclose(got.numpy(), value, rtol=1e-6)


def fallback():
    v = scaled_normal((80, 130), 0).square()
    entry, *_ = factored("divided")
    return adafactor_file(
        [{**entry, **divided(v.mean(dim=-1, keepdim=True), "row_var", cuda=False)}]
    )


def cast():
    entry, *_ = factored("divided")
    entry["row_var_scale"] = entry["row_var_scale"].to(torch.bfloat16)
    return adafactor_file([entry])


def test_groups_keep_their_meaning(tmp_path):
    """Its decay is by the step's own factor, and a margin alone limits nothing."""
    entry, *_ = factored("fixed")
    for said, decay, margin in (
        ({"scale_weight_decay": True, "enable_fira_for_adafactor": True}, "alpha", 0.01),
        ({"scale_weight_decay": False, "enable_fira_for_adafactor": False}, "rho", None),
    ):
        file = adafactor_file([entry], m_block_size=128, fira_margin=0.01, **said)
        group = convert(tmp_path, file, "lowbit")["param_groups"][0]
        assert (group["decay_by"], group["fira_margin"]) == (decay, margin)


def test_uniform_momentum_is_lowbits_uniform8(tmp_path):
    """Where blocks of 256 end with rows: CAME of 0.4.6 through lowbit and back, not a bit other."""
    left = {
        k.removeprefix("came_uf8_"): v
        for k, v in arrays("adafactor8bit").items()
        if k.startswith("came_uf8_")
    }
    means = {
        key: torch.tensor(left[f"{key}0"]) for key in ("row_var", "col_var", "conf_row", "conf_col")
    }
    codes = {"m_q": torch.tensor(left["m_q0"]), "m_scale": torch.tensor(left["m_scale0"])}
    entry = {
        "step": 5,
        "is_quantized": True,
        "block_size": 2048,
        **means,
        **codes,
        "m_block_size": 256,
        "m_quant_type": "uf8",
    }
    file = adafactor_file([entry], **ADAMW, m_quant_type="uf8")
    ours = convert(tmp_path, file, "lowbit", "--keep")
    state = ours["state"][0]
    assert torch.equal(state["exp_avg_uniform8"].reshape(-1), codes["m_q"])
    assert torch.equal(state["exp_avg_uniform8_scale"].reshape(-1), codes["m_scale"])
    p = torch.nn.Parameter(torch.zeros(16, 256))
    opt = lowbit.CAME(
        [p], min_numel=1, state_format={"exp_avg": lowbit.scaled("uniform8", block=256)}
    )
    opt.load_state_dict(ours)
    assert torch.equal(opt.state[p]["exp_avg_uniform8"], state["exp_avg_uniform8"])
    group = opt.param_groups[0]
    assert (group["eps"], group["betas"]) == ((1e-30, 1e-16), (0.9, 0.999, 0.9999))
    back = convert(tmp_path, ours, "adafactor8bit", "--state-format", "8bit")["state"][0]
    assert torch.equal(back["m_q"], codes["m_q"]) and torch.equal(back["m_scale"], codes["m_scale"])
    assert back["m_quant_type"] == "uf8"


def test_groups_of_came_mean_the_same(tmp_path):
    """It has eps_came, three betas and d under names of their own,
    and the second eps is Adafactor's alone.
    """
    means = {
        "row_var": torch.ones(16),
        "col_var": torch.ones(16),
        "conf_row": torch.ones(16),
        "conf_col": torch.ones(16),
    }
    entry = {"step": 5, "is_quantized": False, **means, "m": torch.ones(16, 16)}
    said = {
        "eps": (1e-20, 1e-3),
        "eps_came": 1e-12,
        "beta1": 0.8,
        "beta2": 0.98,
        "beta3": 0.99,
        "d": 2.0,
        "weight_decay": 0.1,
    }
    group = convert(tmp_path, adafactor_file([entry], **ADAMW, **said), "lowbit")["param_groups"][0]
    assert group["eps"] == (1e-20, 1e-12) and group["betas"] == (0.8, 0.98, 0.99)
    assert group["clip_threshold"] == 2.0 and group["weight_decay"] == 0.1


@pytest.mark.parametrize("container", ["torch", "dcp"])
def test_groups_of_came_go_there_and_back(tmp_path, container):
    """What its one optimizer needs to be CAME again,
    and every setting of ours under its name there.
    """
    said = {
        "lr": 3e-4,
        "eps": (1e-20, 1e-12),
        "betas": (0.8, 0.98, 0.99),
        "clip_threshold": 2.0,
        "weight_decay": 0.1,
        "maximize": True,
    }
    p, q = (torch.nn.Parameter(torch.randn(16, 32)) for _ in range(2))
    opt = lowbit.CAME([{"params": [p], **said}, {"params": [q]}], state_format="float32")
    for x in (p, q):
        x.grad = torch.randn(16, 32)
    opt.step()
    torch.save(opt.state_dict(), tmp_path / "ours.pt")
    run(
        "convert",
        tmp_path / "ours.pt",
        tmp_path / "there",
        "--to",
        "adafactor8bit",
        "--container",
        container,
    )
    run("convert", tmp_path / "there", tmp_path / "there.pt")
    first, second = torch.load(tmp_path / "there.pt", weights_only=True)["param_groups"]
    wanted = {
        "lr": 3e-4,
        "beta1": 0.8,
        "beta2": 0.98,
        "beta3": 0.99,
        "beta2_decay": None,
        "eps": (1e-20, 1e-3),
        "eps_came": 1e-12,
        "d": 2.0,
        "weight_decay": 0.1,
        "maximize": True,
        "factored": True,
        "relative_step": False,
        "scale_parameter": False,
        "scale_weight_decay": False,
    }
    assert {key: first[key] for key in wanted} == wanted
    assert not {"betas", "clip_threshold", "state_format"} & set(first)
    # The defaults are those of its preset.
    usual = {"beta1": 0.9, "beta2": 0.999, "beta3": 0.9999, "eps_came": 1e-16, "d": 1.0}
    assert {key: second[key] for key in usual} == usual and second["eps"] == (1e-30, 1e-3)
    run(
        "convert",
        tmp_path / "there",
        tmp_path / "back.pt",
        "--to",
        "lowbit",
        "--state-format",
        "float32",
    )
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    for group, ours in zip(back["param_groups"], opt.state_dict()["param_groups"], strict=True):
        assert {key: group[key] for key in said} == {key: ours[key] for key in said}
    for i in (0, 1):
        for key, value in opt.state_dict()["state"][i].items():
            if key.startswith("exp_avg"):
                assert torch.equal(back["state"][i][key], value), key


def few_momenta():
    packed, scale, _ = momentum4("int4", 40)
    entry, *_ = factored("fixed", (40, 128))
    return adafactor_file(
        [{**entry, "m_q": torch.from_numpy(packed), "m_scale": torch.from_numpy(scale)}],
        m_block_size=128,
    )


def torn():
    entry, *_ = factored("divided")
    entry["row_var_scale"] = torch.ones(3)
    return adafactor_file([entry])


def not_means(row, col):
    """Shapes that no mean of rows and columns has: a dimension of 0, or of several."""
    entry = {"step": 3.0, "is_quantized": True, "block_size": 2048}
    return adafactor_file([{**entry, "row_var": torch.ones(row), "col_var": torch.ones(col)}])


def no_generation():
    entry, *_ = factored("fixed")
    return adafactor_file([entry])  # without the setting that 0.2.1 has


@pytest.mark.parametrize(
    "make, message",
    [
        (fallback, "0.1.3 to 0.2.0, written by its fallback without CUDA"),
        (cast, "before 0.4.5"),
        (few_momenta, "0.2.1 to 0.2.5"),
        (torn, "2048 codes and 3 scales"),
        (no_generation, "its generation cannot be told"),
        (functools.partial(not_means, (5, 0), (0, 7)), "not that of means of rows, [.., R, 1]"),
        (functools.partial(not_means, (5, 3), (1, 7)), "not that of means of rows, [.., R, 1]"),
        (functools.partial(not_means, (5, 1), (2, 7)), "not that of means of columns"),
    ],
)
def test_what_cannot_be_recovered_is_refused_by_name(tmp_path, make, message):
    error = convert(tmp_path, make(), "lowbit", code=3)
    assert message in error and "parameter 0" in error


def test_what_it_cannot_keep(tmp_path):
    content = {
        "state": {0: {"step": torch.tensor(3.0), "momentum_buffer": torch.ones(64, 64)}},
        "param_groups": [{"lr": 1e-2, "momentum": 0.9, "params": [0]}],
    }
    assert "no optimizer that keeps these states (momentum_buffer)" in convert(
        tmp_path, content, "adafactor8bit", code=3
    )
    assert "8bit (of 0.4.0" in convert(
        tmp_path, content, "adafactor8bit", "--state-format", "4bit", code=2
    )


@pytest.mark.parametrize("options", [{}, {"factored": False}, {"scale_parameter": False}], ids=str)
def test_an_adafactor_with_momentum_comes_back(tmp_path, options):
    """Its vectors have the states of AdamW, and without factors its matrices too."""
    options = {"beta1": 0.9, "relative_step": False, "state_format": "float32", **options}
    params = [torch.nn.Parameter(scaled_normal(shape, 7)) for shape in ((64, 80), (80,))]
    groups = [{"params": [p]} for p in params] if "scale_parameter" in options else params
    opt = lowbit.Adafactor(groups, **options)
    for p in params:
        p.grad = scaled_normal(p.shape, 8)
    opt.step()
    there = convert(tmp_path, opt.state_dict(), "adafactor8bit")
    back = convert(tmp_path, there, "lowbit", "--state-format", "float32")
    assert back["param_groups"][0].keys() >= opt.state_dict()["param_groups"][0].keys()
    for ours, theirs in zip(
        back["state"].values(), opt.state_dict()["state"].values(), strict=True
    ):
        assert {k for k in ours if "_" in k} == {k for k in theirs if "_" in k}
    lowbit.Adafactor(groups, **options).load_state_dict(back)
