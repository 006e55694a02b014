"""The C++ library is compiled from the sources that the package holds."""

import ctypes
from importlib.metadata import Distribution

import pytest

from qtk.errors import BuildError
from qtk.kernels import native_build

SOURCE = 'extern "C" int seven() { return 7; }\n'


def test_a_library_is_built_where_it_is_looked_for(tmp_path, monkeypatch):
    (tmp_path / "seven.cpp").write_text(SOURCE)
    monkeypatch.setattr(native_build, "SOURCES", tmp_path)
    path = native_build.build(tmp_path / "parent")
    assert path == tmp_path / "parent" / "qtk" / f"{native_build.NAME}.so"
    assert ctypes.CDLL(str(path)).seven() == 7


def test_pip_knows_the_library_of_an_installed_package(tmp_path, monkeypatch):
    (tmp_path / "seven.cpp").write_text(SOURCE)
    record = tmp_path / "site" / "qtk-0.1.0.dist-info" / "RECORD"
    record.parent.mkdir(parents=True)
    record.write_text("qtk/__init__.py,,\nqtk-0.1.0.dist-info/RECORD,,\n")
    monkeypatch.setattr(native_build, "SOURCES", tmp_path)
    monkeypatch.setattr(native_build, "distribution", lambda name: Distribution.at(record.parent))
    library = native_build.build(tmp_path / "site")
    native_build.build(tmp_path / "site")
    native_build.build(tmp_path / "elsewhere")
    assert [str(each.locate()) for each in Distribution.at(record.parent).files if each.suffix == ".so"] == [
        str(library)]


@pytest.mark.parametrize("source", ["int broken(", None])
def test_what_cannot_be_compiled_is_an_error_that_says_what_to_do(source, tmp_path, monkeypatch):
    if source is not None:
        (tmp_path / "broken.cpp").write_text(source)
    monkeypatch.setattr(native_build, "SOURCES", tmp_path if source is not None else tmp_path / "missing")
    with pytest.raises(BuildError, match=r"cannot be compiled into .*; install g\+\+ 11 or newer, or go on without"):
        native_build.build(tmp_path / "parent")
    assert not (tmp_path / "parent" / "qtk").exists()
