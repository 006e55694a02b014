"""What goes into the package; everything else about it stands in pyproject.toml.

``configs/`` and ``csrc/`` live beside ``qtk/`` in the repository and are installed as ``qtk.configs`` and ``qtk.csrc``.
The C++ kernels are built if torch can be imported (``pip install --no-build-isolation``) and a compiler is there; if
not, the package works without them, and ``qtk build-kernels`` compiles them later.
"""

import runpy
import sys
from pathlib import Path

from setuptools import find_packages, setup

CONFIGS = ["qtk.configs", "qtk.configs.targets", "qtk.configs.recipes"]
NATIVE = runpy.run_path(str(Path(__file__).parent / "qtk" / "kernels" / "native_build.py"))


def native() -> dict[str, object]:
    """The extension and the command that builds it, or nothing."""
    try:
        from torch.utils.cpp_extension import BuildExtension
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
                Path(f"qtk/{NATIVE['NAME']}.so").unlink(missing_ok=True)  # one of other sources would not fit

    return {
        "ext_modules": [NATIVE["extension"](Path("csrc"))],
        "cmdclass": {"build_ext": BuildIfPossible.with_options(no_python_abi_suffix=True, use_ninja=False)},
    }


setup(
    packages=[*find_packages(include=["qtk", "qtk.*"]), *CONFIGS, "qtk.csrc"],
    package_dir={"qtk.configs": "configs", "qtk.csrc": "csrc"},
    package_data={
        "qtk": ["py.typed"],
        "qtk.csrc": ["*.cpp", "*.h"],
        "qtk.report": ["page.html"],
        "qtk.demo": ["weights/*.safetensors"],
        **{package: ["*.yaml"] for package in CONFIGS},
    },
    include_package_data=False,
    **native(),
)
