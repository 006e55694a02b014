"""``apply_smooth_quant`` on a simulation."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

from qtk.calls.calls import Call
from qtk.capture.prepared_model import PreparedModel
from qtk.channels.channel_scales import ChannelScales
from qtk.data.forward_pass import Data, Forward, run_all
from qtk.data.valid_tokens import Valid, ValidTokens
from qtk.errors import CalibrationError, ConfigError
from qtk.observers.ranks import several_ranks
from qtk.public import public
from qtk.transforms.proof import rewrite
from qtk.transforms.result import TransformResult
from qtk.transforms.rewrite import Rewritable, refuse_fixed, refuse_kept, rewrite_simulation
from qtk.transforms.smooth_quant import SmoothQuant

Alpha: TypeAlias = float | Literal["auto"]
"""How much of the range of activations goes into the weights: from 0 to 1, or the best for each group."""


@public
def apply_smooth_quant(
    sim: Rewritable, data: Data, *,
    alpha: Alpha = "auto", forward: Forward | None = None, num_batches: int | None = None, progress: bool = True,
    valid: Valid | None = None,
) -> TransformResult:
    """SmoothQuant: divides outlier channels of activations, and multiplies the weights that read them instead.

    Xiao et al., arXiv 2211.10438. A group of layers is scaled if that lowers the error of its quantized outputs on a
    part of ``data`` that the scales have not seen. The function of the float model stays, which is proved.

    >>> import qtk, torch
    >>> from torch import nn
    >>> _ = torch.manual_seed(0)
    >>> model, batches = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 32)).eval(), torch.randn(4, 32, 64)
    >>> with torch.no_grad():
    ...     model[0].weight[:2] *= 80  # two outlier channels
    ...     model[1].weight[:, :2] /= 80
    >>> sim = qtk.QuantSim(model, batches[0])
    >>> print(qtk.apply_smooth_quant(sim, batches, progress=False))  # doctest: +ELLIPSIS
    smooth_quant: 1 applied; outputs changed by ...
      0:out  applied: alpha ..., ... dB, into 0.weight, 0.bias  error ... → ...
    >>> sim.compute_encodings(batches, progress=False)

    One alpha for all, without a search:

    >>> sim = qtk.QuantSim(model, batches[0])
    >>> result = qtk.apply_smooth_quant(sim, batches, alpha=0.5, progress=False)
    >>> result.applied[0].after < result.applied[0].before / 100
    True

    A loader of (input, label) pairs, of which two batches are enough; encodings that no longer fit are forgotten:

    >>> pairs = [(x, 0) for x in batches]
    >>> sim = qtk.QuantSim(model, batches[0])
    >>> sim.compute_encodings(batches, progress=False)
    >>> result = qtk.apply_smooth_quant(
    ...     sim, pairs, forward=lambda model, batch: model(batch[0]), num_batches=2, progress=False)
    >>> list(sim.encodings())
    ['input:input', '1:out']
    >>> sim.compute_encodings(batches, only_missing=True, progress=False)

    Where no parameter can absorb a factor, such as behind a GELU, a multiplication is inserted in front of the layers,
    if it lowers the error by 3 dB, and the layers make 32 times as many multiplications; this holds for any alpha:

    >>> model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32)).eval()
    >>> with torch.no_grad():
    ...     model[0].weight[:2] *= 80
    ...     model[2].weight[:, :2] /= 80
    >>> sim = qtk.QuantSim(model, batches[0])
    >>> result = qtk.apply_smooth_quant(sim, batches, progress=False)
    >>> "2.channel_scale:out" in sim.quantizers, sim.model.get_buffer("2.smooth_scale").shape
    (True, torch.Size([64]))

    Args:
        sim: a ``QuantSim``; its parameters are replaced by new ones.
        data: as for ``compute_encodings``; every fourth batch, or a quarter of a single one, is held out to measure
            errors on.
        alpha: the migration strength of all groups, from 0 to 1; ``auto``: the best of 0, 0.1, …, 1 for each group, or
            none. A number scales every group whose factors parameters can absorb, whatever the errors.
        forward: how to run the model on a batch, e.g. ``lambda model, batch: model(batch[0])``.
        num_batches: batches to take of the data; ``None``: all.
        progress: show bars.
        valid: which tokens count, as for ``compute_encodings``: ranges and errors leave the others out; ``None``: all.

    Returns: for each group of layers where its scales went, with the error of its outputs (noise to signal) before and
        after, or why it was left; printable.

    Raises: ConfigError if ``alpha`` is neither a number from 0 to 1 nor ``auto``; CalibrationError if ``sim`` is no
        ``QuantSim``, for data that do not run or hold NaN or infinity, naming the batch, if ``valid`` gives no mask, if
        an encoding or a rounded weight is in the way, or in several processes. Nothing has changed then.
    """
    strength = migration_strength(alpha)
    if not hasattr(sim, "simulation"):
        raise CalibrationError(f"SmoothQuant needs the plan of a QuantSim, got {type(sim).__name__}; make one of it")
    if several_ranks():
        raise CalibrationError("SmoothQuant runs in one process; apply it there, and load the result in the others")
    refuse_kept(sim)
    before = sim.simulation

    def transform(model: PreparedModel, call: Call) -> TransformResult:
        layers = SmoothQuant(model, ChannelScales(model, call.args, call.kwargs), before.plan)
        refuse_fixed(before, layers.sites)
        if layers.values:
            tokens = ValidTokens(model, valid)
            with tokens.listening(), layers.gathering(tokens):
                run_all(model, data, forward=tokens.forward(forward), num_batches=num_batches, label="statistics",
                        progress=progress)
            tokens.warn_of_unfollowed(layers.places)
        groups = layers.groups(strength, progress=progress)
        return rewrite(model, call, groups, transform="smooth_quant", nothing="the model has no layer with a weight")

    with torch.inference_mode(False), torch.no_grad():
        return rewrite_simulation(sim, transform)


def migration_strength(alpha: Alpha) -> float | None:
    """The number that ``alpha`` is, ``None`` for ``auto``. Raises: ConfigError if it is neither."""
    if alpha == "auto":
        return None
    if isinstance(alpha, (int, float)) and not isinstance(alpha, bool) and 0 <= alpha <= 1:
        return float(alpha)
    raise ConfigError(f"alpha must be a number from 0 to 1, or 'auto'; got {alpha!r}")
