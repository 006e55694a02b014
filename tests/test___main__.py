"""``python -m qtk`` where no script is on the path."""

import pytest

import qtk
from tests import fresh


@pytest.mark.medium
def test_it_is_the_command_line():
    found = fresh.run_module("qtk", "--version")
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith(f"qtk {qtk.__version__}, torch ")
