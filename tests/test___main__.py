"""``python -m qtk`` where no script is on the path."""

import subprocess
import sys

import qtk


def test_it_is_the_command_line():
    found = subprocess.run(
        [sys.executable, "-m", "qtk", "--version"], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith(f"qtk {qtk.__version__}, torch ")
