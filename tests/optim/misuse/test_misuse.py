"""What programs do to an optimizer between its steps, and what it must not answer in silence."""

import copy
import os
import pickle
import re
import subprocess
import sys

import pytest
import torch

import lowbit
from tests.optim.misuse import late_worker


def stepped(make=lowbit.AdamW, **options):
    p = torch.nn.Parameter(torch.linspace(-1, 1, 64 * 96).reshape(64, 96))
    opt = make([p], **options)
    p.grad = torch.full_like(p, 0.5)
    opt.step()
    return p, opt


def test_torchs_default_device_is_for_other_tensors():
    p, opt = stepped()
    before = p.detach().clone()
    with torch.device("meta"):
        opt.forget_step()
        opt.step()
        q = torch.nn.Parameter(torch.ones(64, 96, device="cpu"))
        other = lowbit.AdamW([q])
        q.grad = torch.ones(64, 96, device="cpu")
        other.step()
    assert not torch.equal(p, before) and float(opt.state[p]["step"]) == 2
    assert float(other.state[q]["step"]) == 1 and float(q[0, 0]) != 1.0


def test_adafactor_takes_up_momentum():
    p, opt = stepped(lowbit.Adafactor)
    opt.param_groups[0]["beta1"] = 0.9
    opt.step()
    assert any(key.startswith("exp_avg") for key in opt.state[p])


def test_a_layout_that_is_changed_behind_the_state_is_refused():
    p, opt = stepped()
    opt.param_groups[0]["state_format"] = "4bit"
    for call in (opt.step, opt.state_dict):
        with pytest.raises(
            ValueError, match="state_format='4bit', but its state was laid out for '8bit'"
        ):
            call()
    opt.param_groups[0]["state_format"] = "8bit"
    opt.step()
    assert float(opt.state[p]["step"]) == 2


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_answers_and_steps(again):
    _, opt = stepped()
    twin = again(opt)
    twin.stats()
    p = twin.param_groups[0]["params"][0]
    p.grad = torch.ones_like(p)
    twin.step()
    assert float(twin.state[p]["step"]) == 2


@pytest.mark.parametrize("options", [{"full_precision": 5}, {"lr": "1e-3"}, {"lr": None}])
def test_a_group_that_is_refused_leaves_nothing(options):
    p, opt = stepped()
    with pytest.raises(TypeError, match="should be"):
        opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], **options})
    assert len(opt.param_groups) == 1
    opt.step()
    assert float(opt.state[p]["step"]) == 2


def test_a_learning_rate_in_quotes_is_refused():
    with pytest.raises(TypeError, match="lr should be a number"):
        lowbit.AdamW([torch.nn.Parameter(torch.ones(3))], lr="1e-3")


@pytest.mark.parametrize("seed", [1.5, "3", None, 1 << 64])
def test_a_seed_that_is_none_is_refused_at_once(seed):
    _, opt = stepped()
    group = {"params": [torch.nn.Parameter(torch.ones(3))], "seed": seed}
    for build in (lambda: stepped(seed=seed), lambda: opt.add_param_group(group)):
        with pytest.raises((TypeError, ValueError), match="seed should"):
            build()


@pytest.mark.parametrize(
    "make", [lowbit.AdamW, lowbit.Lion, lowbit.LAMB, lowbit.AdEMAMix, lowbit.CAME, lowbit.APOLLO]
)
@pytest.mark.parametrize("betas", [0.9, (0.9,), (0.9, 0.99, 0.999, 0.9999), "bb"])
def test_another_number_of_betas_is_refused_at_once(make, betas):
    with pytest.raises(TypeError, match=r"betas should be [23] numbers but is"):
        make([torch.nn.Parameter(torch.ones(3))], betas=betas)


