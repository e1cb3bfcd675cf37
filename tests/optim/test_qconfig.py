"""lpmm's configuration files, read by lowbit.qconfig."""

import pytest
import torch
from torch import nn

import lowbit
from tests.support.configured import formats, model, train
from tests.support.paths import GOLDEN

LPMM = GOLDEN / "lpmm"


def lpmm(bits=4, block=128, scale="rank1"):
    first = lowbit.scaled(f"dynamic{bits}", block=block, min_numel=4097)
    block = block if scale == "block" else None
    second = lowbit.scaled(f"power1_{bits}_unsigned", scale=scale, block=block, min_numel=4097)
    return {"exp_avg": first, "exp_avg_sq": second}


@pytest.mark.parametrize(
    "name, expected",
    [
        ("default", {}),
        ("2nd_moment_group_128", {"scale": "block"}),
        ("default_5b", {"bits": 5}),
        ("default_6b", {"bits": 6}),
        ("default_7b", {"bits": 7}),
    ],
)
def test_lpmm_files(name, expected):
    read = lowbit.qconfig(LPMM / f"{name}.yml")
    assert read == lpmm(**expected)
    net = model()
    opt = lowbit.AdamW(net.named_parameters(), state_format=read)
    train(net, opt)
    assert formats(opt)["body.0.weight"] == [
        read["exp_avg"]["format"],
        read["exp_avg_sq"]["format"],
    ]


def test_lpmm_files_that_differ_otherwise():
    rank1 = lpmm()["exp_avg_sq"]
    assert lowbit.qconfig(LPMM / "1st_moment_group_2048.yml") == {
        **lpmm(block=2048),
        "exp_avg_sq": rank1,
    }
    only = lowbit.qconfig(LPMM / "2nd_moment_only_default.yml")
    assert only == {"exp_avg": lowbit.scaled("float32"), "exp_avg_sq": rank1}
    eight = lowbit.qconfig(LPMM / "default_8b.yml")
    assert (eight["exp_avg"]["format"], eight["exp_avg"]["block"]) == ("dynamic8", 128)
    with pytest.raises(ValueError, match=r"M\.GROUP_SIZE is 4096"):
        lowbit.qconfig(LPMM / "1st_moment_group_4096.yml")


def test_lpmm_keys(tmp_path):
    group = lpmm(scale="block")
    assert lowbit.qconfig({}) == group  # what lpmm itself does without a file
    assert lowbit.qconfig({"M": {"BITS": 8}}, second=None) == {
        "exp_avg": {**group["exp_avg"], "format": "dynamic8"}
    }
    assert list(lowbit.qconfig({}, first="momentum_buffer", second=None)) == ["momentum_buffer"]
    keys = {
        "SCALE_TYPE": {"DEFAULT": "dim0"},
        "QUANT_TYPE": {"DEFAULT": "power-2"},
        "ROUND_TYPE": "real-sr",
        "THRESHOLD": 10,
    }
    assert lowbit.qconfig({"QUANT": {"SQM": keys}})["exp_avg_sq"] == lowbit.scaled(
        "power2_4_unsigned", scale="row", rounding="stochastic", min_numel=11
    )
    (tmp_path / "base.yml").write_text("QUANT: {M: {BITS: 5, ROUND_TYPE: sr}}\n")
    (tmp_path / "child.yml").write_text("BASE: [base.yml]\nQUANT: {M: {BITS: 6}}\n")
    spec = lowbit.qconfig(str(tmp_path / "child.yml"))["exp_avg"]
    assert (spec["format"], spec["rounding"]) == ("dynamic6", "stochastic")


