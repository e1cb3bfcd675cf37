"""The loss in chunks under FSDP2, on two ranks over gloo."""

import pytest
import torch
from torch import nn

import lowbit
from tests.gradients.test_causal_loss import Decoder, own, tokens

pytestmark = pytest.mark.slow


class Whole(nn.Module):
    """The module whose forward is the loss, as the refusal of a wrapped model advises."""

    def __init__(self):
        super().__init__()
        self.model = Decoder()

    def forward(self, ids):
        return lowbit.causal_loss(self.model, ids, chunk=5)


def sharded():
    """On each rank: the refusal of a sharded model, and the loss and gradients of one whose parts
    are sharded inside of a sharded module, beside those of one process.
    """
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    itself = fully_shard(Decoder())
    with pytest.raises(ValueError, match="forward pass of this FSDPDecoder would not run"):
        lowbit.causal_loss(itself, tokens())
    whole = Whole()
    fully_shard(whole.model.base_model)
    fully_shard(whole)
    loss = whole(tokens(dist.get_rank()))
    loss.backward()
    alone = Decoder()
    losses = [own(alone, tokens(rank)) for rank in range(2)]
    (sum(losses) / 2).backward()
    torch.testing.assert_close(loss, losses[dist.get_rank()])
    for p, q in zip(whole.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)
    return True


def test_the_parts_of_a_wrapped_module_may_be_sharded(pool):
    assert pool.run(2, sharded) == [True, True]
