"""Writes tests/golden/code_digests.json anew: python -m tests.golden.regenerate

A changed digest of an existing format means that files on disk changed their meaning: give the
format a new name instead.
"""

import json

from tests.state.test_state import CODED, code_digest
from tests.support.paths import GOLDEN

if __name__ == "__main__":
    digests = {format["name"]: code_digest(format) for format in CODED}
    (GOLDEN / "code_digests.json").write_text(json.dumps(digests, indent=2) + "\n")
    print(digests)
