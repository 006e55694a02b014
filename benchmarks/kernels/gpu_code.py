"""What compilers make of the Triton kernels, for GPUs that need not be there.

The launchers run on CPU tensors with their kernels replaced by recorders; what they would have launched is compiled
with the specializations that Triton's launcher would choose: numbers that are 1 become constants, pointers and numbers
divisible by 16 are marked as such. Then the binary is read: NVIDIA's with cuobjdump, AMD's is text.

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
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qtk.kernels.gpu import candidate_errors, fake_quantize, fake_quantize_dynamic, fake_quantize_many, statistics
from qtk.kernels.gpu.launch import WAVES
from qtk.kernels.gpu.tiles import WARPS

MODULES = fake_quantize, fake_quantize_dynamic, fake_quantize_many, statistics, candidate_errors
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
    that are resident on a multiprocessor (NVIDIA) or SIMD (AMD). ``bandwidth`` in TB/s.
    """

    name: str
    target: GPUTarget
    processors: int
    bandwidth: float
    registers: int
    shared: int
    warps: int


CHIPS = {
    "sm_80": Chip("A100", GPUTarget("cuda", 80, 32), 108, 2.04, 65536, 164 << 10, 64),
    "sm_90": Chip("H200", GPUTarget("cuda", 90, 32), 132, 4.8, 65536, 228 << 10, 64),
    "sm_100": Chip("B200", GPUTarget("cuda", 100, 32), 148, 8.0, 65536, 228 << 10, 64),
    "gfx942": Chip("MI300X", GPUTarget("hip", "gfx942", 64), 304, 5.3, 512, 64 << 10, 8),
}


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a kernel that was asked for."""

    kernel: triton.JITFunction
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Code:
    """What a compiler made of a kernel.

    ``wide`` and ``narrow`` are instructions that load or store global memory, by 128 bits or more, and by less: those
    of scales and sums are. ``divisions`` are true ones, of all elements that a thread has in a turn and of its scales.
    ``sums`` are shapes and layouts of what is summed, which decide in what order.
    """

    registers: int
    spilled: int
    shared: int
    occupancy: float
    wide: int
    narrow: int
    divisions: int
    atomics: int
    sums: tuple[str, ...]


@contextmanager
def recorded(chip: Chip) -> Iterator[list[Launch]]:
    """The launches of the body, which are not done."""
    launches: list[Launch] = []

    class Recorder:
        def __init__(self, kernel: triton.JITFunction) -> None:
            self._kernel = kernel

        def __getitem__(self, grid: object) -> Callable[..., None]:
            def launch(*arguments: Any, **constants: Any) -> None:
                launches.append(Launch(self._kernel, arguments, constants))

            return launch

    patches = [
        mock.patch.object(module, name, Recorder(value))
        for module in MODULES for name, value in vars(module).items()
        if name.endswith("_kernel") and isinstance(value, triton.JITFunction)
    ]
    patches += [mock.patch.object(module, "programs", return_value=WAVES * chip.processors) for module in MODULES]
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
    given = dict(zip(names, launch.arguments, strict=False)) | launch.constants
    warps = given.pop("num_warps", WARPS)
    constants = {name: value for name, value in given.items() if not isinstance(value, Tensor) and (
        name.isupper() or (isinstance(value, int) and not isinstance(value, bool) and value == 1))}
    types = {name: "constexpr" if name in constants else _type(given[name]) for name in names}
    attributes = {
        (index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if types[name] != "constexpr"
        and (isinstance(given[name], Tensor) or (isinstance(given[name], int) and given[name] % 16 == 0))
    }
    made = triton.compile(
        ASTSource(launch.kernel, types, constants, attributes), target=chip.target, options={"num_warps": warps}
    )
    return _nvidia(made, chip, warps) if chip.target.backend == "cuda" else _amd(made, chip, warps)


def _type(value: object) -> str:
    match value:
        case Tensor():
            return POINTERS[value.dtype]
        case float():
            return "fp32"
        case int():
            return "i32" if abs(value) < 1 << 31 else "i64"
    raise TypeError(f"a kernel takes no {type(value).__name__}")


def _nvidia(made: Any, chip: Chip, warps: int) -> Code:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(made.asm["cubin"])
        found = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", path], capture_output=True, text=True, check=True
        ).stdout
    usage = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", found)}
    text, shared = made.asm["ptx"], max(usage["SHARED"], made.metadata.shared)
    bits = [int(vector or 1) * int(width) for vector, width in ACCESS.findall(text)]
    a_block = -(-usage["REG"] // 8) * 8 * 32 * warps
    blocks = min(chip.registers // max(a_block, 1), chip.warps // warps, (chip.shared - 1024) // (shared + 1024))
    return Code(
        usage["REG"], usage["STACK"] + usage["LOCAL"], shared, blocks * warps / chip.warps,
        sum(each >= 128 for each in bits), sum(each < 128 for each in bits), len(re.findall(r"div\.rn", text)),
        len(re.findall(r"\b(?:atom|red)\.", text)), _sums(made.asm["ttgir"]),
    )


def _amd(made: Any, chip: Chip, warps: int) -> Code:
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
        registers, number("vgpr_spill_count") + number("sgpr_spill_count"), shared,
        blocks * warps / (4 * chip.warps), sum(each.endswith("dwordx4") for each in accesses),
        sum(not each.endswith("dwordx4") for each in accesses), len(re.findall(r"v_div_fixup_f32", text)),
        len(re.findall(r"(?:global|buffer|flat)_atomic_", text)), _sums(made.asm["ttgir"]),
    )


def _sums(text: str) -> tuple[str, ...]:
    """The shapes and layouts of the tensors of float32 that are reduced, in order."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.\S.*)$", text, re.MULTILINE))
    found = re.findall(r"\}\) : \(tensor<([\dx]+xf32), (#\w+)>\) ->", text)
    return tuple(f"{shape} {layouts[layout]}" for shape, layout in found)
