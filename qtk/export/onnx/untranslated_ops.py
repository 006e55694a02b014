"""Operators that ONNX has no operators for: which a program holds, and what its user can write instead."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import Tensor, fx
from torch.export import ExportedProgram

from qtk.core.site import Site
from qtk.errors import ExportError
from qtk.graph.sites import OWNER, label, value_site
from qtk.operators.lookup import op_name
from qtk.torch_private import OpOverload, has_onnx_function

LISTED = 3
"""Operators that an error lists."""


class UntranslatedError(ExportError):
    """Names the operators that torch's exporter has no translation of.

    Args:
        message: the text.
        sites: the values that the operators make.
    """

    def __init__(self, message: str, sites: Collection[Site]) -> None:
        super().__init__(message)
        self.sites = frozenset(sites)


def nodes_of(program: ExportedProgram) -> Iterator[fx.Node]:
    """The nodes of a program and of the graphs inside it."""
    for module in program.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            yield from module.graph.nodes


def untranslated(
    program: ExportedProgram, decomposed: ExportedProgram, translated: Collection[object], opset: int
) -> UntranslatedError | None:
    """The error that names the operators without translation; ``None`` if there are none.

    Args:
        program: the program as it was traced.
        decomposed: the program as torch's exporter would translate it.
        translated: operators that qtk translates.
        opset: the ONNX operator set.
    """
    missing: dict[Site, fx.Node] = {}
    for node in nodes_of(decomposed):
        if isinstance(node.target, OpOverload) and node.target not in translated and not has_onnx_function(
                node.target, opset, is_complex=reads_complex(node)):
            missing.setdefault(value_site(node), node)
    if not missing:
        return None
    written = {value_site(node): op_name(node) for node in nodes_of(program) if isinstance(node.target, OpOverload)}
    listed = [_text(site, node, written) for site, node in list(missing.items())[:LISTED]]
    more = f"; and {len(missing) - LISTED} more" if len(missing) > LISTED else ""
    return UntranslatedError(
        f"torch cannot express the model in ONNX: no ONNX operators for {'; '.join(listed)}{more}; write this with "
        "operators that ONNX has, return what is computed so far and compute the rest outside of the model, or export "
        "formats=('pt2e',), a program that torch runs", missing)


def is_complex(node: object) -> bool:
    """Says whether a node makes complex numbers."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, Tensor) and value.is_complex()


def reads_complex(node: fx.Node) -> bool:
    """Says whether an op reads complex numbers."""
    return any(map(is_complex, node.all_input_nodes))


def _text(site: Site, node: fx.Node, written: dict[Site, str]) -> str:
    name = op_name(node)
    op = written.get(site, name)
    numbers = " of complex numbers" if reads_complex(node) else ""
    owner = label(node, OWNER)
    made = "" if op == name else f", which is made of {name}"
    return f"{op}{numbers} ({site}, in {f'module {owner}' if owner else 'the model'}{made})"
