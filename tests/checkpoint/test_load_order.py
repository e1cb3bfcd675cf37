"""Which parameter a number of a checkpoint means: it is known, or the load is refused. And what a
load says that restores nothing.
"""

import warnings
from importlib.util import find_spec

import pytest
import torch
from torch import nn

import lowbit
from tests.support.require import need

FROM_FILE = pytest.mark.usefixtures("ckpt")


class Words(nn.Module):
    """An embedding before, between and behind layers of one shape,
    so that a number taken for another often fits.
    """

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.tokens = nn.Embedding(500, 64)
        self.second = nn.Linear(64, 64)
        self.head = nn.Linear(64, 500, bias=False)


def layers(count=2):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(count)))


def stepped(opt, params):
    for p in params:
        p.grad = torch.randn_like(p)
    opt.step()
    return opt


def saved(tmp_path, opt):
    torch.save({"optimizer": opt.state_dict()}, tmp_path / "run.pt")
    return tmp_path / "run.pt"


def same_moments(opt, old, params):
    for p in params:
        assert torch.equal(opt.state[p]["exp_avg"], old.state[p]["exp_avg"])
        assert opt.state[p]["step"] == old.state[p]["step"]


def untouched(opt):
    return all(not t["exp_avg"].any() and t["step"] == 0 for t in opt.state.values())


@pytest.fixture
def words():
    torch.manual_seed(0)
    return Words()


# Numbers, through the model


@FROM_FILE
@pytest.mark.parametrize("names", [True, False])
def test_numbers_are_those_of_the_model(words, tmp_path, names):
    """torch.optim.AdamW(model.parameters()) into the groups that are recommended here."""
    old = stepped(torch.optim.AdamW(words.parameters(), lr=7e-3), words.parameters())
    groups = lowbit.param_groups(words)
    if not names:
        groups = [{k: v for k, v in g.items() if k != "param_names"} for g in groups]
    assert len(groups) == 2
    opt = lowbit.AdamW(groups, state_format="float32")
    lowbit.load_optimizer(opt, saved(tmp_path, old), model=words)
    same_moments(opt, old, words.parameters())
    assert [g["lr"] for g in opt.param_groups] == [7e-3] * 2


@FROM_FILE
def test_numbers_of_a_tied_weight_count_once(words, tmp_path):
    words.head.weight = words.tokens.weight
    old = stepped(torch.optim.AdamW(words.parameters()), words.parameters())
    named = [("head.weight", words.head.weight)]  # by its other name
    named += [(n, p) for n, p in words.named_parameters() if p is not words.head.weight]
    opt = lowbit.AdamW(named, state_format="float32")
    lowbit.load_optimizer(opt, saved(tmp_path, old), model=words)
    same_moments(opt, old, words.parameters())


@FROM_FILE
@pytest.mark.parametrize("given", ["all", "trained", "own"])
def test_numbers_count_what_the_old_optimizer_was_given(words, tmp_path, given):
    """All parameters, those that are trained,
    or those that this optimizer has: by how many there are.
    """
    words.first.requires_grad_(False)
    trained = [p for p in words.parameters() if p.requires_grad]
    of = {
        "all": list(words.parameters()),
        "trained": trained,
        "own": list(words.second.parameters()),
    }[given]
    old = stepped(torch.optim.AdamW(of), [p for p in of if p.requires_grad])
    groups = lowbit.param_groups(words)
    if given == "own":
        groups = [(n, p) for n, p in words.named_parameters() if n.startswith("second")][::-1]
    opt = lowbit.AdamW(groups, state_format="float32")
    lowbit.load_optimizer(opt, saved(tmp_path, old), model=words)
    same_moments(opt, old, trained if given != "own" else of)


@FROM_FILE
def test_numbers_that_are_not_the_models_are_refused(words, tmp_path):
    of = list(words.parameters())[:3]
    path = saved(tmp_path, stepped(torch.optim.AdamW(of), of))
    opt = lowbit.AdamW(lowbit.param_groups(words), state_format="float32")
    with pytest.raises(ValueError, match=r"numbers 3 parameters.*model that was given has 6"):
        lowbit.load_optimizer(opt, path, model=words)
    assert untouched(opt)


