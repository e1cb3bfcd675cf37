"""Files that people have: objects of real packages beside an optimizer. They are named and never
built, and the optimizer is taken.
"""

import importlib.util
import json

import pytest
import torch

from tests.support.peers.files import need_tool, run
from tests.support.require import need

need_tool()


def need_package(name):
    need(
        "frameworks",
        importlib.util.find_spec(name) is not None,
        f"{name} is not installed: make frameworks",
    )


def small_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=64, n_positions=8))


def peft_model():
    need_package("peft")
    need_package("transformers")
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    return get_peft_model(small_gpt2(), lora), "peft.peft_model.PeftModelForCausalLM"


def whole_model():
    need_package("transformers")
    return small_gpt2(), "GPT2LMHeadModel"


def training_arguments():
    need_package("transformers")
    from transformers import TrainingArguments

    return TrainingArguments(output_dir="out", use_cpu=True, report_to=[]), "TrainingArguments"


def callback():
    need_package("lightning")
    from lightning.pytorch.callbacks import ModelCheckpoint

    return ModelCheckpoint(dirpath="out", monitor="loss"), "ModelCheckpoint"


def config():
    need_package("omegaconf")
    from omegaconf import OmegaConf

    made = OmegaConf.create({"lr": 0.1, "layers": [1, 2], "name": "${lr}"})
    return made, "omegaconf.dictconfig.DictConfig"


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("make", [peft_model, whole_model, training_arguments, callback, config])
def test_the_optimizer_beside_it_is_taken(tmp_path, make, legacy):
    given, cls = make()
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 96)
    opt = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 64)).sum().backward()
    opt.step()
    content = {"args": given, "optimizer": opt.state_dict(), "epoch": 3}
    path = tmp_path / "a.pt"
    torch.save(content, path, _use_new_zipfile_serialization=not legacy)
    shown = json.loads(run("inspect", path, "--json").stdout)["values"]
    assert cls in shown["args"] and "opaque" in shown["args"] and shown["epoch"] == 3
    assert "nothing was executed" in run("verify", path, code=3).stderr
    run("verify", path, "--opaque")
    convert = ["convert", path, tmp_path / "b.pt", "--to", "lowbit", "--state-format", "float32"]
    if make in (peft_model, whole_model, callback):  # tensors are left out by the user's word alone
        error = run(*convert, code=3).stderr
        assert "holds tensors that are not read" in error and "args (" in error and cls in error
        run(*convert, "--exclude", "args")
    else:
        done = run(*convert)
        assert "warning: args: is opaque" in done.stderr and cls in done.stderr
    back = torch.load(tmp_path / "b.pt", weights_only=True)
    wanted = opt.state_dict()["state"]
    assert back["epoch"] == 3 and set(back["optimizer"]["state"]) == set(wanted)
    for i, state in wanted.items():
        assert torch.equal(back["optimizer"]["state"][i]["exp_avg"], state["exp_avg"])


def test_a_checkpoint_of_lightning(tmp_path):
    """As its Trainer saves it, with callbacks and hyperparameters of omegaconf."""
    need_package("lightning")
    need_package("omegaconf")
    import lightning
    from omegaconf import OmegaConf

    class Module(lightning.LightningModule):
        def __init__(self, settings):
            super().__init__()
            self.save_hyperparameters()
            self.net = torch.nn.Linear(4, 4)

        def training_step(self, batch, _):
            return self.net(batch).sum()

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    trainer = lightning.Trainer(
        max_steps=2,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
        enable_model_summary=False,
    )
    trainer.fit(
        Module(OmegaConf.create({"lr": 0.1})), torch.utils.data.DataLoader(torch.ones(8, 4))
    )
    path = tmp_path / "last.ckpt"
    trainer.save_checkpoint(path)
    assert "omegaconf" in run("inspect", path).stdout
    run("convert", path, tmp_path / "b.pt", "--to", "lowbit")
    back = torch.load(tmp_path / "b.pt", weights_only=True)
    assert set(back["optimizer_states"][0]["state"]) == {0, 1}
