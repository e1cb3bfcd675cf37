"""State of DTensors lies where its placements say, whatever the shape and the placements,
and gives the bits of one process.
"""

import contextlib
import functools
import itertools

import pytest
import torch
from torch import nn

from tests.sharding.placed import placed_worker
from tests.sharding.placed.placed_cases import CASES, dtype_of

pytestmark = pytest.mark.product


@contextlib.contextmanager
def rank_of(rank, ranks):
    """This process as one of several ranks that never meet."""
    import torch.distributed as dist
    from torch.distributed.tensor import debug
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        # DTensor's cache keeps meshes, which compare equal to those of other ranks.
        debug._clear_sharding_prop_cache()


def built(case, shape, mesh, placements):
    """A DTensor of that shape and an optimizer of it, or why there is none."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    whole = torch.empty(shape, device="meta")
    local, _ = compute_local_shape_and_global_offset(shape, mesh, placements)
    p = nn.Parameter(
        DTensor.from_local(
            torch.zeros(local, dtype=dtype_of(case)),
            mesh,
            placements,
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
    )
    try:
        return p, CASES[case]([("w", p)], min_numel=1)
    except ValueError as error:
        return p, str(error)


def misplaced(p, opt):
    """State tensors that are not where their placements say."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    entries = {entry.key: entry for entry in opt.layouts[p].entries()}
    wrong = []
    for key, value in opt.state[p].items():
        if not isinstance(value, DTensor):
            continue
        shape, offset = compute_local_shape_and_global_offset(
            value.shape, value.device_mesh, value.placements
        )
        here = tuple(value.to_local().shape)
        said = entries[key].offset
        if here != tuple(shape) or (value.to_local().numel() and said != tuple(offset)):
            wrong.append(
                f"{key} {tuple(value.shape)}: {here} from {said}, not {shape} from {offset}"
            )
    return wrong


def check(case, shape, mesh_shape, placements):
    """The state of a parameter on every rank. Returns why it was refused, on every rank,
    or None.
    """
    from torch.distributed.device_mesh import init_device_mesh

    ranks = functools.reduce(int.__mul__, mesh_shape)
    refused = []
    for rank in range(ranks):
        with rank_of(rank, ranks):
            mesh = init_device_mesh("cpu", mesh_shape)
            p, opt = built(case, shape, mesh, placements)
            refused.append(opt if isinstance(opt, str) else None)
            if refused[-1] is None:
                assert misplaced(p, opt) == [], f"rank {rank}"
            else:
                assert "parameter 'w'" in refused[-1] or "shard" in refused[-1]
    assert len({said is None for said in refused}) == 1, f"ranks disagree: {refused}"
    return refused[0]


def test_state_lies_where_its_placements_say():
    hypothesis = pytest.importorskip("hypothesis")
    from hypothesis import strategies as st
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    lengths = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 16, 33, 47, 64, 130])
    meshes = st.sampled_from(
        [(1,), (2,), (3,), (4,), (1, 2), (2, 1), (2, 2), (1, 3), (3, 1), (1, 4), (4, 1), (2, 2, 2)]
    )
    served, refused = [], []

    @st.composite
    def placed(draw):
        shape = tuple(draw(st.lists(lengths, min_size=1, max_size=5)))
        while functools.reduce(int.__mul__, shape) > 40_000:
            shape = (
                (*shape[:-1], 1)
                if shape[-1] > 1
                else (1, *shape[1:])
                if shape[0] > 1
                else shape[1:]
            )
        mesh_shape = draw(meshes)
        dims = [d for d in (0, 0, 1, 1, 2, 3, 4) if d < len(shape)]
        kinds = st.sampled_from([*[Shard(d) for d in dims], Replicate()])
        placements = [draw(kinds) for _ in mesh_shape]
        for i, (left, right) in enumerate(itertools.pairwise(placements)):
            if left == right != Replicate() and draw(st.booleans()):  # FSDP over tensor parallelism
                placements[i] = _StridedShard(left.dim, split_factor=mesh_shape[i + 1])
        return shape, mesh_shape, placements

    @hypothesis.settings(max_examples=150)
    @hypothesis.given(st.sampled_from(sorted(CASES)), placed())
    def holds(case, at):
        why = check(case, *at)
        (served if why is None else refused).append((case, at, why))

    holds()
    assert len(served) > 80 and len(refused) > 5
    rows_only = [
        (case, at, why)
        for case, at, why in refused
        if all(getattr(p, "dim", 0) == 0 and not isinstance(p, _StridedShard) for p in at[2])
        and "scale='tensor'" not in why
        and "scale='rank1'" not in why
    ]
    assert rows_only == [], "whole rows are always served"
    print(f"{len(served)} served, {len(refused)} refused")


