"""lowbit's optimizers by the configuration of launchers, with the real packages: each reaches the weights of Hugging Face's Trainer, bit for bit."""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap
import types

import launchers
import pages
import pytest
import torch
import yaml
from paths import ROOT, SUPPORT
from require import need

import lowbit

PATCHES = ROOT / "integrations" / "patches"
PAGE = ROOT / "docs" / "launchers.md"


def shown(word):
    """The YAML that the page shows of a launcher: the block with this word in it."""
    (text,) = [b.text for b in pages.blocks(PAGE) if b.language == "yaml" and word in b.text]
    return text


def entries(word):
    return yaml.safe_load(shown(word))


def need_package(name, install=None):
    present = importlib.util.find_spec(name) is not None
    need("frameworks", present, f"{name} is not installed: {install or 'make frameworks'}")


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The weights that Trainer reaches with 4-bit AdamW."""
    need_package("transformers")
    from lowbit.integrations.transformers import optimizer

    folder = tmp_path_factory.mktemp("reference")
    args = launchers.arguments(folder)
    choice = optimizer(args, "AdamW", state_format="4bit")
    made = launchers.trainer(folder, args=args, optimizer_cls_and_kwargs=choice)
    made.train()
    formats = {key for state in made.optimizer.optimizer.state.values() for key in state}
    assert "exp_avg_dynamic4" in formats
    return launchers.digest(made.model)


# Trainer's own entry for options in text


@pytest.mark.parametrize(
    "text, options",
    [
        ("name=AdamW, state_format=4bit", {"state_format": "4bit"}),
        ("state_format=4bit,seed=0,amsgrad=false", {"state_format": "4bit", "seed": 0}),
    ],
)
def test_options_in_text_are_those_of_python(tmp_path, text, options):
    need_package("transformers")
    from lowbit.integrations.transformers import from_optim_args, optimizer

    args = launchers.arguments(tmp_path, optim_args=text)
    _, found = from_optim_args(args)
    _, wanted = optimizer(args, "AdamW", **options)
    assert found == wanted | ({"amsgrad": False} if "amsgrad" in text else {})


@pytest.mark.parametrize(
    "text", ["AdamW", "state_format=", "=4bit", "name=AdamW,4bit", "betas=(0.9,0.95)"]
)
def test_options_in_text_that_are_none_are_refused(tmp_path, text):
    need_package("transformers")
    from lowbit.integrations.transformers import from_optim_args

    with pytest.raises(ValueError, match=r"its entries are NAME=VALUE.*; a value has no comma"):
        from_optim_args(launchers.arguments(tmp_path, optim_args=text))


@pytest.mark.parametrize("name", ["cls", "args", "model"])
def test_names_of_the_factory_are_no_options_in_text(tmp_path, name):
    need_package("transformers")
    from lowbit.integrations.transformers import from_optim_args

    with pytest.raises(
        ValueError, match=f"optim_args has '{name}=1', which is no option of an opt"
    ):
        from_optim_args(launchers.arguments(tmp_path, optim_args=f"name=AdamW,{name}=1"))


# TRL


def test_trl_trains_stops_and_resumes(tmp_path):
    need_package("trl")
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from lowbit.integrations.transformers import optimizer

    data = Dataset.from_list([{"input_ids": each["input_ids"]} for each in launchers.examples()])

    def made(steps, seed=0):
        options = {**launchers.ARGUMENTS, "max_steps": steps, "save_strategy": "steps", "save_steps": 2}  # fmt: skip
        args = SFTConfig(output_dir=str(tmp_path), gradient_checkpointing=False, **options)
        choice = optimizer(args, "AdamW", state_format="4bit")
        return SFTTrainer(
            launchers.language_model(seed), args, train_dataset=data, processing_class=launchers.tokenizer(),
            optimizer_cls_and_kwargs=choice,
        )  # fmt: skip

    whole = made(4)
    whole.train()
    assert isinstance(whole.optimizer.optimizer, lowbit.AdamW)
    resumed = made(4, seed=1)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert launchers.digest(resumed.model) == launchers.digest(whole.model)


def test_trls_trainers_without_the_argument_take_the_attribute(tmp_path):
    need_package("trl")
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    from lowbit.integrations.transformers import optimizer

    rows = [{"prompt": f"w{i} w5", "chosen": f"w{i} w7", "rejected": f"w8 w{i}"} for i in range(8)]
    args = DPOConfig(output_dir=str(tmp_path), **{**launchers.ARGUMENTS, "max_steps": 2})
    made = DPOTrainer(
        launchers.language_model(), launchers.language_model(), args, train_dataset=Dataset.from_list(rows),
        processing_class=launchers.tokenizer(),
    )  # fmt: skip
    made.optimizer_cls_and_kwargs = optimizer(args, "Lion", state_format="4bit")
    made.train()
    assert isinstance(made.optimizer.optimizer, lowbit.Lion)


# axolotl


@pytest.fixture
def axolotl():
    """axolotl's plugins and the part of its trainer that makes optimizers; the rest of it imports numba, triton and more."""
    for package in ("axolotl", "peft", "addict"):
        need_package(package)
    with launchers.Forgotten("axolotl"):
        launchers.part_of("axolotl", "core", "core.trainers", "core.trainers.mixins")
        from axolotl.core.trainers.mixins.optimizer import OptimizerMixin
        from axolotl.integrations.base import PluginManager
        from axolotl.utils.dict import DictDefault

        manager = PluginManager.get_instance()
        manager.register("lowbit.integrations.axolotl.LowbitPlugin")
        yield types.SimpleNamespace(manager=manager, mixin=OptimizerMixin, config=DictDefault)
        manager.plugins.clear()
        sys.modules.pop("lowbit.integrations.axolotl", None)


