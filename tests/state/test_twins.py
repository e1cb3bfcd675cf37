"""Optimizers that are told the same in any order: one that is saved and loaded between has the bits
of one that is not, and lowbit's with state in float32 has the values of torch's.
"""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import lowbit
from tests.support import bits

pytestmark = pytest.mark.slow

SHAPES = [(7,), (300,), (5000,), (3, 5), (16, 64), (33, 1), (70, 130), (2, 3, 4), (8, 16, 3, 3)]
OWN = {  # lowbit's, and options of it
    "AdamW": (lowbit.AdamW, {}),
    "AdamW amsgrad": (lowbit.AdamW, {"amsgrad": True}),
    "SGD": (lowbit.SGD, {"momentum": 0.9, "dampening": 0.3}),
    "Lion": (lowbit.Lion, {}),
    "Adafactor": (lowbit.Adafactor, {"beta1": 0.9}),
    "RMSprop": (lowbit.RMSprop, {"momentum": 0.9, "centered": True}),
    "CAME": (lowbit.CAME, {}),
    "LAMB": (lowbit.LAMB, {}),
    "APOLLO": (lowbit.APOLLO, {"rank": 4, "update_proj_gap": 2}),
    "Muon": (lowbit.Muon, {}),
}
THEIRS = {  # torch's, lowbit's, and options of both
    "AdamW": (torch.optim.AdamW, lowbit.AdamW, {"betas": (0.8, 0.9)}),
    "AdamW amsgrad": (torch.optim.AdamW, lowbit.AdamW, {"amsgrad": True, "maximize": True}),
    "Adam": (torch.optim.Adam, lowbit.Adam, {"weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, lowbit.SGD, {"momentum": 0.9, "dampening": 0.3}),
    "plain SGD": (torch.optim.SGD, lowbit.SGD, {"weight_decay": 0.1}),
    "RMSprop": (torch.optim.RMSprop, lowbit.RMSprop, {"momentum": 0.9, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, lowbit.Adagrad, {"lr_decay": 0.1}),
    "Adafactor": (torch.optim.Adafactor, lowbit.Adafactor, {"weight_decay": 0.1}),
}
FULL = StateDictOptions(full_state_dict=True)
SETTINGS = settings(max_examples=15, stateful_step_count=15, deadline=None)


class Twins(RuleBasedStateMachine):
    """What both are told. `first` is kept, and `second` may be loaded anew."""

    def begin(self, shapes, dtypes, named):
        self.shapes, self.dtypes, self.named = shapes, dtypes, named
        self.groups = [list(range(max(1, len(shapes) - 1)))]  # the last may be added
        self.steps = 0
        self.first, self.second = self.network(), self.network()

    def network(self):
        generator = torch.Generator().manual_seed(1)
        net = nn.Module()
        for i, (shape, dtype) in enumerate(zip(self.shapes, self.dtypes, strict=True)):
            values = torch.randn(shape, generator=generator)
            net.register_parameter(f"p{i}", nn.Parameter(values.to(dtype)))
        return net

    def group(self, net, indices):
        params = list(net.named_parameters())
        return {"params": [params[i] if self.named else params[i][1] for i in indices]}

    def built(self, cls, net, **options):
        return cls([self.group(net, indices) for indices in self.groups], **options)

    def both(self):
        return (self.first, self.first_opt), (self.second, self.second_opt)

    @rule(absent=st.sets(st.integers(0, 3)), size=st.sampled_from([1e-3, 1.0]))
    def step(self, absent, size):
        self.steps += 1
        for net, opt in self.both():
            generator = torch.Generator().manual_seed(self.steps)
            for i, p in enumerate(net.parameters()):
                grad = size * torch.randn(p.shape, generator=generator)
                p.grad = grad.to(p.dtype) if p.requires_grad and i not in absent else None
            opt.step()

    @rule(lr=st.sampled_from([1e-3, 1e-2]), decay=st.sampled_from([0.0, 0.05]))
    def set_options(self, lr, decay):
        for _, opt in self.both():
            opt.param_groups[0].update(lr=lr, weight_decay=decay)

    @precondition(lambda self: sum(map(len, self.groups)) < len(self.shapes))
    @rule()
    def add_group(self):
        last = len(self.shapes) - 1
        for net, opt in self.both():
            opt.add_param_group({**self.group(net, [last]), "lr": 1e-3})
        self.groups.append([last])

    @rule(index=st.integers(0, 3), trained=st.booleans())
    def freeze(self, index, trained):
        for net, _ in self.both():
            for p in list(net.parameters())[index : index + 1]:
                p.requires_grad_(trained)

    def copied(self, net):
        new = self.network()
        new.load_state_dict(net.state_dict())
        for p, q in zip(net.parameters(), new.parameters(), strict=True):
            q.requires_grad_(p.requires_grad)
        return new

    def load(self, net, cls, options, way):
        """The second is one like `net`, with an optimizer into which `way` loads."""
        new = self.copied(net)
        opt = self.built(cls, new, **{**options, "lr": 0.5})
        way(new, opt)
        self.second, self.second_opt = new, opt

    def all_trained(self):
        """torch's `set_optimizer_state_dict` drops the state of a parameter that is frozen."""
        return all(p.requires_grad for p in self.first.parameters())


@pytest.mark.parametrize("name", OWN)
def test_what_is_saved_and_loaded_between_has_the_same_bits(name, tmp_path):
    cls, options = OWN[name]

    class Saved(Twins):
        @initialize(
            shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4),
            dtypes=st.lists(st.sampled_from([torch.float32, torch.bfloat16]), min_size=4),
            named=st.booleans(),
            state=st.sampled_from(["8bit", "4bit", "log8", "float32"]),
        )
        def build(self, shapes, dtypes, named, state):
            if cls is lowbit.Muon:
                shapes = [(*shape, 8)[:2] for shape in shapes]
            self.begin(shapes, dtypes[: len(shapes)], named)
            self.options = {**options, "state_format": state}
            self.first_opt = self.built(cls, self.first, **self.options)
            self.second_opt = self.built(cls, self.second, **self.options)

        @rule(way=st.sampled_from([copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))]))
        def copy(self, way):
            self.second, self.second_opt = way((self.second, self.second_opt))

        def load_second(self, way):
            self.load(self.second, cls, self.options, way)

        @rule()
        def load_state_dict(self):
            stored = io.BytesIO()
            torch.save(self.second_opt.state_dict(), stored)
            stored.seek(0)
            self.load_second(lambda _, opt: opt.load_state_dict(torch.load(stored)))

        @precondition(Twins.all_trained)
        @rule(flat=st.booleans())
        def set_optimizer_state_dict(self, flat):
            how = StateDictOptions(flatten_optimizer_state_dict=flat, full_state_dict=not flat)
            state = get_optimizer_state_dict(self.second, self.second_opt, options=how)
            self.load_second(
                lambda net, opt: set_optimizer_state_dict(net, opt, state, options=how)
            )

        @precondition(Twins.all_trained)
        @rule(flat=st.booleans())
        def set_its_own(self, flat):
            how = StateDictOptions(flatten_optimizer_state_dict=flat, full_state_dict=not flat)
            state = get_optimizer_state_dict(self.second, self.second_opt, options=how)
            set_optimizer_state_dict(self.second, self.second_opt, state, options=how)

        @precondition(lambda self: self.named)
        @rule()
        def load_optimizer(self):
            path, state = tmp_path / "run", get_optimizer_state_dict(self.second, self.second_opt)
            dcp.save({"optimizer": state}, checkpoint_id=path)
            self.load_second(lambda net, opt: lowbit.load_optimizer(opt, path, model=net))

        @invariant()
        def same(self):
            if not self.steps:
                return
            pairs = zip(self.first.parameters(), self.second.parameters(), strict=True)
            for i, (p, q) in enumerate(pairs):
                assert bits.equal(p, q), i
                mine, other = self.first_opt.state.get(p, {}), self.second_opt.state.get(q, {})
                if any(not state or state["step"] == 0 for state in (mine, other)):
                    continue  # nothing, and zeros
                assert mine.keys() == other.keys()
                assert all(bits.equal(mine[key], other[key]) for key in mine), i

    run_state_machine_as_test(Saved, settings=SETTINGS)


