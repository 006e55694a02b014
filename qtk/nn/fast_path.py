"""Switches off torch's fast path for attention in eval mode."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_LOCK = threading.Lock()
_users = 0
_enabled_before = True


@contextmanager
def fast_path_off() -> Iterator[None]:
    """Runs ``nn.TransformerEncoder``, its layers and ``nn.MultiheadAttention`` without their fused eval-mode kernels.

    The fast path reads parameters without calling the submodules, and converts padded inputs to nested tensors, so that
    padded positions become zeros; other outputs are the same. torch's setting is one for the process: of uses that
    overlap in several threads, the first switches the path off and the last restores it.
    """
    global _users, _enabled_before
    with _LOCK:
        if _users == 0:
            _enabled_before = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
        _users += 1
    try:
        yield
    finally:
        with _LOCK:
            _users -= 1
            if _users == 0:
                torch.backends.mha.set_fastpath_enabled(_enabled_before)
