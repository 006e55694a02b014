"""Atomic writing: a file or an output directory is there whole, or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

from qtk.errors import ExportError

MARKER = ".written-by-qtk"
"""An empty file in every directory created here; a directory that holds it may be replaced."""

PART, OLD = "part", "old"
"""Suffixes of what stands beside a target: what is being written, and the old directory while it is replaced."""

_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}
"""Errors of writes, which name no file."""


def write_file(path: Path, content: bytes) -> None:
    """Writes a file: it has all of ``content``, also after a loss of power, or is what it was.

    The bytes go into a new file beside it, of a name that nobody can have put a link at, and from there to the disk.

    Raises: OSError, as the system raises it; nothing is left behind then.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_file(Path(folder) / "run.json", b"{}")
    ...     (Path(folder) / "run.json").read_bytes()
    b'{}'
    """
    staged = path.with_name(f".{path.name}.{secrets.token_hex(4)}.{PART}")
    try:
        with staged.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staged, path)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise


def remove_unfinished(path: Path) -> None:
    """Removes what killed processes left beside a file that ``write_file`` writes. Raises: OSError."""
    for left in path.parent.iterdir():
        if re.fullmatch(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.{PART}", left.name):
            left.unlink()


@contextlib.contextmanager
def staged_directory(target: str | os.PathLike[str], *, force: bool = False) -> Iterator[Path]:
    """An empty directory to write into; it is renamed to ``target`` when the block ends without an error.

    The files are written beside the target and flushed to disk first. If the block raises, they are removed and an
    older target is unchanged. What a killed process left beside the target is removed, or put back, at the next call.

    Args:
        target: the directory to create, or an empty one; missing parents are created too.
        force: replace a directory that an earlier call made, with everything in it, unless its run still goes on.

    Raises: ExportError if ``target`` is not empty and ``force`` is off or qtk did not write it, if it is no directory
        or contains the working directory, if its parent is not writable, its name too long or the disk full; another
        OSError of the block is raised as it is.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as parent, staged_directory(f"{parent}/out") as folder:
    ...     _ = (folder / "model.txt").write_text("whole")
    """
    target = _absolute(Path(target))
    made: list[Path] = []
    stage = _beside(target, PART)
    try:
        with contextlib.ExitStack() as stack:
            with _errors_of_disk(target):
                _recover(target)
                _refuse_unless_free(target, force=force)
                _make_parents(target, made)
                target.is_symlink()  # raises now, not at the end, if the name is too long
                stage.mkdir()
                stack.enter_context(locked(stage))
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
    cwd: Path | None = None
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise ExportError(f"{target} exists and is not a directory; choose another place")
    is_filled = target.exists() and any(target.iterdir())
    if is_filled and not force:
        raise ExportError(f"{target} exists already and nothing is overwritten unasked; "
                          "choose another directory, or pass force=True (--force)")
    if is_filled and not (target / MARKER).is_file():
        raise ExportError(f"{target} holds files that qtk did not write (it has no {MARKER}), and force replaces only "
                          "what qtk wrote; choose another directory, or empty this one")
    if target.exists() and _is_locked(target):
        raise ExportError(f"{target} is being written by another run; wait for its end, or choose another directory")
    with contextlib.suppress(FileNotFoundError):  # deleted: then it is in no target
        cwd = Path.cwd()
    if cwd is not None and cwd.is_relative_to(target):
        raise ExportError(f"{target} is or holds the working directory; choose another directory")


@contextlib.contextmanager
def _errors_of_disk(target: Path) -> Iterator[None]:
    """Raises: ExportError for an OSError, or the ValueError of a name that no file can have."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise _unwritable(target, error) from error


def _is_of_disk(error: OSError, stage: Path) -> bool:
    """Says whether an error in the block comes from writing into ``stage``; the block may read files elsewhere too."""
    if isinstance(error.filename, (str, os.PathLike)):
        return Path(error.filename).absolute().is_relative_to(stage)
    return error.errno in _DISK_ERRORS


def _unwritable(target: Path, error: OSError | ValueError) -> ExportError:
    is_name = isinstance(error, ValueError) or len(_bytes(target)) > 255
    place = f"cannot create {str(target)!r}" if is_name else f"cannot write into {target.parent}"
    reason = (isinstance(error, OSError) and error.strerror) or error
    return ExportError(f"{place}: {reason}; choose a directory you may write to, with enough space and a name of at "
                       "most 255 bytes without NUL; nothing was written")


def _absolute(target: Path) -> Path:
    try:
        return target.absolute()
    except FileNotFoundError:
        raise ExportError(f"cannot write {target}: the working directory was deleted; give an absolute path, or change "
                          "to another directory") from None


def _bytes(target: Path) -> bytes:
    return target.name.encode("utf-8", "surrogatepass")


def _beside(target: Path, suffix: str) -> Path:
    """A free path beside ``target``."""
    return target.parent / f"{_stem(target)}{secrets.token_hex(4)}.{suffix}"


def _stem(target: Path) -> str:
    """Returns the beginning of names beside ``target``; no other target has it, and its length is fixed."""
    return f".{target.name[:32]}.{hashlib.blake2b(_bytes(target), digest_size=4).hexdigest()}-"


def _recover(target: Path) -> None:
    """Removes what killed processes left beside ``target``; puts the target back if one moved it aside."""
    with contextlib.suppress(OSError):  # what cannot be looked at cannot be cleaned
        left = [path for path in target.parent.iterdir() if path.name.startswith(_stem(target))]
        for path in sorted(left, key=lambda path: path.suffix):  # .old first
            if path.suffix == f".{OLD}" and not target.exists():
                path.rename(target)
                warnings.warn(f"{target} was being replaced when the process was killed: it is back", stacklevel=4)
            elif _is_locked(path) is False:
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Holds a lock on ``directory``, which ends with the process, however that ends."""
    import fcntl  # loaded here: it is of Unix alone

    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks, where nothing is taken for abandoned
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def _is_locked(directory: Path) -> bool | None:
    """Says whether a process holds a lock on ``directory``; ``None`` on a file system without locks."""
    import fcntl  # loaded here: it is of Unix alone

    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    else:
        return False
    finally:
        os.close(descriptor)


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
    """Renames ``stage`` to ``target``; an old target is exchanged with it, where the system can, else moved aside."""
    if target.exists() and _exchange(stage, target):
        shutil.rmtree(stage, ignore_errors=True)
        return
    old = _beside(target, OLD)
    try:
        if target.exists():
            target.rename(old)
        stage.rename(target)
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        raise
    finally:
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges two directories at once, so that neither name is ever missing; false where the system cannot."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    at_cwd, exchange = -100, 2
    done: int = rename(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), exchange)
    return done == 0
