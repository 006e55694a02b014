import errno
import os
import signal
from pathlib import Path

import pytest

from qtk import atomic
from qtk.atomic import MARKER, remove_unfinished, staged_directory, write_file
from qtk.errors import ExportError
from tests import fresh


def listing(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.name != MARKER}


def made_before(target: Path) -> None:
    with staged_directory(target) as folder:
        (folder / "old").write_text("old")


def write_half(target: Path, error: type[BaseException]) -> None:
    with staged_directory(target, force=True) as folder:
        (folder / "file").write_text("half")
        raise error


@pytest.mark.medium
def test_directory_appears_only_at_the_end(tmp_path):
    with staged_directory(tmp_path / "a" / "out") as folder:
        (folder / "file").write_text("new")
        assert not (tmp_path / "a" / "out").exists()
    assert listing(tmp_path) == {"a", "a/out", "a/out/file"}


def test_it_has_the_permissions_of_a_plain_directory(tmp_path):
    (tmp_path / "plain").mkdir()
    with staged_directory(tmp_path / "out"):
        pass
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_nothing_remains_after_an_exception(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        write_half(tmp_path / "a" / "b" / "out", KeyboardInterrupt)
    assert listing(tmp_path) == set()


def test_existing_target_is_refused_without_force(tmp_path):
    made_before(tmp_path / "out")
    with pytest.raises(ExportError, match=r"out exists already .* force=True"), staged_directory(tmp_path / "out"):
        pytest.fail("the block must not run")
    assert listing(tmp_path) == {"out", "out/old"}


def test_force_replaces_only_what_was_written_here(tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("ten years")
    with pytest.raises(ExportError, match="did not write"), staged_directory(tmp_path / "home", force=True):
        pass
    assert (tmp_path / "home" / "thesis.txt").read_text() == "ten years"
    with staged_directory(tmp_path / "own"):
        pass
    monkeypatch.chdir(tmp_path / "own")
    with pytest.raises(ExportError, match="working directory"), staged_directory(".", force=True):
        pass
    assert Path.cwd() == tmp_path / "own"


@pytest.mark.parametrize("force", [False, True])
def test_an_empty_directory_is_filled(tmp_path, force):
    (tmp_path / "empty").mkdir()
    with staged_directory(tmp_path / "empty", force=force) as folder:
        (folder / "a").touch()
    assert listing(tmp_path) == {"empty", "empty/a"}


def test_force_replaces_the_whole_directory(tmp_path):
    made_before(tmp_path / "out")
    with staged_directory(tmp_path / "out", force=True) as folder:
        (folder / "new").write_text("new")
    assert listing(tmp_path) == {"out", "out/new"}


def test_old_target_survives_a_failed_replacement(tmp_path):
    made_before(tmp_path / "out")
    with pytest.raises(RuntimeError):
        write_half(tmp_path / "out", RuntimeError)
    assert listing(tmp_path) == {"out", "out/old"}
    assert (tmp_path / "out" / "old").read_text() == "old"


def test_old_target_comes_back_when_the_last_rename_fails(tmp_path, monkeypatch):
    made_before(tmp_path / "out")
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.suffix == ".part":
            raise OSError("disk gone")
        return rename(self, target)

    monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)
    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(ExportError, match="disk gone"), staged_directory(tmp_path / "out", force=True) as folder:
        (folder / "new").write_text("new")
    assert listing(tmp_path) == {"out", "out/old"}


def test_target_made_meanwhile_is_not_overwritten(tmp_path):
    with pytest.raises(ExportError, match="exists already"), staged_directory(tmp_path / "out"):
        made_before(tmp_path / "out")
    assert listing(tmp_path) == {"out", "out/old"}


def test_a_file_in_the_way_is_refused_even_with_force(tmp_path):
    (tmp_path / "out").write_text("precious")
    with pytest.raises(ExportError, match="not a directory"), staged_directory(tmp_path / "out", force=True):
        pytest.fail("the block must not run")
    assert (tmp_path / "out").read_text() == "precious"


@pytest.mark.parametrize("to", ["folder", "nothing"])
def test_a_link_in_the_way_is_refused_even_with_force(to, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / to)
    with pytest.raises(ExportError, match="not a directory"), staged_directory(tmp_path / "out", force=True):
        pytest.fail("the block must not run")
    assert (tmp_path / "out").is_symlink()
    assert listing(tmp_path) == {"folder", "out"}


def test_unwritable_parent_is_refused(tmp_path, monkeypatch):
    def refuse(self: Path, *args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)  # root may write anywhere, so the refusal is played
    with pytest.raises(ExportError, match=r"cannot write into .*Permission denied"), staged_directory(tmp_path / "out"):
        pytest.fail("the block must not run")
    assert listing(tmp_path) == set()


def test_parent_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match="cannot write into"), staged_directory(tmp_path / "file" / "out"):
        pytest.fail("the block must not run")


