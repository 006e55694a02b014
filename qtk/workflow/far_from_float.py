"""Whether the simulation that an exported file is compared with is itself near the float model."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, fx

from qtk.calls.calls import Call
from qtk.export.file_signature import tensor_outputs
from qtk.quantizers.modes import in_mode
from qtk.quantizers.quantizer import Mode, Quantizer
from qtk.report.verdict import Finding, Level
from qtk.runtimes.tolerance import sqnr_db

LEAST_DB = 6.0
"""Below it the error of an output is half as large as the output itself, or larger."""

COMPARE = "sim.compare(data) shows at which site"


def far_from_float(
    model: fx.GraphModule, call: Call, simulated: Sequence[Tensor], counted: Sequence[Tensor | None],
    names: Sequence[str],
) -> list[Finding]:
    """Returns what is wrong with the worst output of the simulation in one call; nothing if all are near the float's.

    Args:
        model: the simulating graph.
        call: what it is called with.
        simulated: what ``file_outputs`` returns of this call.
        counted: for each of these which elements count, bool of its shape; ``None``: all.
        names: of the outputs.
    """
    quantizers = [module for module in model.modules() if isinstance(module, Quantizer)]
    with in_mode(quantizers, Mode.BYPASS):
        in_float = tensor_outputs(model, call)
    worst, name = math.inf, ""
    for own, exact, which, output in zip(simulated, in_float, counted, names, strict=True):
        if not exact.is_floating_point() or own.shape != exact.shape:
            continue
        if which is not None:
            own, exact = own[which], exact[which]
        if bool((exact.isfinite() & ~own.isfinite()).any()):
            return [Finding(Level.RED, f"the simulation itself returns NaN or infinite values in {output}, which the "
                            "float model does not", f"{COMPARE} they begin; leave that in float")]
        if bool(exact.any()) and (near := sqnr_db(exact, own, None)) < worst:
            worst, name = near, output
    if worst >= LEAST_DB:
        return []
    return [Finding(Level.YELLOW, f"the simulation itself is {worst:.1f} dB from the float model in {name}, whatever "
                    "the file computes", f"{COMPARE} accuracy is lost; give that 16 bits or float")]
