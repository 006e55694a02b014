"""Processes that begin with qtk imported and one model captured, forked from one helper in a few milliseconds.

A new interpreter takes seconds to import torch and qtk, and to capture its first model. Tests of the import itself, of
variables that it reads, and of crashes of the interpreter start an interpreter of their own.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
PRELOADED = ["tests.warm", "torch.distributed"]
TIMEOUT_S = 600

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(PRELOADED)


def forked() -> int:
    """As ``os.fork``; the child may be killed at any moment, even while it holds the lock of progress bars.

    That lock is one for all processes, so that the parent would wait for it for ever: the child gets its own.
    """
    child = os.fork()
    if child == 0:
        tqdm.set_lock(threading.RLock())
    return child


@dataclass(frozen=True)
class Finished:
    """How a process ended: ``returncode`` as ``subprocess`` has it, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


class Running:
    """A process at work on ``target(*arguments)``; what it prints goes into files."""

    def __init__(
        self, target: Callable[..., object], arguments: Sequence[object] = (), *,
        environment: Mapping[str, str] | None = None, folder: str | os.PathLike[str] | None = None,
    ) -> None:
        self._printed = tempfile.TemporaryDirectory()
        self.files = {name: Path(self._printed.name, name) for name in ("stdout", "stderr")}
        for file in self.files.values():
            file.touch()
        added = dict(environment or {})
        self._process: ForkServerProcess = _CONTEXT.Process(
            target=_run, args=(target, tuple(arguments), added, str(folder or os.getcwd()),
                               {name: str(path) for name, path in self.files.items()}))
        self._process.start()

    def wait_for(self, text: str) -> None:
        """Waits until the process has printed ``text``. Raises: AssertionError if it ends without."""
        while text not in self.files["stdout"].read_text(encoding="utf-8"):
            assert self._process.is_alive(), self.files["stderr"].read_text(encoding="utf-8")
            time.sleep(0.01)

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> Finished:
        """Raises: TimeoutError after ``TIMEOUT_S``, when the process is killed."""
        self._process.join(TIMEOUT_S)
        if self._process.exitcode is None:
            self._process.kill()
            raise TimeoutError(f"no end within {TIMEOUT_S} s")
        with self._printed:
            return Finished(self._process.exitcode, *(path.read_text(encoding="utf-8") for path in self.files.values()))


def run(target: Callable[..., object], *arguments: object, **options: object) -> Finished:
    """Runs ``target(*arguments)`` in a process of its own; ``options`` as of ``Running``.

    >>> run(print, "hello").stdout
    'hello\\n'
    """
    return Running(target, arguments, **options).wait()  # type: ignore[arg-type]


def run_module(name: str, *arguments: str, **options: object) -> Finished:
    """Runs ``python -m name arguments``.

    >>> run_module("qtk.cli.app", "--version").stdout.partition(" ")[0]
    'qtk'
    """
    return run(_as_main, name, [name, *map(str, arguments)], **options)


def run_ranks(target: Callable[..., object], ranks: int, *arguments: object, **keywords: object) -> list[Finished]:
    """Runs ``target(*arguments, **keywords)`` as ``torchrun`` would, in ``ranks`` processes.

    Raises: AssertionError if one fails.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    of_all = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    running = [
        Running(functools.partial(target, **keywords), arguments,
                environment={**of_all, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]
    finished = [process.wait() for process in running]
    for rank, process in enumerate(finished):
        assert process.returncode == 0, f"rank {rank}: {process.stderr[-3000:]}"
    return finished


def _as_main(name: str, arguments: list[str]) -> None:
    sys.argv = arguments
    runpy.run_module(name, run_name="__main__")


def _run(
    target: Callable[..., object], arguments: tuple[object, ...], environment: Mapping[str, str], folder: str,
    files: Mapping[str, str],
) -> None:
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(files[name], os.O_WRONLY | os.O_APPEND), descriptor)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    os.environ.update({"PYTHONPATH": str(ROOT), **environment})
    os.chdir(folder)
    sys.path[:0] = [str(ROOT)]
    try:
        target(*arguments)
    except SystemExit as ended:
        raise SystemExit(ended.code if isinstance(ended.code, int) or ended.code is None else 1) from None
    except BaseException:
        traceback.print_exc()
        raise SystemExit(1) from None
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
