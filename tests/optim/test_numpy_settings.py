"""Settings that are NumPy's are saved as Python's, so that `weights_only=True` loads them."""

import io

import numpy as np
import pytest
import torch
from torch import nn

import lowbit

GIVEN = {
    "lr": (np.array(1e-3), 1e-3),
    "eps": (np.float32(0.5), 0.5),
    "betas": ((np.array(0.5), np.float64(0.75)), (0.5, 0.75)),
    "weight_decay": (np.array(0.25, "f4"), 0.25),
    "min_numel": (np.int64(5), 5),
    "seed": (np.array(7), 7),
    "amsgrad": (np.array(True), True),
    "full_precision": (np.bool_(True), True),
    "state_format": (np.str_("4bit"), "4bit"),
    "param_format": (np.str_("auto"), "auto"),
}


def weights():
    p = nn.Parameter(torch.ones(64, 128))
    p.grad = torch.ones_like(p)
    return p


def saved(opt):
    """Its first group, saved and loaded without unpickling anything."""
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)["param_groups"][0]


@pytest.mark.parametrize("place", ["argument", "group"])
@pytest.mark.parametrize("name", GIVEN)
def test_it_is_the_number_that_it_holds(name, place):
    given, wanted = GIVEN[name]
    p = weights()
    if place == "argument":
        opt = lowbit.AdamW([p], **{name: given})
    else:
        opt = lowbit.AdamW([{"params": [p], name: given}])
    opt.step()
    found = saved(opt)[name]
    assert found == wanted and type(found) is type(wanted)
    assert type(opt.param_groups[0][name]) is type(wanted)


def test_betas_may_be_an_array():
    opt = lowbit.AdamW([weights()], betas=np.array([0.5, 0.75]))
    opt.step()
    assert saved(opt)["betas"] == (0.5, 0.75)


def test_a_rate_that_a_schedule_computed_with_numpy_is_saved_as_a_number():
    """np.cos gives float64 of NumPy, as schedules of many repositories do."""
    p = weights()
    opt = lowbit.AdamW([p], lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: np.cos(n / 10))
    opt.step()
    schedule.step()
    assert type(opt.param_groups[0]["lr"]) is np.float64
    assert type(saved(opt)["lr"]) is float and saved(opt)["lr"] == opt.param_groups[0]["lr"]


def test_entries_of_the_program_stay_as_they_are():
    mine = np.arange(3)
    opt = lowbit.AdamW([{"params": [weights()], "mine": mine}])
    assert opt.state_dict()["param_groups"][0]["mine"] is mine
