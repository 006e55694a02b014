"""What layers held before a layer-wise run: put back if the run fails, kept for a later run that starts anew.

A layer whose weight or bias a run has changed keeps its float values in its quantizer. A later run puts the float
values of all layers back first, so that its float model is the user's. Layers that it does not work on, or that it
goes on from, get the results of the earlier run again when the walk has reached them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from qtk.core.encoding import Encoding
from qtk.layerwise.digest import digest
from qtk.layerwise.interrupts import uninterrupted
from qtk.layerwise.weighted_layers import WeightedLayer
from qtk.nn.mapped_weights import is_mapped, rewrite
from qtk.quantizers.original import KeptTensor, Original

Start: TypeAlias = Literal["float", "present"]
"""What a run starts from where an earlier one has changed a layer: from its float values, or from the result."""

LISTED = 3
"""Layers that a warning names."""


@dataclass(frozen=True, slots=True, eq=False)
class PresentValues:
    """What an earlier run has given to a layer, on its device; ``None`` for what it has not changed."""

    weight: Tensor | None
    bias: Tensor | None
    encoding: Encoding


@dataclass(frozen=True, slots=True, eq=False)
class _Settings:
    """What a quantizer was set to."""

    encoding: Encoding | None
    frozen: bool
    rewrote_weight: bool
    original: Original | None

    @classmethod
    def of(cls, layer: WeightedLayer) -> _Settings:
        quantizer = layer.quantizer
        return cls(quantizer.encoding, quantizer.frozen, quantizer.rewrote_weight, quantizer.original)


class _KeptFile(KeptTensor):
    """What a mapped parameter holds: its file, which ``rewrite`` leaves as it is."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._path = tensor.detach(), None


class Originals:
    """Encodings and flags of layers, and copies of the parameters that were about to be written, on the CPU or on disk.

    Args:
        layers: the layers, as they are now.
        on_disk: whether copies are written to temporary files.
    """

    def __init__(self, layers: Sequence[WeightedLayer], *, on_disk: bool = False) -> None:
        self._on_disk = on_disk
        self._settings = {layer: _Settings.of(layer) for layer in layers}
        self._copies: dict[int, tuple[Tensor, KeptTensor]] = {}  # by the id of the parameter, which is held too
        self._rewound: dict[WeightedLayer, tuple[Original, bool]] = {}
        self._written: set[int] = set()

    def keep(self, *parameters: Tensor | None) -> None:
        """Copies parameters before they are written for the first time."""
        for parameter in parameters:
            if parameter is not None and id(parameter) not in self._copies:
                is_in_file = isinstance(parameter, nn.Parameter) and is_mapped(parameter)
                kept = _KeptFile(parameter) if is_in_file else KeptTensor(parameter, on_disk=self._on_disk)
                self._copies[id(parameter)] = parameter, kept

    @torch.no_grad()
    def restore(self, layer: WeightedLayer | None = None) -> None:
        """Puts back what a layer held, or what all held."""
        if layer is None:
            for parameter, copy in self._copies.values():
                rewrite(parameter, copy.load())
            for each in self._settings:
                self._set(each)
            return
        for held in (layer.weight, layer.bias):
            if held is not None and id(held) in self._copies:
                rewrite(held, self._copies[id(held)][1].load())
        self._set(layer)

    def rewind(self) -> tuple[list[WeightedLayer], list[str]]:
        """Gives float weights, biases and earlier encodings back to all layers whose originals are kept and valid.

        Returns: these layers, and the names of rounded layers whose originals are gone, or void since the
            layer was changed.
        """
        gone = []
        for layer in self._settings:
            quantizer = layer.quantizer
            original = valid_original(layer)
            if original is None:
                quantizer.original = None
                if quantizer.rewrote_weight:
                    gone.append(layer.name)
                continue
            pairs = [(own, kept) for own, kept in ((layer.weight, original.weight), (layer.bias, original.bias))
                     if own is not None and kept is not None]
            has_its_encoding = _same(quantizer.encoding, original.encoding_left)
            with torch.no_grad():
                for own, kept in pairs:
                    self.keep(own)
                    rewrite(own, kept.load())
            self._rewound[layer] = original, has_its_encoding
            if has_its_encoding:
                _set(layer, original.encoding, original.frozen)
            quantizer.rewrote_weight, quantizer.original = False, None
        return list(self._rewound), gone

    def present(self, layer: WeightedLayer) -> PresentValues | None:
        """Returns what an earlier run gave to a layer that was rewound; ``None`` for any other."""
        encoding = self._settings[layer].encoding
        if layer not in self._rewound or encoding is None:
            return None
        weight, bias = (
            self._copies[id(own)][1].load().to(own.device) if own is not None and id(own) in self._copies else None
            for own in (layer.weight, layer.bias)
        )
        return PresentValues(weight, bias, encoding)

    def wrote(self, *parameters: Tensor) -> None:
        """Notes that parameters hold results of this run."""
        self._written |= {id(parameter) for parameter in parameters}

    def hand_over(self) -> None:
        """Keeps the float values of all layers that this run has changed in their quantizers, for later runs."""
        for layer in self._settings:
            if any(own is not None and id(own) in self._written for own in (layer.weight, layer.bias)):
                self._hand_over(layer)

    def _hand_over(self, layer: WeightedLayer) -> None:
        before, has_its_encoding = self._rewound.get(layer, (None, False))
        weight = self._float_of(layer.weight, None if before is None else before.weight)
        bias = self._float_of(layer.bias, None if before is None else before.bias)
        settings = self._settings[layer]
        encoding, frozen = settings.encoding, settings.frozen
        if before is not None and has_its_encoding:
            encoding, frozen = before.encoding, before.frozen
        layer.quantizer.original = Original(weight, bias, encoding, frozen, _digest(layer), layer.quantizer.encoding)

    def _float_of(self, parameter: Tensor | None, known: KeptTensor | None) -> KeptTensor | None:
        """The float value of a parameter that this run has written, which may be known from an earlier run."""
        if parameter is None or id(parameter) not in self._written:
            return None
        return self._copies[id(parameter)][1] if known is None else known

    def _set(self, layer: WeightedLayer) -> None:
        settings = self._settings[layer]
        _set(layer, settings.encoding, settings.frozen)
        layer.quantizer.rewrote_weight, layer.quantizer.original = settings.rewrote_weight, settings.original


