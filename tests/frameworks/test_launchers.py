"""lowbit's optimizers by the configuration of launchers, with the real packages: each reaches the
weights of Hugging Face's Trainer, bit for bit.
"""

import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap
import types

import pytest
import torch
import yaml

import lowbit
from tests.frameworks import launchers
from tests.support import pages
from tests.support.paths import ROOT
from tests.support.require import need

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


def test_an_export_without_deepspeed_is_refused(tmp_path):
    """Nothing would bind the optimizer with it."""
    need_package("transformers")
    from lowbit.integrations.transformers import from_optim_args

    factory, options = from_optim_args(launchers.arguments(tmp_path, optim_args="export=fp32"))
    with pytest.raises(ValueError, match="export='fp32' needs DeepSpeed, and no DeepSpeed"):
        factory()(torch.nn.Linear(4, 4), **options)


@pytest.mark.parametrize("name", ["cls", "args", "model"])
def test_names_of_the_factory_are_no_options_in_text(tmp_path, name):
    need_package("transformers")
    from lowbit.integrations.transformers import from_optim_args

    with pytest.raises(
        ValueError, match=f"optim_args has '{name}=1', which is not an option of an opt"
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
        options = {
            **launchers.ARGUMENTS,
            "max_steps": steps,
            "save_strategy": "steps",
            "save_steps": 2,
        }
        args = SFTConfig(output_dir=str(tmp_path), gradient_checkpointing=False, **options)
        choice = optimizer(args, "AdamW", state_format="4bit")
        return SFTTrainer(
            launchers.language_model(seed),
            args,
            train_dataset=data,
            processing_class=launchers.tokenizer(),
            optimizer_cls_and_kwargs=choice,
        )

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
        launchers.language_model(),
        launchers.language_model(),
        args,
        train_dataset=Dataset.from_list(rows),
        processing_class=launchers.tokenizer(),
    )
    made.optimizer_cls_and_kwargs = optimizer(args, "Lion", state_format="4bit")
    made.train()
    assert isinstance(made.optimizer.optimizer, lowbit.Lion)


# axolotl


@pytest.fixture
def axolotl():
    """axolotl's plugins and the part of its trainer that makes optimizers;
    the rest of it imports numba, triton and more.
    """
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


def axolotl_trainer(axolotl, folder, seed=0, **more):
    from transformers import Trainer

    cls = type("AxolotlTrainer", (axolotl.mixin, Trainer), {})
    args = launchers.arguments(folder, save_strategy="steps", save_steps=2)
    made = launchers.trainer(folder, cls, args=args, model=launchers.language_model(seed))
    for name in (
        "lr_groups",
        "embedding_lr",
        "embedding_lr_scale",
        "loraplus_lr_ratio",
        "optim_args",
    ):
        setattr(made.args, name, more.get(name))
    return made


def test_axolotl_trains_and_resumes_by_its_plugin(axolotl, reference, tmp_path):
    from axolotl.integrations.config import merge_input_args

    written = entries("lowbit_optimizer")
    assert written.pop("plugins") == ["lowbit.integrations.axolotl.LowbitPlugin"]
    _, checked = merge_input_args()  # axolotl's own schema, with the plugin's entries
    assert set(written) <= set(checked.model_fields)
    written["optimizer"] = checked.model_fields["optimizer"].default
    for seed, checkpoint in enumerate((None, str(tmp_path / "checkpoint-2"))):  # and resumed
        made = axolotl_trainer(axolotl, tmp_path, seed)
        axolotl.manager.post_trainer_create(axolotl.config(written), made)
        made.train(resume_from_checkpoint=checkpoint)
        assert launchers.digest(made.model) == reference


def test_axolotl_gets_the_callback_of_schedule_free(axolotl, tmp_path):
    made = axolotl_trainer(axolotl, tmp_path)
    given = axolotl.config({"lowbit_optimizer": "ScheduleFreeAdamW"})
    made.args.lr_scheduler_type = "constant"
    axolotl.manager.post_trainer_create(given, made)
    made.train()
    opt = getattr(made.optimizer, "optimizer", made.optimizer)
    assert not any(group["train_mode"] for group in opt.param_groups)


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
            chosen = [
                (n, p)
                for n, p in zip(group["param_names"], group["params"], strict=True)
                if inside(n) == mult
            ]
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


