"""The op that stands for a quantizer while torch exports a model: one ONNX node, with the name of the site."""

from __future__ import annotations

import torch
from torch import Tensor, fx

torch.library.define("qtk::quantized_site", "(Tensor value, str site) -> Tensor")


def _copy(value: Tensor, site: str) -> Tensor:
    return value.clone()


torch.library.impl("qtk::quantized_site", "CompositeExplicitAutograd", _copy)
torch.library.register_fake("qtk::quantized_site", _copy)

SITE_MARKER = torch.ops.qtk.quantized_site.default
"""Takes a value and the name of its site."""


def is_marker(node: fx.Node) -> bool:
    """Says whether a node marks a quantized value."""
    return node.target is SITE_MARKER
