"""Integer inputs whose values decide about sizes, as the grids of images do: they are constants of the graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qtk.calls.calls import Call, detached
from qtk.errors import OUT_OF_MEMORY
from qtk.torch_private import pytree, without_modes

CREATED = (torch.arange, torch.full, torch.ones, torch.tensor, torch.zeros)
"""Functions whose integer results are known where all they are given is."""


def known_inputs(model: nn.Module, call: Call, is_captured: Callable[[Collection[int]], bool]) -> tuple[int, ...]:
    """The fewest integer inputs with whose values written into it ``model`` can be captured, by number of the leaf.

    At least one must fit the sizes of others: a length that any other input could have is no constant.

    Args:
        model: the module, in eval mode.
        call: a call of it.
        is_captured: whether the module can be captured with the values of some leaves written into the graph.

    Returns: none if that does not help.
    """
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    integers = {number: leaf for number, leaf in enumerate(leaves) if _is_integer(leaf)}
    fitting = {number for number in integers if _must_fit(model, call, number)}
    if not fitting:
        return ()
    known = {*integers}
    for number in sorted(integers, key=lambda each: -integers[each].numel()):
        if is_captured(known - {number}):
            known.remove(number)
    return tuple(sorted(known)) if known & fitting and len(known) < len(leaves) else ()


def _is_integer(leaf: object) -> bool:
    if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided or leaf.is_meta or leaf.is_quantized:
        return False
    is_number = not leaf.is_floating_point() and not leaf.is_complex() and leaf.dtype != torch.bool
    return is_number and leaf.numel() > 0


def _must_fit(model: nn.Module, call: Call, number: int) -> bool:
    """Says whether the model fails if all values of a leaf above 1 are one less, and so are still indices."""
    leaves, structure = pytree.tree_flatten(detached((call.args, call.kwargs)))
    is_more = leaves[number] > 1
    if not bool(is_more.any()):  # of masks too, of which none can be subtracted
        return False
    leaves[number] = leaves[number] - is_more.to(leaves[number].dtype)
    args, kwargs = pytree.tree_unflatten(leaves, structure)
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    except OUT_OF_MEMORY:
        raise
    except Exception:  # whatever the model raises
        return True
    return False


@contextlib.contextmanager
def written_in(model: nn.Module, call: Call, known: Collection[int]) -> Iterator[None]:
    """While active, a trace of ``model`` computes what follows from the values of the leaves ``known`` in ``call``."""
    if not known:
        yield
        return
    paths = pytree.tree_flatten_with_path((call.args, call.kwargs))[0]
    values = {paths[number][0]: paths[number][1].detach().clone() for number in known}
    mode = _Known()

    def enter(_: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
        given = pytree.tree_map_with_path(lambda path, leaf: values.get(path, leaf), (args, dict(kwargs)))
        mode.__enter__()  # type: ignore[no-untyped-call]
        return given

    def leave(*_: object) -> None:
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    hooks = [model.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),
             model.register_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Known(TorchFunctionMode):
    """Runs functions of tensors with values outside of the trace, so that their results have values too."""

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        has_values = all(type(tensor) is Tensor and not tensor.requires_grad for tensor in tensors)
        is_free = any(isinstance(leaf, (torch.SymInt, torch.SymBool, torch.SymFloat)) for leaf in leaves)
        if is_free or not has_values or not (tensors or func in CREATED):
            return func(*args, **kwargs)
        with without_modes():
            result = func(*args, **kwargs)
        return result if tensors or not result.is_floating_point() else func(*args, **kwargs)
