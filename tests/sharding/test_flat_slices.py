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
        assert "of a parameter of shape (4, 32), which has 128" in said["on one rank alone"]


# Without torch.distributed


VECTOR = torch.zeros(64)


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
        ([FlatSlice(torch.zeros(32), "w", (4, 8), 0, 32)], r"of flat slice 'w' is none of the optimizer's"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(slices, message):
    opt = lowbit.AdamW([VECTOR])
    with pytest.raises(ValueError, match=message):
        lowbit.flat.bind(opt, slices)


def test_options_go_by_the_names_of_slices():
    vector = torch.zeros(2 * 4096, requires_grad=True)
    with pytest.warns(UserWarning, match="'b' matches the name of no parameter"):  # yet
        opt = lowbit.AdamW([("vector", vector)], full_precision=["b"])
    slices = [FlatSlice(vector, n, (64, 64), 0, 4096, start=4096 * i) for i, n in enumerate("ab")]
    lowbit.flat.bind(opt, slices)
    assert "exp_avg_dynamic8" in opt.state[vector]["a"] and "exp_avg" in opt.state[vector]["b"]


def test_an_optimizer_that_was_stepped_is_refused():
    vector = torch.zeros(4096, requires_grad=True)
    opt = lowbit.AdamW([vector])
    vector.grad = torch.ones_like(vector)
    opt.step()
    with pytest.raises(RuntimeError, match="1 parameters became flat shards after the optimizer"):
        lowbit.flat.bind(opt, [FlatSlice(vector, "w", (64, 64), 0, 4096)])


def test_steps_in_backward_are_refused():
    model = torch.nn.Linear(64, 64, bias=False)
    opt = lowbit.AdamW(model.named_parameters())
    lowbit.flat.bind(opt, [FlatSlice(model.weight, "weight", (64, 64), 0, 4096)])
    with pytest.raises(
        ValueError, match=r"'weight' is a vector of parameters that lowbit.flat.bind bound"
    ):
        lowbit.step_in_backward(model, opt)
