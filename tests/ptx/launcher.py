"""Launches of Triton, compiled for a GPU that is not there, and run by ``machine``.

Triton's own launches take their whole way, up to where the driver would be given machine code: it chooses what it
specializes a kernel for by the arguments of each.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel

from tests.ptx import machine


class Driver:
    """What Triton asks of the machine."""

    utils = SimpleNamespace(unload_module=lambda module: None)

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


launched: list[str] = []
"""Names of the kernels that were run."""


def emulate(capability: int) -> None:
    """From now on, launches of Triton in this process run in the emulator. ``capability``: 90 of an H200."""
    triton.runtime.driver.set_active(Driver(capability))
    CompiledKernel._init_handles = _load


def _load(self: CompiledKernel) -> None:
    """In place of handing machine code to the driver."""
    if self.module is None:
        self.module = self.function = 0
        self._run = functools.partial(_launch, self.name, self.asm["ptx"], self.metadata, self.src.signature)


def _launch(
    name: str, ptx: str, metadata: Any, signature: dict[str, str], grid_x: int, grid_y: int, grid_z: int, stream: int,
    function: int, packed: object, launch_metadata: object, enter: object, leave: object, *arguments: Any,
) -> None:
    assert len(arguments) == len(signature)
    taken = [given for given, kind in zip(arguments, signature.values(), strict=True) if kind != "constexpr"]
    grid = grid_x, grid_y, grid_z
    machine.run(ptx, taken, grid, 32 * metadata.num_warps, metadata.shared, seed=len(launched))
    launched.append(name)
