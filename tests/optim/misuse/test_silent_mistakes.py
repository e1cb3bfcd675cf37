"""Mistakes that torch's optimizers let pass: each is an error that says what to write, or one
warning, and docs/troubleshooting.md lists it.
"""

import copy
import re
import warnings
from collections import OrderedDict

import pytest
import torch
from torch import nn

import lowbit
from tests.optim.misuse import late_worker
from tests.support.paths import ROOT


def net():
    return nn.Sequential(nn.Linear(96, 64), nn.Linear(64, 40))


def build(**options):
    return lowbit.AdamW(net().named_parameters(), **options)


def trained(opt):
    for group in opt.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    opt.step()
    return opt


def on_meta():
    with torch.device("meta"):
        return trained(lowbit.AdamW(net().named_parameters()))


def named_alike():
    return lowbit.AdamW([("a", nn.Parameter(torch.ones(3))), ("a", nn.Parameter(torch.ones(3)))])


def load_whole(opt=lowbit.AdamW, key="optimizer", value=None):
    saved = trained(opt(net().named_parameters())).state_dict()
    build().load_state_dict({"model": net().state_dict(), key: value(saved) if value else saved})


def load_other_shapes(make=lowbit.AdamW):
    saved = trained(make(net().named_parameters())).state_dict()
    other = nn.Sequential(nn.Linear(96, 64), nn.Linear(64, 48))
    lowbit.AdamW(other.named_parameters()).load_state_dict(saved)


def load_after_float32_weights():
    model = nn.Linear(96, 64, bias=False)
    saved = trained(lowbit.AdamW(model.named_parameters())).state_dict()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    opt = lowbit.AdamW(model.bfloat16().named_parameters(), param_format="bfloat16_split16")
    lowbit.set_fp32_model_state_dict(model, opt, weights)
    opt.load_state_dict(saved)


def unfreeze():
    model = net()
    model[0].requires_grad_(False)
    opt = lowbit.AdamW(lowbit.param_groups(model))
    model[0].requires_grad_(True)
    for _ in range(64):
        model(torch.ones(1, 96)).sum().backward()
        opt.step()


def load_float32_into_8_bits():
    model = net()
    wide = lowbit.AdamW(model.named_parameters(), full_precision=["0.*"])
    wide.init_state()
    lowbit.AdamW(model.named_parameters()).load_state_dict(wide.state_dict())


def load_of_another_rule(there, here):
    saved = trained(there(net().named_parameters())).state_dict()
    here(net().named_parameters()).load_state_dict(saved)


def load_without_correction_bits():
    model = nn.Linear(96, 64, bias=False).bfloat16()
    opt = trained(lowbit.AdamW(model.named_parameters(), param_format="bfloat16_split16"))
    lowbit.AdamW(model.named_parameters()).load_state_dict(opt.state_dict())


