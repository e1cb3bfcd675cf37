"""A checkpoint of several optimizers: `optimizer=` says which one a load means, as
`lowbit-ckpt convert --optimizer` does.
"""

import zipfile

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import lowbit
from lowbit import checkpoint

pytestmark = pytest.mark.usefixtures("ckpt")
NAMES = {"generator": 7e-3, "critic": 5e-4}


def stepped(net, lr):
    opt = torch.optim.AdamW(net.named_parameters(), lr=lr)
    for p in net.parameters():
        p.grad = torch.randn_like(p)
    opt.step()
    return opt


@pytest.fixture
def gan():
    """Two networks of one shape with their optimizers, so that the wrong state would fit too."""
    torch.manual_seed(0)
    nets = {name: nn.Linear(64, 96) for name in NAMES}
    return {name: (net, stepped(net, NAMES[name])) for name, net in nets.items()}


def saved(kind, tmp_path, gan):
    path = tmp_path / kind.replace(" ", "-")
    if kind == "file":
        torch.save({name: old.state_dict() for name, (_, old) in gan.items()}, path)
        return path
    options = StateDictOptions(flatten_optimizer_state_dict=kind == "flat directory")
    states = {
        name: get_optimizer_state_dict(net, old, options=options)
        for name, (net, old) in gan.items()
    }
    dcp.save(states, checkpoint_id=path, no_dist=True)
    return path


def fresh(net):
    return lowbit.AdamW(net.named_parameters(), state_format="float32")


def same(opt, net, old):
    assert opt.param_groups[0]["lr"] == old.param_groups[0]["lr"]
    for p in net.parameters():
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(opt.state[p][key], old.state[p][key])


def untouched(opt):
    return all(not t["exp_avg"].any() and t["step"] == 0 for t in opt.state.values())


@pytest.mark.parametrize("kind", ["file", "directory", "flat directory"])
@pytest.mark.parametrize("name", NAMES)
def test_the_one_that_is_named_is_loaded(kind, name, gan, tmp_path):
    net, old = gan[name]
    path = saved(kind, tmp_path, gan)
    opt = fresh(net)
    lowbit.load_optimizer(opt, path, optimizer=name)
    same(opt, net, old)
    source = checkpoint.Checkpoint(path, optimizer=name)
    assert source.model.root == (name,) and sorted(source.optimizers) == sorted(NAMES)


@pytest.mark.parametrize("kind", ["file", "directory", "flat directory"])
def test_without_a_name_it_is_refused(kind, gan, tmp_path):
    path, opt = saved(kind, tmp_path, gan), fresh(gan["critic"][0])
    with pytest.raises(ValueError, match=r"2 optimizers, 'critic', 'generator': optimizer= says"):
        lowbit.load_optimizer(opt, path)
    assert untouched(opt)


@pytest.mark.parametrize("kind", ["file", "directory", "flat directory"])
@pytest.mark.parametrize("name", ["discriminator", "crit", ""])
def test_a_name_that_is_not_there_is_refused(kind, name, gan, tmp_path):
    path, opt = saved(kind, tmp_path, gan), fresh(gan["critic"][0])
    with pytest.raises(ValueError, match=f"no optimizer under '{name}'.*'critic', 'generator'"):
        lowbit.load_optimizer(opt, path, optimizer=name)
    assert untouched(opt)


def test_places_in_a_list_are_names(gan, tmp_path):
    """As Lightning and the command have them."""
    states = [old.state_dict() for _, old in gan.values()]
    torch.save({"optimizers": states}, tmp_path / "run.pt")
    for i, (net, old) in enumerate(gan.values()):
        opt = fresh(net)
        lowbit.load_optimizer(opt, tmp_path / "run.pt", optimizer=f"optimizers.{i}")
        same(opt, net, old)


