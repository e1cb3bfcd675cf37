"""Groups that are edited by hand, split or removed: state and names stay with their parameters."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn

import lowbit


def param(seed=0, shape=(64, 64)):
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def trained(opt, steps=2):
    for _ in range(steps):
        for group in opt.param_groups:
            for i, p in enumerate(group["params"]):
                p.grad = torch.full_like(p, 0.5 + i) if p.requires_grad else None
        opt.step()
    return opt


def names(opt):
    return [opt.names_of(number) for number in range(len(opt.param_groups))]


def split(order, **options):
    """An optimizer of two parts of one group of `lowbit.param_groups`."""
    net = nn.ModuleDict({name: nn.Linear(64, 64, bias=False) for name in "ab"})
    (group,) = lowbit.param_groups(net)
    parts = [{**group, "params": [net[name].weight]} for name in order]
    return net, lowbit.AdamW(parts, **options)


def test_parts_of_a_group_load_by_name_in_any_order():
    net, opt = split("ab")
    for name, value in (("a", 1.0), ("b", 2.0)):
        net[name].weight.grad = torch.full((64, 64), value)
    opt.step()
    other, again = split("ba")
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    for name in "ab":
        ours, theirs = again.state[other[name].weight], opt.state[net[name].weight]
        assert all(torch.equal(ours[key], value) for key, value in theirs.items()), name
    assert names(again) == [["b.weight"], ["a.weight"]]
    assert not any("param_names" in group for group in again.param_groups)


def test_the_names_of_a_removed_part_leave_with_it():
    _, opt = split("ab")
    opt.param_groups.pop(0)
    assert names(opt) == [["b.weight"]]


def test_a_refused_group_leaves_no_names():
    net, opt = split("ab")
    (group,) = lowbit.param_groups(net)
    with pytest.raises(ValueError, match="more than one parameter group"):
        opt.add_param_group({**group, "params": [net["a"].weight]})
    opt.add_param_group({"params": [param()]})
    assert names(opt) == [["a.weight"], ["b.weight"], None]


def test_a_refused_part_changes_no_other_group():
    p, (net, _) = param(), split("ab")
    opt = lowbit.AdamW([("c", p)])
    (group,) = lowbit.param_groups(net)
    with pytest.raises(ValueError, match="more than one parameter group"):
        opt.add_param_group({**group, "params": [net["a"].weight, p], "param_names": ["a", "c"]})
    given = {**group, "params": [net["a"].weight], "lr": -1.0}
    with pytest.raises(ValueError, match="learning rate"):
        opt.add_param_group(given)
    assert opt.param_groups[0]["param_names"] == ["c"] and len(given["param_names"]) == 2
    opt.add_param_group({"params": [("d", param())]})
    assert names(opt) == [["c"], ["d"]]


def edited():
    a, b = param(0), param(1)
    options = lowbit.override("a", state_format="float32")
    return a, b, trained(lowbit.AdamW([("a", a), ("b", b)], overrides=options))


def test_names_follow_a_parameter_where_another_is_removed():
    a, b, opt = edited()
    before = {key: value.clone() for key, value in opt.state[b].items()}
    opt.param_groups[0]["params"].remove(a)
    del opt.state[a]
    assert names(opt) == [["b"]]
    assert opt.state_dict()["param_groups"][0]["param_names"] == ["b"]
    assert names(copy.deepcopy(opt)) == [["b"]]
    assert all(torch.equal(opt.state[b][key], value) for key, value in before.items())
    trained(opt, 1)
    assert opt.state[b].keys() == before.keys() and opt.state[b]["step"] == 3
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert names(opt) == [["b"]]


def test_names_follow_parameters_that_change_places():
    _, _, opt = edited()
    opt.param_groups[0]["params"].reverse()
    assert names(opt) == [["b", "a"]]


def test_names_may_be_edited_with_the_parameters():
    a, _, opt = edited()
    group, c = opt.param_groups[0], param(2)
    group["params"].append(c)
    group["param_names"].append("c")
    assert names(trained(opt, 1)) == [["a", "b", "c"]] and opt.state[c]["step"] == 1
    group["params"].remove(a)
    group["param_names"].remove("a")
    assert names(trained(opt, 1)) == [["b", "c"]]
    group["param_names"][:] = ["x.b", "x.c"]
    assert names(opt) == [["x.b", "x.c"]]


@pytest.mark.parametrize("removed", [0, 1])
def test_a_parameter_without_a_name_is_refused(removed):
    a, _, opt = edited()
    params = opt.param_groups[0]["params"]
    del params[:removed]
    if removed:
        del opt.state[a]
    params.append(param(2))
    for _ in range(2):  # each time
        with pytest.raises(ValueError, match="group 0 was edited, and which name is whose is unk"):
            opt.step()


def test_moments_of_another_format_are_not_begun_anew():
    a, b = param(0), param(1)
    options = lowbit.override("0", state_format="float32")
    opt = trained(lowbit.AdamW([a, b], overrides=options))
    opt.param_groups[0]["params"].remove(a)
    del opt.state[a]
    for _ in range(2):
        with pytest.raises(ValueError, match="parameter 0 was stepped with 'exp_avg_dynamic8'"):
            opt.step()
    assert "exp_avg" not in opt.state[b]


def by_number(**options):
    a, b = param(0), param(1)
    return a, b, lowbit.AdamW([a, b], **options)


def test_names_of_a_state_dict_do_not_hide_numbers():
    saved = trained(lowbit.AdamW([("a", param(0)), ("b", param(1))])).state_dict()
    a, b, opt = by_number(overrides=lowbit.override("0", state_format="float32"))
    opt.load_state_dict(saved)
    assert names(opt) == [None]
    assert "exp_avg" in opt.state[a] and "exp_avg_dynamic8" in opt.state[b]
    opt.add_param_group({"params": [param(2)]})
    _, _, plain = by_number()
    plain.load_state_dict(saved)
    assert names(plain) == [["a", "b"]]  # as torch does


def test_names_of_a_state_dict_do_not_hide_numbers_of_split():
    rows = {"0": [32, 32]}
    named = lowbit.Muon([("a", param(0)), ("b", param(1))], split={"a": [32, 32]})
    opt = lowbit.Muon([param(0), param(1)], split=rows)
    opt.load_state_dict(trained(named).state_dict())
    assert names(opt) == [None]
    trained(opt, 1)


@pytest.mark.parametrize("again", ["add", "unfreeze"])
def test_a_removed_group_was_not_replaced(again):
    a, b, c = param(0), param(1), param(2)
    c.requires_grad_(again == "add")
    opt = lowbit.AdamW([{"params": [a]}, {"params": [b] if again == "add" else [b, c]}])
    for p in (a, b):
        p.grad = torch.ones_like(p)
    opt.step()
    opt.param_groups.pop(0)
    if again == "add":
        opt.add_param_group({"params": [c]})
    c.requires_grad_()
    c.grad = torch.ones_like(c)
    opt.step()
    assert opt.state[c]["step"] == 1 and opt.state[b]["step"] == 2 and opt.state[a]["step"] == 1


def test_groups_that_were_replaced_whole_are_refused():
    """Their state would begin anew in silence, and the old one could not be saved."""
    opt = lowbit.AdamW([nn.Parameter(torch.ones(64, 64)), nn.Parameter(torch.ones(8))])
    stepped = opt.param_groups[0]["params"]
    for p in stepped:
        p.grad = torch.ones_like(p)
    opt.step()
    new = [nn.Parameter(p.detach().clone()) for p in stepped]
    opt.param_groups[:] = [{**group, "params": new} for group in opt.param_groups]
    for p in new:
        p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match="was replaced in the optimizer's groups"):
        opt.step()


def test_a_parameter_that_was_replaced_is_still_refused():
    _, b, opt = edited()
    opt.param_groups[0]["params"] = [param(3), b]
    with pytest.raises(RuntimeError, match="was replaced in the optimizer's groups"):
        trained(opt, 1)


@pytest.mark.parametrize("frozen", [False, True])
def test_what_was_removed_is_freed(frozen):
    a, b, c = param(0), param(1), param(2)
    c.requires_grad_(not frozen)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opt = trained(lowbit.AdamW([{"params": [("a", a)]}, {"params": [("b", b), ("c", c)]}]), 1)
    gone = [weakref.ref(a), weakref.ref(c)]
    opt.param_groups.pop(0)
    del opt.param_groups[0]["params"][1], opt.param_groups[0]["param_names"][1]
    for p in (a, c):
        opt.state.pop(p, None)
    del a, c, p
    b.grad = torch.ones_like(b)
    opt.step()
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


EDITS = {  # made after the third step: a setting that gives a moment, or takes it
    "momentum": (lambda ps: lowbit.SGD(ps, lr=0.1), {"momentum": 0.9}, "momentum_buffer"),
    "amsgrad": (lambda ps: lowbit.AdamW(ps, lr=0.1), {"amsgrad": True}, "max_exp_avg_sq"),
    "normuon": (
        lambda ps: lowbit.Muon(ps, lr=0.1),
        {"normuon_beta2": 0.95},
        "second_momentum_buffer",
    ),
}


@pytest.mark.parametrize("between", ["state_dict", "set_fp32_model_state_dict"])
@pytest.mark.parametrize("name", EDITS)
def test_an_edited_setting_counts_whatever_is_called_before_the_next_step(name, between):
    make, edit, moment = EDITS[name]
    made = []
    for calls in (False, True):
        net = nn.Linear(64, 64, bias=False)
        net.weight = param()
        opt = trained(make(net.named_parameters()), 3)
        assert not any(key.startswith(moment) for key in opt.state[net.weight])
        opt.param_groups[0].update(edit)
        if calls and between == "state_dict":
            opt.state_dict()
        elif calls:
            lowbit.set_fp32_model_state_dict(net, opt, {})
        trained(opt, 3)
        made.append((net.weight, opt.state[net.weight]))
    (p, alone), (q, state) = made
    assert torch.equal(p, q) and list(alone) == list(state)
    assert any(key.startswith(moment) for key in state), list(state)
    assert all(torch.equal(state[key], value) for key, value in alone.items())


@pytest.mark.parametrize("name", EDITS)
def test_a_state_dict_after_an_edited_setting_loads(name):
    make, edit, moment = EDITS[name]
    opt = trained(make([("w", param())]))
    opt.param_groups[0].update(edit)
    again = make([("w", param())])
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    trained(again, 1)
    (state,) = again.state.values()
    assert state["step"] == 3 and any(key.startswith(moment) for key in state)


def test_names_with_one_stream_are_refused_and_numbers_are_not():
    first, second = "plumless", "buckeroo"  # whose CRC-32 is the same
    with pytest.raises(ValueError, match="rename one of them, or pass the parameters without"):
        lowbit.AdamW([(first, param(0)), (second, param(1))])
    trained(lowbit.AdamW([param(0), param(1)]))
