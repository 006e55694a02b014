"""Mixed precision: a width for each site, so that the outputs lose least under a budget."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from qtk.analysis.sensitivity import Loss
from qtk.auto.bit_assignment import BitAssignment
from qtk.auto.bit_search import BitSearch
from qtk.auto.widths import UNITS, Choice, bits_of
from qtk.calibration.calibrate import CalibrationData
from qtk.core.dtypes import BITS
from qtk.data.forward_pass import Batch, Forward, in_memory
from qtk.data.valid_tokens import Valid
from qtk.errors import ConfigError
from qtk.public import public
from qtk.quantsim import QuantSim
from qtk.registry import nearest
from qtk.transforms.rewrite import refuse_kept

CHOICES: tuple[Choice, ...] = (4, 8, 16)
KERNELS: tuple[Choice, ...] = (8, "float")
"""What ONNX Runtime has kernels for on the CPU."""


@public
def assign_bits(
    sim: QuantSim, data: Iterable[Batch], *, budget: Mapping[str, float],
    choices: Sequence[int | Literal["float"]] | None = None, loss: Loss | None = None, forward: Forward | None = None,
    num_batches: int | None = None, valid: Valid | None = None, progress: bool = True,
) -> BitAssignment:
    """Gives each site the width that lets the outputs lose least under a budget, and calibrates what changed.

    >>> import qtk, torch
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)).eval()
    >>> batches = [torch.randn(32, 16) for _ in range(4)]
    >>> sim = qtk.QuantSim(model, batches[0])
    >>> found = qtk.assign_bits(sim, batches, budget={"weight_bits": 6}, choices=(4, 8), progress=False)
    >>> {row.name: row.width for row in found.rows}
    {'0.weight': 4, '2.weight': 8}
    >>> found.save("widths.yaml", force=True)  # doctest: +SKIP

    What each width costs the outputs is estimated for every site, by one backward pass a width (``sim.sensitivity``).
    Estimates are summed, and the best sum under the budget is found exactly (``qtk.algorithms.frontier``). The result
    is calibrated and measured beside equal widths everywhere; what really loses least is taken.

    Args:
        sim: the simulation; its plan, config and encodings change, its weights do not. Sites whose encodings are
            frozen or learned, or whose weights a layer-wise method has rounded, stay as they are: call this first.
        data: batches to calibrate and to measure with; kept in memory.
        budget: one limit. ``{"bytes": n}``: all parameters with their scales. ``{"weight_bits": n}``: the mean width of
            the elements of weights. ``{"bit_operations": n}``: Σ multiplications × width × width over matrix products
            and convolutions, for one call on the example inputs. ``{"milliseconds": n}``: such a call on this
            machine, in the runtime of the simulation's target, else in ONNX Runtime; matrix products are measured once
            for each shape, whole models to correct the sum, and the result is measured again. The first two set widths
            of weights alone, the last widths of what matrix products read.
        choices: the widths that a site can have; ``None``: 4, 8 and 16 bits, for milliseconds 8 bits and float.
        loss: ``loss(outputs, batch)``, as for ``sim.sensitivity``; ``None``: the error of the outputs.
        forward: as for ``compute_encodings``.
        num_batches: as for ``compute_encodings``.
        valid: as for ``compute_encodings``; a ``loss`` says itself what counts.
        progress: show bars.

    Returns: the widths, what they cost and lose, and the config; printable, and written by its ``save``.

    Raises: CalibrationError for a budget below the least cost, saying what that is, or if no site can have a width of
        its own; ConfigError for an unknown budget or width; as ``compute_encodings`` and ``sensitivity``. Nothing has
        changed then.
    """
    kind, limit = _checked(budget)
    widths = _checked_choices((KERNELS if kind == "milliseconds" else CHOICES) if choices is None else choices)
    refuse_kept(sim)
    kept = CalibrationData(in_memory(data, num_batches), forward=forward, progress=progress, valid=valid)
    search = BitSearch(sim, kept, kind, widths, loss)
    found = search.found(limit)
    search.apply(found.config)
    return found


def _checked(budget: Mapping[str, float]) -> tuple[str, float]:
    if len(budget) != 1:
        raise ConfigError(f"a budget is one limit, e.g. {{'bytes': 1e6}}, got {dict(budget)}; call again for another")
    (kind, limit), = budget.items()
    if kind not in UNITS:
        raise ConfigError(f"unknown budget {kind!r}; {nearest(kind, UNITS)}")
    if not math.isfinite(limit) or limit <= 0:
        raise ConfigError(f"the budget of {UNITS[kind]} must be a positive number, got {limit}")
    return kind, float(limit)


def _checked_choices(choices: Sequence[Choice]) -> tuple[Choice, ...]:
    for width in choices:
        if width != "float" and width not in BITS:
            raise ConfigError(f"a width is {BITS.start} to {BITS.stop - 1} bits or 'float', got {width!r}")
    rising = tuple(sorted(set(choices), key=bits_of))
    if len(rising) < 2:
        raise ConfigError(f"choices must be two widths at least, got {list(choices)}")
    return rising
