"""Leaves out the tokens of a batch that only fill it up, wherever they can be followed to."""

from __future__ import annotations

import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn

from qtk.calls.signature import output_nodes
from qtk.calls.token_inputs import Covered, CoveredLayouts, Masked, TokenInputs, Unmasked
from qtk.calls.token_masks import TokenMasks
from qtk.core.granularity import PerChannel
from qtk.data.forward_pass import Batch, Forward, run_batch
from qtk.errors import CalibrationError
from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.graphs import entered, roots, with_nested
from qtk.graph.insert import quantizer_nodes
from qtk.numerics.token_layout import TokenLayout
from qtk.observers.observer import Observer
from qtk.quantizers.quantizer import Quantizer
from qtk.torch_private import pytree

Valid: TypeAlias = (
    str | Callable[[Batch], Tensor] | list[str] | tuple[str, ...] | Mapping[str, str | Sequence[str] | None]
)
"""Which tokens count: the name of an input that says so (``attention_mask``), or a function from a batch to that.

Every input whose first two axes have these lengths is taken to have these tokens. Of an encoder-decoder a list has the
mask of each side; where both are as long, the beginnings of the names tell which input is on which side
(``decoder_input_ids``, ``decoder_attention_mask``), or a mapping says it: name of a mask → names of inputs."""


Place: TypeAlias = Quantizer | fx.Node
"""Where a value is seen: the quantizer that it goes through, or the node whose value it is."""


