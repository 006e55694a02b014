"""Edits the captured graphs of a model by the names of its parameters and sites."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, fx, nn

from qtk.capture.holders import free_name, holder
from qtk.core.site import Site
from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.graphs import graphs
from qtk.graph.sites import join, value_site
from qtk.operators.lookup import row_of
from qtk.operators.targets import attribute
from qtk.transforms.named_tensors import NamedTensors


class GraphEditor:
    """The graphs of a model while steps edit them.

    ``members``: the parameters and buffers at construction.

    Args:
        model: a prepared model without quantizers.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.members = NamedTensors(model)
        self._changed: dict[int, CapturedGraph] = {}
        self._by_site: dict[Site, list[tuple[CapturedGraph, fx.Node]]] = {}
        self._by_weight: dict[str, list[tuple[CapturedGraph, fx.Node]]] = {}
        for graph in graphs(model).values():
            for node in graph.graph.nodes:
                if node.op in ("call_function", "call_module", "placeholder"):
                    self._by_site.setdefault(value_site(node), []).append((graph, node))
                if (weight := weight_parameter(node)) is not None and (name := self.name(weight)) is not None:
                    self._by_weight.setdefault(name, []).append((graph, node))

    def makers(self, site: Site) -> Iterator[tuple[CapturedGraph, fx.Node]]:
        """Graph and node of every op that makes the value of ``site``; the caller is about to edit them."""
        for graph, node in self._by_site.get(site, ()):
            self._changed[id(graph)] = graph
            yield graph, node

    def layers(self, weight: str) -> Iterator[tuple[CapturedGraph, fx.Node]]:
        """Graph and node of every layer with this weight; the caller is about to edit them."""
        for graph, node in self._by_weight.get(weight, ()):
            self._changed[id(graph)] = graph
            yield graph, node

    def name(self, node: fx.Node) -> str | None:
        """Name of the parameter that a ``get_attr`` node reads."""
        owner = node.graph.owning_module
        assert owner is not None
        tensor = attribute(owner, str(node.target))
        return self.members.name(tensor) if isinstance(tensor, Tensor) else None

    def close(self) -> None:
        """Recompiles what was edited."""
        for graph in self._changed.values():
            graph.graph.lint()
            graph.recompile()


def weight_parameter(node: fx.Node) -> fx.Node | None:
    """The parameter that a layer (convolution, linear, matrix product) multiplies its input with, as it is stored.

    ``None`` if ``node`` is no such layer, or its weight is computed.
    """
    row = row_of(node)
    if row is None or row.product is None or row.data_arg is None or node.op != "call_function":
        return None
    weight = node.args[row.data_arg + 1]
    return weight if isinstance(weight, fx.Node) and weight.op == "get_attr" else None


def read_parameter(graph: CapturedGraph, name: str, like: fx.Node, *, new: Tensor) -> fx.Node:
    """A node that reads the parameter called ``name``, which is added as ``new`` if the graph has none.

    Args:
        graph: the graph.
        name: path in the graph.
        like: a node that reads a parameter; the new one stands beside it, with the metadata of its op.
        new: the parameter to add.
    """
    present: fx.Node | None = next((n for n in graph.graph.find_nodes(op="get_attr") if n.target == name), None)
    if present is not None:
        next(n for n in graph.graph.nodes if n.op != "placeholder").prepend(present)
        return present
    owner, _, leaf = name.rpartition(".")
    module = holder(graph, owner)
    if module._parameters.get(leaf) is None:
        module.__dict__.pop(leaf, None)
        module._parameters[leaf] = new if isinstance(new, nn.Parameter) else nn.Parameter(new)
    with graph.graph.inserting_after(like):
        node = graph.graph.create_node("get_attr", name)
    node.meta = dict(like.meta)
    node.meta["val"] = like.meta["val"].fake_mode.from_tensor(module._parameters[leaf], static_shapes=True)
    return node


def add_module(graph: CapturedGraph, name: str, module: nn.Module) -> str:
    """Adds a submodule under ``name``, or the first free name with an ordinal behind it. Returns: its path."""
    target = free_name(graph, graph.target(name))
    owner, _, leaf = target.rpartition(".")
    holder(graph, owner).add_module(leaf, module)
    return target


def beside(path: str, leaf: str) -> str:
    """``leaf`` in the module that holds what ``path`` names."""
    return join(path.rpartition(".")[0], leaf)


def erase(node: fx.Node) -> None:
    """Erases a node without users, and the parameters that only it read."""
    arguments = node.all_input_nodes
    node.graph.erase_node(node)
    for argument in arguments:
        if argument.op == "get_attr" and not argument.users:
            argument.graph.erase_node(argument)
