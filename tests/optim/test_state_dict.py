"""State dicts of an optimizer: copies, files, pickles, and loads of other dtypes and formats."""

import copy
import io
import pickle

import pytest
import torch
from small_net import bits, model, same, set_grads, train

import lowbit
from lowbit import ops


def test_state_dict_survives_copies_files_and_weights_only():
    net = model()
    opt = lowbit.AdamW(lowbit.param_groups(net), lr=1e-2)
    train(net, opt)
    buffer = io.BytesIO()
    torch.save(opt.state_dict(), buffer)
    buffer.seek(0)
    for state in (
        copy.deepcopy(opt.state_dict()),
        pickle.loads(pickle.dumps(opt.state_dict())),
        torch.load(buffer, weights_only=True),
    ):
        net2 = copy.deepcopy(net)
        opt2 = lowbit.AdamW(lowbit.param_groups(net2), lr=1e-2)
        opt2.load_state_dict(state)
        assert same(bits(opt), bits(opt2))
        mine, theirs = copy.deepcopy((net, opt)), (net2, opt2)
        for pair in (mine, theirs):
            train(*pair, steps=3, first=5)
        assert same(bits(mine[1]), bits(theirs[1]))


def test_pickled_and_deep_copied_optimizers_step_on():
    net = model()
    opt = lowbit.AdamW(net.parameters())
    train(net, opt)
    (net2, opt2), (net3, opt3) = copy.deepcopy((net, opt)), pickle.loads(pickle.dumps((net, opt)))
    for pair in ((net, opt), (net2, opt2), (net3, opt3)):
        train(*pair, first=5)
    assert same(bits(opt), bits(opt2)) and same(bits(opt), bits(opt3))


def test_two_optimizers_from_one_state_dict_do_not_share_their_step():
    net = model()
    opt = lowbit.AdamW(net.parameters())
    train(net, opt)
    state = opt.state_dict()
    opts = [lowbit.AdamW(net.parameters()) for _ in range(2)]
    for o in opts:
        o.load_state_dict(state)
        set_grads(net, 9)
        o.step()
    assert [o.state[net[0].weight]["step"].item() for o in (opt, *opts)] == [5, 6, 6]


def test_dtypes_never_change_on_load():
    net = model()
    opt = lowbit.AdamW(net.parameters())
    train(net, opt)
    before = {k: t.dtype for k, t in opt.state[net[0].weight].items()}
    opt.load_state_dict(opt.state_dict())
    assert {k: t.dtype for k, t in opt.state[net[0].weight].items()} == before
    assert (
        before["exp_avg_dynamic8"] == torch.uint8
        and before["exp_avg_dynamic8_scale"] == torch.float32
    )


@pytest.mark.parametrize(
    "state, word",
    [
        ({"step": 3, "state1": torch.zeros(1), "qmap1": torch.zeros(256)}, "bitsandbytes"),
        ({"step": torch.tensor(1.0), "exp_avg": torch.zeros(128, 96)}, "no exp_avg_sq"),
        ({"step": torch.tensor(1.0), "momentum_buffer": torch.zeros(128, 96)}, "SGD"),
        ({"exp_avg": torch.zeros(128, 96)}, "no 'step'"),
        (
            {
                "step": torch.tensor(1.0),
                "exp_avg": torch.zeros(96, 128),
                "exp_avg_sq": torch.zeros(96, 128),
            },
            "expected floating point",
        ),
        (
            {
                "step": torch.tensor(1.0),
                "exp_avg_dynamic8": torch.zeros(128, 96).bfloat16(),
                "exp_avg_dynamic8_scale": torch.zeros(128, 1),
            },
            "cast",
        ),
    ],
)
def test_unknown_layouts_raise_and_say_what_to_do(state, word):
    net = model()
    opt = lowbit.AdamW(net.parameters())
    before = bits(opt)
    given = opt.state_dict()
    given["state"][0] = state
    with pytest.raises(ValueError, match=word):
        opt.load_state_dict(given)
    assert same(before, bits(opt)), "a refused load leaves the optimizer as it was"


def test_state_of_another_format_is_decoded_and_encoded():
    net = model()
    full_precision = lowbit.AdamW(net.parameters(), state_format="bfloat16")
    train(net, full_precision)
    opt = lowbit.AdamW(net.parameters())
    opt.load_state_dict(full_precision.state_dict())
    state = opt.state[net[0].weight]
    values = ops.dequantize(
        state["exp_avg_dynamic8"], state["exp_avg_dynamic8_scale"], "dynamic8", 256, 96
    )
    torch.testing.assert_close(
        values, full_precision.state[net[0].weight]["exp_avg_bfloat16"].float(), rtol=0.2, atol=2e-3
    )
    assert opt.param_groups[0]["state_format"] == "8bit"
