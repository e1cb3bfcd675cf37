"""The C++ front end, installed and used by the example as a program outside this tree would,
against the LibTorch of the torch wheel: it trains, saves, resumes from its file, and has the bits
that Python has from the same gradients."""

import pathlib
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

import lowbit
from tests.support.paths import ROOT, for_build
from tests.support.peers.files import TOOL, need_tool
from tests.support.require import need

pytestmark = pytest.mark.long

BUILD = ROOT / "build" / "lowbit"


def run(*command, **options):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What the example wrote: its optimizer's file, and a record of its weights and gradients."""
    cmake = shutil.which("cmake", path=str(pathlib.Path(sys.executable).parent)) or shutil.which(
        "cmake"
    )
    installed = BUILD / "csrc" / "libtorch" / "cmake_install.cmake"
    hint = "the C++ front end is not built: make test configures it with LOWBIT_CPP=ON"
    need("cpp", cmake is not None and installed.exists(), hint)
    toolkit = torch.version.cuda is None or shutil.which("nvcc") is not None
    need("cpp", toolkit, "find_package(Torch) of a torch with CUDA needs the CUDA toolkit")
    out = tmp_path_factory.mktemp("front")
    run(cmake, "--install", installed.parent, "--prefix", out / "prefix")
    shutil.copytree(ROOT / "recipes" / "cpp", out / "source")
    shutil.copy(ROOT / "tests" / "cpp" / "front" / "rules.cpp", out / "source")
    with (out / "source" / "CMakeLists.txt").open("a") as lists:
        lists.write("add_executable(rules rules.cpp)\n")
        lists.write("target_link_libraries(rules PRIVATE lowbit::lowbit ${TORCH_LIBRARIES})\n")
    prefixes = f"{out / 'prefix'};{torch.utils.cmake_prefix_path}"
    run(cmake, "-S", out / "source", "-B", out / "build", f"-DCMAKE_PREFIX_PATH={prefixes}")
    run(cmake, "--build", out / "build", "--parallel", env=for_build(out))
    printed = run(out / "build" / "train", out / "opt.pt", out / "record.pt")
    return out, printed, torch.load(out / "record.pt", weights_only=True)


def net():
    return nn.Sequential(nn.Linear(64, 200), nn.GELU(), nn.Linear(200, 10)).bfloat16()


def optimizer(model):
    return lowbit.AdamW(model.named_parameters(), lr=1e-2, weight_decay=0.1, seed=7)


def states(opt):
    return [opt.state[p] for group in opt.param_groups for p in group["params"]]


def assert_equal(a, b):
    assert set(a) == set(b)
    for key in a:
        assert a[key].dtype == b[key].dtype and torch.equal(a[key], b[key]), key


@pytest.fixture(scope="module")
def replayed(trained):
    """Python's run from the gradients that the example recorded, without a stop."""
    _, _, record = trained
    model = net()
    model.load_state_dict(record["before"])
    opt = optimizer(model)
    for grads in record["grads"]:
        for name, p in model.named_parameters():
            p.grad = grads[name]
        opt.step()
    return model, opt


def test_it_learns(trained):
    losses = [float(line.rsplit(maxsplit=1)[-1]) for line in trained[1].splitlines()]
    assert len(losses) == 5 and losses[-1] < 0.7 * losses[0], losses


def test_weights_and_state_are_those_of_python(trained, replayed):
    out, _, record = trained
    model, opt = replayed
    for name, p in model.named_parameters():
        assert torch.equal(p.detach(), record["after"][name]), name
    saved = torch.load(out / "opt.pt", weights_only=True)
    for i, state in enumerate(states(opt)):
        assert_equal(saved["state"][i], state)
    assert "exp_avg_dynamic8" in saved["state"][0]


def test_python_goes_on_from_the_file(trained, replayed):
    out, _, _ = trained
    model, opt = replayed
    other = optimizer(model)
    other.load_state_dict(torch.load(out / "opt.pt", weights_only=True))
    for a, b in zip(states(other), states(opt), strict=True):
        assert_equal(a, b)
    group = other.param_groups[0]
    assert group["lr"] == 1e-2 and group["betas"] == (0.9, 0.999) and group["seed"] == 7


def test_lowbit_ckpt_reads_the_file(trained):
    need_tool()
    printed = run(TOOL, "inspect", trained[0] / "opt.pt")
    assert "exp_avg_sq_dynamic8_unsigned_scale" in printed and "dynamic8" in printed
    run(TOOL, "verify", trained[0] / "opt.pt")


