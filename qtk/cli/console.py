"""Where the command line prints: results on standard output, progress on standard error."""

from __future__ import annotations

from rich.console import Console

PIPE_WIDTH = 200
"""Width of the output if it is not a terminal, so that tables are not folded."""


def results_console() -> Console:
    """The console of tables and verdicts."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_WIDTH)


def progress_console(*, quiet: bool) -> Console:
    """The console of progress, which says nothing if ``quiet``."""
    return Console(stderr=True, quiet=quiet)


def shows_bars(console: Console) -> bool:
    """Says whether progress bars belong on standard error: only on a terminal, and not if ``console`` is quiet.

    >>> import io
    >>> shows_bars(Console(file=io.StringIO()))
    False
    """
    return not console.quiet and console.file.isatty()
