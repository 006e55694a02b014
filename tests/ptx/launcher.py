"""Launches of Triton, compiled for a GPU that is not there, and run by ``machine``.

Triton itself chooses what it specializes a kernel for, by the arguments of each launch, as it does before a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from tests.ptx import machine


class Driver:
    """What Triton's compiler asks of the machine."""

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
    JITFunction.run = functools.partialmethod(_run, JITFunction.run)


def _run(self: JITFunction, compile_only: Any, *given: Any, grid: Sequence[int], warmup: bool, **constants: Any) -> Any:
    made = compile_only(self, *given, grid=grid, warmup=True, **constants)
    if not warmup:
        bound = dict(zip(self.arg_names, given, strict=False)) | constants
        taken = [bound[name] for name, kind in made.src.signature.items() if kind != "constexpr"]
        machine.run(made.asm["ptx"], taken, grid, 32 * made.metadata.num_warps, made.metadata.shared, len(launched))
        launched.append(self.__name__)
    return made