def test_it_goes_on_from_a_file_of_python(trained, replayed):
    out, _, _ = trained
    opt = replayed[1]
    torch.save(opt.state_dict(), out / "python.pt")
    printed = run(out / "build" / "train", out / "again.pt", out / "record2.pt", out / "python.pt")
    saved, again = (torch.load(out / n, weights_only=True) for n in ("again.pt", "record2.pt"))
    assert "loaded step 40" in printed and len(again["grads"]) == 40
    assert saved["state"][0]["step"] == 80
    wrong = net()
    torch.save(
        lowbit.AdamW(wrong.named_parameters(), state_format="4bit").state_dict(), out / "wrong.pt"
    )
    done = subprocess.run(
        [out / "build" / "train", out / "x.pt", out / "y.pt", out / "wrong.pt"],
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0 and "has no 'exp_avg_dynamic8'" in done.stderr


# Every rule, and torch's own serialization

RULES = {
    "AdamW": lambda p: lowbit.AdamW(p, lr=1e-2, weight_decay=0.1, amsgrad=True, seed=7),
    "Adam": lambda p: lowbit.Adam(p, lr=1e-2, weight_decay=0.1, seed=7),
    "SGD": lambda p: lowbit.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1, seed=7),
    "SGD, decoupled": lambda p: lowbit.SGD(
        p, lr=1e-2, momentum=0.9, weight_decay=0.1, decoupled=True, seed=7
    ),
    "SGD, dampened first": lambda p: lowbit.SGD(
        p, lr=1e-2, momentum=0.9, dampening=0.5, dampen_first=True, seed=7
    ),
    "SGD, plain": lambda p: lowbit.SGD(p, lr=1e-2, seed=7),
    "Lion": lambda p: lowbit.Lion(p, lr=1e-3, weight_decay=0.1, maximize=True, seed=7),
}


@pytest.fixture(scope="module", params=RULES)
def ruled(trained, request):
    """A rule's name and its files, and Python's parameters and optimizer from the same gradients,
    without a stop.
    """
    out = trained[0]
    files = [out / f"{request.param} {name}.pt" for name in ("saved", "archive", "record")]
    run(out / "build" / "rules", request.param, *files)
    record = torch.load(files[2], weights_only=True)
    params = {name: nn.Parameter(value) for name, value in record["before"].items()}
    opt = RULES[request.param](params.items())
    for grads in record["grads"]:
        for name, p in params.items():
            p.grad = grads[name]
        opt.step()
    return request.param, files, record, params, opt


def test_every_rule_has_the_bits_of_python_through_torchs_own_save_and_load(ruled):
    _, files, record, params, opt = ruled
    for name, p in params.items():
        assert torch.equal(p.detach(), record["after"][name]), name
    saved = torch.load(files[0], weights_only=True)
    own = opt.state_dict()
    assert saved["state"].keys() == own["state"].keys()
    for i, state in own["state"].items():
        assert_equal(saved["state"][i], state)
    (group,) = saved["param_groups"]
    for key in set(group) - {"params"}:
        assert group[key] == own["param_groups"][0][key], key


def test_what_torch_save_writes_holds_the_same_file(ruled, tmp_path):
    _, files, _, _, opt = ruled
    archive = torch.jit.load(files[1])
    (tmp_path / "inner.pt").write_bytes(bytes(archive.lowbit.numpy()))
    inner = torch.load(tmp_path / "inner.pt", weights_only=True)
    for i, state in opt.state_dict()["state"].items():
        assert_equal(inner["state"][i], state)


def test_lowbit_ckpt_reads_what_every_rule_saves(ruled):
    need_tool()
    rule, files, *_ = ruled
    printed = [run(TOOL, "inspect", file).replace(str(file), "") for file in files[:2]]
    assert printed[0] == printed[1] and ("dynamic8" in printed[0] or rule == "SGD, plain")
    for file in files[:2]:
        run(TOOL, "verify", file)


# Files whose settings or groups differ


def params_of_rules():
    """As tests/cpp/front/rules.cpp makes them."""
    shapes = {
        "matrix": torch.zeros(70, 300, dtype=torch.bfloat16),
        "wide": torch.zeros(64, 77),
        "cube": torch.zeros(9, 40, 20, dtype=torch.half),
        "vector": torch.zeros(300, dtype=torch.bfloat16),
    }
    return {name: nn.Parameter(value) for name, value in shapes.items()}


def stepped(cls, **options):
    params = params_of_rules()
    opt = cls(params.items(), lr=1e-2, **options)
    for p in params.values():
        p.grad = torch.ones_like(p)
    opt.step()
    return opt


