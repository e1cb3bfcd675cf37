"""lowbit.flat.bind: slices of parameters in any vectors, cut in any way: the bits of one process,
or a refusal.
"""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import lowbit
from lowbit.flat import FlatSlice
from tests.sharding.flat import flat_slices_worker
from tests.sharding.flat.flat_slices_worker import MAKE

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", MAKE)
def test_the_bits_of_one_process(pool, name):
    """Weights and state, however vectors are cut, on 1, 2 and 3 ranks;
    loaded from any other cut and number of ranks.
    """
    for ranks in (3, 2, 1):
        assert pool.run(ranks, flat_slices_worker.same_bits, name, pool.folder) == [[]] * ranks
    for ranks in (2, 1):
        assert pool.run(ranks, flat_slices_worker.from_others, name, pool.folder) == [[]] * ranks


@pytest.mark.parametrize("how", ["groups", "tensors"])
def test_steps_by_parts(pool, how):
    assert pool.run(2, flat_slices_worker.by_parts, how) == [[]] * 2


def test_the_float32_view(pool):
    assert pool.run(2, flat_slices_worker.float32_view) == [[]] * 2


def test_the_float32_view_beside_a_parameter_that_is_not_flat(pool):
    assert pool.run(2, flat_slices_worker.float32_view_beside_ordinary) == [True] * 2


def test_a_moment_that_a_rank_lacks_is_said_on_every_rank(pool):
    for said in pool.run(2, flat_slices_worker.float32_view_without_a_moment):
        assert "'square' has no 'exp_avg_sq' on this or another rank" in said


def test_clipping_takes_the_norm_of_all_ranks(pool):
    for found, want in pool.run(2, flat_slices_worker.clipped):
        assert found == want


def test_what_does_not_fit_together_is_refused_on_every_rank(pool):
    for said in pool.run(2, flat_slices_worker.refusals):
        assert said["fits"] == "nothing was refused"
        assert "overlap: ranks 0 and 1 both hold element 60" in said["overlap"]
        assert "leave a gap: no rank holds its elements [60, 64)" in said["gap"]
        assert "both hold element 0; pass as group= the ranks" in said["replicas"]
        assert "'weight0' of shape (4, 32) on rank 0 and 'weight1'" in said["names"]
        assert "'weight' of shape (5, 32) on rank 1" in said["shapes"]
        assert "and missing on rank 1" in said["missing"] and "length=0" in said["missing"]
        assert "a rank has no flat slices" in said["none on one rank"]
        assert said["by itself"] == "nothing was refused"
        assert "has ranges of 3 ranks, and its group has 2" in said["too many ranges"]
        assert "and its ranges say (" in said["other ranges"]
        assert "of a parameter of shape (4, 32), which has 128" in said["on one rank alone"]


# Without torch.distributed


VECTOR = torch.zeros(64)
STRIDED = torch.zeros(64)[::2]


@pytest.mark.parametrize(
    "slices, message",
    [
        (
            [FlatSlice(VECTOR, "w", (4, 8), 0, 32)],
            r"has 32 elements and its tensor 64; pass start=",
        ),
        (
            [FlatSlice(VECTOR, "w", (4, 8), 8, 32, start=0)],
            r"has elements \[8, 40\) of .* \(4, 8\), which has 32",
        ),
        ([FlatSlice(VECTOR, "w", (4, 8), -1, 32, start=0)], r"has elements \[-1, 31\)"),
        (
            [FlatSlice(VECTOR, "w", (4, 8), 0, 32, start=40)],
            r"lies in \[40, 72\) of its tensor, which has 64",
        ),
        (
            [
                FlatSlice(VECTOR, "w", (4, 8), 0, 32, start=0),
                FlatSlice(VECTOR, "v", (8,), 0, 8, start=31),
            ],
            r"'w' and 'v' overlap in their tensor",
        ),
        (
            [
                FlatSlice(VECTOR, "w", (4, 8), 0, 32, start=0),
                FlatSlice(VECTOR, "w", (4, 8), 0, 32, start=32),
            ],
            r"two flat slices are named 'w'",
        ),
        (
            [FlatSlice(VECTOR, "w", (4, 8), 0, 16, start=0)],
            r"'w' leave a gap: no rank holds its elements \[16, 32\)",
        ),
        ([FlatSlice(STRIDED, "w", (4, 8), 0, 32)], r"lies in a tensor of strides \(2,\)"),
        (
            [FlatSlice(VECTOR, "w", (4, 8), 0, 32, start=0, ranges=[(0, 16), (16, 16)])],
            r"'w' has ranges of 2 ranks, and its group has 1",
        ),
        (
            [FlatSlice(VECTOR, "w", (4, 8), 0, 16, start=0, ranges=[(0, 32)])],
            r"'w' has offset and length \(0, 16\), and its ranges say \(0, 32\)",
        ),
        ([], r"a rank has no flat slices: pass every parameter on every rank"),
        (
            [FlatSlice(torch.zeros(32), "w", (4, 8), 0, 32)],
            r"of flat slice 'w' is not in the optimizer",
        ),
    ],
)
def test_what_does_not_fit_is_refused(slices, message):
    opt = lowbit.AdamW([VECTOR, STRIDED])
    with pytest.raises(ValueError, match=message):
        lowbit.flat.bind(opt, slices)


