import errno
import os
from pathlib import Path

import pytest

from qtk.errors import ExportError
from qtk.export.atomic import MARKER, staged_directory


def listing(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.name != MARKER}


def made_before(target: Path) -> None:
    with staged_directory(target) as folder:
        (folder / "old").write_text("old")


def write_half(target: Path, error: type[BaseException]) -> None:
    with staged_directory(target, force=True) as folder:
        (folder / "file").write_text("half")
        raise error


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
    (tmp_path / "out").mkdir()
    with pytest.raises(ExportError, match=r"out exists already .* force=True"), staged_directory(tmp_path / "out"):
        pytest.fail("the block must not run")
    assert listing(tmp_path) == {"out"}


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


def test_an_empty_directory_may_be_filled_by_force(tmp_path):
    (tmp_path / "empty").mkdir()
    with staged_directory(tmp_path / "empty", force=True) as folder:
        (folder / "a").touch()
    assert (tmp_path / "empty" / "a").exists()


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

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(ExportError, match="disk gone"), staged_directory(tmp_path / "out", force=True) as folder:
        (folder / "new").write_text("new")
    assert listing(tmp_path) == {"out", "out/old"}


def test_target_made_meanwhile_is_not_overwritten(tmp_path):
    with pytest.raises(ExportError, match="exists already"), staged_directory(tmp_path / "out"):
        (tmp_path / "out").mkdir()
    assert listing(tmp_path) == {"out"}


def test_a_file_in_the_way_is_refused_even_with_force(tmp_path):
    (tmp_path / "out").write_text("precious")
    with pytest.raises(ExportError, match="not a directory"), staged_directory(tmp_path / "out", force=True):
        pytest.fail("the block must not run")
    assert (tmp_path / "out").read_text() == "precious"


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
