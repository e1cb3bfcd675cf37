"""`estimate(device_memory=...)`: phases are what torch allocates on the CPU, verdicts follow from
them, and other libraries hold what is said of them.
"""

import functools
import gc
import json

import pytest
import torch
from torch import nn

import lowbit
from lowbit import __main__ as command
from lowbit.config import size as sizes
from lowbit.planning import fit as planning
from lowbit.planning.peers import PEERS
from lowbit.planning.trace import checkpoint_layers
from tests.cuda.beside import Cpu
from tests.planning.allocated import allocated
from tests.support.require import need

pytestmark = pytest.mark.slow

BATCH, CONTEXT, WORDS = 2, 192, 3000


def llama(tied=False, dtype=torch.bfloat16):
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ModuleNotFoundError:
        need("frameworks", False, "transformers is not installed: make frameworks")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=dtype)


def measured(model, opt, loss):
    """The peaks of a step's phases above weights and state, and whether gradients were released."""
    gc.collect()
    with allocated() as forward:
        value = loss(model)
    with allocated() as backward:
        value.backward()
    del value
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    with allocated() as step:
        opt.step()
    opt.zero_grad()
    return {
        "forward": forward.peak,
        "backward": forward.end + backward.peak,
        "step": gradients + step.peak,
    }


def state_bytes(opt):
    return sum(t.nbytes for state in opt.state.values() for t in state.values())


def test_scratch_of_a_product_is_not_counted():
    """Attention has some on every processor, other products on some."""
    torch.manual_seed(0)
    x = torch.randn(1, 2, 600, 64, dtype=torch.bfloat16)
    with allocated() as attention:
        out = nn.functional.scaled_dot_product_attention(x, x, x)
    assert attention.peak == out.nbytes + 4 * 2 * 600  # and a sum for each row
    with allocated() as product:
        scores = x[0, 0] @ x[0, 0].T
    assert product.end == product.peak == scores.nbytes


@pytest.mark.parametrize(
    "tied, dtype, checkpointing, chunk, released, waiting",
    [
        (False, torch.bfloat16, True, 64, True, None),
        (False, torch.bfloat16, True, 64, True, "2MiB"),
        (False, torch.bfloat16, True, 64, True, "1GiB"),
        (False, torch.bfloat16, True, 64, False, None),
        (True, torch.bfloat16, True, 64, True, None),
        (True, torch.bfloat16, True, 64, True, "1MiB"),  # the largest waits alone
        (False, torch.bfloat16, False, None, False, None),
        (False, torch.float32, False, 64, True, None),
    ],
)
def test_phases_are_what_torch_allocates(
    tied, dtype, checkpointing, chunk, released, waiting, monkeypatch
):
    model = llama(tied, dtype)
    said = lowbit.estimate(
        model,
        micro_batch=BATCH,
        context=CONTEXT,
        checkpointing=checkpointing,
        loss_chunk=chunk,
        step_in_backward=released,
        waiting=waiting,
    ).fit.plans["lowbit"]
    assert all(p.device.type == "cpu" and p.grad is None for p in model.parameters())
    checkpoint_layers(model, checkpointing)
    opt = lowbit.AdamW(lowbit.param_groups(model))
    if released:
        Cpu().late(monkeypatch)
        lowbit.step_in_backward(model, opt, overlap=waiting is not None, waiting=waiting)
    ids = torch.randint(WORDS, (BATCH, CONTEXT))

    def loss(model, ids=ids):
        return lowbit.causal_loss(model, ids, chunk=chunk)

    measured(model, opt, functools.partial(loss, ids=ids[:, :8]))  # what is made once
    real = measured(model, opt, loss)
    assert said.state == state_bytes(opt)
    tensors = {t.data_ptr(): t.nbytes for t in [*model.parameters(), *model.buffers()]}
    assert said.weights == sum(tensors.values())
    for phase in ("forward", "backward"):
        assert said.phases[phase].total == pytest.approx(real[phase], rel=0.05), phase
    beside = said.weights + said.state
    assert said.total("step") == pytest.approx(beside + real["step"], rel=0.05)
    if not released:
        assert said.phases["step"].total == pytest.approx(real["step"], rel=0.05)


