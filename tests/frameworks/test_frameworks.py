"""Training through the frameworks that people use, with the real packages: a resumed run is the run
that was not interrupted, bit for bit, and the checkpoint of 2 ranks loads on 1."""

import importlib.util
import json
import pathlib
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import lowbit
from lowbit import checkpoint
from tests.frameworks import launchers
from tests.support.ranks import launch
from tests.support.require import need

WORKER = pathlib.Path(__file__).with_name("frameworks_worker.py")
# What takes seconds, once for all ranks.
IMPORTED = (
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "trl.trainer.sft_trainer",
    "lightning.pytorch",
    "torchtitan.components.checkpointer.dcp",
)
CASES = [
    ("accelerate", "ddp"),
    ("accelerate", "fsdp2"),
    ("accelerate", "fsdp1_orig"),
    ("accelerate", "fsdp1_flat"),
    ("transformers", "ddp"),
    ("transformers", "fsdp2"),
    ("transformers", "fsdp1_orig"),
    ("transformers", "fsdp1_flat"),
    ("transformers", "ddp_schedule_free"),
    ("transformers", "fsdp2_schedule_free"),
    ("trl", "ddp"),
    ("trl", "fsdp2"),
    ("lightning", "ddp"),
    ("lightning", "model_parallel"),
    ("lightning", "fsdp1_orig"),
    ("lightning", "fsdp1_flat"),
    ("torchtitan", "eager"),
    ("torchtitan", "late"),
]
# What Accelerate makes of its FSDP on a CPU when it is left alone,
# and of an optimizer that nobody could bind.
ASIDE = [
    ("accelerate_on_a_cpu", "fsdp1"),
    ("accelerate_on_a_cpu", "fsdp2"),
    ("accelerate_at_once", "fsdp1_orig"),
    ("accelerate_at_once", "fsdp1_flat"),
]


def need_package(name):
    present = importlib.util.find_spec(name) is not None
    need("frameworks", present, f"{name} is not installed: make frameworks")


