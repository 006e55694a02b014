"""Which tokens of a call count: one mask, or one for each side of an encoder-decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtk.errors import CalibrationError


@dataclass(frozen=True, slots=True, eq=False)
class TokenMasks:
    """Masks, each of the tokens of some inputs.

    Args:
        masks: true where a token counts.
        names: of the inputs that hold them; ``None`` where a function made one.
        inputs: the names of the inputs whose tokens each is of; ``None``: the inputs that begin with its axes.

    Shape: ``masks`` bool [samples, tokens] each.
    """

    masks: tuple[Tensor, ...]
    names: tuple[str | None, ...]
    inputs: tuple[frozenset[str] | None, ...]

    @classmethod
    def of(cls, mask: Tensor) -> TokenMasks:
        """One mask of all inputs that begin with its axes."""
        return cls((mask,), (None,), (None,))

    @property
    def samples(self) -> int:
        return len(self.masks[0])

    def of_samples(self, begin: int, end: int) -> TokenMasks:
        """The masks of some of the samples."""
        return TokenMasks(tuple(mask[begin:end] for mask in self.masks), self.names, self.inputs)

    def mask_of(self, name: str, axes: torch.Size) -> int | None:
        """The index of the mask of an input whose first two axes are ``axes``; ``None`` if no mask covers it.

        Where several have these axes, the names decide: ``decoder_input_ids`` goes with ``decoder_attention_mask``, if
        ``attention_mask`` is the other.

        Raises: CalibrationError if they do not decide, or an input that is named has other axes than its mask.
        """
        if name in self.names:
            return self.names.index(name)
        for index, inputs in enumerate(self.inputs):
            if inputs is not None and name in inputs:
                if self.masks[index].shape != axes:
                    raise CalibrationError(f"valid: {name} begins with the axes {list(axes)}, its mask "
                                           f"{self.names[index]} with {list(self.masks[index].shape)}")
                return index
        fitting = [index for index, (mask, inputs) in enumerate(zip(self.masks, self.inputs, strict=True))
                   if inputs is None and mask.shape == axes]
        if len(fitting) < 2:
            return fitting[0] if fitting else None
        beginnings = _beginnings([(self.names[index] or "").split("_") for index in fitting])
        words = name.split("_")
        named = [(len(begin), index) for begin, index in zip(beginnings, fitting, strict=True)
                 if words[:len(begin)] == begin]
        if not named:
            masks = [str(self.names[index]) for index in fitting]
            raise CalibrationError(f"valid: {name} has the axes of the masks {' and '.join(masks)}; say whose inputs "
                                   f"each is, valid={{{masks[0]!r}: [...], {masks[1]!r}: [...]}}")
        return max(named)[1]


def _beginnings(names: Sequence[list[str]]) -> list[list[str]]:
    """The words of each name in front of their common ending: ``decoder`` of ``decoder_attention_mask``."""
    common = 0
    while all(len(name) > common for name in names) and len({name[-1 - common] for name in names}) == 1:
        common += 1
    return [name[:len(name) - common] for name in names]