class Net(nn.Module):
    """Norms, dropout, a branch and a head: no transformer."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(256, 512), nn.BatchNorm1d(512)
        self.second, self.out = nn.Linear(512, 512), nn.Linear(512, 1024)

    def forward(self, x):
        x = nn.functional.gelu(self.norm(self.first(x)))
        x = nn.functional.dropout(x + self.second(x), 0.1)
        return self.out(nn.functional.silu(x))


def test_any_model_is_traced_by_its_loss():
    model = Net()
    said = lowbit.estimate(model, loss=lambda m: m(torch.empty(512, 256)).square().mean())
    x = torch.randn(512, 256)
    opt = lowbit.AdamW(lowbit.param_groups(model))

    def loss(model):
        return model(x).square().mean()

    measured(model, opt, loss)
    real = measured(model, opt, loss)
    plan = said.fit.plans["lowbit"]
    forward = plan.phases["forward"].total - x.nbytes  # the batch is there before
    backward = plan.phases["backward"].total - x.nbytes
    assert forward == pytest.approx(real["forward"], rel=0.05)
    assert backward == pytest.approx(real["backward"], rel=0.05)
    assert plan.phases["step"].total == pytest.approx(real["step"], rel=0.05)


def test_a_passing_model_keeps_its_settings():
    model = llama()
    before = nn.functional.scaled_dot_product_attention
    lowbit.estimate(model, context=32, checkpointing=True)
    assert not model.is_activation_checkpointing
    assert nn.functional.scaled_dot_product_attention is before
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())


def test_a_verdict_and_what_changes_it():
    model = llama()
    wanted = {"context": CONTEXT, "micro_batch": BATCH}
    whole = lowbit.estimate(model, **wanted).fit
    assert whole.usable is None and whole.fits() and whole.changes == {}
    peak = whole.plans["lowbit"].peak

    def memory(tensors):  # of a card with so much for tensors
        return int((tensors + planning.CONTEXT) / (1 - planning.GAPS)) + 2

    roomy = lowbit.estimate(model, device_memory=memory(peak), **wanted).fit
    assert roomy.fits() and roomy.changes == {} and roomy.usable >= peak
    least = peak
    for count in (1, 2, 3):
        tight = lowbit.estimate(model, device_memory=memory(least - 4096), **wanted).fit
        assert not tight.fits() and tight.changes and len(tight.changes) <= count
        after = lowbit.estimate(
            model, device_memory=tight.device_memory, **{**wanted, **tight.changes}
        ).fit
        assert after.fits() and after.changes == {}
        least = after.plans["lowbit"].peak
    hopeless = lowbit.estimate(model, device_memory=memory(100_000), **wanted).fit
    assert not hopeless.fits() and hopeless.changes is None


def test_gradients_that_wait_for_steps_beside_are_counted():
    wanted = {"context": CONTEXT, "micro_batch": BATCH, "step_in_backward": True}
    wanted |= {"checkpointing": True, "loss_chunk": 64}  # so that gradients are most of the peak
    model = llama()
    fits = [lowbit.estimate(model, waiting=w, **wanted).fit for w in (None, 4096, "2MiB", "1GiB")]
    alone, one, some, all_of_them = (fit.plans["lowbit"].phases["backward"] for fit in fits)
    largest = fits[0].largest_gradient
    assert largest > 4096, "it waits alone"
    assert alone.total < one.total <= alone.total + largest
    assert one.total < some.total <= alone.total + (2 << 20)
    kept = lowbit.estimate(model, **{**wanted, "step_in_backward": False}).fit.plans["lowbit"]
    assert all_of_them == kept.phases["backward"]
    assert "waiting" in str(lowbit.estimate(model, waiting="64MiB", **wanted))
    with pytest.raises(ValueError, match="give step_in_backward=True"):
        lowbit.estimate(model, context=CONTEXT, waiting="1MiB")


def test_state_leaves_the_card():
    model = llama()
    here = lowbit.estimate(model, context=16).fit.plans["lowbit"]
    there = lowbit.estimate(model, context=16, state_memory="pinned").fit.plans["lowbit"]
    assert here.host == 0 and there.host > 10 * there.state
    assert here.state == there.host + there.state
    assert there.title.endswith("pinned")


def test_peers_hold_what_is_said_of_them():
    """Their own optimizers' state on the CPU, split by the rules of their sources."""
    import bitsandbytes
    from bitsandbytes.optim.optimizer import Optimizer8bit

    model = nn.Sequential(nn.Linear(512, 300), nn.Linear(300, 20), nn.Linear(20, 40)).bfloat16()
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e-3)
    sizes = [(p.numel(), p.element_size()) for p in model.parameters()]

    def said(name):
        peer = PEERS[name]
        return sum(peer.card(*s) for s in sizes) + peer.shared, sum(peer.host(*s) for s in sizes)

    whole = bitsandbytes.optim.PagedAdamW8bit(list(model.parameters()))
    with pytest.warns(UserWarning, match="not supported on CPU"):
        whole.step()
    assert whole.is_paged and "1e5" in __import__("inspect").getsource(
        Optimizer8bit.get_state_buffer
    )
    held = {
        t.data_ptr(): (t.nbytes, k in ("state1", "state2") and t.numel() >= 1e5)
        for state in whole.state.values()
        for k, t in state.items()
        if isinstance(t, torch.Tensor)
    }
    assert said("bitsandbytes_paged") == tuple(
        sum(size for size, outside in held.values() if outside == where) for where in (False, True)
    )
    # torchao's constructor wants a GPU: its inner optimizer is torch's, on copies with gradients
    inner = torch.optim.AdamW(list(model.parameters()), fused=True)
    inner.step()
    card = host = 0
    for p, state in inner.state.items():
        size = sum(t.nbytes for t in state.values())
        card, host = (
            (card, host + size + 2 * p.nbytes) if p.numel() >= 4096 else (card + size, host)
        )
    assert said("torchao_offload") == (card, host)
    values = sum(p.numel() for p in model.parameters())
    assert said("flashoptim")[0] / values == pytest.approx(3.125, rel=1e-3)  # its README: 5.1 - 2


