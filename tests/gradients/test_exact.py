"""Exact means of gradients: one digest of weights and state on any number of ranks,
under any wrapper, in any order.
"""

import math
from fractions import Fraction

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, settings
from torch import nn

import lowbit
from lowbit import ops
from tests.gradients import exact_worker

pytestmark = pytest.mark.long

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def width_of(terms: int) -> int:
    """W of csrc/core/mean_bins.h."""
    return 30 - terms.bit_length()


def bits_of(t: torch.Tensor) -> list[int]:
    return t.view(torch.int32 if t.dtype == torch.float32 else torch.int16).tolist()


@st.composite
def split_sums(draw):
    """Addends of one element; and how they are split over ranks and micro-batches."""
    exponents = draw(st.sampled_from([(-149, 127), (-20, 4), (-149, -120), (100, 127)]))
    numbers = st.builds(
        lambda m, e: float(torch.tensor(math.ldexp(m, e), dtype=torch.float32)),
        st.floats(-1, 1, allow_nan=False),
        st.integers(*exponents),
    )
    x = draw(st.lists(st.one_of(numbers, FLOATS), min_size=1, max_size=40))
    order = draw(st.permutations(range(len(x))))
    cuts = sorted(draw(st.lists(st.integers(0, len(x)), max_size=6)))
    return x, order, cuts, draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))


@settings(max_examples=300)
@given(split_sums())
def test_means_do_not_depend_on_splits(case):
    x, order, cuts, dtype = case
    addends = torch.tensor(x)
    if dtype != torch.float32:
        addends = addends.to(torch.bfloat16)
        assume(bool(addends.isfinite().all()))  # the largest float32 numbers round to infinity
    terms = len(x)
    whole = torch.empty(1, dtype=dtype)
    ops.mean_of([], [addends.view(-1, 1)], [whole], terms, terms)
    ranks = []
    shuffled = addends[list(order)]
    for begin, end in zip([0, *cuts], [*cuts, len(x)], strict=True):
        words = torch.zeros(1, dtype=torch.int64)
        for one in shuffled[begin:end]:
            ops.mean_add([words], [one.view(1, 1)], terms)
        ranks.append(words)
    joined = torch.empty(1, dtype=dtype)
    ops.mean_of([], [torch.stack(ranks)], [joined], terms, terms)
    assert bits_of(whole) == bits_of(joined)
    exact = sum(map(Fraction, addends.double().tolist()), Fraction(0)) / terms
    most = max(abs(Fraction(v)) for v in addends.double().tolist())
    bound = most / 2 ** width_of(terms)
    found = whole.double().item()
    if math.isinf(found):
        assert abs(exact) + bound >= Fraction(torch.finfo(dtype).max)
        return
    nexts = [torch.nextafter(whole.float(), torch.tensor([s * math.inf])) for s in (-1, 1)]
    step = Fraction(torch.finfo(dtype).eps) * max(abs(exact), Fraction(torch.finfo(dtype).tiny))
    assert abs(Fraction(found) - exact) <= step / 2 + bound * (1 + step), nexts


def test_planted_mistakes_are_seen():
    """A lost low word, another unit on one rank, and torch's order of rounded additions."""
    generator = torch.Generator().manual_seed(3)
    addends = torch.randn(12, 4096, generator=generator) * torch.logspace(-3, 0, 12)[:, None]
    want = torch.empty(4096)
    ops.mean_of([], [addends], [want], 12, 12)

    def joined(terms_of_second_rank: int = 12, mask: int = -1) -> torch.Tensor:
        ranks = []
        for rows, terms in ((addends[:5], 12), (addends[5:], terms_of_second_rank)):
            words = torch.zeros(4096, dtype=torch.int64)
            ops.mean_add([words], [rows], terms)
            ranks.append(words & mask)
        made = torch.empty(4096)
        ops.mean_of([], [torch.stack(ranks)], [made], 12, 12)
        return made

    def differ(made: torch.Tensor) -> int:
        return int((made != want).sum())

    assert differ(joined()) == 0
    assert differ(joined(mask=~((1 << 30) - 1))) > 4000
    assert differ(joined(terms_of_second_rank=40)) > 4000
    ranks = (addends[:5].sum(0) + addends[5:].sum(0)) / 12
    assert 400 < differ(ranks) < 4000


