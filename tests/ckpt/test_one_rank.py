"""One rank's DTensors in a file of torch.save: a part that nothing may take for the whole."""

import pytest
import torch
from torch import distributed
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh

import lowbit
from tests.support.peers.files import need_tool, run

need_tool()


@pytest.fixture
def mesh():
    """Of two ranks, as rank 0 sees it; nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    distributed.destroy_process_group()


def content(mesh, placement):
    """A model and its AdamW, whose tensors of 8 rows on this rank are DTensors."""
    model = torch.nn.Linear(4, 8)
    opt = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    opt.step()

    def made(t):
        return DTensor.from_local(t.detach(), mesh, [placement], run_check=False) if t.dim() else t

    state = opt.state_dict()
    state["state"] = {k: {n: made(t) for n, t in s.items()} for k, s in state["state"].items()}
    return {"model": {k: made(v) for k, v in model.state_dict().items()}, "optimizer": state}


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_a_part_is_refused(tmp_path, mesh, legacy):
    torch.save(
        content(mesh, Shard(0)), tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy
    )
    assert "one rank's part" in run("inspect", tmp_path / "a.pt").stdout
    for command in (
        ["convert", tmp_path / "a.pt", tmp_path / "b"],
        ["convert", tmp_path / "a.pt", tmp_path / "b", "--to", "lowbit"],
        ["convert", tmp_path / "a.pt", tmp_path / "b", "--container", "dcp", "--dry-run"],
        ["reshard", tmp_path / "a.pt", tmp_path / "b", "--world-size", "2"],
    ):
        error = run(*command, code=3).stderr
        assert "model.weight" in error and "[8, 4]" in error and "[16, 4]" in error
        assert "dcp.save" in error and "full_tensor()" in error
        assert not (tmp_path / "b").exists()
    error = run("convert", tmp_path / "a.pt", tmp_path / "b", "--exclude", "model.*", code=3).stderr
    assert "optimizer.state.0.exp_avg" in error


def test_a_summand_is_refused(tmp_path, mesh):
    torch.save(content(mesh, Partial()), tmp_path / "a.pt")
    error = run("convert", tmp_path / "a.pt", tmp_path / "b.pt", code=3).stderr
    assert "model.weight" in error and "summand" in error and not (tmp_path / "b.pt").exists()


def norm_partial():
    from torch.distributed.tensor._ops._math_ops import _NormPartial

    return _NormPartial(2)


def mask_partial():
    from torch.distributed.tensor.placement_types import _MaskPartial

    return _MaskPartial(offset_shape=torch.Size([16, 4]), offset_dim=0)


KIN = {
    "_NormPartial": norm_partial,
    "_MaskPartial": mask_partial,
    "summand": lambda: Partial("max"),
}


@pytest.mark.parametrize("kind", KIN)
def test_a_placement_that_may_be_a_part_is_refused(tmp_path, mesh, kind):
    """Its shape is the whole's."""
    torch.save(content(mesh, KIN[kind]()), tmp_path / "a.pt")
    for command in (
        ["convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", "lowbit"],
        ["reshard", tmp_path / "a.pt", tmp_path / "b", "--world-size", "2"],
    ):
        error = run(*command, code=3).stderr
        assert "model.weight" in error and kind in error and "[8, 4]" in error
        assert "dcp.save" in error and sorted(tmp_path.iterdir()) == [tmp_path / "a.pt"]
    assert "one rank's part" in run("inspect", tmp_path / "a.pt").stdout
    assert "one rank's part" in run("verify", tmp_path / "a.pt", "--opaque").stderr


def test_an_optimizer_is_not_loaded_from_a_summand(tmp_path, mesh):
    given = content(mesh, Partial())["optimizer"]
    torch.save(given, tmp_path / "a.pt")
    weight = torch.nn.Parameter(torch.zeros(8, 4))
    opt = lowbit.AdamW([weight, torch.nn.Parameter(torch.zeros(8))])
    with pytest.raises(
        ValueError, match=r"state\.0\.exp_avg: is one rank's part, a summand"
    ) as error:
        lowbit.load_optimizer(opt, tmp_path / "a.pt")
    assert "full_tensor()" in str(error.value) and "--exclude" not in str(error.value)


def test_a_replicated_one_is_whole(tmp_path, mesh):
    given = content(mesh, Replicate())
    torch.save(given, tmp_path / "a.pt")
    assert "one rank's part" not in run("inspect", tmp_path / "a.pt").stdout
    run("convert", tmp_path / "a.pt", tmp_path / "b.pt")
    back = torch.load(tmp_path / "b.pt", weights_only=True)
    assert torch.equal(back["model"]["weight"], given["model"]["weight"].to_local())


def test_of_one_rank_it_is_whole(tmp_path):
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        given = content(init_device_mesh("cpu", (1,)), Shard(0))
        torch.save(given, tmp_path / "a.pt")
        weight = given["model"]["weight"].to_local()
    finally:
        distributed.destroy_process_group()
    run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", "lowbit")
    assert torch.equal(torch.load(tmp_path / "b.pt")["model"]["weight"], weight)


def test_a_part_of_the_model_beside_a_directory(tmp_path, mesh):
    """The model's file tells shapes and the order of parameters: a part tells neither."""
    given = content(mesh, Shard(0))
    torch.save(given["model"], tmp_path / "model.pt")
    whole = content(mesh, Replicate())["optimizer"]
    torch.save(whole, tmp_path / "a.pt")
    error = run(
        "convert",
        tmp_path / "a.pt",
        tmp_path / "b.pt",
        "--to",
        "lowbit",
        "--model",
        tmp_path / "model.pt",
        code=3,
    ).stderr
    assert "model.pt" in error and "[16, 4]" in error
