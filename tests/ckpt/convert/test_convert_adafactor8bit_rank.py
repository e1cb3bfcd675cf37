"""State in a subspace: what adafactor-8bit 0.1.9 left under a rank continues in lowbit,
and has no place elsewhere.
"""

import pytest
import torch

import lowbit
from tests.support.peers.files import adafactor_file, convert, need_tool, run, same
from tests.support.peers.golden import arrays

pytestmark = pytest.mark.slow

need_tool()


LOW_RANK = {  # the settings of 0.1.9
    "apollo_rank": 8,
    "apollo_beta1": 0.9,
    "apollo_update_proj_gap": 2,
    "apollo_scale_type": "channel",
    "apollo_eps": 1e-8,
    "apollo_factorize": False,
    "enable_fira_for_adafactor": False,
    "fira_margin": 0.01,
    "scale_weight_decay": True,
    "quantize": False,
}


def low_rank_entries(**changes):
    """What 0.1.9 left of two matrices and a vector (tests/golden/make_adafactor8bit.py).
    Changes are of the first one.
    """
    left, entries = arrays("adafactor8bit"), []
    for i in (0, 1):
        of = {
            key: left[f"lowrank_default_{key}{i}"]
            for key in ("v_low", "scaled_grad_norm_prev", "current_proj_seed", "apollo_seed")
        }
        entries.append(
            {
                "step": 5,
                "is_quantized": False,
                "block_size": 2048,
                "apollo_seed": int(of["apollo_seed"]),
                "apollo_rank": 8,
                "apollo_update_proj_gap": 2,
                "last_proj_step": 5,
                "v_low_q": None,
                "v_low_scale": None,
                "v_low_shape": None,
                "v_low_pad": None,
                "v_low": torch.tensor(of["v_low"]),
                "current_proj_seed": int(of["current_proj_seed"]),
                "scaled_grad_norm_prev": torch.tensor(of["scaled_grad_norm_prev"]),
                **(changes if i == 0 else {}),
            }
        )
    vector = torch.tensor(left["lowrank_default_variance2"])
    entries.append({"step": 5, "is_quantized": False, "block_size": 2048, "variance": vector})
    return entries


def low_rank_weights():
    left = arrays("adafactor8bit")
    return {name: torch.tensor(left[f"lowrank_default_p{i}"]) for i, name in enumerate("abc")}


def low_rank_file(settings=LOW_RANK, **changes):
    file = adafactor_file(low_rank_entries(**changes), **{"weight_decay": 0.1, **settings})
    file["param_groups"][0]["param_names"] = ["a", "b", "c"]
    return file


def low_rank(settings=LOW_RANK, **changes):
    file = low_rank_file(settings, **changes)
    return {"model": low_rank_weights(), "optimizer": file}


def test_low_rank_state_goes_on(tmp_path):
    """From what 0.1.9 left after five steps,
    the sixth is that of an optimizer of ours that took all six.
    """
    left = arrays("adafactor8bit")
    weights = low_rank_weights()
    made = convert(tmp_path, low_rank(), "lowbit", "--state-format", "float32")["optimizer"]
    group = made["param_groups"][0]
    said = {
        "rank": 8,
        "update_proj_gap": 2,
        "scale_type": "channel",
        "projection": "torch",
        "decay_by": "alpha",
        "fira_margin": 0.01,
    }
    assert {key: group[key] for key in said} == said
    options = {**said, "lr": 1e-2, "weight_decay": 0.1, "state_format": "float32"}
    whole = {name: torch.nn.Parameter(torch.tensor(left[f"p{i}"])) for i, name in enumerate("abc")}
    whole_opt = lowbit.Adafactor(whole.items(), **options)
    params = {name: torch.nn.Parameter(weights[name].clone()) for name in "abc"}
    opt = lowbit.Adafactor(params.items(), rank=8, state_format="float32")
    opt.load_state_dict(made)
    for t in range(6):
        for i, name in enumerate("abc"):
            grad = torch.tensor(left[f"g{i}"][t % 5]).float()
            whole[name].grad = grad
            params[name].grad = grad
        if t == 5:
            opt.step()
        whole_opt.step()
    for name in "ab":  # of the vector ours has a limiter too
        torch.testing.assert_close(params[name], whole[name], rtol=0, atol=2e-6)
        assert params[name].sub(weights[name]).abs().max() > 1e-3
    assert "variance" in opt.state[params["a"]] and opt.state[params["a"]]["step"] == 6
    coded = convert(tmp_path, low_rank(), "lowbit", "--state-format", "8bit")["optimizer"]
    assert coded["state"][0]["variance"].shape == (8, 256)  # too few values for codes
    assert coded["state"][1]["variance"].shape == (96, 8)


