"""DeepSpeed's folders that contradict themselves, or are not whole: one clear error."""

import os
import re
import shutil

import pytest
import torch

from tests.ckpt.deepspeed.folders import edited, optimizer, write
from tests.support.files.deepspeed import (
    fragment_address,
    model_states,
    optimizer_states,
    rank_file,
    save,
    small_run,
)
from tests.support.peers.files import need_tool, run

pytestmark = pytest.mark.slow

need_tool()


def set_fragment(content, numel, start):
    optimizer(content)["param_slice_mappings"][0]["a.weight"] = fragment_address(numel, start)


def reshape(content):
    content["param_shapes"][0]["a.weight"] = torch.Size([33, 18])


def of_two_ranks(folder, change):
    """Names and shapes of a second rank that shares tensors with the first."""
    content = model_states(small_run(), 1, 3)
    change(content)
    save(content, folder / "mp_rank_01_model_states.pt")


EDITS = {
    "a slice beyond its vector": (
        "zero 1",
        rank_file(0),
        lambda c: set_fragment(c, 10**15, 0),
        "elements 0 to 1000000000000000 of a vector of",
    ),
    "a slice that starts below": (
        "zero 1",
        rank_file(0),
        lambda c: set_fragment(c, 10, -4),
        "not two numbers",
    ),
    "a slice that is too short": (
        "zero 1",
        rank_file(0),
        lambda c: set_fragment(c, 10, 0),
        "a.weight: the files hold",
    ),
    "a slice of an unknown parameter": (
        "zero 1",
        rank_file(1),
        lambda c: optimizer(c)["param_slice_mappings"][1].update(x=fragment_address(1, 0)),
        "slice of x, which",
    ),
    "paddings of another group": (
        "zero 1",
        rank_file(0),
        lambda c: optimizer(c).update(param_alignment_paddings=[[0], [0, 0]]),
        "param_alignment_paddings have no 2 numbers for the parameters of group 0",
    ),
    "no slices": (
        "zero 1",
        rank_file(0),
        lambda c: optimizer(c).pop("param_slice_mappings"),
        "does not say where parameters lie",
    ),
    "another shape": (
        "zero 1",
        "mp_rank_00_model_states.pt",
        reshape,
        "a.weight: the files hold 561 of its 594 elements",
    ),
    "another shape in stage 3": (
        "zero 3",
        "zero_pp_rank_0_mp_rank_00_model_states.pt",
        reshape,
        "where the shapes of",
    ),
    "a shape that overflows": (
        "zero 3",
        "zero_pp_rank_0_mp_rank_00_model_states.pt",
        lambda c: c["param_shapes"][0].update({"a.weight": torch.Size([2**40, 2**40])}),
        "a.weight",
    ),
    "more ranks than files": (
        "zero 2",
        rank_file(0),
        lambda c: optimizer(c).update(partition_count=[5, 5]),
        "the file of rank 3 is missing",
    ),
    "fewer ranks than files": (
        "zero 2",
        rank_file(0),
        lambda c: optimizer(c).update(partition_count=[2, 2]),
        "has files of 3 ranks",
    ),
    "groups cut apart": (
        "zero 2",
        rank_file(0),
        lambda c: optimizer(c).update(partition_count=[3, 1]),
        "mixture-of-experts layers.*if AutoEP made them.*ds_to_universal",
    ),
    "another step on a rank": (
        "zero 2",
        rank_file(1),
        lambda c: optimizer(c)["base_optimizer_state"]["state"][0].update(step=torch.tensor(9.0)),
        "another one than on the ranks before",
    ),
    "another dtype on a rank": (
        "zero 2",
        rank_file(1),
        lambda c: optimizer(c)["base_optimizer_state"]["state"][0].update(
            exp_avg=optimizer(c)["base_optimizer_state"]["state"][0]["exp_avg"].bfloat16()
        ),
        "is float32 in some files and bfloat16",
    ),
    "a moment that one rank lacks": (
        "zero 2",
        rank_file(2),
        lambda c: optimizer(c)["base_optimizer_state"]["state"][0].pop("exp_avg"),
        "exp_avg: the files hold",
    ),
    "a moment that is too short": (
        "zero 2",
        rank_file(0),
        lambda c: optimizer(c)["base_optimizer_state"]["state"][0].update(exp_avg=torch.ones(3)),
        "not that of the flat vector",
    ),
    "a moment that is too long": (
        "zero 2",
        rank_file(1),
        lambda c: optimizer(c)["base_optimizer_state"]["state"][0].update(
            exp_avg=torch.ones(optimizer(c)["single_partition_of_fp32_groups"][0].numel() + 1)
        ),
        "its state exp_avg of group 0 has the shape .*not that of the flat vector",
    ),
    "quantized slices": (
        "zero 2",
        rank_file(0),
        lambda c: optimizer(c)["base_optimizer_state"]["state"].update(
            {0: {"a.weight": {"exp_avg_dynamic8": torch.ones(4, dtype=torch.uint8)}}}
        ),
        'bind.engine, export="fp32"',
    ),
    "groups of other vectors": (
        "zero 2",
        rank_file(0),
        lambda c: optimizer(c)["base_optimizer_state"]["param_groups"][0].update(params=[7]),
        "do not number the 2 flat vectors",
    ),
    "a group too few": (
        "zero 2",
        rank_file(0),
        lambda c: optimizer(c)["base_optimizer_state"].update(
            param_groups=optimizer(c)["base_optimizer_state"]["param_groups"][:1]
        ),
        "have 1 of the 2 flat vectors",
    ),
    "an elastic checkpoint": (
        "zero 1",
        rank_file(0),
        lambda c: optimizer(c).update(
            base_optimizer_state=[{"exp_avg": torch.ones(4), "exp_avg_sq": torch.ones(4)}] * 2
        ),
        "an elastic checkpoint.*elastic_checkpoint false",
    ),
    "no shapes": (
        "zero 2",
        "mp_rank_00_model_states.pt",
        lambda c: c.pop("param_shapes"),
        "has no param_shapes",
    ),
    "no master": (
        "zero 3",
        rank_file(0),
        lambda c: optimizer(c).update(fp32_flat_groups=[]),
        "offloaded to NVMe",
    ),
    "a frozen slice": (
        "zero 3",
        "zero_pp_rank_1_mp_rank_00_model_states.pt",
        lambda c: c.update(frozen_param_fragments=None),
        "no slice of the frozen f.weight",
    ),
    "a placeholder": (
        "zero 3",
        "zero_pp_rank_0_mp_rank_00_model_states.pt",
        lambda c: c["module"].update({"gone": torch.zeros(0)}),
        "placeholder of gone",
    ),
    "a universal shape": (
        "universal 1",
        "mp_rank_00_model_states.pt",
        reshape,
        "has the shape .33, 17., and .* says .33, 18.",
    ),
    "a universal flat shape": (
        "universal 3",
        "zero_pp_rank_0_mp_rank_00_model_states.pt",
        reshape,
        "a.weight: the files hold 561 of its 594 elements",
    ),
    "a universal parameter without a group": (
        "universal 1",
        "mp_rank_00_model_states.pt",
        lambda c: c["param_shapes"][0].pop("a.weight"),
        "zero/a.weight is of no parameter that .*mp_rank_00_model_states.pt names",
    ),
    "no step": (
        "universal 3",
        "zero/optimizer_state.pt",
        lambda c: c["optimizer_state_dict"]["state"][0].pop("step"),
        "and no step in",
    ),
}