def test_the_rule_is_that_of_the_file(trained, tmp_path):
    """Adam's state has AdamW's names."""
    rules = trained[0] / "build" / "rules"
    for cls in (lowbit.Adam, lowbit.AdamW):
        torch.save(stepped(cls).state_dict(), tmp_path / "from.pt")
        run(rules, "load", tmp_path / "from.pt", tmp_path / "to.pt")
        (group,) = torch.load(tmp_path / "to.pt", weights_only=True)["param_groups"]
        assert group["decoupled_weight_decay"] is (cls is lowbit.AdamW)
    cautious = stepped(lowbit.AdamW, cautious=True).state_dict()
    kahan = stepped(lowbit.AdamW).state_dict()
    kahan["state"][0]["param_bfloat16_kahan"] = torch.zeros(3)
    for saved, said in (
        (cautious, "cautious=True, which C++ does not step"),
        (kahan, "'param_bfloat16_kahan', which this param_format does not keep"),
    ):
        torch.save(saved, tmp_path / "from.pt")
        command = [rules, "load", tmp_path / "from.pt", tmp_path / "no.pt"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode != 0 and said in done.stderr


def test_state_is_loaded_by_names(trained, tmp_path):
    """A Python model may register its layers in another order; by position, state of equal shapes
    would be swapped in silence.
    """
    rules, params = trained[0] / "build" / "rules", params_of_rules()
    for p in params.values():
        p.grad = torch.randn_like(p)
    turned = dict(reversed(params.items()))
    opt = lowbit.AdamW([(f"module.{name}", p) for name, p in turned.items()])
    opt.step()
    saved = opt.state_dict()
    saved["param_groups"][0]["cautious"] = None
    torch.save(saved, tmp_path / "from.pt")
    run(rules, "load", tmp_path / "from.pt", tmp_path / "to.pt")
    loaded = torch.load(tmp_path / "to.pt", weights_only=True)
    assert loaded["param_groups"][0]["param_names"] == list(params)
    for i, p in enumerate(params.values()):
        assert_equal(loaded["state"][i], opt.state[p])
    for names, said in (
        (["other", *list(turned)[1:]], "no parameter named vector"),
        (list(turned)[:1] * 4, "two parameters named vector"),
        (list(turned)[:3], "3 param_names for 4 parameters"),
    ):
        saved["param_groups"][0]["param_names"] = names
        torch.save(saved, tmp_path / "from.pt")
        command = [rules, "load", tmp_path / "from.pt", tmp_path / "no.pt"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode != 0 and said in done.stderr


@pytest.mark.parametrize(
    "kind, said",
    [
        ("dtype", "a parameter was Float [64, 77] and is now BFloat16 [64, 77]"),
        ("shape", "a parameter was Float [64, 77] and is now Float [64, 7]"),
        ("grad", "a gradient is [7] on cpu, its parameter [64, 77] on the CPU"),
        ("backward", "modified by an inplace operation"),
        ("lr", "Invalid learning rate: -1"),
        ("betas", "Invalid beta parameter at index 1: 1"),
        ("torch", "a parameter group has options of another optimizer"),
        ("nesterov", "Nesterov momentum requires a momentum and zero dampening"),
    ],
)
def test_a_step_that_would_write_where_it_must_not_is_refused(trained, kind, said):
    command = [trained[0] / "build" / "rules", "misuse", kind]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0 and said in done.stderr, done.stderr


def test_state_of_another_rule_is_refused(trained, tmp_path):
    """It has the momentum that this rule keeps, and another learning rate."""
    rules = trained[0] / "build" / "rules"
    torch.save(stepped(lowbit.AdamW).state_dict(), tmp_path / "from.pt")
    command = [rules, "lion", tmp_path / "from.pt", tmp_path / "no.pt"]
    done = subprocess.run(command, capture_output=True, text=True)
    said = "keeps exp_avg_sq, which the rule here, lion, does not"
    assert done.returncode != 0 and said in done.stderr, done.stderr
    torch.save(stepped(lowbit.Lion).state_dict(), tmp_path / "from.pt")
    run(rules, "lion", tmp_path / "from.pt", tmp_path / "to.pt")


def test_state_of_frozen_parameters_is_loaded_and_saved(trained, tmp_path):
    """They may be trained again."""
    opt = stepped(lowbit.AdamW)
    torch.save(opt.state_dict(), tmp_path / "from.pt")
    run(trained[0] / "build" / "rules", "frozen", tmp_path / "from.pt", tmp_path / "to.pt")
    saved = torch.load(tmp_path / "to.pt", weights_only=True)["state"]
    for i, state in enumerate(states(opt)):
        assert_equal(saved[i], state)


def test_a_group_that_was_added_is_saved_before_its_first_step(trained, tmp_path):
    """Without names, which are those of the first group."""
    run(trained[0] / "build" / "rules", "added", tmp_path / "saved.pt")
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    first, second = saved["param_groups"]
    assert first["param_names"] == list(params_of_rules()) and first["params"] == [0, 1, 2, 3]
    assert "param_names" not in second and second["params"] == [4, 5]
    assert list(saved["state"]) == [0, 1, 2, 3, 4, 5]
    assert all(state["step"] == 0 for state in saved["state"].values())
    more = [nn.Parameter(torch.zeros(80, 64)), nn.Parameter(torch.zeros(5))]
    opt = lowbit.AdamW([{"params": list(params_of_rules().values())}, {"params": more}])
    opt.load_state_dict(saved)
    for p in more:
        assert opt.state[p]["step"] == 0


def test_groups_have_their_own_options(trained, tmp_path):
    """torch puts `defaults` in the place of options that it does not know."""
    own, default = (0.5, 0.0), (0.25, 0.01)
    for way, made in (("given", [own, default]), ("added with options", [default, own])):
        run(trained[0] / "build" / "rules", way, tmp_path / "saved.pt")
        saved = torch.load(tmp_path / "saved.pt", weights_only=True)["param_groups"]
        assert [(group["lr"], group["weight_decay"]) for group in saved] == made
