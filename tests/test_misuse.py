"""What programs do to an optimizer between its steps, and what it must not answer in silence."""

import copy
import pickle

import pytest
import torch

import lowbit


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
        opt._steady = None
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


@pytest.mark.parametrize("options", [{"wide": 5}, {"lr": "1e-3"}, {"lr": None}])
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
    assert pool.run(2, "late_worker", "first_step_of_a_warmup", rule) == [1.0, 1.0]
