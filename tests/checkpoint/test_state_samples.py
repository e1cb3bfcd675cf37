"""Ranks that save other states under one name, of which a checkpoint has room for one."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import lowbit
from lowbit.checkpoint import Writer
from lowbit.checkpoint.errors import CheckpointError
from lowbit.checkpoint.storage.state_samples import check_state_samples, state_samples


def trained(seed, cls=lowbit.AdamW, named=False):
    """A stage of a pipeline, trained on data of its own."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 80))
    opt = cls(model.named_parameters() if named else model.parameters(), lr=1e-2)
    model(torch.randn(4, 64)).square().sum().backward()
    opt.step()
    return model, opt


def said(state_dict, **planner):
    made = DefaultSavePlanner(**planner)
    made.set_up_planner(state_dict, is_coordinator=True)
    return state_samples(made)


FORMS = {
    "state_dict": lambda model, opt: {"optim": opt.state_dict()},
    "alone": lambda model, opt: opt.state_dict(),
    "lowbit.flat": lambda model, opt: {"optim": lowbit.flat.get_state_dict(opt)},
    "torch's names": lambda model, opt: {"optim": get_optimizer_state_dict(model, opt)},
    "flattened": lambda model, opt: {
        "optim": get_optimizer_state_dict(
            model, opt, options=StateDictOptions(flatten_optimizer_state_dict=True)
        )
    },
}


@pytest.mark.parametrize(
    ("form", "cls"),
    [
        (form, cls)
        for form in FORMS
        for cls in (lowbit.AdamW, torch.optim.AdamW, lowbit.Lion)
        if form != "lowbit.flat" or cls is not torch.optim.AdamW  # takes lowbit's optimizers alone
    ],
)
def test_stages_that_share_names_are_refused_and_replicas_are_not(form, cls):
    first, again, second = (said(FORMS[form](*trained(seed, cls))) for seed in (0, 0, 1))
    assert 0 < len(first) <= 8
    check_state_samples([first, again, {}])
    with pytest.raises(CheckpointError, match=r"ranks 0 and 2 have other values in .*state") as e:
        check_state_samples([first, again, second])
    assert "model.named_parameters()" in str(e.value)


def test_whoever_wants_one_of_several_replicas_says_so(tmp_path, monkeypatch):
    def differ(_):
        raise CheckpointError("ranks differ")

    monkeypatch.setattr("lowbit.checkpoint.storage.writer.check_state_samples", differ)
    state = {"optim": trained(0)[1].state_dict()}
    with pytest.raises(dcp.api.CheckpointException, match="ranks differ"):
        dcp.save(state, storage_writer=Writer(tmp_path / "a"))
    assert not (tmp_path / "a").exists()
    dcp.save(state, storage_writer=Writer(tmp_path / "a", check_replicas=False))
    assert (tmp_path / "a").exists()


def test_one_code_that_differs_in_many_is_enough():
    """Samples are of whole tensors: a stage whose moments are small differs in its scales."""
    model, opt = trained(0)
    mine = said(opt.state_dict())
    opt.state[model[0].weight]["exp_avg_dynamic8_scale"] *= 2
    with pytest.raises(CheckpointError, match=r"0\.exp_avg_dynamic8_scale"):
        check_state_samples([mine, said(opt.state_dict())])


def test_state_of_a_dtype_that_cannot_be_indexed(tmp_path):
    """torch indexes no float4, which it saves and loads."""
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("this torch has no float4")

    def state(first):
        codes = torch.arange(first, first + 24, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        entry = {"exp_avg": codes.view(4, 6)[:, :3], "step": torch.tensor(1.0)}
        return {"optim": {"state": {0: entry}, "param_groups": [{"params": [0]}]}}

    mine = said(state(0))
    assert len(mine) == 1
    check_state_samples([mine, said(state(0))])
    with pytest.raises(CheckpointError, match="exp_avg"):
        check_state_samples([mine, said(state(1))])
    dcp.save(state(0), storage_writer=Writer(tmp_path / "run"))
    assert (tmp_path / "run").exists()


def test_other_names_parts_weights_and_values_of_the_program_may_differ():
    model, opt = trained(0, named=True)
    with_prefix = {f"1.{k}": v for k, v in opt.state_dict().items()}
    check_state_samples([said({"a": opt.state_dict()}), said({"b": with_prefix})])
    for _ in range(2):  # weights, buffers and random numbers: no optimizer is at their place
        assert said({"model": model.state_dict(), "state": {"x": torch.randn(4)}}) == {}
    assert (
        said({"state": {0: {"x": torch.ones(2)}}, "param_groups": []}, flatten_state_dict=False)
        == {}
    )
