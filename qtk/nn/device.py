"""The device of a model, and weights that are elsewhere: on the meta device, brought by hooks while it runs."""

from __future__ import annotations

from itertools import chain

import torch
from torch import nn

from qtk.errors import CaptureError


def device_of(model: nn.Module) -> torch.device:
    """The device of the first parameter or buffer; the CPU if there is none."""
    return next((tensor.device for tensor in chain(model.parameters(), model.buffers())), torch.device("cpu"))


LOAD = ("load the model without device_map (from_pretrained(…, device_map=None)), or model.load_state_dict(state, "
        "assign=True)")
"""How tensors get their values."""

NAMED = 3
"""Tensors that a message names."""


def is_dry_run(model: nn.Module) -> bool:
    """Says whether tensors of the model have no values (meta)."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def without_values(model: nn.Module) -> str:
    """Returns what cannot be done with a dry run, and how to load its weights."""
    return (f"{empty_tensors(model)}: on the meta device, whose tensors have no values: make the simulation from a "
            f"model with weights; {LOAD}")


def empty_tensors(model: nn.Module) -> str:
    """The names of the first parameters and buffers without values, and how many others there are."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    names = [name for name, tensor in tensors if tensor.is_meta]
    more = f" and {len(names) - NAMED} others" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"


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