def test_automodel_builds_muon(automodel, tmp_path):
    model = torch.nn.Sequential(torch.nn.Embedding(8, 64), torch.nn.Linear(64, 64))
    text = """
        optimizer:
          _target_: lowbit.integrations.nemo_automodel.LowbitConfig
          optimizer: MuonWithAdamW
          options: {no_decay: true, adamw_lr: 1.0e-3}
        """
    (opt,) = automodel(tmp_path, text, model)
    by_muon = {n: g["use_muon"] for g in opt.param_groups for n in g["param_names"]}
    assert by_muon == {"0.weight": False, "1.weight": True, "1.bias": False}
    decay = {n: g["weight_decay"] for g in opt.param_groups for n in g["param_names"]}
    assert decay["1.bias"] == 0 and decay["1.weight"] > 0
    model(torch.arange(8)).sum().backward()
    opt.step()


SETTINGS = {  # options, and the learning rate and weight decay of each parameter under an override
    "no_decay": (
        "options: {no_decay: true}",
        {
            "mlp.weight": (1e-2, 0.1),
            "mlp.bias": (1e-2, 0.0),
            "router.weight": (5e-3, 0.05),
            "router.bias": (5e-3, 0.0),
            "embed.weight": (1e-2, 0.1),
        },
    ),
    "Muon": (
        "optimizer: MuonWithAdamW\n"
        "options: {no_decay: ['mlp.bias'], adamw_lr: 1.0e-3, adamw_weight_decay: 0.2}",
        {
            "mlp.weight": (1e-2, 0.1),
            "mlp.bias": (1e-3, 0.0),
            "router.weight": (5e-3, 0.05),
            "router.bias": (5e-4, 0.1),
            "embed.weight": (1e-3, 0.2),
        },
    ),
    "no group decays or no lr": (
        "weight_decay: 0.0\nlr: 0.0",
        dict.fromkeys(
            ("mlp.weight", "mlp.bias", "router.weight", "router.bias", "embed.weight"), (0.0, 0.0)
        ),
    ),
}


def scheduled(opt):
    """The settings after a step of Automodel's scheduler, whose base is the first group."""
    from nemo_automodel.components.optim.scheduler import OptimizerParamScheduler

    lr, decay = (opt.param_groups[0][key] for key in ("lr", "weight_decay"))
    steady = (lr, lr, lr, 0, 10, "constant", decay, decay, 10, "constant")
    OptimizerParamScheduler(opt, *steady).step(1)
    return {
        name: pytest.approx((group["lr"], group["weight_decay"]))
        for group in opt.param_groups
        for name in group["param_names"]
    }


@pytest.mark.parametrize("case", SETTINGS)
def test_automodels_overrides_multiply_a_groups_own_settings(automodel, tmp_path, case):
    """They took the place of no_decay and adamw_lr."""
    given, wanted = SETTINGS[case]
    layers = {"mlp": torch.nn.Linear(64, 48), "router": torch.nn.Linear(64, 48)}
    model = torch.nn.ModuleDict({**layers, "embed": torch.nn.Embedding(64, 64)})
    text = {
        "_target_": "lowbit.integrations.nemo_automodel.LowbitConfig",
        "lr": 1e-2,
        "weight_decay": 0.1,
        "param_group_overrides": [{"pattern": "router", "lr_mult": 0.5, "wd_mult": 0.5}],
        **yaml.safe_load(given),
    }
    (opt,) = automodel(tmp_path, yaml.safe_dump({"optimizer": text}), model)
    assert scheduled(opt) == wanted


def test_the_first_group_of_automodel_decays(automodel, tmp_path):
    """Its scheduler takes the base from there, and nothing would decay in a stage of a norm and an
    embedding."""
    model = torch.nn.Sequential(torch.nn.Embedding(8, 64), torch.nn.LayerNorm(64))
    text = """
        optimizer:
          _target_: lowbit.integrations.nemo_automodel.LowbitConfig
          options: {no_decay: true}
        """
    (opt,) = automodel(tmp_path, text, model)
    assert scheduled(opt) == {
        "0.weight": (1e-4, 0.01),
        "1.weight": (1e-4, 0.0),
        "1.bias": (1e-4, 0.0),
    }


def test_automodel_warns_of_a_weight_decay_that_its_scheduler_loses(automodel, tmp_path):
    model = torch.nn.Sequential(torch.nn.Embedding(8, 64), torch.nn.Linear(64, 64))
    text = """
        optimizer:
          _target_: lowbit.integrations.nemo_automodel.LowbitConfig
          optimizer: MuonWithAdamW
          weight_decay: 0.0
          options: {adamw_weight_decay: 0.1}
        """
    with pytest.warns(UserWarning, match=r"weight_decay is 0 and adamw_weight_decay 0\.1"):
        automodel(tmp_path, text, model)