@pytest.mark.parametrize("name", THEIRS)
def test_float32_state_has_the_values_of_torchs(name, tmp_path):
    theirs, ours, options = THEIRS[name]

    class Beside(Twins):
        @initialize(
            shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4), named=st.booleans()
        )
        def build(self, shapes, named):
            self.begin(shapes, [torch.float32] * len(shapes), named)
            self.first_opt = self.built(theirs, self.first, **options)
            self.second_opt = self.built(ours, self.second, **options, state_format="float32")

        def load_first(self, way):
            self.load(self.first, ours, {**options, "state_format": "float32"}, way)

        @rule()
        def load_state_dict(self):
            state = copy.deepcopy(self.first_opt.state_dict())
            self.load_first(lambda _, opt: opt.load_state_dict(state))

        @precondition(
            lambda self: (
                self.all_trained()
                and all(self.first_opt.state.get(p) for p in self.first.parameters())
            )
        )
        @rule()
        def set_optimizer_state_dict(self):
            state = get_optimizer_state_dict(self.first, self.first_opt, options=FULL)
            self.load_first(
                lambda net, opt: set_optimizer_state_dict(net, opt, state, options=FULL)
            )

        @precondition(lambda self: self.named)
        @rule()
        def load_optimizer(self):
            path = tmp_path / "run.pt"
            torch.save({"optimizer": self.first_opt.state_dict()}, path)
            self.load_first(lambda net, opt: lowbit.load_optimizer(opt, path, model=net))

        @invariant()
        def same(self):
            if not self.steps:
                return
            for p, q in zip(self.first.parameters(), self.second.parameters(), strict=True):
                torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)

    run_state_machine_as_test(Beside, settings=SETTINGS)
