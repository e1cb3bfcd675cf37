"""Groups that `param_groups` and `muon_param_groups` make: what decays, and what counts as an
embedding, a head or a convolution.
"""

import fnmatch
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

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


def test_an_option_that_is_nearly_an_argument_is_refused():
    """It would become an entry of the groups that nobody reads: norms would decay in silence."""
    net = nn.Linear(8, 8)
    for make in (lowbit.param_groups, lowbit.muon_param_groups):
        for given, meant in [("nodecay", "no_decay"), ("head", "heads"), ("embedding", "embed")]:
            with pytest.raises(TypeError, match=rf"{given}'; did you mean '{meant}"):
                make(net, **{given: True})
        assert make(net, name="all", lr_decay=0.1)[0]["name"] == "all"
        for own in ("embedding_lr", "embeddings_lr", "head_lr", "adamw_lr"):
            assert make(net, **{own: 0.1})[0][own] == 0.1


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


def test_muon_refuses_what_zero_3_has_emptied():
    """It made AdamW's of every matrix, without a word."""
    net = nn.Linear(8, 4)
    for p in net.parameters():
        p.ds_shape, p.data = p.shape, torch.empty(0)
    groups = lowbit.muon_param_groups(net)
    assert {n: g["use_muon"] for g in groups for n in g["param_names"]} == {
        "weight": True,
        "bias": False,
    }
    for make in (lambda: lowbit.MuonWithAdamW(groups), lambda: lowbit.Muon([net.weight])):
        with pytest.raises(ValueError, match=r"partitioned by DeepSpeed's ZeRO 3.* fully_shard"):
            make()
    lowbit.AdamW(lowbit.param_groups(net))  # waits for `bind`


def test_muon_steps_no_bias_and_no_norm():
    """Biases of experts, such as GPT-OSS's, have two dimensions, and a norm may have."""
    groups = lowbit.muon_param_groups(Net())
    by_muon = [n for g in groups if g["use_muon"] for n in g["param_names"]]
    assert by_muon == ["body.weight", "experts.down"]


@pytest.mark.parametrize("state_format", ["8bit", "float32"])
def test_a_bias_that_muon_stepped_is_not_taken_for_adamws(state_format):
    """A checkpoint from before biases of experts were AdamW's: loading it says which it is."""
    net = nn.Module()
    net.down, net.down_bias = nn.Parameter(torch.ones(2, 96, 64)), nn.Parameter(torch.ones(2, 64))
    named = list(net.named_parameters())
    options = {"state_format": state_format, "min_numel": 0}
    old = lowbit.MuonWithAdamW([{"params": named, "use_muon": True}], **options)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    old.step()
    opt = lowbit.MuonWithAdamW(lowbit.muon_param_groups(net), **options)
    with pytest.raises(ValueError, match=r"'down_bias'.*into a group with use_muon=True"):
        opt.load_state_dict(old.state_dict())
    again = lowbit.MuonWithAdamW([{"params": named, "use_muon": True}], **options)
    again.load_state_dict(old.state_dict())


# ---- layers whose weight is computed from other parameters ----


