"""``LayerUpdate``: the new encoding, weight and bias that layer-wise methods compute for one layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qtk.algorithms.output_error import OutputError, in_blocks
from qtk.core.encoding import Encoding
from qtk.errors import CalibrationError
from qtk.layerwise.each_matrix import choose_each
from qtk.layerwise.layer_state import LayerState
from qtk.layerwise.methods import LayerwiseMethod
from qtk.layerwise.originals import PresentValues, frozen_before
from qtk.layerwise.sparsity import Sparsity, with_zeros
from qtk.layerwise.weighted_layers import WeightedLayer
from qtk.moments.second_moments import SecondMoments
from qtk.nn.mapped_weights import rewrite

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class LayerUpdate:
    """New values of a layer, and the error of its output before and after.

    Args:
        encoding: the weight's encoding, new or as before.
        weight: the new weight, ``None`` if it does not change.
        bias: the new bias, ``None`` if it does not change.
        before: squared error of the output, summed over outputs and samples, without the part no weight can change.
        after: the same with the new values.
        held_out: the errors before and after over held-out data alone; ``None`` if there are none.
        winner: the candidate that was taken.
        signals: sums of the squares of the float output, over all data and over held-out data, where the Gram matrices
            say them: of layers whose statistics are of one path; NaN elsewhere.
        zeros: share of the weights that were kept at 0 (``qtk.layerwise.sparsity``).
    """

    encoding: Encoding
    weight: Tensor | None
    bias: Tensor | None
    before: float
    after: float
    held_out: tuple[float, float] | None = None
    winner: str = ""
    signals: tuple[float, float] = (math.nan, math.nan)
    zeros: float = 0.0

    def written(self, layer: WeightedLayer) -> list[Tensor]:
        """The parameters of ``layer`` that ``write`` overwrites."""
        pairs = ((layer.weight, self.weight), (layer.bias, self.bias))
        return [parameter for parameter, new in pairs if parameter is not None and new is not None]

    @torch.no_grad()
    def write(self, layer: WeightedLayer) -> None:
        """Writes the values into ``layer``, and freezes the encoding if it or the weight has changed."""
        quantizer, present = layer.quantizer, layer.quantizer.encoding
        is_new = present is None or not present.equals(self.encoding.to(present.scale.device))
        if is_new:
            quantizer.frozen = False
            quantizer.load_encoding(self.encoding)
        quantizer.frozen = quantizer.frozen or is_new or self.weight is not None
        if self.weight is not None:
            rewrite(layer.weight, self.weight)
            quantizer.rewrote_weight = True
        if self.bias is not None and layer.bias is not None:
            rewrite(layer.bias, self.bias)


def compute_update(
    layer: WeightedLayer, methods: Sequence[LayerwiseMethod], moments: SecondMoments,
    present: PresentValues | None = None, sparsity: Sparsity | None = None,
) -> LayerUpdate:
    """The update of a layer by all methods in order, on the CPU; the layer itself does not change.

    Args:
        layer: with its float weight.
        methods: applied in order.
        moments: statistics of its input.
        present: what to start from in place of the float values.
        sparsity: the pattern of zeros to choose, where it fits.

    Raises: CalibrationError, naming the layer, if a method fails.
    """
    try:
        with torch.no_grad():
            float_state = replace(LayerState.of(layer, moments), moves_scales=not frozen_before(layer))
            start = float_state
            if present is not None:
                start = replace(
                    start, weight=start.weight if present.weight is None else present.weight,
                    bias=start.bias if present.bias is None else present.bias, encoding=present.encoding,
                )
            start = with_zeros(start, sparsity)
            winner = choose_each(start, methods)
    except CalibrationError as error:
        raise CalibrationError(f"{layer.name}: {error}") from None
    state = winner.state
    return LayerUpdate(
        state.encoding.to(CPU), None if state.weight is float_state.weight else state.weight.to(CPU),
        None if state.bias is float_state.bias or state.bias is None else state.bias.to(CPU),
        winner.before, winner.after, winner.held_out, winner.name, _signals(float_state),
        0.0 if start.zeros is None else float(start.zeros.float().mean()),
    )


def _signals(state: LayerState) -> tuple[float, float]:
    """See ``LayerUpdate``."""
    held_out = state.moments.held_out
    if not state.moments.required.gram or state.moments.has_two_inputs:
        return math.nan, math.nan
    weight = state.to_gemm(state.float_weight)
    parts = [moments for moments in (state.moments, held_out) if moments is not None and moments.rows]
    grams = [moments.gram_as(state.dtype) for moments in parts]
    sums = [float(OutputError(gram).of(in_blocks(weight, gram.shape[1])).sum(dtype=torch.float64)) for gram in grams]
    return sum(sums), sums[1] if len(sums) > 1 else math.nan
