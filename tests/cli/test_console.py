"""Consoles: quiet ones print nothing, and bars are for terminals."""

import io

from rich.console import Console

from qtk.cli.console import PIPE_WIDTH, progress_console, results_console, shows_bars


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_bars_are_for_terminals_that_are_not_quiet():
    assert shows_bars(Console(file=Terminal()))
    assert not shows_bars(Console(file=io.StringIO()))
    assert not shows_bars(Console(file=Terminal(), quiet=True))
    assert not shows_bars(Console(file=io.StringIO(), force_terminal=True))


def test_quiet_progress_says_nothing(capsys):
    progress_console(quiet=True).print("calibrating")
    progress_console(quiet=False).print("exporting")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "exporting\n"


def test_tables_in_a_pipe_are_not_folded(capsys):
    assert results_console().width == PIPE_WIDTH
