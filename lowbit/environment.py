"""What lowbit runs on: versions, processor, kernels and GPUs; `python -m lowbit env`."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform
import shutil
import subprocess
import sysconfig
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
    """What a report of a bug needs to say of the machine. Starts no kernel.

    Returns:
        "lowbit", "path", "python", "platform", "torch"; "processor", "isas" (instruction sets that
        it runs), "isa" (the one in use) and "threads"; "cuda", {"architectures", "error"}: the
        kernels that were built and why they cannot be used, or None; "gpus", a list of {"name",
        "capability", "bytes", "code"}, where "code" is "machine code", "PTX" or None; "reader",
        whether lowbit.checkpoint reads files; "program", {"path", "version"} of lowbit-ckpt or
        None; "packages", versions by name.
    """
    catalog = ops.catalog()
    architectures = catalog["cuda"]
    return {
        "lowbit": lowbit.__version__,
        "path": str(pathlib.Path(lowbit.__file__).parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "processor": _processor(),
        "isas": catalog["isas"],
        "isa": catalog["isa"],
        "threads": torch.get_num_threads(),
        "cuda": {"architectures": architectures, "error": ops.cuda_error() or None},
        "gpus": _gpus(architectures),
        "reader": _reader(),
        "program": _program(),
        "packages": _packages(),
    }


def described(found: dict[str, Any]) -> str:
    """The environment in lines of text."""
    cuda = found["cuda"]
    kernels = " ".join(f"sm_{arch.partition('-')[0]}" for arch in cuda["architectures"])
    unusable = f"; unusable: {cuda['error']}" if cuda["error"] else ""
    lines = [
        f"lowbit {found['lowbit']}, {found['path']}",
        f"Python {found['python']}, torch {found['torch']}, {found['platform']}",
        f"{found['processor']}: kernels for {found['isa']} in use, of {', '.join(found['isas'])}; "
        f"{found['threads']} threads",
        f"CUDA kernels: {kernels + unusable if kernels else 'none were built'}",
    ]
    for number, gpu in enumerate(found["gpus"]):
        code = {
            "machine code": "has kernels",
            "PTX": "compiles kernels at the first start, some 20 seconds",
            None: "has no kernels: build for it",
        }[gpu["code"]]
        lines.append(
            f"GPU {number}: {gpu['name']}, sm_{gpu['capability']}, {gpu['bytes'] / 2**30:.1f} GiB, "
            f"{code}"
        )
    if not found["gpus"]:
        lines.append("GPUs: none that torch can use")
    program = found["program"]
    lines.append(
        f"checkpoints: lowbit.checkpoint {'reads files' if found['reader'] else 'was not built'}, "
        + (f"{program['version']} in {program['path']}" if program else "no lowbit-ckpt")
    )
    packages = [f"{name} {version}" for name, version in found["packages"].items()]
    return "\n".join([*lines, f"installed: {', '.join(packages) or 'none of the frameworks'}"])


def code_for(capability: tuple[int, int], architectures: list[str]) -> str | None:
    """How a GPU gets its kernels from what was built: "machine code" of its major version and at
    most its minor one; "PTX" of an older architecture; or None. An architecture is a number of
    CMake: "80" is machine code and PTX, "90-real" machine code alone, "80-virtual" PTX alone.
    """
    major, minor = capability
    built = [(int(number), kind) for number, _, kind in (a.partition("-") for a in architectures)]
    if any(a // 10 == major and a % 10 <= minor and kind != "virtual" for a, kind in built):
        return "machine code"
    if any(a <= 10 * major + minor and kind != "real" for a, kind in built):
        return "PTX"
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
    """Its name, where the system tells it, with the number of cores that this process may use."""
    name = platform.machine()
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
            break
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


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
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    first = (done.stdout or done.stderr or "lowbit-ckpt, which does not start").splitlines()[0]
    return {"path": path, "version": first}


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
