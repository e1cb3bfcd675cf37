"""Steps inside the backward pass under Hugging Face's Trainer and Lightning."""

import json
import signal
import types

import pytest
import torch

import lowbit
from tests.frameworks import launchers
from tests.frameworks.test_launchers import need_package


@pytest.mark.parametrize(("accumulated", "clipped"), [(1, 0.0), (2, 0.0), (1, 0.1)])
def test_the_trainer_steps_in_the_backward_pass(tmp_path, accumulated, clipped):
    """The bits of a Trainer that steps afterwards; clipping is by the norm of the step before."""
    need_package("transformers")
    from lowbit.integrations.transformers import StepInBackwardCallback, optimizer

    class Watched(StepInBackwardCallback):
        most = 0
        norm = None

        def on_substep_end(self, *args, model=None, **_):
            assert accumulated > 1 and all(p.grad is not None for p in model.parameters())

        def on_pre_optimizer_step(self, *args, model=None, **_):
            self.most = max(self.most, sum(p.grad is not None for p in model.parameters()))

        def on_step_end(self, *args, **_):
            self.norm = self.released.norm

    def trained(*callbacks):
        args = launchers.arguments(
            tmp_path, gradient_accumulation_steps=accumulated, max_grad_norm=clipped
        )
        made = launchers.trainer(
            tmp_path,
            args=args,
            optimizer_cls_and_kwargs=optimizer(args, "AdamW"),
            callbacks=list(callbacks),
        )
        made.train()
        return launchers.digest(made.model)

    watched = Watched(overlap=accumulated > 1)
    found = trained(watched)
    assert watched.most == 0 and watched.released is None
    assert (watched.norm is None) == (clipped == 0.0)
    assert (found == trained()) == (clipped == 0.0)
    if not clipped:
        return
    with pytest.raises(ValueError, match="train in bf16"):
        StepInBackwardCallback().on_train_begin(types.SimpleNamespace(fp16=True), None, None)
    with pytest.raises(ValueError, match="one process, and these are 2"):
        several = types.SimpleNamespace(fp16=False, world_size=2)
        StepInBackwardCallback().on_train_begin(several, None, None)


@pytest.mark.parametrize("name", ["StepInBackwardCallback", "ScheduleFreeCallback"])
def test_a_save_in_the_middle_of_a_step_is_refused(tmp_path, name):
    """At SIGTERM transformers saves after a backward pass whose steps are done and not counted, and
    while the weights are no average."""
    need_package("transformers")
    from lowbit.integrations import transformers

    rule = "ScheduleFreeAdamW" if name == "ScheduleFreeCallback" else "AdamW"
    args = launchers.arguments(tmp_path, enable_jit_checkpoint=True)
    before = signal.getsignal(signal.SIGTERM)
    made = launchers.trainer(
        tmp_path,
        args=args,
        optimizer_cls_and_kwargs=transformers.optimizer(args, rule),
        callbacks=[getattr(transformers, name)()],
    )
    signal.signal(signal.SIGTERM, before)  # Trainer's is taken off when training ends
    with pytest.raises(ValueError, match=rf"{name} does not work with enable_jit_checkpoint=True"):
        made.train()
    assert made.state.global_step == 0


@pytest.mark.parametrize("restore", [False, True])
def test_a_resumed_trainer_clips_by_the_norm_before_it(tmp_path, restore):
    """trainer_state.json has that norm; one that has none resumes too."""
    need_package("transformers")
    from lowbit.integrations.transformers import StepInBackwardCallback, optimizer

    def trained(folder, resume=None, **options):
        args = launchers.arguments(folder, max_grad_norm=0.05, save_steps=2, **options)
        made = launchers.trainer(
            folder,
            args=args,
            optimizer_cls_and_kwargs=optimizer(args, "AdamW"),
            callbacks=[StepInBackwardCallback()],
        )
        made.train(resume_from_checkpoint=resume)
        return launchers.digest(made.model)

    again = {"save_strategy": "steps", "restore_callback_states_from_checkpoint": restore}
    whole = trained(tmp_path / "whole", **again)
    saved = tmp_path / "whole" / "checkpoint-2"
    assert trained(tmp_path / "resumed", str(saved), **again) == whole
    file = saved / "trainer_state.json"
    state = json.loads(file.read_text())
    assert state["stateful_callbacks"].pop("StepInBackwardCallback")["attributes"]["clipping"]
    file.write_text(json.dumps(state))
    assert trained(tmp_path / "unclipped", str(saved), **again) != whole


