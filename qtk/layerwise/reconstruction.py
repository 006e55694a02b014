"""Block reconstruction: the settings of the method that learns the rounding and the ranges of a block together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from qtk.core.bounds import check_count
from qtk.core.spec import QuantSpec
from qtk.errors import CalibrationError
from qtk.layerwise.adaround import MOST_ITERATIONS, AdaRound
from qtk.layerwise.layer_state import LayerState
from qtk.moments.required_statistics import RequiredStatistics
from qtk.public import public

MOST_BLOCKS = 1000


@public
@dataclass(frozen=True, slots=True)
class Reconstruction:
    """Block reconstruction (BRECQ, arXiv 2102.05426; QDrop, arXiv 2203.05740), the last of the methods of a call.

    Blocks are found between residual joins. The rounding of a block's weights, by AdaRound's variable, the ranges of
    its activations and its layers' float biases are learned together, from what earlier methods have made of them, by
    the errors of what leaves the block and of the model's output, quantized as it is so far.

    Args:
        iterations: steps of Adam for each window, one batch each; twice as many where samples are held out and the
            result is kept, the second half with all samples.
        window: blocks that are learned together; more of them learn more, and keep more values of a step.
        learning_rate: of the rounding.
        range_learning_rate: of scales and zero points, relative to where they start.
        bias_learning_rate: of biases, relative to the mean magnitude that a layer's start with.
        drop: probability with which a value is not quantized in the first step; it falls to 0 at the last.
        divergence: weight of the divergence of the model's output, in nats, beside the relative error of what leaves
            the block; 0 saves the time of running the rest of the model.

    Raises: CalibrationError if a setting is out of range.
    """

    needs_bias: ClassVar[bool] = False
    searches_scale: ClassVar[bool] = False

    iterations: int = 200
    window: int = 16
    learning_rate: float = 0.01
    range_learning_rate: float = 0.01
    bias_learning_rate: float = 0.01
    drop: float = 0.2
    divergence: float = 0.2

    def __post_init__(self) -> None:
        check_count("iterations of reconstruction", self.iterations, MOST_ITERATIONS)
        check_count("window of reconstruction", self.window, MOST_BLOCKS)
        rates = self.learning_rate, self.range_learning_rate, self.bias_learning_rate, self.divergence
        is_right = all(0 <= rate < math.inf for rate in rates) and self.learning_rate > 0
        if not is_right or not 0 <= self.drop < 1:
            raise CalibrationError("reconstruction needs a finite learning_rate > 0, other finite rates and weights "
                                   f"≥ 0, and 0 ≤ drop < 1; got {self}")

    def min_rows(self, columns: int) -> int:
        return 0

    def refuses(self, spec: QuantSpec) -> str | None:
        reason = AdaRound().refuses(spec)
        return None if reason is None else reason.replace("AdaRound", "reconstruction")

    def required_statistics(self, block: int | None) -> RequiredStatistics:
        return RequiredStatistics(gram=False)

    def apply(self, state: LayerState) -> LayerState:
        """Raises: CalibrationError, for it works on blocks (``qtk.layerwise.block_run``)."""
        raise CalibrationError("reconstruction learns whole blocks, after all other methods; name it last")