def test_automodel_warns_of_patterns_that_match_nothing(automodel, tmp_path):
    """In no part of the model: those of a pipeline's stages have different layers."""
    parts = torch.nn.Module()
    parts.parts = [torch.nn.ModuleDict({name: torch.nn.Linear(4, 4)}) for name in ("a", "b")]
    text = """
        optimizer:
          _target_: lowbit.integrations.nemo_automodel.LowbitConfig
          param_group_overrides:
            [{pattern: "a"}, {pattern: "routr"}, {pattern: "b"}, {pattern: "exprt"}]
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
        automodel(
            tmp_path,
            "optimizer: {_target_: lowbit.integrations.nemo_automodel.LowbitConfig, "
            "optimizer: AdamX}",
            model,
        )


# Launchers that need a patch


def patched(package, name, folder):
    """A copy of a package with a patch, in which all but the patched files are links; and the files
    of tests that the patch adds. What it changes in files that the installed package has not, such
    as pages, stays out."""
    need("frameworks", shutil.which("patch") is not None, "the program patch is not installed")
    (found,) = importlib.util.find_spec(package).submodule_search_locations
    copy = folder / "src" / package
    files = {}
    for part in re.split(r"^(?=--- )", (PATCHES / name).read_text(), flags=re.MULTILINE)[1:]:
        before, after = (line[4:] for line in part.splitlines()[:2])
        if before == "/dev/null" or after.startswith("b/src/"):
            files[after.removeprefix("b/")] = part
    changed = [file.removeprefix("src/") for file in files if file.startswith("src/")]

    def linked(source, target, inside):
        target.mkdir(parents=True)
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
        ["patch", "--strip=1", "--fuzz=0"],
        input="".join(files.values()),
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert changed and "offset" not in done.stdout, done.stdout
    if sys.pycache_prefix:  # the bytecode of links is that of what they lead to; nobody writes it
        compiled = pathlib.Path(sys.pycache_prefix + str(copy))
        compiled.parent.mkdir(parents=True, exist_ok=True)
        compiled.unlink(missing_ok=True)  # of an earlier run
        compiled.symlink_to(sys.pycache_prefix + str(found))
    return copy


def in_a_copy(folder, *parts, **more):
    """What each part of a program says that imports patched packages: one program, since importing
    them is what takes time.
    """
    here = pathlib.Path(__file__).parent  # a patched copy has a `tests` of its own
    paths = [str(folder / "src"), str(here), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        **more,
    }
    done = subprocess.run(
        [sys.executable, "-c", END.join(map(textwrap.dedent, parts))],
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    said = done.stdout.split("end of a part\n")
    assert len(said) == len(parts), done.stdout
    return said


END = "\nprint('end of a part', flush=True)\n"


def own_tests(path, *options):
    """The part of a program that runs a file of the package's own tests."""
    given = ["-q", "-rs", "-p", "no:cacheprovider", *options]
    given += ["-c", os.devnull, "--rootdir", ".", path]
    return f"import pytest\nassert pytest.main({given!r}) == 0"


def passed(said):
    (count,) = re.findall(r"^(\d+) passed", said, flags=re.MULTILINE)
    assert "skipped" not in said, said
    return int(count)


def trained_by_its_file(folder):
    """The part of a program that trains and resumes through transformers' own parser of YAML."""
    options = {
        **launchers.ARGUMENTS,
        **entries("optim: lowbit"),
        "save_strategy": "steps",
        "save_steps": 2,
    }
    written = {**options, "output_dir": str(folder / "run")}
    (folder / "run.yaml").write_text(yaml.safe_dump(written))
    again = {**written, "resume_from_checkpoint": str(folder / "run" / "checkpoint-2")}
    (folder / "again.yaml").write_text(yaml.safe_dump(again))
    return f"""
        import launchers, transformers
        for seed, name in enumerate(("run", "again")):
            parser = transformers.HfArgumentParser(transformers.TrainingArguments)
            (args,) = parser.parse_yaml_file({str(folder)!r} + f"/{{name}}.yaml")
            made = launchers.trainer(None, args=args, model=launchers.language_model(seed))
            made.train(resume_from_checkpoint=args.resume_from_checkpoint)
            print("digest", launchers.digest(made.model))
    """


