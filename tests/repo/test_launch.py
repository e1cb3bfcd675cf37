"""Scripts that tests run on several ranks: each is a program of its own, and a failure is seen."""

import textwrap

import pytest

from tests.support.ranks import launch

pytestmark = pytest.mark.slow


def script(folder, text):
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    return path


def test_a_script_has_its_arguments_folder_environment_and_process_group(tmp_path):
    path = script(
        tmp_path,
        """
        import os, pathlib, sys
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(total)
        if dist.get_rank() == 2:
            print(total.item(), sys.argv[1:], pathlib.Path.cwd().name, os.environ["MINE"], __name__)
        dist.destroy_process_group()
        """,
    )
    for _ in range(2):  # a later script has a group of its own
        said = launch.run(path, 3, "--option", 5, cwd=tmp_path, MINE="here")
        assert said.split("\n")[0] == f"3.0 ['--option', '5'] {tmp_path.name} here __main__"


def test_a_rank_that_fails_is_an_error_with_its_words(tmp_path):
    path = script(
        tmp_path,
        """
        import os, sys
        if os.environ["RANK"] == "1":
            raise ValueError("the second rank")
        """,
    )
    with pytest.raises(AssertionError, match=r"'0': 0[^\0]*the second rank"):
        launch.run(path, 2)
    killed = script(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(AssertionError, match="-9"):
        launch.run(killed, 0)


def test_an_error_while_the_interpreter_ends_is_seen(tmp_path):
    path = script(
        tmp_path,
        """
        import os
        class Late:
            def __del__(self, leave=os._exit):
                leave(7)
        late = Late()
        """,
    )
    with pytest.raises(AssertionError, match="7"):
        launch.run(path, 0)


def test_a_script_that_does_not_end_is_an_error_and_the_next_one_runs(tmp_path):
    with pytest.raises(AssertionError, match=r"no end within 0\.5 s"):
        launch.run(script(tmp_path, "import time; time.sleep(600)"), 0, timeout=0.5)
    assert launch.run(script(tmp_path, "print('next')"), 0) == "next\n"


def test_a_module_that_cannot_be_imported_is_an_error_and_says_so(tmp_path):
    with pytest.raises(AssertionError, match=r"imports \('no_such_module',\) has ended"):
        launch.run(script(tmp_path, ""), 0, imported=("no_such_module",))
