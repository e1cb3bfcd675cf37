"""Plans on their way between ranks: the items that come out are those that went in."""

import dataclasses
import pickle

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    ReadItem,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from lowbit.checkpoint.storage import packed_plans
from lowbit.checkpoint.storage.packed_plans import Items, numbered, packed, results, returned, sent
from lowbit.checkpoint.storage.written import Written


def size(*n):
    return torch.Size(n)


def writes():
    chunk = ChunkStorageMetadata(size(2, 0), size(2, 3))
    odd = TensorProperties(
        torch.bfloat16, requires_grad=True, memory_format=torch.preserve_format, pin_memory=True
    )
    if hasattr(odd, "strides"):  # torch 2.15
        odd.strides = (7, 1)
    return [
        WriteItem(
            MetadataIndex("a", size(2, 0)),
            WriteItemType.SHARD,
            None,
            TensorWriteData(chunk, TensorProperties(torch.uint8), size(4, 3)),
        ),
        WriteItem(
            MetadataIndex("b", size(), 1),
            WriteItemType.TENSOR,
            None,
            TensorWriteData(ChunkStorageMetadata(size(), size()), odd, size()),
        ),
        WriteItem(MetadataIndex("a.b"), WriteItemType.BYTE_IO),
    ]


def reads():
    return [
        ReadItem(
            LoadItemType.TENSOR,
            MetadataIndex("a", size(1), 0),
            size(0),
            MetadataIndex("a", size(4), 3),
            size(2),
            size(5),
        ),
        ReadItem(
            LoadItemType.BYTE_IO, MetadataIndex("b"), size(0), MetadataIndex("b"), size(0), size(0)
        ),
    ]


def exactly(a, b):
    """Also what `==` leaves out: kinds of numbers' holders, and the hints of indices."""
    return repr(a) == repr(b) and a == b


@pytest.mark.parametrize("make", [writes, reads])
def test_items_come_as_they_were(make):
    items = make()
    on_the_way = packed(items)
    assert isinstance(on_the_way, Items) and on_the_way == items
    came = pickle.loads(pickle.dumps(on_the_way))
    assert exactly(list(came), items)
    assert all(type(a.index if make is writes else a.storage_index) is MetadataIndex for a in came)


@dataclasses.dataclass(frozen=True)
class Mine(ReadItem):
    more: int = 0


def test_items_of_other_classes_are_left_as_they_are():
    own = Mine(
        **{f.name: getattr(reads()[0], f.name) for f in dataclasses.fields(ReadItem)}, more=7
    )
    for items in ([own], [*reads(), own], [*reads(), *writes()], [], ["x"]):
        assert packed(items) is items and sent(items, 0) is items and returned(items, 0) is items


def across(items, rank=1, change=lambda items: items, to=1):
    """From a rank to the coordinator and back, as bytes of pickles.
    Another process has no list of that name.
    """
    mine = sent(items, rank)
    there = pickle.dumps(mine)
    key, mine.key = mine.key, "of another process"
    from lowbit.checkpoint.storage import packed_plans

    kept = packed_plans._SENT.pop(key)
    came = pickle.loads(there)
    assert came is not mine and exactly(list(came), list(items))
    back = pickle.dumps(returned(change(came), to))
    packed_plans._SENT[key] = kept
    return mine, pickle.loads(back), back


def test_a_plan_that_comes_back_as_it_went_travels_once():
    mine, back, sent_back = across(reads())
    assert back is mine and len(sent_back) < 200


def changed(items):
    items[0] = dataclasses.replace(items[0], lengths=size(4))
    return items


@pytest.mark.parametrize(
    "change", [changed, lambda items: items[:1], lambda items: items.append(items[0]) or items]
)
def test_a_plan_that_the_coordinator_changed_comes_as_it_is_now(change):
    want = change(reads())
    mine, back, _ = across(reads(), change=change)
    assert back is not mine and exactly(list(back), list(want))


def test_a_plan_for_another_rank_travels_whole():
    mine, back, _ = across(reads(), to=0)
    assert back is not mine and exactly(list(back), reads())


