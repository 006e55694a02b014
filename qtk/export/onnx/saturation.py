"""Finds weights whose products with uint8 ONNX Runtime cannot add up on every CPU.

x86 without VNNI multiplies uint8 by int8, and adds the products of two neighbours along the summed axis in int16,
which saturates: 255 · (127 + 127) = 64,770 becomes 32,767. A pair of codes of one sign is exact for any input if they
add up to no more than 128, in magnitude; one of both signs always is. ARM, and x86 with VNNI, add in int32; uint8
weights are exact everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, fx

from qtk.export.onnx.simulated_sites import SimulatedSite, simulated_sites
from qtk.graph.flow import Flow
from qtk.graph.graphs import with_nested
from qtk.graph.insert import quantizer_called
from qtk.graph.op_row import Product
from qtk.graph.sites import Port
from qtk.numerics import affine

SUMS = range(-(2**15), 2**15)
"""What the sum of two products is held in."""


def saturating_weights(model: fx.GraphModule) -> list[str]:
    """The sites of the int8 weights with a pair of codes whose products with their input can overflow int16."""
    constants = {site.node: site for site in simulated_sites(model) if site.constant is not None}
    names = (name for graph in with_nested(model) for name in _saturating_in(graph, constants))
    return list(dict.fromkeys(names))


def largest_pair(codes: Tensor) -> int:
    """The largest magnitude of a sum of two neighbours of one sign, or of one number beside one of the other sign.

    Shape: ``codes`` [..., summed].

    >>> largest_pair(torch.tensor([[100, -100, -29, 64, 64]]))
    129
    """
    codes = torch.nn.functional.pad(codes, (0, 1))  # the last one may stand alone
    pairs = [part[..., 1:] + part[..., :-1] for part in (codes.clamp(min=0), -codes.clamp(max=0))]
    return max(int(pair.max()) for pair in pairs) if codes[..., 1:].numel() else 0


def _saturating_in(graph: fx.GraphModule, constants: Mapping[fx.Node, SimulatedSite]) -> Iterator[str]:
    flow = Flow(graph.graph)
    for node, site in constants.items():
        if node.graph is not graph.graph or not site.spec.dtype.signed or site.spec.dtype.bits > 8:
            continue
        for port in flow.readers(node):
            highest = _highest_input(flow, port)
            if highest and largest_pair(_codes_in_order(flow, port, site)) * highest not in SUMS:
                yield site.name


def _highest_input(flow: Flow, port: Port) -> int:
    """The highest code of the uint8 input that the weight at ``port`` is multiplied with; 0 if there is none."""
    row = flow.row(port.user) if port.user.op != "output" else None
    if row is None or row.product in (None, Product.CONV_TRANSPOSE) or port.arg not in row.weights:
        return 0
    quantizers = [quantizer_called(flow.root(data.value)) for data in flow.data_ports(port.user)]
    specs = [quantizer.spec for quantizer in quantizers if quantizer is not None]
    return max((int(spec.dtype.maximum) for spec in specs if not spec.dtype.signed and spec.dtype.bits <= 8), default=0)


def _codes_in_order(flow: Flow, port: Port, site: SimulatedSite) -> Tensor:
    """The codes of a weight, the summed axes last and in the order of ONNX Runtime's kernels: channels innermost.

    Shape: [..., summed]. Of a weight that is moved between quantizer and op: its codes in the order of their size.
    """
    row, constant, encoding = flow.row(port.user), site.constant, site.encoding
    assert row is not None
    assert constant is not None
    assert encoding is not None
    spec = encoding.spec
    codes = affine.quantize(
        constant, encoding.scale, encoding.zero_point, spec.granularity.block_size(constant.ndim),
        int(spec.qmin), int(spec.qmax),
    ).cpu()
    if port.value is not site.node:
        return codes.flatten().sort().values
    match row.product:
        case Product.CONV:
            return codes.movedim(1, -1).flatten(1)
        case Product.IN_OUT:
            return codes.movedim(-2, -1) if codes.ndim > 1 else codes
    return codes