def axolotl_trainer(axolotl, folder, **more):
    from transformers import Trainer

    made = launchers.trainer(folder, type("AxolotlTrainer", (axolotl.mixin, Trainer), {}))
    for name in (
        "lr_groups",
        "embedding_lr",
        "embedding_lr_scale",
        "loraplus_lr_ratio",
        "optim_args",
    ):
        setattr(made.args, name, more.get(name))
    return made


def test_axolotl_trains_by_its_plugin(axolotl, reference, tmp_path):
    from axolotl.integrations.config import merge_input_args

    written = entries("lowbit_optimizer")
    assert written.pop("plugins") == ["lowbit.integrations.axolotl.LowbitPlugin"]
    _, checked = merge_input_args()  # axolotl's own schema, with the plugin's entries
    assert set(written) <= set(checked.model_fields)
    made = axolotl_trainer(axolotl, tmp_path)
    default = checked.model_fields["optimizer"].default
    axolotl.manager.post_trainer_create(axolotl.config({**written, "optimizer": default}), made)
    made.train()
    assert launchers.digest(made.model) == reference


@pytest.mark.parametrize(
    "config, arguments, message",
    [
        ({"optimizer": "muon"}, {}, "optimizer: muon beside LowbitPlugin, which chooses AdamW"),
        ({}, {"embedding_lr": 1e-3}, "has embedding_lr, which LowbitPlugin does not read"),
        (
            {},
            {"optim_args": "a=1"},
            r"has optim_args, .*: put an optimizer's options in lowbit_options",
        ),
        ({"lowbit_optimizer": "AdamX"}, {}, "lowbit has no optimizer 'AdamX'"),
    ],
)
def test_axolotl_is_refused_before_it_trains(axolotl, tmp_path, config, arguments, message):
    made = axolotl_trainer(axolotl, tmp_path, **arguments)
    given = axolotl.config({"lowbit_optimizer": "AdamW", **config})
    with pytest.raises(ValueError, match=message):
        axolotl.manager.post_trainer_create(given, made)


# NeMo Automodel


