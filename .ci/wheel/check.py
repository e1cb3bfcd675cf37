"""Installs a wheel in clean environments without a compiler and uses it:
`python .ci/wheel/check.py WHEEL PYTHON...`.

For each interpreter it makes an environment, lets pip install the wheel with what it depends on,
and runs .ci/wheel/use.py there. PyPI's torch brings CUDA, several GB; pip's own settings choose
another.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile

USE = pathlib.Path(__file__).resolve().parent / "use.py"


def check(wheel: pathlib.Path, python: str, folder: pathlib.Path) -> None:
    venv = folder / "venv"
    subprocess.run([python, "-m", "venv", venv], check=True)
    # The environment and nothing else: no compiler on the PATH,
    # and none that a build could be told of.
    kept = ("PIP_", "SSL_", "HOME", "TMPDIR", "OMP_", "HTTP", "http")
    clean = {name: value for name, value in os.environ.items() if name.startswith(kept)}
    clean |= {"PATH": f"{venv}/bin", "CC": "/bin/false", "CXX": "/bin/false"}
    for command in (
        ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel],
        ["-W", "ignore", USE],
    ):
        done = subprocess.run(
            [venv / "bin/python", *command], cwd=folder, env=clean, capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(f"{python}: {' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    print(done.stdout, flush=True)


def main(wheel: str, *pythons: str) -> None:
    for python in pythons:
        with tempfile.TemporaryDirectory() as folder:
            check(pathlib.Path(wheel).resolve(), python, pathlib.Path(folder))
    print(f"{pathlib.Path(wheel).name} works in {len(pythons)} clean environments")


if __name__ == "__main__":
    main(*sys.argv[1:])
