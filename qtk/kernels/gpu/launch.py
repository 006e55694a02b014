"""Launches of Triton kernels, and what they need: options, the current device, the number of programs, counters."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qtk.kernels.gpu.tiles import arguments, has_tail, shape
from qtk.kernels.gpu.tiling import Tiling

WAVES = 8
"""Programs per multiprocessor: enough to hide memory latency."""

EXACTLY = {"enable_fp_fusion": False}
"""How every kernel is compiled: a product is rounded before something is added to it, as on the CPU."""

MOST_KEPT = 4096
"""Different launches whose compiled kernels are kept at hand."""

_COMPILED: dict[tuple[object, ...], tuple[Any, tuple[object, ...]]] = {}
"""What distinguishes a launch → its compiled kernel, and the arguments that were compiled in."""

_REPEATABLE: dict[Hashable, Repeatable] = {}
"""What distinguishes a call → its launch."""

_TICKETS: dict[tuple[torch.device, int], Tensor] = {}


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an op: its launch depends on ``likeness`` and on the addresses of ``tensors``, on nothing else.

    Each tensor has one role; that two are one is chance.
    """

    likeness: Hashable
    tensors: tuple[Tensor, ...]

    @property
    def is_aligned(self) -> bool:
        """Whether all tensors begin at multiples of 16 bytes, as what is allocated does."""
        addresses = 0
        for each in self.tensors:
            addresses |= each.data_ptr()
        return addresses % 16 == 0


@dataclass(frozen=True, slots=True)
class Repeatable:
    """A launch with room for tensors: argument ``at`` is tensor ``k`` of a call for every ``(at, k)`` of ``places``."""

    compiled: Any
    grid: tuple[int, ...]
    arguments: list[Any]
    places: tuple[tuple[int, int], ...]

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        arguments = self.arguments.copy()
        for at, k in self.places:
            arguments[at] = tensors[k]
        with on_device_of(tensors[0]):
            self.compiled[self.grid](*arguments)


def run(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any
) -> tuple[Any, tuple[object, ...]] | None:
    """As ``kernel[grid](*arguments, **constants)``, ``EXACTLY``; the first argument is a tensor on the current device.

    Before each launch Triton asks of every argument what a kernel is specialized for, which takes as long as the rest
    of a call. Here a launch with the same numbers, and with tensors of the same types and alignment, takes the
    kernel that the first of them compiled. (For AMD's GPUs Triton also asks whether a storage has less than 2 GiB, for
    offsets of 32 bits; storages of tensors of one size give the same answer.)

    Returns: the compiled kernel, and the arguments that were compiled in; ``None`` from Triton's interpreter.
    """
    key = (
        id(kernel), arguments[0].get_device(), *constants, *constants.values(),
        *[(each.dtype, each.data_ptr() % 16) if isinstance(each, Tensor) else each for each in arguments],
    )
    known = _COMPILED.get(key)
    if known is not None:
        compiled, rest = known
        compiled[(*grid, 1, 1)[:3]](*arguments, *rest)
        return known
    compiled = kernel[grid](*arguments, **constants, **EXACTLY)
    if compiled is None:
        return None
    known = compiled, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
    keep(_COMPILED, key, known)
    return known


def run_for(call: Call | None, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """As ``run``, for a call that launches nothing else; kept for ``repeat`` if each tensor has a role in it."""
    launched = run(kernel, grid, *arguments, **constants)
    if call is None or launched is None or not call.is_aligned:
        return
    compiled, rest = launched
    of_tensors = [at for at, each in enumerate(arguments) if isinstance(each, Tensor)]
    roles = {id(each): k for k, each in enumerate(call.tensors)}
    if len(roles) == len(call.tensors) and all(id(arguments[at]) in roles for at in of_tensors):
        places = tuple((at, roles[id(arguments[at])]) for at in of_tensors)
        numbers = [None if isinstance(each, Tensor) else each for each in (*arguments, *rest)]
        kept = Repeatable(compiled, (*grid, 1, 1)[:3], numbers, places)
        keep(_REPEATABLE, call.likeness, kept)


def run_on_tiles(
    call: Call | None, kernel: Any, tiling: Tiling, x: Tensor, /, *given: Any, **constants: Any
) -> None:
    """As ``run_for``, on all tiles of ``x``, whose sizes are its last arguments."""
    splits = tiling.splits(programs(x.device))
    with on_device_of(x):
        run_for(
            call, kernel, (tiling.groups * splits,), x, *given, *arguments(tiling), splits, TAIL=has_tail(tiling),
            **constants, **shape(tiling),
        )


def repeat(call: Call) -> bool:
    """Launches at once what a call like this one launched: without its checks, tiles and lookups. Returns: whether."""
    known = _REPEATABLE.get(call.likeness)
    if known is None or not call.is_aligned:
        return False
    known(call.tensors)
    return True


def kept_launch(likeness: Hashable) -> Repeatable | None:
    """The launch that calls of a likeness repeat."""
    return _REPEATABLE.get(likeness)


def keep(kept: dict[Any, Any], key: Hashable, value: object) -> None:
    """Adds a value to what is kept of calls; there is no end to their shapes, so all is dropped now and then."""
    if len(kept) >= MOST_KEPT:
        kept.clear()
    kept[key] = value


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Makes the GPU of ``x`` the current device."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


@functools.cache
def programs(device: torch.device) -> int:
    """Target number of programs of a launch."""
    if device.type != "cuda":  # Triton's interpreter
        return 6
    return torch.cuda.get_device_properties(device).multi_processor_count * WAVES


def tickets(device: torch.device, count: int) -> Tensor:
    """At least ``count`` zeroed counters, one set per CUDA stream; a kernel must reset those it uses."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    kept = _TICKETS.get((device, stream))
    if kept is None or kept.numel() < count:
        kept = _TICKETS[device, stream] = torch.zeros(max(count, 4096), dtype=torch.int32, device=device)
    return kept