class Halved(nn.Module):
    """A parametrization with a matrix of its own, inside of another module."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Sequential(nn.Linear(64, 300, bias=False))

    def forward(self, weight):
        return weight / 2 + self.shift[0].weight


def halved(layer):
    return parametrize.register_parametrization(layer, "weight", Halved())


def pruned(layer):
    return prune.l1_unstructured(layer, "weight", 0.5)


def legacy_weight_norm(layer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer)


WAYS = [
    parametrizations.weight_norm,
    parametrizations.spectral_norm,
    parametrizations.orthogonal,
    halved,
    legacy_weight_norm,
    nn.utils.spectral_norm,
    pruned,
]


def of(groups, key):
    """The names of the parameters in groups that have a setting."""
    return {name for group in groups if group.get(key) for name in group["param_names"]}


def inside(net, layer):
    return {n for n, _ in net.named_parameters() if n.startswith(layer) and not n.endswith(".bias")}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layer", ["tok", "lm_head"])
def test_what_an_embedding_or_a_head_is_computed_from_counts_as_it(way, layer):
    net = nn.ModuleDict(
        {"tok": nn.Embedding(300, 64), "body": nn.Linear(64, 64), "lm_head": nn.Linear(64, 300)}
    )
    way(net[layer])
    parametrizations.weight_norm(net["body"])
    wanted = inside(net, layer)
    assert wanted
    assert of(lowbit.muon_param_groups(net), "use_muon") == {
        "body.parametrizations.weight.original1"
    }
    formats = {"embeddings": "float32"} if layer == "tok" else {"heads": "float32"}
    assert of(lowbit.param_groups(net, **formats), "full_precision") == wanted
    (wide,) = [g for g in lowbit.param_groups(net, **formats) if g.get("full_precision")]
    assert wide["rank"] is None


@pytest.mark.parametrize("way", [each for each in WAYS if each is not halved])
@pytest.mark.parametrize("kind", [nn.Conv1d, nn.ConvTranspose1d])
def test_adamw_steps_what_a_convolution_is_computed_from(way, kind):
    net = nn.Sequential(way(kind(8, 16, 3)), nn.Linear(16, 16))
    assert of(lowbit.muon_param_groups(net), "use_muon") == {"1.weight"}


def test_no_weight_is_computed():
    """Reading one makes a step of spectral norm's power iteration, in a buffer."""
    net = Net()
    for layer in (net.tokens, net.lm_head):
        parametrizations.spectral_norm(layer)
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    lowbit.param_groups(net, no_decay=True)
    lowbit.muon_param_groups(net)
    lowbit.estimate(net, lowbit.AdamW)
    assert before and all(torch.equal(b, before[name]) for name, b in net.named_buffers())


@pytest.mark.parametrize("layer", ["tokens", "lm_head"])
def test_a_parametrized_weight_may_be_tied(layer):
    """To an embedding: then it is one, with the embeddings' format."""
    net = Net()
    net.lm_head.weight = net.tokens.weight
    parametrizations.spectral_norm(getattr(net, layer))
    (name,) = [n for n, p in net.named_parameters() if p.shape == (300, 64)]
    for make in (lowbit.param_groups, lowbit.muon_param_groups):
        assert of(make(net, embeddings="float32"), "full_precision") == {name}
        assert not of(make(net, heads="float32"), "full_precision")
    assert name not in of(lowbit.muon_param_groups(net), "use_muon")


def test_parametrized_norms_do_not_decay():
    net = Net()
    parametrizations.spectral_norm(net.plane)
    found = decays(lowbit.param_groups(net, weight_decay=0.1, no_decay=True))
    assert "plane.parametrizations.weight.original" in found[0.0] and found[0.1] == MATRICES


def test_lazy_layers_are_known_by_their_modules():
    net = nn.ModuleDict(
        {"conv": nn.LazyConv1d(8, 3), "head": nn.LazyLinear(300), "body": nn.Linear(8, 8)}
    )
    groups = lowbit.muon_param_groups(net, heads="float32", adamw=["head.bias"])
    assert of(groups, "use_muon") == {"body.weight"}
    assert of(groups, "full_precision") == {"head.weight"}


def test_adamw_knows_all_names_of_a_tied_parameter():
    net = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in ("a", "b", "router")})
    net["router"].weight = net["a"].weight
    for pattern in ("router.weight", "a.*"):
        assert of(lowbit.muon_param_groups(net, adamw=[pattern]), "use_muon") == {"b.weight"}
    net["embedding_of_b"] = nn.Linear(8, 8, bias=False)
    net["embedding_of_b"].weight = net["b"].weight
    assert of(lowbit.muon_param_groups(net), "use_muon") == {"a.weight"}
