"""Torch's fused inference kernels for attention, switched off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def fast_path_off() -> Iterator[None]:
    """Inside, ``nn.TransformerEncoder``, its layers and ``nn.MultiheadAttention`` run as written, in eval mode too.

    Their fast path reads the parameters of submodules without calling them, and hands nested tensors on, which come
    back with zeros where the input is padded; everything else is the same.
    """
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
