"""Rounds the scales of a simulation to what files hold, so that the simulation is the file exactly."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from qtk.core.encoding import Encoding
from qtk.core.overlaps import joined
from qtk.core.spec import ScaleFormat
from qtk.errors import EncodingError, NotCalibratedError
from qtk.graph.float_root import float_root
from qtk.graph.flow import Flow
from qtk.graph.graphs import graphs
from qtk.graph.insert import quantizer_nodes
from qtk.graph.simulation import HasSimulation
from qtk.numerics.scale_formats import SMALLEST_E4M3, rounded_to, tensor_scale_of
from qtk.public import public
from qtk.quantizers.bias_quantizer import BiasQuantizer
from qtk.quantizers.quantizer import Quantizer

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@public
def round_scales(sim: HasSimulation, dtype: torch.dtype | None = None) -> dict[str, float]:
    """Rounds the scales of encodings to the dtype in which a file stores them.

    >>> import qtk, torch
    >>> model = torch.nn.Linear(32, 8).bfloat16().eval()
    >>> sim = qtk.QuantSim(model, torch.randn(4, 32, dtype=torch.bfloat16), activation_bits=None)
    >>> sim.compute_encodings(None)
    >>> qtk.round_scales(sim)["weight"] < 2 ** -8
    True
    >>> scale = sim.quantizers["weight"].scale
    >>> torch.equal(scale.bfloat16().float(), scale)
    True

    A language model in bfloat16 has bfloat16 scales in its checkpoint, GGUF has float16 ones. Layers with NVFP4 weights
    that read the same value get one scale of the tensor, for servers fuse them. Codes follow from the rounded scales.
    Run it after calibration, before layer-wise methods, which round weights for these scales and choose scales that the
    dtype holds, and before the export.

    Args:
        sim: a calibrated simulation; changed.
        dtype: float16, bfloat16 or float32; ``None``: the dtype of each value.

    Returns: site → the largest relative change of its scales, of the sites that changed.

    Raises: EncodingError for another dtype, or a frozen encoding that would change; NotCalibratedError without
        encodings. Nothing has changed then.
    """
    if dtype is not None and dtype not in FLOATS:
        raise EncodingError(f"scales are stored as {', '.join(map(str, FLOATS))}, got {dtype}; use one of these")
    rounded: dict[Quantizer, Encoding] = {}
    for quantizer, node in _quantizers(sim):
        encoding = quantizer.encoding
        if encoding is None:
            raise NotCalibratedError(f"{quantizer.site} has no encoding; run sim.compute_encodings(data) first")
        if encoding.spec.scale_format is None:
            scale = rounded_to(encoding.scale, node.meta["val"].dtype if dtype is None else dtype)
            rounded[quantizer] = Encoding(encoding.spec, scale, encoding.zero_point)
    rounded |= _with_common_scales(sim)
    changes = {}
    for quantizer, encoding in rounded.items():
        before = quantizer.encoding
        assert before is not None
        if not before.equals(encoding):
            quantizer.refuse_if_frozen()
            changes[quantizer] = encoding, float((encoding.scale / before.scale - 1).abs().max())
    for quantizer, (encoding, _) in changes.items():
        quantizer.load_encoding(encoding)
    return {quantizer.site: change for quantizer, (_, change) in changes.items()}


def _quantizers(sim: HasSimulation) -> Iterator[tuple[Quantizer, fx.Node]]:
    """Every quantizer with a range of its own, once, with a call of it."""
    seen: set[Quantizer] = set()
    for graph in graphs(sim.simulation.model).values():
        for node, quantizer in quantizer_nodes(graph).items():
            if quantizer not in seen and not quantizer.spec.dynamic and not isinstance(quantizer, BiasQuantizer):
                seen.add(quantizer)
                yield quantizer, node


def _with_common_scales(sim: HasSimulation) -> dict[Quantizer, Encoding]:
    """The encodings of NVFP4 weights whose products read the same value, with the largest scale of the tensor.

    A weight that multiplies two values joins the weights of both.
    """
    groups: dict[fx.Node, dict[Quantizer, Encoding]] = {}
    for graph in graphs(sim.simulation.model).values():
        flow = Flow(graph.graph)
        for node, quantizer in quantizer_nodes(graph).items():
            is_nvfp4 = quantizer.static and quantizer.spec.scale_format is ScaleFormat.E4M3
            encoding = quantizer.encoding if is_nvfp4 else None
            for port in flow.readers(node) if encoding is not None else ():
                row = flow.row(port.user)
                data = None if row is None or row.data_arg is None else port.user.args[row.data_arg]
                if encoding is not None and isinstance(data, fx.Node) and data is not port.value:
                    groups.setdefault(float_root(flow, data), {})[quantizer] = encoding
    found: dict[Quantizer, Encoding] = {}
    encodings = {quantizer: encoding for members in groups.values() for quantizer, encoding in members.items()}
    for group in joined(groups.values()):
        members = {quantizer: encodings[quantizer] for quantizer in group}
        units = [unit for encoding in members.values() if (unit := tensor_scale_of(encoding.scale)) is not None]
        if len(units) < len(members):
            continue
        common = torch.stack(units).amax()
        for quantizer, encoding in members.items():
            small = (encoding.scale / common).to(torch.float8_e4m3fn).to(torch.float32).clamp(min=SMALLEST_E4M3)
            found[quantizer] = Encoding(encoding.spec, small * common)
    return found