@FROM_FILE
@pytest.mark.parametrize("names", [True, False])
def test_shapes_that_fit_settle_nothing(tmp_path, names):
    """Layer 0 must not receive layer 1's moments: groups in another order and without names are
    refused, and model= settles it.
    """
    net = layers()
    old = stepped(torch.optim.AdamW(net.parameters()), net.parameters())
    path = saved(tmp_path, old)
    named = list(net.named_parameters())
    groups = [
        {"params": [named[1]] if names else [named[1][1]]},
        {"params": [named[0]] if names else [named[0][1]]},
    ]
    opt = lowbit.AdamW(groups, state_format="float32")
    with pytest.raises(ValueError, match=r"groups of \[2\].*here.*\[1, 1\].*model="):
        lowbit.load_optimizer(opt, path)
    with pytest.raises(
        ValueError,
        match=r"different number of parameter groups.*load_optimizer\(opt, path, model=model\)",
    ):
        opt.load_state_dict(old.state_dict())
    assert untouched(opt)
    lowbit.load_optimizer(opt, path, model=net)
    same_moments(opt, old, net.parameters())


@FROM_FILE
def test_one_group_in_another_order(tmp_path):
    """With model= numbers are the model's. Without, one group is taken in its order,
    as torch does.
    """
    net = layers()
    old = stepped(torch.optim.AdamW(net.parameters()), net.parameters())
    opt = lowbit.AdamW(list(net.parameters())[::-1], state_format="float32")
    lowbit.load_optimizer(opt, saved(tmp_path, old), model=net)
    same_moments(opt, old, net.parameters())
    again = lowbit.AdamW(list(net.parameters())[::-1], state_format="float32")
    again.load_state_dict(opt.state_dict())
    same_moments(again, old, net.parameters())


@FROM_FILE
def test_groups_without_names_are_no_order_of_a_model(words, tmp_path):
    """Which parameters were in which of two groups is in no file: they must be cut as here."""
    matrices = [p for p in words.parameters() if p.ndim == 2]
    others = [p for p in words.parameters() if p.ndim < 2]
    cut = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    old = stepped(torch.optim.AdamW(cut), words.parameters())
    path = saved(tmp_path, old)
    opt = lowbit.AdamW(words.named_parameters(), state_format="float32")
    with pytest.raises(ValueError, match=r"groups of \[4, 2\].*here.*\[6\].*same groups"):
        lowbit.load_optimizer(opt, path, model=words)
    assert untouched(opt)
    opt = lowbit.AdamW([{"params": matrices}, {"params": others}], state_format="float32")
    lowbit.load_optimizer(opt, path, model=words)
    same_moments(opt, old, words.parameters())


@FROM_FILE
def test_a_shape_that_does_not_fit_names_what_settles_it(words, tmp_path):
    old = stepped(torch.optim.AdamW(words.parameters()), words.parameters())
    path = saved(tmp_path, old)
    opt = lowbit.AdamW(list(words.parameters())[::-1], state_format="float32")
    with pytest.raises(ValueError, match=r"in this optimizer's order.*pass model="):
        lowbit.load_optimizer(opt, path)
    lowbit.load_optimizer(opt, path, model=words)
    same_moments(opt, old, words.parameters())


@FROM_FILE
def test_names_there_and_none_here(tmp_path):
    """A file that names its parameters,
    an optimizer that does not: its groups must be cut alike.
    """
    net = layers()
    old = stepped(torch.optim.AdamW(net.named_parameters()), net.parameters())
    path = saved(tmp_path, old)
    a, b = net.parameters()
    opt = lowbit.AdamW([{"params": [b]}, {"params": [a]}], state_format="float32")
    with pytest.raises(ValueError, match=r"groups of \[2\].*here.*\[1, 1\].*model="):
        lowbit.load_optimizer(opt, path)
    assert untouched(opt)
    lowbit.load_optimizer(opt, path, model=net)
    same_moments(opt, old, net.parameters())


@FROM_FILE
def test_state_without_groups(tmp_path):
    net = layers()
    old = stepped(torch.optim.AdamW(net.parameters()), net.parameters())
    torch.save({"optimizer": {"state": old.state_dict()["state"]}}, tmp_path / "run.pt")
    a, b = net.parameters()
    opt = lowbit.AdamW([{"params": [b]}, {"params": [a]}], state_format="float32")
    with pytest.raises(ValueError, match=r"no groups.*\[1, 1\].*model="):
        lowbit.load_optimizer(opt, tmp_path / "run.pt")
    lowbit.load_optimizer(opt, tmp_path / "run.pt", model=net)
    same_moments(opt, old, net.parameters())
    opt = lowbit.AdamW(net.parameters(), state_format="float32")
    lowbit.load_optimizer(opt, tmp_path / "run.pt")
    same_moments(opt, old, net.parameters())


