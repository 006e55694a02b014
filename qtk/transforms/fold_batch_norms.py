"""Folds batch norms: into the layer before, the layers behind, a layer and a sum, or into a scale and a shift.

A batch norm in eval mode is y = x · scale + shift per channel, with scale = γ / √(var + eps) and
shift = β − mean · scale (Jacob et al., arXiv:1712.05877, §3.2).

1. Into the layer before it, W' = scale · W and b' = scale · b + shift, if the batch norm alone reads its output,
   through data movement at most, and every use of the weight is followed by the same batch norm.
2. Into the layers behind it, W' = W · scale and b' = b + W · shift, if they alone read its output, are the only ones
   that use their weights, and nothing is padded: padding is 0 in front of the batch norm's shift, not behind it.
3. Behind a rectifier its scale goes into the layer in front of that, and a sum with its shift is left, where layers
   behind take up the signs of negative scales, or no scale is negative (``fold_rectified_step``).
4. Else it becomes a scale and a shift, under the names of its weight and bias.

A batch norm that normalises by the statistics of the batch is left.
"""

from __future__ import annotations

from collections.abc import Sequence

from qtk.calls.calls import Call
from qtk.capture.prepared_model import PreparedModel
from qtk.core.site import Site
from qtk.graph.graphs import graphs
from qtk.operators.targets import attribute
from qtk.transforms.fold_batch_norm_step import FoldBatchNorm, Into, owner_of
from qtk.transforms.foldable_batch_norms import foldable_batch_norms
from qtk.transforms.named_tensors import NamedTensors
from qtk.transforms.proof import rewrite
from qtk.transforms.result import TransformResult
from qtk.transforms.snapshot import unchanged_on_error
from qtk.transforms.steps import RemoveParameters, make, steps_of


def fold_batch_norms(model: PreparedModel, call: Call) -> TransformResult:
    """Folds every batch norm of a prepared model without quantizers, each proved on the example inputs.

    Changes ``model``; parameters are replaced, not written to. The parameters of folded batch norms are removed.

    Args:
        model: the model.
        call: the example inputs.
    """
    with unchanged_on_error(model):
        made = len(steps_of(model))
        groups = foldable_batch_norms(model)
        result = rewrite(
            model, call, groups, transform="fold_batch_norms", nothing="the model has no batch norm to fold"
        )
        names = unread(model, [step for step in steps_of(model)[made:] if isinstance(step, FoldBatchNorm)])
        make(model, [RemoveParameters(names)] if names else [])
    return result


def folded_sites(model: PreparedModel) -> dict[Site, str]:
    """The values of batch norms that were folded into layers, each with where they went."""
    folds = [step for step in steps_of(model) if isinstance(step, FoldBatchNorm)
             and step.into in (Into.PRODUCER, Into.CONSUMERS)]
    return {
        site: f"folded into {', '.join(owner_of(layer.weight) for layer in step.layers)}"
        for step in folds for site in step.calls
    }


def unread(model: PreparedModel, steps: Sequence[FoldBatchNorm]) -> tuple[str, ...]:
    """Names of the parameters and statistics of folded batch norms that no graph reads any more."""
    members = NamedTensors(model)
    names = dict.fromkeys(name for step in steps for name in step.tensors if name in members)
    read = {
        members.name(attribute(graph, str(node.target)))
        for graph in graphs(model).values() for node in graph.graph.find_nodes(op="get_attr")
    }
    return tuple(name for name in names if name not in read)
