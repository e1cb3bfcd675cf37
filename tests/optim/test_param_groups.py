"""Groups that `param_groups` and `muon_param_groups` make, by what decays."""

import fnmatch

import pytest
import torch
from torch import nn

import lowbit


class Net(nn.Module):
    """Biases of one and of two dimensions, norms of one and of two, an embedding and a head."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(300, 64)
        self.norm, self.plane = nn.RMSNorm(64), nn.LayerNorm((4, 64))
        self.body = nn.Linear(64, 96)
        self.experts = nn.ParameterDict(
            {"down": torch.ones(2, 96, 64), "down_bias": torch.ones(2, 64), "gain": torch.ones(())}
        )
        self.lm_head = nn.Linear(64, 300, bias=False)


def decays(groups):
    """Parameters' names by weight decay; each in one group, and beside those of the same kind."""
    named = [(name, g["weight_decay"]) for g in groups for name in g["param_names"]]
    assert len(named) == len(dict(named)) == sum(len(g["params"]) for g in groups)
    return {
        decay: sorted(name for name, other in named if other == decay)
        for decay in sorted({decay for _, decay in named})
    }


VECTORS = ["body.bias", "experts.down_bias", "experts.gain"]
NORMS = ["norm.weight", "plane.bias", "plane.weight"]
MATRICES = ["body.weight", "experts.down", "lm_head.weight", "tokens.weight"]


@pytest.mark.parametrize("make", [lowbit.param_groups, lowbit.muon_param_groups])
def test_biases_and_norms_do_not_decay(make):
    net = Net()
    groups = make(net, weight_decay=0.1, no_decay=True)
    assert decays(groups) == {0.0: sorted(VECTORS + NORMS), 0.1: MATRICES}
    assert decays(make(net, weight_decay=0.1)) == {0.1: sorted(VECTORS + NORMS + MATRICES)}


@pytest.mark.parametrize("make", [lowbit.param_groups, lowbit.muon_param_groups])
@pytest.mark.parametrize("given", [["*norm*", "tokens.*"], "*bias"])
def test_patterns_name_what_does_not_decay(make, given):
    names = [name for name, _ in Net().named_parameters()]
    patterns = [given] if isinstance(given, str) else given
    chosen = sorted(n for n in names if any(fnmatch.fnmatch(n, each) for each in patterns))
    found = decays(make(Net(), weight_decay=0.1, no_decay=given))
    assert found == {0.0: chosen, 0.1: sorted(set(names) - set(chosen))}


def test_a_pattern_that_matches_nothing_is_refused():
    with pytest.raises(ValueError, match=r"no_decay='\*nrom\*' matches the name of no parameter"):
        lowbit.param_groups(Net(), no_decay=["*bias", "*nrom*"])


def test_embeddings_keep_their_format_whatever_decays():
    net = Net()
    groups = lowbit.param_groups(
        net, embeddings="float32", weight_decay=0.1, no_decay=["tokens.*", "body.bias"]
    )
    (tokens,) = [g for g in groups if g["param_names"] == ["tokens.weight"]]
    assert tokens["full_precision"] is True and tokens["weight_decay"] == 0.0
    (head,) = [g for g in groups if g["param_names"] == ["lm_head.weight"]]
    assert "full_precision" not in head and head["weight_decay"] == 0.1


def test_what_decays_comes_before_what_does_not():
    """In the group of embeddings and heads too, which is behind the others."""
    net = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    groups = lowbit.param_groups(net, weight_decay=0.1, no_decay=True)
    assert [g["param_names"] for g in groups] == [["0.weight"], ["0.bias", "1.weight", "1.bias"]]
    groups = lowbit.param_groups(Net(), weight_decay=0.1, no_decay=["*bias", "tokens.*"])
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0, 0.1, 0.0]
    assert [g["param_names"] for g in groups[2:]] == [["lm_head.weight"], ["tokens.weight"]]