class ValidTokens:
    """The valid tokens of the calls of a model, and the rows of its values that are theirs.

    Args:
        model: a prepared model with quantizers.
        valid: which tokens count; ``None``: all.
    """

    def __init__(self, model: nn.Module, valid: Valid | None) -> None:
        self.valid = valid
        self._model = model
        self._masks: TokenMasks | None = None
        self._inputs = TokenInputs()
        self._pending: dict[Quantizer, list[Covered]] = defaultdict(list)
        self._unfollowed: dict[Place, str] = {}
        self._unmasked: dict[Place, tuple[str, ...]] = {}
        self._layouts: dict[nn.Module, CoveredLayouts | None] = {}
        self._running: CoveredLayouts | None = None
        self._returned: list[tuple[Tensor, Covered]] = []
        self._lost_output: str | None = None
        self._matched = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While the body runs, ``rows`` knows the call of the model that is running.

        Raises: CalibrationError at the end, if no input of any call had these tokens.
        """
        if self.valid is None:
            yield
            return
        handles = [
            module.register_forward_pre_hook(self._of_call, prepend=True, with_kwargs=True)
            for module in entered(self._model)
        ]
        for graph in roots(self._model).values():
            handles.append(graph.register_forward_pre_hook(self._follow, with_kwargs=True))
            handles.append(graph.register_forward_hook(self._note_outputs, prepend=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        if self._masks is None:
            raise CalibrationError(self.without_batch)
        if not self._matched:
            raise CalibrationError(f"valid={self._shown}: no input of the model begins with its axes [samples, tokens] "
                                   f"{tuple(self._masks.masks[0].shape)}; leave valid out, or give it the axes of an "
                                   "input")

    def forward(self, forward: Forward | None) -> Forward | None:
        """``forward``, or ``run_batch``, after the tokens of the batch have been noted."""
        if self.valid is None or not callable(self.valid):
            return forward
        valid, run = self.valid, forward or run_batch

        def noting(model: nn.Module, batch: Batch) -> object:
            self._masks = TokenMasks.of(self._checked(valid(batch)))
            return run(model, batch)

        return noting

    def observer(self, observer: Observer, quantizer: Quantizer) -> Any:
        """``observer``, which sees the valid rows alone."""
        return observer if self.valid is None else _OfRows(observer, partial(self.rows, quantizer))

    def rows(self, quantizer: Quantizer, value: Tensor) -> Tensor:
        """The valid rows of what ``quantizer`` is given, once for each of its calls; all where they are not known."""
        return self.selector(quantizer)(value)

    def selector(self, quantizer: Quantizer) -> Callable[[Tensor], Tensor]:
        """Picks the valid rows of values of one call of ``quantizer``; to be asked for once for each of its calls."""
        pending = None if self.valid is None else self._pending.get(quantizer)
        followed = pending.pop(0) if pending else None
        if isinstance(followed, Masked) and isinstance(quantizer.spec.granularity, PerChannel):
            followed = "scales of an axis, which rows do not have"
        return self._selector(quantizer, followed)

    def selector_at(self, node: fx.Node) -> Callable[[Tensor], Tensor]:
        """Picks the valid rows of values of ``node``, in the call of its graph that is running."""
        return self._selector(node, None if self._running is None else self._running[node])

    def counted_at(self, node: fx.Node, value: Tensor) -> Tensor | None:
        """Returns which elements of the value of ``node``, in the running call of its graph, belong to valid tokens.

        Returns: bool, of the shape of ``value``; ``None``: all.
        """
        return None if self._running is None else _elements(self.selector_at(node), value)

    def _selector(self, place: Place, followed: Covered) -> Callable[[Tensor], Tensor]:
        masks = self._masks

        def rows(value: Tensor) -> Tensor:
            reason = followed
            if isinstance(followed, Masked) and masks is not None:
                selected = followed.rows(value, masks)
                if selected is not None:
                    return selected
                reason = "a length that changes"
            if isinstance(reason, Unmasked):
                self._unmasked[place] = reason.inputs
            if isinstance(reason, str):
                self._unfollowed[place] = reason
            return value

        return rows

    def counted(self, quantizer: Quantizer, value: Tensor) -> Tensor | None:
        """Returns which elements of the output of ``quantizer`` belong to valid tokens; called once for each call.

        Returns: bool, of the shape of ``value``; ``None``: all.
        """
        return None if self.valid is None else _elements(self.selector(quantizer), value)

    def counted_of_output(self, value: Tensor) -> Tensor | None:
        """Returns which elements of a value that the model, or ``forward``, returned belong to valid tokens.

        The tokens are followed to what a graph returns. Another value whose first two axes match a mask is taken to
        have the tokens of the mask; all elements of what has no tokens count.

        Returns: bool, of the shape of ``value``; ``None``: all.
        """
        if self._masks is None:
            return None
        masks, known = self._masks, [each for leaf, each in self._returned if leaf is value]
        followed = known[0] if known else None
        if known and followed is None:
            return None
        if not isinstance(followed, Masked):
            fitting = [index for index, mask in enumerate(masks.masks) if value.shape[:2] == mask.shape]
            if value.ndim < 2 or not fitting or isinstance(followed, Unmasked):
                self._lost_output = followed if isinstance(followed, str) else self._lost_output
                return None
            followed = Masked(TokenLayout.of_shape(value.shape), fitting[0])
        masked = followed
        if masked.rows(value, masks) is None:
            self._lost_output = "a length that changes"
            return None
        return _elements(lambda each: masked.rows(each, masks), value)

    def masks(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> TokenMasks | None:
        """The valid tokens of a call of the model.

        Raises: CalibrationError if the call has no such input, or it is no mask of tokens.
        """
        if self.valid is not None and not callable(self.valid):
            bound = inspect.signature(self._model.forward).bind(*args, **kwargs).arguments
            for each in [each for each in bound.values() if isinstance(each, Mapping)]:  # **kwargs, a batch of its own
                bound |= each
            named = _inputs_by_mask(self.valid)
            for name in dict.fromkeys((*named, *(name for inputs in named.values() for name in inputs or ()))):
                if name not in bound:
                    raise CalibrationError(f"valid={name!r} names no input of this call, which has "
                                           f"{', '.join(bound)}; pass one of these, or a function from a batch to a "
                                           "mask")
            self._masks = TokenMasks(
                tuple(self._checked(bound[name]) for name in named), tuple(named), tuple(named.values()))
        return self._masks

    def warn_of_unfollowed(self, names: Mapping[Quantizer, str] | Mapping[fx.Node, str]) -> None:
        """Warns of the places where all rows were seen, though some are no tokens; ``names``: which places matter."""
        found = {name: self._unfollowed[place] for place, name in names.items() if place in self._unfollowed}
        missed = {name: self._unmasked[place] for place, name in names.items() if place in self._unmasked}
        if missed:
            inputs = ", ".join(dict.fromkeys(name for each in missed.values() for name in each))
            shown = ", ".join(list(missed)[:3]) + (", …" if len(missed) > 3 else "")
            warnings.warn(f"valid={self._shown}: {len(missed)} sites have tokens of inputs that no mask covers "
                          f"({inputs}), where all rows count: {shown}; name the mask of each side, "
                          "valid=[\"attention_mask\", \"decoder_attention_mask\"]", stacklevel=3)
        if self._lost_output is not None:
            warnings.warn(f"valid={self._shown}: tokens cannot be followed to an output behind {self._lost_output}, of "
                          "which all elements count", stacklevel=3)
        if found:
            shown = ", ".join(f"{name} (behind {op})" for name, op in list(found.items())[:3])
            warnings.warn(f"valid={self._shown}: tokens cannot be followed to {len(found)} sites, where all rows "
                          f"count: {shown}{', …' if len(found) > 3 else ''}", stacklevel=3)

    @property
    def without_batch(self) -> str:
        """The message where a function had no batch to be called with."""
        return (f"valid={self._shown} was given no batch: data that is a function runs the model itself; pass the "
                "name of an input, or batches")

    @property
    def _shown(self) -> str:
        return getattr(self.valid, "__name__", "function") if callable(self.valid) else repr(self.valid)

    def _of_call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._returned.clear()
        self.masks(args, kwargs)

    def _follow(self, graph: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert isinstance(graph, CapturedGraph)
        self._pending.clear()
        self._layouts.pop(graph, None)
        self._running = None
        if self._masks is None:
            return
        layouts = self._layouts[graph] = self._running = self._inputs.followed(graph, args, kwargs, self._masks)
        if layouts is None:
            for inner in with_nested(graph):
                self._unfollowed |= dict.fromkeys(quantizer_nodes(inner).values(), "inputs without these axes")
                self._unfollowed |= dict.fromkeys(inner.graph.nodes, "inputs without these axes")
            return
        self._matched = True
        for quantizer, followed in layouts.calls:
            self._pending[quantizer].append(followed)

    def _note_outputs(self, graph: nn.Module, args: tuple[Any, ...], result: object) -> None:
        assert isinstance(graph, CapturedGraph)
        layouts = self._layouts.get(graph)
        nodes = list(output_nodes(graph).values())
        leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        if layouts is not None and len(nodes) == len(leaves):
            self._returned += [(leaf, layouts[node]) for leaf, node in zip(leaves, nodes, strict=True)]

    def _checked(self, mask: object) -> Tensor:
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            got = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
            raise CalibrationError(f"valid={self._shown} must give a tensor [samples, tokens], got {got}")
        if mask.dtype is not torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
            raise CalibrationError(f"valid={self._shown} must be true or 1 for tokens that count, else false or 0; got "
                                   f"{mask.dtype} with other values")
        return mask.bool()


def _inputs_by_mask(
    valid: str | Sequence[str] | Mapping[str, str | Sequence[str] | None]
) -> dict[str, frozenset[str] | None]:
    """Name of a mask → the names of its inputs, ``None`` where they are found by their axes."""
    if isinstance(valid, Mapping):
        return {name: None if inputs is None else frozenset([inputs] if isinstance(inputs, str) else inputs)
                for name, inputs in valid.items()}
    return dict.fromkeys([valid] if isinstance(valid, str) else valid)


def _elements(rows: Callable[[Tensor], Tensor | None], value: Tensor) -> Tensor:
    """The elements of ``value`` that ``rows`` picks, as bool of its shape."""
    chosen = rows(torch.arange(value.numel(), device=value.device).reshape(value.shape))
    assert chosen is not None
    elements = torch.zeros(value.numel(), dtype=torch.bool, device=value.device)
    elements[chosen.flatten()] = True
    return elements.reshape(value.shape)


class _OfRows:
    """What a quantizer calls in place of an observer."""

    def __init__(self, observer: Observer, rows: Callable[[Tensor], Tensor]) -> None:
        self._observer, self._rows = observer, rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._observer, name)

    def observe(self, x: Tensor) -> None:
        self._observer.observe(self._rows(x))
