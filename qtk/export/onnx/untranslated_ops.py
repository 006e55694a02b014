"""Errors of an export: operators that ONNX has no operators for, settings that it holds fixed, and what to write."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import Tensor, fx
from torch.export import ExportedProgram

from qtk.core.site import Site
from qtk.errors import ExportError, QtkError, first_line
from qtk.graph.sites import OWNER, label, value_site
from qtk.operators.lookup import op_name
from qtk.torch_private import OpOverload, has_onnx_function, pytree, schema_of

LISTED = 3
"""Operators that an error lists."""

ATTRIBUTES = frozenset(("dilation", "groups", "kernel_size", "output_padding", "padding", "stride"))
"""Arguments of ATen ops that are attributes in ONNX."""

_REFUSED = "torch cannot express the model in ONNX"


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
        f"{_REFUSED}: no ONNX operators for {'; '.join(listed)}{more}; write this with "
        "operators that ONNX has, return what is computed so far and compute the rest outside of the model, or export "
        "formats=('pt2e',), a program that torch runs", missing)


def translation_error(
    error: Exception, program: ExportedProgram, decomposed: ExportedProgram, translated: Collection[object], opset: int
) -> ExportError:
    """The error to raise for one of torch's exporter: qtk's own where there is one, else what the program shows.

    Args: see ``untranslated``.
    """
    if isinstance(_cause(error), QtkError):
        return export_error(error, _REFUSED)
    missing = untranslated(program, decomposed, translated, opset)
    if missing is not None:
        return missing
    setting = _free_setting(program)
    return export_error(error, _REFUSED) if setting is None else ExportError(f"{_REFUSED}: {setting}")


def export_error(error: Exception, refused: str) -> ExportError:
    """The error to raise for one of torch: qtk's own text where qtk raised it, else ``refused`` and the first cause."""
    cause = _cause(error)
    return ExportError(str(cause) if isinstance(cause, QtkError) else f"{refused}: {first_line(cause)}")


def _cause(error: BaseException) -> BaseException:
    """The error of qtk behind an error, or the first one of all."""
    while error.__cause__ is not None and not isinstance(error, QtkError):
        error = error.__cause__
    return error


def _free_setting(program: ExportedProgram) -> str | None:
    """The settings of an op that depend on a free size, where ONNX has attributes; ``None`` if there are none."""
    for node in nodes_of(program):
        schema = schema_of(node.target)
        given = {} if schema is None else dict(zip((each.name for each in schema.arguments), node.args, strict=False))
        free = [name for name, value in {**given, **node.kwargs}.items()
                if name in ATTRIBUTES and any(isinstance(leaf, fx.Node) for leaf in pytree.tree_leaves(value))]
        if free:
            text = _text(value_site(node), node, {})
            return (f"{' and '.join(free)} of {text} depend{'s' if len(free) == 1 else ''} on a free size, which ONNX "
                    "holds fixed; prepare the model with dynamic_shapes=None")
    return None


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
