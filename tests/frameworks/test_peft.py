"""PEFT's adapters: the layers that are trained whole beside them stand in a wrapper of PEFT's, and
are embeddings and heads all the same.
"""

import functools

import pytest
import torch
from torch import nn

import lowbit
from tests.frameworks.test_frameworks import need_package


class Classifier(nn.Module):
    """A head that its name alone tells: it is as wide as no embedding."""

    def __init__(self):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(96, 64), nn.Linear(64, 64)
        self.score = nn.Linear(64, 80, bias=False)

    def forward(self, ids):
        return self.score(self.linear(self.embedding(ids)))


def adapted(adapter="default", **options):
    need_package("peft")
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    lora = LoraConfig(r=16, target_modules=["linear"], **options)
    return get_peft_model(Classifier(), lora, adapter_name=adapter)


def groups_of(groups, key):
    """By the last part of a name that is the model's own."""
    found = {}
    for group in groups:
        for name in group["param_names"]:
            own = next(part for part in ("embedding", "linear", "score") if f".{part}." in name)
            found[own] = group.get(key)
    return found


def test_layers_that_are_trained_whole_are_embeddings_and_heads():
    for adapter in ("default", "second"):
        model = adapted(adapter, modules_to_save=["embedding", "score"])
        groups = lowbit.param_groups(model, embeddings="4bit", heads="bfloat16")
        kept = {"embedding": "4bit", "linear": None, "score": "bfloat16"}
        assert groups_of(groups, "state_format") == kept


def test_muon_does_not_step_a_head_that_is_trained_whole():
    groups = lowbit.muon_param_groups(adapted(modules_to_save=["embedding", "score"]))
    steps = {"embedding": False, "linear": True, "score": False}
    assert groups_of(groups, "use_muon") == steps


def test_a_head_that_has_an_adapter_and_is_trained_is_a_head():
    model = adapted()
    from peft import LoraConfig

    model.add_adapter("head", LoraConfig(r=16, target_modules=["score"]))
    model.base_model.model.score.base_layer.weight.requires_grad_(True)
    groups = lowbit.muon_param_groups(model)
    by_name = {name: group["use_muon"] for group in groups for name in group["param_names"]}
    assert by_name["base_model.model.score.base_layer.weight"] is False


def fsdp1_around_each_trained_layer(use_orig_params):
    """As PEFT's policy wraps, which Trainer takes for FSDP1. Returns the names that are bound."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

    def wrap(module):
        leaf = not list(module.named_children()) and getattr(module, "weight", None) is not None
        return leaf and module.weight.requires_grad

    model = FullyShardedDataParallel(
        adapted(modules_to_save=["score"]),
        auto_wrap_policy=functools.partial(lambda_auto_wrap_policy, lambda_fn=wrap),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )
    opt = lowbit.AdamW(lowbit.param_groups(model), lr=1e-2)
    lowbit.fsdp1.bind(model, opt)
    model(torch.arange(8)).square().mean().backward()
    opt.step()
    return sorted(lowbit.fsdp1.get_state_dict(opt)["state"])


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_a_layer_that_is_trained_whole_is_bound_once_under_fsdp1(pool, use_orig_params):
    """PEFT's wrapper answers for the attributes of the layer inside, FSDP1's among them."""
    need_package("peft")
    trained = ["linear.lora_A.default", "linear.lora_B.default", "score.modules_to_save.default"]
    names = [f"base_model.model.{name}.weight" for name in trained]
    assert pool.run(2, fsdp1_around_each_trained_layer, use_orig_params) == [names] * 2
