"""The inner loops of csrc on other processors: ARM by a cross compiler and an emulator, x86-64 without AVX-512.

They include no header of torch, so that a C++ compiler is all they need: ``apt-get install g++-aarch64-linux-gnu
qemu-user`` on Debian. ``run_loops.cpp`` runs all of them and prints a hash of what each computes.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from qtk.kernels.native_build import COMPILE_ARGS

pytestmark = pytest.mark.kernels
ROOT = Path(__file__).resolve().parents[2]
LOOPS = sorted((ROOT / "csrc").glob("*_loops.cpp"))
OPTIONS = ["-std=c++20", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", f"-I{ROOT / 'csrc'}"]
HOST, ARM, EMULATOR = "g++", "aarch64-linux-gnu-g++", "qemu-aarch64"
SMALL = ROOT / "csrc/feedback_rounding_loops.cpp"
VECTORS = re.compile(r"\b(f\w+)\s+v\d+\.4s")
ON_X86 = platform.machine() in ("x86_64", "AMD64")


def needs(*programs: str) -> pytest.MarkDecorator:
    missing = [program for program in programs if shutil.which(program) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def built(folder: Path, compiler: str, *options: str, sources: Sequence[Path] = LOOPS) -> list[Path]:
    """The object files of loops."""
    made = [folder / f"{source.stem}.o" for source in sources]
    for source, target in zip(sources, made, strict=True):
        run(compiler, *OPTIONS, *options, "-c", source, "-o", target)
    return made


def hashes(folder: Path, compiler: str, objects: Sequence[Path], *options: str, by: tuple[str, ...] = ()) -> dict:
    """What each loop computes, in a program made of ``objects`` that is run by ``by``."""
    program = folder / "loops"
    run(compiler, *OPTIONS, *options, ROOT / "tests/kernels/run_loops.cpp", *objects, "-o", program)
    return dict(line.rsplit(" ", 1) for line in run(*by, program).splitlines())


def instructions(made: Path, compiler: str) -> str:
    return run(compiler.replace("g++", "objdump"), "--disassemble", "--no-show-raw-insn", made)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("host")
    return hashes(folder, HOST, built(folder, HOST))


@pytest.fixture(scope="module")
def for_arm(tmp_path_factory):
    return built(tmp_path_factory.mktemp("arm"), ARM)


@pytest.fixture(scope="module")
def for_avx2(tmp_path_factory):
    return built(tmp_path_factory.mktemp("avx2"), HOST, "-DQTK_ARCH=x86-64-v3")


def test_the_build_options_are_those_of_the_library():
    assert set(OPTIONS[:-1]) <= set(COMPILE_ARGS)


@needs(ARM)
@pytest.mark.parametrize(("loops", "wanted"), [
    ("fake_quantize_loops", {"fdiv", "fmul", "fadd", "frinti"}), ("candidate_errors_loops", {"fdiv", "fmul", "frinti"}),
    ("feedback_rounding_loops", {"fdiv", "fmul", "frinti"}), ("coordinate_descent_loops", {"fmul", "fadd"}),
    ("statistics_loops", {"fmul", "frintm", "fcmgt"}), ("least_output_error_loops", {"fdiv", "fmla", "frinti"}),
])
def test_loops_for_arm_are_vectorized(loops, wanted, for_arm):
    # nearbyint is frinti, which rounds by the processor's mode: ties to even, if nobody has changed it
    (made,) = (made for made in for_arm if made.stem == loops)
    vectorized = set(VECTORS.findall(instructions(made, ARM)))
    assert wanted <= vectorized, f"only {sorted(vectorized)}"


@needs(ARM)
def test_no_loop_is_left_out_and_code_without_vectors_is_told_apart(for_arm, tmp_path):
    assert len(for_arm) == len(LOOPS) == 6
    (made,) = built(tmp_path, ARM, "-fno-tree-vectorize", sources=[SMALL])
    assert not VECTORS.findall(instructions(made, ARM))


@needs(HOST, ARM, EMULATOR)
@pytest.mark.skipif(not ON_X86, reason="the host is not x86-64")
def test_arm_computes_the_same_bits(expected, for_arm, tmp_path):
    assert len(set(expected.values())) == len(expected) > 50
    assert hashes(tmp_path, ARM, for_arm, "-static", by=(EMULATOR,)) == expected


@needs(HOST)
@pytest.mark.skipif(not ON_X86, reason="the host is not x86-64")
def test_avx2_computes_the_same_bits(expected, for_avx2, tmp_path):
    if "avx2" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        pytest.skip("this processor has no AVX2")
    assert hashes(tmp_path, HOST, for_avx2) == expected


@needs(HOST)
@pytest.mark.slow
@pytest.mark.skipif(not ON_X86, reason="the host is not x86-64")
def test_the_baseline_computes_the_same_bits(expected, tmp_path):
    assert hashes(tmp_path, HOST, built(tmp_path, HOST, "-DQTK_ARCH=x86-64")) == expected


@needs(HOST)
@pytest.mark.skipif(not ON_X86, reason="the host is not x86-64")
def test_sums_by_column_are_stored_as_whole_registers(for_avx2):
    (made,) = (made for made in for_avx2 if made.stem == "fake_quantize_loops")
    function = re.compile(r"^\w+ <(\w*backward_columns\w*)>:\n(.*?)^$", re.MULTILINE | re.DOTALL)
    functions = function.findall(instructions(made, HOST))
    assert len(functions) == 9
    assert [name for name, code in functions if re.search(r"vextractps .*\(", code)] == []


@needs(HOST)
@pytest.mark.skipif(not ON_X86, reason="the host is not x86-64")
def test_one_instruction_set_uses_the_registers_of_that_one(tmp_path):
    registers = {"x86-64": "xmm", "x86-64-v3": "ymm", "x86-64-v4": "zmm"}
    for arch, widest in registers.items():
        (made,) = built(tmp_path, HOST, f"-DQTK_ARCH={arch}", sources=[SMALL])
        code = instructions(made, HOST)
        found = {name for name in registers.values() if f"%{name}" in code}
        if arch != "x86-64-v4":  # which GCC may tell to prefer 256 bits
            assert widest in found
        assert not {name for name in found if name > widest}


@needs(HOST)
@pytest.mark.slow
@pytest.mark.skipif(not ON_X86, reason="the host is not x86-64")
def test_the_hashes_see_a_fused_multiply_add(expected, tmp_path):
    options = "-ffp-contract=fast", "-DQTK_ARCH=x86-64-v3"
    assert hashes(tmp_path, HOST, built(tmp_path, HOST, *options)) != expected
