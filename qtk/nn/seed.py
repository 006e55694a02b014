"""Seeds torch's generators."""

from __future__ import annotations

import torch


def set_seed(value: int) -> None:
    """``torch.manual_seed``, which where there is no accelerator formats the stack of the caller several times over.

    In a small model that is as long as a run of it.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(value)
    else:
        torch.default_generator.manual_seed(value)
