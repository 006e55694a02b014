"""What to write where a model does not run on a batch: labels in it, keys that are no inputs, another float type."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from qtk.torch_private import pytree


def batch_advice(model: nn.Module, batch: object) -> str:
    """Says how to call the model on the batch; empty if nothing about the batch says it.

    >>> batch_advice(nn.Linear(4, 2), {"image": torch.zeros(3, 4), "label": torch.zeros(3)})
    "the model has no input 'image' or 'label': pass forward=lambda model, batch: model(batch['image'])"
    >>> batch_advice(nn.Linear(4, 2), torch.zeros(3, 4, dtype=torch.float64))
    'the batch has float64, the model float32: convert it, e.g. with batch.to(torch.float32)'
    """
    if isinstance(batch, Mapping) and (advice := _of_keys(model, batch)) is not None:
        return advice
    every = pytree.tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    leaves = [leaf for leaf in every if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    own = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    other = next((leaf.dtype for leaf in leaves if own and leaf.dtype not in own), None)
    if other is not None:
        wanted = torch.float32 if torch.float32 in own else sorted(own, key=str)[0]
        return (f"the batch has {_text(other)}, the model {_text(wanted)}: convert it, e.g. with batch.to({wanted})"
                if isinstance(batch, Tensor) else
                f"the batch has {_text(other)}, the model {_text(wanted)}: convert its tensors, with .to({wanted})")
    is_pair = isinstance(batch, (tuple, list)) and len(batch) > 1
    return "for (image, label) loaders pass forward=lambda model, batch: model(batch[0])" if is_pair else ""


def _of_keys(model: nn.Module, batch: Mapping[object, object]) -> str | None:
    """Advice where keys of the batch are no inputs of the model."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return None
    known = {each.name for each in parameters}
    foreign = [key for key in batch if key not in known]
    missing = [each.name for each in parameters if each.default is inspect.Parameter.empty and each.name not in batch
               and each.kind is not inspect.Parameter.VAR_POSITIONAL]
    if missing and not foreign:
        return f"the batch lacks {' and '.join(map(repr, missing))}: pass forward=lambda model, batch: …"
    if not foreign:
        return None
    shared = [key for key in batch if key in known]
    tensors = [key for key, value in batch.items() if isinstance(value, Tensor)]
    arguments = ", ".join(f"{key}=batch[{key!r}]" for key in shared) or f"batch[{_longest(batch, tensors)!r}]"
    return (f"the model has no input {' or '.join(map(repr, foreign))}: pass forward=lambda model, batch: "
            f"model({arguments})")


def _longest(batch: Mapping[object, object], keys: list[object]) -> object:
    """The key of the tensor with the most elements, which is hardly a label; any key if there is no tensor."""
    sizes = {key: value.numel() for key in keys if isinstance(value := batch[key], Tensor)}
    return max(sizes, key=sizes.__getitem__) if sizes else next(iter(batch))


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
