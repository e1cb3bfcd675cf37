"""torch's ZeroRedundancyOptimizer hands each rank's optimizer all names beside a part of the
parameters, largest first.
"""

import copy

import pytest
import torch
from torch import nn

import lowbit
from tests.sharding import zero_worker

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("overridden", [False, True])
def test_the_bits_of_a_plain_optimizer(pool, ranks, overridden):
    """Streams, overrides and weights;
    the pattern names a parameter that only one of the ranks has.
    """
    assert pool.run(ranks, zero_worker.same_bits, overridden) == [[]] * ranks


@pytest.mark.parametrize("ranks", [1, 2])
def test_names_are_those_of_the_parameters(pool, ranks):
    assert pool.run(ranks, zero_worker.names_said) == [[]] * ranks


@pytest.mark.parametrize("rule", zero_worker.RULES)
def test_the_bits_of_a_plain_optimizer_under_every_rule(pool, rule):
    assert pool.run(2, zero_worker.same_bits_of, rule) == [[]] * 2


@pytest.mark.parametrize("rule", ["AdamW 4bit", "AdamW split8", "Adafactor", "Muon"])
def test_parameters_that_are_views_of_buckets(pool, rule):
    assert pool.run(2, zero_worker.same_bits_of, rule, True) == [[]] * 2


@pytest.mark.parametrize("rule", ["AdamW 4bit", "AdamW split8", "Adafactor", "CAME", "APOLLO"])
def test_a_consolidated_state_dict_goes_on_with_another_number_of_ranks(pool, rule):
    for save, load in ((3, 2), (2, 3)):
        pool.run(save, zero_worker.saved, rule, pool.folder)
        assert pool.run(load, zero_worker.continued, rule, pool.folder) == [[]] * load


def test_overlap_with_ddp_is_refused_by_torch(pool):
    for said in pool.run(2, zero_worker.overlapped):
        assert "no supported functional optimizer equivalent" in said and "AdamW" in said


def test_a_consolidated_state_dict_goes_on(pool):
    assert pool.run(2, zero_worker.resumed) == [[]] * 2


def test_a_group_that_is_added(pool):
    assert pool.run(2, zero_worker.added) == [[]] * 2


def test_names_by_hand_are_refused(pool):
    for said in pool.run(2, zero_worker.refused):
        assert "names of 10 parameters for" in said and "lowbit.param_groups(model)" in said


@pytest.mark.parametrize("ranks", [1, 2])
def test_modes_are_refused_at_construction(pool, ranks):
    """torch copies the whole optimizer's group entries, the mode among them,
    over the part's in each step.
    """
    for said in pool.run(ranks, zero_worker.modes_refused):
        assert "ScheduleFreeAdamW got a part of a group" in said and "Use fully_shard" in said


def test_a_pattern_that_nobody_has_is_refused_on_all_ranks(pool):
    said = pool.run(2, zero_worker.pattern_of_nothing)
    assert said == ["overrides['*.q_proj'] matches the name of no parameter"] * 2


# The same without torch.distributed


def test_a_part_of_a_group_keeps_its_names():
    net = nn.Sequential(nn.Linear(64, 80), nn.Linear(80, 64), nn.Embedding(90, 64))
    for group in lowbit.param_groups(net):
        part = {**copy.copy(group), "params": group["params"][::-1][:2]}
        opt = lowbit.AdamW([part])
        of = {p: name for name, p in net.named_parameters()}
        assert [name for *_, name, _ in opt.members()] == [of[p] for p in part["params"]]


def test_parameters_that_came_elsewhere_from_have_no_such_name():
    """Names are never guessed: these lists are not groups of `lowbit.param_groups` for these
    parameters.
    """
    net, other = nn.Linear(64, 80), nn.Linear(64, 80)
    lowbit.param_groups(net)
    for params, names in [
        ([other.weight], ["weight", "bias"]),
        ([net.weight], ["a.weight", "a.bias"]),
        ([net.weight, other.bias], ["weight", "bias", "more"]),
        ([net.weight, net.bias], ["weight"]),
    ]:
        with pytest.raises(ValueError, match=f"names of {len(names)} parameters for {len(params)}"):
            lowbit.AdamW([{"params": params, "param_names": names}])
    opt = lowbit.AdamW(lowbit.param_groups(net))
    with pytest.raises(ValueError, match="names of 2 parameters for 1"):
        opt.add_param_group({"params": [other.weight], "param_names": ["x", "y"]})
    assert len(opt.param_groups) == 1
    net.weight.grad = torch.ones_like(net.weight)
    opt.step()


def test_as_many_names_by_hand_are_taken_as_they_stand():
    net = nn.Linear(64, 80)
    lowbit.param_groups(net)
    opt = lowbit.AdamW([{"params": [net.bias, net.weight], "param_names": ["b", "w"]}])
    assert [name for *_, name, _ in opt.members()] == ["b", "w"]


def test_the_functions_by_name_say_which_optimizer_they_need():
    """ZeroRedundancyOptimizer around lowbit's, say, of which each rank has a part."""
    other = torch.optim.SGD(nn.Linear(64, 80).parameters())
    for call in (
        lambda: lowbit.fsdp1.get_state_dict(other),
        lambda: lowbit.fsdp1.set_state_dict(other, {"state": {}, "param_groups": []}),
    ):
        with pytest.raises(TypeError, match=r"one of lowbit's optimizers, not SGD.*consolidate"):
            call()