# Mistake -> (what is raised, or warned of; what the message must say).
MISTAKES = {
    "a pattern of a name that is not there": (
        lambda: build(full_precision=["*embde*", "0.*"]),
        UserWarning,
        r"full_precision='\*embde\*' matches the name of no parameter.* such as '\*embed\*'",
    ),
    "an entry of a group that is nearly an option": (
        lambda: lowbit.AdamW([{"params": net().parameters(), "state_fromat": "4bit"}]),
        UserWarning,
        "entry 'state_fromat', which is not an option, so it has no effect; "
        "did you mean 'state_format'",
    ),
    "an argument that is nearly an option": (
        lambda: build(state_fromat="4bit"),
        TypeError,
        (
            r"AdamW.__init__\(\) got an unexpected keyword argument 'state_fromat'; did you mean "
            r"'state_format'"
        ),
    ),
    "an argument of an optimizer under a peer's name": (
        lambda: lowbit.AdamW8bit(net().parameters(), lrr=1e-3),
        TypeError,
        "unexpected keyword argument 'lrr'; did you mean 'lr'",
    ),
    "an argument that is none": (
        lambda: build(zzz=1),
        TypeError,
        "unexpected keyword argument 'zzz'$",
    ),
    "two names alike": (
        named_alike,
        UserWarning,
        r"two parameters are named 'a': .*Give each its own, such as \(f'first.\{name\}', p\)",
    ),
    "no gradient": (
        lambda: build().step(),
        UserWarning,
        (
            r"no gradient on any of the 4 parameters, so this step trains nothing.* fully_shard.* "
            r"build the optimizer from the model"
        ),
    ),
    "a parameter that was left out frozen": (
        unfreeze,
        UserWarning,
        (
            r"does not train '0.weight' and 1 more: frozen when .*opt.add_param_group\(.* from "
            r"model.named_parameters\(\)"
        ),
    ),
    "a step on the meta device": (
        on_meta,
        RuntimeError,
        r"parameter '0.weight' is on the meta device.*to_empty\(device=",
    ),
    "a model for its parameters": (
        lambda: lowbit.AdamW(net()),
        TypeError,
        r"AdamW takes parameters, not a model \(Sequential\): pass .*model.parameters\(\)",
    ),
    "a model in a group": (
        lambda: lowbit.Lion8bit([{"params": net()}]),
        TypeError,
        r"Lion8bit takes parameters, not a model \(Sequential\)",
    ),
    "8bits": (
        lambda: build(state_format="8bits"),
        ValueError,
        "named '8bits'; did you mean '8bit'\\? Presets are 8bit, ",
    ),
    "a number of bits": (
        lambda: build(state_format=8),
        ValueError,
        "8 is not a state format; did you mean '8bit'",
    ),
    "a whole checkpoint": (
        load_whole,
        ValueError,
        (
            r"a whole checkpoint.* holds 'model', 'optimizer' and no .*\. Call "
            r"load_state_dict\(checkpoint\['optimizer'\]\)"
        ),
    ),
    "a model's state dict": (
        lambda: build().load_state_dict(net().state_dict()),
        ValueError,
        r"the state dict of a model, not of an optimizer: .*model.load_state_dict",
    ),
    "a state dict without state": (
        lambda: build().load_state_dict({"param_groups": []}),
        ValueError,
        r"not an optimizer's state dict: it holds 'param_groups' and no 'state'",
    ),
    "a path for a state dict": (
        lambda: build().load_state_dict("opt.pt"),
        TypeError,
        r"takes the dict that state_dict\(\) returns, not str: lowbit.load_optimizer\(opt, path\)",
    ),
    "the state of another optimizer": (
        lambda: build().load_state_dict(
            trained(lowbit.Lion(net().named_parameters())).state_dict()
        ),
        ValueError,
        r"it has no exp_avg_sq.*It has the moments of lowbit's .*'lion'.*: build the optimizer",
    ),
    "an optimizer loaded after float32 weights": (
        load_after_float32_weights,
        UserWarning,
        (
            r"no correction bits for the weights, so those of the optimizer are cleared.*load the "
            r"optimizer first"
        ),
    ),
    "float32 state loaded into 8 bits": (
        load_float32_into_8_bits,
        UserWarning,
        (
            r"^the saved groups keep float32 state for '0.weight', .* was converted to this "
            r"optimizer's format.*embeddings='float32'.*full_precision="
        ),
    ),
    "state of another rule": (
        lambda: load_of_another_rule(lowbit.AdamW, lowbit.Lion),
        ValueError,
        (
            r"^parameter '0.weight': state\[0\] keeps 'exp_avg_sq', which the rule here, 'lion', "
            r"does not: it is another optimizer's"
        ),
    ),
    "correction bits that this optimizer does not keep": (
        load_without_correction_bits,
        UserWarning,
        (
            r"^the state that is loaded has correction bits for 'weight', and this optimizer keeps "
            r"none.* param_format='bfloat16_split16'"
        ),
    ),
    "other shapes": (
        load_other_shapes,
        ValueError,
        (
            r"^parameter '1.weight': state\[2\]\['exp_avg'\] has the shape \(40, 64\), and here "
            r"it is \(48, 64\): load a checkpoint of this model"
        ),
    ),
}


@pytest.mark.parametrize("there, here", [("AdamW", "SGD"), ("LAMB", "Lion"), ("Adagrad", "SGD")])
def test_state_of_another_rule_changes_nothing(there, here):
    saved = trained(getattr(lowbit, there)(net().named_parameters(), lr=1e-3)).state_dict()
    opt = trained(getattr(lowbit, here)(net().named_parameters(), lr=1e-4))
    with pytest.raises(ValueError, match="is another optimizer's"):
        opt.load_state_dict(saved)
    assert opt.param_groups[0]["lr"] == 1e-4


def said(mistake):
    """The message of a mistake. It is raised or warned of once,
    with the class that MISTAKES has.
    """
    act, kind, _ = MISTAKES[mistake]
    if issubclass(kind, Warning):
        with pytest.warns(kind) as caught:
            act()
        (one,) = caught
        assert one.filename == __file__, "the warning does not point at the caller"
        return str(one.message)
    with pytest.raises(kind) as raised:
        act()
    return str(raised.value)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_says_what_to_write(mistake):
    message = said(mistake)
    assert re.search(MISTAKES[mistake][2], message), message
    assert "None" not in message