def test_the_top_has_an_empty_name(gan, tmp_path):
    (net, new), (_, old) = gan.values()
    torch.save({**new.state_dict(), "old": old.state_dict()}, tmp_path / "run.pt")
    for name, wanted in (("", new), ("old", old)):
        opt = fresh(net)
        lowbit.load_optimizer(opt, tmp_path / "run.pt", optimizer=name)
        for p, q in zip(net.parameters(), wanted.param_groups[0]["params"], strict=True):
            assert torch.equal(opt.state[p]["exp_avg"], wanted.state[q]["exp_avg"])


def test_the_only_one_may_be_named(gan, tmp_path):
    net, old = gan["critic"]
    torch.save({"critic": old.state_dict()}, tmp_path / "run.pt")
    opt = fresh(net)
    with pytest.raises(ValueError, match=r"no optimizer under 'generator'.*'critic'"):
        lowbit.load_optimizer(opt, tmp_path / "run.pt", optimizer="generator")
    lowbit.load_optimizer(opt, tmp_path / "run.pt", optimizer="critic")
    same(opt, net, old)


def test_a_number_is_no_name(gan, tmp_path):
    opt = fresh(gan["critic"][0])
    with pytest.raises(TypeError, match="optimizer= takes a name"):
        lowbit.load_optimizer(opt, saved("file", tmp_path, gan), optimizer=0)


def test_a_model_says_how_python_chooses(gan, tmp_path):
    """In the words of Python, with the file: nothing here is a command line."""
    path = saved("file", tmp_path, gan)
    with pytest.raises(checkpoint.CheckpointError) as refused:
        checkpoint.Checkpoint(path).model  # noqa: B018
    said = str(refused.value)
    assert said.startswith(f"{path}: holds 2 optimizer") and "under 'critic', 'generator'" in said
    assert "choose one with optimizer=NAME" in said and "exclude=PATTERN" in said
    with pytest.raises(checkpoint.CheckpointError, match="choose one with optimizer=NAME"):
        checkpoint.convert(path, tmp_path / "b.pt", to="lowbit")
    with pytest.raises(checkpoint.CheckpointError, match=f"{path}: holds no optimizer under 'x'"):
        checkpoint.Checkpoint(path, optimizer="x").model  # noqa: B018


def test_options_in_errors_are_arguments(gan, tmp_path):
    torch.save(gan["critic"][1].state_dict(), tmp_path / "a.pt")
    for options, said in (
        (
            {"state_format": "8bit"},
            "state_format=, block= and full_precision= say how the target of to= keeps",
        ),
        ({"include": ["x"]}, "include='x' matches nothing"),
        ({"world_size": 2}, "leave it out, or take container='dcp'"),
        ({"to": "lowbit", "keep": True}, "keep=True"),
        (
            {"to": "torch", "state_format": "8bit"},
            "leave state_format= and block= out, or take another to=",
        ),
    ):
        with pytest.raises(checkpoint.CheckpointError) as refused:
            checkpoint.convert(tmp_path / "a.pt", tmp_path / "b.pt", **options)
        assert said in str(refused.value) and "--" not in str(refused.value)


def test_a_file_inside_a_zip(gan, tmp_path):
    """As stable-baselines writes: the path of the zip, and the name inside it;
    in an object store too.
    """
    net, old = gan["critic"]
    with (
        zipfile.ZipFile(tmp_path / "model.zip", "w") as z,
        z.open("o.pth", "w", force_zip64=True) as f,
    ):
        torch.save(old.state_dict(), f)
    fsspec.filesystem("memory").pipe_file(
        "/zipped/model.zip", (tmp_path / "model.zip").read_bytes()
    )
    for folder in (str(tmp_path), "memory://zipped"):
        opt = fresh(net)
        lowbit.load_optimizer(opt, f"{folder}/model.zip/o.pth")
        same(opt, net, old)
        with pytest.raises(checkpoint.CheckpointError, match=r"has no record other\.pth"):
            lowbit.load_optimizer(opt, f"{folder}/model.zip/other.pth")
    with pytest.raises(FileNotFoundError):
        lowbit.load_optimizer(opt, tmp_path / "none.zip" / "o.pth")
