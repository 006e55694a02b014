"""The names that the quantized values of a model have in its float ONNX files, and so in AIMET's encodings files."""

from __future__ import annotations

from torch import fx, nn

from qtk.core.free_name import free_name
from qtk.export.file_signature import file_signature
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

    Values that nothing reads, and values of variants, are in no file.
    """
    graphs = roots(model)
    whole = graphs.get("")
    names: dict[str, str] = {}
    for graph in graphs.values() if whole is None else [whole]:
        signature = {} if whole is None else _named_sites(graph)
        names_of_file = file_signature(graph)
        taken = set() if whole is None else {*names_of_file.inputs, *names_of_file.outputs}
        for module in with_nested(graph):
            for node in quantizer_nodes(module):
                site = label(node, SITE)
                if site is None or not node.users:
                    continue
                name = signature.get(site) or free_name(site, taken)
                taken.add(name)
                names[name] = site
    return names


def _named_sites(graph: fx.GraphModule) -> dict[str, str]:
    """Site → name, of the inputs and outputs of a graph that are quantized where they are made."""
    signature = file_signature(graph)
    named: dict[str, str] = {}
    for name, node in signature.inputs.items():
        named |= {site: name for user in node.users if (site := _own_site(user)) is not None}
    for name, node in signature.outputs.items():
        site = _own_site(node)
        if site is not None and node.all_input_nodes[0].op not in ("placeholder", "get_attr"):
            named.setdefault(site, name)
    return named


def _own_site(node: fx.Node) -> str | None:
    """The site of a call of a quantizer, if that is the value it reads, and not an edge; else ``None``."""
    if quantizer_called(node) is None:
        return None
    (source,) = node.all_input_nodes
    site = label(node, SITE)
    return site if site == value_site(source).name else None