def test_low_rank_state_without_weights_names_them(tmp_path):
    assert "--model" in convert(tmp_path, low_rank_file(), "lowbit", code=3)


@pytest.mark.parametrize(
    "to", ["torch", "adafactor8bit", "lpmm", "flashoptim", "bitsandbytes", "torchao"]
)
def test_low_rank_state_has_no_place_elsewhere(tmp_path, to):
    said = convert(tmp_path, low_rank(), to, code=3)
    assert (
        "in a subspace" in said
        and "Adafactor with a rank continues with it (convert --to lowbit)" in said
    )


@pytest.mark.parametrize("make", [lowbit.APOLLO, lowbit.Adafactor, lowbit.Fira])
@pytest.mark.parametrize(
    "shape, options",
    [
        ((20, 70), {"min_numel": 1}),
        ((70, 20), {"min_numel": 1}),
        ((96, 64), {"rank": "quarter"}),
        ((96, 64), {"min_numel": 1, "state_format": "4bit"}),
    ],
    ids=str,
)
def test_lowbits_own_low_rank_state_has_no_place_elsewhere(tmp_path, make, shape, options):
    """torch would load it as the state of a smaller matrix."""
    p = torch.nn.Parameter(torch.randn(shape))
    opt = make([p], **{"rank": 4, **options})
    p.grad = torch.randn(shape)
    opt.step()
    whose = {lowbit.APOLLO: "APOLLO", lowbit.Fira: "Fira"}.get(make, "Adafactor with a rank")
    for to in ("torch", "torchao", "bitsandbytes"):
        said = convert(tmp_path, opt.state_dict(), to, code=3)
        assert "in a subspace" in said and f"only lowbit's {whose} continues with it" in said
    without = make([p], rank=None)
    without.step()
    assert len(convert(tmp_path, without.state_dict(), "torch")["state"]) == 1


def test_what_a_rank_leaves_as_it_is_converts(tmp_path):
    """Means with the rank for a side, and a second moment of the weight's own shape."""
    weights = {"a": torch.randn(8, 5, 6), "b": torch.randn(8, 70)}
    for factored in (True, False):
        params = {name: torch.nn.Parameter(w) for name, w in weights.items()}
        opt = lowbit.Adafactor(params.items(), rank=8, factored=factored)
        for p in params.values():
            p.grad = torch.randn_like(p)
        opt.step()
        file = {"model": weights, "optimizer": opt.state_dict()}
        assert len(convert(tmp_path, file, "torch")["optimizer"]["state"]) == 2


@pytest.mark.parametrize("make", [lowbit.APOLLO, lowbit.Adafactor, lowbit.Fira])
def test_lowbits_own_low_rank_state_stays(tmp_path, make):
    """All of it, with the limiter's norm and Fira's projection."""
    p = torch.nn.Parameter(torch.randn(80, 300))
    opt = make([p], rank=64)
    p.grad = torch.randn(80, 300)
    opt.step()
    saved = opt.state_dict()
    same(convert(tmp_path, saved, "lowbit", "--keep")["state"], saved["state"])
    if make is not lowbit.Fira:
        return
    for state_format in ("float32", "8bit", "4bit"):
        made = convert(tmp_path, saved, "lowbit", "--state-format", state_format)
        again = make([p], rank=64, state_format=state_format)
        assert made["param_groups"][0].keys() >= again.state_dict()["param_groups"][0].keys()
        again.load_state_dict(made)
        again.step()