def test_options_go_by_the_names_of_slices():
    vector = torch.zeros(2 * 4096, requires_grad=True)
    with pytest.warns(UserWarning, match="'b' matches the name of no parameter"):  # yet
        opt = lowbit.AdamW([("vector", vector)], full_precision=["b"])
    slices = [FlatSlice(vector, n, (64, 64), 0, 4096, start=4096 * i) for i, n in enumerate("ab")]
    lowbit.flat.bind(opt, slices)
    assert "exp_avg_dynamic8" in opt.state[vector]["a"] and "exp_avg" in opt.state[vector]["b"]


def built(*groups, of_slices=False, named=True, **settings):
    """An optimizer of 64x64 parameters in groups: names, or names with the group's settings."""
    made, slices = [], []
    for group in groups:
        names, own = group if isinstance(group, tuple) else (group, {})
        params = [(n, torch.zeros(64, 64, requires_grad=True)) for n in names]
        if of_slices:
            vector = torch.zeros(4096 * len(names), requires_grad=True)
            slices += [
                FlatSlice(vector, n, (64, 64), 0, 4096, 4096 * i) for i, n in enumerate(names)
            ]
            params = [vector]
        made.append({"params": params if of_slices or named else [p for _, p in params], **own})
    opt = lowbit.AdamW(made, **settings)
    if of_slices:
        lowbit.flat.bind(opt, slices)
    return opt


def marked(opt):
    """The state dict, with the codes of each parameter set to its position."""
    state = lowbit.flat.get_state_dict(opt)["state"]  # of one process: the optimizer's own
    for i, each in enumerate(state.values()):
        each["exp_avg_dynamic8"].fill_(100 + i)


def codes(opt):
    state = lowbit.flat.get_state_dict(opt)["state"]
    return {n: int(each["exp_avg_dynamic8"].unique()) for n, each in state.items()}


@pytest.mark.parametrize("of_slices", [False, True])
def test_state_follows_names_in_any_order(of_slices):
    opt = built("ab", of_slices=of_slices)
    marked(opt)
    saved = lowbit.flat.get_state_dict(opt, param_names=True)
    assert [group["param_names"] for group in saved["param_groups"]] == [["a", "b"]]
    other = built("ba", of_slices=of_slices)
    lowbit.flat.set_state_dict(other, saved)
    assert codes(other) == {"b": 101, "a": 100}


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.zeros(64, 64)) for _ in range(2))


