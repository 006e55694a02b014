"""Digest of what a captured model computes, whatever its numbers: ops, their arguments and how they are connected."""

from __future__ import annotations

import hashlib
from types import FunctionType

import torch
from torch import fx, nn

from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.graphs import graphs
from qtk.graph.insert import quantizer_called
from qtk.operators.targets import batch_norm_called, called_module, kept_batch_norm_called, train_only_called


def arithmetic_digest(model: nn.Module) -> str:
    """Equal for models that compute the same function of inputs and parameters, op by op; quantizers do not count.

    >>> import qtk
    >>> x, linear = torch.randn(2, 4), nn.Linear(4, 4)
    >>> relu, gelu = (qtk.prepare_model(nn.Sequential(linear, act), x) for act in (nn.ReLU(), nn.GELU()))
    >>> again = qtk.prepare_model(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), x)
    >>> arithmetic_digest(relu) == arithmetic_digest(again), arithmetic_digest(relu) == arithmetic_digest(gelu)
    (True, False)

    Devices do not count either. Another version of torch may capture a model otherwise.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path, graph in graphs(model).items():
        digest.update(f"{path}\n".encode())
        for line in _lines(graph):
            digest.update(f"{line}\n".encode())
    return digest.hexdigest()


def _lines(graph: CapturedGraph) -> list[str]:
    """One line for each node, which other nodes are named in by its number."""
    names: dict[fx.Node, str] = {}
    lines: list[str] = []
    for node in graph.graph.nodes:
        if quantizer_called(node) is not None:
            names[node] = names[node.all_input_nodes[0]]
            continue
        names[node] = f"%{len(lines)}"
        args = fx.node.map_arg((node.args, node.kwargs), lambda read: _Name(names[read]))
        lines.append(f"{node.op} {_target(node)} {_text(args)}")
    return lines


class _Name(str):
    """The number of a node, whose text has no quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _target(node: fx.Node) -> str:
    if node.op == "placeholder":
        return ""
    if (norm := batch_norm_called(node)) is not None:
        return f"batch_norm eps={norm.eps}"
    if (norm := kept_batch_norm_called(node)) is not None:
        return f"kept_batch_norm eps={norm.eps}"
    if train_only_called(node) is not None:  # in eval mode all are the same
        return "train_only"
    if isinstance(node.target, FunctionType):  # whose text has its address
        return node.target.__qualname__
    module = called_module(node)
    if module is None or isinstance(module, CapturedGraph):
        return str(node.target)
    return f"{node.target} {type(module).__name__}({module.extra_repr()})"


def _text(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, dict):
        return f"({', '.join(f'{key}={_text(each)}' for key, each in value.items())})"
    return "device" if isinstance(value, torch.device) else repr(value)
