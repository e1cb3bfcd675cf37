"""lowbit.flat.bind: slices of parameters in any vectors, cut in any way: the bits of one process, or a refusal."""

import pytest
import torch
from flat_slices_worker import MAKE

import lowbit
from lowbit.flat import FlatSlice


@pytest.mark.parametrize("name", MAKE)
def test_the_bits_of_one_process(pool, name):
    """Weights and state, however vectors are cut, on 1, 2 and 3 ranks; loaded from any other cut and number of ranks."""
    for ranks in (3, 2, 1):
        assert pool.run(ranks, "flat_slices_worker", "same_bits", name, pool.folder) == [[]] * ranks
    for ranks in (2, 1):
        assert pool.run(ranks, "flat_slices_worker", "from_others", name, pool.folder) == [[]] * ranks  # fmt: skip


@pytest.mark.parametrize("how", ["groups", "tensors"])
def test_steps_by_parts(pool, how):
    assert pool.run(2, "flat_slices_worker", "by_parts", how) == [[]] * 2


def test_the_float32_view(pool):
    assert pool.run(2, "flat_slices_worker", "float32_view") == [[]] * 2


def test_clipping_takes_the_norm_of_all_ranks(pool):
    for found, want in pool.run(2, "flat_slices_worker", "clipped"):
        assert found == want


def test_what_does_not_fit_together_is_refused_on_every_rank(pool):
    for said in pool.run(2, "flat_slices_worker", "refusals"):
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
        ([FlatSlice(VECTOR, "w", (4, 8), 0, 32)], r"has 32 elements and its tensor 64; pass start="),
        ([FlatSlice(VECTOR, "w", (4, 8), 8, 32, start=0)], r"has elements \[8, 40\) of .* \(4, 8\), which has 32"),
        ([FlatSlice(VECTOR, "w", (4, 8), -1, 32, start=0)], r"has elements \[-1, 31\)"),
        ([FlatSlice(VECTOR, "w", (4, 8), 0, 32, start=40)], r"lies in \[40, 72\) of its tensor, which has 64"),
        ([FlatSlice(VECTOR, "w", (4, 8), 0, 32, start=0), FlatSlice(VECTOR, "v", (8,), 0, 8, start=31)], r"'w' and 'v' overlap in their tensor"),
        ([FlatSlice(VECTOR, "w", (4, 8), 0, 32, start=0), FlatSlice(VECTOR, "w", (4, 8), 0, 32, start=32)], r"two flat slices are named 'w'"),
        ([FlatSlice(VECTOR, "w", (4, 8), 0, 16, start=0)], r"'w' leave a gap: no rank holds its elements \[16, 32\)"),
        ([FlatSlice(STRIDED, "w", (4, 8), 0, 32)], r"lies in a tensor of strides \(2,\)"),
        ([FlatSlice(VECTOR, "w", (4, 8), 0, 32, start=0, ranges=[(0, 16), (16, 16)])], r"'w' has ranges of 2 ranks, and its group has 1"),
        ([FlatSlice(VECTOR, "w", (4, 8), 0, 16, start=0, ranges=[(0, 32)])], r"'w' has offset and length \(0, 16\), and its ranges say \(0, 32\)"),
        ([], r"a rank has no flat slices: pass every parameter on every rank"),
        ([FlatSlice(torch.zeros(32), "w", (4, 8), 0, 32)], r"of flat slice 'w' is none of the optimizer's"),
    ],
)  # fmt: skip
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


@pytest.mark.parametrize("of_slices", [False, True])
def test_state_follows_names_in_any_order(of_slices):
    """Slices have them in a checkpoint though their vector has none."""

    def built(*names):
        params = {name: torch.zeros(64, 64, requires_grad=True) for name in names}
        if not of_slices:
            return lowbit.AdamW(list(params.items()))
        vector = torch.zeros(4096 * len(names), requires_grad=True)
        opt = lowbit.AdamW([vector])
        slices = [FlatSlice(vector, n, (64, 64), 0, 4096, 4096 * i) for i, n in enumerate(names)]
        lowbit.flat.bind(opt, slices)
        return opt

    opt = built("a", "b")
    for state, code in zip(lowbit.flat.get_state_dict(opt)["state"].values(), (100, 200), strict=True):  # fmt: skip
        state["exp_avg_dynamic8"].fill_(code)  # of one process: the optimizer's own
    saved = lowbit.flat.get_state_dict(opt)
    assert [group["param_names"] for group in saved["param_groups"]] == [["a", "b"]]
    other = built("b", "a")
    lowbit.flat.set_state_dict(other, saved)
    state = lowbit.flat.get_state_dict(other)["state"]
    for name, code in (("a", 100), ("b", 200)):
        assert (state[name]["exp_avg_dynamic8"] == code).all(), name


def test_groups_of_other_parameters_are_refused():
    """As of another stage of a pipeline, which torch.distributed.checkpoint may keep in the place of this one's."""
    opt = lowbit.AdamW([("a", torch.zeros(64, 64, requires_grad=True))])
    saved = lowbit.flat.get_state_dict(opt)
    saved["param_groups"][0]["params"] = ["c", "d"]
    with pytest.raises(ValueError, match="group 0 of the state dict has the settings of 'c' and others, and here it has 'a'"):  # fmt: skip
        lowbit.flat.set_state_dict(opt, saved)


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
    with pytest.raises(ValueError, match=r"the vector 0 was cut otherwise: its saved state has 'b', and the vector here holds 'a', 'c'"):  # fmt: skip
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
    assert [*opt._flat_reducers] == [None]  # ranks agree on all vectors at once, as without parts


def test_steps_in_backward_are_refused():
    model = torch.nn.Linear(64, 64, bias=False)
    opt = lowbit.AdamW(model.named_parameters())
    lowbit.flat.bind(opt, [FlatSlice(model.weight, "weight", (64, 64), 0, 4096)])
    with pytest.raises(
        ValueError, match=r"'weight' is a vector of parameters that lowbit.flat.bind bound"
    ):
        lowbit.step_in_backward(model, opt)
