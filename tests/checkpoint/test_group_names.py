"""Which parameter groups of ranks are taken for the same,
in each of the forms that torch's planner gives them.
"""

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from lowbit.checkpoint.errors import CheckpointError
from lowbit.checkpoint.storage.group_names import check_group_names, group_names

FIRST, SECOND = ["first.weight", "first.bias"], ["second.weight", "second.bias"]


def said(groups, **planner):
    made = DefaultSavePlanner(**planner)
    made.set_up_planner({"optim": {"state": {}, "param_groups": groups}}, is_coordinator=True)
    return group_names(made)


def group(params, **settings):
    return {"lr": 1e-3, "betas": (0.9, 0.999), **settings, "params": params}


# torch's planner keeps a list without tensors whole, and takes apart one that has a tensor.
@pytest.mark.parametrize("lr", [1e-3, torch.tensor(1e-3)])
def test_other_parameters_are_refused(lr):
    mine, theirs = said([group(FIRST, lr=lr)]), said([group(SECOND, lr=lr)])
    check_group_names([mine, mine, {}])
    with pytest.raises(
        CheckpointError,
        match=(
            r"ranks 0 and 2 have other parameters in "
            r"optim\.param_groups.*flatten_optimizer_state_dict"
        ),
    ):
        check_group_names([mine, mine, theirs])


@pytest.mark.parametrize(
    "other", [[group(FIRST[:1])], [group(FIRST[::-1])], [group(FIRST[:1]), group(FIRST[1:])], []]
)
def test_a_part_another_order_and_other_groups_are_others(other):
    with pytest.raises(CheckpointError):
        check_group_names([said([group(FIRST)]), said(other)])


def test_settings_may_differ():
    """A rate that a rank computed for itself is no reason to lose a save: torch's writer keeps one,
    and so does this.
    """
    check_group_names([said([group(FIRST)]), said([group(FIRST, lr=2e-3)])])


def test_what_has_no_groups_says_nothing():
    assert said([group(FIRST)], flatten_state_dict=False) == {}
    planner = DefaultSavePlanner()
    planner.set_up_planner({"param_groups": 3, "model": torch.ones(2)}, is_coordinator=True)
    check_group_names([group_names(planner), {}])
    planner.set_up_planner(
        {"optim.param_groups.w.lr": 1e-3, "w": torch.ones(2)}, is_coordinator=True
    )
    assert group_names(planner) == {}
