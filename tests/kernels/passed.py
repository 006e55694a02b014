"""Whether the kernels are as they were when all of their tests passed: then ``make test`` leaves most of these out.

``python tests/kernels/passed.py --record`` records the present state in ``passed.txt``; ``make test-kernels`` calls it.
"""

from __future__ import annotations

import argparse
import hashlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).with_name("passed.txt")
PLACES = ("csrc", "qtk/kernels", "qtk/numerics", "qtk/ops", "tests/kernels", "tests/numerics", "tests/ops", "tests/ptx")
SOURCES = {".py", ".cpp", ".h"}


def state(root: Path = ROOT) -> str:
    """A digest of the sources of the kernels and of their tests, and of the release of Triton that compiles them."""
    digest = hashlib.sha256(_triton().encode())
    for place in PLACES:
        for path in sorted((root / place).rglob("*")):
            if path.suffix in SOURCES:
                digest.update(f"{path.relative_to(root)}\n".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def have_passed() -> bool:
    return RECORD.is_file() and RECORD.read_text(encoding="utf-8").strip() == state()


def _triton() -> str:
    try:
        return ".".join(version("triton").split(".")[:2])
    except PackageNotFoundError:
        return "none"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", required=True, help="say that all tests have passed")
    parser.parse_args()
    RECORD.write_text(f"{state()}\n", encoding="utf-8")
