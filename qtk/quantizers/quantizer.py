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
from qtk.nn.recomputation_guard import refuse_recomputation
from qtk.nn.tap import Tap
from qtk.numerics.effective import SMALLEST_SCALE, effective_zero_point
from qtk.numerics.tracking import tracked_range
from qtk.observers.observer import Observer
from qtk.ops.gradient_scale import GradientScale, scale_gradient, with_zero_gradients
from qtk.ops.observe import Listener
from qtk.ops.simulate import simulate, simulate_dynamic
from qtk.ops.statistics import min_max
from qtk.public import public
from qtk.quantizers.flags import flags_to_tensors, pop_flags
from qtk.quantizers.lost_range import DeferredRangeCheck, ends, refuse_lost_range
from qtk.quantizers.original import Original
from qtk.quantizers.weight_cache import WeightCache
from qtk.torch_private import is_exporting, is_traced


class Mode(enum.Enum):
    """Says what a quantizer does with its input: return it, observe and return it, or fake-quantize it."""

    BYPASS = "bypass"
    OBSERVE = "observe"
    SIMULATE = "simulate"


READ_ONLY = ("spec", "site", "cache", "static", "weight_cache", "factors")
"""Attributes of a quantizer that its constructor sets for good."""

WRITABLE = ("mode", "frozen", "observer", "scale", "zero_point", "scale_factor", "zero_point_shift", "gradient_scale",
          "range_gradients_off", "momentum", "rewrote_weight", "original", "training", "forward")
"""Attributes that may be set at any time; libraries wrap ``forward``."""