@pytest.fixture
def automodel():
    need_package("nemo_automodel")
    with launchers.Forgotten("nemo_automodel"):
        from nemo_automodel.components.config.loader import load_yaml_config
        from nemo_automodel.components.optim.optimizer import build_optimizer_config

        def built(folder, text, model):
            """As the recipes do: the YAML's target and arguments, then `build`."""
            (folder / "run.yaml").write_text(textwrap.dedent(text))
            node = load_yaml_config(str(folder / "run.yaml")).optimizer
            given = {k: v for k, v in node.to_dict().items() if k != "_target_"}
            return build_optimizer_config(node._target_, given).build(model)

        yield built
        sys.modules.pop("lowbit.integrations.nemo_automodel", None)


def test_automodel_builds_from_its_file(automodel, tmp_path):
    need_package("transformers")
    model = launchers.language_model()
    (opt,) = automodel(
        tmp_path,
        """
        optimizer:
          _target_: lowbit.integrations.nemo_automodel.LowbitConfig
          optimizer: AdamW
          lr: 1.0e-2
          weight_decay: 0.1
          options: {state_format: 4bit, betas: [0.9, 0.95]}
          param_group_overrides: [{pattern: "layers\\\\.1", lr_mult: 0.1}]
        """,
        model,
    )
    other = launchers.language_model()
    groups = lowbit.param_groups(other)
    inside = lambda name: ".layers.1." in name  # noqa: E731
    split = []
    for group in groups:
        for mult in (False, True):
            chosen = [(n, p) for n, p in zip(group["param_names"], group["params"], strict=True) if inside(n) == mult]  # fmt: skip
            if chosen:
                names, params = zip(*chosen, strict=True)
                split.append({**group, "params": list(params), "param_names": list(names)})
    wanted = lowbit.AdamW(split, lr=1e-2, weight_decay=0.1, state_format="4bit", betas=(0.9, 0.95))
    assert [g["param_names"] for g in opt.param_groups] == [g["param_names"] for g in split]
    assert [g.get("lr_mult") for g in opt.param_groups] == [None, 0.1, None]
    for each, stepped in ((model, opt), (other, wanted)):
        ids = torch.tensor([launchers.examples()[0]["input_ids"]])
        each(input_ids=ids, labels=ids).loss.backward()
        stepped.step()
    assert launchers.digest(model) == launchers.digest(other)
    from nemo_automodel.components.optim.scheduler import OptimizerParamScheduler

    steady = (1e-2, 1e-2, 1e-2, 0, 10, "constant", 0.1, 0.1, 10, "constant")
    OptimizerParamScheduler(opt, *steady).step(1)
    assert [group["lr"] for group in opt.param_groups] == pytest.approx([1e-2, 1e-3, 1e-2])


def test_automodel_warns_of_patterns_that_match_nothing(automodel, tmp_path):
    """In no part of the model: those of a pipeline's stages have different layers."""
    parts = torch.nn.Module()
    parts.parts = [torch.nn.ModuleDict({name: torch.nn.Linear(4, 4)}) for name in ("a", "b")]
    text = """
        optimizer:
          _target_: lowbit.integrations.nemo_automodel.LowbitConfig
          param_group_overrides: [{pattern: "a"}, {pattern: "routr"}, {pattern: "b"}, {pattern: "exprt"}]
        """
    with pytest.warns(UserWarning, match="param_group_overrides") as found:
        opts = automodel(tmp_path, text, parts)
    said = [str(each.message) for each in found if "param_group" in str(each.message)]
    assert len(opts) == 2 and len(said) == 2
    assert "'routr'" in said[0] and "'exprt'" in said[1]