def test_the_result_prints_and_becomes_json(tmp_path, capsys):
    model = llama()
    arguments = {"device_memory": "2GiB", "context": 64, "step_in_backward": True}
    said = lowbit.estimate(model, **arguments)
    text, page = str(said), said._repr_html_()
    for plan in said.fit.plans.values():
        assert plan.title in text and plan.title in page and plan.note in text
    assert "a card of 2.00 GiB, 1.40 GiB for tensors: 1 x 64 tokens, gradients released" in text
    assert "lowbit fits with" not in text
    data = json.loads(json.dumps(said.as_dict()))["fit"]
    assert data["plans"]["lowbit"]["fits"] is True and data["changes"] == {}
    phases = data["plans"]["lowbit"]["phases"]
    assert data["plans"]["lowbit"]["peak"] == max(phase["total"] for phase in phases.values())
    model.config.save_pretrained(tmp_path)
    line = f"estimate {tmp_path} --dtype bfloat16 --device-memory 2GiB --context 64 --json"
    assert command.main([*line.split(), "--step-in-backward"]) == 0
    assert json.loads(capsys.readouterr().out)["fit"] == data


@pytest.mark.parametrize("text, size", [("24GiB", 24 << 30), ("80 gb", 80 * 10**9), (512, 512)])
def test_a_size_is_read(text, size):
    assert sizes.parsed(text) == size