@dataclass(frozen=True, slots=True, eq=False)
class EarlierResults:
    """The results of earlier runs, and what a run does with them.

    Args:
        originals: keeps what is overwritten, and the results.
        replayed: layers that the run does not work on, which get their results again once the walk has reached them.
        is_continued: whether the layers of the run start from their results, if there are any.
    """

    originals: Originals
    replayed: tuple[WeightedLayer, ...] = ()
    is_continued: bool = False

    def present(self, layer: WeightedLayer) -> PresentValues | None:
        """Returns what a layer of the run starts from; ``None``: its float values."""
        return self.originals.present(layer) if self.is_continued else None

    def digest(self, layers: Sequence[WeightedLayer]) -> str | None:
        """A digest of the results that the run starts from or replays; ``None`` if there are none."""
        used = (*(layers if self.is_continued else ()), *self.replayed)
        earlier = [
            (layer.name, values.weight, values.bias, values.encoding.scale, values.encoding.zero_point)
            for layer in used if (values := self.originals.present(layer)) is not None
        ]
        return digest(earlier) if earlier else None


def valid_original(layer: WeightedLayer) -> Original | None:
    """The original of a layer, unless its weight or bias is no longer what the method left, or its range is learned."""
    original = layer.quantizer.original
    if original is None or layer.quantizer.learns_range or not original.is_there:
        return None
    return original if original.digest == _digest(layer) else None


def frozen_before(layer: WeightedLayer) -> bool:
    """Says whether the encoding is frozen by more than the earlier run whose result a later one may replace."""
    quantizer = layer.quantizer
    original = valid_original(layer) if quantizer.frozen else None
    if original is None or not _same(quantizer.encoding, original.encoding_left):
        return quantizer.frozen
    return original.frozen


def warn_of_earlier_results(restarted: Sequence[str], gone: Sequence[str]) -> None:
    """Warns of layers that start anew though nobody has asked for it, and of layers whose float weights are gone."""
    if restarted:
        warnings.warn(
            f"{len(restarted)} layers ({_listed(restarted)}) start again from their float weights: what an earlier "
            "call made of them is replaced; options=LayerwiseOptions(start='present') goes on from that, "
            "LayerwiseOptions(start='float') says that this is meant", stacklevel=4,
        )
    if gone:
        warnings.warn(
            f"an earlier call rewrote the weights of {len(gone)} layers ({_listed(gone)}), and their float weights "
            "are not kept (keep_originals=False, a simulation from a file), or the layers were changed since: their "
            "present weights count as the float model; put all methods into one apply_layerwise, on a simulation made "
            "anew", stacklevel=4,
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:LISTED]) + (", …" if len(names) > LISTED else "")


def _digest(layer: WeightedLayer) -> str:
    return digest([layer.weight, layer.bias])


def _same(encoding: Encoding | None, other: Encoding | None) -> bool:
    if encoding is None or other is None:
        return encoding is other
    return encoding.equals(other.to(encoding.scale.device))


def _set(layer: WeightedLayer, encoding: Encoding | None, frozen: bool) -> None:
    quantizer = layer.quantizer
    quantizer.frozen = False
    if encoding is None:
        quantizer.drop_encoding()
    else:
        quantizer.load_encoding(encoding)
    quantizer.frozen = frozen


@contextmanager
def unchanged_on_error(layers: Sequence[WeightedLayer], *, on_disk: bool = False) -> Iterator[Originals]:
    """Puts back what the layers held if the body raises, Ctrl-C included."""
    originals = Originals(layers, on_disk=on_disk)
    try:
        yield originals
    except BaseException:
        with uninterrupted():
            originals.restore()
        raise
