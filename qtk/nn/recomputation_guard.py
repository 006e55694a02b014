"""Second runs of a model inside a backward pass, as ``torch.utils.checkpoint`` makes to keep fewer values.

What a first run has moved (running statistics, ranges that follow their values) is not there for a second one, which
would compute other values, and gradients of something that never ran.
"""

from __future__ import annotations

from contextvars import ContextVar

from qtk.errors import CaptureError
from qtk.torch_private import in_backward

STATE_IS_RESTORED = ContextVar("STATE_IS_RESTORED", default=False)
"""Set while a second run finds all buffers as they were before the first."""


def refuse_recomputation(what: str) -> None:
    """Raises: CaptureError in a second run that does not find the state of the first.

    Args:
        what: what has moved since, for the message.
    """
    if in_backward() and not STATE_IS_RESTORED.get():
        raise CaptureError(
            f"{what} in the forward pass, which a backward pass runs a second time (torch.utils.checkpoint): it would "
            "compute other values, and wrong gradients; recompute by qtk.block_view(sim, …, checkpoint=True), which "
            "restores them"
        )
