"""`lowbit.estimate` says what optimizers really hold: lowbit's, torch's, torchao's and
bitsandbytes', whole and sharded, in memory and on disk.
"""

import copy
import dataclasses
import importlib.util
import json
import socket

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import lowbit
from lowbit import __main__ as command
from tests.support.groups import begin
from tests.support.require import need

pytestmark = pytest.mark.slow


class Model(nn.Module):
    """An embedding, matrices of odd sizes, a convolution, a frozen layer, a buffer, a number,
    and a head, tied or not.
    """

    def __init__(self, tied=False, width=96, words=512):
        super().__init__()
        self.tokens = nn.Embedding(words, width)
        self.up, self.down = nn.Linear(width, 201), nn.Linear(201, width)
        self.convolution = nn.Conv1d(width, 48, 3)
        self.norm, self.frozen = nn.BatchNorm1d(width), nn.Linear(width, 64).requires_grad_(False)
        self.square = nn.Linear(128, 64)
        self.head = nn.Linear(width, words, bias=False)
        self.register_buffer("cache", torch.zeros(1000), persistent=False)
        if tied:
            self.head.weight = self.tokens.weight


def size(value):
    """The bytes of the tensors in nested values, each storage once."""
    found = {}

    def visit(value):
        if hasattr(value, "__tensor_flatten__") and type(value) is not nn.Parameter:
            for name in value.__tensor_flatten__()[0]:
                visit(getattr(value, name))
        elif isinstance(value, torch.Tensor):
            found[value.data_ptr() or id(value)] = value.numel() * value.element_size()
        elif isinstance(value, dict):
            for each in value.values():
                visit(each)

    visit(value)
    return sum(found.values())


def local(value):
    return value.to_local() if hasattr(value, "to_local") else value


def held(opt):
    """The bytes of an optimizer's state here."""
    return sum(size(local(t)) for state in opt.state.values() for t in state.values())


def stepped(model, opt):
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.full_like(p, 1e-3)
    begin(opt).step()
    return opt


RULES = {
    "AdamW": {},
    "AdamW 4bit": {"state_format": "4bit"},
    "AdamW fp8": {"state_format": "fp8"},
    "AdamW lpmm4": {"state_format": "lpmm4"},
    "AdamW factored8": {"state_format": "factored8"},
    "AdamW split": {"param_format": "bfloat16_split8"},
    "AdamW amsgrad": {"amsgrad": True, "min_numel": 0},
    "AdamW patterns": {"full_precision": ["up.*"]},
    "AdamW overrides": {"overrides": lowbit.override("down.*", state_format="float32")},
    "AdamW4bit": {"block_size": 64},
    "Adafactor": {},
    "SGD": {},
    "SGD momentum": {"momentum": 0.9},
    "Lion": {},
    "AdEMAMix": {},
    "LARS": {"momentum": 0.9},
    "CAME": {},
    "APOLLO": {"rank": 16},
    "APOLLOMini": {},
    "Fira": {"rank": 16},
    "AdamW, wide": {"embeddings": "float32", "heads": "float32"},
    "AdamW, wide embeddings": {"embeddings": "bfloat16_stochastic"},
    "APOLLO, wide heads": {"rank": 16, "heads": "float32"},
    "MuonWithAdamW": {},
    "MuonWithAdamW, wide": {"embeddings": "float32", "heads": "float32"},
    "ScheduleFreeAdamW": {},
    "AdamW cautious": {"cautious": True},
}