def test_a_directory_that_nobody_may_write_to_is_refused():
    with pytest.raises(ExportError, match=r"cannot write into /sys/kernel: .*; choose a directory you may write to"), \
            staged_directory("/sys/kernel/out"):
        pytest.fail("the block must not run")


def test_names_up_to_255_bytes_are_created_and_longer_ones_refused(tmp_path):
    for name in ("a" * 255, "模" * 85):
        with staged_directory(tmp_path / name) as folder:
            (folder / "file").touch()
    with pytest.raises(ExportError, match=r"cannot create .*too long; .* at most 255 bytes"), \
            staged_directory(tmp_path / "new" / ("a" * 256)):
        pytest.fail("the block must not run")
    assert {path.name for path in tmp_path.iterdir()} == {"a" * 255, "模" * 85}


def full(*args: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("target", ["os.fsync", "pathlib.Path.touch", "pathlib.Path.rename", "pathlib.Path.mkdir"])
def test_a_disk_that_is_full_at_the_end_leaves_the_old_directory(target, tmp_path, monkeypatch):
    made_before(tmp_path / "out")
    monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)
    monkeypatch.setattr(target, full)
    with pytest.raises(ExportError, match="No space left on device"), \
            staged_directory(tmp_path / "out", force=True) as folder:
        os.close(os.open(folder / "new", os.O_CREAT))
    monkeypatch.undo()
    assert listing(tmp_path) == {"out", "out/old"}


@pytest.mark.parametrize(
    ("write", "said"),
    [(lambda folder: full(), "No space left on device"),
     (lambda folder: (folder / "missing" / "file").touch(), "No such file or directory")],
    ids=["full", "in the folder"],
)
def test_an_error_of_the_disk_in_the_block_is_an_export_error(write, said, tmp_path):
    def write_half() -> None:
        with staged_directory(tmp_path / "a" / "out") as folder:
            (folder / "half").write_text("half")
            write(folder)

    with pytest.raises(ExportError, match=said):
        write_half()
    assert listing(tmp_path) == set()


def test_an_error_in_reading_something_else_is_raised_as_it_is(tmp_path):
    with pytest.raises(FileNotFoundError), staged_directory(tmp_path / "out"):
        (tmp_path / "data").read_text()
    assert listing(tmp_path) == set()


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("interrupted", [1, 2])
def test_an_interrupt_between_the_renames_leaves_one_whole_directory(exchanges, interrupted, tmp_path, monkeypatch):
    made_before(tmp_path / "out")
    rename, exchange, calls = Path.rename, atomic._exchange, []

    def then_interrupted(move):
        def moved(*paths):
            result = move(*paths)
            calls.append(paths)
            if len(calls) == interrupted:
                raise KeyboardInterrupt
            return result

        return moved

    monkeypatch.setattr(Path, "rename", then_interrupted(rename))
    monkeypatch.setattr(atomic, "_exchange", then_interrupted(exchange) if exchanges else lambda one, other: False)

    def replace():
        with staged_directory(tmp_path / "out", force=True) as folder:
            (folder / "new").write_text("new")

    if exchanges and interrupted == 2:
        replace()  # there is only one step
    else:
        with pytest.raises(KeyboardInterrupt):
            replace()
    monkeypatch.undo()
    assert listing(tmp_path) == ({"out", "out/new"} if exchanges or interrupted == 2 else {"out", "out/old"})


def killed(*paths):
    os.kill(os.getpid(), signal.SIGKILL)


def killed_in(step, target):
    if step == "swap":
        atomic._exchange = lambda one, other: False
        rename = Path.rename
        Path.rename = lambda self, other: killed() if self.suffix == ".part" else rename(self, other)
    with staged_directory(target, force=True) as folder:
        (folder / "half").write_text("half")
        if step == "write":
            killed()


