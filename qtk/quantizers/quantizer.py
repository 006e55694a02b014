"""The quantizer of a site: a module that holds scale and zero point and fake-quantizes the value."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qtk.core.encoding import Encoding
from qtk.core.granularity import PerBlock
from qtk.core.spec import QuantSpec
from qtk.errors import EncodingError, NotCalibratedError
from qtk.nn.tap import Tap
from qtk.numerics.effective import effective_scale, effective_zero_point
from qtk.observers.observer import Observer
from qtk.ops.observe import Listener
from qtk.ops.simulate import simulate, simulate_dynamic
from qtk.public import public
from qtk.quantizers.weight_cache import WeightCache
from qtk.torch_private import is_exporting


class Mode(enum.Enum):
    """What a quantizer does with its input: return it, observe and return it, or fake-quantize it."""

    BYPASS = "bypass"
    OBSERVE = "observe"
    SIMULATE = "simulate"


SETTLED = ("spec", "site", "cache", "weight_cache", "factors")
"""Attributes of a quantizer that its constructor sets for good."""

ACTING = ("mode", "frozen", "observer", "scale", "zero_point", "rewrote_weight", "training", "forward")
"""Those that may be set at any time; libraries wrap ``forward``."""


@public
class Quantizer(Tap):
    """Returns a tensor unchanged (BYPASS), after its observer has seen it (OBSERVE), or fake-quantized (SIMULATE).

    ``scale`` and ``zero_point`` are ``None`` before the first encoding, then buffers; parameters while the range is
    learned. Learned values are simulated as they are exported: ``|scale|``, and ``zero_point`` rounded to a code.

    With a dynamic spec both stay ``None``: each tensor is quantized in its own range.

    ``rewrote_weight`` is whether a layer-wise method has changed the parameter that it quantizes.

    Args:
        spec: how to quantize.
        site: name of the site, for messages.
        cache: whether ``caching`` acts on it: for parameters, which seldom change.

    >>> from qtk.core.dtypes import dtype
    >>> quantizer = Quantizer(QuantSpec(dtype("int4"), symmetric=True), site="fc:out")
    >>> quantizer.load_encoding(Encoding(quantizer.spec, torch.tensor([0.5])))
    >>> quantizer.mode = Mode.SIMULATE
    >>> quantizer(torch.tensor([0.7, -9.0]))
    tensor([ 0.5000, -4.0000])
    """

    scale: Tensor | None
    zero_point: Tensor | None

    def __init__(self, spec: QuantSpec, *, site: str, cache: bool = False) -> None:
        super().__init__()
        self.spec = spec
        self.site = site
        self.mode = Mode.BYPASS
        self.frozen = False
        self.rewrote_weight = False
        self.cache = cache
        self._listener = Listener[Observer](site)
        self.weight_cache = WeightCache()
        self.register_buffer("scale", None)
        self.register_buffer("zero_point", None)

    def forward(self, x: Tensor) -> Tensor:
        """Shape: any; result as ``x``.

        Raises: NotCalibratedError when asked to simulate without an encoding; CalibrationError when asked to observe
        without an observer, or by the observer.
        """
        if self.mode is not Mode.SIMULATE:
            if self.mode is Mode.OBSERVE:
                self._observe(x)
            return x
        scale = self.scale  # each read is a search through a module's tables, as long as a small tensor's quantization
        if scale is None:
            if not self.ready:
                raise NotCalibratedError(f"{self.site} has no encoding to simulate with; run "
                                         "sim.compute_encodings(data) or load encodings first")
            return self._simulate_without_scale(x)
        zero_point = self.zero_point
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or not self.weight_cache.enabled:
            return simulate(x, self.spec, scale, zero_point)
        return self.weight_cache.get(
            lambda weight: simulate(weight, self.spec, scale, zero_point), x, scale, zero_point
        )

    def __setattr__(self, name: str, value: object) -> None:
        """Raises: EncodingError for an attribute that nothing would read, a changed spec, or a mode that is no Mode."""
        if not name.startswith("_") and (name in self.__dict__ if name in SETTLED else name not in ACTING):
            raise EncodingError(
                f"{self.__dict__.get('site', 'a quantizer')}: setting {name!r} would have no effect; its format is "
                "decided when the simulation is made: QuantSim(…, weight_bits=…, activation_bits=…), or a rule of the "
                "config like {match: {path: …}, weight: {bits: 8}}; mode and frozen can be set, ranges by sim.set_range"
            )
        if name == "mode" and not isinstance(value, Mode):
            raise EncodingError(f"{self.site}: mode must be a qtk.Mode, {', '.join(Mode.__members__)}, got {value!r}")
        super().__setattr__(name, value)  # type: ignore[arg-type]

    @property
    def ready(self) -> bool:
        """Whether it can simulate: it has an encoding, or quantizes dynamically."""
        return self.spec.dynamic or self.scale is not None

    @property
    def idle(self) -> bool:
        """Whether it is in BYPASS and has no hooks."""
        return self.mode is Mode.BYPASS and not self._forward_hooks and not self._forward_pre_hooks

    @property
    def repeatable(self) -> bool:
        """Whether it observes nothing, so that calling it again leaves no trace."""
        return self.mode is not Mode.OBSERVE

    @property
    def observer(self) -> Observer | None:
        """The observer that sees the tensors in OBSERVE."""
        return self._listener.observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._listener.observer = observer

    @property
    def encoding(self) -> Encoding | None:
        """A copy of the encoding; ``None`` if there is none yet, and with a dynamic spec."""
        if self.scale is None:
            return None
        scale, zero_point = self.scale.detach(), self.zero_point
        if zero_point is not None:
            zero_point = effective_zero_point(zero_point.detach(), self.spec.qmin, self.spec.qmax)
            zero_point = zero_point.to(torch.int32, copy=True)
        return Encoding(self.spec, effective_scale(scale) if self.learns_range else scale.clone(), zero_point)

    def load_encoding(self, encoding: Encoding) -> None:
        """Sets the encoding.

        Raises: EncodingError if its spec differs, this quantizer is dynamic, or it is frozen.
        """
        self.refuse_if_frozen()
        self._refuse_if_dynamic()
        if encoding.spec != self.spec:
            raise EncodingError(f"{self.site} is {self.spec}, the encoding is {encoding.spec}; plan the site like it, "
                                "or load an encoding of this spec")
        device = encoding.scale.device if self.scale is None else self.scale.device
        with torch.inference_mode(False):  # tensors created in inference mode could never be trained
            self._hold(encoding.scale.detach().to(device, copy=True), None if encoding.zero_point is None
                       else encoding.zero_point.detach().to(device, copy=True))

    def drop_encoding(self) -> None:
        """Deletes the encoding. Raises: EncodingError if frozen."""
        self.refuse_if_frozen()
        del self.scale, self.zero_point
        self.register_buffer("scale", None)
        self.register_buffer("zero_point", None)

    @property
    def learns_range(self) -> bool:
        """Whether scale and zero point are parameters of the model."""
        return isinstance(self.scale, nn.Parameter)

    def learn_range(self) -> None:
        """Makes scale and zero point trainable.

        Raises: NotCalibratedError without an encoding to start from; EncodingError if frozen, dynamic, or with scales
            that are stored in few bits.
        """
        self.refuse_if_frozen()
        self._refuse_if_dynamic()
        if self.scale is None:
            raise NotCalibratedError(f"{self.site} has no range to learn from; run sim.compute_encodings(data) first")
        if self.spec.scale_format is not None:
            raise EncodingError(f"{self.site} stores its scales as {self.spec.scale_format.value}, which gradients "
                                "would leave; train the weights with fixed ranges")
        if not self.learns_range:
            zero_point = self.zero_point
            self._hold(
                nn.Parameter(self.scale.clone()),
                None if zero_point is None else nn.Parameter(zero_point.to(torch.float32)),
            )

    def fix_range(self) -> None:
        """Makes learned scale and zero point buffers again: ``|scale|``, and the zero point rounded to a code."""
        encoding = self.encoding
        if self.learns_range and encoding is not None:
            self._hold(encoding.scale, encoding.zero_point)

    def extra_repr(self) -> str:
        return f"{self.site}: {self.spec}, {self.mode.value}"

    def _observe(self, x: Tensor) -> None:
        if not torch.compiler.is_compiling():
            self._listener.observe(x)
        elif not is_exporting():  # an exported program holds no observers
            self._listener.observe_when_run(x)

    def _simulate_without_scale(self, x: Tensor) -> Tensor:
        return simulate_dynamic(x, self.spec)

    def _hold(self, scale: Tensor, zero_point: Tensor | None) -> None:
        """Registers both, as parameters or buffers according to their type."""
        del self.scale, self.zero_point
        for name, value in (("scale", scale), ("zero_point", zero_point)):
            if isinstance(value, nn.Parameter):
                self.register_parameter(name, value)
            else:
                self.register_buffer(name, value)

    def refuse_if_frozen(self) -> None:
        """Raises: EncodingError if frozen."""
        if self.frozen:
            raise EncodingError(f"{self.site} is frozen; set frozen = False to change its encoding")

    def _refuse_if_dynamic(self) -> None:
        if self.spec.dynamic:
            raise EncodingError(f"{self.site} is quantized dynamically; plan it without dynamic to give it one range")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Quantizer:
        """Moves to another device, but keeps the dtype: scales stay float32, bit for bit."""

        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(keep_dtype, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """As ``nn.Module``; a quantizer without an encoding takes that of the checkpoint."""
        stored = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
        scale, zero_point = stored.get(prefix + "scale"), stored.get(prefix + "zero_point")
        if isinstance(zero_point, Tensor) and zero_point.is_floating_point() and not self.learns_range:
            # a learned zero point for a range that is not learned: round it as the simulation does
            rounded = zero_point.detach().round().clamp(self.spec.qmin, self.spec.qmax)
            zero_point = stored[prefix + "zero_point"] = rounded.to(torch.int32)
        if isinstance(scale, Tensor) and isinstance(zero_point, Tensor | None):
            fits = scale.ndim == self._scale_rank() and (zero_point is None) == self.spec.symmetric
            if self.spec.dynamic or not fits:
                error_msgs.append(
                    f"{self.site} is {self.spec}; the checkpoint has a scale of shape {tuple(scale.shape)} with"
                    f"{'out' if zero_point is None else ''} a zero point; load it into a model quantized like it"
                )
                return
            if self.scale is None:
                self.scale = torch.empty_like(scale, dtype=torch.float32)
                self.zero_point = None if zero_point is None else torch.empty_like(zero_point)
        super()._load_from_state_dict(
            stored, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _scale_rank(self) -> int:
        granularity = self.spec.granularity
        return len(granularity.sizes) if isinstance(granularity, PerBlock) else 1
