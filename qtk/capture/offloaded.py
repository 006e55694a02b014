"""Weights that are elsewhere: on the meta device, brought by hooks that wrap ``forward`` while it runs (accelerate).

Capture would read the empty tensors, or trace the hooks; both end in errors that do not speak of the weights.
"""

from __future__ import annotations

from torch import nn

from qtk.errors import CaptureError
from qtk.nn.device import LOAD, empty_tensors

HOOK = "_hf_hook"
"""The attribute in which accelerate keeps the hook of a module."""


def refuse_offloaded(model: nn.Module) -> None:
    """Raises: CaptureError if hooks bring the weights of modules while they run, with the call that removes them."""
    hooked = [path for path, module in model.named_modules() if getattr(module, HOOK, None) is not None]
    names = empty_tensors(model)
    if hooked and names:
        raise CaptureError(
            f"{names}: on the meta device, without values, which hooks of {len(hooked)} modules bring while these run; "
            "run accelerate.hooks.remove_hook_from_module(model, recurse=True), which brings back what was offloaded "
            f"from a loaded model; what was never loaded stays there: {LOAD}"
        )
