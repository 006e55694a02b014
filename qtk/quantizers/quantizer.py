"""The module that sits on a site and holds its numbers: the one place where they live."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qtk.core.encoding import Encoding
from qtk.core.spec import QuantSpec
from qtk.errors import CalibrationError, EncodingError, NotCalibratedError
from qtk.observers.observer import Observer
from qtk.ops.fake_quantize import fake_quantize


class Mode(enum.Enum):
    """What a quantizer does with what passes through."""

    BYPASS = "bypass"
    OBSERVE = "observe"
    SIMULATE = "simulate"


class Quantizer(nn.Module):
    """Passes a tensor on as it is (BYPASS), shows it to its observer too (OBSERVE), or fake-quantizes it (SIMULATE).

    ``scale`` and ``zero_point`` are buffers that exist from the first encoding on, parameters while ranges are learned.

    Args:
        spec: what to produce.
        site: name of the site, for messages.
        cache: keep the result between calls without grad; for parameters, which seldom change.
    """

    scale: Tensor | None
    zero_point: Tensor | None

    def __init__(self, spec: QuantSpec, *, site: str, cache: bool = False) -> None:
        super().__init__()
        self.spec = spec
        self.site = site
        self.mode = Mode.BYPASS
        self.frozen = False
        self.observer: Observer | None = None
        self.cache = cache
        self._cached: tuple[object, Tensor] | None = None
        self.register_buffer("scale", None)
        self.register_buffer("zero_point", None)

    def forward(self, x: Tensor) -> Tensor:
        """Shape: any; result as ``x``. Raises: NotCalibratedError when asked to simulate without an encoding."""
        if self.mode is Mode.BYPASS:
            return x
        if self.mode is Mode.OBSERVE:
            assert self.observer is not None, f"{self.site} observes without an observer"
            self._observe(self.observer, x)
            return x
        if self.scale is None:
            raise NotCalibratedError(
                f"{self.site} has no encoding to simulate with; run sim.compute_encodings(data) or load encodings first"
            )
        if self.cache and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return self._remembered(x)
        return self._simulate(x)

    @property
    def encoding(self) -> Encoding | None:
        """The encoding in force, ``None`` before there is one; learned values are rounded to what is exported."""
        if self.scale is None:
            return None
        zero_point = self.zero_point
        if zero_point is not None:
            zero_point = zero_point.detach().round().clamp(self.spec.qmin, self.spec.qmax).to(torch.int32)
        return Encoding(self.spec, self.scale.detach().clone(), zero_point)

    def load_encoding(self, encoding: Encoding) -> None:
        """Takes over an encoding. Raises: EncodingError if its spec differs or this quantizer is frozen."""
        if self.frozen:
            raise EncodingError(f"{self.site} is frozen; set frozen = False to change its encoding")
        if encoding.spec != self.spec:
            raise EncodingError(f"{self.site} is {self.spec}, the encoding is {encoding.spec}")
        if self.learns_range:
            self.fix_range()
        device = encoding.scale.device if self.scale is None else self.scale.device
        self.scale = encoding.scale.detach().clone().to(device)
        self.zero_point = None if encoding.zero_point is None else encoding.zero_point.detach().clone().to(device)

    @property
    def learns_range(self) -> bool:
        """Whether scale and zero point are parameters of the model."""
        return isinstance(self.scale, nn.Parameter)

    def learn_range(self) -> None:
        """Makes scale and zero point trainable. Raises: NotCalibratedError without an encoding to start from."""
        if self.scale is None:
            raise NotCalibratedError(f"{self.site} has no range to learn from; run sim.compute_encodings(data) first")
        if not self.learns_range:
            scale, zero_point = self.scale, self.zero_point
            del self.scale, self.zero_point
            self.scale = nn.Parameter(scale)
            self.zero_point = None if zero_point is None else nn.Parameter(zero_point.to(torch.float32))

    def fix_range(self) -> None:
        """Makes learned values buffers again, the zero point rounded to a code."""
        encoding = self.encoding
        if self.learns_range and encoding is not None:
            del self.scale, self.zero_point
            self.register_buffer("scale", encoding.scale)
            self.register_buffer("zero_point", encoding.zero_point)

    def _observe(self, observer: Observer, x: Tensor) -> None:
        try:
            observer.observe(x)
        except CalibrationError as error:
            raise CalibrationError(f"{self.site}: {error}") from None

    def _simulate(self, x: Tensor) -> Tensor:
        assert self.scale is not None
        block_size = self.spec.granularity.block_size(x.ndim)
        return fake_quantize(x, self.scale, self.zero_point, block_size, self.spec.qmin, self.spec.qmax)

    def _remembered(self, x: Tensor) -> Tensor:
        tensors = [tensor for tensor in (x, self.scale, self.zero_point) if tensor is not None]
        if type(x) not in (Tensor, nn.Parameter) or any(tensor.is_inference() for tensor in tensors):
            return self._simulate(x)
        key = tuple((t.data_ptr(), t._version, t.dtype, t.device, t.shape, t.stride()) for t in tensors)
        if self._cached is None or self._cached[0] != key:
            self._cached = (key, self._simulate(x))
        return self._cached[1]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Quantizer:
        """Devices follow the model; scales stay float32, bit for bit."""
        self._cached = None

        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(keep_dtype, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        for name in ("scale", "zero_point"):
            stored, own = state_dict.get(prefix + name), getattr(self, name)
            if isinstance(stored, Tensor) and (own is None or own.shape != stored.shape):
                setattr(self, name, torch.empty_like(stored, device=None if own is None else own.device))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cached": None}

    def extra_repr(self) -> str:
        return f"{self.site}: {self.spec}, {self.mode.value}"
