"""The float model's outputs on some data, and how far the outputs of a simulation are from them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor, nn

from qtk.data.forward_pass import Batch, Forward, outputs
from qtk.data.valid_tokens import Valid, ValidTokens
from qtk.errors import CalibrationError
from qtk.numerics.error import decibels
from qtk.torch_private import pytree


class FloatOutputs:
    """Batches with the float model's outputs on them, which stay on the CPU.

    Args:
        model: the float model.
        batches: the data.
        forward: how to run a model on a batch.
        valid: which tokens count; ``None``: all.

    Raises: CalibrationError if the model has no output in floating point, or none that is finite.
    """

    def __init__(
        self, model: nn.Module, batches: Iterable[Batch], forward: Forward | None, valid: Valid | None = None
    ) -> None:
        self.batches = batches
        self._forward = forward
        tokens = ValidTokens(model, valid)
        with tokens.listening():
            self._expected = [
                [_without_padding(value, tokens) for value in _float_leaves(output)]
                for output in outputs(model, batches, forward=tokens.forward(forward))
            ]
        tokens.warn_of_unfollowed({})
        if not any(bool(value.isfinite().any()) for values in self._expected for value in values):
            raise CalibrationError("the model has no finite output in floating point, whose error could be measured; "
                                   "pass forward=lambda model, batch: … that returns one")

    @property
    def power(self) -> float:
        """Σ float², which tells models and data apart."""
        return sum(float(_finite(value, value).square().sum()) for values in self._expected for value in values)

    def error(self, model: nn.Module) -> float:
        """Σ (simulated - float)² / Σ float² over what is finite in float, the mean over the outputs of a call.

        inf where a simulated value is not finite.

        Raises: CalibrationError if the outputs have other shapes than in float.
        """
        noise: list[float] = []
        signal: list[float] = []
        for expected, output in zip(self._expected, outputs(model, self.batches, forward=self._forward), strict=True):
            values = _floats(output)
            shapes = [[tuple(each.shape) for each in each_of] for each_of in (expected, values)]
            if shapes[0] != shapes[1]:
                raise CalibrationError(f"the simulation returns outputs of shapes {shapes[1]}, the float model of "
                                       f"{shapes[0]}; pass forward=lambda model, batch: … that returns what can be "
                                       "compared")
            for index, (reference, value) in enumerate(zip(expected, values, strict=True)):
                if index == len(noise):
                    noise.append(0.0)
                    signal.append(0.0)
                difference = _finite(value, reference) - _finite(reference, reference)
                noise[index] += float(difference.square().sum())
                signal[index] += float(_finite(reference, reference).square().sum())
        ratios = [0.0 if each == 0 else each / of if of else math.inf for each, of in zip(noise, signal, strict=True)]
        error = sum(ratios) / len(ratios)
        return math.inf if math.isnan(error) else error


def sqnr_db(error: float) -> float:
    """An error relative to the signal, in dB.

    >>> sqnr_db(0.01)
    20.0
    """
    return decibels(1.0, error) if error < math.inf else -math.inf


def _finite(value: Tensor, reference: Tensor) -> Tensor:
    """The elements that are finite in ``reference``: masked scores are -inf in float too."""
    return value.double()[reference.isfinite()]


def _without_padding(value: Tensor, tokens: ValidTokens) -> Tensor:
    """``value`` on the CPU, NaN, which is not compared, where a token does not count."""
    counted = tokens.counted_of_output(value)
    return (value if counted is None else value.masked_fill(~counted, math.nan)).detach().cpu()


def _floats(output: object) -> list[Tensor]:
    return [leaf.detach().cpu() for leaf in _float_leaves(output)]


def _float_leaves(output: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
