"""Which site an entry is about whose file was exported by torch's exporter of FX graphs (``dynamo=True``).

It names values as the graph does, ``relu_2``, and says in the metadata of each node which module and op made it.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable

import onnx_ir as ir

from qtk.aimet.onnx_names import ExportedName

SCOPES, CLASSES = "pkg.torch.onnx.name_scopes", "pkg.torch.onnx.class_hierarchy"
"""Metadata keys: paths of the modules that a node is in, then the name of its call; their classes, then the op."""


def exported_names(nodes: Iterable[ir.Node]) -> dict[str, ExportedName]:
    """Name of a value → the module, the op and its ordinal, of nodes that say so; in the order of the graph."""
    calls: dict[tuple[str, str], int] = {}
    counts: Counter[tuple[str, str]] = Counter()
    names: dict[str, ExportedName] = {}
    for node in nodes:
        scopes, classes = (_strings(node.metadata_props.get(key)) for key in (SCOPES, CLASSES))
        if len(scopes) < 2 or not classes or not classes[-1].startswith("aten."):
            continue
        (module, call), kind = scopes[-2:], classes[-1].split(".")[1]
        if (module, call) not in calls:  # a call may become several nodes
            calls[module, call] = counts[module, kind]
            counts[module, kind] += 1
        for index, value in enumerate(node.outputs):
            if value.name:
                names[value.name] = ExportedName(module, node.op_type, calls[module, call], index, kind)
    return names


def _strings(text: str | None) -> list[str]:
    """The list that a text is; empty if it is none of strings."""
    try:
        listed = ast.literal_eval(text or "")
    except (ValueError, SyntaxError):
        return []
    return listed if isinstance(listed, list) and all(isinstance(each, str) for each in listed) else []