def test_a_tied_parameter_has_all_of_its_names():
    net = Net()
    net.lm_head.weight = net.tokens.weight
    for pattern in ("lm_head.*", "tokens.*"):
        found = decays(lowbit.param_groups(net, weight_decay=0.1, no_decay=[pattern]))
        assert found[0.0] == ["tokens.weight"]


def test_equal_names_inside_of_a_wrapper_are_two_parameters():
    """A module called `module` is not a wrapper, and yet it is taken for one in names."""
    net = nn.Module()
    net.module, net.x = nn.Module(), nn.Linear(8, 8, bias=False)
    net.module.x = nn.LayerNorm((2, 8), bias=False)
    found = decays(lowbit.param_groups(net, weight_decay=0.1, no_decay=True))
    assert found == {0.0: ["module.x.weight"], 0.1: ["x.weight"]}


@pytest.mark.parametrize("nothing", [False, None, (), []])
def test_nothing_is_exempt(nothing):
    assert set(decays(lowbit.param_groups(Net(), weight_decay=0.1, no_decay=nothing))) == {0.1}


def test_a_number_is_not_a_pattern():
    with pytest.raises(TypeError, match="no_decay is a bool or patterns of names, not 3"):
        lowbit.param_groups(Net(), no_decay=3)


def test_weights_that_get_no_gradient_move_by_decay_alone():
    net = Net()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    opt = lowbit.AdamW(lowbit.param_groups(net, weight_decay=0.5, no_decay=True), lr=0.1)
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    opt.step()
    for name, p in net.named_parameters():
        kept = 0.95 if name in MATRICES else 1.0
        torch.testing.assert_close(p.detach(), before[name] * kept)


def test_the_shape_of_what_zero_3_has_emptied_decides():
    """DeepSpeed leaves `ds_shape` at a parameter, whose own shape is (0,)."""
    net = nn.Linear(8, 4)
    net.weight.ds_shape, net.weight.data = net.weight.shape, torch.empty(0)
    assert decays(lowbit.param_groups(net, weight_decay=0.1, no_decay=True)) == {
        0.0: ["bias"],
        0.1: ["weight"],
    }


COMPUTED = {
    "weight norm": torch.nn.utils.parametrizations.weight_norm,
    "spectral norm": torch.nn.utils.parametrizations.spectral_norm,
    "old weight norm": torch.nn.utils.weight_norm,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
@pytest.mark.parametrize("norm", COMPUTED)
def test_layers_whose_weight_is_computed_are_what_they_are(norm):
    """Muon steps neither their convolutions nor embeddings and heads, and formats reach these."""
    model = torch.nn.ModuleDict(
        {
            "conv": torch.nn.Conv1d(8, 16, 3),
            "up": torch.nn.ConvTranspose1d(8, 16, 3),
            "tok": torch.nn.Embedding(64, 16),
            "hidden": torch.nn.Linear(16, 16, bias=False),
            "lm_head": torch.nn.Linear(16, 64, bias=False),
        }
    )
    for layer in ("conv", "up", "tok", "lm_head"):
        COMPUTED[norm](model[layer])
    muon = [g for g in lowbit.muon_param_groups(model) if g["use_muon"]]
    assert [n for g in muon for n in g["param_names"]] == ["hidden.weight"]
    groups = lowbit.param_groups(model, heads="4bit", embeddings="bfloat16")
    formats = {n: g.get("state_format") for g in groups for n in g["param_names"]}
    for name, chosen in formats.items():
        wanted = {"lm_head": "4bit", "tok": "bfloat16"}.get(name.split(".")[0])
        assert chosen == wanted, name


def test_every_name_of_a_tied_parameter_counts():
    model = torch.nn.ModuleDict({n: torch.nn.Linear(16, 16, bias=False) for n in ("a", "router")})
    model["router"].weight = model["a"].weight
    groups = lowbit.muon_param_groups(model, adamw=["router.weight"])
    assert not any(g["use_muon"] for g in groups)