# load_state_dict


def test_load_state_dict_goes_by_names_where_both_have_them():
    """Also of other groups, and in another order, which shapes would let pass."""
    net = layers(3)
    old = stepped(torch.optim.AdamW(net.named_parameters(), lr=7e-3), net.parameters())
    named = list(net.named_parameters())
    order = [name for name, _ in named]
    for groups, wanted in (
        (named[::-1], order[::-1]),
        ([{"params": named[2:]}, {"params": named[:2]}], order[2:] + order[:2]),
    ):
        opt = lowbit.AdamW(groups, state_format="float32")
        opt.load_state_dict(old.state_dict())
        same_moments(opt, old, net.parameters())
        assert {g["lr"] for g in opt.param_groups} == {7e-3}
        assert [name for g in opt.param_groups for name in g["param_names"]] == wanted


def test_load_state_dict_takes_torchs_numbers_with_fqns():
    """As torch.distributed.checkpoint hands them over: keys are names in this order, beside
    `param_names` of the old one.
    """
    net = layers()
    old = stepped(torch.optim.AdamW(net.named_parameters()), net.parameters())
    (a, _), (b, _) = net.named_parameters()
    content = old.state_dict()
    group = {**content["param_groups"][0], "params": [b, a], "param_names": [a, b]}
    opt = lowbit.AdamW(list(net.named_parameters())[::-1], state_format="float32")
    opt.load_state_dict(
        {"state": {a: content["state"][0], b: content["state"][1]}, "param_groups": [group]}
    )
    same_moments(opt, old, net.parameters())


def test_load_state_dict_refuses_names_that_contradict_the_order():
    net = layers(3)
    old = stepped(torch.optim.AdamW(net.named_parameters()), net.parameters())
    (a, p), (b, q), (_, r) = net.named_parameters()
    opt = lowbit.AdamW([(b, q), (a, p), ("new", r)], state_format="float32")
    with pytest.raises(ValueError, match=r"'0.weight'.*is parameter 0 there and 1 here"):
        opt.load_state_dict(old.state_dict())
    assert untouched(opt)
    opt = lowbit.AdamW([("m." + n, t) for n, t in net.named_parameters()], state_format="float32")
    opt.load_state_dict(old.state_dict())  # torch's rule: none of them is known here
    same_moments(opt, old, net.parameters())


def test_groups_of_other_sizes_say_what_settles_them():
    net = layers(3)
    a, b, c = net.parameters()
    old = stepped(torch.optim.AdamW([{"params": [a]}, {"params": [b, c]}]), net.parameters())
    opt = lowbit.AdamW([{"params": [a, b]}, {"params": [c]}], state_format="float32")
    with pytest.raises(ValueError, match=r"\[1, 2\].*here.*\[2, 1\].*load_optimizer"):
        opt.load_state_dict(old.state_dict())


@FROM_FILE
@pytest.mark.parametrize("load", ["load_state_dict", "file"])
def test_settings_that_differ_among_the_sources_are_kept(tmp_path, load):
    """A group here of parameters of two groups there: which decay it shall have is not known, so
    its own stays, and that is said.
    """
    net = layers()
    (n, a), (m, b) = net.named_parameters()
    old = torch.optim.AdamW(
        [{"params": [(n, a)], "weight_decay": 0.5}, {"params": [(m, b)], "weight_decay": 0.0}],
        lr=7e-3,
    )
    stepped(old, net.parameters())
    opt = lowbit.AdamW(net.named_parameters(), weight_decay=0.25, state_format="float32")
    with pytest.warns(UserWarning, match=r"group 0.*weight_decay.*0\.5, 0\.0.*0\.25"):
        if load == "file":
            lowbit.load_optimizer(opt, saved(tmp_path, old))
        else:
            opt.load_state_dict(old.state_dict())
    same_moments(opt, old, net.parameters())
    assert opt.param_groups[0]["weight_decay"] == 0.25 and opt.param_groups[0]["lr"] == 7e-3