def test_the_page_lists_every_message_once():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    page = page[: page.index("## Files")]  # tests/ckpt/test_friendly.py
    rows = re.findall(r"^\| `(.*?)` \|", page, re.M)
    patterns = {row: re.compile(".*".join(map(re.escape, row.split("..."))) + "$") for row in rows}
    seen = set()
    for mistake in MISTAKES:
        message = said(mistake)
        found = [row for row, pattern in patterns.items() if pattern.match(message)]
        assert len(found) == 1, (message, found)
        seen.update(found)
    assert set(rows) - seen == {
        "lowbit has no ...: write ...",  # tests/optim/test_compat.py
        "ranks of one process group give this optimizer different parameters, or the same in "
        "another order: ...",  # this and the next: tests/sharding/test_order.py
        "flat slice ... is ... on rank 0 and ... on rank ...: pass the same names and shapes in "
        "the same order ...",
    }


# What is not a mistake


@pytest.fixture
def silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.usefixtures("silent")
def test_entries_of_the_programs_own_are_kept():
    own = (
        "initial_lr",
        "no_weight_decay",
        "use_weight_decay",
        "lr_scale",
        "name",
        "layer",
        "max_lr",
        "eps2",
        "swa_lr",
        "betas_",
        "d",
    )
    opt = lowbit.AdamW([{"params": net().parameters(), **dict.fromkeys(own, 1)}])
    assert all(opt.param_groups[0][key] == 1 for key in own)


@pytest.mark.usefixtures("silent")
def test_patterns_that_match_in_some_group_say_nothing():
    a, b = (list(nn.Linear(96, 64).named_parameters(name)) for name in "ab")
    opt = lowbit.AdamW([{"params": a}, {"params": b}], full_precision="a.*")
    opt.add_param_group({"params": [("c", nn.Parameter(torch.ones(3)))]})
    lowbit.AdamW([{"params": a, "full_precision": True}, {"params": b}], full_precision=["b.*"])


def test_each_warning_comes_once():
    with pytest.warns(UserWarning) as caught:
        opt = build(full_precision="none.*")
        opt.add_param_group({"params": [("c", nn.Parameter(torch.ones(3)))], "lrr": 1})
        opt.add_param_group({"params": [("d", nn.Parameter(torch.ones(3)))], "lrr": 1})
        for _ in range(3):
            opt.step()
        trained(opt).zero_grad()
        opt.step()
    assert [str(w.message).split()[0] for w in caught] == ["full_precision='none.*'", "a", "step()"]


def test_a_step_after_others_without_a_gradient_is_said_too():
    opt = trained(build())
    trained(opt).zero_grad()
    with pytest.warns(UserWarning, match="no gradient on any"):
        opt.step()


@pytest.mark.usefixtures("silent")
def test_a_pattern_that_names_what_a_group_keeps_anyway_says_nothing():
    model = nn.Sequential(OrderedDict(embed=nn.Embedding(100, 64), up=nn.Linear(64, 64)))
    lowbit.AdamW(lowbit.param_groups(model), full_precision=("embed*",))


@pytest.mark.usefixtures("silent")
def test_a_step_that_has_a_reason_to_do_nothing_says_nothing():
    frozen = net().requires_grad_(False)
    lowbit.AdamW(frozen.parameters()).step()
    lowbit.AdamW([nn.Parameter(torch.empty(0, 4))]).step()
    part = build()
    part.param_groups[0]["params"][0].grad = torch.ones(64, 96)  # the others have none
    part.step()
    skipped = build()
    skipped.found_inf = torch.ones(())
    trained(skipped)
    model = net()
    opt = lowbit.AdamW(model.parameters())
    lowbit.step_in_backward(model, opt)
    for _ in range(3):
        model(torch.ones(2, 96)).sum().backward()
        opt.step()


@pytest.mark.usefixtures("silent")
def test_a_copy_has_no_more_to_say_than_the_original():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = build(full_precision="none.*")
    opt = copy.deepcopy(first)
    opt.load_state_dict(opt.state_dict())


@pytest.mark.usefixtures("silent")
def test_lists_of_parameters_may_be_modules():
    lowbit.AdamW(nn.ParameterList([nn.Parameter(torch.ones(3))]))


def test_a_parameter_given_twice_is_torchs_warning():
    p = nn.Parameter(torch.ones(3))
    with pytest.warns(UserWarning) as caught:
        lowbit.AdamW([("a", p), ("a", p)])
    assert ["duplicate parameters" in str(w.message) for w in caught] == [True]


