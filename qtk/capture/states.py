"""States of a model: inputs that are outputs of the call before, as of a recurrent net that runs on a stream."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, fx, nn

from qtk.capture.signature import output_nodes
from qtk.core.site import Site
from qtk.errors import ConfigError
from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.graphs import roots
from qtk.graph.sites import value_site
from qtk.registry import nearest

STATES = "qtk_states"
"""Key of the ``meta`` of a graph: name of an input → index of the output that it is the next time."""


def set_states(model: nn.Module, states: Mapping[str, int | str]) -> None:
    """Makes inputs of a prepared model states.

    Args:
        model: a model captured as one graph.
        states: name of an input → the output that it is in the next call, by its name or its index among all tensors.

    Raises: ConfigError for an input or output that does not exist, an output of another shape or dtype than its input,
        one named twice, or a model of several graphs.
    """
    if not states:
        return
    graph = roots(model).get("")
    if not isinstance(graph, CapturedGraph):
        raise ConfigError(f"states {dict(states)} need a model that is captured as one graph; this one has Python "
                          "between its graphs: print(model.report) says why")
    placeholders = graph.graph.find_nodes(op="placeholder")
    inputs = {str(node.target): node for node in placeholders if isinstance(node.meta.get("val"), Tensor)}
    outputs = output_nodes(graph)
    resolved: dict[str, int] = {}
    for name, output in states.items():
        if name not in inputs:
            raise ConfigError(f"states: {name!r} is no input that is a tensor; {nearest(name, list(inputs))}")
        index = _index(name, output, list(outputs))
        taken = next((other for other, each in resolved.items() if each == index), None)
        if taken is not None:
            raise ConfigError(f"states: {name!r} and {taken!r} are both output {index} ({[*outputs][index]}); an "
                              "output is the next value of one input")
        given, returned = (_shown(node) for node in (inputs[name], [*outputs.values()][index]))
        if given != returned:
            raise ConfigError(f"states: input {name!r} is {given}, output {index} ({[*outputs][index]}) is {returned}; "
                              "a state has the shape and dtype of the output that it takes")
        resolved[name] = index
    graph.meta[STATES] = resolved


def states_of(model: nn.Module) -> dict[str, int]:
    """Name of an input → index of the output that it is in the next call; empty if the model has no states."""
    graph = roots(model).get("")
    return {} if graph is None else dict(graph.meta.get(STATES, {}))


def proposed_states(model: nn.Module) -> dict[Site, dict[str, int]]:
    """Site of an input that is no state yet → what to say, where one output alone may be its next value.

    Of the outputs of its shape and dtype that is the one with its name, or the one in the same place, if there are as
    many of them as of such inputs.
    """
    graph = roots(model).get("")
    if graph is None:
        return {}
    states = states_of(model)
    nodes = {str(node.target): node for node in graph.graph.find_nodes(op="placeholder")}
    inputs = [name for name, node in nodes.items() if name not in states and isinstance(node.meta.get("val"), Tensor)]
    outputs = [(index, name) for index, name in enumerate(output_nodes(graph)) if index not in states.values()]
    shown = {name: _shown(node) for name, node in output_nodes(graph).items()}
    proposed: dict[Site, dict[str, int]] = {}
    for name in inputs:
        fitting = [(index, output) for index, output in outputs if shown[output] == _shown(nodes[name])]
        alike = [other for other in inputs if _shown(nodes[other]) == _shown(nodes[name])]
        by_name = [index for index, output in fitting if name == output.rpartition(".")[2]]
        by_place = [index for index, _ in fitting][alike.index(name):][:1] if len(fitting) == len(alike) else []
        if chosen := by_name or by_place:
            proposed[value_site(nodes[name])] = {name: chosen[0]}
    return proposed


def _index(name: str, output: int | str, outputs: list[str]) -> int:
    if isinstance(output, str):
        if output not in outputs:
            raise ConfigError(f"states: {name!r}: {output!r} is no output; {nearest(output, outputs)}")
        return outputs.index(output)
    if not 0 <= output < len(outputs):
        shown = ", ".join(f"{index} ({each})" for index, each in enumerate(outputs))
        raise ConfigError(f"states: {name!r}: there is no output {output}; the outputs are {shown}")
    return output


def _shown(node: fx.Node) -> str:
    value = node.meta["val"]
    return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(str(size) for size in value.shape)}]"