@pytest.mark.parametrize(
    "given, message",
    [
        ({"device_memory": "24 parrots", "context": 8}, "24GiB"),
        ({"device_memory": 0, "context": 8}, "24GiB"),
        ({"context": 0}, "context should be at least 1"),
        ({"context": 8, "micro_batch": 0}, "micro_batch should be at least 1"),
        ({"device_memory": "1GiB"}, "not a model of transformers: pass loss="),
        ({"loss": lambda m: m(torch.empty(4, 8)).nonzero().sum()}, "cannot be traced"),
        ({"loss": lambda m: m(torch.empty(4, 8)).sum(), "ranks": 2}, "on 2 ranks"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_does_not_fit_raises(given, message):
    with pytest.raises(ValueError, match=message):
        lowbit.estimate(nn.Linear(8, 8), **given)


def test_settings_of_a_fit_that_nobody_asks_for_are_refused():
    with pytest.raises(
        ValueError,
        match="only the fit of a step depends on waiting=, checkpointing=: ask for it by device_",
    ):
        lowbit.estimate(nn.Linear(64, 64), waiting="1MiB", checkpointing=True)


def test_settings_that_a_loss_of_the_callers_decides_are_refused():
    given = {"checkpointing": True, "loss_chunk": 8, "micro_batch": 64, "context": 4096}
    for name, value in given.items():
        with pytest.raises(ValueError, match=f"^{name} say how the loss of a model of"):
            lowbit.estimate(nn.Linear(8, 8), loss=lambda m: m.weight.sum(), **{name: value})


@pytest.mark.parametrize("wrapper", ["peft", "cap"])
def test_a_model_whose_loss_is_not_that_of_its_head_has_its_own_traced(wrapper):
    model = llama()
    if wrapper == "peft":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "v_proj"]))
        reason = "forward pass of this PeftModel would not run"
    else:
        from transformers import Gemma2Config, Gemma2ForCausalLM

        values = {n: getattr(model.config, n) for n in SIZES}
        model = Gemma2ForCausalLM(Gemma2Config(**values, head_dim=64)).bfloat16()
        reason = "Gemma2ForCausalLM changes logits after the head"
    fit = lowbit.estimate(model, context=CONTEXT, device_memory=planning.CONTEXT).fit
    logits = 2 * CONTEXT * WORDS  # in bfloat16, whole
    assert fit.plans["lowbit"].phases["forward"].total > logits
    assert "loss_chunk" not in (fit.changes or {})
    with pytest.raises(ValueError, match=f"^loss_chunk= counts the memory of .*{reason}"):
        lowbit.estimate(model, context=CONTEXT, loss_chunk=64)


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
SIZES += ("num_attention_heads", "num_key_value_heads")


def test_a_pass_that_has_no_loss_is_refused():
    """A model's own code may raise anything."""

    def loss(model):
        return model(torch.ones(2, 64)).nothing

    with pytest.raises(ValueError, match=r"cannot be traced without values \(AttributeError"):
        lowbit.estimate(nn.Linear(64, 64), loss=loss)


@pytest.mark.parametrize("fixed", ["block_size", "callable"])
def test_changes_that_the_optimizer_does_not_take_are_left_out(fixed):
    model, wanted = llama(), {"context": CONTEXT, "micro_batch": BATCH}
    if fixed == "callable":
        wanted["optimizer"] = lambda params: lowbit.AdamW(params)
    else:
        wanted |= {"optimizer": "AdamW8bit", "block_size": 128}
    taken = int(lowbit.estimate(model, **wanted).fit.plans["lowbit"].peak / 0.95)
    for memory in (planning.CONTEXT + taken - 2**20, planning.CONTEXT + 100_000):
        found = lowbit.estimate(model, device_memory=memory, **wanted).fit.changes
        assert "state_format" not in (found or {})
    assert found is None
