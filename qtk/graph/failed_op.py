"""Which op of a captured graph raised an error."""

from __future__ import annotations

import functools
import linecache
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx

from qtk.graph.captured_graph import BOUND_NODES
from qtk.graph.evaluate import evaluate_node
from qtk.graph.sites import value_site
from qtk.public import BOUND_FILE, GRAPH_FILE


def failed_op(error: BaseException) -> str | None:
    """The site of the op that raised, and the tensors it was given; ``None`` if no captured graph was running."""
    found = list(_running(error))
    if not found:
        return None
    node, read = found[-1]
    inputs = [value for argument in node.all_input_nodes if isinstance(value := read(argument), Tensor)]
    return f"{value_site(node)} ({', '.join(map(_tensor_text, inputs))})" if inputs else str(value_site(node))


def _running(error: BaseException) -> Iterator[tuple[fx.Node, Callable[[fx.Node], Any]]]:
    """The nodes that were being evaluated, the outermost first, each with what reads the values of its arguments."""
    for frame, line in traceback.walk_tb(error.__traceback__):
        variables = frame.f_locals
        if frame.f_code is evaluate_node.__code__:
            if variables["node"].op != "get_attr":
                yield variables["node"], variables["read"]
            continue
        if frame.f_code.co_filename == BOUND_FILE:
            nodes, names = frame.f_globals[BOUND_NODES]
            if 0 <= line - 2 < len(nodes):  # below the signature, above the result
                yield nodes[line - 2], functools.partial(_value, names, frame)
            continue
        module = variables.get("self")
        if not isinstance(module, fx.GraphModule) or GRAPH_FILE not in frame.f_code.co_filename:
            continue
        name = linecache.getline(frame.f_code.co_filename, line).partition("=")[0].strip()
        node = next((node for node in module.graph.nodes if node.name == name), None)
        if node is not None:
            yield node, lambda argument, variables=variables: variables.get(argument.name)  # type: ignore[misc]


def _value(names: Mapping[fx.Node, str], frame: FrameType, node: fx.Node) -> object:
    """The value of a node in a bound graph, whose expression is a variable or the place of a member."""
    return eval(names[node], frame.f_globals, dict(frame.f_locals)) if node in names else None


def _tensor_text(tensor: Tensor) -> str:
    """Dtype and shape, and of integers, which may be indices, the range.

    >>> _tensor_text(torch.tensor([3, 30]))
    'int64 [2] of 3…30'
    """
    text = f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.")
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool or not tensor.numel():
        return text
    try:
        return f"{text} of {int(tensor.min())}…{int(tensor.max())}"
    except RuntimeError:  # after an assertion on a GPU, of a dtype without a minimum, on meta
        return text