@pytest.mark.parametrize("isa", ops.catalog()["isas"])
def test_instruction_sets_have_the_same_words(isa, isa_restored):
    """Every pattern of bfloat16, in vectors and alone."""
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    rows = torch.stack([patterns, patterns.roll(12345), patterns.roll(-777)])
    ops.set_isa("baseline")
    want = torch.zeros(65536, dtype=torch.int64)
    for i in range(0, 65536, 8191):
        part = want[i : i + 8191]
        ops.mean_add([part], [rows[:, i : i + 8191]], 3)
    ops.set_isa(isa)
    words = torch.zeros(65536, dtype=torch.int64)
    ops.mean_add([words], [rows], 3)
    assert torch.equal(words, want)
    for dtype in (torch.float32, torch.bfloat16):
        mean = torch.empty(65536, dtype=dtype)
        ops.mean_of([words], [], [mean], 3, 3)
        close = (rows.double().sum(0) / 3).to(dtype)
        finite = close.isfinite() & mean.isfinite()
        assert torch.allclose(
            mean[finite], close[finite], rtol=2e-2 if dtype == torch.bfloat16 else 1e-6
        )


def test_words_of_the_wrong_kind_are_refused():
    words, rows = torch.zeros(4, dtype=torch.int64), torch.zeros(2, 4)
    for wrong, text in [
        (lambda: ops.mean_add([words.int()], [rows], 2), "int64"),
        (lambda: ops.mean_add([words], [rows.double()], 2), "float32, bfloat16 or float16"),
        (lambda: ops.mean_add([words], [rows[:, :3]], 2), r"\[rows, 4\]"),
        (lambda: ops.mean_add([words], [torch.zeros(4, 2).t()], 2), "contiguous"),
        (lambda: ops.mean_add([words], [rows], 4096), "1 to 4095"),
        (lambda: ops.mean_of([words], [rows], [torch.zeros(4)], 2, 0), "divisor"),
        (lambda: ops.mean_of([words], [rows], [torch.zeros(3)], 2, 1), "words 0|rows"),
    ]:
        with pytest.raises(RuntimeError, match=text):
            wrong()


@pytest.fixture(scope="module")
def alone(pool):
    """What one process has: by the arguments of `train`."""
    made = {}

    def of(*arguments):
        if arguments not in made:
            made[arguments] = pool.run(1, exact_worker.train, *arguments)[0]
        return made[arguments]

    return of


@pytest.mark.parametrize(
    ("wrapper", "ranks"),
    [
        ("DDP", 1),
        ("DDP", 2),
        ("DDP", 3),
        ("FSDP1", 2),
        ("FSDP1 flat", 3),
        ("FSDP1 no shard", 2),
        ("FSDP1", 1),
        ("FSDP2", 1),
        ("FSDP2", 2),
        ("FSDP2", 3),
        ("FSDP2", 5),
        ("FSDP2 offload", 2),
        ("HSDP", 4),
        ("group", 2),
        ("group", 5),
    ],
)
def test_one_training_under_every_wrapper(pool, alone, wrapper, ranks):
    want, losses = alone("none")
    for found, their_losses in pool.run(ranks, exact_worker.train, wrapper):
        assert found == want
        assert their_losses == losses


