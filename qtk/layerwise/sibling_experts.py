"""Experts that are layers of their own: one layer in several branches, each on the rows that data choose for it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from torch import Tensor, fx, nn

from qtk.graph.graphs import graphs, roots
from qtk.graph.insert import quantizer_called
from qtk.graph.sites import is_float
from qtk.layerwise.weighted_layers import WeightedLayer
from qtk.operators.lookup import op_name, row_of
from qtk.operators.targets import attribute
from qtk.torch_private import has_length_hint


def sibling_experts(model: nn.Module, layers: Iterable[WeightedLayer]) -> list[list[WeightedLayer]]:
    """The groups of two or more layers that are the same layer of several experts, in graph order.

    Within a graph they are so if the ops between the choice of rows by data and the layer are the same; in islands if
    their whole graphs are, at the same place in the items of one ``ModuleList`` or ``ModuleDict``.
    """
    by_quantizer = {layer.quantizer: layer for layer in layers if layer.matrices is None}
    islands = {path for path in roots(model) if path}
    groups: dict[Hashable, dict[WeightedLayer, None]] = {}
    known, numbers = set[WeightedLayer](), dict[Hashable, int]()
    for path, graph in graphs(model).items():
        computations = _computations(graph, path, numbers, is_island=path in islands)
        for node in graph.graph.nodes:
            for layer in {by_quantizer[q]: None for read in node.all_input_nodes
                          if (q := _quantizer_behind(read)) in by_quantizer}:
                data = data_of(layer, node)
                if data is None or layer in known:
                    continue
                known.add(layer)
                place = (path,) if has_rows_by_data(data) else _place(model, path) if path in islands else None
                if place is not None:
                    key = place, computations[data], layer.geometry, layer.weight.shape, layer.quantizer.spec
                    groups.setdefault(key, {})[layer] = None
    return [list(group) for group in groups.values() if len(group) > 1]


def _place(model: nn.Module, path: str) -> tuple[str, str] | None:
    """The path of the innermost list of modules around ``path``, and the path within the item; ``None`` without one."""
    names = path.split(".")
    for end in range(len(names) - 1, -1, -1):
        container = ".".join(names[:end])
        if isinstance(model.get_submodule(container), (nn.ModuleList, nn.ModuleDict)):
            return container, ".".join(names[end + 1:])
    return None


def data_of(layer: WeightedLayer, op: fx.Node) -> fx.Node | None:
    """The value that ``op`` multiplies with the weight of ``layer``."""
    use, row = layer.uses.get(op), row_of(op)
    if use is not None:
        return use.data
    data = op.args[row.data_arg] if row is not None and row.data_arg is not None else None
    return data if isinstance(data, fx.Node) else None


def has_rows_by_data(node: fx.Node, *, is_float: bool = False) -> bool:
    """Says whether data decide a length of a value, as ``nonzero`` does; with ``is_float`` only of real numbers."""
    value = node.meta.get("val")
    tensors = [each for each in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(each, Tensor)]
    tensors = [each for each in tensors if each.is_floating_point() or not is_float]
    return any(not has_length_hint(length) for each in tensors for length in each.shape)


def chooses_rows(node: fx.Node) -> bool:
    """Says whether an op chooses rows of its operand by data: ``x[expert == 3]``."""
    return has_rows_by_data(node, is_float=True) and any(map(is_float, node.all_input_nodes)) and not any(
        has_rows_by_data(read, is_float=True) for read in node.all_input_nodes)


def _computations(
    graph: fx.GraphModule, path: str, numbers: dict[Hashable, int], *, is_island: bool
) -> dict[fx.Node, int]:
    """A number for the computation of every value of a graph: equal ones differ in parameters and chosen rows alone.

    Args:
        graph: the graph.
        path: its path.
        numbers: of all computations so far. Changed: the computations of this graph are added.
        is_island: whether inputs are the same as the inputs of other islands; else values whose rows data do not choose
            are as different as their ops.
    """
    found: dict[fx.Node, int] = {}
    for index, node in enumerate(graph.graph.nodes):
        if quantizer_called(node) is not None:
            found[node] = found[node.all_input_nodes[0]]
            continue
        key: Hashable = index if is_island else (path, index)
        if node.op == "get_attr":
            value = attribute(graph, str(node.target))
            key = ("parameter", tuple(value.shape)) if isinstance(value, Tensor) else key
        elif chooses_rows(node):
            key = "rows", op_name(node), *(found[read] for read in node.all_input_nodes if is_float(read))
        elif any(map(has_rows_by_data, node.all_input_nodes)) or (is_island and node.op.startswith("call")):
            arguments = fx.node.map_arg((node.args, node.kwargs), lambda read: f"%{found[read]}")
            key = op_name(node), repr(arguments)
        found[node] = numbers.setdefault(key, len(numbers))
    return found


def _quantizer_behind(node: fx.Node) -> nn.Module | None:
    """The quantizer of a weight that ops such as a transposition move."""
    while quantizer_called(node) is None and len(node.all_input_nodes) == 1 and node.op == "call_function":
        (node,) = node.all_input_nodes
    return quantizer_called(node)
