"""bench.storage: that it runs, and that no more bytes are read than its page says."""

import json
import subprocess
import sys


def test_bytes_are_read_once(tmp_path):
    out = tmp_path / "storage.json"
    ended = subprocess.run(
        [sys.executable, "-m", "bench.storage", "--gib", "0.03", "--rounds", "1", "--json", str(out), "--folder", str(tmp_path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    told = json.loads(out.read_text())
    for what in ("load0-2", "load0-4", "load1-2"):
        # Beside the values there are headers of items, .metadata and lowbit.json: some 2 % of a state as small as this one.
        assert 1 <= told[what]["bytes read to bytes needed"]["lowbit"] < 1.06, what
    assert "stall: lowbit" in ended.stdout and "load on 2 by columns: torch" in ended.stdout
