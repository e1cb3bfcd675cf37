"""`python -m lowbit env`: what a report of a bug needs to say of the machine."""

import json
import types

import pytest
import torch

import lowbit
from lowbit import environment, ops
from lowbit.__main__ import main


def test_it_says_what_this_machine_has(capsys, ckpt):
    assert main(["env"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"lowbit {lowbit.__version__}, ")
    for part in (
        f"torch {torch.__version__}",
        f"kernels for {ops.catalog()['isa']} in use",
        f"{torch.get_num_threads()} threads",
        "lowbit.checkpoint reads files, lowbit-ckpt ",
        "numpy ",
    ):
        assert part in said, part
    assert said.count("\n") >= 7


def test_the_same_for_machines(capsys):
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["torch"] == torch.__version__ and found["isa"] in found["isas"]
    assert found["packages"]["numpy"] and found["processor"]
    assert found["cuda"]["error"] or torch.version.cuda


@pytest.mark.parametrize(
    "architectures, capability, code",
    [
        (["80", "90-real", "100-real", "120-real"], (9, 0), "machine code"),
        (["80", "90-real", "100-real", "120-real"], (8, 9), "machine code"),
        (["80", "90-real", "100-real", "120-real"], (10, 3), "machine code"),
        (["80", "90-real", "100-real", "120-real"], (11, 0), "PTX"),
        (["80", "90-real", "100-real", "120-real"], (7, 5), None),
        (["90-real"], (10, 0), None),
        (["89"], (8, 6), None),  # a GPU does not run code of a later minor version
        (["80-virtual"], (8, 0), "PTX"),
        (["90a-real"], (9, 0), "machine code"),
        (["100a-real"], (10, 3), None),
        (["native"], (9, 0), None),
        ([], (9, 0), None),
    ],
)
def test_how_a_gpu_gets_its_kernels(architectures, capability, code):
    assert environment.code_for(capability, architectures) == code


def test_gpus_are_named(monkeypatch):
    """As torch would tell of three cards, of which the package has code for the first."""
    cards = [("NVIDIA H200", 9, 0), ("NVIDIA Thor", 11, 0), ("Tesla T4", 7, 5)]
    cuda = types.SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: len(cards),
        get_device_properties=lambda i: types.SimpleNamespace(
            name=cards[i][0], major=cards[i][1], minor=cards[i][2], total_memory=139 << 30
        ),
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    built = ["80", "90-real"]
    catalog = {**ops.catalog(), "cuda": built}
    monkeypatch.setattr(ops, "catalog", lambda: catalog)
    monkeypatch.setattr(ops, "cuda_error", lambda: "")
    lines = environment.described(environment.environment()).splitlines()
    assert "CUDA kernels: sm_80 sm_90" in lines
    gpus = [line for line in lines if line.startswith("GPU ")]
    assert gpus[0] == "GPU 0: NVIDIA H200, sm_90, 139.0 GiB, has kernels"
    assert "compiles kernels at the first start" in gpus[1]
    assert gpus[2].endswith("has no kernels, which need sm_80 or newer")
    built.remove("80")
    lines = environment.described(environment.environment()).splitlines()
    assert any(
        line.endswith("NVIDIA Thor, sm_110, 139.0 GiB, has no kernels: build for it")
        for line in lines
    )


def test_what_is_missing_is_said(monkeypatch, tmp_path):
    def built_without():
        raise ImportError("no libraries")

    monkeypatch.setattr(environment, "native", built_without)
    monkeypatch.setattr(environment.sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(environment.shutil, "which", lambda _: None)
    monkeypatch.setattr(environment, "PACKAGES", ("no-such-package",))
    catalog = {**ops.catalog(), "cuda": []}
    monkeypatch.setattr(ops, "catalog", lambda: catalog)
    said = environment.described(environment.environment())
    assert "CUDA kernels: none were built\n" in said
    assert "checkpoints: lowbit.checkpoint was not built, no lowbit-ckpt" in said
    assert said.endswith("installed: none of the frameworks")


@pytest.mark.parametrize(
    "script, said",
    [
        ("#!/bin/sh\necho lowbit-ckpt 0.0.7\n", "lowbit-ckpt 0.0.7 in"),
        ("#!/bin/sh\necho no libzstd >&2; exit 127\n", "lowbit-ckpt that ends with 127 (no libz"),
        ("#!/no/such/interpreter\n", "FileNotFoundError: "),
        ("", "OSError: "),
        (None, "PermissionError: "),
    ],
)
def test_a_program_that_does_not_start_is_said(monkeypatch, tmp_path, script, said):
    program = tmp_path / "lowbit-ckpt"
    program.write_text(script or "")
    program.chmod(0o600 if script is None else 0o700)
    monkeypatch.setattr(environment.sysconfig, "get_path", lambda _: str(tmp_path))
    assert f", {said}" in environment.described(environment.environment())


def test_errors_are_said_and_nothing_raises(monkeypatch):
    """What fails is what a report is about: LOWBIT_ISA of another processor, a broken driver."""

    def broken():
        raise RuntimeError("the driver is older than the runtime\nand so on")

    monkeypatch.setattr(ops, "catalog", broken)
    monkeypatch.setattr(torch.cuda, "is_available", broken)
    said = environment.described(environment.environment())
    assert ": RuntimeError: the driver is older than the runtime; " in said
    assert "\nCUDA kernels: unknown\n" in said
    assert "\nGPUs: RuntimeError: the driver is older than the runtime\n" in said
