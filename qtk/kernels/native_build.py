"""Compiles the C++ library of the CPU kernels, for ``setup.py`` and for ``qtk build-kernels``.

``setup.py`` reads this file by its path, when qtk cannot be imported yet.
"""

from __future__ import annotations

import os
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from setuptools import Extension

NAME = "_native_9_cp{}{}".format(*sys.version_info)
"""The number goes up when Python and C++ must change together, and a library serves one Python; ``backends.py``
looks for the file of this name."""

# no OpenMP library is linked: symbols and threads come from the OpenMP library that torch has loaded
COMPILE_ARGS = ("-std=c++20", "-O3", "-g0", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
ARCHITECTURE = "QTK_ARCH"
"""Environment variable, of x86 processors: compiles the inner loops for one alone, as x86-64-v3 for AVX2, in place of
one version for each of several."""

PACKAGE = Path(__file__).resolve().parents[1]
SOURCES = next((path for path in (PACKAGE / "csrc", PACKAGE.parent / "csrc") if path.is_dir()), PACKAGE / "csrc")
"""In an installed package inside it, in a checkout beside it."""


def extension(folder: Path) -> Extension:
    """The extension of the sources in ``folder``, for the torch that is installed."""
    from torch.utils.cpp_extension import CppExtension

    arch = os.environ.get(ARCHITECTURE)
    arguments = [*COMPILE_ARGS, *([f"-DQTK_ARCH={arch}"] if arch else [])]
    sources = sorted(str(path) for path in folder.glob("*.cpp"))
    return CppExtension(f"qtk.{NAME}", sources, extra_compile_args=arguments)  # type: ignore[no-untyped-call]


def build(parent: Path = PACKAGE.parent) -> Path:
    """Compiles the library into ``parent / "qtk"``, and adds it to the files that pip removes with the package.

    Returns: the path of the library.
    Raises: BuildError if a compiler, the sources or the right to write there are missing.
    """
    from qtk.errors import BuildError

    try:
        library = _built(parent)
        _record(library)
        return library
    except Exception as error:  # whatever setuptools and the compiler say
        raise BuildError(f"the C++ kernels cannot be compiled into {parent / 'qtk'}: {error}; install g++ 11 or newer, "
                         "or go on without them: the results are the same bits, slower") from error


def _built(parent: Path) -> Path:
    from setuptools import Distribution
    from torch.utils.cpp_extension import BuildExtension

    if not SOURCES.is_dir():
        raise FileNotFoundError(f"no sources at {SOURCES}")
    with tempfile.TemporaryDirectory() as scratch:
        command = BuildExtension(Distribution({"name": "qtk", "ext_modules": [extension(SOURCES)]}),
                                 no_python_abi_suffix=True)
        command.build_lib, command.build_temp, command.inplace = str(parent), scratch, False
        command.ensure_finalized()
        command.run()
    return parent / "qtk" / f"{NAME}.so"


def _record(library: Path) -> None:
    """Lists the library in the RECORD of the package, if it stands among the package's files.

    A file that pip leaves behind keeps the folder, which Python then imports in place of a later editable install.
    """
    try:
        installed = distribution("qtk")
    except PackageNotFoundError:
        return
    root = Path(str(installed.locate_file(""))).resolve()
    record = next((Path(str(each.locate())) for each in installed.files or () if each.name == "RECORD"), None)
    if record is None or not library.is_relative_to(root):
        return
    line = f"{library.relative_to(root).as_posix()},,\n"
    if line not in record.read_text(encoding="utf-8"):
        with record.open("a", encoding="utf-8") as file:
            file.write(line)