def trained_by_trls_script(folder):
    """The part of a program that does what `trl sft --config` starts, and does it again."""
    launchers.language_model().save_pretrained(folder / "model")
    launchers.tokenizer().save_pretrained(folder / "model")
    (folder / "data").mkdir()
    rows = [{"text": " ".join(f"w{i}" for i in each["input_ids"])} for each in launchers.examples()]
    (folder / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {k: v for k, v in launchers.ARGUMENTS.items() if k != "save_strategy"}
    written = {
        **options,
        **entries("optim: lowbit"),
        "model_name_or_path": str(folder / "model"),
        "dtype": "bfloat16",
        "dataset_name": str(folder / "data"),
        "gradient_checkpointing": False,
        "save_steps": 2,
    }
    resumed = {"resume_from_checkpoint": str(folder / "whole" / "checkpoint-2")}
    for name, more in (("whole", {}), ("resumed", resumed)):
        file = folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump({**written, **more, "output_dir": str(folder / name)}))
    return f"""
        import runpy, sys
        for name in ("whole", "resumed"):
            sys.argv = ["sft", "--config", {str(folder)!r} + f"/{{name}}.yaml"]
            runpy.run_module("trl.scripts.sft", run_name="__main__", alter_sys=True)
    """


@pytest.fixture(scope="module")
def by_transformers(tmp_path_factory):
    """Where a patched transformers, and TRL with it, trained, and what they said."""
    need_package("transformers")
    need_package("trl")
    folder = tmp_path_factory.mktemp("transformers")
    patched("transformers", "transformers-5.23.0.patch", folder)
    said = in_a_copy(
        folder,
        f"""
        import transformers
        assert transformers.__file__.startswith({str(folder)!r})
        """,
        own_tests("tests/trainer/test_trainer_lowbit.py"),
        trained_by_its_file(folder),
        trained_by_trls_script(folder),
        HF_DATASETS_CACHE=str(folder / "cache"),
    )
    return folder, said


def test_the_patch_of_transformers_passes_its_own_tests(by_transformers):
    _, (_, own, _, _) = by_transformers
    assert passed(own) == 4


def test_trainer_resumes_by_its_file(by_transformers, reference):
    _, (_, _, said, _) = by_transformers
    assert re.findall(r"digest (\w+)", said) == [reference, reference]


def test_trls_script_resumes_by_its_file(by_transformers):
    from safetensors.torch import load_file

    folder, _ = by_transformers
    begin, whole, resumed = (
        load_file(folder / name / "model.safetensors") for name in ("model", "whole", "resumed")
    )
    assert whole.keys() == resumed.keys() == begin.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert not any(torch.equal(whole[name], begin[name]) for name in whole)
    state = torch.load(folder / "whole" / "checkpoint-2" / "optimizer.pt")["state"]
    assert any("exp_avg_dynamic4" in each for each in state.values())


@pytest.fixture(scope="module")
def by_llamafactory(tmp_path_factory):
    """What a patched LLaMA-Factory said, without its model module, which needs a TRL of before
    2026: its own tests, and its function that selects optimizers with the entries of its YAML.
    """
    for package in ("llamafactory", "omegaconf", "transformers"):
        need_package(package)
    folder = tmp_path_factory.mktemp("llamafactory")
    patched("llamafactory", "llamafactory-0.9.5.patch", folder)
    return in_a_copy(
        folder,
        own_tests("tests/train/test_lowbit_optimizer.py", "-p", "llamafactory_parts"),
        f"""
        import pathlib
        import launchers, llamafactory_parts
        from llamafactory.hparams import finetuning_args
        from llamafactory.train.trainer_utils import create_custom_optimizer
        assert finetuning_args.__file__.startswith({str(folder)!r})
        folder, written = pathlib.Path({str(folder)!r}), {entries("use_lowbit")!r}
        options = dict(use_lowbit=written.pop("use_lowbit"), finetuning_type="full")
        use = finetuning_args.FinetuningArguments(**options)
        for seed, checkpoint in enumerate((None, str(folder / "run" / "checkpoint-2"))):
            args = launchers.arguments(
                folder / "run", **written, save_strategy="steps", save_steps=2
            )
            net = launchers.language_model(seed)
            opt = create_custom_optimizer(net, args, use)
            made = launchers.trainer(folder / "run", model=net, args=args, optimizers=(opt, None))
            made.train(resume_from_checkpoint=checkpoint)
            print("digest", launchers.digest(net))
        """,
    )


def test_the_patch_of_llamafactory_passes_its_own_tests(by_llamafactory):
    own, _ = by_llamafactory
    assert passed(own) == 5


def test_llamafactory_resumes_by_its_file(by_llamafactory, reference):
    _, said = by_llamafactory
    assert re.findall(r"digest (\w+)", said) == [reference, reference]


def test_the_readme_of_patches_has_all_of_them():
    text = (PATCHES / "README.md").read_text()
    assert all(path.name in text for path in PATCHES.glob("*.patch"))