@pytest.mark.medium
@pytest.mark.sample(1)
@pytest.mark.parametrize("step", ["write", "swap"])
def test_what_a_killed_process_left_is_gone_after_the_next_call(step, tmp_path):
    made_before(tmp_path / "out")
    made_before(tmp_path / "other")
    assert fresh.run(killed_in, step, tmp_path / "out").returncode == -signal.SIGKILL
    assert any(path.name.startswith(".out.") for path in tmp_path.iterdir())
    with staged_directory(tmp_path / "other", force=True):
        pass
    assert any(path.name.startswith(".out.") for path in tmp_path.iterdir()), "another target cleaned it"
    if step == "swap":
        with pytest.warns(UserWarning, match="was being replaced when the process was killed: it is back"), \
                pytest.raises(ExportError, match="exists already"), staged_directory(tmp_path / "out"):
            pytest.fail("the block must not run")
        assert (tmp_path / "out" / "old").read_text() == "old"
    with staged_directory(tmp_path / "out", force=True) as folder:
        (folder / "new").write_text("new")
    assert listing(tmp_path) == {"other", "out", "out/new"}


def test_what_another_process_is_writing_is_left_alone(tmp_path):
    with staged_directory(tmp_path / "out") as first:
        (first / "file").write_text("first")
        with pytest.raises(RuntimeError), staged_directory(tmp_path / "out"):
            raise RuntimeError
        assert (first / "file").exists()
    assert listing(tmp_path) == {"out", "out/file"}


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_a_name_that_no_file_can_have_is_refused(name, tmp_path):
    with pytest.raises(ExportError, match=r"cannot create .*without NUL"), staged_directory(tmp_path / name):
        pytest.fail("the block must not run")


def test_a_deleted_working_directory_is_named(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ExportError, match="the working directory was deleted; give an absolute path"), \
            staged_directory("out"):
        pytest.fail("the block must not run")
    with staged_directory(tmp_path / "out") as folder:
        (folder / "file").touch()
    assert listing(tmp_path) == {"out", "out/file"}


def test_a_stage_that_another_process_removes_at_once_is_an_export_error(tmp_path, monkeypatch):
    mkdir = Path.mkdir

    def removed(path, *args, **kwargs):
        mkdir(path, *args, **kwargs)
        if path.suffix == ".part":
            path.rmdir()

    monkeypatch.setattr(Path, "mkdir", removed)
    with pytest.raises(ExportError, match="No such file or directory"), staged_directory(tmp_path / "out"):
        pytest.fail("the body must not run")


def test_a_file_system_without_locks_is_no_live_run(tmp_path, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    for _ in range(2):
        with staged_directory(tmp_path / "out", force=True) as folder:
            (folder / "file").write_text("whole")
    assert (tmp_path / "out" / "file").exists()


def test_a_file_is_written_whole_with_the_permissions_of_a_plain_file(tmp_path):
    (tmp_path / "plain").write_text("")
    write_file(tmp_path / "out", b"old")
    write_file(tmp_path / "out", b"new")
    assert (tmp_path / "out").read_bytes() == b"new"
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert listing(tmp_path) == {"plain", "out"}


@pytest.mark.parametrize(("call", "error"), [("fsync", OSError(errno.ENOSPC, "full")), ("replace", KeyboardInterrupt)])
def test_a_file_that_cannot_be_finished_is_the_old_one(tmp_path, monkeypatch, call, error):
    def fail(*arguments):
        raise error

    write_file(tmp_path / "out", b"old")
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(type(error) if isinstance(error, OSError) else error):
        write_file(tmp_path / "out", b"new")
    assert (tmp_path / "out").read_bytes() == b"old"
    assert listing(tmp_path) == {"out"}


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    done, replace, fsync = [], os.replace, os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (done.append("fsync"), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("replace"), replace(*paths)))
    write_file(tmp_path / "out", b"new")
    assert done == ["fsync", "replace"]


def test_a_file_takes_the_place_of_a_link_and_is_not_written_through_it(tmp_path):
    (tmp_path / "precious").write_text("ten years")
    (tmp_path / "out").symlink_to("precious")
    write_file(tmp_path / "out", b"new")
    assert not (tmp_path / "out").is_symlink()
    assert (tmp_path / "precious").read_text() == "ten years"


def test_what_a_killed_process_left_of_a_file_is_removed(tmp_path):
    names = {".out.c0ffee00.part", ".outer.c0ffee00.part", ".out.json.c0ffee00.part", "out.part", "out"}
    for name in names:
        (tmp_path / name).write_bytes(b"half")
    remove_unfinished(tmp_path / "out")
    assert listing(tmp_path) == names - {".out.c0ffee00.part"}