@FROM_FILE
@pytest.mark.parametrize("key", ["lr", "betas", "eps", "weight_decay"])
def test_a_setting_that_is_none_is_kept(tmp_path, key):
    """None where a number belongs, as of transformers' rate in relative steps: nothing is known of
    it, so its own stays, and that is said.
    """
    net = layers()
    old = stepped(torch.optim.AdamW(net.named_parameters(), lr=7e-3), net.parameters())
    opt = lowbit.AdamW(
        net.named_parameters(),
        lr=0.5,
        eps=1e-3,
        betas=(0.5, 0.6),
        weight_decay=0.25,
        state_format="float32",
    )
    own = opt.param_groups[0][key]
    old.param_groups[0][key] = None
    with pytest.warns(UserWarning, match=f"group 0 of .* has None for {key}: this optimizer keeps"):
        lowbit.load_optimizer(opt, saved(tmp_path, old))
    assert opt.param_groups[0][key] == own
    other = "eps" if key == "lr" else "lr"
    assert opt.param_groups[0][other] == old.param_groups[0][other]
    same_moments(opt, old, net.parameters())


# Nothing to restore


@FROM_FILE
@pytest.mark.parametrize("load", ["load_state_dict", "file"])
def test_a_load_that_restores_nothing_says_so(tmp_path, load):
    net = layers()
    old = torch.optim.AdamW(net.named_parameters(), lr=7e-3)
    opt = stepped(lowbit.AdamW(net.named_parameters(), state_format="float32"), net.parameters())
    with pytest.warns(UserWarning, match=r"no state for any of the 2 parameters.*never stepped"):
        if load == "file":
            lowbit.load_optimizer(opt, saved(tmp_path, old))
        else:
            opt.load_state_dict(old.state_dict())
    assert untouched(opt) and opt.param_groups[0]["lr"] == 7e-3


def test_a_warning_points_at_the_caller():
    net = layers()
    opt = lowbit.AdamW(net.parameters())
    with pytest.warns(UserWarning, match="no state") as seen:
        opt.load_state_dict(torch.optim.AdamW(net.parameters()).state_dict())
    assert seen[0].filename == __file__


def test_what_has_nothing_to_restore_is_silent(tmp_path):
    """An SGD without momentum keeps nothing, a state of lowbit before its first step is one, and so
    is what comes without trained parameters.
    """
    net = layers()
    old = stepped(torch.optim.SGD(net.parameters(), lr=1.0), net.parameters())
    frozen = nn.Linear(64, 64).requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowbit.SGD(net.parameters(), lr=1.0).load_state_dict(old.state_dict())
        fresh = lowbit.AdamW(net.parameters())
        lowbit.AdamW(net.parameters()).load_state_dict(fresh.state_dict())
        lowbit.AdamW(frozen.parameters()).load_state_dict(
            torch.optim.AdamW(frozen.parameters()).state_dict()
        )


def test_state_under_other_keys_than_the_groups_is_refused():
    """As after a detour by JSON, which makes text of numbers."""
    net = layers()
    content = stepped(torch.optim.AdamW(net.parameters()), net.parameters()).state_dict()
    content["state"] = {str(key): value for key, value in content["state"].items()}
    opt = lowbit.AdamW(net.parameters(), state_format="float32")
    with pytest.raises(ValueError, match=r"state is under '0', '1'.*param_groups has 0, 1"):
        opt.load_state_dict(content)
    assert untouched(opt)


# State of others


BITSANDBYTES = {
    "step": 3,
    "state1": torch.zeros(64, 64, dtype=torch.uint8),
    "state2": torch.zeros(64, 64, dtype=torch.uint8),
    "qmap1": torch.zeros(256),
    "absmax1": torch.zeros(16),
}


@pytest.mark.parametrize(
    "peer, state",
    [
        ("bitsandbytes", BITSANDBYTES),
        ("bitsandbytes", {"__bnb_optimizer_quant_state__": {}, "step": 3}),
        ("bitsandbytes", {"step": 3, "state1": torch.zeros(64, 64), "state2": torch.zeros(64, 64)}),
        ("adafactor-8bit", {"step": 3, "row_var_q": torch.zeros(64)}),
        ("lpmm", {"step": 3, "exp_avg": torch.zeros(9, dtype=torch.int8), "qconfig": {}}),
    ],
)
def test_state_of_others_is_for_load_optimizer(peer, state):
    p = nn.Parameter(torch.zeros(64, 64))
    opt = lowbit.AdamW([p])
    content = {"state": {0: state}, "param_groups": [{"params": [0], "lr": 1e-3}]}
    with pytest.raises(ValueError) as caught:
        opt.load_state_dict(content)
    said = str(caught.value)
    assert peer in said and "lowbit.load_optimizer(opt, path)" in said
    assert "program that wrote it" not in said