@pytest.mark.parametrize(
    "wrong, right",
    [
        ("8-bit", "8bit"),
        (4, "4bit"),
        ("int8", "8bit"),
        ("uint8", "8bit"),
        (torch.uint8, "8bit"),
        (torch.bfloat16, "bfloat16"),
        ("bf16", "bfloat16"),
        ("fp32", "float32"),
        (32, "float32"),
        (torch.float8_e4m3fn, "float8_e4m3"),
        ("dynamic9", "dynamic8"),
        ("nope", None),
        (True, None),
    ],
)
def test_formats_that_are_meant(wrong, right):
    with pytest.raises(ValueError) as raised:
        build(state_format=wrong)
    found = re.findall(r"did you mean '(.*?)'", str(raised.value))
    assert found == ([right] if right else [])


@pytest.mark.parametrize(
    "key, value, where",
    [
        ("optim", None, "['optim']"),
        ("optimizer_state_dict", None, "['optimizer_state_dict']"),
        ("optimizer_states", lambda d: [d], "['optimizer_states'][0]"),
    ],
)
def test_a_whole_file_says_which_key(key, value, where):
    for opt in (lowbit.AdamW, torch.optim.AdamW):
        with pytest.raises(ValueError, match=re.escape(f"Call load_state_dict(checkpoint{where})")):
            load_whole(opt, key, value)


@pytest.mark.parametrize("make", [lowbit.AdamW, torch.optim.AdamW])
def test_a_shape_that_does_not_fit_is_named(make):
    with pytest.raises(ValueError, match=r"^parameter '1.weight': state\[2\]\['exp_avg"):
        load_other_shapes(make)


@pytest.mark.parametrize("take", [lowbit.clip_grad_norm_, lowbit.clip_scale])
def test_gradients_of_a_model_are_clipped_by_its_parameters(take):
    with pytest.raises(TypeError, match=r"not a model \(Sequential\): pass model.parameters\(\)$"):
        take(net(), 1.0)
    weights = nn.ParameterList([nn.Parameter(torch.ones(3))])  # a list of them, though a module
    take(weights, 1.0)


@pytest.mark.parametrize(
    "given, said",
    [
        ("run.pt", "not str: lowbit.load_optimizer(opt, path) reads a file"),
        (build(), "not AdamW: call its state_dict()"),
        ([], "not list"),
    ],
)
def test_what_load_state_dict_takes(given, said):
    with pytest.raises(TypeError, match=rf"^load_state_dict takes the dict .* {re.escape(said)}$"):
        build().load_state_dict(given)


def test_formats_of_float16_weights_that_are_meant():
    halves = torch.nn.Linear(64, 64).half()
    with pytest.raises(ValueError, match="did you mean 'float16_kahan'"):
        lowbit.AdamW(halves.named_parameters(), param_format="kahan")


@pytest.mark.parametrize("rounding", ["stochastic", "exact"])
def test_the_gradients_of_a_model_are_accumulated(rounding):
    with pytest.raises(
        TypeError, match=r"^accumulate takes the model, not generator: lowbit\.accum"
    ):
        lowbit.accumulate(net().parameters(), rounding=rounding)


@pytest.mark.parametrize(
    "wrong, said",
    [
        ("kahan", "no parameter format is named 'kahan'; did you mean 'bfloat16_kahan'? "),
        ("bfloat16_khan", "; did you mean 'bfloat16_kahan'? "),
        ("autos", "; did you mean 'auto'? "),
        ("Kahan", "no parameter format is named 'Kahan'; did you mean 'bfloat16_kahan'? "),
        ("zzz", "no parameter format is named 'zzz'; there are auto, nearest, float32, "),
        (None, "no parameter format is named None; there are auto, nearest, float32, "),
        (torch.bfloat16, "no parameter format is named torch.bfloat16"),
    ],
)
def test_formats_of_weights_that_are_meant(wrong, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        build(param_format=wrong)


def test_fully_shard_after_the_optimizer_is_said(pool):
    for messages, changed in pool.run(2, late_worker.steps_of_what_was_sharded_later):
        assert not changed and len(messages) == 1 and "fully_shard" in messages[0]


def test_a_tied_parameter_under_two_names_is_said():
    model = net()
    model.append(model[1])
    with (
        pytest.warns(UserWarning, match="duplicate parameters"),
        pytest.raises(ValueError, match=r"1.weight' is tied to '2.weight' and listed twice"),
    ):
        lowbit.AdamW(model.named_parameters(remove_duplicate=False))
