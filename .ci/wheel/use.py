"""Uses the package that is installed here: the README's first example, then its checkpoint through
`lowbit.checkpoint` and `lowbit-ckpt`.

`python .ci/wheel/use.py`, in any folder: it writes into one of its own.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import tempfile

README = pathlib.Path(__file__).resolve().parents[2] / "README.md"


def printed(*command: str) -> list[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def main() -> None:
    scope: dict = {}
    exec(re.findall(r"```python\n(.*?)```", README.read_text(), re.S)[0], scope)
    torch, lowbit, opt = scope["torch"], scope["lowbit"], scope["opt"]
    assert opt.state, "the example trains"
    torch.save({"model": scope["model"].state_dict(), "optim": opt.state_dict()}, "run.pt")

    from lowbit import checkpoint

    report = checkpoint.inspect("run.pt", digest=True)
    assert checkpoint.verify("run.pt")["ok"] and report["dialect"] == "lowbit", report["dialect"]
    print(
        f"Python {sys.version.split()[0]}, torch {torch.__version__}, lowbit {lowbit.__version__}, "
        f"{lowbit.catalog()['isas']}"
    )
    program = f"{sysconfig.get_path('scripts')}/lowbit-ckpt"
    print(*printed(program, "--version")[:1], *printed(program, "inspect", "run.pt")[:3], sep="\n")


if __name__ == "__main__":
    sys.path = [path for path in sys.path if path not in ("", os.getcwd())]  # not the sources
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        main()
        os.chdir("/")
