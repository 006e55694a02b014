"""Digests of tensors and plain values, to tell whether they are the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from qtk.torch_private import pytree


def digest(values: Iterable[object]) -> str:
    """Digest of all leaves of pytrees; the digest of a tensor includes dtype and shape, not device and strides.

    >>> x = torch.ones(2, 3)
    >>> digest([x]) == digest([x.mT.contiguous().mT]), digest([x]) == digest([x.mT])
    (True, False)
    """
    result = hashlib.blake2b(digest_size=16)
    for leaf in pytree.tree_leaves(list(values)):
        if isinstance(leaf, Tensor):
            plain = leaf.detach().cpu().contiguous()
            result.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
            result.update(plain.flatten().view(torch.uint8).numpy().data if plain.numel() else b"")
        else:
            result.update(repr(leaf).encode())
    return result.hexdigest()
