"""``equalize_model`` on a prepared model or a simulation."""

from __future__ import annotations

from qtk.capture.prepared_model import PreparedModel
from qtk.public import public
from qtk.transforms.equalize import equalize_layers
from qtk.transforms.result import TransformResult
from qtk.transforms.rewrite import Rewritable, refuse_kept, rewrite_simulation, with_example


@public
def equalize_model(prepared_or_sim: PreparedModel | Rewritable) -> TransformResult:
    """Gives the weights before and behind every channel the same range, so that one scale per tensor serves all rows.

    Call it before calibration, with batch norms folded, as all shipped targets fold them. Outputs stay as they are:

    >>> import qtk, torch
    >>> from torch import nn
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU6(), nn.Conv2d(8, 4, 1))
    >>> with torch.no_grad():
    ...     _ = model[0].weight.mul_(torch.tensor([1.0, 2, 4, 8, 16, 32, 64, 128]).view(-1, 1, 1, 1))
    >>> sim = qtk.QuantSim(model, torch.randn(2, 3, 8, 8))
    >>> print(qtk.equalize_model(sim))  # doctest: +ELLIPSIS
    equalize: 1 applied; outputs changed by ...
      0 → 2  applied: 8 channels, largest ratio of two ranges ... → 1

    The parameters of the simulation are new ones, ``model`` is as it was. A clamp between two layers has scaled bounds:

    >>> sim.model.get_buffer("1.upper").unique().numel(), model[1]
    (8, ReLU6())

    Encodings of what changed are forgotten; the others stay:

    >>> sim.compute_encodings([torch.randn(2, 3, 8, 8)], progress=False)
    >>> print(qtk.equalize_model(sim))
    equalize: 1 skipped; outputs changed by 0.0e+00
      0 → 2  skipped: the ranges are equal already

    The ranges of a channel are taken over all weights that produce it (r1) and all that read it (r2), through ReLU,
    PReLU, clamps, pooling, concatenation and residual connections; depthwise convolutions do both. Its factor is
    √(r1 r2) / r1, and this is repeated until all ranges are equal (Nagel et al., arXiv:1906.04721, eq. 11). Channels
    that a GELU or another function keeps from being scaled, or that a norm or an embedding makes too, are left.

    Where a batch norm was folded in, the part of a bias that a rectifier always lets pass moves into the layers behind
    it (§4.1.3): three standard deviations below the channel's mean, and no more than the smallest value on the example
    inputs. What lies below that, one value in 740 of a normal distribution, is cut off.

    Args:
        prepared_or_sim: from ``prepare_model``, or a ``QuantSim``; changed, its parameters replaced by new ones.

    Returns: for each group of channels the largest ratio of two ranges before and after, or why it was left; printable.

    Raises: CaptureError if it is neither, or a model that was traced without inputs; CalibrationError naming the sites
        if an encoding in the way is frozen.
    """
    if not isinstance(prepared_or_sim, PreparedModel) and hasattr(prepared_or_sim, "simulation"):
        refuse_kept(prepared_or_sim)
        return rewrite_simulation(prepared_or_sim, equalize_layers)
    return equalize_layers(*with_example(prepared_or_sim, "equalize_model"))
