"""Every recipe runs on the CPU as its first lines say, learns, and continues from what it saved."""

import copy
import importlib.util
import json
import os
import pathlib
import re

import pytest
import torch

from tests.repo import experts_worker
from tests.support import pages
from tests.support.paths import RECIPES
from tests.support.ranks import launch
from tests.support.require import need

pytestmark = pytest.mark.long

# What both recipes of transformers import, with each of their runs if nobody did before.
TRANSFORMERS = ("transformers.models.llama.modeling_llama", "transformers.trainer")
COVERED = {"demo", "elastic", "toy"}  # make run, test_elastic, the helper


def output(name, ranks, folder, *options):
    """What the recipe printed on so many ranks (0: a script alone)."""
    root = os.pathsep.join([str(RECIPES.parent), os.environ.get("PYTHONPATH", "")])
    environment = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": root, "HF_HUB_OFFLINE": "1"}
    imported = TRANSFORMERS if name in ("huggingface", "one_card") else ()
    return launch.run(
        RECIPES / f"{name}.py", ranks, *options, cwd=folder, imported=imported, **environment
    )


def run(name, ranks, folder):
    """The losses that the recipe printed."""
    return [float(x) for x in re.findall(r"loss'?:? '?(\d+\.\d+)", output(name, ranks, folder))]


@pytest.mark.parametrize(
    "name, ranks, again",
    [
        ("single_device", 0, 0),
        ("step_in_backward", 0, None),
        ("fsdp2", 2, 1),
        ("muon", 2, 1),
        ("fsdp1", 2, 1),
        ("ddp_accumulate", 2, None),
        ("hsdp_tp", 4, None),
        ("pipeline", 2, 4),
        ("huggingface", 0, None),
        ("from_bitsandbytes", 0, None),
        ("float32_to_8bit", 0, None),
    ],
)
def test_recipe(name, ranks, again, tmp_path):
    if name == "huggingface":
        present = importlib.util.find_spec("transformers") is not None
        need("frameworks", present, "transformers is not installed: make frameworks")
    first = run(name, ranks, tmp_path)
    assert len(first) >= 2 and first[-1] < first[0] - 0.1, first
    if again is not None:
        second = run(name, again, tmp_path)
        assert second[0] < first[0] - 1.0 and second[-1] < first[-1], (first, second)
    # Saved by Writer, which replaces a folder when all is written.
    if name in ("fsdp1", "fsdp2", "hsdp_tp", "muon", "pipeline"):
        assert (tmp_path / "out" / name / "lowbit.json").exists()


def test_each_rank_takes_a_gpu_of_its_own():
    """A mesh shards on the current device, which is cuda:0 on every rank that chooses none."""
    several = {p.name: p.read_text() for p in RECIPES.glob("*.py") if "nccl" in p.read_text()}
    assert len(several) >= 9
    assert [name for name, text in several.items() if "torch.cuda.set_device(" not in text] == []


@pytest.mark.parametrize("flat", [False, True], ids=["nested names", "flat names"])
def test_experts_have_the_same_bits_under_every_layout(pool, flat):
    """4 ranks of which 2 share the experts, then 4 that share them, then one process; by torch's
    get_state_dict and set_state_dict.
    """
    folders = [f"{pool.folder}/{flat}{i}" for i in range(2)]
    saved, end = pool.run(4, experts_worker.trained, 2, folders[0], flat)[0]
    assert saved.keys() == end.keys() and all(saved[name] != end[name] for name in saved)
    for ranks, folder, to in ((4, *folders), (1, folders[1], None)):
        for loaded, after, experts in pool.run(
            ranks, experts_worker.moved, ranks, folder, flat, to
        ):
            assert loaded == saved and after == end and experts == 8 // ranks


def test_experts_resume_with_another_number_of_ranks_that_share_them(tmp_path):
    """As the recipe's first lines say."""
    losses = []
    for ranks, options in ((4, ()), (4, ("--ranks", "4")), (1, ("--ranks", "1"))):
        said = output("expert_parallel", ranks, tmp_path, *options)
        losses.append([float(x) for x in re.findall(r"loss (\d+\.\d+)", said)])
        assert (tmp_path / "out" / "expert_parallel" / "lowbit.json").exists()
    first, second, third = losses
    assert first[-1] < first[0] - 0.1 and second[0] < first[0] - 1.0 and third[0] < first[0] - 1.0
    assert third[-1] < first[-1]


@pytest.mark.parametrize("ranks", [0, 2])
def test_weights_in_bfloat16_are_multiplied_in_either(ranks, tmp_path):
    """In float32 where a processor has no instructions for bfloat16; what is learned is the same
    but for the rounding of products.
    """
    sizes = ("--steps", "4", "--width", "64", "--depth", "1", "--context", "32", "--batch", "8")
    bfloat16, float32 = (
        json.loads(
            output("train_gpt", ranks, tmp_path, "--compute", compute, *sizes).splitlines()[-1]
        )
        for compute in ("bfloat16", "float32")
    )
    assert bfloat16["bytes_per_parameter"] == float32["bytes_per_parameter"]
    assert bfloat16["train_loss"] != float32["train_loss"]
    assert abs(bfloat16["held_out_loss"] - float32["held_out_loss"]) < 0.01


