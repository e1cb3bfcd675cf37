"""What an editor, `help` and a type checker know of the optimizers' arguments."""

import importlib.util
import inspect
import pydoc
import re
import subprocess
import sys
import typing

import pytest

import lowbit
from lowbit.config import types
from lowbit.config.arguments import DEFAULTS
from lowbit.optim import docs
from tests.support.configured import OPTIMIZERS
from tests.support.paths import ROOT
from tests.support.require import need

pytestmark = pytest.mark.long


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_help_shows_every_argument_with_its_meaning_and_default(cls):
    shown = pydoc.plain(pydoc.render_doc(cls))
    head, entries = shown[: shown.index("Method resolution")], docs._read(cls.__doc__)
    assert list(entries) == list(inspect.signature(cls).parameters)
    for name, parameter in inspect.signature(cls).parameters.items():
        assert parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        text = " ".join(entries[name].split())
        assert re.search(rf"^ \|\s+{name}: ", head, re.M), name
        assert len(text) > 15 and "as in `" not in text and "torch.optim." not in text, (
            f"{name}: {text}"
        )
        said = re.search(r"([^ ;]+) by default|;[^;]*?([\w.\"()]+) \(default\)", text)
        value = parameter.default
        if said and isinstance(value, int | float) and said[1] and re.match(r"[\d.]", said[1]):
            assert float(said[1]) == float(value), f"{name}={value}: {text}"
    assert all(
        line.startswith("    ") or not line
        for line in re.search(r"Args:\n(.*?)(?=\n\S|\Z)", cls.__doc__, re.S)[1].splitlines()[:-1]
    )


def test_nothing_waits_for_a_class_that_never_comes():
    assert docs._waiting == []


def test_a_class_of_a_program_is_left_as_it_is():
    """Its docstring may refer to anything, and its bases may take keywords."""

    class Tagged:
        def __init_subclass__(cls, tag=0, **keywords):
            super().__init_subclass__(**keywords)
            cls.tag = tag

    class Mine(lowbit.AdamW, Tagged, tag=1):
        """An optimizer.

        Args:
            lr2: as in `Adam`.
            other: as in `Nothing`.
        """

    assert Mine.tag == 1 and "as in `Nothing`" in Mine.__doc__ and docs._waiting == []


def test_types_list_the_catalog():
    catalog = lowbit.catalog()
    formats = {entry["name"] for key in ("presets", "state") for entry in catalog[key]}
    assert set(typing.get_args(types.StateFormatName)) == formats | {"factored"}
    params = {entry["name"] for entry in catalog["param"]}
    assert set(typing.get_args(types.ParamFormat)) == params | {"auto", "nearest"}
    assert DEFAULTS["state_memory"] == typing.get_args(types.StateMemory)[0]


PROGRAM = """\
import torch
import lowbit

model = torch.nn.Linear(96, 64)
lowbit.AdamW(model.parameters(), lr=1e-3, state_format="4bit", full_precision=["*.bias"])
lowbit.AdamW8bit(model.named_parameters(), lr=1e-3, block_size=256)
lowbit.Lion8bit(lowbit.param_groups(model), betas=(0.9, 0.99))
lowbit.SGD([{"params": model.parameters(), "lr": 0.1}], state_format=lowbit.scaled("dynamic8"))
lowbit.AdamW([model.weight], state_format={"exp_avg": "8bit", "exp_avg_sq": lowbit.scaled("log8")})
lowbit.APOLLOMini(model.parameters(), rank=2, state_memory="pinned")
lowbit.AdamW8bit(model.parameters(), lrr=1e-3)  # wrong
lowbit.Lion8bit(model.parameters(), lrr=1e-3)  # wrong
lowbit.AdamW(model.parameters(), state_fromat="4bit")  # wrong
lowbit.APOLLOMini(model.parameters(), rang=2)  # wrong
lowbit.AdamW(model)  # wrong
lowbit.AdamW4bit(model)  # wrong
lowbit.Lion8bit(model)  # wrong
lowbit.AdamW(model.parameters(), state_format="8bits")  # wrong
lowbit.SGD(model.parameters(), state_format=8)  # wrong
lowbit.AdamW8bit(model.parameters(), param_format="stochastc")  # wrong
lowbit.Adam(model.parameters(), state_memory="pined")  # wrong
lowbit.AdamW(model.parameters(), lr="1e-3")  # wrong
lowbit.AdamWW(model.parameters())  # wrong
"""
WRONG = [i for i, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# wrong")]


def test_mypy_finds_wrong_arguments(tmp_path):
    need("types", importlib.util.find_spec("mypy") is not None, "mypy is not installed: make lint")
    (tmp_path / "program.py").write_text(PROGRAM)
    # The settings of pyproject.toml, so that mypy's cache of `make lint` is used.
    config = tmp_path / "mypy.ini"
    strict = (
        "disallow_any_generics",
        "disallow_untyped_calls",
        "disallow_untyped_defs",
        "warn_return_any",
        "strict_equality",
        "warn_unused_ignores",
    )
    config.write_text(
        (
            "[mypy]\nignore_missing_imports = True\n[mypy-lowbit.*]\nimplicit_reexport = False\n"
            "[mypy-program]\n"
        )
        + "".join(f"{flag} = True\n" for flag in strict)
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--config-file",
            config,
            "--cache-dir",
            ROOT / ".mypy_cache",
            tmp_path / "program.py",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    found = re.findall(r"program\.py:(\d+): error: (.*?)  \[([\w-]+)\]", done.stdout)
    assert [int(line) for line, _, _ in found] == WRONG, done.stdout + done.stderr
    codes = [code for _, _, code in found]
    assert codes == ["call-arg"] * 4 + ["arg-type"] * 8 + ["attr-defined"], done.stdout
