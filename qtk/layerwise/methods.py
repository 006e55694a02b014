"""Layer-wise methods: what one is, and the names users give to them. To add one, add its line here."""

from __future__ import annotations

from typing import Protocol

from qtk.core.spec import QuantSpec
from qtk.layerwise.adaround import AdaRound
from qtk.layerwise.bias_correction import BiasCorrection
from qtk.layerwise.gptq import Gptq
from qtk.layerwise.layer_state import LayerState
from qtk.layerwise.second_moments import RequiredStatistics
from qtk.layerwise.seq_mse import SeqMse
from qtk.registry import Registry, configured


class LayerwiseMethod(Protocol):
    """A layer-wise method: a frozen dataclass of plain numbers that calls the math of ``qtk.algorithms``."""

    @property
    def needs_bias(self) -> bool:
        """Whether it leaves a layer without a bias as it is."""
        ...

    @property
    def searches_scale(self) -> bool:
        """Whether it replaces the encoding of the weight, so that a frozen one rules it out."""
        ...

    def min_rows(self, columns: int) -> int:
        """Rows of input below which its result fits noise, for a layer of so many columns."""
        ...

    def refuses(self, spec: QuantSpec) -> str | None:
        """Why it cannot work on weights of a spec; ``None`` if it can."""
        ...

    def required_statistics(self, block: int | None) -> RequiredStatistics:
        """What it must know of the input of a layer with scales for blocks of so many columns, ``None``: all."""
        ...

    def apply(self, state: LayerState) -> LayerState:
        """The state with a better weight, encoding or bias. Raises: CalibrationError if it finds none."""
        ...


METHODS = Registry[LayerwiseMethod]("layer-wise method")
METHODS.add("seq_mse", SeqMse())
METHODS.add("gptq", Gptq())
METHODS.add("adaround", AdaRound())
METHODS.add("bias_correction", BiasCorrection())


def method(text: str) -> LayerwiseMethod:
    """The method of a name, with its settings changed where some are given.

    Raises: ConfigError if the name, or a setting, is unknown or makes no sense.

    >>> method("gptq")
    Gptq(damping=0.01, act_order=True, columns_at_once=128)
    >>> method("seq_mse(num_candidates=50)")
    SeqMse(num_candidates=50, refine=False, joint=False, exact=False, loss='mse')
    """
    return configured(METHODS, text, "gptq(act_order=False)")