@public
class Quantizer(Tap):
    """Returns a tensor unchanged (BYPASS), after its observer has seen it (OBSERVE), or fake-quantized (SIMULATE).

    ``scale`` and ``zero_point`` are ``None`` before the first encoding, then float32 buffers. A zero point is rounded
    to a code where it is used, so that averages of models keep its fraction.

    While a range is learned, the parameters ``scale_factor`` and ``zero_point_shift`` move it:
    ``scale · scale_factor``, and ``zero_point + (qmax - qmin) · zero_point_shift``. So a learning rate is relative to
    the range where learning started, whatever its size.

    With a dynamic spec all of them stay ``None``: each tensor is quantized in its own range.

    Setting ``frozen`` makes a learned range a fixed one. ``rewrote_weight`` is whether a layer-wise method has changed
    the parameter that it quantizes; ``original`` is what it was before, if kept. ``momentum`` is the weight of each new
    tensor in a range that follows its tensors while the model trains; ``None``: it does not. With
    ``range_gradients_off`` a learned range has gradients of 0. Not in the ``state_dict``: ``range_gradients_off``, the
    momentum of activation ranges, ``original``.

    Args:
        spec: how to quantize.
        site: name of the site, for messages.
        cache: whether ``caching`` acts on it: for parameters, which seldom change.
        static: whether it quantizes a value of parameters alone, whose first axis does not count samples.

    >>> from qtk.core.dtypes import dtype
    >>> quantizer = Quantizer(QuantSpec(dtype("int4"), symmetric=True), site="fc:out")
    >>> quantizer.load_encoding(Encoding(quantizer.spec, torch.tensor([0.5])))
    >>> quantizer.mode = Mode.SIMULATE
    >>> quantizer(torch.tensor([0.7, -9.0]))
    tensor([ 0.5000, -4.0000])
    """

    scale: Tensor | None
    zero_point: Tensor | None
    scale_factor: nn.Parameter | None
    zero_point_shift: nn.Parameter | None

    def __init__(self, spec: QuantSpec, *, site: str, cache: bool = False, static: bool = False) -> None:
        super().__init__()
        self.spec = spec
        self.site = site
        self.mode = Mode.BYPASS
        self.frozen = False
        self.rewrote_weight = False
        self.original: Original | None = None
        self.cache = cache
        self.static = static or cache
        self.gradient_scale = GradientScale.LSQ
        self.momentum: float | None = None
        self.range_gradients_off = False
        self._listener = Listener[Observer](site)
        self.weight_cache = WeightCache()
        self._clear()

    def forward(self, x: Tensor) -> Tensor:
        """Applies the mode to ``x``. Shape: any; result as ``x``.

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
        if self._learns or self.momentum is not None:
            scale, zero_point = self._moved(x, scale, zero_point)
            result = simulate(x, self.spec, scale, zero_point)
            is_held = self._learns and not scale.requires_grad
            return with_zero_gradients(result, self.scale_factor, self.zero_point_shift) if is_held else result
        if self.cache and not (torch.compiler.is_compiling() or torch.is_grad_enabled()) and self.weight_cache.enabled:
            return self.weight_cache.get(lambda x: simulate(x, self.spec, scale, zero_point), x, scale, zero_point)
        return simulate(x, self.spec, scale, zero_point)

    def __setattr__(self, name: str, value: object) -> None:
        """Raises: EncodingError for an attribute that nothing would read, a changed spec, or a mode that is no Mode."""
        if not name.startswith("_") and (name in self.__dict__ if name in READ_ONLY else name not in WRITABLE):
            raise EncodingError(
                f"{self.__dict__.get('site', 'a quantizer')}: setting {name!r} would have no effect; its format is "
                "decided when the simulation is made: QuantSim(…, weight_bits=…, activation_bits=…), or a rule of the "
                "config like {match: {path: …}, weight: {bits: 8}}; mode and frozen can be set, ranges by sim.set_range"
            )
        if name == "mode" and not isinstance(value, Mode):
            raise EncodingError(f"{self.site}: mode must be a qtk.Mode, {', '.join(Mode.__members__)}, got {value!r}")
        if name == "frozen" and value and self.__dict__.get("_learns"):  # an optimizer would go on moving it
            self.fix_range()
        super().__setattr__(name, value)  # type: ignore[arg-type]

    @property
    def ready(self) -> bool:
        """Says whether it can simulate: it has an encoding, or quantizes dynamically."""
        return self.spec.dynamic or self.scale is not None

    @property
    def idle(self) -> bool:
        """Says whether it is in BYPASS and has no hooks."""
        return self.mode is Mode.BYPASS and not self._forward_hooks and not self._forward_pre_hooks

    @property
    def repeatable(self) -> bool:
        """Says whether it neither observes nor moves its range: calling it again leaves no trace."""
        return self.mode is not Mode.OBSERVE and self.momentum is None

    @property
    def observer(self) -> Observer | None:
        """Returns the observer that sees the tensors in OBSERVE."""
        return self._listener.observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._listener.observer = observer

    @property
    def encoding(self) -> Encoding | None:
        """Returns a copy of the encoding; ``None`` if there is none yet, and with a dynamic spec.

        Raises: EncodingError if a learned or averaged scale is not positive and finite.
        """
        with torch.no_grad():
            return self.encoding_of(*self.range())

    def encoding_of(self, scale: Tensor | None, zero_point: Tensor | None) -> Encoding | None:
        """Returns the encoding of an effective range, on any device. Raises: as ``encoding``."""
        if scale is None:
            return None
        if scale.device.type != "meta":
            refuse_lost_range(self.site, *ends(scale))
        if zero_point is not None:
            zero_point = effective_zero_point(zero_point, self.spec.qmin, self.spec.qmax).to(torch.int32)
        return Encoding(self.spec, scale.clamp(min=SMALLEST_SCALE), zero_point)

    def load_encoding(self, encoding: Encoding) -> None:
        """Sets the encoding; a learned range goes on learning from there.

        Raises: EncodingError if its spec differs, this quantizer is dynamic, or it is frozen.
        """
        self.refuse_if_frozen()
        self._refuse_if_dynamic()
        if encoding.spec != self.spec:
            raise EncodingError(f"{self.site} is {self.spec}, the encoding is {encoding.spec}; plan the site like it, "
                                "or load an encoding of this spec")
        self._keep(encoding)

    def _keep(self, encoding: Encoding) -> None:
        self._range_check = DeferredRangeCheck()
        device, zero_point = encoding.scale.device if self.scale is None else self.scale.device, encoding.zero_point
        with torch.inference_mode(False), torch.no_grad():  # tensors made in inference mode could never be trained
            self.scale = encoding.scale.detach().to(device, copy=True)
            self.zero_point = None if zero_point is None else zero_point.detach().to(device, torch.float32)
            if self.scale_factor is not None:  # written in place: an optimizer holds them
                self.scale_factor.fill_(1.0)
            if self.zero_point_shift is not None:
                self.zero_point_shift.zero_()

    def drop_encoding(self) -> None:
        """Deletes the encoding, and ends the learning of the range. Raises: EncodingError if frozen."""
        self.refuse_if_frozen()
        self._clear()

    def range(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns the scale and zero point of the simulation; of a learned range with gradients."""
        if self.scale is None or not self._learns:
            return self.scale, self.zero_point
        return self._learned(self.scale, self.zero_point, 1.0)

    @property
    def learns_range(self) -> bool:
        """Says whether parameters of the model move scale and zero point."""
        return self._learns

    def learn_range(self, gradient_scale: GradientScale = GradientScale.LSQ) -> None:
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
        self.gradient_scale, self.momentum = gradient_scale, None
        if not self.learns_range:
            self._make_parameters()

    def fix_range(self) -> None:
        """Fixes a learned range: its scale, and its zero point rounded to a code.

        Raises: EncodingError if a scale is not positive and finite.
        """
        encoding = self.encoding
        if self.learns_range and encoding is not None:
            self._clear()
            self._keep(encoding)

    def extra_repr(self) -> str:
        return f"{self.site}: {self.spec}, {self.mode.value}"

    def _observe(self, x: Tensor) -> None:
        if not torch.compiler.is_compiling():
            self._listener.observe(x)
        elif not is_exporting():  # an exported program holds no observers
            self._listener.observe_when_run(x)

    def _simulate_without_scale(self, x: Tensor) -> Tensor:
        return simulate_dynamic(x, self.spec)

    def _moved(self, x: Tensor, scale: Tensor, zero_point: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The range that ``x`` is quantized with, after it has followed ``x`` and as its parameters move it."""
        if self.momentum is not None and self.training and not self.frozen:
            scale, zero_point = self._tracked(x, scale, zero_point, self.momentum)
        if not self._learns:
            return scale, zero_point
        exporting = is_exporting()  # an exported program is not trained
        factor = 1.0 if exporting else 0.0 if self.range_gradients_off else self.gradient_scale.factor(
            x.shape, scale.numel(), float(self.spec.qmax), static=self.static
        )
        return self._learned(scale, zero_point, factor)

    def _tracked(
        self, x: Tensor, scale: Tensor, zero_point: Tensor | None, momentum: float
    ) -> tuple[Tensor, Tensor | None]:
        """The range after it has followed ``x``, as the buffers are then. Raises: as ``refuse_recomputation``."""
        if not x.numel():
            return scale, zero_point
        if momentum < 1.0 and not torch.compiler.is_compiling():
            refuse_recomputation(f"the range of {self.site} has moved")
        with torch.no_grad():
            extremes = min_max(x.detach(), self.spec.granularity.block_size(x.ndim))
            low, high = (extreme.reshape(scale.shape) for extreme in extremes)
            moved = tracked_range(low, high, scale, zero_point, momentum=momentum, qmin=self.spec.qmin,
                                  qmax=self.spec.qmax)
            # a backward pass still needs the tensors of this forward pass, the buffers may change again before
            scale.copy_(moved[0])
            if zero_point is not None and moved[1] is not None:
                zero_point.copy_(moved[1])
        return moved

    def _learned(
        self, scale: Tensor, zero_point: Tensor | None, factor: float
    ) -> tuple[Tensor, Tensor | None]:
        """The range as its parameters move it, their gradients multiplied by ``factor``."""
        scale_factor, shift = self.scale_factor, self.zero_point_shift
        assert scale_factor is not None
        scale = scale * scale_gradient(scale_factor, factor)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling() and not is_traced():
            self._check_range(scale.detach())
        if zero_point is not None and shift is not None:
            zero_point = zero_point + float(self.spec.qmax - self.spec.qmin) * scale_gradient(shift, factor)
        return scale, zero_point

    def _check_range(self, scale: Tensor) -> None:
        """Raises: EncodingError if a scale is, or on an accelerator was some steps ago, not positive and finite."""
        if scale.device.type == "cpu":
            refuse_lost_range(self.site, *ends(scale))
        elif scale.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            self._range_check.check(self.site, scale)

    def _make_parameters(self) -> None:
        assert self.scale is not None
        with torch.inference_mode(False):
            self.scale_factor = nn.Parameter(torch.ones_like(self.scale))
            self.zero_point_shift = None if self.zero_point is None else nn.Parameter(torch.zeros_like(self.scale))
        self._learns = True

    def _clear(self) -> None:
        """Registers everything that holds numbers, anew and empty."""
        for name in ("scale", "zero_point"):
            self.register_buffer(name, None)
        for name in ("scale_factor", "zero_point_shift"):
            self.register_parameter(name, None)
        self._learns, self._range_check = False, DeferredRangeCheck()

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

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        flags = {"frozen": self.frozen, "rewrote_weight": self.rewrote_weight,
                 "momentum": self.momentum if self.static else None,
                 "gradient_scale": self.gradient_scale if self.learns_range else None}
        destination.update(flags_to_tensors(flags, prefix))

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
        """As ``nn.Module``; a quantizer without an encoding takes the checkpoint's encoding, and learns it if it was
        learned there. One that learns its range, or follows its weight, goes on from a fixed one.
        """
        stored = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
        scale, zero_point = stored.get(prefix + "scale"), stored.get(prefix + "zero_point")
        if isinstance(scale, Tensor) and isinstance(zero_point, Tensor | None):
            granularity = self.spec.granularity
            rank = len(granularity.sizes) if isinstance(granularity, PerBlock) else 1
            fits = scale.ndim == rank and (zero_point is None) == self.spec.symmetric
            if self.spec.dynamic or not fits:
                error_msgs.append(
                    f"{self.site} is {self.spec}; the checkpoint has a scale of shape {tuple(scale.shape)} with"
                    f"{'out' if zero_point is None else ''} a zero point; load it into a model quantized like it"
                )
                return
            if zero_point is not None:  # a code, or a float that averages and learning left between two
                zero_point = stored[prefix + "zero_point"] = zero_point.to(torch.float32)
            if self.scale is None:
                self.scale = torch.empty_like(scale, dtype=torch.float32)
                self.zero_point = None if zero_point is None else torch.empty_like(zero_point)
            if prefix + "scale_factor" in stored:
                if not self.learns_range:
                    self._make_parameters()
            elif self.learns_range:
                stored[prefix + "scale_factor"] = torch.ones_like(scale)
                if zero_point is not None:
                    stored[prefix + "zero_point_shift"] = torch.zeros_like(scale)
        flags, self._range_check = pop_flags(stored, prefix), DeferredRangeCheck()
        super()._load_from_state_dict(
            stored, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        for name, value in flags.items():  # last: freezing takes the range as it is
            setattr(self, name, value)
