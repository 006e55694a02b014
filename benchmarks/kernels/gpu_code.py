"""What compilers make of the Triton kernels, for GPUs that need not be there.

The launchers run on CPU tensors with their kernels replaced by recorders; what they would have launched is compiled
with the specializations that Triton's launcher would choose: numbers that are 1 become constants, pointers and numbers
divisible by 16 are marked as such. Then the binary is read: NVIDIA's with cuobjdump, AMD's is text.

Instructions an element: those on the ordinary path of the main loop (``machine_code``; of the whole kernel where there
is none, which then includes what is before and after), times the threads of a launch, over the elements of its tensor:
lanes that a tile leaves idle, and all candidates of a range, are counted in. What is before and after a loop is not.

Runs without TRITON_INTERPRET.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from machine_code import Instruction, amdgcn, main_loop, sass
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qtk.kernels.gpu import (
    candidate_errors,
    extremes,
    fake_quantize,
    fake_quantize_dynamic,
    feedback_rounding,
    row_streams,
    statistics,
    tiles,
    tiling,
)
from qtk.kernels.gpu import launch as launching
from qtk.kernels.gpu.launch import WAVES
from qtk.kernels.gpu.tiles import WARPS

MODULES = (
    extremes, fake_quantize, fake_quantize_dynamic, statistics, candidate_errors, feedback_rounding
)
POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32", torch.int64: "*i64",
    torch.float64: "*fp64", torch.int8: "*i8", torch.int16: "*i16",
}
ACCESS = re.compile(r"(?:ld|st)\.(?:volatile\.|relaxed\.\w+\.)?global(?:\.\w+)*?(?:\.v(\d))?\.[bfsu](\d+)")
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass(frozen=True, slots=True)
class Chip:
    """A GPU, from its maker's data sheet and programming guide.

    ``registers`` are 32 bits wide: of a multiprocessor (NVIDIA), or of a lane of a SIMD (AMD). ``warps`` is the most
    that are resident on a multiprocessor (NVIDIA) or SIMD (AMD). ``bandwidth`` in TB/s. ``clock`` in GHz is the one at
    which the data sheet's rate of float32 additions and multiplications is reached: the highest.
    """

    name: str
    target: GPUTarget
    processors: int
    bandwidth: float
    registers: int
    shared: int
    warps: int
    clock: float

    @property
    def issues(self) -> float:
        """Most instructions of one thread that are issued a second, in units of 10¹².

        NVIDIA: four schedulers of a multiprocessor issue one instruction of a warp of 32 each, whatever its kind. AMD:
        a compute unit issues one vector instruction of a wave of 64 a clock, and others beside it.
        """
        lanes = 4 * 32 if self.target.backend == "cuda" else 64
        return self.processors * lanes * self.clock / 1000


CHIPS = {
    "sm_80": Chip("A100", GPUTarget("cuda", 80, 32), 108, 2.04, 65536, 164 << 10, 64, 1.41),
    "sm_90": Chip("H200", GPUTarget("cuda", 90, 32), 132, 4.8, 65536, 228 << 10, 64, 1.98),
    "sm_100": Chip("B200", GPUTarget("cuda", 100, 32), 148, 8.0, 65536, 228 << 10, 64, 1.98),
    "gfx942": Chip("MI300X", GPUTarget("hip", "gfx942", 64), 304, 5.3, 512, 64 << 10, 8, 2.1),
}


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a kernel that was asked for."""

    kernel: triton.JITFunction
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    @property
    def given(self) -> dict[str, Any]:
        return dict(zip(self.kernel.arg_names, self.arguments, strict=False)) | self.constants

    @property
    def bits(self) -> int:
        """Bits that the launch reads and writes for an element of its tensor."""
        given = self.given
        names = ["x_at", "y_at", "g_at", "dx_at"]
        if "counts_at" in given:
            names = ["x_at"]
        names += ["target_at", "change_at"] * 2  # GPTQ's, read and written
        names += ["residual_at"] * bool(given.get("RESIDUAL")) + ["weights_at"] * bool(given.get("WEIGHTED"))
        return sum(8 * given[name].itemsize for name in names if name in given)

    @property
    def tile(self) -> int:
        """Lanes of a tile."""
        given = self.given
        return given["ROWS"] * given["WIDTH"] if "ROWS" in given else given.get("SCALES", 1) * given["REACH"]

    @property
    def lanes(self) -> float:
        """Lanes of all tiles for an element of the tensor: 1 if no lane is idle, times the candidates."""
        given = self.given
        candidates = self.grid[1] if len(self.grid) > 1 else 1
        tiles = self.grid[0] // given.get("splits", 1) * given.get("turns", 1)
        return tiles * self.tile * candidates / given["x_at"].numel()


@dataclass(frozen=True, slots=True)
class Code:
    """What a compiler made of a kernel.

    ``wide`` and ``narrow`` are instructions that load or store global memory, by 128 bits or more, and by less: those
    of scales and sums are. ``divisions`` are true ones, of all elements that a thread has in a turn and of its scales.

    ``instructions`` an element of the tensor, and ``issues``, those that the chip's issue rate counts: on AMD those of
    the vector unit. ``spills_a_turn`` are instructions of the main loop that store or load what was spilled: outside
    of it they are run once a program. ``None`` where the binary cannot be disassembled, and for GPTQ's kernel.
    """

    registers: int
    spilled: int
    shared: int
    occupancy: float
    wide: int
    narrow: int
    divisions: int
    atomics: int
    instructions: float | None
    issues: float | None
    spills_a_turn: int | None


