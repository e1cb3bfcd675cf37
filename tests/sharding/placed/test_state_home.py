"""State that cannot lie where its parameter lies, such as that of experts cut on dimension 2: it
has the bits of one process.
"""

import functools

import pytest
import torch

from lowbit.step import buckets, home
from tests.sharding.placed import home_training_worker, home_worker
from tests.sharding.placed.test_placed_state import CASES, built, check, rank_of

pytestmark = pytest.mark.long

# Every rule and format is trained where two ranks cut experts, alone and with expert parallelism.
# Elsewhere some are.
SOME = ("AdamW", "4bit", "LAMB", "lpmm4", "Kahan, Adafactor", "Muon")
FEW = ("AdamW", "lpmm4", "Kahan, Adafactor")
TRAINED = {
    "2": [*home_worker.CASES],
    "EP x TP": [*home_worker.CASES],
    "rows 2": SOME,
    "3": SOME,
    "4": FEW,
    "TP x EP": FEW,
    "columns x TP": SOME,
    "copies x TP": FEW,
    "uneven columns": SOME,
}
# Loaded there from elsewhere.
LOADED = [
    ("single", "2", [*home_worker.CASES]),
    ("2", "single", SOME),
    ("rows 2", "2", SOME),
    ("2", "rows 2", SOME),
    ("EP x TP", "2", SOME),
    ("single", "EP x TP", [*home_worker.CASES]),
    ("3", "EP x TP", FEW),
]


def ranks_of(place):
    return max(1, functools.reduce(int.__mul__, home_worker.PLACES[place][0], 1))


def wrong_in(several):
    return {case: wrong for found in several for case, wrong in found.items() if wrong}


@pytest.fixture(scope="module")
def trained(pool):
    """Where cases were trained: what was not equal to one process, by case."""
    pool.run(1, home_worker.save_alone, pool.folder)
    return {
        place: wrong_in(pool.run(ranks_of(place), home_worker.train, place, pool.folder, cases))
        for place, cases in TRAINED.items()
    }


def test_steps_are_those_of_one_process(trained):
    assert trained == {place: {} for place in TRAINED}


@pytest.mark.parametrize("place, source, cases", LOADED, ids=[f"{s} to {p}" for p, s, _ in LOADED])
def test_a_checkpoint_loads_under_another_cut(pool, trained, place, source, cases):
    found = pool.run(ranks_of(place), home_worker.resume, place, source, pool.folder, cases)
    assert wrong_in(found) == {}


def test_a_difference_is_seen(pool, trained):
    assert all(pool.run(2, home_worker.nothing_loaded, pool.folder))


@pytest.mark.parametrize("place", ["2", "EP x TP"])
def test_what_surrounds_a_step_has_the_same_bits(pool, place):
    assert pool.run(ranks_of(place), home_training_worker.around, place) == [[]] * ranks_of(place)


def test_float32_views(pool):
    assert pool.run(2, home_training_worker.float32_views) == [[], []]


def test_functions_of_fsdp1(pool):
    assert pool.run(4, home_training_worker.across_functions) == [[]] * 4


def test_fully_shard_over_tensor_parallel_experts(pool):
    assert pool.run(4, home_training_worker.fully_sharded) == [[]] * 4


