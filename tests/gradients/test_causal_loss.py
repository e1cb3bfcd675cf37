"""The loss in chunks of positions: the number and the gradients of all logits at once."""

import copy
import types
from typing import NamedTuple

import pytest
import torch
from torch import nn

import lowbit
from lowbit.gradients import own_loss


class Decoder(nn.Module):
    """What a causal language model of transformers has."""

    def __init__(self, dtype=torch.float32, **config):
        super().__init__()
        torch.manual_seed(0)
        self.base_model = Base(dtype)
        self.head = nn.Linear(32, 50, bias=False, dtype=dtype)
        self.config = types.SimpleNamespace(**config)

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, labels=None, use_cache=False):
        """The logits and the loss as transformers computes them."""
        logits = self.logits(self.base_model(input_ids=input_ids).last_hidden_state)
        words, targets = logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
        return types.SimpleNamespace(
            logits=logits, loss=nn.functional.cross_entropy(words, targets)
        )

    def logits(self, hidden):
        return self.head(hidden)


def own(model, ids):
    """The model's own loss."""
    return model(ids, ids).loss


class Output(NamedTuple):  # a pytree, as transformers' is: FSDP2 looks for tensors in it
    last_hidden_state: torch.Tensor


class Base(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.embed = nn.Embedding(50, 32, dtype=dtype)
        self.layer = nn.Linear(32, 32, dtype=dtype)

    def forward(self, input_ids, use_cache=False):
        hidden = self.layer(self.embed(input_ids)).tanh()
        return Output(hidden)


def tokens(seed=0):
    return torch.randint(50, (3, 17), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("chunk", [1, 7, 512, None])
def test_the_number_and_the_gradients_of_the_models_own_loss(chunk):
    model, other = Decoder(), Decoder()
    ids = tokens()
    loss = lowbit.causal_loss(model, ids, chunk=chunk)
    loss.backward()
    expected = own(other, ids)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_labels_of_minus_100_are_left_out():
    model, ids = Decoder(), tokens()
    labels = ids.clone()
    labels[:, :9] = -100
    logits = model.head(model.base_model(ids).last_hidden_state)[:, 8:-1]
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 9:].flatten())
    torch.testing.assert_close(lowbit.causal_loss(model, ids, labels, chunk=5), expected)
    assert lowbit.causal_loss(model, ids, torch.full_like(ids, -100)).isnan()


def test_models_whose_loss_it_would_not_have_are_refused():
    with pytest.raises(ValueError, match="chunk must be at least 1"):
        lowbit.causal_loss(Decoder(), tokens(), chunk=0)
    inside = types.SimpleNamespace(model_type="text", output_router_logits=True)
    for config in ({"output_router_logits": True}, {"text_config": inside}):
        with pytest.raises(ValueError, match="leaves out the loss of the model's router"):
            lowbit.causal_loss(Decoder(**config), tokens())
    model = Decoder()
    model.get_output_embeddings = lambda: None
    with pytest.raises(ValueError, match="no output embeddings"):
        lowbit.causal_loss(model, tokens())
    with pytest.raises(ValueError, match="language model of transformers, not Linear: use"):
        lowbit.causal_loss(nn.Linear(4, 4), tokens())
    with pytest.raises(ValueError, match="forward pass of this DataParallel would not run"):
        lowbit.causal_loss(nn.DataParallel(nn.Linear(4, 4)), tokens())


class Capped(Decoder):
    def logits(self, hidden):
        return 30 * (self.head(hidden) / 30).tanh()


class Between(Decoder):
    """A layer between the base model and the head, as ModernBERT's decoder has."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(32, 32)

    def logits(self, hidden):
        return self.head(self.dense(hidden))


class Unshifted(Decoder):
    """A loss whose labels the caller shifts, as BART's decoder has."""

    def forward(self, input_ids, labels=None, use_cache=False):
        out = super().forward(input_ids, labels)
        out.loss = nn.functional.cross_entropy(out.logits.flatten(0, 1), labels.flatten())
        return out


class OfPart(Decoder):
    """Calls the decoder inside its base model, as OPT does."""

    def __init__(self):
        super().__init__()
        inner = self.base_model
        self.base_model = nn.Module()
        self.base_model.decoder = inner
        self.base_model.forward = inner.forward

    def forward(self, input_ids, labels=None, use_cache=False):
        other = copy.copy(self)
        other._modules = {**self._modules, "base_model": self.base_model.decoder}
        return Decoder.forward(other, input_ids, labels)


class Other(Decoder):
    def forward(self, input_ids, labels=None, use_cache=False):
        return self.base_model.layer.weight[input_ids]


@pytest.mark.parametrize(
    "kind, message",
    [
        (Capped, "Capped changes logits after the head, as soft caps"),
        (Between, "Between changes hidden states before the head"),
        (Unshifted, "Unshifted has another loss than the mean cross-entropy"),
        (Other, "Other does not call its head"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_a_forward_pass_does_besides_is_refused(kind, message, device):
    if device == "meta" and kind is Between:
        message = r"Between needs more than both \(RuntimeError"  # its layer has no values there
    model = kind().to(device)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            lowbit.causal_loss(model, tokens().to(device))


def test_a_part_of_the_base_model_may_be_called():
    model, ids = OfPart(), tokens()
    torch.testing.assert_close(lowbit.causal_loss(model, ids), own(model, ids))


def test_a_look_at_the_forward_pass_calls_no_module_and_draws_no_number():
    """Under a default device, too, whose tensors it could not read."""
    model, ids, called = Decoder(), tokens(), []
    for module in model.modules():
        module.register_forward_hook(lambda module, *_: called.append(module))
    before = torch.get_rng_state()
    with torch.device("meta"):
        lowbit.causal_loss(model, ids, chunk=None)
    assert called == [model.base_model.embed, model.base_model.layer, model.base_model, model.head]
    assert torch.equal(torch.get_rng_state(), before)
    assert type(model.base_model) is Base and type(model.head) is nn.Linear


def test_gradients_under_autocast_and_of_a_compiled_model():
    ids = tokens()
    with torch.autocast("cpu", torch.bfloat16):
        model = Decoder()
        lowbit.causal_loss(model, ids).backward()
    assert all(p.grad.count_nonzero() for p in model.parameters())
    expected = own(Decoder(), ids)
    wrapped = torch.compile(Decoder(), backend="eager")
    torch.testing.assert_close(lowbit.causal_loss(wrapped, ids), expected)
    whole = torch.compile(lambda ids: lowbit.causal_loss(inside, ids), backend="eager")
    inside = Decoder()
    torch.testing.assert_close(whole(ids), expected)
    one = torch.compile(
        lambda ids: lowbit.causal_loss(fresh, ids, chunk=None),
        backend="eager",
        fullgraph=own_loss.IN_GRAPH,
    )
    fresh = Decoder()  # whose forward pass was not looked at yet
    torch.testing.assert_close(one(ids), expected)


def test_a_model_that_changes_is_looked_at_again(monkeypatch):
    model, ids = Decoder(), tokens()
    lowbit.causal_loss(model, ids)
    forward = Decoder.forward

    def scaled(self, input_ids, labels=None, **options):
        out = forward(self, input_ids, labels, **options)
        out.loss = 2 * out.loss
        return out

    monkeypatch.setattr(Decoder, "forward", scaled)
    with pytest.raises(ValueError, match="has another loss than the mean cross-entropy"):
        lowbit.causal_loss(model, ids)
