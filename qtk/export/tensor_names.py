"""The names that the quantized values of a model have in its float ONNX files, and so in AIMET's encodings files."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, fx, nn

from qtk.capture.signature import output_nodes
from qtk.core.free_name import free_name
from qtk.graph.graphs import roots, with_nested
from qtk.graph.insert import quantizer_called, quantizer_nodes
from qtk.graph.sites import SITE, label, value_site


def tensor_names(model: nn.Module) -> dict[str, str]:
    """Name of an ONNX tensor → name of its site, for every quantized value that a file holds, in graph order.

    A value is named after its site; an input or output of a model of one graph as the model's signature says:

    >>> import qtk, torch
    >>> model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> tensor_names(qtk.QuantSim(model, torch.randn(2, 8)).model)  # doctest: +NORMALIZE_WHITESPACE
    {'0.weight': '0.weight', '2.weight': '2.weight', 'input': 'input:input', '1:out': '1:out', 'output': '2:out'}

    Values that nothing reads, and those of variants, are in no file.
    """
    graphs = roots(model)
    whole = graphs.get("")
    names: dict[str, str] = {}
    for graph in graphs.values() if whole is None else [whole]:
        signature = {} if whole is None else _named_sites(graph)
        taken = set() if whole is None else {name for names in signature_names(graph) for name in names}
        for module in with_nested(graph):
            for node in quantizer_nodes(module):
                site = label(node, SITE)
                if site is None or not node.users:
                    continue
                name = signature.get(site) or free_name(site, taken)
                taken.add(name)
                names[name] = site
    return names


def unique(names: Iterable[str]) -> list[str]:
    """The names, a repeated one with the first suffix ``_1``, ``_2``, … that is not in use.

    >>> unique(["x", "output", "x"])
    ['x', 'output', 'x_1']
    """
    given: list[str] = []
    for name in names:
        given.append(free_name(name, given))
    return given


def signature_names(graph: fx.GraphModule) -> tuple[list[str], list[str]]:
    """The names of the inputs of a graph that are tensors, and of its outputs."""
    inputs, outputs = [str(node.target) for node in _inputs(graph)], list(output_nodes(graph))
    given = unique([*inputs, *outputs])
    return given[:len(inputs)], given[len(inputs):]


def _named_sites(graph: fx.GraphModule) -> dict[str, str]:
    """Site → name, of the inputs and outputs of a graph that are quantized where they are made."""
    input_names, output_names = signature_names(graph)
    named: dict[str, str] = {}
    for node, name in zip(_inputs(graph), input_names, strict=True):
        named |= {site: name for user in node.users if (site := _own_site(user)) is not None}
    for node, name in zip(output_nodes(graph).values(), output_names, strict=True):
        site = _own_site(node)
        if site is not None and node.all_input_nodes[0].op not in ("placeholder", "get_attr"):
            named.setdefault(site, name)
    return named


def _inputs(graph: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph.graph.find_nodes(op="placeholder") if isinstance(node.meta.get("val"), Tensor)]


def _own_site(node: fx.Node) -> str | None:
    """The site of a call of a quantizer, if that is the value it reads, and not an edge; else ``None``."""
    if quantizer_called(node) is None:
        return None
    (source,) = node.all_input_nodes
    site = label(node, SITE)
    return site if site == value_site(source).name else None
