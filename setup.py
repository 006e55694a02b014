"""What goes into the package; everything else about it stands in pyproject.toml.

``configs/`` lives beside ``qtk/`` in the repository, where users read and edit it, and is installed as ``qtk.configs``.
The C++ kernels are built if torch can be imported (``pip install --no-build-isolation``) and a compiler is there; if
not, the package works without them, and ``qtk.backends()`` says so.
"""

import os
import sys
from pathlib import Path

from setuptools import find_packages, setup

CONFIGS = ["qtk.configs", "qtk.configs.targets", "qtk.configs.recipes"]

# no library for OpenMP is linked: its symbols are those of the one that torch has loaded, and so are its threads
COMPILE_ARGS = ["-std=c++20", "-O3", "-g0", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
# of x86 processors: the inner loops for this one alone, as x86-64-v3 for AVX2, in place of one for each of several
ARCH = os.environ.get("QTK_ARCH")


# The number goes up when Python and C++ must change together; qtk/kernels/backends.py looks for it.
NATIVE = "_native_7"


def native() -> dict[str, object]:
    """The extension and the command that builds it, or nothing."""
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError:
        return {}
    if sys.platform != "linux":
        return {}

    class BuildIfPossible(BuildExtension):
        def build_extensions(self) -> None:
            try:
                super().build_extensions()
            except Exception as error:  # whatever the compiler says, the package works without
                self.warn(f"the C++ kernels are not built: {error}")
                self.extensions = []
                Path(f"qtk/{NATIVE}.so").unlink(missing_ok=True)  # one of other sources would not fit

    sources = sorted(str(path) for path in Path("csrc").glob("*.cpp"))
    arguments = [*COMPILE_ARGS, *([f"-DQTK_ARCH={ARCH}"] if ARCH else [])]
    extension = CppExtension(f"qtk.{NATIVE}", sources, extra_compile_args=arguments)
    return {
        "ext_modules": [extension],
        "cmdclass": {"build_ext": BuildIfPossible.with_options(no_python_abi_suffix=True, use_ninja=False)},
    }


setup(
    packages=[*find_packages(include=["qtk", "qtk.*"]), *CONFIGS],
    package_dir={"qtk.configs": "configs"},
    package_data={
        "qtk": ["py.typed"],
        "qtk.report": ["page.html"],
        "qtk.demo": ["weights/*.safetensors"],
        **{package: ["*.yaml"] for package in CONFIGS},
    },
    include_package_data=False,
    **native(),
)
