"""Writes tests/golden/code_digests.json anew. A changed digest of an existing format means that
files on disk changed their meaning: give the format a new name instead."""

import json
import pathlib
import sys

here = pathlib.Path(__file__).parent
sys.path[:0] = [str(here.parent / room) for room in ("support", "state")]

from test_state import CODED, code_digest  # noqa: E402

if __name__ == "__main__":
    digests = {format["name"]: code_digest(format) for format in CODED}
    (here / "code_digests.json").write_text(json.dumps(digests, indent=2) + "\n")
    print(digests)
