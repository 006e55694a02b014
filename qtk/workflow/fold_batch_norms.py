"""``fold_batch_norms`` on a prepared model or a simulation."""

from __future__ import annotations

from dataclasses import replace

from qtk.capture.prepared_model import PreparedModel
from qtk.public import public
from qtk.transforms import fold_batch_norms as transform
from qtk.transforms.keep_batch_norms import fold_kept, is_kept
from qtk.transforms.result import TransformResult
from qtk.transforms.rewrite import Rewritable, rewrite_simulation, with_example
from qtk.transforms.snapshot import unchanged_on_error


@public
def fold_batch_norms(prepared_or_sim: PreparedModel | Rewritable) -> TransformResult:
    """Folds every batch norm into the layer before or behind it, else into a scale and a shift; proves each.

    ``QuantSim`` does so by itself where the config says ``fold_batch_norms: true``, as all shipped targets do.

    >>> import qtk, torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    >>> prepared = qtk.prepare_model(model, torch.randn(2, 3, 8, 8))
    >>> print(qtk.fold_batch_norms(prepared))  # doctest: +ELLIPSIS
    fold_batch_norms: 1 applied; outputs changed by ...
      1  applied: into 0

    The parameters of the batch norm are gone, the convolution has a bias; ``model`` itself is as it was:

    >>> list(prepared.state_dict()), len(model.state_dict())
    (['0.weight', '0.bias'], 7)

    A simulation that was planned with its batch norms; encodings of what changed are forgotten:

    >>> config = {"version": 1, "fold_batch_norms": False}
    >>> sim = qtk.QuantSim(model, torch.randn(2, 3, 8, 8), config=config)
    >>> sim.compute_encodings([torch.randn(2, 3, 8, 8)], progress=False)
    >>> qtk.fold_batch_norms(sim).applied[0].detail
    'into 0'
    >>> sim.compute_encodings([torch.randn(2, 3, 8, 8)], only_missing=True, progress=False)

    Batch norms that were kept for training are folded as they were quantized: all sites keep their encodings, and the
    simulation computes the same in eval mode, bit for bit:

    >>> sim = qtk.QuantSim(model, torch.randn(2, 3, 8, 8), config={"version": 1, "fold_batch_norms": "at_export"})
    >>> sim.compute_encodings([torch.randn(2, 3, 8, 8)], progress=False)
    >>> x = torch.randn(2, 3, 8, 8)
    >>> before = sim.model(x)
    >>> _ = qtk.fold_batch_norms(sim)
    >>> torch.equal(sim.model(x), before)
    True

    Args:
        prepared_or_sim: from ``prepare_model``, or a ``QuantSim``; changed, its parameters replaced by new ones.

    Returns: for each batch norm where it went, or why it was left; printable.

    Raises: CaptureError if it is neither, or a model that was traced without inputs; CalibrationError if an encoding
        in the way is frozen.
    """
    if not isinstance(prepared_or_sim, PreparedModel) and hasattr(prepared_or_sim, "simulation"):
        return _fold_simulation(prepared_or_sim)
    return transform.fold_batch_norms(*with_example(prepared_or_sim, "fold_batch_norms"))


def _fold_simulation(sim: Rewritable) -> TransformResult:
    """Folds the kept batch norms, then all others. An exception leaves ``sim`` as it was."""
    before = sim.simulation
    if not is_kept(before.model):
        return rewrite_simulation(sim, transform.fold_batch_norms)
    with unchanged_on_error(before.model):
        try:
            sim.simulation, kept = fold_kept(before)
            rest = rewrite_simulation(sim, transform.fold_batch_norms)
        except BaseException:
            sim.simulation = before
            raise
    return replace(rest, groups=(*kept.groups, *rest.groups))
