"""Switches off torch's fast path for attention in eval mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def fast_path_off() -> Iterator[None]:
    """Runs ``nn.TransformerEncoder``, its layers and ``nn.MultiheadAttention`` without their fused eval-mode kernels.

    The fast path reads parameters without calling the submodules, and converts padded inputs to nested tensors, so that
    padded positions become zeros; other outputs are the same.
    """
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
