"""Finds the inputs of a call that have tokens, and follows these through the graph that it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor, fx

from qtk.calls.inputs import input_leaves
from qtk.calls.token_masks import TokenMasks
from qtk.errors import CaptureError
from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.token_layouts import Followed, TokenLayouts
from qtk.numerics.token_layout import TokenLayout
from qtk.quantizers.quantizer import Quantizer
from qtk.torch_private import length_hint


@dataclass(frozen=True, slots=True)
class Masked:
    """The layout of a value whose tokens a mask covers.

    Args:
        layout: where they are.
        mask: index of the mask.
    """

    layout: TokenLayout
    mask: int

    def rows(self, value: Tensor, valid: TokenMasks) -> Tensor | None:
        """The rows whose tokens are valid; see ``TokenLayout.rows``."""
        return self.layout.rows(value, valid.masks[self.mask].to(value.device))


@dataclass(frozen=True, slots=True)
class Unmasked:
    """The state of a value with tokens of ``inputs`` that no mask covers."""

    inputs: tuple[str, ...]


Covered: TypeAlias = Masked | Unmasked | str | None
"""Where the tokens of a value are; the op behind which they could not be followed; ``None`` if it has none."""


class CoveredLayouts:
    """The layouts of the values of one graph, for all masks.

    Args:
        by_mask: the layouts from the inputs of each mask; ``None`` for one without inputs.
        unmasked: the sites computed from inputs that no mask covers, ``None`` if there are none.
        names: of these inputs.
    """

    def __init__(
        self, by_mask: Sequence[TokenLayouts | None], unmasked: TokenLayouts | None, names: Sequence[str]
    ) -> None:
        self._by_mask, self._unmasked, self._names = by_mask, unmasked, tuple(names)

    def __getitem__(self, node: fx.Node) -> Covered:
        return self._joined([None if each is None else each[node] for each in self._by_mask],
                            None if self._unmasked is None else self._unmasked[node])

    @property
    def calls(self) -> list[tuple[Quantizer, Covered]]:
        """The calls of quantizers in order; calls in a module that is run as a whole are named once."""
        known = next(each for each in self._by_mask if each is not None)
        found: list[tuple[Quantizer, Covered]] = []
        for index, (quantizer, _) in enumerate(known.calls):
            each = [None if of is None else of.calls[index][1] for of in self._by_mask]
            found.append((quantizer, self._joined(
                each, None if self._unmasked is None else self._unmasked.calls[index][1])))
        return found

    def _joined(self, by_mask: Sequence[Followed], unmasked: Followed) -> Covered:
        """Takes the mask of the outer of two axes: attention scores have decoder tokens over encoder tokens."""
        masked = [Masked(each, index) for index, each in enumerate(by_mask) if isinstance(each, TokenLayout)]
        if masked:
            return min(masked, key=lambda each: _token_axis(each.layout))
        if unmasked is not None and (isinstance(unmasked, TokenLayout) or not any(by_mask)):
            return Unmasked(self._names)
        return next((each for each in by_mask if isinstance(each, str)), None)


class TokenInputs:
    """The layouts of the graphs of a model, for calls in which the same inputs have tokens."""

    def __init__(self) -> None:
        self._layouts: dict[tuple[tuple[fx.Node, ...], ...], CoveredLayouts] = {}

    def followed(
        self, graph: CapturedGraph, args: tuple[object, ...], kwargs: Mapping[str, object], valid: TokenMasks
    ) -> CoveredLayouts | None:
        """The layouts of a call of ``graph`` whose inputs [samples, tokens, …] are as long as a mask.

        Args:
            graph: a captured graph.
            args: positional arguments of the call.
            kwargs: its keyword arguments.
            valid: the masks.

        Returns: ``None`` if no input is, or the graph does not take the arguments.

        Raises: CalibrationError if an input may be of several masks.
        """
        try:
            leaves = input_leaves(graph.graph, args, kwargs)
        except CaptureError:
            return None
        by_mask: list[list[fx.Node]] = [[] for _ in valid.masks]
        unmasked: list[fx.Node] = []
        for node, leaf in zip(graph.graph.find_nodes(op="placeholder"), leaves, strict=True):
            if not isinstance(leaf, Tensor) or leaf.ndim < 2:
                continue
            index = valid.mask_of(str(node.target), leaf.shape[:2])
            if index is not None:
                by_mask[index].append(node)
            elif _may_have_tokens(leaf, valid.samples):
                unmasked.append(node)
        if not any(by_mask):
            return None
        key = (*map(tuple, by_mask), tuple(unmasked))
        if key not in self._layouts:
            layouts = [TokenLayouts(graph, {node: _layout(node) for node in nodes}) if nodes else None
                       for nodes in (*by_mask, unmasked)]
            self._layouts[key] = CoveredLayouts(layouts[:-1], layouts[-1], [str(node.target) for node in unmasked])
        return self._layouts[key]


def _may_have_tokens(leaf: Tensor, samples: int) -> bool:
    """Says whether an input is like indices or masks [samples, tokens], or embedded tokens [samples, tokens, width]."""
    return leaf.shape[0] == samples and leaf.ndim == (3 if leaf.is_floating_point() else 2)


def _token_axis(layout: TokenLayout) -> int:
    counts = [[factor.count.value for factor in factors] for factors in layout.axes]
    return next((axis for axis, each in enumerate(counts) if "tokens" in each), len(counts))


def _layout(node: fx.Node) -> TokenLayout:
    shape = node.meta["val"].shape
    return TokenLayout.of_shape([length_hint(each) for each in shape], [isinstance(each, int) for each in shape])
