"""Writes the whole corpus: FOLDER/<case>/...,
and FOLDER/index.json with what is expected of each.
"""

import json
import sys
from pathlib import Path

from . import CASES


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m tests.ckpt.hostile FOLDER", file=sys.stderr)
        return 2
    root = Path(sys.argv[1])
    index = {}
    for name, case in CASES.items():
        folder = root / name
        folder.mkdir(parents=True)
        path = case.make(folder)
        index[name] = {
            "path": str(path.relative_to(root)),
            "verify": sorted(case.codes),
            "convert": None if case.convert is None else sorted(case.convert),
            "mentions": case.mentions.pattern,
            "warns": case.warns,
            "about": case.about,
        }
    (root / "index.json").write_text(json.dumps(index, indent=1) + "\n")
    print(f"{len(index)} inputs in {root}")
    return 0


sys.exit(main())