def one_card(folder, *options):
    """What the recipe's last line says, and all that it printed."""
    need("frameworks", importlib.util.find_spec("transformers"), "no transformers: make frameworks")
    printed = output("one_card", 0, folder, "--context", "64", "--memory", "1GiB", *options)
    return json.loads(printed.splitlines()[-1]), printed


def test_a_run_on_one_card_resumes_with_the_same_bits(tmp_path):
    """`("one_card",`: a model of a config.json, of which a fifth of the gradients may wait."""
    config = {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 320,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    small = ("--model", tmp_path / "config.json", "--lr", "1e-3")
    whole, printed = one_card(
        tmp_path, *small, "--out", "whole", "--steps", "4", "--export", "exported"
    )
    losses = [float(x) for x in re.findall(r"loss (\d+\.\d+)", printed)]
    assert losses[-1] < losses[0] and 5e5 < whole["parameters"] < 1e6
    one_card(tmp_path, *small, "--out", "cut", "--steps", "2")
    one_card(tmp_path, *small, "--out", "cut", "--steps", "2", "--overlap", "256KiB")
    a, b = (
        torch.load(tmp_path / folder / "run.pt", weights_only=True) for folder in ("whole", "cut")
    )
    assert a["step"] == b["step"] == 4
    assert any(
        key.endswith("_dynamic8") for state in a["optimizer"]["state"].values() for key in state
    )
    for key in ("model", "optimizer"):
        x, y = (each[key].get("state", each[key]) for each in (a, b))
        torch.testing.assert_close(x, y, rtol=0, atol=0)
    from safetensors.torch import load_file

    exported = load_file(tmp_path / "exported" / "model.safetensors")
    for name, value in exported.items():
        assert torch.equal(a["model"][name], value), name


def test_a_run_on_one_card_needs_what_is_estimated(tmp_path):
    """Of the recipe's own model: the peak is near the estimate, within the limit and below half of
    torch's, whose first step has all that later ones have.
    """
    whole, printed = one_card(tmp_path, "--out", "whole", "--steps", "2")
    assert "a card of 1.00 GiB" in printed and whole["peak"] < 1 << 30
    assert 0.8 < whole["ratio"] < 1.25, whole
    peer, _ = one_card(tmp_path, "--out", "torch", "--optimizer", "torch", "--steps", "1")
    assert peer["peak"] > 2 * whole["peak"]
    with pytest.raises(AssertionError, match=r"memory|alloc"):
        one_card(tmp_path, "--out", "small", "--steps", "1", "--memory", "60MiB")


def test_the_notebook_prints_what_it_shows(tmp_path, monkeypatch):
    """But for the shares of codes, which other products of floats change, and for what stderr says
    of a processor without bfloat16.
    """
    present = importlib.util.find_spec("nbclient") and importlib.util.find_spec("ipykernel")
    need("notebook", present is not None, "nbclient or ipykernel is not installed")
    import nbformat
    from nbclient import NotebookClient

    environment = {
        "PYTHONPATH": str(RECIPES.parent),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "IPYTHONDIR": str(tmp_path),
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    shown = nbformat.read(RECIPES / "first_look.ipynb", as_version=4)
    client = NotebookClient(
        copy.deepcopy(shown), timeout=120, resources={"metadata": {"path": str(RECIPES)}}
    )

    def printed(notebook):
        texts = [
            "".join(o["text"] for o in cell.get("outputs", ()) if o.get("name") == "stdout")
            for cell in notebook.cells
        ]
        return "".join(text.partition("saturated ")[0] for text in texts)

    assert pages.alike(printed(shown), printed(client.execute()))
    assert "lowbit AdamW, 8bit" in printed(shown) and "29 of 29" in printed(shown)


def test_a_processor_that_must_not_use_its_bfloat16_has_none(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPES))
    import train_gpt

    def products(isa, avx512_bf16=False, amx=False, weights=torch.bfloat16, device="cpu"):
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", isa)
        monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: avx512_bf16)
        monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: amx)
        return train_gpt.compute_dtype(weights, device)

    assert products("DEFAULT", avx512_bf16=True) == products("ALL", amx=True) == torch.bfloat16
    assert products("DEFAULT") == torch.float32
    assert products("AVX2", avx512_bf16=True, amx=True) == torch.float32
    assert products("AVX512_CORE_BF16", avx512_bf16=True) == torch.bfloat16
    assert products("DEFAULT", device="cuda") == torch.bfloat16
    assert products("DEFAULT", weights=torch.float16) == torch.float16


def test_every_recipe_is_run():
    names = {path.stem for path in RECIPES.glob("*.py")}
    text = pathlib.Path(__file__).read_text()
    assert {name for name in names if f'("{name}",' not in text} == COVERED