@pytest.mark.parametrize(("wrapper", "ranks"), [("FSDP1", 2), ("FSDP2", 2), ("HSDP", 4)])
def test_mixed_precision(pool, alone, wrapper, ranks):
    """float32 parameters, and addends in bfloat16: the mean is float32."""
    want = alone("none, mixed", "AdamW", 3, torch.float32)
    arguments = (wrapper + ", mixed", "AdamW", 3, torch.float32)
    assert all(found == want for found in pool.run(ranks, exact_worker.train, *arguments))


def test_order_and_parameters_that_some_micro_batches_leave_out(pool, alone):
    want = alone("none, unused")
    assert want != alone("none")
    for ranks in (1, 2, 3):
        found = pool.run(ranks, exact_worker.train, "DDP unused")
        assert all(one == want for one in found)
    found = pool.run(2, exact_worker.train, "DDP unused", "AdamW", 3, torch.bfloat16, "reversed")
    assert all(one == want for one in found)


@pytest.mark.parametrize(("wrapper", "ranks"), [("DDP, scaled", 2), ("FSDP2, scaled", 3)])
def test_gradient_scalers(pool, alone, wrapper, ranks):
    want, losses = alone("none, scaled")
    assert losses[0] == alone("none")[1][0]
    found = pool.run(ranks, exact_worker.train, wrapper)
    assert all(one == (want, losses) for one in found)


def test_replicas_of_a_bare_model_of_which_some_reach_more(pool, alone):
    want = alone("none, unused")
    assert all(one == want for one in pool.run(3, exact_worker.train, "group, unused"))


@pytest.mark.parametrize("wrapper", ["FSDP2", "FSDP1", "DDP", "group", "FSDP2 offload"])
def test_nodes_that_add_up_first(pool, alone, wrapper):
    """Two nodes of two ranks, by way of words; one node exchanges at once."""
    arguments = (wrapper, "AdamW", 3, torch.bfloat16, "dealt", False)
    for ranks_per_node in (2, 4):
        found = pool.run(4, exact_worker.train, *arguments, ranks_per_node)
        assert all(one == alone("none") for one in found)


def test_bytes_between_nodes(pool):
    """Words of 8 bytes for the half of a unit that a rank adds up for the other node."""
    for found in pool.run(4, exact_worker.counted, "FSDP2", 2):
        n = found["parameters"][""]
        sent = found["more"]
        assert sent["exchanges"] == 2 * 3  # of each unit: inside the node, and between
        assert (2 + 8 / 2) * n <= sent["exchange"] < (2 + 8 / 2) * n * 1.1


def test_nodes_of_different_sizes_are_refused(pool):
    for text in pool.run(3, exact_worker.uneven_nodes):
        assert "ranks [0, 1, 2] are not the same number on each node" in text


def test_a_group_belongs_to_a_bare_model(pool):
    for text in pool.run(2, exact_worker.grouped, "DDP"):
        assert "group= is for a model without a wrapper" in text


def test_steps_in_backward(pool):
    arguments = ("AdamW", 3, torch.bfloat16, "dealt", True)
    [want] = pool.run(1, exact_worker.train, "none", *arguments)
    assert all(one == want for one in pool.run(3, exact_worker.train, "FSDP2", *arguments))


def test_torchs_own_reduction_depends_on_the_ranks(pool):
    """Without this, the tests above would show nothing."""
    digests = [str(pool.run(n, exact_worker.torch_train, "FSDP2")[0]) for n in (1, 2, 3, 4)]
    assert len(set(digests)) == 4


def test_bytes_and_collectives(pool):
    """bfloat16 addends: 2 bytes a parameter in one exchange of each unit; DDP gathers at last;
    no words travel.
    """
    for wrapper, units in [("FSDP2", 3), ("FSDP1", 2)]:
        for found in pool.run(2, exact_worker.counted, wrapper):
            n = found["parameters"][""]
            for turn in ("first", "more", "last"):
                assert found[turn].keys() == {"exchange", "exchanges"}
                assert found[turn]["exchanges"] == units
                assert 2 * n <= found[turn]["exchange"] < 2 * n * 1.05
    for found in pool.run(2, exact_worker.counted, "DDP"):
        n = found["parameters"][""]
        assert 2 * n <= found["more"]["exchange"] < 2 * n * 1.01
        assert "gather" not in found["more"]
        assert n <= found["last"]["gather"] < n * 1.01  # half of it, in 2 bytes
        assert found["last"]["gathers"] == found["last"]["exchanges"]