@pytest.mark.parametrize("what", EDITS)
def test_a_contradiction_is_one_clear_error(tmp_path, what):
    kind, file, change, message = EDITS[what]
    folder = write(kind, tmp_path / "step")
    edited(folder / file, change)
    error = run("inspect", folder, code=3).stderr
    assert len(error.splitlines()) == 1
    assert re.search(message, error), error


FILES = {
    "a rank is missing": (
        "zero 1",
        lambda f: (f / rank_file(1)).unlink(),
        "the file of rank 1 is missing",
    ),
    "every rank's file has another name": (
        "zero 1",
        lambda f: [p.rename(f / f"copy-of-{p.name}") for p in f.glob("*_optim_states.pt")],
        "the file of rank 0 is missing.*there is copy-of-zero_pp_rank_0_mp_rank_00_optim_states.pt",
    ),
    "the last rank is missing": (
        "zero 3",
        lambda f: (f / rank_file(2)).unlink(),
        "the file of rank 2 is missing",
    ),
    "two saves": (
        "zero 1",
        lambda f: shutil.copy(f / rank_file(0), f / rank_file(0, "bf16_")),
        "has two files of rank 0",
    ),
    "no model": (
        "zero 1",
        lambda f: (f / "mp_rank_00_model_states.pt").unlink(),
        "tells the parameters' names",
    ),
    "tensor parallelism": (
        "zero 1",
        lambda f: shutil.copy(f / rank_file(0), f / "zero_pp_rank_0_mp_rank_01_optim_states.pt"),
        "several parts of the model.*ds_to_universal",
    ),
    "a pipeline": (
        "zero 1",
        lambda f: (f / "layer_00-model_states.pt").touch(),
        "a pipeline's layers.*ds_to_universal",
    ),
    "experts": (
        "zero 1",
        lambda f: (f / "layer_0_expert_0_mp_rank_00_model_states.pt").touch(),
        "mixture-of-experts.*if AutoEP made them.*ds_to_universal.*deepspeed.moe it leaves out",
    ),
    "a rank's file is a link": (
        "zero 1",
        lambda f: ((f / rank_file(1)).rename(f / "x"), os.symlink("x", f / rank_file(1))),
        "is a link, which is not followed",
    ),
    "a frozen rank's file": (
        "zero 3",
        lambda f: (f / "zero_pp_rank_2_mp_rank_00_model_states.pt").unlink(),
        "zero_pp_rank_2_mp_rank_00_model_states",
    ),
    "a weight is missing": (
        "universal 1",
        lambda f: (f / "zero" / "a.weight" / "fp32.pt").unlink(),
        "no zero/a.weight/fp32.pt",
    ),
    "a parameter is missing": (
        "universal 3",
        lambda f: shutil.rmtree(f / "zero" / "a.weight"),
        "no zero/a.weight/fp32.pt",
    ),
    "a parameter has no state": (
        "universal 1",
        lambda f: [
            (f / "zero" / "b.weight" / f"{s}.pt").unlink()
            for s in ("exp_avg", "exp_avg_sq", "step")
        ],
        "zero/b.weight has not the files that zero/a.weight has",
    ),
    "a first parameter has no state": (
        "universal 1",
        lambda f: [
            (f / "zero" / "a.weight" / f"{s}.pt").unlink()
            for s in ("exp_avg", "exp_avg_sq", "step")
        ],
        "zero/b.weight has not the files that zero/a.weight has",
    ),
    "a moment is missing": (
        "universal 3",
        lambda f: (f / "zero" / "a.weight" / "exp_avg_sq.pt").unlink(),
        "zero/b.weight has not the files that zero/a.weight has",
    ),
    "a step is missing": (
        "universal 1",
        lambda f: (f / "zero" / "a.bias" / "step.pt").unlink(),
        "zero/a.bias has not the files that zero/s has",
    ),
    "a group has no state": (
        "universal 1",
        lambda f: [
            (f / "zero" / p / f"{s}.pt").unlink()
            for p in ("s", "a.bias")
            for s in ("exp_avg", "exp_avg_sq", "step")
        ],
        "zero/a.bias has not the files that zero/b.weight has",
    ),
    "a parameter's folder is a link": (
        "universal 1",
        lambda f: ((f / "zero" / "s").rename(f / "s"), os.symlink("../s", f / "zero" / "s")),
        "is a link, which is not followed",
    ),
    "the parameters are a link": (
        "universal 1",
        lambda f: ((f / "zero").rename(f / "z"), os.symlink("z", f / "zero")),
        "is a link, which is not followed",
    ),
    "a parameter too many": (
        "universal 1",
        lambda f: shutil.copytree(f / "zero" / "s", f / "zero" / "t"),
        "zero/t is of no parameter",
    ),
    "a moment is not of its weight": (
        "universal 1",
        lambda f: (
            of_two_ranks(f, lambda c: None),
            save({"param": torch.zeros(3, 4)}, f / "zero" / "a.weight" / "exp_avg.pt"),
        ),
        "exp_avg.pt: has the shape .3, 4., and fp32.pt says .33, 17.",
    ),
    "a parameter in two groups": (
        "universal 1",
        lambda f: of_two_ranks(f, lambda c: c["param_shapes"].reverse()),
        "mp_rank_01_model_states.pt: has s in group 0, others in group 1",
    ),
    "no model beside it": (
        "universal 1",
        lambda f: (f / "mp_rank_00_model_states.pt").unlink(),
        "no .*model_states.pt",
    ),
    "an empty file": (
        "universal 1",
        lambda f: (f / "zero" / "s" / "exp_avg.pt").write_bytes(b""),
        "exp_avg.pt",
    ),
}


@pytest.mark.parametrize("what", FILES)
def test_a_folder_that_is_not_whole_is_one_clear_error(tmp_path, what):
    kind, change, message = FILES[what]
    folder = write(kind, tmp_path / "step")
    change(folder)
    error = run("inspect", folder, code=3).stderr
    assert len(error.splitlines()) == 1 and re.search(message, error), error


def test_a_flipped_bit_is_found(tmp_path):
    """Each rank's vector is read through many parameters' slices;
    its checksum is verified all the same.
    """
    folder = write("zero 2", tmp_path / "step")
    file = folder / rank_file(1)
    content = bytearray(file.read_bytes())
    vector = optimizer_states(small_run(), 2, 3, 1)["optimizer_state_dict"]["base_optimizer_state"][
        "state"
    ][0]["exp_avg"]
    content[content.index(vector.numpy().tobytes()) + 5] ^= 4
    file.write_bytes(content)
    error = run("convert", folder, tmp_path / "x.pt", code=3).stderr
    assert rank_file(1) in error and not (tmp_path / "x.pt").exists()
    run("verify", folder, code=3)