@pytest.mark.parametrize("shape", [(4, 47, 64), (4, 2, 64), (3, 5, 310), (2, 3, 8, 4)])
def test_columns_that_torch_would_cut_elsewhere_are_refused(shape):
    """Over two mesh dimensions; where one cuts them, state has a home: test_state_home.py."""
    from torch.distributed.tensor import Shard

    twice = (2, 2), [Shard(1), Shard(1)]
    for case in ("AdamW 8bit", "AdamW factored8", "Lion"):
        why = check(case, shape, *twice)
        assert why, f"{case} was served"
        for said in ("parameter 'w'", "dimension 1", "(2, 2)", "full_precision=['w']"):
            assert said in why
    # what has no codes follows the parameter's own dimensions
    for case in ("AdamW float32", "Adafactor"):
        assert check(case, shape, *twice) is None
    assert check("AdamW 8bit", (4, 48, 64), *twice) is None


@pytest.mark.parametrize(
    "shape, dims",
    [
        ((4, 6, 8), (2,)),
        ((4, 6, 8), (0, 2)),
        ((4, 6, 8), (2, 0)),
        ((3, 5, 7, 4), (3,)),
        ((3, 4, 5, 2), (0, 2)),
        ((5, 6, 7), (0, 1)),
        ((5, 7), (1,)),
    ],
)
def test_a_part_is_the_matrix_of_its_elements(shape, dims):
    """Whose random bits go by their index in the whole tensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    elements = torch.arange(functools.reduce(int.__mul__, shape)).reshape(shape)
    for rank in range(2 ** len(dims)):
        with rank_of(rank, 2 ** len(dims)):
            mesh = init_device_mesh("cpu", (2,) * len(dims))
            p, opt = built("AdamW full precision", shape, mesh, [Shard(dim) for dim in dims])
            part = opt.layouts[p].part
            rows, cols, global_cols, first = part.place
            mine = elements
            for dim, (begin, length) in enumerate(zip(part.offset, part.local, strict=True)):
                mine = mine.narrow(dim, begin, length)
            said = first + global_cols * torch.arange(rows)[:, None] + torch.arange(cols)
            assert torch.equal(said.reshape(-1), mine.reshape(-1))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_placement_gives_the_bits_of_one_process(pool, ranks):
    for served, wrong, refused in pool.run(ranks, placed_worker.compare):
        assert wrong == []
        assert served > 50
        matrices = {what for what in refused if "(40, 33) " in what}
        assert matrices, "a byte of (40, 33) is cut"
        assert all(what.startswith("AdamW 4bit") for what in matrices), "bytes that are cut"
        deep = set(refused) - matrices
        assert bool(deep) == (ranks == 4), "the ranks of two mesh dimensions"
        # Two mesh dimensions would have to move, or one before that of uneven rows.
        assert all(what.endswith((" [1, 2]", " [1, 0]")) for what in deep), deep
        assert not any(what.startswith(("AdamW full precision", "Adafactor (")) for what in deep), (
            deep
        )
    print(f"{ranks} ranks: {served} cases, {len(refused)} refused")


def test_quantized_state_loads_where_a_dimension_beyond_the_second_is_cut(pool):
    assert pool.run(2, placed_worker.load_quantized) == [[], []]


@pytest.mark.parametrize("ranks", [2, 4])
def test_experts_in_flat_shards_give_the_bits_of_one_process(pool, ranks):
    for wrong in pool.run(ranks, placed_worker.compare_flat):
        assert wrong == []
