"""States of a model: inputs that are outputs of the call before, as of a recurrent net that runs on a stream."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from torch import Tensor, fx, nn

from qtk.calls.inputs import is_free
from qtk.calls.signature import input_nodes, output_nodes
from qtk.core.site import Site
from qtk.errors import ConfigError
from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.graphs import STATES, returned_states, roots, states_of
from qtk.graph.sites import value_site
from qtk.registry import nearest
from qtk.torch_private import length_when


def set_states(model: nn.Module, states: Mapping[str, int | str]) -> None:
    """Makes inputs of a prepared model states, and what its variants return of them too.

    Args:
        model: a model captured as one graph, with or without variants.
        states: name of an input → the output that it is in the next call, by its name or its index among all tensors.
            The tensors of a nested input (``past``, a list of keys and values) pair with the tensors of a nested
            output, or with as many from the index on: by their places in it, where these are the same, else in order.

    Raises: ConfigError for an input or output that does not exist, an output of another dtype than its input or of
        another shape (but along a free axis that grows, as of a cache), one named twice, or a model of several graphs.
    """
    if not states:
        return
    graph = roots(model).get("")
    if not isinstance(graph, CapturedGraph):
        raise ConfigError(f"states {dict(states)} need a model that is captured as one graph; this one has Python "
                          "between its graphs: print(model.report) says why")
    outputs = output_nodes(graph)
    names, resolved = [*outputs], dict[str, int]()
    for node, index in (pair for name, output in states.items() for pair in _pairs(graph, name, output)):
        name = str(node.target)
        taken = next((other for other, each in resolved.items() if each == index), None)
        if taken is not None:
            raise ConfigError(f"states: {name!r} and {taken!r} are both output {index} ({names[index]}); an "
                              "output is the next value of one input")
        if not _fits(node, outputs[names[index]]):
            raise ConfigError(f"states: input {name!r} is {_shown(node)}, output {index} ({names[index]}) is "
                              f"{_shown(outputs[names[index]])}; a state has the shape and dtype of the output that it "
                              'takes, but along an axis that grows and is free (dynamic_shapes="all")')
        resolved[name] = index
    graph.meta[STATES] = resolved
    for variant in graph.variants.values():
        theirs = [*output_nodes(variant)]
        variant.meta[STATES] = {
            name: theirs.index(names[index]) for name, index in resolved.items() if names[index] in theirs
        }


def grown_axes(graph: CapturedGraph) -> dict[str, tuple[int, ...]]:
    """Name of a state that the graph takes → axes along which it returns another length."""
    outputs = [*output_nodes(graph).values()]
    inputs = {str(node.target): node for node in input_nodes(graph).values()}
    return {
        name: tuple(axis for axis, (given, returned) in enumerate(_sizes(inputs[name], outputs[index]))
                    if given != returned and _is_in_sum(given, returned))
        for name, index in returned_states(graph).items() if name in inputs
    }


def proposed_states(model: nn.Module) -> dict[Site, dict[str, int]]:
    """Site of an input that is no state yet → what to say, where one output alone may be its next value.

    Of the outputs that fit it, and that the graph computes from it and from another input, that is the output with its
    name, or, of a graph that returns something else too, the output in the same place, if there are as many as such
    inputs.
    """
    graph = roots(model).get("")
    if graph is None:
        return {}
    states = states_of(model)
    nodes = {str(node.target): node for node in input_nodes(graph).values()}
    inputs = [name for name in nodes if name not in states]
    returned = output_nodes(graph)
    outputs = [(index, name, node) for index, (name, node) in enumerate(returned.items())
               if index not in states.values()]
    read = {node: _inputs_of(node) for *_, node in outputs}
    proposed: dict[Site, dict[str, int]] = {}
    for name in inputs:
        fitting = [(index, output, node) for index, output, node in outputs
                   if _fits(nodes[name], node) and nodes[name] in read[node] and len(read[node]) > 1]
        same_kind = [other for other in inputs if all(_fits(nodes[other], node) for *_, node in fitting)]
        by_name = [index for index, output, _ in fitting if name == output.rpartition(".")[2]]
        is_paired = len(fitting) == len(same_kind) and len(returned) > 1
        by_place = [fitting[same_kind.index(name)][0]] if fitting and is_paired else []
        if chosen := by_name or by_place:
            proposed[value_site(nodes[name])] = {name: chosen[0]}
    return proposed


def _inputs_of(node: fx.Node) -> set[fx.Node]:
    """The inputs that a value is computed from."""
    found, pending = set[fx.Node](), [node]
    while pending:
        each = pending.pop()
        if each not in found:
            found.add(each)
            pending += each.all_input_nodes
    return {each for each in found if each.op == "placeholder"}


def _pairs(graph: CapturedGraph, name: str, output: int | str) -> Iterable[tuple[fx.Node, int]]:
    """Each tensor of an input, and the index of the output that it is the next time."""
    inputs, outputs = input_nodes(graph), [*output_nodes(graph)]
    taken = {path: node for path, node in inputs.items() if name == str(node.target) or _is_in(path, name)}
    if not taken:
        raise ConfigError(f"states: {name!r} is no input that is a tensor; "
                          f"{nearest(name, [str(node.target) for node in inputs.values()])}")
    returned = _returned(name, output, outputs, len(taken))
    if len(returned) != len(taken):
        raise ConfigError(f"states: {name!r} holds {len(taken)} tensors ({', '.join(taken)}), {output!r} "
                          f"{len(returned)} ({', '.join(returned)}); they pair one by one")
    places, theirs = _places(taken), _places(returned)
    order = [theirs.index(place) for place in places] if {*places} == {*theirs} else range(len(returned))
    return [(node, outputs.index(returned[at])) for node, at in zip(taken.values(), order, strict=True)]


def _returned(name: str, output: int | str, outputs: list[str], count: int) -> list[str]:
    """The names of the outputs that ``output`` names."""
    if isinstance(output, str):
        found = [output] if output in outputs else [each for each in outputs if _is_in(each, output)]
        if not found:
            raise ConfigError(f"states: {name!r}: {output!r} is no output; {nearest(output, outputs)}")
        return found
    if not 0 <= output < len(outputs):
        shown = ", ".join(f"{index} ({each})" for index, each in enumerate(outputs))
        raise ConfigError(f"states: {name!r}: there is no output {output}; the outputs are {shown}")
    return outputs[output:output + count]


def _is_in(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}.")


def _places(paths: Iterable[str]) -> list[tuple[str, ...]]:
    """Returns what is left of dotted paths without the beginning that all share."""
    split = [path.split(".") for path in paths]
    shared = next((depth for depth, names in enumerate(zip(*split, strict=False)) if len({*names}) > 1), 0)
    return [tuple(parts[shared:]) for parts in split]


def _fits(given: fx.Node, returned: fx.Node) -> bool:
    """Says whether an output may be the next value of an input.

    Its sizes are equal, but that a free length may become a sum with it, or be in all calls what it is in the example.
    """
    mine, theirs = given.meta["val"], returned.meta["val"]
    return mine.dtype == theirs.dtype and mine.ndim == theirs.ndim and all(
        before == after or (is_free(size) and (_is_in_sum(before, after) or str(length_when(size, {})) == after))
        for size, (before, after) in zip(mine.shape, _sizes(given, returned), strict=True)
    )


def _is_in_sum(before: str, after: str) -> bool:
    return before in re.findall(r"\w+", after)


def _sizes(given: fx.Node, returned: fx.Node) -> list[tuple[str, str]]:
    return [(str(before), str(after)) for before, after in zip(
        given.meta["val"].shape, returned.meta["val"].shape, strict=True)]


def _shown(node: fx.Node) -> str:
    value = node.meta["val"]
    assert isinstance(value, Tensor)
    return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(str(size) for size in value.shape)}]"