def test_automodel_takes_the_class_itself_but_names_it_does_not_give(automodel, tmp_path):
    model = torch.nn.Linear(64, 64)
    text = "optimizer: {_target_: lowbit.AdamW, lr: 1.0e-3, state_format: 4bit}"
    (opt,) = automodel(tmp_path, text, model)
    assert isinstance(opt, lowbit.AdamW) and "param_names" not in opt.param_groups[0]
    assert "exp_avg_dynamic4" in opt.state[model.weight]
    with pytest.raises(ValueError, match="lowbit has no optimizer 'AdamX'"):
        automodel(tmp_path, "optimizer: {_target_: lowbit.integrations.nemo_automodel.LowbitConfig, optimizer: AdamX}", model)  # fmt: skip


# Launchers that need a patch


def patched(package, name, folder):
    """A copy of a package with a patch, in which all but the patched files are links."""
    need("frameworks", shutil.which("patch") is not None, "the program patch is not installed")
    (found,) = importlib.util.find_spec(package).submodule_search_locations
    patch, copy = PATCHES / name, folder / package
    changed = [
        line.split("/src/", 1)[1].strip()
        for line in patch.read_text().splitlines()
        if line.startswith("+++ b/src/")
    ]

    def linked(source, target, inside):
        target.mkdir()
        for each in source.iterdir():
            path = f"{inside}/{each.name}"
            if path in changed:
                shutil.copy(each, target / each.name)
            elif any(file.startswith(path + "/") for file in changed):
                linked(each, target / each.name, path)
            else:
                (target / each.name).symlink_to(each)

    linked(pathlib.Path(found), copy, package)
    done = subprocess.run(
        ["patch", "--strip=2", "--fuzz=0", "--input", str(patch)], cwd=folder, capture_output=True, text=True
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert changed and "offset" not in done.stdout, done.stdout
    return copy


def test_the_patch_of_transformers_makes_it_a_name_of_optim(reference, tmp_path):
    need_package("transformers")
    patched("transformers", "transformers-5.23.0.patch", tmp_path)
    script = f"""
        import pathlib, sys
        import launchers, transformers
        assert transformers.__file__.startswith({str(tmp_path)!r})
        folder = pathlib.Path({str(tmp_path)!r}) / "run"
        args = launchers.arguments(folder, **{entries("optim: lowbit")!r})
        made = launchers.trainer(folder, args=args)
        made.train()
        print(launchers.digest(made.model))
    """
    paths = [str(tmp_path), str(SUPPORT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, env=environment
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split()[-1] == reference


def test_the_patch_of_llamafactory_selects_it(reference, tmp_path, monkeypatch):
    for package in ("llamafactory", "omegaconf"):
        need_package(package)
    root = patched("llamafactory", "llamafactory-0.9.5.patch", tmp_path)
    monkeypatch.setenv("DISABLE_VERSION_CHECK", "1")  # it wants transformers below 5.7
    with launchers.Forgotten("llamafactory"):
        launchers.part_of("llamafactory", "train", root=root)
        model = types.ModuleType("llamafactory.model")  # which needs a TRL of before 2026
        for name in ("find_all_linear_modules", "load_model", "load_tokenizer", "load_valuehead_params"):  # fmt: skip
            setattr(model, name, None)
        sys.modules["llamafactory.model"] = model
        from llamafactory.hparams.finetuning_args import FinetuningArguments
        from llamafactory.train.trainer_utils import create_custom_optimizer

        written = entries("use_lowbit")
        given = launchers.arguments(tmp_path, optim_args=written["optim_args"])
        chosen = FinetuningArguments(use_lowbit=written["use_lowbit"], finetuning_type="full")
        net = launchers.language_model()
        opt = create_custom_optimizer(net, given, chosen)
        made = launchers.trainer(tmp_path / "run", model=net, args=given, optimizers=(opt, None))
        made.train()
        assert launchers.digest(net) == reference
        off = FinetuningArguments(finetuning_type="full")
        assert create_custom_optimizer(net, given, off) is None
        with pytest.raises(ValueError, match="Cannot use lowbit with GaLore"):
            FinetuningArguments(use_lowbit=True, use_muon=True, finetuning_type="full")