@pytest.mark.parametrize("source", ["torch", "torch named", "one process", "slices"])
@pytest.mark.parametrize("target", ["slices", "named"])
def test_a_checkpoint_loads_with_and_without_param_names(source, target, tmp_path):
    """By torch.distributed.checkpoint,
    which misses a key of the template that the checkpoint has not.
    """
    if source.startswith("torch"):
        model = Two()
        opt = lowbit.AdamW(model.named_parameters() if "named" in source else model.parameters())
        saved = get_optimizer_state_dict(model, opt)
    else:
        opt = built("ab", of_slices=source == "slices")
        saved = lowbit.flat.get_state_dict(opt)
    for i, each in enumerate(saved["state"].values()):
        each["exp_avg_dynamic8"].fill_(100 + i)
    dcp.save({"optim": saved}, checkpoint_id=tmp_path)
    other = built("ab", of_slices=target == "slices")
    named = any("param_names" in group for group in saved["param_groups"])
    wanted = {} if target == "slices" or named else {"param_names": False}
    loaded = {"optim": lowbit.flat.get_state_dict(other, **wanted)}
    dcp.load(loaded, checkpoint_id=tmp_path)
    lowbit.flat.set_state_dict(other, loaded["optim"])
    assert codes(other) == {"a": 100, "b": 101}


def test_slices_saved_with_names_load_into_a_template_with_names(tmp_path):
    opt = built("ab", of_slices=True)
    marked(opt)
    saved = lowbit.flat.get_state_dict(opt, param_names=True)
    dcp.save({"optim": saved}, checkpoint_id=tmp_path)
    for other in (built("ba"), built("ba", of_slices=True)):
        loaded = {"optim": lowbit.flat.get_state_dict(other)}
        dcp.load(loaded, checkpoint_id=tmp_path)
        lowbit.flat.set_state_dict(other, loaded["optim"])
        assert codes(other) == {"b": 101, "a": 100}


def test_param_names_need_names():
    with pytest.raises(
        ValueError,
        match="param_names=True: parameter 0 of the optimizer has no name; build it from model",
    ):
        lowbit.flat.get_state_dict(built("ab", named=False), param_names=True)


FAST, SLOW = {"lr": 0.1, "weight_decay": 0.0}, {"lr": 0.01, "weight_decay": 0.5}


@pytest.mark.parametrize("of_slices", [False, True])
def test_settings_follow_names(of_slices):
    opt = built(("ab", FAST), ("cd", SLOW))
    marked(opt)
    saved = lowbit.flat.get_state_dict(opt)
    for groups in (("dc", "ba"), ("cd", "a"), ("d", "ab")):
        other = built(*groups, of_slices=of_slices)
        lowbit.flat.set_state_dict(other, saved)
        found = [(g["lr"], g["weight_decay"]) for g in other.param_groups]
        assert found == [(0.01, 0.5), (0.1, 0.0)], groups
        assert codes(other) == {n: 100 + "abcd".index(n) for names in groups for n in names}


@pytest.mark.parametrize("of_slices", [False, True])
def test_settings_of_parameters_that_had_others_are_refused(of_slices):
    saved = lowbit.flat.get_state_dict(built(("ab", FAST), ("cd", SLOW)))
    other = built("ca", "db", of_slices=of_slices)
    with pytest.raises(
        ValueError,
        match=(
            r"group 0 has parameters of 2 groups of the state dict, which differ in lr \(0.01 for "
            r"'c', 0.1 for 'a'\)"
        ),
    ):
        lowbit.flat.set_state_dict(other, saved)
    assert {g["lr"] for g in other.param_groups} == {1e-3}
    own = lowbit.flat.get_state_dict(other)["param_groups"]
    lowbit.flat.set_state_dict(other, {**saved, "param_groups": own})  # as it says
    alike = lowbit.flat.get_state_dict(built(("ab", FAST), ("cd", FAST)))
    lowbit.flat.set_state_dict(other, alike)
    assert {g["lr"] for g in other.param_groups} == {0.1}


@pytest.mark.parametrize("there", [["c", "d"], ["a", "c"]])
def test_groups_of_other_parameters_are_refused(there):
    """As of another stage of a pipeline, which torch.distributed.checkpoint may keep in the place
    of this one's; one name may be tied.
    """
    opt = built("ab")
    saved = lowbit.flat.get_state_dict(opt)
    saved["param_groups"][0]["params"] = there
    lacking = "b" if "a" in there else "a"
    with pytest.raises(
        ValueError, match=f"no group of the state dict has {lacking!r}, of group 0 here"
    ):
        lowbit.flat.set_state_dict(opt, saved)