def test_the_coordinators_own_plan_is_built_once():
    mine = sent(reads(), 0)
    assert pickle.loads(pickle.dumps(mine)) is mine
    assert pickle.loads(pickle.dumps(returned(mine, 0))) is mine


def written(change=lambda items: items, save=1):
    """A rank's plan on its way to the coordinator, numbered there, and back.
    Another process has no list of that name.
    """
    mine = sent(writes(), -1)
    there = pickle.dumps(mine)
    kept = packed_plans._SENT.pop(mine.key)
    came = pickle.loads(there)
    assert came is not mine and exactly(list(came), writes())
    items = [
        dataclasses.replace(i, index=dataclasses.replace(i.index, index=n))
        for n, i in enumerate(came)
    ]
    items = change(items)
    for _ in range(save):
        on_the_way = numbered(items, came)
    back = pickle.dumps(on_the_way)
    packed_plans._SENT[mine.key] = kept
    return items, mine, pickle.loads(back), back


@pytest.mark.parametrize(
    "change", [lambda items: items, lambda items: items[1:], lambda items: items[::-1]]
)
def test_numbered_items_travel_as_their_places(change):
    items, mine, back, on_the_way = written(change)
    assert exactly(list(back), items) and len(on_the_way) < 300
    by_name = {i.index.fqn: i.tensor_data for i in mine.seen}
    assert all(i.tensor_data is by_name[i.index.fqn] for i in back)


def other_kind(items):
    return [dataclasses.replace(items[0], type=WriteItemType.TENSOR), *items[1:]]


def other_data(items):
    data = dataclasses.replace(items[0].tensor_data, size=size(8, 3))
    return [dataclasses.replace(items[0], tensor_data=data), *items[1:]]


def other_name(items):
    return [dataclasses.replace(items[0], index=MetadataIndex("c", size(2, 0), 0)), *items[1:]]


@pytest.mark.parametrize("change", [other_kind, other_data, other_name])
def test_items_that_a_planner_changed_travel_whole(change):
    items, _, back, _ = written(change)
    assert type(back) is Items and exactly(list(back), items)


def test_a_plan_that_a_planner_kept_from_an_earlier_save_travels_whole():
    items, _, back, _ = written(save=2)
    assert type(back) is Items and exactly(list(back), items)
    assert numbered([], None) == [] and type(numbered(writes(), None)) is Items


def test_the_coordinators_own_items_are_not_sent():
    mine = sent(writes(), -1, here=True)
    there = pickle.dumps(mine)
    assert pickle.loads(there) is mine and len(there) < 200


def wrote(n=2):
    at = [_StorageInfo("__0_0.distcp", 64 * i, 60) for i in range(n)]
    said = [
        Written(at[0], "0a" * 16, (2, 4, "0123456789abcdef" * 8)),
        *(Written(i, "", (1, 1, "")) for i in at[1:]),
    ]
    return [
        WriteResult(MetadataIndex(f"a.{i}", size(2 * i, 0) if i else None, i or None), 60, w)
        for i, w in enumerate(said)
    ]


def test_results_come_as_they_were(monkeypatch):
    mine = results(wrote(), {"optim.param_groups": "0a"}, {("optim.state.0.x", (0,)): "1b"})
    assert mine == wrote() and type(mine[0]) is WriteResult
    there = pickle.dumps(mine)
    assert pickle.loads(there) is mine  # the coordinator has its own
    monkeypatch.setattr(packed_plans, "_SENT", {})
    came = pickle.loads(there)
    assert exactly(list(came), wrote()) and came.groups == mine.groups
    assert came.samples == mine.samples
    assert type(came[0].storage_data) is Written


def test_results_travel_in_few_bytes():
    """What a rank sends for each of many tensors with one digest,
    beside what pickling them as objects sends.
    """
    many = wrote(1000)
    assert len(pickle.dumps(results(many, {}, {}))) < 0.6 * len(pickle.dumps(many))
