"""Opaque stand-ins that carry dropout and batch norm through functionalization.

Functionalization drops eval-mode dropout and splits batch norm into a native form that no longer trains. Before it
runs, those nodes are pointed at ops that it leaves whole; ``canonicalize`` turns them into modules afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

torch.library.define("qtk::captured_dropout", "(Tensor x, float p, bool train, str kind) -> Tensor")
torch.library.define(
    "qtk::captured_batch_norm",
    "(Tensor x, Tensor? weight, Tensor? bias, Tensor? mean, Tensor? var, bool train, float momentum, float eps, "
    "bool cudnn) -> Tensor",
)


@torch.library.impl("qtk::captured_dropout", "CompositeExplicitAutograd")
@torch.library.register_fake("qtk::captured_dropout")  # type: ignore[untyped-decorator]
def _dropout(x: Tensor, p: float, train: bool, kind: str) -> Tensor:
    return x.clone()


@torch.library.impl("qtk::captured_batch_norm", "CompositeExplicitAutograd")
@torch.library.register_fake("qtk::captured_batch_norm")  # type: ignore[untyped-decorator]
def _batch_norm(x: Tensor, *parameters: object) -> Tensor:
    return x.clone()


DROPOUT = torch.ops.qtk.captured_dropout.default
BATCH_NORM = torch.ops.qtk.captured_batch_norm.default
DROPOUT_KINDS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")


def mark(graph: fx.Graph) -> None:
    """Points dropout and batch norm nodes at the stand-ins; their names, which signatures refer to, stay."""
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        name = schema.name.removeprefix("aten::").removesuffix("_") if schema is not None else ""
        if name in DROPOUT_KINDS:
            node.target = DROPOUT
            node.args = (*node.args, name)
        elif name == "batch_norm":
            node.target = BATCH_NORM
