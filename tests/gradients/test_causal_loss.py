"""The loss in chunks of positions: the number and the gradients of all logits at once."""

import types
from typing import NamedTuple

import pytest
import torch
from torch import nn

import lowbit


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

    def forward(self, ids):
        """The loss as transformers computes it."""
        logits = self.head(self.base_model(ids).last_hidden_state)[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


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
    expected = other(ids)
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
    with pytest.raises(ValueError, match=r"final_logit_softcapping=30.0\), which"):
        lowbit.causal_loss(Decoder(final_logit_softcapping=30.0), tokens())
    with pytest.raises(ValueError, match="adds a loss of its router"):
        lowbit.causal_loss(Decoder(output_router_logits=True), tokens())
    model = Decoder()
    model.get_output_embeddings = lambda: None
    with pytest.raises(ValueError, match="no output embeddings"):
        lowbit.causal_loss(model, tokens())
    with pytest.raises(ValueError, match="forward pass of this DataParallel would not run"):
        lowbit.causal_loss(nn.DataParallel(nn.Linear(4, 4)), tokens())
