"""Every kind of checkpoint of tests/support/kinds into each dialect and back: equal bits where
the tool says so, near where it says that it rounded, and a refusal where the target cannot say it,
each of which stands in a table here."""

import fnmatch
import json
import subprocess

import pytest
import torch

from tests.support.kinds.catalog import KINDS, of, same
from tests.support.peers.files import TOOL, need_tool

pytestmark = pytest.mark.product

need_tool()

DIALECTS = [*dict.fromkeys(kind.dialect for kind in KINDS.values())]  # in the order of the catalog
CONTAINERS = {"dcp": "dcp", "torch": "torch", "legacy": "torch", "safetensors": "torch"}

# (kind, dialect): a part of the message, by the first line that fits.
NOTHING = "holds no optimizer state"
ADAFACTOR = (
    "adafactor adafactor_file adafactor8bit_f*_file adafactor8bit_al*_file "
    "adafactor8bit_golden_al8_file"
)
BESIDE = (
    "lowbit_kahan* flashoptim flashoptim_014_file flashoptim_014_plain_file flashoptim_013_file "
    "flashoptim_013_compressed_file flashoptim_014_float16_file flashoptim_014_32bit_file "
    "flashoptim_golden_file"
)
LOST = "which divides by 255 twice"
REFUSED = (
    ("model_file safetensors_model shared_file", "*", NOTHING),
    ("adafactor8bit_f1_fallback_file", "*", LOST),
    # 0.1.4 keeps scales in the weight's dtype,
    # and parameters with numbers do not tell which weight is theirs.
    (
        (
            "raw ddp_file zip_file legacy_file optimizer_file fsdp2_optim_only master_file "
            "adam_file sgd_file bnb bnb_*file torchao_*_file"
        ),
        "flashoptim",
        "which this checkpoint does not tell",
    ),
    (
        (
            "lpmm_group_file lpmm_rank1_file lpmm_factor_file adafactor8bit_golden_uf4_file "
            "adafactor8bit_golden_d8_file"
        ),
        "flashoptim",
        "which this checkpoint does not tell",
    ),
    ("amsgrad_file", "flashoptim", "which this checkpoint does not tell"),
    # bfloat16 weights, and float32 ones under another key: either may be what it steps.
    ("master", "flashoptim", "its weight may be any of master."),
    (
        "master_in_state_file",
        "lowbit bitsandbytes flashoptim lpmm adafactor8bit",
        "no optimizer that keeps these states",
    ),
    ("master_in_state_file", "torchao", "an optimizer that is not known"),
    ("fsdp2_flattened", "lpmm", "cannot be flattened"),
    ("fsdp2_flattened", "bitsandbytes", "loads no flattened state"),
    ("fsdp2_flattened", "flashoptim", "no compressed states from a flattened"),
    ("fsdp2_flattened", "adafactor8bit", "no flattened state"),
    ("amsgrad*", "bitsandbytes lpmm flashoptim adafactor8bit", "keeps no max_exp_avg_sq"),
    ("sgd*", "torchao", "Adam and AdamW only"),
    ("sgd*", "adafactor8bit", "no optimizer that keeps these states"),
    (ADAFACTOR, "torchao", "Adam and AdamW only"),
    (ADAFACTOR, "bitsandbytes", "no optimizer that keeps these states"),
    (ADAFACTOR, "lpmm flashoptim", "no optimizer that keeps these states"),
    ("*_factored4*", "torch", "mean of rows or columns"),
    ("lpmm_factor_file", "torch", "mean of rows or columns"),
    ("*_factored4* lpmm_factor_file", "bitsandbytes torchao flashoptim", "keeps no exp_avg_sq_"),
    # What is kept beside a weight, so that weight and it are one number.
    ("lowbit_kahan*", "flashoptim", "keeps no param_bfloat16_kahan"),
    (BESIDE, "torch bitsandbytes torchao lpmm adafactor8bit", "keeps no param_"),
)
# The way back alone: Adafactor's first moment cannot be lowbit's, and so on.
NO_WAY_BACK = (
    ("flashoptim_014_float32_file", "*", "which this checkpoint does not tell"),
    ("lowbit_factored4*", "adafactor8bit", "no optimizer that keeps these states"),
    ("lpmm_factor_file", "adafactor8bit", "no optimizer that keeps these states"),
    ("adafactor8bit_golden_uf4_file adafactor8bit_golden_d8_file", "lpmm", "its shape is nowhere"),
)


def expected(table, kind, dialect):
    """The part of the message where a refusal is expected, else None."""
    for kinds, dialects, message in table:
        if any(fnmatch.fnmatch(kind, k) for k in kinds.split()) and (
            dialects == "*" or dialect in dialects.split()
        ):
            return message
    return None


def convert(*arguments):
    return subprocess.run(
        [TOOL, "convert", *map(str, arguments), "--json"],
        capture_output=True,
        text=True,
        timeout=600,
    )


def near(a, b, bound):
    """The same keys and shapes; values by the norm of the difference."""
    assert a.keys() == b.keys()
    for key, x in a.items():
        y = b[key]
        assert x.shape == y.shape, key
        norm = torch.linalg.vector_norm(y.double())
        assert torch.linalg.vector_norm(x.double() - y.double()) <= bound * norm, key


CASES = [
    pytest.param(kind, world, to, id=f"{kind}-{world}-{to}")
    for kind, world in of()
    for to in DIALECTS
    # The largest world of each kind; every world of one of each of the two ways to keep chunks.
    if world == max(KINDS[kind].worlds) or kind in ("fsdp2_nested", "torchao_8bit")
]


@pytest.mark.parametrize("kind, world, to", CASES)
def test_into_each_dialect_and_back(made, tmp_path, kind, world, to):
    """Over all kinds and dialects; see REFUSED for what a dialect cannot say."""
    its = KINDS[kind]
    container = ["--container", CONTAINERS[its.container]]
    there, back = tmp_path / "there", tmp_path / "back"
    done = convert(made(kind, world), there, "--to", to, *container)
    message = expected(REFUSED, kind, to)
    if (message is not None and to != its.dialect) or message in (NOTHING, LOST):
        assert done.returncode == 3, "it is refused no longer: take it out of the table"
        assert message in done.stderr
        assert done.stderr.count("\n") == 1 and not there.exists()
        return
    assert done.returncode == 0, done.stderr
    first = json.loads(done.stdout)["states"]
    done = convert(there, back, "--to", its.dialect, *container)
    message = expected(NO_WAY_BACK, kind, to)
    if message is not None and to != its.dialect:
        assert done.returncode == 3 and message in done.stderr
        return
    assert done.returncode == 0, done.stderr
    second = json.loads(done.stdout)["states"]
    held, meaning = its.held(back), its.meaning()
    if all(state["exact"] for state in first + second):
        assert same(held, meaning)
    else:
        errors = [s["relative_error"] for s in first + second if not s["exact"]]
        near(held, meaning, 1.01 * sum(sorted(errors)[-2:]) + 1e-6)