def test_an_exchange_each_way_however_many_parameters(pool):
    """Six bytes for each element that changes ranks: weight and gradient there, weight back."""
    for count in (1, 5):
        here = 4 * 24 * 32 // 2  # of a parameter on a rank, half of which stays
        assert (
            pool.run(2, home_training_worker.exchanged, count)
            == [(2, 6 * count * here // 2, 1)] * 2
        )


# Where homes are


def home_of(case, shape, mesh_shape, placements, rank=0):
    """The placements of state, or why there is none."""
    from torch.distributed.device_mesh import init_device_mesh

    ranks = functools.reduce(int.__mul__, mesh_shape)
    with rank_of(rank, ranks):
        p, opt = built(case, shape, init_device_mesh("cpu", mesh_shape), placements)
        if isinstance(opt, str):
            return opt
        home = opt.layouts[p].home
        return list(home.placed.placements) if home else None


def test_dimension_0_is_cut_where_it_has_an_index_for_each_rank():
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    strided = _StridedShard(0, split_factor=2)
    for shape, mesh, placements, want in (
        ((4, 24, 32), (4,), [Shard(2)], [Shard(0)]),
        ((5, 24, 33), (2,), [Shard(2)], [Shard(0)]),
        ((3, 24, 32), (4,), [Shard(2)], [Shard(1)]),  # too few of dimension 0
        ((3, 22, 32), (4,), [Shard(2)], [Shard(0)]),  # but dimension 1 cannot be cut evenly
        ((4, 24, 32), (2, 2), [Shard(0), Shard(2)], [Shard(0), Shard(0)]),
        ((2, 24, 32), (2, 2), [Shard(0), Shard(2)], [Shard(0), Shard(1)]),
        ((4, 24, 32), (2, 2), [Shard(1), Shard(2)], [Shard(1), Shard(0)]),
        ((4, 24, 32), (2, 2), [Replicate(), Shard(2)], [Replicate(), Shard(0)]),
        ((4, 24, 32), (2, 2), [Shard(2), Shard(0)], [strided, Shard(0)]),
        ((8, 24, 32), (2, 2, 2), [strided, Shard(0), Shard(2)], [strided, Shard(0), Shard(0)]),
        ((4, 6, 8, 10), (2,), [Shard(3)], [Shard(0)]),
        ((4, 47, 64), (2,), [Shard(1)], [Shard(0)]),  # codes would be cut elsewhere
    ):
        assert home_of("AdamW 8bit", shape, mesh, placements) == want, (shape, placements)
        assert check("AdamW 8bit", shape, mesh, placements) is None  # on every rank
    assert home_of("AdamW 8bit", (4, 24, 32), (2,), [Shard(1)]) is None
    assert home_of("AdamW lpmm4", (4, 24, 32), (2,), [Shard(1)]) == [Shard(0)]  # rank-1 scales
    assert home_of("AdamW lpmm4", (1, 24, 32), (2,), [Shard(2)]) == [Shard(0)]
    for case in ("AdamW full precision", "Adafactor momentum"):
        found = home_of(case, (4, 24, 32), (2,), [Shard(2)])
        assert found == (None if "full" in case else [Shard(0)])


def test_every_rule_and_format_has_a_home():
    from torch.distributed.tensor import Shard

    assert len(CASES) > 300
    for case in CASES:
        for mesh, placements in (((2,), [Shard(2)]), ((2, 2), [Shard(0), Shard(2)])):
            assert check(case, (8, 24, 32), mesh, placements) is None, case


def test_what_has_no_home_is_refused():
    from torch.distributed.tensor import Shard

    why = check("AdamW 8bit", (4, 6, 8, 10), (2, 2), [Shard(2), Shard(3)])
    assert "parameter 'w' of shape (4, 6, 8, 10) is sharded on dimensions [2, 3]" in why
    assert "one mesh dimension" in why and "shard it on dimensions 0 and 1" in why
    why = check("AdamW lpmm4", (4, 24, 32), (2, 2), [Shard(1), Shard(2)])
    assert why.startswith("parameter 'w' of shape (4, 24, 32) is sharded on dimensions [1, 2]")
    assert "Nor can its state lie by (Shard(dim=1), Shard(dim=0)): " in why and "rank1" in why
    why = check("AdamW 8bit", (5, 23, 33), (2, 2), [Shard(2), Shard(0)])
    assert "order" in why
    why = check("Muon", (4, 24, 32), (2, 2), [Shard(1), Shard(2)])
    assert "Muon takes dimension 2 alone or with dimension 0" in why


def test_buckets_hold_what_the_rank_with_most_of_a_parameter_gets(monkeypatch):
    """Of one expert over four ranks one has everything at home: five such weights are not four at a
    time there.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    for shape, largest in (
        ((1, 23, 64), 23 * 64),
        ((4, 23, 64), 23 * 64),
        ((6, 23, 64), 2 * 23 * 64),
        ((3, 24, 64), 3 * 24 * 64 // 4),
    ):
        with rank_of(3, 4):
            p, opt = built("AdamW 8bit", shape, init_device_mesh("cpu", (4,)), [Shard(2)])
            assert opt.layouts[p].home
            one = home.Visitor(0, p, opt.layouts[p], opt.state[p])
            monkeypatch.setattr(buckets, "BUCKET_NUMEL", 2 * largest)
            assert [len(bucket) for bucket in home._buckets([one] * 5)] == [2, 2, 1], shape


def test_averages_and_sums_of_gradients_stay_where_weights_are():
    """Where both dimensions 1 and 2 are cut, state has a home,
    and they are refused when they are built.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    import lowbit

    with rank_of(0, 4):
        p, opt = built(
            "AdamW 8bit", (4, 24, 32), init_device_mesh("cpu", (2, 2)), [Shard(1), Shard(2)]
        )
        assert opt.layouts[p].home
        model = torch.nn.Module()
        model.w = p
        for make in (lowbit.accumulate, lowbit.EMA):
            with pytest.raises(ValueError, match=r"sharded on dimensions \[1, 2\]"):
                make(model)