def test_without_ranks():
    """The mean of bfloat16 gradients, rounded once, where torch's sum rounds twelve times."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False).bfloat16()
    x = torch.randn(12, 8, 64).bfloat16()
    grads = []
    for one in x:
        model(one).float().square().mean().backward()
        grads.append(model.weight.grad.double())
        model.weight.grad = None
    want = torch.stack(grads).sum(0) / 12
    accumulator = lowbit.accumulate(model, rounding="exact", average=12)
    for one in x:
        with accumulator.micro():
            model(one).float().square().mean().backward()
    assert torch.equal(model.weight.grad, want.to(torch.bfloat16))
    accumulator.remove()
    model.weight.grad = None
    accumulator = lowbit.accumulate(model, "float32", rounding="exact", average=12)
    for one in x:
        with accumulator.micro():
            model(one).float().square().mean().backward()
    assert torch.equal(model.weight.grad, want.float())


def test_mistakes_are_refused():
    model = nn.Linear(4, 4)
    accumulator = lowbit.accumulate(model, rounding="exact", average=2)
    assert accumulator.indices() == [0, 1]
    with pytest.raises(ValueError, match="0 to 1"), accumulator.micro(index=2):
        pass
    with accumulator.micro(index=0):
        model(torch.ones(4)).sum().backward()
        with pytest.raises(RuntimeError, match="do not nest"), accumulator.micro(index=1):
            pass
    with pytest.raises(ValueError, match="already"), accumulator.micro(index=0):
        pass
    with pytest.raises(RuntimeError, match=r"inside `with accumulator.micro\(index"):
        accumulator.log(torch.ones(()))
    accumulator.reset()
    with pytest.raises(RuntimeError, match=r"ran outside `with accumulator.micro"):
        model(torch.ones(4)).sum().backward()
    model.zero_grad()
    with pytest.raises(ZeroDivisionError), accumulator.micro(index=1):
        model(torch.ones(4)).sum().backward()
        1 / 0  # noqa: B018
    for index in (1, 0):  # both can run again
        with accumulator.micro(index=index):
            model(torch.ones(4)).sum().backward()
    assert torch.equal(model.weight.grad, torch.ones(4, 4))
    with pytest.raises(RuntimeError, match="from before the step"), accumulator.micro(index=0):
        pass
    with pytest.raises(ValueError, match="accumulator already"):
        lowbit.accumulate(model, rounding="exact", average=2)
    accumulator.remove()
    accumulator = lowbit.accumulate(model, rounding="exact", average=1)
    model.zero_grad()
    with accumulator.micro(last=False):
        model(torch.ones(4)).sum().backward()
    with pytest.raises(ValueError, match="2 addends, and average=1"), accumulator.micro(last=True):
        pass
    accumulator.remove()
    for wrong, text in [
        ({"average": 4096}, "4,095"),
        ({"average": 0}, "number of"),
        ({"hooks": False}, "hooks"),
    ]:
        with pytest.raises(ValueError, match=text):
            lowbit.accumulate(model, rounding="exact", **wrong)
    assert not model.weight._post_accumulate_grad_hooks


def test_a_pipelines_schedule_has_several_passes():
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False).bfloat16()
    x = torch.randn(4, 8, 64).bfloat16()
    accumulator = lowbit.accumulate(model, rounding="exact", average=4)
    for one in x:
        with accumulator.micro():
            model(one).float().square().mean().backward()
    want, model.weight.grad = model.weight.grad, None
    with accumulator.micro(last=False, passes=3):
        for one in x[:3]:
            model(one).float().square().mean().backward()
    with accumulator.micro(last=True, passes=1):
        model(x[3]).float().square().mean().backward()
    assert torch.equal(model.weight.grad, want)
    model.weight.grad = None
    with accumulator.micro(last=True, passes=4):
        for one in x:
            model(one).float().square().mean().backward()
    assert torch.equal(model.weight.grad, want)
    model.weight.grad = None
    with (
        pytest.raises(RuntimeError, match=r"'weight' got 2 gradients in one micro-batch"),
        accumulator.micro(last=True),
    ):
        for one in x:
            model(one).float().square().mean().backward()


def test_pipeline_stages_with_replicas(pool):
    [want] = pool.run(1, exact_worker.whole)
    for stage, found in pool.run(4, exact_worker.staged):
        assert found == want[stage]


def test_two_ranks_with_the_same_micro_batch_are_seen(pool):
    for text in pool.run(2, exact_worker.twice):
        assert "micro-batches of a step, 0 ran on several ranks" in text


def test_infinities_reach_the_step():
    model = nn.Linear(2, 2, bias=False)
    accumulator = lowbit.accumulate(model, rounding="exact", average=2)
    for x in ([math.inf, 1.0], [-math.inf, 2.0]):
        with accumulator.micro():
            model(torch.tensor(x)).sum().backward()
    assert model.weight.grad[:, 0].isnan().all()
    assert torch.equal(model.weight.grad[:, 1], torch.full((2,), 1.5))


def test_nothing_is_lost_in_silence(pool):
    first, second = pool.run(2, exact_worker.mishaps)
    assert first == second
    for name, text in {
        "DDP no_sync": "without a reduction",
        "FSDP1 no_sync": "without a reduction",
        "FSDP2 no sync": "set_requires_gradient_sync",
        "frozen since": "replaced, frozen or unfrozen",
        "unfrozen": "'frozen' was frozen when lowbit.accumulate was called",
        "partly": "does not reduce 9 of the trained parameters, such as 'tiny'",
        "DDP twice": "got 2 gradients in one micro-batch",
        "FSDP1 twice": "got 2 gradients in one micro-batch",
        "removed": "restored",
        "removed, together": "restored",
        "FSDP1 modules": "16 entries",
    }.items():
        assert text in first[name], f"{name}: {first[name]}"
    losses = {float(first[f"{wrapper} one micro-batch"]) for wrapper in ("DDP", "FSDP1", "FSDP2")}
    assert len(losses) == 1
    assert math.isfinite(losses.pop())


def test_a_loss_after_an_idle_round_and_an_infinite_one():
    model = nn.Linear(4, 4)
    accumulator = lowbit.accumulate(model, rounding="exact", average=2)
    for index in (1, 0):
        with accumulator.micro(index=index):
            loss = model(torch.ones(4)).sum()
            loss.backward()
            accumulator.log(loss * (math.inf if index else -math.inf) * loss.detach().sign())
    assert math.isnan(accumulator.loss())
    model.zero_grad()
    with accumulator.micro(index=0):
        model(torch.ones(4)).sum().backward()
    with pytest.raises(ValueError, match="an index, or none of them"), accumulator.micro():
        pass


@pytest.fixture
def meta_by_default():
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def test_losses_are_read_under_another_default_device(meta_by_default):
    model = nn.Linear(4, 2, device="cpu")
    accumulator = lowbit.accumulate(model, rounding="exact", average=2)
    for index in accumulator.indices():
        with accumulator.micro(index=index):
            loss = model(torch.full((1, 4), index + 1.0, device="cpu")).square().mean()
            loss.backward()
            accumulator.log(loss)
    assert accumulator.loss() > 0.0


def test_a_model_that_writes_in_place_is_compared():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    assert lowbit.check_reproducible(model, lambda: model(torch.ones(2, 4)).sum())
