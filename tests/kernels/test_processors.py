"""The C++ loops on processors that are not here: compiled for them, and run by QEMU where it is installed.

On Debian: ``apt-get install g++-aarch64-linux-gnu qemu-user``. What is not installed is skipped.
"""

import ast
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOOPS = sorted((ROOT / "csrc").glob("*_loops.cpp"))
DRIVER = Path(__file__).parent / "processors" / "loops.cpp"
ARM = "aarch64-linux-gnu-g++"
VECTORS = {"fmul": "candidate_errors|coordinate_descent|fake_quantize|feedback_rounding",
           "fdiv": "candidate_errors|coordinate_descent|fake_quantize|feedback_rounding",
           "frintn|frinti": "candidate_errors|coordinate_descent|fake_quantize|feedback_rounding",
           "fcm..": "statistics"}
"""Instruction that is to be there for four floats at a time, and the files of the loops."""

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
needs_arm = pytest.mark.skipif(shutil.which(ARM) is None, reason=f"no cross compiler {ARM}")
needs_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="not an x86 processor")


def flags():
    """Those of setup.py."""
    for node in ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "COMPILE_ARGS":
            return ast.literal_eval(node.value)
    raise AssertionError("setup.py has no COMPILE_ARGS")


def program(folder, compiler, *more):
    path = folder / "loops"
    command = [compiler, *flags(), *more, "-I", ROOT / "csrc", *LOOPS, DRIVER, "-o", path]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[-3000:]
    return path


def printed(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """What the loops print as they are built by setup.py."""
    return printed(program(tmp_path_factory.mktemp("here"), "g++"))


def test_the_program_runs_every_loop(here):
    declared = set()
    for path in (ROOT / "csrc").glob("*_loops.h"):
        declared |= set(re.findall(r"void (\w+)\(", path.read_text(encoding="utf-8")))
    source = DRIVER.read_text(encoding="utf-8")
    assert {name for name in declared if f"qtk::{name}(" not in source} == {"pass_residual"}
    assert len(here.splitlines()) > 50


@needs_x86
@pytest.mark.parametrize("arch", ["x86-64", "x86-64-v3"])
def test_one_instruction_set_alone_gives_the_same_bits(here, tmp_path, arch):
    path = program(tmp_path, "g++", f'-DQTK_ARCH="{arch}"')
    assert printed(path) == here
    functions = printed("objdump", "-d", path).split("\n\n")
    own = "\n".join(code for code in functions if re.search(r"<_ZN3qtk", code.split("\n")[0]))
    assert own
    assert "%zmm" not in own
    assert ("%ymm" in own) == (arch == "x86-64-v3")


@needs_arm
@pytest.mark.parametrize("path", LOOPS, ids=lambda path: path.stem)
def test_loops_are_vectorized_with_neon(path, tmp_path):
    made = tmp_path / "loops.o"
    subprocess.run([ARM, *flags(), "-c", path, "-o", made], check=True)
    code = printed(ARM.replace("g++", "objdump"), "-d", made)
    for instruction, files in VECTORS.items():
        if re.match(files, path.stem):
            assert re.search(rf"\b({instruction})\s+v\d+\.4s", code), instruction


@needs_arm
@pytest.mark.skipif(shutil.which("qemu-aarch64") is None, reason="no qemu-aarch64")
def test_results_on_arm_are_the_same_bits(here, tmp_path):
    assert printed("qemu-aarch64", program(tmp_path, ARM, "-static")) == here