def test_a_trainer_of_torchs_optimizer_is_resumed(tmp_path):
    """With its schedule, which was saved for the Trainer's two groups."""
    need_package("transformers")
    from lowbit.integrations.transformers import optimizer

    def trained(resume=None, **options):
        args = launchers.arguments(tmp_path, save_strategy="steps", save_steps=2)
        made = launchers.trainer(tmp_path, args=args, **options)
        made.train(resume_from_checkpoint=resume)
        return made

    trained()
    args = launchers.arguments(tmp_path)
    made = trained(
        str(tmp_path / "checkpoint-2"), optimizer_cls_and_kwargs=optimizer(args, "AdamW")
    )
    opt = made.optimizer.optimizer
    assert len(opt.param_groups) == 2
    assert {int(s["step"]) for s in opt.state.values()} == {made.state.global_step}


def test_training_that_raised_can_begin_again(tmp_path):
    need_package("transformers")
    from transformers import TrainerCallback

    from lowbit.integrations.transformers import StepInBackwardCallback, optimizer

    class Once(TrainerCallback):
        raised = False

        def on_step_end(self, *args, **_):
            if not self.raised:
                self.raised = True
                raise MemoryError("as auto_find_batch_size meets it")

    args = launchers.arguments(tmp_path)
    made = launchers.trainer(
        tmp_path,
        args=args,
        optimizer_cls_and_kwargs=optimizer(args, "AdamW"),
        callbacks=[StepInBackwardCallback(), Once()],
    )
    with pytest.raises(MemoryError):
        made.train()
    made.train()
    assert all(p.grad is None for p in made.model.parameters())


def test_training_whose_overlapped_step_failed_can_begin_again(tmp_path, monkeypatch):
    need_package("transformers")
    from lowbit.integrations.transformers import StepInBackwardCallback, optimizer
    from lowbit.optim.one_step import Step

    args = launchers.arguments(tmp_path)
    made = launchers.trainer(
        tmp_path,
        args=args,
        optimizer_cls_and_kwargs=optimizer(args, "AdamW"),
        callbacks=[StepInBackwardCallback(overlap=True)],
    )

    def broken(step):
        raise MemoryError("no room beside")

    with monkeypatch.context() as patch:
        patch.setattr(Step, "launch", broken)
        with pytest.raises(MemoryError, match="no room beside"):
            made.train()
    made.train()
    assert all(p.grad is None for p in made.model.parameters())


def test_lightning_steps_in_the_backward_pass():
    need_package("lightning")
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self, inside):
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64))
            self.net.bfloat16()
            self.inside, self.left = inside, []

        def training_step(self, batch, _):
            return (self.net(batch.bfloat16()).float() - batch).square().mean()

        def configure_optimizers(self):
            return lowbit.AdamW(lowbit.param_groups(self), lr=1e-2)

        def on_train_start(self):
            if self.inside:
                lowbit.step_in_backward(self, self.optimizers().optimizer)

        def on_before_optimizer_step(self, optimizer):
            self.left.append(sum(p.grad is not None for p in self.parameters()))

    def trained(inside):
        module = Module(inside)
        rows = torch.randn(20, 64, generator=torch.Generator().manual_seed(1))
        lightning.Trainer(
            max_steps=5,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
        ).fit(module, torch.utils.data.DataLoader(rows, batch_size=4))
        return launchers.digest(module.net), module.left

    weights, left = trained(True)
    assert left == [0] * 5
    assert trained(False) == (weights, [4] * 5)