def test_subclasses_of_torchao_are_for_load_optimizer():
    need("torchao", bool(find_spec("torchao")), "torchao is not installed")
    from torchao.optim.subclass_8bit import OptimState8bit

    p = nn.Parameter(torch.randn(64, 256))
    state = {"step": torch.tensor(1.0)}
    for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        state[name] = OptimState8bit.zeros(p.shape, signed=signed)
        state[name].copy_(torch.rand(p.shape))
    content = {"state": {0: state}, "param_groups": [{"params": [0], "lr": 1e-3}]}
    with pytest.raises(ValueError, match=r"torchao.*lowbit\.load_optimizer\(opt, path\)"):
        lowbit.AdamW([p]).load_state_dict(content)
    opt = lowbit.AdamW([p], state_format="float32")  # which they decode for themselves
    opt.load_state_dict(content)
    assert torch.equal(opt.state[p]["exp_avg"], state["exp_avg"].dequantize())


@FROM_FILE
def test_numbers_of_others_go_by_the_model_too(words, tmp_path):
    """bitsandbytes, whose optimizers keep no names."""
    state = {
        i: {"step": i + 1, "state1": torch.full_like(p, i + 1.0), "state2": torch.ones_like(p)}
        for i, p in enumerate(words.parameters())
    }
    group = {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "params": list(state),
    }
    torch.save({"state": state, "param_groups": [group]}, tmp_path / "run.pt")
    opt = lowbit.AdamW(lowbit.param_groups(words), state_format="float32")
    with pytest.raises(ValueError, match="model="):
        lowbit.load_optimizer(opt, tmp_path / "run.pt")
    lowbit.load_optimizer(opt, tmp_path / "run.pt", model=words)
    for i, p in enumerate(words.parameters()):
        assert opt.state[p]["step"] == i + 1 and (opt.state[p]["exp_avg"] == i + 1).all()


@FROM_FILE
def test_two_orders_that_fit_are_told(tmp_path):
    """Where every shape fits the order of the model and that of the optimizer,
    numbers alone say nothing.
    """

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(64, 64)
            self.first = nn.Linear(64, 64, bias=False)
            self.second = nn.Linear(64, 64, bias=False)

    model = Tied()
    old = stepped(torch.optim.AdamW(model.parameters()), model.parameters())
    opt = lowbit.AdamW(lowbit.param_groups(model), state_format="float32")
    with pytest.warns(
        UserWarning, match="every shape fits both: 'tokens.weight' would be 'first.weight'"
    ):
        lowbit.load_optimizer(opt, saved(tmp_path, old), model=model)
    same_moments(opt, old, model.parameters())


# Numbers of another program's groups


@FROM_FILE
@pytest.mark.parametrize("file", [False, True])
def test_numbers_of_the_groups_of_another_program(words, tmp_path, file):
    """As of a Trainer: two groups, decayed or not, where here are four."""
    named = dict(words.named_parameters())
    order = [[n for n, p in named.items() if (p.ndim > 1) == decays] for decays in (True, False)]
    groups = [{"params": [named[n] for n in names]} for names in order]
    old = stepped(torch.optim.AdamW(groups, lr=7e-3), words.parameters())
    here = []
    for group in lowbit.param_groups(words):
        for names in order:
            both = [n for n in group["param_names"] if n in names]
            if both:
                here.append({**group, "params": [named[n] for n in both], "param_names": both})
    assert len(here) == 3
    opt = lowbit.AdamW(here, state_format="float32")
    with pytest.raises(ValueError, match="different number of parameter groups"):
        opt.load_state_dict(old.state_dict())
    opt.numbered_groups = order
    if file:
        lowbit.load_optimizer(opt, saved(tmp_path, old))
    else:
        opt.load_state_dict(old.state_dict())
    same_moments(opt, old, words.parameters())
    assert [group["lr"] for group in opt.param_groups] == [7e-3] * 3


@FROM_FILE
def test_numbers_of_another_program_are_taken_once(tmp_path):
    """Found by its order in the file,
    state is in the optimizer's own: the load must not reorder it again.
    """
    net = layers()
    first, second = net.parameters()
    old = stepped(torch.optim.AdamW([second, first]), net.parameters())
    opt = lowbit.AdamW(net.named_parameters(), state_format="float32")
    opt.numbered_groups = [["1.weight", "0.weight"]]
    lowbit.load_optimizer(opt, saved(tmp_path, old))
    same_moments(opt, old, net.parameters())
