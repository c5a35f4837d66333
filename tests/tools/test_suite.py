"""pytest-xdist runs the tests of one `xdist_group` in one process."""

import subprocess
import sys

GROUP = """
import os, pathlib, pytest

@pytest.mark.parametrize("n", range(6))
@pytest.mark.xdist_group("one process")
def test_group(n):
    pathlib.Path(f"{n}.txt").write_text(os.environ["PYTEST_XDIST_WORKER"])
"""


def test_tests_of_a_group_run_in_one_process(tmp_path):
    """Otherwise each worker would create the group's shared resources again."""
    (tmp_path / "test_group.py").write_text(GROUP)
    command = [sys.executable, "-m", "pytest", "--numprocesses", "2", "--dist", "loadgroup"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len({path.read_text() for path in tmp_path.glob("*.txt")}) == 1