@contextmanager
def recorded(chip: Chip) -> Iterator[list[Launch]]:
    """The launches of the body, which are not done."""
    launches: list[Launch] = []

    class Recorder:
        def __init__(self, kernel: triton.JITFunction) -> None:
            self._kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*arguments: Any, **constants: Any) -> None:
                launches.append(Launch(self._kernel, grid, arguments, constants))

            return launch

    patches = [
        mock.patch.object(module, name, Recorder(value))
        for module in MODULES for name, value in vars(module).items()
        if name.endswith("_kernel") and isinstance(value, triton.JITFunction)
    ]
    patches += [
        mock.patch.object(module, "is_amd", return_value=chip.target.backend == "hip")
        for module in (row_streams, tiles, tiling)
    ]
    patches += [
        mock.patch.object(module, "programs", return_value=WAVES * chip.processors)
        for module in (*MODULES, row_streams, launching) if hasattr(module, "programs")
    ]
    for patch in patches:
        patch.start()
    try:
        yield launches
    finally:
        for patch in patches:
            patch.stop()


def compiled(launch: Launch, chip: Chip) -> Code:
    """Compiles a launch as Triton would where the chip is, and reads the code."""
    names = launch.kernel.arg_names
    given = launch.given
    warps = given.pop("num_warps", WARPS)
    options = {"num_warps": warps, "enable_fp_fusion": given.pop("enable_fp_fusion")}
    constants = {name: value for name, value in given.items() if not isinstance(value, Tensor) and (
        name.isupper() or (isinstance(value, int) and not isinstance(value, bool) and value == 1))}
    types = {name: "constexpr" if name in constants else _type(given[name]) for name in names}
    attributes = {
        (index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if types[name] != "constexpr"
        and (isinstance(given[name], Tensor) or (isinstance(given[name], int) and given[name] % 16 == 0))
    }
    made = triton.compile(
        ASTSource(launch.kernel, types, constants, attributes), target=chip.target, options=options
    )
    read = _nvidia if chip.target.backend == "cuda" else _amd
    return read(made, launch, chip, warps)


def _main_loop(
    code: list[Instruction], launch: Launch, chip: Chip, warps: int
) -> tuple[float, float, int] | tuple[None, None, None]:
    """Instructions, and those that the issue rate counts, for an element of the launch's tensor; and spills a turn.

    ``None`` for GPTQ's kernel, which comes back to an element once for every column.
    """
    if "target_at" in launch.given:
        return None, None, None
    lanes = launch.tile / (warps * chip.target.warp_size)  # of a thread
    body, is_loop = main_loop(code, lanes * launch.bits)
    if not body:
        return None, None, None
    a_turn = max(lanes, 1) * launch.bits  # where threads outnumber lanes, several have the same one
    if sum(each.bits for each in body) < a_turn:
        raise ValueError(f"the ordinary path of {launch.kernel.__name__} for {chip.name} misses loads or stores")
    # more if it is unrolled; loads of scales in the loop are fewer bits than its elements
    turns = sum(each.bits for each in body) // a_turn if is_loop else 1
    share = launch.lanes / (lanes * turns)
    counted = sum(each.is_vector_alu for each in body) if chip.target.backend == "hip" else len(body)
    return len(body) * share, counted * share, sum(each.is_spill for each in body)


def _type(value: object) -> str:
    match value:
        case Tensor():
            return POINTERS[value.dtype]
        case float():
            return "fp32"
        case int():
            return "i32" if abs(value) < 1 << 31 else "i64"
    raise TypeError(f"a kernel takes no {type(value).__name__}")


def _nvidia(made: Any, launch: Launch, chip: Chip, warps: int) -> Code:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(made.asm["cubin"])
        found = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", path], capture_output=True, text=True, check=True
        ).stdout
        listing = subprocess.run([CUOBJDUMP, "-sass", path], capture_output=True, text=True, check=False).stdout
    usage = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", found)}
    text, shared = made.asm["ptx"], max(usage["SHARED"], made.metadata.shared)
    bits = [int(vector or 1) * int(width) for vector, width in ACCESS.findall(text)]
    a_block = -(-usage["REG"] // 8) * 8 * 32 * warps
    blocks = min(chip.registers // max(a_block, 1), chip.warps // warps, (chip.shared - 1024) // (shared + 1024))
    return Code(
        usage["REG"], usage["STACK"] + usage["LOCAL"], shared, blocks * warps / chip.warps,
        sum(each >= 128 for each in bits), sum(each < 128 for each in bits), len(re.findall(r"div\.rn", text)),
        len(re.findall(r"\b(?:atom|red)\.", text)),
        *_main_loop(sass(listing), launch, chip, warps),
    )


def _amd(made: Any, launch: Launch, chip: Chip, warps: int) -> Code:
    text = made.asm["amdgcn"]

    def number(name: str) -> int:
        (found,) = set(re.findall(rf"\.{name}:\s+(\d+)", text))
        return int(found)

    registers = number("vgpr_count")
    a_simd = min(chip.warps, chip.registers // (-(-max(registers, 1) // 8) * 8))  # waves on each of four SIMDs
    shared = made.metadata.shared
    blocks = min(4 * a_simd // warps, chip.shared // max(shared, 1))
    accesses = re.findall(r"(?:global|buffer)_(?:load|store)_(\w+)", text)
    return Code(
        registers, number("vgpr_spill_count"), shared,  # spilled scalars are in vector registers, not in memory
        blocks * warps / (4 * chip.warps), sum(each.endswith("dwordx4") for each in accesses),
        sum(not each.endswith("dwordx4") for each in accesses), len(re.findall(r"v_div_fixup_f32", text)),
        len(re.findall(r"(?:global|buffer|flat)_atomic_", text)),
        *_main_loop(amdgcn(text), launch, chip, warps),
    )
