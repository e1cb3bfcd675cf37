"""README.md: its examples run, and what it names exists."""

import re

from paths import ROOT


def test_readme_examples_run_and_names_exist(tmp_path, monkeypatch):
    text = (ROOT / "README.md").read_text()
    monkeypatch.chdir(tmp_path)
    scope = {}
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) >= 2
    for block in blocks:
        exec(compile(block, "README.md", "exec"), scope)
    assert scope["opt"].state
    for name in re.findall(r"`((?:docs|recipes|tests|bench)/[\w./]+)`|\]\((docs/[\w./]+)\)", text):
        assert (ROOT / (name[0] or name[1])).exists(), name
    makefile = (ROOT / "Makefile").read_text()
    for verb in re.findall(r"make (run|test|gpu|bench|lint)", text):
        assert f"\n{verb}:" in makefile
