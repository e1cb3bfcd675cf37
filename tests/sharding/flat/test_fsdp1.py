"""FSDP1: optimizers that are built before and after it,
and groups that know module types whatever it has flattened.
"""

import pytest
import torch

import lowbit
from lowbit import sharding
from lowbit.step.flat_shards import FlatShardReducer
from tests.sharding.flat import fsdp1_worker
from tests.sharding.flat.fsdp1_worker import wide

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["orig", "flat", "one_flat"])
def test_param_groups_keeps_the_same_state_wide(pool, kind, tied):
    plain = wide("plain", tied)
    assert {"words.weight", "lm_head.weight"} <= set(plain) and "layer.weight" not in plain
    assert pool.run(2, fsdp1_worker.wide, kind, tied) == [plain, plain]


@pytest.mark.parametrize("kind", ["orig", "flat", "one_flat"])
def test_param_groups_keeps_what_weights_are_computed_from_wide(pool, kind):
    plain = wide("plain", False, True)
    parts = {f"{layer}.parametrizations.weight.original1" for layer in ("words", "lm_head")}
    assert parts <= set(plain) and "layer.weight" not in plain
    assert pool.run(2, fsdp1_worker.wide, kind, False, True) == [plain, plain]


def test_param_groups_finds_a_head_in_a_wrapper():
    assert wide("checkpoint_wrapper", False) == wide("plain", False)


def test_what_decays_goes_by_shapes_of_whole_parameters(pool):
    """FSDP1 shows vectors, whatever the parameters are."""
    plain = fsdp1_worker.without_decay("plain")
    assert plain == ["layer.bias", "plane.bias", "plane.weight"]
    assert pool.run(2, fsdp1_worker.without_decay, "orig") == [plain, plain]


def test_a_flat_parameter_decays_or_not_as_a_whole(pool):
    """If it is trained at all."""
    assert pool.run(2, fsdp1_worker.without_decay, "frozen") == [["plane._flat_param"]] * 2
    assert pool.run(2, fsdp1_worker.without_decay, "flat") == [["plane._flat_param"]] * 2
    for message in pool.run(2, fsdp1_worker.without_decay, "mixed"):
        assert "'layer.bias', which is not to decay, and 'layer.weight', which is, " in message
        assert "use_orig_params=True" in message


@pytest.mark.parametrize("what", ["step", "state_dict"])
def test_an_optimizer_that_is_older_than_fsdp1_is_refused_until_it_is_bound(pool, what):
    for message in pool.run(2, fsdp1_worker.wrapped_later, False, what):
        assert "flat shard of FSDP1" in message and "lowbit.fsdp1.bind(model, opt)" in message
    assert pool.run(2, fsdp1_worker.wrapped_later, True, what) == ["done", "done"]


def test_an_optimizer_of_what_fsdp1_has_flattened_away_is_refused(pool):
    """use_orig_params=False replaces many parameters by one: the old ones would never train."""
    for message in pool.run(2, fsdp1_worker.flattened_away):
        assert "none of the optimizer's 7 parameters is in this model" in message
        assert "build the optimizer from the wrapped model" in message


def test_an_optimizer_that_was_stepped_before_fsdp1_is_not_bound(pool):
    for message in pool.run(2, fsdp1_worker.stepped_before):
        assert "became flat shards after the optimizer had been stepped" in message


@pytest.mark.parametrize(
    "when, orig",
    [
        ("groups", True),
        ("groups", False),
        ("built", True),
        ("built", False),
        ("added", True),
        ("step", True),
    ],
)
def test_muon_is_refused_under_fsdp1(pool, when, orig):
    """Before anything is changed, and with what to use."""
    for message in pool.run(2, fsdp1_worker.muon, when, orig):
        assert "FSDP1" in message and "Muon needs whole matrices; use fully_shard" in message


@pytest.mark.parametrize("orig", [True, False])
def test_the_float32_view_of_what_one_rank_has_whole(pool, orig):
    assert all(pool.run(1, fsdp1_worker.not_sharded, orig))


@pytest.mark.parametrize("ranks, orig", [(1, True), (1, False), (2, False)])
def test_the_float32_view_loads_under_another_wrapping(pool, ranks, orig):
    """FULL state, which torch gathers for parameters inside and outside of FSDP1 alike. On two
    ranks torch's buffers are right without use_orig_params alone (docs/bits/sharding-details.md).
    """
    wanted = {"to the whole model": True, "to a module of it": True}
    assert pool.run(ranks, fsdp1_worker.wrapped_otherwise, orig) == [wanted] * ranks


@pytest.mark.parametrize("way", ["file", "set_state_dict"])
@pytest.mark.parametrize("export", [None, "fp32"])
@pytest.mark.parametrize("wrapper", ["orig", "flat"])
def test_whole_moments_load_with_the_float32_view_and_without(pool, tmp_path, wrapper, export, way):
    """Only what torch's functions hand over has the shape of flat shards."""
    path = str(tmp_path / "torch.pt")
    fsdp1_worker.stepped_by_torch(path)
    plain = fsdp1_worker.loaded_from_torch(path, "plain", None, "file")
    made = pool.run(2, fsdp1_worker.loaded_from_torch, path, wrapper, export, way)
    assert made == [plain, plain]


def test_binding_again_takes_the_place_of_the_call_before(pool):
    for messages in pool.run(2, fsdp1_worker.bound_twice):
        assert len(messages) == 1 and "has 3 parameter groups and the optimizer 2" in messages[0]


def test_what_holders_agree_on_lies_where_the_parameters_do():
    """NCCL reduces nothing on the CPU."""
    owner = torch.empty(8, device="meta")
    piece = sharding.FlatShard(
        owner, "weight", (2, 4), sharding.Flat("group", 0, 2), [(0, 8), (0, 0)], 0, False
    )
    reducer = FlatShardReducer([(piece, None)])
    shared = reducer.begin(0)
    assert [(v.device.type, op) for v, _, op in shared.wanted()] == [("meta", "max")]


def test_a_step_that_raised_is_no_part_of_the_next():
    piece = sharding.FlatShard(
        torch.empty(8), "weight", (2, 4), sharding.Flat("group", 0, 2), [(0, 8), (0, 0)], 0, False
    )
    reducer = FlatShardReducer([(piece, None)])
    reducer.steps(piece)
    reducer.start()
    ((vector, _, _),) = reducer.begin(0).wanted()
    assert vector.tolist() == [0]


def test_another_optimizer_is_refused():
    """Before anything is noted of the parameters."""
    model = torch.nn.Linear(4, 4)
    for opt in (torch.optim.AdamW(model.parameters()), object()):
        with pytest.raises(TypeError, match="one of lowbit's optimizers"):
            lowbit.fsdp1.bind(model, opt)
        with pytest.raises(TypeError, match="one of lowbit's optimizers"):
            lowbit.flat.bind(opt, [])