def test_a_note_says_which_parameters_keep_float32_as_asked():
    notes = [
        lowbit.estimate(Model(), **asked)["lowbit"].note.partition(" keep ")[0]
        for asked in ({}, {"heads": "float32"}, {"full_precision": True})
    ]
    assert notes == ["", "embeddings or heads", "all parameters"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_state_is_what_the_optimizer_holds_after_a_step(rule, tied):
    name, options = rule.replace(",", "").split()[0], dict(RULES[rule])
    model = Model(tied).bfloat16()
    before = copy.deepcopy(model.state_dict())
    said = lowbit.estimate(model, name, **options)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    with torch.device("meta"):
        empty = Model(tied)
    for other in (empty, Model(tied)):
        assert lowbit.estimate(other, name, dtype=torch.bfloat16, **options) == said
    formats = {key: options.pop(key) for key in ("embeddings", "heads") if key in options}
    named = lowbit.muon_param_groups if name == "MuonWithAdamW" else lowbit.param_groups
    groups = named(model, **formats)
    opt = stepped(model, getattr(lowbit, name)(groups, **options))
    ours = said["lowbit"]
    assert ours.state == (held(opt),)
    assert ours.weights == (
        size(dict(model.named_parameters())) + size(dict(model.named_buffers())),
    )
    assert ours.gradients == (
        size({n: p.grad for n, p in model.named_parameters() if p.grad is not None}),
    )
    assert bool(ours.note) == any(g.get("full_precision") is True for g in groups)
    assert ours.total[0] == ours.weights[0] + ours.gradients[0] + ours.state[0]
    assert ours.checkpoint == size(model.state_dict()) + held(opt)
    assert said.parameters == sum(p.numel() for p in model.parameters())
    assert said.trained == sum(p.numel() for p in model.parameters() if p.requires_grad)


EMAS = {True: "bfloat16_stochastic", "float32": "float32"}


@pytest.mark.parametrize("ema", EMAS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_averages_are_what_an_ema_holds_and_saves(ema, tied):
    model = Model(tied).bfloat16()
    plain, said = lowbit.estimate(model), lowbit.estimate(model, ema=ema)
    kept = lowbit.EMA(model, state_format=EMAS[ema])
    kept.update_parameters()
    steps = sum(size({"": step}) for group in kept._groups for step in group.steps)
    ours, before = said["lowbit"], plain["lowbit"]
    assert ours.averages == (size(kept.averages) + steps + size({"": kept._count}),)
    assert ours.total[0] == before.total[0] + ours.averages[0]
    assert ours.checkpoint == before.checkpoint + size(kept.state_dict())
    copied = torch.optim.swa_utils.AveragedModel(model)
    theirs, before = said["torch_bfloat16"], plain["torch_bfloat16"]
    tensors = [*copied.parameters(), *copied.buffers()]
    assert theirs.averages == (size(dict(enumerate(tensors))),)
    assert theirs.checkpoint == before.checkpoint + size(copied.state_dict())
    assert said["torch_float32"].averages > theirs.averages == said["torchao_8bit"].averages
    assert "AveragedModel" in str(said) and "AveragedModel" not in str(plain)


@pytest.mark.parametrize("ema", EMAS)
def test_ranks_hold_their_part_of_the_averages(ema):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for rank in (0, 2):
        dist.init_process_group("fake", rank=rank, world_size=3, store=FakeStore())
        try:
            model = Model().bfloat16()
            fully_shard(model, mesh=init_device_mesh("cpu", (3,)))
            kept = lowbit.EMA(model, state_format=EMAS[ema])
            said = lowbit.estimate(model, ema=ema)["lowbit"]
            here = sum(size(local(t)) for t in kept.averages.values())
            assert said.averages[rank] == here + 4 * len(kept.averages) + 8
        finally:
            dist.destroy_process_group()


def test_other_libraries_hold_what_is_said_of_them(monkeypatch):
    import bitsandbytes
    import torchao.optim

    monkeypatch.setattr(torch, "compile", lambda run, **options: run)  # torchao's step
    manager = bitsandbytes.optim.GlobalOptimManager
    monkeypatch.setattr(manager, "_instance", None)
    for dtype in (torch.float32, torch.bfloat16):
        model = Model().to(dtype)
        said = lowbit.estimate(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        under_trainer = bitsandbytes.optim.AdamW8bit(trained)
        under_trainer.mng.register_module_override(model.tokens, "weight", {"optim_bits": 32})
        monkeypatch.setattr(manager, "_instance", None)  # of the process: others have their own
        real = {
            "torchao_8bit": torchao.optim.AdamW8bit(trained),
            "bitsandbytes_8bit": bitsandbytes.optim.AdamW8bit(trained),
            "bitsandbytes_8bit_trainer": under_trainer,
        }
        real[f"torch_{dtype}".replace("torch.", "")] = torch.optim.AdamW(trained)
        for name, opt in real.items():
            stepped(model, opt)
            state = size({i: dict(s) for i, s in enumerate(opt.state.values())})
            assert said[name].state == (state,), name
            assert said[name].checkpoint == size(model.state_dict()) + state, name
            assert said[name].weights == said["lowbit"].weights, name
            assert said[name].gradients == said["lowbit"].gradients, name


def sharded(world, rank, ranks=None):
    """The model under fully_shard as one of `world` ranks, its optimizer,
    and what is said of the sharded model.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (world,))
        model = Model().bfloat16()
        fully_shard(model, mesh=mesh)
        for make, options in SHARDED:
            opt = make(lowbit.param_groups(model), **options)
            own = lowbit.estimate(model, make, **options)
            assert own == lowbit.estimate(Model().bfloat16(), make, ranks=mesh, **options)
            assert own.ranks == world
            weights = sum(size(local(p)) for p in model.parameters()) + size(
                dict(model.named_buffers())
            )
            yield own, held(opt), weights
    finally:
        dist.destroy_process_group()


SHARDED = [
    (lowbit.AdamW, {}),
    (lowbit.AdamW, {"state_format": "lpmm4", "param_format": "bfloat16_kahan"}),
    (lowbit.Adafactor, {}),
    (lowbit.Fira, {"rank": 16}),
]


@pytest.mark.parametrize("world", [3, 70], ids=str)
def test_ranks_hold_what_fully_shard_gives_them(world):
    for rank in (0, world - 1):  # of 70 the last has an empty part of everything
        for said, state, weights in sharded(world, rank):
            assert said["lowbit"].state[rank] == state
            assert said["lowbit"].weights[rank] == weights
            assert said["lowbit"].largest == 0
    one, many = lowbit.estimate(Model()), lowbit.estimate(Model(), ranks=world)
    for name, alone in one.footprints.items():
        assert sum(many[name].gradients) == alone.gradients[0]
        if name in ("lowbit", "torch_float32", "torch_bfloat16"):
            assert many[name].checkpoint == alone.checkpoint
    assert "fully_shard" in many["bitsandbytes_8bit"].note and not one["bitsandbytes_8bit"].note


def test_thousands_of_ranks_take_no_square_of_their_number():
    model, world = nn.Linear(64, 5000, dtype=torch.bfloat16), 20_000  # the square is a minute
    said = lowbit.estimate(model, ranks=world)["lowbit"]
    assert sum(said.weights) == sum(size(p) for p in model.parameters())
    assert said.weights[4999] == 65 * 2 and said.weights[5000] == 0


def partly(world, *meshes):
    """A model some of whose layers are sharded, each over a mesh of so many ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layers = [nn.Embedding(256, 64), nn.Linear(64, 100), nn.Linear(100, 64), nn.Linear(64, 256)]
    model = nn.Sequential(*layers).bfloat16()
    for i, size in enumerate(meshes, 1):
        shape = (world // size, size)  # one dimension replicates, the other shards
        fully_shard(model[i], mesh=init_device_mesh("cpu", shape, mesh_dim_names=("r", "s")))
    return model


@pytest.fixture
def fake_ranks():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_what_is_not_sharded_is_counted_on_each_rank(fake_ranks):
    model = partly(4, 4)
    opt = lowbit.AdamW(lowbit.param_groups(model))
    said = lowbit.estimate(model)
    assert said.ranks == 4
    assert said["lowbit"].state[1] == held(opt)
    assert said["lowbit"].weights[1] == sum(size(local(p)) for p in model.parameters())
    alone = lowbit.estimate(partly(4))
    assert alone.ranks == 1
    for name in ("lowbit", "torch_float32", "torch_bfloat16"):  # which do not choose by the shard
        assert said[name].checkpoint == alone[name].checkpoint, name
    assert lowbit.estimate(model, ranks=4) == lowbit.estimate(partly(4), ranks=4)


def test_parameters_in_different_numbers_of_parts_are_refused(fake_ranks):
    message = r"'2.weight' has 2 parts and parameter '1.bias' has 4: .* pass ranks="
    with pytest.raises(ValueError, match=message):
        lowbit.estimate(partly(4, 4, 2))


def test_torchao_chooses_by_the_local_shard():
    model = nn.Sequential(nn.Linear(64, 129, bias=False))
    said = lowbit.estimate(model, ranks=2)["torchao_8bit"]
    assert said.state == (2 * 4 * 65 * 64 + 4, 2 * (64 * 64 + 4 * 16 + 1024) + 4)
    said = lowbit.estimate(nn.Linear(64, 64, bias=False), ranks=1)["torchao_8bit"]
    assert said.state == (2 * (64 * 64 + 4 * 16 + 1024) + 4,)


@pytest.mark.parametrize("kind", ["torch", "dcp", "safetensors"])
def test_a_checkpoint_has_that_size(kind, tmp_path):
    model = Model(width=512, words=8192).bfloat16()
    opt = stepped(model, lowbit.AdamW(lowbit.param_groups(model)))
    said = lowbit.estimate(model)["lowbit"].checkpoint
    states = {"model": model.state_dict(), "optimizer": opt.state_dict()}
    if kind == "torch":
        torch.save(states, tmp_path / "run.pt")
    elif kind == "dcp":
        dcp.save(states, checkpoint_id=tmp_path / "run", no_dist=True)
    else:
        from safetensors.torch import save_file

        kept = {
            f"{i}.{k}": t for i, s in states["optimizer"]["state"].items() for k, t in s.items()
        }
        save_file({**states["model"], **kept}, tmp_path / "run.safetensors")
    written = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert said <= written <= 1.01 * said


def test_a_large_model_needs_no_memory():
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(1 << 16, 1 << 16, bias=False) for _ in range(64)])
    said = lowbit.estimate(model.bfloat16(), state_format="4bit", ranks=64)
    assert said.parameters == 1 << 38
    assert said["lowbit"].state[0] * 64 / said.parameters == pytest.approx(1 + 2 * 4 / 128, 1e-3)


def test_the_result_prints_and_becomes_json():
    said = lowbit.estimate(Model().bfloat16(), "AdamW4bit", ranks=2)
    text, page = str(said), said._repr_html_()
    for footprint in said.footprints.values():
        assert footprint.title in text and footprint.title in page
        assert footprint.note in text
    assert (
        "the largest of 2 ranks" in text and "100%" in text and text.splitlines()[2].startswith(" ")
    )
    assert page.count("<tr>") == 1 + len(said.footprints)
    with_averages = lowbit.estimate(Model().bfloat16(), ranks=2, ema=True)
    lines = str(with_averages).splitlines()
    assert lines[2].split() == [
        "weights",
        "gradients",
        "state",
        "averages",
        "sum",
        "of",
        "float32",
        "checkpoint",
    ]
    assert "<th>averages</th>" in with_averages._repr_html_() and "averages" not in page
    averages = with_averages.as_dict()["footprints"]["lowbit"]["averages"]
    assert tuple(averages) == with_averages["lowbit"].averages and len(averages) == 2
    data = json.loads(json.dumps(said.as_dict()))
    assert data["footprints"]["lowbit"]["state"] == list(said["lowbit"].state)
    assert data["optimizer"] == "AdamW4bit" and data["dtypes"] == ["bfloat16"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        said.ranks = 3


@pytest.mark.parametrize(
    "given, options, error, message",
    [
        (
            nn.Linear(8, 8),
            {"optimizer": "Adamw"},
            ValueError,
            r"no optimizer 'Adamw'; did you mean 'AdamW'\?$",
        ),
        (
            nn.Linear(8, 8),
            {"optimizer": torch.optim.AdamW},
            TypeError,
            "optimizer of lowbit, not AdamW",
        ),
        (
            nn.Linear(8, 8),
            {"optimizer": torch.optim.AdamW, "full_precision": ()},
            TypeError,
            "full_precision",
        ),
        (
            nn.Linear(8, 8),
            {"optimizer": lowbit.SGD(nn.Linear(8, 8).parameters(), 0.1)},
            TypeError,
            "a class of lowbit or its name, not a SGD$",
        ),
        (nn.Linear(8, 8), {"state_format": "9bit"}, ValueError, "9bit"),
        (nn.Linear(8, 8), {"ema": "bfloat16"}, ValueError, "to nearest it stands still"),
        (nn.Linear(8, 8), {"colour": 1}, TypeError, "colour"),
        (nn.Linear(8, 8), {"ranks": 0}, ValueError, "at least 1 but is: 0"),
        (nn.Linear(8, 8), {"ranks": "2"}, TypeError, "number or a DeviceMesh but is: '2'"),
        (nn.Linear(8, 8).double(), {}, ValueError, "float64"),
        (
            nn.Linear(8, 8).requires_grad_(False),
            {},
            ValueError,
            "no parameter that requires a gradient",
        ),
        ([1], {}, TypeError, "not list"),
        ("nowhere", {}, FileNotFoundError, "nothing is downloaded"),
    ],
)
def test_what_does_not_fit_raises(given, options, error, message):
    with pytest.raises(error, match=message):
        lowbit.estimate(given, **options)


# Configurations of transformers

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "dtype": "bfloat16",
}


@pytest.fixture
def transformers(monkeypatch):
    present = importlib.util.find_spec("transformers") is not None
    need("frameworks", present, "transformers is not installed: make frameworks")
    import transformers

    def refuse(*args):
        raise AssertionError("it looks for a host")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return transformers


def write(folder, **changes):
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return folder


def test_a_configuration_is_its_model(transformers, tmp_path):
    folder = write(tmp_path)
    config = transformers.LlamaConfig(**LLAMA)
    real = transformers.AutoModelForCausalLM.from_config(config)
    assert {p.dtype for p in real.parameters()} == {torch.bfloat16}
    said = lowbit.estimate(real)
    for given in (folder, str(folder / "config.json"), config):
        assert lowbit.estimate(given) == said
    for alone in (None, [], "LlamaForCausalLM"):
        assert lowbit.estimate(write(tmp_path, architectures=alone)) == said  # a causal model
    whole = copy.deepcopy(real).float()
    assert lowbit.estimate(folder, dtype=torch.float32) == lowbit.estimate(whole)
    assert said["lowbit"].state == (held(stepped(real, lowbit.AdamW(lowbit.param_groups(real)))),)


def test_a_configuration_loads_and_executes_nothing(transformers, tmp_path):
    (tmp_path / "code.py").write_text("raise SystemExit('executed')\n")
    auto = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    said = lowbit.estimate(write(tmp_path))
    kernels = "someone/kernels"
    folder = write(
        tmp_path,
        auto_map=auto,
        _attn_implementation=kernels,
        attn_implementation=kernels,
        quantization_config={"quant_method": "x"},
    )
    assert lowbit.estimate(folder) == said
    for changes, message in [
        ({"architectures": ["Own"], "auto_map": auto}, "'Own'.* not executed"),
        ({"architectures": ["pipeline"]}, "'pipeline'.* not executed"),
        ({"architectures": {"a": 1}}, "architectures"),
        ({"model_type": "own", "auto_map": auto}, "'own'.* not executed"),
        ({"model_type": None}, "no model_type"),
        ({"num_attention_heads": "many"}, "llama|Llama"),
    ]:
        with pytest.raises(ValueError, match=message):
            lowbit.estimate(write(tmp_path, **changes))


def test_the_command_line(transformers, tmp_path, capsys):
    folder = str(write(tmp_path))
    assert command.main(["estimate", folder]) == 0
    assert capsys.readouterr().out == f"{lowbit.estimate(folder)}\n"
    assert command.main(["estimate", "--ema", "float32", folder]) == 0
    assert capsys.readouterr().out == f"{lowbit.estimate(folder, ema='float32')}\n"
    arguments = (
        "--optimizer Fira --ranks 2 --dtype float32 --state-format 4bit --option rank=8 "
        "--full-precision *embed* --json"
    )
    assert command.main(["estimate", folder, *arguments.split()]) == 0
    wanted = lowbit.estimate(
        folder,
        "Fira",
        ranks=2,
        dtype=torch.float32,
        state_format="4bit",
        rank=8,
        full_precision=["*embed*"],
    )
    assert json.loads(capsys.readouterr().out) == wanted.as_dict()


def test_errors_name_options_as_they_are_typed(transformers, tmp_path, capsys):
    folder = str(write(tmp_path))
    assert command.main(["estimate", folder, "--device-memory", "24GiB"]) == 2
    assert "estimate: --context is missing" in capsys.readouterr().err
    assert command.main(["estimate", folder, "--checkpointing"]) == 2
    assert "ask for it by --device-memory or --context\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["estimate"],
        ["estimate", "nowhere"],
        ["estimate", ".", "--ranks", "two"],
        ["estimate", ".", "--option", "rank"],
        ["estimate", ".", "--dtype", "int8"],
        ["estimate", ".", "--ema", "bfloat16"],
        ["estimate", "pyproject.toml"],
    ],
    ids=" ".join,
)
def test_bad_usage_is_exit_code_2_and_one_line(arguments, capsys):
    try:
        code = command.main(arguments)
        lines = capsys.readouterr().err.splitlines()
    except SystemExit as end:  # argparse's, whose last line is the error
        code, lines = end.code, capsys.readouterr().err.splitlines()[-1:]
    assert code == 2
    assert len(lines) == 1 and "Traceback" not in lines[0]
