"""The rows of the values of a batch: rows of tokens that count, and rows of the samples that are held out."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, fx

from qtk.calls.calls import Call
from qtk.calls.inputs import input_leaves
from qtk.calls.token_inputs import Covered, CoveredLayouts, Masked, TokenInputs
from qtk.calls.token_masks import TokenMasks
from qtk.errors import CalibrationError
from qtk.graph.captured_graph import CapturedGraph
from qtk.moments.holdout import Holdout
from qtk.numerics.im2col import Geometry
from qtk.torch_private import pytree


class BatchRows:
    """Where samples and tokens are in the values of a graph, for every call of it.

    A sample is held out with all its tokens. Where its axis cannot be followed, it is the axis as long as there are
    samples in the batch, which the first axis of the first input counts.

    Args:
        graph: a captured graph.
        calls: its calls, one for each batch.
        holdout: the samples that are held out.

    Raises: CalibrationError if tokens are given and no input of any call has them.
    """

    def __init__(self, graph: CapturedGraph, calls: Sequence[Call], holdout: Holdout | None) -> None:
        self._calls = calls
        self._holdout = holdout
        self.misfits: set[fx.Node] = set()
        """Values whose tokens are followed, but not in every batch."""
        inputs = TokenInputs()
        self._tokens = [
            None if call.valid is None else inputs.followed(graph, call.args, call.kwargs, call.valid) for call in calls
        ]
        masks = [call.valid for call in calls if call.valid is not None]
        if masks and self.followed is None:
            raise CalibrationError(f"valid: no input of the model begins with its axes [samples, tokens] "
                                   f"{tuple(masks[0].masks[0].shape)}; leave valid out, or give it the axes of an "
                                   "input")
        self._samples = [samples_of(call) for call in calls]
        self._axes = [self._axes_of(graph, call) for call in calls] if holdout is not None else []
        self._layouts = [
            tokens or (None if axes is None else inputs.followed(graph, call.args, call.kwargs, axes))
            for tokens, call, axes in zip(self._tokens, calls, self._axes, strict=False)
        ]

    @property
    def followed(self) -> CoveredLayouts | None:
        """Where the tokens are that count; ``None`` if none were given."""
        return next((each for each in self._tokens if each is not None), None)

    def rows(self, node: fx.Node, value: Tensor, batch: int) -> Tensor:
        """The rows of a value whose tokens count; all where they cannot be followed."""
        valid = self._calls[batch].valid
        return value if valid is None else self._valid_rows(node, value, valid, batch)

    def split(self, node: fx.Node, value: Tensor, batch: int, geometry: Geometry) -> tuple[Tensor, Tensor]:
        """The rows whose tokens count of the samples that are kept, and of the samples held out.

        Args:
            node: whose value it is.
            value: an input or the output of a layer.
            batch: index of its batch.
            geometry: of the layer.
        """
        assert self._holdout is not None
        samples, valid, kernel = self._samples[batch], self._calls[batch].valid, len(geometry.kernel)
        valid = valid if geometry.is_pointwise else None
        if samples is None or value.ndim < kernel + 2:
            return self._holdout.split(self.rows(node, value, batch)[None], batch)
        kept = self._holdout.kept(samples, batch)
        parts = self._followed_samples(node, value, batch, kept)
        if parts is None:
            parts = self._holdout.split(value, batch, samples, axes=1 if kernel else value.ndim - 1)
        if valid is None:
            return parts
        both = [self._valid_rows(node, part, masks, batch) for part, masks in
                zip(parts, (valid.of_samples(0, kept), valid.of_samples(kept, samples)), strict=True)]
        return both[0], both[1]

    def _valid_rows(self, node: fx.Node, value: Tensor, valid: TokenMasks, batch: int) -> Tensor:
        tokens = self._tokens[batch]
        covered: Covered = None if tokens is None else tokens[node]
        if tokens is not None and not isinstance(covered, Masked):
            return value
        rows = covered.rows(value, valid) if isinstance(covered, Masked) and valid.samples else None
        if rows is None and valid.samples:
            self.misfits.add(node)
        return value if rows is None else rows

    def _followed_samples(
        self, node: fx.Node, value: Tensor, batch: int, kept: int
    ) -> tuple[Tensor, Tensor] | None:
        layouts, axes = self._layouts[batch], self._axes[batch]
        covered = None if layouts is None else layouts[node]
        if not isinstance(covered, Masked) or axes is None or len(covered.layout.axes) != value.ndim:
            return None
        samples, tokens = axes.masks[covered.mask].shape
        ends = (0, kept), (kept, samples)
        first, last = (covered.layout.samples(value, *each, of=(samples, tokens)) for each in ends)
        return None if first is None or last is None else (first, last)

    @staticmethod
    def _axes_of(graph: CapturedGraph, call: Call) -> TokenMasks | None:
        """Tensors whose axes are the samples and tokens of a call; ``None`` if no input has two axes."""
        if call.valid is not None:
            return call.valid
        leaves = [leaf for leaf in input_leaves(graph.graph, call.args, call.kwargs) if isinstance(leaf, Tensor)]
        first = next((leaf for leaf in leaves if leaf.ndim > 1 and leaf.numel()), None)
        return None if first is None else TokenMasks.of(first.reshape(*first.shape[:2], -1)[..., 0])


def samples_of(call: Call) -> int | None:
    """Says how many samples a call has: the length of the first axis of the mask of tokens, else of the first input."""
    if call.valid is not None:
        return call.valid.samples
    tensors = [leaf for leaf in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)]
    return next((len(leaf) for leaf in tensors if leaf.ndim), None)
