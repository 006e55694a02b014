"""Leaves out what a loader yields beside the inputs of a model: labels."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from torch import Tensor, nn

from qtk.calls.inputs import VARIADIC
from qtk.calls.signature import signature_of
from qtk.capture.prepared_model import PreparedGraph
from qtk.torch_private import call_structure


def without_labels(model: nn.Module, batch: object) -> object:
    """``batch`` without what the model cannot take, as the labels of (image, label).

    Of a tuple or list one item is kept where ``forward`` has one argument. Else the items beyond its arguments, or
    beyond the inputs that a model was captured with, are left out if they look like labels: integer tensors of at most
    one axis, lists and dicts. Of a mapping only the input is kept where ``forward`` has one argument.

    >>> import torch
    >>> image, label = torch.zeros(3, 4), torch.zeros(3)
    >>> len(without_labels(nn.Linear(4, 2), (image, label)))
    1
    >>> list(without_labels(nn.Linear(4, 2), {"input": image, "label": label}))
    ['input']
    >>> len(without_labels(nn.Bilinear(4, 4, 2), (image, image)))
    2
    """
    signature = signature_of(model) if isinstance(model, nn.Module) else None
    if signature is None or not isinstance(batch, (tuple, list, Mapping)) or len(batch) < 2:
        return batch
    parameters = [*signature.parameters.values()]
    names = [each.name for each in parameters if each.kind in POSITIONAL]
    takes_more = any(each.kind in VARIADIC for each in parameters)
    if isinstance(batch, Mapping):
        is_only = len(parameters) == 1 and not takes_more and names[0] in batch
        return {names[0]: batch[names[0]]} if is_only else batch
    captured = _captured_inputs(model)
    kept = len(batch) if takes_more or not names else min(len(batch), len(names))
    kept = kept if captured is None else min(kept, max(captured, 1))
    is_one_input = len(names) == 1 and not takes_more
    return batch[:kept] if is_one_input or all(map(_is_label, batch[kept:])) else batch


POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _captured_inputs(model: nn.Module) -> int | None:
    """The number of arguments of the one kind of call that a model was captured with; ``None`` if it was not."""
    structure = call_structure(model.graph) if isinstance(model, PreparedGraph) and not model.variants else None
    return None if structure is None else sum(structure.in_spec.child(index).num_children for index in (0, 1))


def _is_label(item: object) -> bool:
    if isinstance(item, Tensor):
        return item.ndim <= 1 and not item.is_floating_point()
    return isinstance(item, (list, tuple, Mapping))