def test_patterns_of_names_without_names_are_refused():
    params = [torch.nn.Parameter(torch.ones(64, 96)) for _ in range(2)]
    with pytest.raises(ValueError, match=r"embed.* is compared with names.*named_parameters"):
        lowbit.AdamW(params, full_precision=["*embed*"])
    with pytest.raises(ValueError, match=r"attn.* only numbers, 0 to 1; pass.*named_parameters"):
        lowbit.AdamW(params, overrides=lowbit.override("*.attn.*", state_format="4bit"))
    lowbit.AdamW(params, full_precision=["*"], overrides=lowbit.override("1", state_format="4bit"))


@pytest.mark.parametrize("pattern", ["embed", "*embed*"])
def test_a_pattern_of_a_group_without_names_is_refused(pattern):
    group = {"params": [torch.nn.Parameter(torch.ones(64, 96))], "full_precision": pattern}
    with pytest.raises(ValueError, match=rf"full_precision='{re.escape(pattern)}' is compared"):
        lowbit.AdamW([group])


def test_patterns_that_are_no_text_are_refused():
    with pytest.raises(TypeError, match=r"patterns of names.*\[1\]"):
        lowbit.AdamW(torch.nn.Linear(96, 64).named_parameters(), full_precision=[1])


def test_param_groups_takes_the_model():
    with pytest.raises(TypeError, match="takes the model, not generator"):
        lowbit.param_groups(torch.nn.Linear(96, 64).parameters())


@pytest.mark.parametrize("named", [True, False])
def test_a_model_that_is_converted_behind_the_optimizer_is_named(named):
    model = torch.nn.Linear(96, 64)
    opt = lowbit.AdamW(model.named_parameters() if named else model.parameters())
    for _ in range(2):  # the second from what the first prepared
        model(torch.ones(2, 96)).sum().backward()
        opt.step()
    before = {k: v.clone() for k, v in opt.state[model.weight].items()}
    model.bfloat16()
    model(torch.ones(2, 96).bfloat16()).sum().backward()
    what = "'weight'" if named else "0"
    with pytest.raises(
        RuntimeError, match=rf"parameter {what} is bfloat16 \(64, 96\) now, but .* for float32"
    ):
        opt.step()
    model.float()
    model.weight.data = torch.ones(32, 96)
    model.weight.grad = torch.ones(32, 96)
    with pytest.raises(RuntimeError, match=rf"parameter {what} is float32 \(32, 96\) now"):
        opt.step()
    assert all(torch.equal(before[k], v) for k, v in opt.state[model.weight].items())


def test_messages_do_not_tell_where_the_package_was_built():
    p = torch.nn.Parameter(torch.ones(3))
    opt = lowbit.AdamW([p])
    p.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match="grad_scale must be float32 or float64") as raised:
        opt.step(grad_scale=torch.tensor(1))
    assert " csrc/" in str(raised.value) and "/csrc/" not in str(raised.value)


def test_a_group_may_be_taken_out():
    ps = [torch.nn.Parameter(torch.ones(64, 96)) for _ in range(2)]
    opt = lowbit.AdamW([{"params": [p]} for p in ps])
    for _ in range(2):
        for p in ps:
            p.grad = torch.ones_like(p)
        opt.step()
    del opt.param_groups[1]
    opt.step()
    assert [float(opt.state[p]["step"]) for p in ps] == [3.0, 2.0]


def test_a_number_scales_gradients():
    p, opt = stepped()
    q, other = stepped()
    opt.step(grad_scale=2.0)
    other.step(grad_scale=torch.tensor(2.0))
    assert torch.equal(p, q)


@pytest.mark.parametrize("rule", ["AdamW", "LAMB"])
def test_all_ranks_agree_whether_there_is_a_first_step(pool, rule):
    assert pool.run(2, late_worker.first_step_of_a_warmup, rule) == [1.0, 1.0]


def test_a_wrong_instruction_set_is_said_by_the_first_use_and_not_by_the_import():
    """A program that only imports lowbit, such as one that lists its plugins, runs on."""
    code = "import lowbit; print('imported', flush=True); lowbit.catalog()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "LOWBIT_ISA": "foo"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "imported\n" and done.returncode != 0
    assert "LOWBIT_ISA=foo: this processor runs" in done.stderr
