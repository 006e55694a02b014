"""Copies of exported files that also return the values of their sites.

The dequantized values of a file that is run as it is; the codes of one that is optimized, because a QuantizeLinear is
fused with the operator before it also where its codes are returned. Sites in the body of a Scan cannot be returned.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
import torch
from torch import Tensor

from qtk.core.dtypes import FloatDtype
from qtk.core.encoding import Encoding
from qtk.export.onnx.node_writer import stored_value
from qtk.export.onnx.onnxruntime.passes import restore_nodes
from qtk.export.onnx.stored_sites import narrowed, stored_sites
from qtk.numerics import affine
from qtk.runtimes.model_copy import write_copy


@dataclass(frozen=True, slots=True, eq=False)
class SiteOutput:
    """A site whose value a file returns.

    Args:
        site: name of the site.
        step: ordinal of its node; more than 0 in a loop that is unrolled.
        name: name of the output.
        encoding: how the codes are dequantized; ``None`` if the output holds dequantized values.
        lengths: pairs of an axis and the length of the site along it, where the output is longer.
    """

    site: str
    step: int
    name: str
    encoding: Encoding | None
    lengths: tuple[tuple[int, int], ...] = ()

    def reals(self, value: Tensor) -> Tensor:
        """The dequantized values of the output."""
        value = narrowed(value, self.lengths)
        if self.encoding is None:
            return value
        spec = self.encoding.spec
        sizes = spec.granularity.block_size(value.ndim)
        return affine.dequantize(
            value.to(torch.int32) - spec.middle_code, self.encoding.scale, self.encoding.zero_point, sizes
        )

    def like(self, value: Tensor, reference: Tensor) -> Tensor | None:
        """The dequantized values of the output; ``None`` if it has another shape than ``reference``."""
        reals = self.reals(value)
        return reals if reals.shape == reference.shape else None

    def stored(self, reals: Tensor) -> Tensor:
        """The output that ``reals`` gives, of dequantized values; codes as int32."""
        if self.encoding is None:
            return reals
        spec = self.encoding.spec
        return affine.quantize(
            reals.float(), self.encoding.scale, self.encoding.zero_point, spec.granularity.block_size(reals.ndim),
            int(spec.qmin), int(spec.qmax),
        ) + spec.middle_code


def site_outputs(file: Path, *, codes: bool) -> list[SiteOutput]:
    """The sites of ``file`` whose values can be returned, in graph order.

    Args:
        file: an exported file.
        codes: return codes, of calibrated integer sites of up to 16 bits; else dequantized values.
    """
    top_level = {node.name for node in load_restored(file).graph}
    steps: Counter[str] = Counter()
    outputs = []
    for site in stored_sites(file):
        codes_value, reals_value = stored_value(site.node.inputs[0]), site.node.outputs[0]
        if site.node.name not in top_level or codes_value is None or codes_value.producer() is None:
            continue  # in the body of a Scan, or a constant
        step = steps[site.name]
        steps[site.name] += 1
        value = codes_value if codes else reals_value
        if value.name is None:
            continue
        if not codes:
            outputs.append(SiteOutput(site.name, step, value.name, None, site.lengths))
        elif site.encoding is not None and site.spec.dtype.bits <= 16 and not isinstance(
            site.spec.dtype, FloatDtype
        ):
            outputs.append(SiteOutput(site.name, step, value.name, site.encoding, site.lengths))
    return outputs


def sites_in_bodies(file: Path) -> int:
    """The number of sites, constants left out, in the bodies of loops."""
    top_level = {node.name for node in load_restored(file).graph}
    return len({
        site.name for site in stored_sites(file)
        if site.node.name not in top_level and (codes := stored_value(site.node.inputs[0])) is not None
        and not _is_constant(codes)
    })


def write_with_outputs(file: Path, outputs: list[SiteOutput], folder: Path) -> Path:
    """Writes a copy of ``file`` that also returns ``outputs``, into ``folder``; returns its path."""
    model = load_restored(file)
    wanted = dict.fromkeys(output.name for output in outputs)
    returned = {value.name for value in model.graph.outputs}
    values = {value.name: value for node in model.graph for value in node.outputs}
    model.graph.outputs.extend(values[name] for name in wanted if name not in returned)
    return write_copy(model, file, folder)


def load_restored(file: Path) -> ir.Model:
    """The model in an exported file, with the nodes of sites back that stand in its metadata alone."""
    model = ir.load(file)
    restore_nodes(model)
    return model


def _is_constant(codes: ir.Value) -> bool:
    return codes.producer() is None and codes.const_value is not None
