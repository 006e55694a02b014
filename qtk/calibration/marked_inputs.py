"""Which model inputs hold markers, numbers that stand for a missing value such as −9999.

A marker is one number, smallest or largest of all and repeated, that takes the range from the others: with −9999 in it
steps of 8 bits are 39. A model that replaces it (``where``, ``masked_fill``, a clamp) computes from the others alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from torch import Tensor, fx

from qtk.calibration.width_check import LargeStep, Loss
from qtk.core.dtypes import integer
from qtk.core.encoding import Encoding
from qtk.core.site import Site
from qtk.graph.graphs import roots
from qtk.graph.insert import quantizer_called
from qtk.graph.simulation import Simulation
from qtk.graph.sites import SITE, label, value_site
from qtk.numerics.affine import fake_quantize
from qtk.numerics.ranges import choose_range
from qtk.operators.lookup import row_of
from qtk.operators.op_row import Mask, Role

MOST_MARKERS = 4
"""Different markers that are looked for in one input."""

PRECISE_BITS = 16


def marked_inputs(
    samples: Iterable[tuple[Site, Tensor, Encoding]], simulation: Simulation
) -> dict[Site, LargeStep]:
    """The inputs whose range is taken by markers. Args: ``samples``: some finite values of inputs, their encodings."""
    found = {site: _marked(values, encoding) for site, values, encoding in samples
             if simulation.plan[site].range is None and not simulation.quantizers[site].frozen}
    return {site: step for site, step in found.items() if step is not None}


def _marked(values: Tensor, encoding: Encoding) -> LargeStep | None:
    bits, others, markers = encoding.spec.dtype.bits, values, list[float]()
    while len(markers) < MOST_MARKERS:
        marker = max(others.aminmax(), key=lambda end: float((end - others.median()).abs()))
        is_marker = others == marker
        if int(is_marker.sum()) < 2:
            return None
        others = others[~is_marker]
        markers.append(float(marker))
        if not others.any():
            return None
        reason = _loss(others, encoding)
        if reason is not None and _loss(others, _own_range(others, bits, encoding)) is None:
            share = 1 - others.numel() / values.numel()
            shown = " and ".join(f"{each:g}" for each in markers)
            wider = _loss(others, _own_range(values, PRECISE_BITS, encoding))
            times = 1.0 if wider is None else 2.0**PRECISE_BITS
            return LargeStep(f"{shown}, {share:.0%} of its values, takes the range: of the others {reason}", times)
    return None


def _own_range(values: Tensor, bits: int, encoding: Encoding) -> Encoding:
    """The encoding of the range of ``values`` in so many bits."""
    code = integer(bits, signed=encoding.spec.qmin < 0)
    spec = replace(encoding.spec, dtype=code, narrow_range=False, reduced_range=False)
    low, high = values.aminmax()
    return Encoding(spec, *choose_range(low[None], high[None], spec))


def _loss(values: Tensor, encoding: Encoding) -> str | None:
    """Says what an encoding leaves of some values; ``None`` if it holds them."""
    spec = encoding.spec
    rounded = fake_quantize(values, encoding.scale, encoding.zero_point, (), int(spec.qmin), int(spec.qmax))
    return Loss.of(values, rounded).reason(spec.dtype.bits)


def readers_without_markers(simulation: Simulation, inputs: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The inputs whose markers the model replaces before it multiplies by a weight, and what reads the result.

    Args:
        simulation: the model that they are inputs of.
        inputs: names of their sites.

    Returns: input → module paths of products that read it with the markers replaced and without a range between.
    """
    found: dict[str, tuple[str, ...]] = {}
    for graph in roots(simulation.model).values():
        for node in graph.graph.nodes:
            name = label(node, SITE)
            if name is not None and name in inputs and quantizer_called(node) is not None:
                readers = _readers(node, is_replaced=False)
                if readers is not None:
                    found[name] = tuple(dict.fromkeys(readers))
    return found


def _readers(value: fx.Node, *, is_replaced: bool) -> list[str] | None:
    """The products that read a value by moving, merging or masking it; ``None`` if one reads the markers."""
    readers: list[str] = []
    for user in value.users:
        row = row_of(user)
        if user.op == "output" or (row is not None and row.multiplies and not is_replaced):
            return None
        if row is None or quantizer_called(user) is not None:
            continue
        if row.multiplies:
            readers.append(value_site(user).name.partition(":")[0])
        elif row.role in (Role.MOVEMENT, Role.MERGE):
            behind = _readers(user, is_replaced=is_replaced or Mask.MAKES in row.mask)
            if behind is None:
                return None
            readers += behind
    return readers
