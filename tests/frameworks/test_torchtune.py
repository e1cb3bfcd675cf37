"""torchtune's optimizers in the backward pass: one for each parameter, in a dict that its own hooks
step and its own wrapper saves and loads.
"""

import importlib
import importlib.util
import pathlib
import sys
import types

import pytest
import torch

import lowbit
from tests.frameworks.frameworks_worker import Net, batch_of, loss_of
from tests.support.require import need

OPTIMIZERS = {
    "AdamW": lambda p: lowbit.AdamW(p, lr=1e-2, seed=3),
    "AdamW 4bit": lambda p: lowbit.AdamW(p, lr=1e-2, seed=3, state_format="4bit"),
    "Lion": lambda p: lowbit.Lion(p, lr=1e-3, seed=3),
    "Adafactor": lambda p: lowbit.Adafactor(p, lr=1e-2, seed=3),
}


@pytest.fixture(scope="module")
def memory():
    """torchtune.training.memory alone: torchtune 0.6.1 as a whole imports what torchao has moved
    since.
    """
    spec = importlib.util.find_spec("torchtune")
    hint = "torchtune is not installed: pip install --no-deps torchtune"
    need("frameworks", spec is not None, hint)
    (root,) = map(pathlib.Path, spec.submodule_search_locations)
    before = set(sys.modules)
    for name, path in (("torchtune", root), ("torchtune.training", root / "training")):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(path)]
    try:
        yield importlib.import_module("torchtune.training.memory")
    finally:
        for name in set(sys.modules) - before:
            if name.startswith("torchtune"):
                del sys.modules[name]


def network(seed=0):
    model = Net(seed).to(torch.bfloat16)
    model.norm.bias.requires_grad_(False)
    return model


class Recipe:
    """What torchtune's single-device recipe does with `optimizer_in_bwd=True`."""

    def __init__(self, memory, make, seed=0, named=False):
        self.model = network(seed)
        self.optimizers = {
            p: make([(name, p)] if named else [p]) for name, p in self.model.named_parameters()
        }
        memory.register_optim_in_bwd_hooks(self.model, self.optimizers)
        self.wrapper = memory.create_optim_in_bwd_wrapper(self.model, self.optimizers)

    def schedule(self, last_epoch=-1):
        first = next(iter(self.wrapper.optim_map.values()))
        decay = torch.optim.lr_scheduler.LambdaLR(first, lambda n: 0.8**n, last_epoch)
        self.wrapper.set_lr_scheduler(decay)

    def train(self, steps):
        for step in steps:
            loss_of(self.model, batch_of(step, 0)).backward()
            assert all(p.grad is None for p in self.model.parameters())
            self.wrapper.step_lr_scheduler()

    def bits(self):
        return bits(self.model, lambda p: self.optimizers[p])


def streams(recipe):
    return [int(opt.state[p]["stream"]) for p, opt in recipe.optimizers.items() if p.requires_grad]


def test_names_give_each_parameter_random_bits_of_its_own(memory):
    assert set(streams(Recipe(memory, OPTIMIZERS["AdamW"]))) == {0}  # the recipe's own [p]
    named = streams(Recipe(memory, OPTIMIZERS["AdamW"], named=True))
    assert len(set(named)) == len(named) == 6


def bits(model, optimizer_of):
    """Every weight and every tensor of state, by name."""
    found = {}
    for name, p in model.named_parameters():
        found[name] = p.detach().clone()
        for key, value in optimizer_of(p).state[p].items():
            found[f"{name} {key}"] = value.clone()
    return found


def assert_same(a, b):
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resumes_exactly(memory, tmp_path, name):
    make = OPTIMIZERS[name]
    whole = Recipe(memory, make)
    whole.schedule()
    whole.train(range(3))
    saved = {"model": whole.model.state_dict(), "opt": whole.wrapper.state_dict()}
    torch.save(saved, tmp_path / "recipe.pt")
    half = whole.bits()
    whole.train(range(3, 6))

    resumed = Recipe(memory, make, seed=1)
    saved = torch.load(tmp_path / "recipe.pt", weights_only=True)
    resumed.model.load_state_dict(saved["model"])
    resumed.wrapper.load_state_dict(saved["opt"])
    assert_same(resumed.bits(), half)
    resumed.schedule(last_epoch=2)  # recipes step the scheduler once more here
    assert resumed.wrapper.get_optim_key("lr") == pytest.approx(
        make([torch.nn.Parameter(torch.ones(1))]).defaults["lr"] * 0.8**3
    )
    for opt in resumed.optimizers.values():
        opt.param_groups[0]["lr"] = resumed.wrapper.get_last_lr()
    resumed.train(range(3, 6))
    assert_same(resumed.bits(), whole.bits())
    assert not torch.equal(resumed.bits()["up.weight"], half["up.weight"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_optimizer_that_steps_in_backward_has_the_same_bits(memory, name):
    """With names, which the streams of random bits go by; and so has an ordinary step."""
    make = OPTIMIZERS[name]
    recipe = Recipe(memory, make, named=True)
    recipe.schedule()
    recipe.train(range(4))
    for in_backward in (True, False):
        model = network()
        opt = make(model.named_parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: 0.8**n)
        if in_backward:
            lowbit.step_in_backward(model, opt)
        for step in range(4):
            loss_of(model, batch_of(step, 0)).backward()
            assert in_backward == all(p.grad is None for p in model.parameters())
            opt.step()
            opt.zero_grad()
            scheduler.step()
        assert_same(bits(model, lambda p, opt=opt: opt), recipe.bits())
