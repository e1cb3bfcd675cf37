"""What would mean something else in another library's file is refused, warned of or seen there;
a number that is none stays none.
"""

import pytest
import torch

from tests.support.peers.files import (
    adafactor_file,
    adam_file,
    convert,
    need_tool,
    run,
    same,
    scaled_normal,
    stand_in_for_yacs,
)

pytestmark = pytest.mark.slow

need_tool()
stand_in_for_yacs()
OTHERS = ["torchao", "bitsandbytes", "lpmm", "flashoptim", "fusedadam"]


def adam_of(x, **settings):
    """Its second moment is the square of its first."""
    return adam_file(x, x.square(), **settings)


@pytest.mark.parametrize("to", OTHERS)
def test_an_optimizer_that_maximizes_goes_where_there_is_one(tmp_path, to):
    x = scaled_normal((64, 128), 0)
    assert "maximize=True" in convert(tmp_path, adam_of(x, maximize=True), to, code=3)
    convert(tmp_path, adam_of(x, maximize=True), "adafactor8bit")
    kept = convert(tmp_path, adam_of(x, maximize=True), "lowbit")
    assert kept["param_groups"][0]["maximize"] is True


@pytest.mark.parametrize("to", ["torchao", "bitsandbytes", "fusedadam"])
def test_weight_decay_of_the_gradient_is_warned_of(tmp_path, to):
    x = scaled_normal((64, 128), 0)
    for decoupled in (True, False):
        content = adam_of(x, weight_decay=0.1, decoupled_weight_decay=decoupled)
        torch.save(content, tmp_path / "in.pt")
        said = run("convert", tmp_path / "in.pt", tmp_path / "out.pt", "--to", to, "--force")
        assert ("part of the gradient here" in said.stderr) is not decoupled


@pytest.mark.parametrize(
    "to",
    ["lowbit", *OTHERS, "lpmm --state-format 4bit-rank1", "adafactor8bit"],
)
def test_a_value_that_is_no_number_stays_none(tmp_path, to):
    """Its block is not finite with it, as in the library itself, and verify can find it."""
    to, *options = to.split()
    torch.save({"w": torch.zeros(64, 128)}, tmp_path / "model.pt")
    options += ["--model", tmp_path / "model.pt"]
    for bad in (float("nan"), float("inf")):
        x = scaled_normal((64, 128), 0)
        x[3, 5] = bad
        there = convert(tmp_path, adam_of(x), to, *options)
        back = convert(tmp_path, there, "torch", *options[-2:])
        for key in ("exp_avg", "exp_avg_sq"):
            assert not back["state"][0][key][3, 5].isfinite()
            assert back["state"][0][key][20:, 6:].isfinite().all()


@pytest.mark.parametrize("to", ["torch", *OTHERS, "adafactor8bit"])
def test_lossy_leaves_a_compensation_out(tmp_path, to):
    x = scaled_normal((64, 128), 0)
    content = {"model": {"w": x.clone()}, "optim": adam_of(x)}
    torch.save(content, tmp_path / "in.pt")
    run(
        *("convert", tmp_path / "in.pt", tmp_path / "kahan.pt", "--to", "lowbit"),
        *("--weights", "bfloat16_kahan"),
    )
    kahan = torch.load(tmp_path / "kahan.pt")
    assert "param_bfloat16_kahan" in kahan["optim"]["state"][0]
    assert "--lossy leaves it out" in convert(tmp_path, kahan, to, code=3)
    out = convert(tmp_path, kahan, to, "--lossy")
    assert not any(str(key).startswith("param_") for key in out["optim"]["state"][0])


def test_other_blocks_of_adafactor8bit_are_coded_again(tmp_path):
    """Its writer's are 2048 and 256: codes of others are not copied under them."""
    shape, many = (64, 128), 64 * 128
    state = {
        "step": 3,
        "is_quantized": True,
        "block_size": 1024,
        "variance_q": torch.randint(1, 256, (many // 1024, 1024), dtype=torch.uint8),
        "variance_scale": torch.rand(many // 1024) * 20 + 1,
        "variance_min_log": -torch.rand(many // 1024) * 50,
        "variance_shape": torch.Size(shape),
        "variance_pad": 0,
        "m_q": torch.randint(0, 256, (many,), dtype=torch.uint8),
        "m_scale": torch.rand(many // 128) + 0.1,
        "m_block_size": 128,
        "m_quant_type": "uf8",
        "v_quant_type": "al8",
    }
    settings = {"scale_parameter": False, "relative_step": False}
    content = adafactor_file([state], block_size=1024, m_block_size=128, **settings)
    assert "without rounding" in convert(tmp_path, content, "adafactor8bit", "--keep", code=4)
    before = convert(tmp_path, content, "torch")["state"][0]
    after = convert(tmp_path, convert(tmp_path, content, "adafactor8bit"), "torch")["state"][0]
    for key in ("exp_avg", "exp_avg_sq"):
        error = (after[key] - before[key]).norm() / before[key].norm()
        assert error < 0.1, (key, error)


def test_states_that_share_a_tensor_are_taken_apart(tmp_path):
    """bitsandbytes' AdEMAMix keeps two means in one tensor, here in bfloat16."""
    x = torch.randn(2, 64, 64).bfloat16()
    state = {"step": 3, "state1": x, "state2": torch.rand(64, 64).bfloat16()}
    group = {"lr": 1e-3, "betas": (0.9, 0.999, 0.9999), "alpha": 5.0, "eps": 1e-8}
    group |= {"t_alpha": None, "t_beta3": None, "weight_decay": 0.0, "params": [0]}
    content = {"state": {0: state}, "param_groups": [group]}
    out = convert(tmp_path, content, "lowbit", "--state-format", "bfloat16")["state"][0]
    same(out["exp_avg_bfloat16"], x[0].clone())
    same(out["exp_avg_slow_bfloat16"], x[1].clone())
    same(out["exp_avg_sq_bfloat16"], state["state2"])
