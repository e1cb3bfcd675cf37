"""Every golden array of the peers is accounted for by a test that is named here."""

import fnmatch

import numpy as np

from tests.golden.test_golden_adafactor import CASES
from tests.golden.test_golden_bitsandbytes import ONE_STATE
from tests.golden.test_golden_flashoptim import PARAMS, REFERENCES, RUNS
from tests.support.paths import GOLDEN, TESTS
from tests.support.peers.golden import arrays

FORMATS = {  # pattern of names in formats_golden.npz: the test
    "ao_AdamW8bit/*": "test_golden.py::test_torchao_8bit",
    "ao_Adam8bit/*": "test_golden.py::test_torchao_8bit",
    "ao_AdamW4bit/*": "test_golden_torchao.py::test_torchao_4bit",
    "bnbcpu_AdamW8bit/*": "test_golden.py::test_bitsandbytes_8bit",
    "bnbcpu_LAMB8bit/*": "test_golden_bitsandbytes.py::test_bitsandbytes_lamb_8bit",
    **{
        f"bnbcpu_{name}/*": "test_golden_bitsandbytes.py::test_bitsandbytes_one_state"
        for name in ONE_STATE
    },
    "lpmm_AdamW_group4/*": "test_golden_lpmm.py::test_lpmm_groups",
    "lpmm_AdamW_rank1/*": "test_golden_lpmm.py::test_lpmm_rank1",
    "lpmm_Factor4/*": "test_golden_lpmm.py::test_lpmm_factor",
    "g?_8x16x6x7": "test_golden_lpmm.py::test_rank1_of_four_dimensions",
    "g?_41x130": "test_golden_lpmm.py::test_lpmm_groups",
    "g?_16x256": "test_golden_torchao.py::test_torchao_4bit",
    "g?_96x64": "test_golden_adafactor.py::test_adafactor_float32",
    "af019_fp32/*": "test_golden_adafactor.py::test_adafactor_float32",
    "af019_quant/*": "test_golden_adafactor.py::test_adafactor_019_quantised",
    "af046_al8/*": "test_golden_adafactor.py::test_adafactor_046_8bit_factors",
    **{f"af046_adamw_{case}/*": "test_golden_adafactor.py::test_adamw_046" for case in CASES},
    # The same arrays in another file:
    "apollo_ch/*": "test_lowrank.py::test_reference_meets_the_peers",
    "apollo_tall_ch/*": "test_lowrank.py::test_reference_meets_the_peers",
    "fira/*": "test_lowrank.py::test_reference_meets_the_peers",
}
ADAFACTOR = {  # of adafactor8bit.npz
    "[pg][012]": "test_low_rank_adafactor_of_019",
    **{
        f"lowrank_*_{x}": "test_low_rank_adafactor_of_019"
        for x in ("p[012]", "v_low[01]", "scaled_grad_norm_prev[01]", "variance2")
    },
    **{
        f"lowrank_*_{x}": "test_seeds_count_from_0"
        for x in ("current_proj_seed[01]", "apollo_seed[01]")
    },
    "came_*": "test_came_of_046",
}
FLASHOPTIM = {
    "q_m_*": "test_codes_of_first_moments",
    "q_v_*": "test_codes_of_second_moments",
    "q_edge_*": "test_blocks_that_float16_scales_cannot_hold",
    "deq_table_*": "test_what_codes_mean",
    "ecc_in_f32bits": "test_split_weights",
    **{f"ecc_{case}_*": "test_split_weights" for case in PARAMS},
    "tr_p0_f32": "test_steps",
    "tr_grads_f32": "test_steps",
    **{f"tr_{run}_s[123]_*": "test_steps" for run in RUNS},
    **{f"ref_{name}_s[123]": "test_steps_in_float32" for name in REFERENCES},
}


def check(names, patterns, tests="test_golden_flashoptim.py"):
    used = set()
    for name in names:
        matched = [pattern for pattern in patterns if fnmatch.fnmatchcase(name, pattern)]
        assert len(matched) == 1, f"{name} is accounted for by {matched or 'nothing'}"
        used.update(matched)
    assert used == set(patterns), f"nothing is named {set(patterns) - used}"
    for test in patterns.values():
        file, _, function = test.rpartition("::")
        source = next(TESTS.rglob(file or tests)).read_text()
        assert f"def {function}(" in source, f"there is no {test}"


def test_every_array_of_the_formats():
    check(arrays(), FORMATS)


def test_every_array_of_flashoptim():
    check(arrays("flashoptim_golden"), FLASHOPTIM)


def test_every_array_of_adafactor8bit():
    check(arrays("adafactor8bit"), ADAFACTOR, "test_golden_adafactor_paths.py")


def test_the_files_agree():
    """The arrays of peers8bit.npz, which test_golden.py reads, are these."""
    with np.load(GOLDEN / "peers8bit.npz") as file:
        for name in file.files:
            np.testing.assert_array_equal(file[name], arrays()[name])
