"""Atomic creation of an output directory: with all of its files, or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from qtk.errors import ExportError

MARKER = ".written-by-qtk"
"""An empty file in every directory created here; a directory that holds it may be replaced."""

_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}
"""Errors of writes, which name no file."""


@contextlib.contextmanager
def staged_directory(target: str | os.PathLike[str], *, force: bool = False) -> Iterator[Path]:
    """An empty directory to write into; it is renamed to ``target`` when the block ends without an error.

    The files are written beside the target and flushed to disk first. If the block raises, they are removed and an
    older target is unchanged.

    Args:
        target: the directory to create; missing parents are created too.
        force: replace a directory that an earlier call made, with everything in it.

    Raises: ExportError if ``target`` exists and ``force`` is off or qtk did not write it, if it is not a directory or
        contains the working directory, if its parent is not writable, its name too long or the disk full; another
        OSError of the block is raised as it is.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as parent, staged_directory(f"{parent}/out") as folder:
    ...     _ = (folder / "model.txt").write_text("whole")
    """
    target = Path(target).absolute()
    made: list[Path] = []
    stage = _beside(target, "part")
    try:
        with _errors_of_disk(target):
            _refuse_unless_free(target, force=force)
            _make_parents(target, made)
            target.is_symlink()  # raises now, not at the end, if the name is too long
            stage.mkdir()
        try:
            yield stage
        except OSError as error:
            if not _is_of_disk(error, stage):
                raise
            raise _unwritable(target, error) from error
        with _errors_of_disk(target):
            (stage / MARKER).touch()
            _flush(stage)
            _refuse_unless_free(target, force=force)
            _swap(stage, target)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        for parent in reversed(made):
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise


def _refuse_unless_free(target: Path, *, force: bool) -> None:
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise ExportError(f"{target} exists and is not a directory; choose another place")
    if target.exists() and not force:
        raise ExportError(f"{target} exists already and nothing is overwritten unasked; "
                          "choose another directory, or pass force=True (--force)")
    if target.exists() and not (target / MARKER).is_file() and any(target.iterdir()):
        raise ExportError(f"{target} holds files that qtk did not write (it has no {MARKER}), and force replaces only "
                          "what qtk wrote; choose another directory, or empty this one")
    if Path.cwd().is_relative_to(target):
        raise ExportError(f"{target} is or holds the working directory; choose another directory")


@contextlib.contextmanager
def _errors_of_disk(target: Path) -> Iterator[None]:
    """Raises: ExportError for an OSError."""
    try:
        yield
    except OSError as error:
        raise _unwritable(target, error) from error


def _is_of_disk(error: OSError, stage: Path) -> bool:
    """Whether an error in the block comes from writing into ``stage``; the block may read files elsewhere too."""
    if isinstance(error.filename, (str, os.PathLike)):
        return Path(error.filename).absolute().is_relative_to(stage)
    return error.errno in _DISK_ERRORS


def _unwritable(target: Path, error: OSError) -> ExportError:
    place = f"cannot write into {target.parent}" if len(os.fsencode(target.name)) < 256 else f"cannot create {target}"
    return ExportError(f"{place}: {error.strerror or error}; choose a directory you may write to, with enough space "
                       "and a name of at most 255 bytes; nothing was written")


def _beside(target: Path, suffix: str) -> Path:
    """A free path beside ``target``; its name does not grow with that of ``target``."""
    return target.with_name(f".{target.name[:32]}.{secrets.token_hex(4)}.{suffix}")


def _make_parents(target: Path, made: list[Path]) -> None:
    """Creates the missing parents of ``target``, outermost first, and appends them to ``made``."""
    missing = [parent for parent in target.parents if not parent.exists()]
    for parent in reversed(missing):
        parent.mkdir(exist_ok=True)
        made.append(parent)


def _flush(directory: Path) -> None:
    for path in [*directory.rglob("*"), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _swap(stage: Path, target: Path) -> None:
    """Renames ``stage`` to ``target``; an old target is moved aside first, and back if that fails."""
    old = _beside(target, "old")
    replaced = target.exists()
    if replaced:
        target.rename(old)
    try:
        stage.rename(target)
    except OSError:
        if replaced:
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)
