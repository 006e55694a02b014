"""Second moments of the data of all ranks."""

from __future__ import annotations

import torch

from qtk.layerwise.second_moments import SecondMoments
from qtk.observers.ranks import exchanged, several_ranks


def summed(
    moments: SecondMoments | None, device: torch.device, problem: Exception | None = None
) -> SecondMoments | None:
    """The moments of the data of all ranks, as all will have them; ``None`` if no rank has any.

    Every rank must call it.

    Args:
        moments: those of this rank.
        device: where the result shall be.
        problem: what went wrong here, to be raised everywhere.

    Raises: as ``exchanged``.
    """
    if not several_ranks():
        if problem is not None:
            raise problem
        return moments
    own = None if moments is None or not moments.rows else moments.moved(torch.device("cpu"))
    shares = [share for share in exchanged(own, problem) if share is not None]
    for share in shares[1:]:
        shares[0].merge(share)
    return shares[0].moved(device) if shares else None