def with_matrix_before(entry, shape=(20, 30)):
    """The file of `low_rank`, behind a matrix that had no low-rank state."""
    file = adafactor_file([entry, *low_rank_entries()], **{"weight_decay": 0.1, **LOW_RANK})
    file["param_groups"][0]["param_names"] = ["z", "a", "b", "c"]
    weights = {} if shape is None else {"z": torch.zeros(shape)}
    return {"model": {**weights, **low_rank_weights()}, "optimizer": file}


def test_a_matrix_without_gradient_shifts_the_seeds(tmp_path):
    """adafactor-8bit gives out seeds at first gradients, lowbit to all matrices with a rank."""
    message = "its projection has the seed 3547493930362192512, and that of matrix 1 is"
    assert message in convert(tmp_path, with_matrix_before({}), "lowbit", code=3)
    assert "--model" in convert(tmp_path, with_matrix_before({}, None), "lowbit", code=3)
    vector = {"step": 5, "is_quantized": False, "block_size": 2048, "variance": torch.ones(9)}
    for entry in ({}, vector):
        convert(tmp_path, with_matrix_before(entry, (9,)), "lowbit")


@pytest.mark.parametrize("floor, eps1", [(1e-8, None), (1e-6, 1e-3)])
def test_the_floor_in_the_subspace_becomes_eps(tmp_path, floor, eps1):
    """The file's eps[0], 1e-30 by default, is of other parameters;
    in lowbit its square would be 0.
    """
    file = low_rank({**LOW_RANK, "eps": (1e-30, 1e-3), "apollo_eps": floor})
    made = convert(tmp_path, file, "lowbit")["optimizer"]
    assert made["param_groups"][0]["eps"] == (eps1, 1e-3)
    said = run("convert", tmp_path / "in.pt", tmp_path / "out.pt", "--to", "lowbit", "--force")
    assert "its other parameters lose their own eps[0]" in said.stdout + said.stderr
    params = {name: torch.nn.Parameter(w) for name, w in low_rank_weights().items()}
    opt = lowbit.Adafactor(params.items(), rank=8)
    opt.load_state_dict(made)
    for p in params.values():
        p.grad = torch.randn_like(p)
        p.grad[3] = 0.0
    opt.step()
    assert all(p.isfinite().all() for p in params.values())


LATER = {key: value for key, value in LOW_RANK.items() if key != "apollo_beta1"}


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: low_rank(LATER), "only that of 0.1.9 can"),
        (
            lambda: low_rank(v_low_q=torch.zeros(1, 2048, dtype=torch.uint8)),
            "0.1.9 quantizes it on a GPU",
        ),
        (lambda: low_rank(row_var_low=torch.zeros(8, 1)), "apollo_factorize factors it"),
        (
            lambda: low_rank(v_low=torch.zeros(2047)),
            r"v_low has shape [2047] and not the 2048 values of [8, 256]",
        ),
        (lambda: low_rank(v_low=torch.zeros(2048).bfloat16()), "before 0.4.5"),
        (
            lambda: low_rank(apollo_rank=16),
            (
                "larger than the rank on both sides, and this is a tensor "
                "of shape [16, 256] and rank 16"
            ),
        ),
        (lambda: low_rank(last_proj_step=4), "its projection is of step 4 and not of step 5"),
        (
            lambda: low_rank(current_proj_seed=7),
            "its projection has the seed 7, and that of matrix 0 is 3547493930362192512 in step 5",
        ),
        (lambda: low_rank(apollo_update_proj_gap=0), "below 1"),
        (lambda: low_rank(step=2**50, apollo_update_proj_gap=1), "redrawn too often"),
        (lambda: low_rank(apollo_rank=None), "it has no apollo_rank"),
        (lambda: low_rank({**LOW_RANK, "apollo_eps": 0.0}), "apollo_eps is 0"),
    ],
)
def test_low_rank_state_that_is_another_is_refused(tmp_path, make, message):
    error = convert(tmp_path, make(), "lowbit", code=3)
    assert (
        message in error and "low-rank state cannot be recovered" in error
    ) or "before 0.4.5" in message
