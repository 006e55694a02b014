"""The C++ library is compiled from the sources that the package holds."""

import ctypes

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


@pytest.mark.parametrize("source", ["int broken(", None])
def test_what_cannot_be_compiled_is_an_error_that_says_what_to_do(source, tmp_path, monkeypatch):
    if source is not None:
        (tmp_path / "broken.cpp").write_text(source)
    monkeypatch.setattr(native_build, "SOURCES", tmp_path if source is not None else tmp_path / "missing")
    with pytest.raises(BuildError, match=r"cannot be compiled into .*; install g\+\+ 11 or newer, or go on without"):
        native_build.build(tmp_path / "parent")
    assert not (tmp_path / "parent" / "qtk").exists()
