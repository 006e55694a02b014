"""An example input of a shape that a recipe or a command gives."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qtk.cli.model_source import Shape
from qtk.errors import ConfigError

MOST_ELEMENTS = 1 << 31
"""Elements of an example input: a batch of this size is a mistake in its shape."""


def example_input(shape: Shape, dtype: torch.dtype, *, device: str = "cpu") -> Tensor:
    """Normally distributed values for a floating dtype, else zeros.

    Raises: ConfigError if there are more than 2³¹, or there is no memory for them.

    >>> example_input((1, 2**40), torch.bool)
    Traceback (most recent call last):
    qtk.errors.ConfigError: input_shape (1, 1099511627776) has 1,099,511,627,776 elements, more than 2³¹ or than there \
is memory for; give the shape of one batch
    """
    elements, cause = math.prod(shape), None
    if elements <= MOST_ELEMENTS:
        try:
            if dtype.is_floating_point:
                return torch.randn(shape, device=device).to(dtype)
            return torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError as error:
            cause = error
    raise ConfigError(f"input_shape {shape} has {elements:,} elements, more than 2³¹ or than there is memory for; give "
                      "the shape of one batch") from cause
