"""convert --model where parameters are only numbered: the order of the model names them,
or it is refused.
"""

import pytest
import safetensors.torch as safetensors
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import lowbit
from tests.support.peers.files import need_tool, run

need_tool()


class Net(nn.Module):
    """Buffers between parameters, a weight that is tied, and two layers of one shape."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(96, 64)
        self.first = nn.Linear(64, 64)
        self.norm = nn.BatchNorm1d(64)
        self.second = nn.Linear(64, 64)
        self.head = nn.Linear(64, 96, bias=False)
        self.head.weight = self.tokens.weight


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


def stepped(params, groups=None):
    params = list(params)
    opt = torch.optim.AdamW(groups or params, lr=7e-3)
    for p in params:
        p.grad = torch.randn_like(p)
    opt.step()
    return opt


def written(tmp_path, opt, model):
    torch.save({"optimizer": opt.state_dict()}, tmp_path / "in.pt")
    torch.save(model, tmp_path / "model.pt")
    return tmp_path / "in.pt", tmp_path / "out.pt", "--model", tmp_path / "model.pt", "--quiet"


def refused(*arguments):
    error = run("convert", *arguments, code=3).stderr
    assert not arguments[1].exists()
    return error


@pytest.mark.parametrize("to", ["lowbit", "torch"])
@pytest.mark.parametrize("whole", [True, False])
def test_the_order_of_the_model_names_numbers(net, tmp_path, to, whole):
    """Whole: a training checkpoint, whose own optimizer is none of the weights."""
    old = stepped(net.parameters())
    model = (
        {"model": net.state_dict(), "optimizer": old.state_dict()} if whole else net.state_dict()
    )
    options = ("--state-format", "float32") if to == "lowbit" else ()
    paths = written(tmp_path, old, model)
    run("convert", *paths, "--to", to, *options)
    got = torch.load(tmp_path / "out.pt", weights_only=True)["optimizer"]
    names = [name for name, _ in net.named_parameters()]
    assert got["param_groups"][0]["param_names"] == names
    for i, p in enumerate(net.parameters()):
        assert torch.equal(got["state"][i]["exp_avg"], old.state[p]["exp_avg"])
    opt = lowbit.AdamW(lowbit.param_groups(net), state_format="float32")
    lowbit.load_optimizer(opt, tmp_path / "out.pt")  # which its names are for
    for p in net.parameters():
        assert torch.equal(opt.state[p]["exp_avg"], old.state[p]["exp_avg"])


def test_names_serve_patterns_and_streams(net, tmp_path):
    paths = written(tmp_path, stepped(net.parameters()), net.state_dict())
    run("convert", *paths, "--to", "lowbit", "--full-precision", "tokens.*")
    state = torch.load(tmp_path / "out.pt", weights_only=True)["optimizer"]["state"]
    assert "exp_avg" in state[0] and "exp_avg_dynamic8" in state[1]
    wanted = lowbit.AdamW(net.named_parameters()).state_dict()["state"]
    assert [int(state[i]["stream"]) for i in state] == [int(s["stream"]) for s in wanted.values()]


def test_without_a_model_numbers_stay_numbers(net, tmp_path):
    source, target, *_ = written(tmp_path, stepped(net.parameters()), {})
    run("convert", source, target, "--to", "lowbit", "--quiet")
    group = torch.load(target, weights_only=True)["optimizer"]["param_groups"][0]
    assert "param_names" not in group and group["params"] == list(range(len(group["params"])))


def test_names_in_the_file_count(net, tmp_path):
    """A model in another order changes nothing where the file says the names."""
    named = dict(net.named_parameters())
    old = stepped(named.values(), list(named.items()))
    paths = written(tmp_path, old, dict(reversed(net.state_dict().items())))
    run("convert", *paths, "--to", "lowbit")
    group = torch.load(tmp_path / "out.pt", weights_only=True)["optimizer"]["param_groups"][0]
    assert group["param_names"] == list(named)


def test_groups_have_no_order_of_a_model(net, tmp_path):
    params = list(net.parameters())
    groups = [{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.0}]
    error = refused(*written(tmp_path, stepped(params, groups), net.state_dict()), "--to", "lowbit")
    assert "in 2 groups" in error and "named_parameters()" in error


def test_another_number_of_weights(net, tmp_path):
    old = stepped(list(net.parameters())[1:])
    error = refused(*written(tmp_path, old, {"model": net.state_dict()}), "--to", "lowbit")
    assert "numbered, 0 to 5" in error and "7 under 'model'" in error and "cannot be known" in error


def test_two_models(net, tmp_path):
    model = {"model": net.state_dict(), "ema": net.state_dict()}
    error = refused(*written(tmp_path, stepped(net.parameters()), model), "--to", "lowbit")
    assert "'model' and 'ema'" in error


def test_another_order(net, tmp_path):
    """What shapes tell of it."""
    old = stepped(list(net.parameters())[::-1])
    error = refused(*written(tmp_path, old, net.state_dict()), "--to", "lowbit")
    assert "parameter 0 has the shape" in error and "tokens.weight" in error


def test_a_directory_has_no_order(net, tmp_path):
    source, target, *_ = written(tmp_path, stepped(net.parameters()), {})
    dcp.save(net.state_dict(), checkpoint_id=tmp_path / "model", no_dist=True)
    error = refused(source, target, "--model", tmp_path / "model", "--to", "lowbit")
    assert "does not keep the order of the model" in error
    assert "the program itself saves with torch.save(model.state_dict())" in error


class Attention(nn.Module):
    """Four weights of one size, in no order of the alphabet."""

    def __init__(self):
        super().__init__()
        for name in ("query", "key", "value", "out"):
            setattr(self, name, nn.Linear(64, 64, bias=False))


MODELS = {
    "many layers": lambda: nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(12))),
    "words": Attention,
    "a norm": lambda: nn.Sequential(nn.LayerNorm(64)),
    "two dtypes": lambda: nn.Sequential(
        *(nn.Linear(64, 64, bias=False).to(t) for t in [torch.bfloat16, torch.float32] * 2)
    ),
}


@pytest.mark.parametrize("way", ["safetensors", "dcp", "dcp by lowbit-ckpt"])
@pytest.mark.parametrize("model", MODELS)
def test_a_file_that_was_converted_has_the_order_of_names(tmp_path, model, way):
    """'10' comes before '2', and 'key' before 'query'."""
    torch.manual_seed(0)
    net = MODELS[model]()
    source, target, _, weights, _ = written(tmp_path, stepped(net.parameters()), net.state_dict())
    if way == "safetensors":
        safetensors.save_file(net.state_dict(), tmp_path / "m.safetensors")
        run("convert", tmp_path / "m.safetensors", tmp_path / "sorted.pt")
    else:
        if way == "dcp":
            dcp.save({"model": net.state_dict()}, checkpoint_id=tmp_path / "m", no_dist=True)
        else:
            run("convert", weights, tmp_path / "m", "--container", "dcp")
        run("convert", tmp_path / "m", tmp_path / "sorted.pt")
    options = ("--to", "lowbit", "--state-format", "float32")
    error = refused(source, target, "--model", tmp_path / "sorted.pt", *options)
    assert "has the weights sorted by name" in error and "have one size" in error
    assert "the program itself saves with torch.save(model.state_dict())" in error
    # The same where the keys' order is known.
    run("convert", weights, tmp_path / "kept.safetensors")
    run("convert", tmp_path / "kept.safetensors", tmp_path / "kept.pt")
    for model_file in (weights, tmp_path / "kept.pt"):
        run("convert", source, target, "--model", model_file, *options, "--force")
        group = torch.load(target, weights_only=True)["optimizer"]["param_groups"][0]
        assert group["param_names"] == [name for name, _ in net.named_parameters()]


def test_sizes_tell_the_order_of_sorted_names(tmp_path):
    """No two weights have one size, so that another order would be another shape."""
    net = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(32, 96, bias=False))
    old = stepped(net.parameters())
    paths = written(tmp_path, old, dict(net.state_dict()))
    run("convert", *paths, "--to", "lowbit")
    (tmp_path / "out.pt").unlink()
    paths = written(tmp_path, stepped(list(net.parameters())[::-1]), dict(net.state_dict()))
    assert "parameter 0 has the shape" in refused(*paths, "--to", "lowbit")
