"""What lowbit runs on: versions, processor, kernels and GPUs; `python -m lowbit env`."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from typing import Any

import torch

import lowbit
from lowbit import ops
from lowbit.checkpoint.native import native

# What lowbit works with, by the name of its distribution.
PACKAGES = (
    "numpy",
    "accelerate",
    "transformers",
    "trl",
    "peft",
    "lightning",
    "torchtitan",
    "torchtune",
    "deepspeed",
    "torchao",
    "bitsandbytes",
    "safetensors",
)


def environment() -> dict[str, Any]:
    """What a bug report needs to say of the machine. Starts no kernel. What cannot be found
    out is the text of the error.

    Returns:
        "lowbit", "path", "python", "platform", "torch"; "processor", its name and the number of
        CPUs that this process may use; "threads"; "isas" (instruction sets that it runs) and "isa"
        (the one in use); "cuda", {"architectures", "error"}: the kernels that were built and why
        they cannot be used, or None; "gpus", a list of {"name", "capability", "bytes", "code"},
        where "code" is "machine code", "PTX" or None; "reader", whether lowbit.checkpoint reads
        files; "program", {"path", "version"} of lowbit-ckpt or None; "packages", versions by name.
    """
    catalog = _or_error(ops.catalog)
    if isinstance(catalog, str):  # LOWBIT_ISA names no instruction set of this processor
        catalog = {"isas": [], "isa": catalog, "cuda": []}
    architectures = catalog["cuda"]
    return {
        "lowbit": lowbit.__version__,
        "path": str(pathlib.Path(lowbit.__file__).parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "isas": catalog["isas"],
        "isa": catalog["isa"],
        "cuda": {"architectures": architectures, "error": _or_error(ops.cuda_error) or None},
        "gpus": _or_error(lambda: _gpus(architectures)),
        "reader": _reader(),
        "program": _program(),
        "packages": _packages(),
    }


def _or_error(find: Callable[[], Any]) -> Any:
    """What `find` returns, or the first line of its error."""
    try:
        return find()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


def described(found: dict[str, Any]) -> str:
    """The environment in lines of text."""
    cuda, isas, gpus = found["cuda"], ", ".join(found["isas"]), found["gpus"]
    kernels = " ".join(f"sm_{arch.partition('-')[0]}" for arch in cuda["architectures"])
    if kernels:
        kernels += f"; unusable: {cuda['error']}" if cuda["error"] else ""
    else:
        kernels = "none were built" if isas else "unknown"
    used = f"kernels for {found['isa']} in use, of {isas}" if isas else found["isa"]
    lines = [
        f"lowbit {found['lowbit']}, {found['path']}",
        f"Python {found['python']}, torch {found['torch']}, {found['platform']}",
        f"{found['processor']}: {used}; {found['threads']} threads",
        f"CUDA kernels: {kernels}",
    ]
    if isinstance(gpus, str):
        lines.append(f"GPUs: {gpus}")
    elif not gpus:
        lines.append("GPUs: none that torch can use")
    else:
        lines += [f"GPU {number}: {_gpu_line(gpu)}" for number, gpu in enumerate(gpus)]
    program = found["program"]
    lines.append(
        f"checkpoints: lowbit.checkpoint {'reads files' if found['reader'] else 'was not built'}, "
        + (f"{program['version']} in {program['path']}" if program else "no lowbit-ckpt")
    )
    packages = [f"{name} {version}" for name, version in found["packages"].items()]
    return "\n".join([*lines, f"installed: {', '.join(packages) or 'none of the frameworks'}"])


def _gpu_line(gpu: dict[str, Any]) -> str:
    code = {
        "machine code": "has kernels",
        "PTX": "compiles kernels at the first start, some 20 seconds",
        None: "has no kernels: build for it",
    }[gpu["code"]]
    if gpu["code"] is None and int(gpu["capability"]) < 80:
        code = "has no kernels, which need sm_80 or newer"
    return f"{gpu['name']}, sm_{gpu['capability']}, {gpu['bytes'] / 2**30:.1f} GiB, {code}"


def code_for(capability: tuple[int, int], architectures: list[str]) -> str | None:
    """How a GPU gets its kernels from what was built: "machine code" of its major version and at
    most its minor one; "PTX" of an older architecture; or None. An architecture is a number of
    CMake: "80" is machine code and PTX, "90-real" machine code alone, "80-virtual" PTX alone. Those
    that serve one GPU alone ("90a") or a family ("100f") count for that GPU.
    """
    major, minor = capability
    here = 10 * major + minor
    for kinds, code in ((("", "real"), "machine code"), (("", "virtual"), "PTX")):
        for architecture in architectures:
            said = re.fullmatch(r"(\d+)([af]?)(?:-(real|virtual))?", architecture)
            if said is None or (said[3] or "") not in kinds:
                continue
            number, alone = int(said[1]), bool(said[2])
            newer = number <= here and (code == "PTX" or number // 10 == major)
            if number == here or (newer and not alone):
                return code
    return None


def _gpus(architectures: list[str]) -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    found = []
    for device in range(torch.cuda.device_count()):
        at = torch.cuda.get_device_properties(device)
        found.append(
            {
                "name": at.name,
                "capability": f"{at.major}{at.minor}",
                "bytes": at.total_memory,
                "code": code_for((at.major, at.minor), architectures),
            }
        )
    return found


def _processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":") for line in lines)
    name = next((v.strip() for k, _, v in names if k.strip() == "model name"), platform.machine())
    return f"{name}, {len(os.sched_getaffinity(0))} CPUs"


def _reader() -> bool:
    try:
        native()
    except ImportError:
        return False
    return True


def _program() -> dict[str, str] | None:
    """The lowbit-ckpt beside this interpreter, or else on the PATH."""
    beside = pathlib.Path(sysconfig.get_path("scripts")) / "lowbit-ckpt"
    path = str(beside) if beside.exists() else shutil.which("lowbit-ckpt")
    if path is None:
        return None

    def version() -> str:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, errors="replace", timeout=10
        )
        first = next(iter((done.stdout + done.stderr).splitlines()), "")
        if done.returncode == 0:
            return first
        return f"lowbit-ckpt that ends with {done.returncode} ({first})"

    return {"path": path, "version": _or_error(version)}


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
