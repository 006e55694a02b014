"""The protocol and the registered names of layer-wise methods. To add one, add its line here."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from qtk.core.spec import QuantSpec
from qtk.layerwise.adaround import AdaRound
from qtk.layerwise.bias_correction import BiasCorrection
from qtk.layerwise.coordinate_descent import CoordinateDescent
from qtk.layerwise.gptq import Gptq
from qtk.layerwise.layer_state import LayerState
from qtk.layerwise.reconstruction import Reconstruction
from qtk.layerwise.seq_mse import SeqMse
from qtk.moments.required_statistics import RequiredStatistics
from qtk.registry import Registry, configured


@runtime_checkable
class LayerwiseMethod(Protocol):
    """A layer-wise method: a frozen dataclass of plain numbers that calls the math of ``qtk.algorithms``."""

    @property
    def needs_bias(self) -> bool:
        """Says whether it leaves a layer without a bias as it is."""
        ...

    @property
    def searches_scale(self) -> bool:
        """Says whether it replaces the encoding of the weight; layers with a frozen encoding are skipped then."""
        ...

    def min_rows(self, columns: int) -> int:
        """Number of input rows below which it overfits a layer with ``columns`` columns."""
        ...

    def refuses(self, spec: QuantSpec) -> str | None:
        """Says why it cannot work on weights with a spec; ``None`` if it can."""
        ...

    def required_statistics(self, block: int | None) -> RequiredStatistics:
        """The statistics it needs of a layer's input, with one scale per ``block`` columns (``None``: for all)."""
        ...

    def apply(self, state: LayerState) -> LayerState:
        """The state with a better weight, encoding or bias. Raises: CalibrationError if it cannot compute one."""
        ...


METHODS = Registry[LayerwiseMethod]("layer-wise method")
METHODS.add("seq_mse", SeqMse())
METHODS.add("gptq", Gptq())
METHODS.add("coordinate_descent", CoordinateDescent())
METHODS.add("adaround", AdaRound())
METHODS.add("bias_correction", BiasCorrection())
METHODS.add("reconstruction", Reconstruction())


def method(text: str) -> LayerwiseMethod:
    """The method with a registered name, with the settings in parentheses if there are any.

    Raises: ConfigError if the name, or a setting, is unknown or makes no sense.

    >>> method("gptq")
    Gptq(damping=0.01, act_order=True, columns_at_once=128, scales=True)
    >>> method("seq_mse(num_candidates=50)")
    SeqMse(num_candidates=50, refine=False, joint=False, exact=False, loss='mse')
    """
    return configured(METHODS, text, "gptq(act_order=False)")
