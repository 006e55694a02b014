"""How far an exported file may be from its simulation: as far as float rounding takes the simulation from itself."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, fx, nn

from qtk.calls.calls import Call
from qtk.export.file_signature import tensor_outputs
from qtk.numerics.error import decibels
from qtk.quantizers.modes import in_mode
from qtk.quantizers.quantizer import Mode, Quantizer

NOISE = 2.0
"""Root mean square of the noise, in units of the last place of a tensor's own: of sums in another order."""

MARGIN_DB = 6.0
"""A runtime may round more often than the noise is added, and its integer kernels round once more: twice the size."""


def tolerances_db(
    model: fx.GraphModule, call: Call, expected: Sequence[Tensor], counted: Sequence[Tensor | None] = ()
) -> tuple[float, ...]:
    """The SQNR that each output of a right file of a simulation may have on a call.

    The less of two: of the simulation against itself, with noise of float rounding in front of each quantizer of an
    activation, less ``MARGIN_DB``: values on the edge between two codes change theirs, and a deep model amplifies that
    (all-MiniLM-L6-v2 in 8 bits has 19 dB, both in simulation and in ONNX Runtime). And of the simulation against the
    float model plus ``MARGIN_DB``: what is half of the quantization error adds little to it.

    Args:
        model: a simulating graph.
        call: what it is called with.
        expected: what ``tensor_outputs`` returns for this call.
        counted: for each of these which elements count, bool of its shape; ``None``: all, as where there are none.
    """
    quantizers = [module for module in model.modules() if isinstance(module, Quantizer)]
    with in_mode(quantizers, Mode.BYPASS):
        in_float = tensor_outputs(model, call)
    with _noisy([each for each in quantizers if not each.static]):
        noisy = tensor_outputs(model, call)
    outputs = zip(expected, noisy, in_float, counted or [None] * len(expected), strict=True)
    return tuple(min(sqnr_db(ours, near, which) - MARGIN_DB, sqnr_db(exact, ours, which) + MARGIN_DB)
                 for ours, near, exact, which in outputs)


def sqnr_db(reference: Tensor, value: Tensor, counted: Tensor | None) -> float:
    """The SQNR of the elements that count, with 0 for NaN; ``inf`` where the shapes are others."""
    if reference.shape != value.shape:  # what data decide may have other lengths
        return math.inf
    if counted is not None:
        reference, value = reference[counted], value[counted]
    noise = (reference.double() - value.double()).nan_to_num().square().sum()
    return decibels(float(reference.double().nan_to_num().square().sum()), float(noise))


@contextmanager
def _noisy(quantizers: Sequence[Quantizer]) -> Iterator[None]:
    generator = torch.Generator().manual_seed(0)

    def add_noise(quantizer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, *rest = inputs
        finite = x.float().nan_to_num(posinf=0.0, neginf=0.0)
        size = NOISE * torch.finfo(x.dtype).eps * float(finite.square().mean().sqrt()) if x.numel() else 0.0
        noise = torch.randn(x.shape, generator=generator).to(x.device)
        return ((x.float() + size * noise).to(x.dtype), *rest)

    handles = [quantizer.register_forward_pre_hook(add_noise) for quantizer in quantizers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
