"""The machine under test: processor, memory, versions, and what nvidia-smi reports about a GPU."""

from __future__ import annotations

import os
import pathlib
import platform
import shutil
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version

import torch

PACKAGES = (
    "torch",
    "lowbit",
    "torchao",
    "bitsandbytes",
    "flashoptim",
    "adafactor8bit",
    "deepspeed",
    "torchastic",
    "triton",
    "numpy",
)
FLAGS = (
    "avx2",
    "fma",
    "bmi2",
    "avx512f",
    "avx512bw",
    "avx512dq",
    "avx512vl",
    "avx512vbmi",
    "avx512_bf16",
    "asimd",
    "sve",
)
# Queried one by one if the query for all fails: an old driver does not know every field.
GPU_FIELDS = (
    "name",
    "driver_version",
    "memory.total",
    "compute_cap",
    "pstate",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
    "temperature.gpu",
    "power.draw",
    "power.limit",
    "ecc.mode.current",
    "clocks_throttle_reasons.active",
)
CLOCKS = (
    "clocks.sm",
    "clocks.mem",
    "temperature.gpu",
    "power.draw",
    "clocks_throttle_reasons.active",
)


def describe(device: str) -> dict[str, object]:
    """The facts on which results depend."""
    import lowbit  # imported here: `make gpu` uses the rest of this file before lowbit is built

    cpu = cpu_fields(
        pathlib.Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    )
    facts: dict[str, object] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="minutes"),
        "cpu": cpu.get("model name") or platform.processor() or platform.machine(),
        "cpu_family": cpu.get("cpu family"),
        "cpu_model": cpu.get("model"),
        "mhz": cpu.get("cpu MHz"),
        "cache": cpu.get("cache size"),
        "flags": [f for f in FLAGS if f in (cpu.get("flags") or cpu.get("Features") or "").split()],
        "isa": lowbit.catalog()["isa"],
        "isas": lowbit.catalog()["isas"],
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_gib": round(memory_fields(meminfo()).get("MemTotal", 0) / 2**30, 1),
        "load": list(os.getloadavg()),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {p: installed(p) for p in PACKAGES},
    }
    if device == "cuda":
        facts["cuda"] = torch.version.cuda
        facts["gpu"] = query(GPU_FIELDS) or {"name": torch.cuda.get_device_name()}
    return facts


def cpu_fields(text: str) -> dict[str, str]:
    """The fields of the first processor in /proc/cpuinfo."""
    lines = [line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line]
    return {key.strip(): value.strip() for key, value in lines}


def memory_fields(text: str) -> dict[str, int]:
    """Bytes by field name of /proc/meminfo."""
    rows = [line.replace(":", "").split() for line in text.splitlines()]
    return {row[0]: int(row[1]) * 1024 for row in rows if len(row) > 1 and row[1].isdigit()}


def meminfo() -> str:
    path = pathlib.Path("/proc/meminfo")
    return path.read_text() if path.exists() else ""


def free_memory(device: str) -> int:
    """Free memory in bytes."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    return memory_fields(meminfo()).get("MemAvailable", 4 << 30)


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def gpu_clocks() -> dict[str, str]:
    """The current clocks, temperature and power."""
    return query(CLOCKS)


def query(fields: tuple[str, ...]) -> dict[str, str]:
    """Fields that nvidia-smi reports for the first GPU; empty without nvidia-smi."""
    if not shutil.which("nvidia-smi"):
        return {}
    command = ["nvidia-smi", "--id=0", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            [*command, f"--query-gpu={','.join(fields)}"],
            capture_output=True,
            text=True,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    if done.returncode == 0:
        return parsed(done.stdout, fields)
    if len(fields) == 1:
        return {}
    return {key: value for f in fields for key, value in query((f,)).items()}


def parsed(text: str, fields: tuple[str, ...]) -> dict[str, str]:
    """One line of nvidia-smi's CSV by field,
    without unavailable values ([N/A], [Not Supported], [Unknown Error]).
    """
    line = next((line for line in text.splitlines() if line.strip()), "")
    values = [value.strip() for value in line.split(",")]
    if len(values) != len(fields):
        return {}
    return {f: v for f, v in zip(fields, values, strict=True) if v and not v.startswith("[")}
