"""What goes into the package; everything else about it stands in pyproject.toml.

``configs/`` lives beside ``qtk/`` in the repository, where users read and edit it, and is installed as ``qtk.configs``.
"""

from setuptools import find_packages, setup

CONFIGS = ["qtk.configs", "qtk.configs.targets", "qtk.configs.recipes"]

setup(
    packages=[*find_packages(include=["qtk", "qtk.*"]), *CONFIGS],
    package_dir={"qtk.configs": "configs"},
    package_data={
        "qtk": ["py.typed"],
        "qtk.demo": ["weights/*.safetensors"],
        **{package: ["*.yaml"] for package in CONFIGS},
    },
    include_package_data=False,
)