def test_numbers_of_other_groups_are_refused():
    """As of another stage of a pipeline whose optimizer has no names either."""
    saved = lowbit.flat.get_state_dict(built("abc", named=False))
    with pytest.raises(
        ValueError,
        match=r"group 0 of the state dict has '0', '1', '2' and here '0', '1'.*have no names",
    ):
        lowbit.flat.set_state_dict(built("ab", named=False), saved)
    lowbit.flat.set_state_dict(built("abc", named=False), saved)


def test_an_optimizer_that_was_stepped_is_refused():
    vector = torch.zeros(4096, requires_grad=True)
    opt = lowbit.AdamW([vector])
    vector.grad = torch.ones_like(vector)
    opt.step()
    with pytest.raises(RuntimeError, match="1 parameters became flat shards after the optimizer"):
        lowbit.flat.bind(opt, [FlatSlice(vector, "w", (64, 64), 0, 4096)])


@pytest.mark.parametrize(
    "other",
    [
        [("a", (64, 64), 0), ("c", (64, 64), 4096)],
        [("a", (64, 64), 0), ("b", (32, 128), 4096)],
        [("b", (64, 64), 0), ("a", (64, 64), 4096)],
        [("a", (64, 64), 0)],
    ],
)
@pytest.mark.parametrize("steps", [0, 1])
def test_vectors_that_were_stepped_cannot_be_bound_to_others(other, steps):
    def slices(cut):
        return [FlatSlice(vector, name, shape, 0, 4096, start) for name, shape, start in cut]

    first = [("a", (64, 64), 0), ("b", (64, 64), 4096)]
    vector = torch.zeros(2 * 4096, requires_grad=True)
    opt = lowbit.AdamW([vector])
    lowbit.flat.bind(opt, slices(first))
    vector.grad = torch.ones_like(vector)
    for _ in range(steps):
        opt.step()
    lowbit.flat.bind(opt, slices(first))
    if steps:
        with pytest.raises(RuntimeError, match="the vector of 'a' is cut otherwise"):
            lowbit.flat.bind(opt, slices(other))
        assert opt.state[vector]["b"]["step"] == 1
    else:
        lowbit.flat.bind(opt, slices(other))
        assert opt.state[vector].keys() == {name for name, _, _ in other}
    opt.step()


def test_state_of_a_vector_under_other_names_is_refused():
    def bound(*names):
        vector = torch.zeros(64 * 64 * len(names), requires_grad=True)
        opt = lowbit.AdamW([vector])
        slices = [FlatSlice(vector, n, (64, 64), 0, 4096, 4096 * i) for i, n in enumerate(names)]
        lowbit.flat.bind(opt, slices)
        return opt

    saved = bound("a", "b").state_dict()
    bound("b", "a").load_state_dict(saved)
    with pytest.raises(
        ValueError,
        match=(
            r"the vector 0 was cut otherwise: its saved state has 'b', "
            r"and the vector here holds 'a', 'c'"
        ),
    ):
        bound("a", "c").load_state_dict(saved)


def test_binding_again_without_parts_steps_everything():
    vectors = [torch.zeros(4096, requires_grad=True) for _ in "ab"]
    opt = lowbit.AdamW([{"params": [v]} for v in vectors])
    slices = [FlatSlice(v, n, (64, 64), 0, 4096) for v, n in zip(vectors, "ab", strict=True)]
    groups = opt.param_groups
    lowbit.flat.bind(opt, slices, by_parts=True)
    for v in vectors:
        v.grad = torch.ones_like(v)
    for group in groups:
        opt.param_groups = [group]
        opt.step()
    opt.param_groups = groups
    lowbit.flat.bind(opt, slices)
    opt.step()
    assert [float(opt.state[v]["step"]) for v in vectors] == [2.0, 2.0]
    assert [*opt.kept.reducers] == [None]  # ranks agree on all vectors at once, as without parts


def test_steps_in_backward_are_refused():
    model = torch.nn.Linear(64, 64, bias=False)
    opt = lowbit.AdamW(model.named_parameters())
    lowbit.flat.bind(opt, [FlatSlice(model.weight, "weight", (64, 64), 0, 4096)])
    with pytest.raises(
        ValueError, match=r"'weight' is a vector of parameters that lowbit.flat.bind bound"
    ):
        lowbit.step_in_backward(model, opt)