def test_lpmms_threshold_is_strict():
    weights = [
        ("at", nn.Parameter(torch.ones(64, 64))),
        ("above", nn.Parameter(torch.ones(64, 65))),
    ]
    assert [kept[0] for kept in formats(lowbit.AdamW(weights)).values()] == ["dynamic8", "dynamic8"]
    opt = lowbit.AdamW(weights, state_format=lowbit.qconfig({}))
    assert [kept[0] for kept in formats(opt).values()] == ["float32", "dynamic4"]
    opt = lowbit.AdamW(weights, state_format=lowbit.qconfig({"M": {"THRESHOLD": 4095}}))
    assert formats(opt)["at"] == ["dynamic4", "float32"]
    opt = lowbit.AdamW(weights, state_format=lowbit.qconfig({}), min_numel=0)
    assert formats(opt)["at"] == ["dynamic4", "power1_4_unsigned"]


@pytest.mark.parametrize(
    "config, words",
    [
        ({"M": {"QUANT_TYPE": {"DEFAULT": "float-point"}}}, "M.QUANT_TYPE is 'float-point'"),
        ({"SQM": {"QUANT_TYPE": {"DEFAULT": "power-3"}}}, "SQM.QUANT_TYPE is 'power-3'"),
        ({"SQM": {"SCALE_TYPE": {"DEFAULT": "dim01"}}}, "SQM.SCALE_TYPE is 'dim01'"),
        (
            {"SQM": {"SCALE_TYPE": {"DEFAULT": "rank1", "DEFAULT_ONLY": False}}},
            "SQM.SCALE_TYPE.DEFAULT_ONLY is False",
        ),
        ({"M": {"ROUND_TYPE": "up"}}, "M.ROUND_TYPE is 'up'"),
        ({"M": {"BITS": 9}}, "M.BITS is 9"),
        ({"M": {"BITS": 1}}, "M.BITS is 1"),
        ({"M": {"GROUP_SIZE": 100}}, "M.GROUP_SIZE is 100"),
        ({"M": {"SIGNED": False}}, "M.SIGNED is False"),
        ({"M": {"ENABLE": "yes"}}, "M.ENABLE is 'yes'"),
        ({"M": {"THRESHOLD": -1}}, "M.THRESHOLD is -1"),
        ({"M": {"THRESHOLD": True}}, "M.THRESHOLD is True"),
        ({"M": None}, "M is None; it must map names of settings"),
        ({"P": None}, "P is None"),
        ({"SQM": 4}, "SQM is 4"),
        (None, "QUANT is None; it must map M and SQM"),
        ({"M": {"BITTS": 4}}, "M.BITTS is 4"),
        ({"P": {"ENABLE": True}}, "P.ENABLE is True"),
        ({"M": {"ROUND_TYPE": ["up"]}}, "M.ROUND_TYPE is"),
        ({"SQMM": {"BITS": 8}}, "'SQMM' is not a section.* M, SQM"),
    ],
)
def test_lpmm_settings_that_cannot_be_expressed(config, words):
    with pytest.raises(ValueError, match=words):
        lowbit.qconfig({"QUANT": config})


@pytest.mark.parametrize(
    "base, words",
    [
        ("[a.yml]", r"BASE is circular: '.*a\.yml' names '.*a\.yml'"),
        ("[b.yml]", r"BASE is circular: '.*b\.yml' names '.*a\.yml'"),
        ("b.yml", "BASE is 'b.yml'; it must be a list of files"),
        ("[3]", r"BASE is \[3\]; it must be a list of files"),
    ],
)
def test_files_that_cannot_be_started_from(tmp_path, base, words):
    (tmp_path / "a.yml").write_text(f"BASE: {base}\n")
    (tmp_path / "b.yml").write_text("BASE: [a.yml]\n")
    with pytest.raises(ValueError, match=words):
        lowbit.qconfig(tmp_path / "a.yml")


def test_two_files_may_start_from_one(tmp_path):
    (tmp_path / "base.yml").write_text("QUANT: {M: {BITS: 5}}\n")
    for name in ("left", "right"):
        (tmp_path / f"{name}.yml").write_text("BASE: [base.yml]\n")
    (tmp_path / "a.yml").write_text("BASE: ['', left.yml, right.yml]\n")
    assert lowbit.qconfig(tmp_path / "a.yml")["exp_avg"]["format"] == "dynamic5"