def launched(out, ranks, what, cases):
    found = out / f"{ranks}.json"
    given = (found, out, what, *(":".join(case) for case in cases))
    present = tuple(name for name in IMPORTED if importlib.util.find_spec(name.split(".")[0]))
    launch.run(WORKER, ranks, *given, imported=present, HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
    return json.loads(found.read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What 2 ranks found, training and resuming, and then 1: all cases in the same processes."""
    cases = [case for case in CASES if importlib.util.find_spec(case[0])]
    aside = ASIDE if importlib.util.find_spec("accelerate") else []
    out = tmp_path_factory.mktemp("frameworks")
    return [launched(out, 2, "train", [*cases, *aside]), launched(out, 1, "resume", cases)]


@pytest.mark.parametrize("framework, kind", CASES)
def test_resumes_exactly_and_loads_on_another_number_of_ranks(framework, kind, request):
    need_package(framework)
    two, one = (run[f"{framework}:{kind}"] for run in request.getfixturevalue("runs"))
    assert "error" not in two, two["error"]
    assert two["resumed"]["loaded"] == two["trained"]["saved"]
    assert two["resumed"]["end"] == two["trained"]["end"] != two["trained"]["saved"]
    assert "error" not in one, one["error"]
    assert one["resumed"]["loaded"] == two["trained"]["saved"]
    assert one["resumed"]["end"] != two["trained"]["end"], "one rank sees other batches than two"


@pytest.mark.parametrize(
    "framework, kind",
    # Trainer decays all of a parameter that FSDP1 has flattened, norms included.
    [
        case
        for case in CASES
        if case[0] != "torchtitan"
        and case != ("transformers", "fsdp1_flat")
        and case[1] != "ddp_schedule_free"
    ],
)
def test_what_a_framework_wraps_does_not_matter(framework, kind, request):
    need_package(framework)
    two, _ = request.getfixturevalue("runs")
    alone = kind.replace("fsdp2", "ddp") if kind.endswith("schedule_free") else "ddp"
    end, ddp = (two[f"{framework}:{k}"]["trained"]["end"] for k in (kind, alone))
    assert sorted(name for name in ddp if end.get(name) != ddp[name]) == []


@pytest.mark.parametrize(
    "kind, message",
    [
        (
            "fsdp1_orig",
            (
                "lowbit.fsdp1.bind(model, opt) before the first step (with Accelerate, between "
                "prepare(model) and prepare(opt))"
            ),
        ),
        ("fsdp1_flat", "none of the optimizer's 7 parameters is in this model"),
    ],
)
def test_accelerate_is_refused_with_what_to_call_where_it_takes_both_at_once(
    kind, message, request
):
    need_package("accelerate")
    two, _ = request.getfixturevalue("runs")
    assert message in two[f"accelerate_at_once:{kind}"]["trained"]["said"]


# What frameworks do on a CPU by themselves.


@pytest.mark.parametrize("version", ["fsdp1", "fsdp2"])
def test_accelerate_shards_nothing_on_a_cpu(version, request):
    """So the ranks above are called GPUs (frameworks_worker.sharding_on_a_cpu)."""
    need_package("accelerate")
    two, _ = request.getfixturevalue("runs")
    assert two[f"accelerate_on_a_cpu:{version}"]["trained"]["wrapped"] == "ddp"


def test_lightning_refuses_its_fsdp_strategy_on_a_cpu():
    """But not one that is derived from it (frameworks_worker.OnCPU)."""
    need_package("lightning")
    import lightning
    from lightning.pytorch.strategies import FSDPStrategy

    with pytest.raises(ValueError, match="strategy `fsdp` requires a GPU accelerator"):
        lightning.Trainer(accelerator="cpu", strategy=FSDPStrategy(), logger=False)


def test_unknown_names_are_refused(tmp_path):
    need_package("transformers")
    need_package("torchtitan")
    from transformers import TrainingArguments

    from lowbit.integrations import torchtitan, transformers

    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    for name, meant in (
        ("param_groups", "lowbit.AdamW is one"),
        ("Adamw", "did you mean 'AdamW'"),
        ("lamb_8bit", "did you mean 'LAMB8bit'"),
        ("paged_adamw_8bit", "did you mean 'AdamW8bit' with state_memory='managed'"),
        ("rmsprop_bnb_32bit", "did you mean 'RMSprop' with state_format='float32'"),
        ("schedule_free_adamw", "did you mean 'ScheduleFreeAdamW'"),
    ):
        with pytest.raises(ValueError, match=f"lowbit has no optimizer '{name}'; {meant}"):
            transformers.optimizer(args, name)
    factory, options = transformers.optimizer(args, "Lion", lr=1e-4, state_format="4bit")
    opt = factory()(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)), **options)
    assert isinstance(opt, lowbit.Lion) and opt.param_groups[0]["lr"] == 1e-4
    factory, options = transformers.optimizer(args, "AdamW", adamw_weight_decay=0.1)
    with pytest.raises(TypeError, match="adamw_weight_decay"):
        factory()(nn.Linear(64, 64), **options)
    with pytest.raises(ValueError, match=r"no optimizer lowbit\.Adamw; did you mean 'AdamW'"):
        torchtitan.LowbitOptimizers._resolve_optimizer_factory("lowbit.Adamw")


def test_torchtitan_gets_what_is_for_a_whole_optimizer():
    """torchtitan writes `optimizer_kwargs` into groups, which do not take `state_memory`."""
    need_package("torchtitan")
    from torchtitan.components.optimizer import ParamGroupConfig

    from lowbit.integrations import torchtitan

    model = nn.ModuleDict({"body": nn.Linear(64, 64), "output": nn.Linear(64, 64)})
    for given in ({}, {"full_precision": torchtitan.EMBEDDINGS_AND_HEADS}):
        config = torchtitan.adamw(lr=1e-2, state_memory="pinned", state_format="4bit", **given)
        (opt,) = config.build(model_parts=[model])
        assert opt.state_memory == "pinned"
        assert {g["state_format"] for g in opt.param_groups} == {"4bit"}
    assert torchtitan.adamw().optimizer_factory_kwargs_by_name == {}
    kwargs = {"lr": 1e-2, "state_memory": "pinned"}
    group = ParamGroupConfig(pattern=".*", optimizer_name="lowbit.Lion", optimizer_kwargs=kwargs)
    config = torchtitan.LowbitOptimizers.Config(param_groups=[group])
    with pytest.raises(ValueError, match="in torchtitan by optimizer_factory_kwargs_by_name"):
        config.build(model_parts=[model])


def test_schedule_free_takes_no_schedule_that_decays(monkeypatch):
    """Without the package, of which this needs only the names."""
    for module, names in (
        ("transformers", ("Trainer", "TrainerCallback", "TrainingArguments")),
        ("transformers.integrations", ("deepspeed_config",)),
        ("transformers.trainer_callback", ("ExportableState",)),
        ("accelerate.state", ("GradientState",)),
    ):
        classes = {name: type(name, (), {}) for name in names}
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**classes))
    spec = importlib.util.find_spec("lowbit.integrations.transformers")
    integration = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(integration)

    def chosen(name, schedule):
        numbers = {
            "learning_rate": 1e-2,
            "weight_decay": 0.1,
            "adam_beta1": 0.9,
            "adam_beta2": 0.99,
            "adam_epsilon": 1e-8,
        }
        return integration.optimizer(SimpleNamespace(lr_scheduler_type=schedule, **numbers), name)

    decaying = SimpleNamespace(value="linear")  # as the package's enumeration has it
    for schedule in (decaying, "cosine"):
        chosen("AdamW", schedule)
        with pytest.raises(ValueError, match="set it to 'constant'"):
            chosen("ScheduleFreeAdamW", schedule)
    for schedule in (SimpleNamespace(value="constant"), "constant_with_warmup"):
        chosen("ScheduleFreeAdamW", schedule)


class Linear(nn.Module):
    """A model as Trainer takes it, with a matrix for Muon."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(96, 64)
        self.norm, self.linear = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, ids, labels=None):
        return {"loss": self.linear(self.norm(self.embedding(ids))).square().mean()}


def trainer_of(folder, name, callbacks=(), **options):
    need_package("transformers")
    from transformers import Trainer, TrainingArguments

    from lowbit.integrations.transformers import optimizer

    torch.manual_seed(0)
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=3,
        weight_decay=0.1,
        lr_scheduler_type="constant",
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    data = [{"ids": i, "labels": i} for i in range(8)]
    return Trainer(
        Linear(),
        args,
        train_dataset=data,
        optimizer_cls_and_kwargs=optimizer(args, name, **options),
        callbacks=list(callbacks),
    )


def test_a_trainers_run_of_bitsandbytes_goes_on_once_its_file_is_converted(tmp_path, monkeypatch):
    """As docs/migrate.md says: Trainer loads `optimizer.pt` itself."""
    need_package("transformers")
    present = importlib.util.find_spec("bitsandbytes") is not None
    need("bitsandbytes", present, "bitsandbytes is not installed")
    from bitsandbytes.optim import GlobalOptimManager

    from lowbit.integrations.transformers import optimizer

    # Trainer's choices for embeddings, kept by id(), would meet parameters of later tests.
    monkeypatch.setattr(GlobalOptimManager, "_instance", None)
    args = launchers.arguments(
        tmp_path / "run", optim="adamw_bnb_8bit", save_strategy="steps", save_steps=4
    )
    launchers.trainer(tmp_path, args=args).train()
    saved, moved = tmp_path / "run" / "checkpoint-4", tmp_path / "moved" / "checkpoint-4"
    shutil.copytree(saved, moved)
    file = moved / "optimizer.pt"
    checkpoint.convert(saved / "optimizer.pt", file, to="lowbit", force=True)

    def resumed(folder):
        args = launchers.arguments(tmp_path / "out", max_steps=5)
        trainer = launchers.trainer(
            tmp_path, args=args, optimizer_cls_and_kwargs=optimizer(args, "AdamW")
        )
        trainer.train(resume_from_checkpoint=str(folder))
        return getattr(trainer.optimizer, "optimizer", trainer.optimizer)

    with pytest.raises(ValueError, match="convert that file first: lowbit-ckpt convert FILE NEW"):
        resumed(saved)
    opt = resumed(moved)
    assert {int(state["step"]) for state in opt.state.values()} == {5}
    assert [group["weight_decay"] for group in opt.param_groups] == [0.1, 0.0]


def test_schedule_free_does_not_train_without_its_callback(tmp_path):
    """Trainer would save weights that are not the result, and says nothing."""
    need_package("transformers")
    from lowbit.integrations.transformers import ScheduleFreeCallback

    trainer = trainer_of(tmp_path, "ScheduleFreeAdamW")
    before = [p.detach().clone() for p in trainer.model.parameters()]
    with pytest.raises(RuntimeError, match=r"callbacks=\[ScheduleFreeCallback\(\)\]"):
        trainer.train()
    assert all(map(torch.equal, before, trainer.model.parameters()))
    trainer = trainer_of(tmp_path, "ScheduleFreeAdamW", [ScheduleFreeCallback()])
    trainer.train()
    opt = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    assert [group["train_mode"] for group in opt.param_groups] == [False, False]
    opt.train()
    with pytest.raises(RuntimeError, match="trains without its callback"):  # the run has ended
        opt.step()


def test_muon_with_adamw_gets_its_groups(tmp_path):
    trainer = trainer_of(tmp_path, "MuonWithAdamW", adamw_lr=1e-4, adamw_weight_decay=0.2)
    trainer.train()
    opt = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    assert {
        name: (group["use_muon"], group["weight_decay"], group["lr"])
        for group in opt.param_groups
        for name in group["param_names"]
    } == {
        "linear.weight": (True, 0.1, 5e-5),
        "embedding.weight": (False, 0.2, 1e-4),
        "norm.weight": (False, 0.0, 1e-4),
        "norm.bias": (False, 0.0, 1e-4),
        "linear.bias": (False, 0.0, 1e-4),
    }


def test_a_search_of_hyperparameters_reaches_the_optimizer(tmp_path):
    """Trainer writes a trial's values into its arguments after the optimizer was chosen."""
    trainer = trainer_of(tmp_path, "AdamW", eps=1e-6)
    from transformers.trainer_utils import HPSearchBackend

    trainer.hp_search_backend = HPSearchBackend.WANDB  # which takes a trial as a dict
    for lr, beta2, decay in ((3e-3, 0.95, 0.3), (1e-4, 0.99, 0.2)):
        trial = {"learning_rate": lr, "adam_beta2": beta2, "weight_decay": decay}
        trainer._hp_search_setup({**trial, "adam_epsilon": 1e-4})
        trainer.optimizer = None
        found = [(g["lr"], g["betas"], g["eps"]) for g in trainer.create_optimizer().param_groups]
        assert found == [(lr, (0.9, beta2), 1e-6)] * 2
        assert [g["weight_decay"] for g in trainer.optimizer.param_groups] == [decay, 0.0]
    trainer = trainer_of(tmp_path, "ScheduleFreeAdamW")
    trainer.args.lr_scheduler_type = "cosine"
    with pytest.raises(ValueError, match="lr_scheduler_type is 'cosine'"):
        trainer.create_optimizer()


def test_the_optimizer_of_a_trainer_of_torch_loads(tmp_path):
    """`optimizer.pt` has the Trainer's two groups, and numbers."""
    need_package("transformers")
    from transformers import Trainer, TrainingArguments

    from lowbit.integrations import transformers

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(96, 64), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 96)
    )
    args = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], optim="adamw_torch"
    )
    old = Trainer(model=model, args=args).create_optimizer()
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    old.step()
    torch.save(old.state_dict(), tmp_path / "optimizer.pt")
    lowbit.checkpoint.convert(
        tmp_path / "optimizer.pt", tmp_path / "converted.pt", to="lowbit", state_format="float32"
    )
    for load in (
        lambda opt: opt.load_state_dict(torch.load(tmp_path / "optimizer.pt")),
        lambda opt: opt.load_state_dict(torch.load(tmp_path / "converted.pt")),
        lambda opt: lowbit.load_optimizer(opt, tmp_path / "optimizer.pt", model=model),
    ):
        factory, options = transformers.optimizer(args, state_format="float32")
        opt = factory()(model, **options)
        assert len(opt.param_groups) == 2
        load(opt)
        for p in model.parameters():
            assert torch.equal(opt.state[p]["exp_avg"], old.state[p]["exp_avg"])


# Accelerate puts sharded parameters into the groups of an optimizer that was built for whole ones.


def replaced(model, opt):
    for group in opt.param_groups:
        group["params"] = [nn.Parameter(p.detach().clone()) for p in group["params"]]
    return [p for group in opt.param_groups for p in group["params"]]


def test_replaced_parameters_get_state_and_the_old_ones_are_let_go():
    model = nn.Linear(64, 64)
    opt = lowbit.AdamW(model.named_parameters())
    params = replaced(model, opt)
    assert set(opt.state_dict()["state"]) == {0, 1}
    assert set(opt.state) == set(params)
    params = replaced(model, opt)
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    assert set(opt.state) == set(params) and all(opt.state[p]["step"] == 1 for p in params)


def test_parameters_replaced_after_a_step_are_refused():
    model = nn.Linear(64, 64)
    opt = lowbit.AdamW(model.named_parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    opt.step()
    replaced(model, opt)
    with pytest.raises(
        RuntimeError, match="was replaced in the optimizer's groups after it had been stepped"
    ):
        opt.state_dict()
