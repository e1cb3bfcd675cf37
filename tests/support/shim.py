"""C code in front of libc's functions, for what no machine does on request: a disk that is full, a
file system that cannot exchange folders, a kill at the third call of a function.
"""

import os
import pathlib
import shutil
import subprocess

from tests.support.require import need


def preloaded(folder: pathlib.Path, code: str) -> dict[str, str]:
    """The part of a program's environment that puts `code` before all libraries but those that are
    loaded so here, such as a sanitizer's (`make sanitize-python`).

    Writes shim.c and shim.so into the folder. A test needs a C compiler for it.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    need("cc", bool(compiler), "no C compiler")
    (folder / "shim.c").write_text(code)
    library = folder / "shim.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, folder / "shim.c"], check=True)
    return {"LD_PRELOAD": f"{os.environ.get('LD_PRELOAD', '')} {library}"}
