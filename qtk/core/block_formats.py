"""Block formats by name (``mxfp4``): a number format, a block length and the format of the scales."""

from __future__ import annotations

from dataclasses import dataclass

from qtk.core.dtypes import QDtype, dtype
from qtk.core.spec import ScaleFormat


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Every ``length`` elements along the axis that a product sums over share a scale stored as ``scale_format``."""

    name: str
    dtype: QDtype
    length: int
    scale_format: ScaleFormat
    narrow_range: bool = False


BLOCK_FORMATS = {
    row.name: row
    for row in (  # OCP Microscaling Formats 1.0, table 1; then NVFP4 and low power blockwise quantization
        BlockFormat("mxfp8_e4m3", dtype("fp8_e4m3"), 32, ScaleFormat.E8M0),
        BlockFormat("mxfp8_e5m2", dtype("fp8_e5m2"), 32, ScaleFormat.E8M0),
        BlockFormat("mxfp6_e3m2", dtype("fp6_e3m2"), 32, ScaleFormat.E8M0),
        BlockFormat("mxfp6_e2m3", dtype("fp6_e2m3"), 32, ScaleFormat.E8M0),
        BlockFormat("mxfp4", dtype("fp4_e2m1"), 32, ScaleFormat.E8M0),
        BlockFormat("mxint8", dtype("int8"), 32, ScaleFormat.E8M0, narrow_range=True),
        BlockFormat("nvfp4", dtype("fp4_e2m1"), 16, ScaleFormat.E4M3),
        BlockFormat("lpbq_int4", dtype("int4"), 64, ScaleFormat.INT4),
    )
}
