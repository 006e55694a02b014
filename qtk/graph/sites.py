"""Stable names for the values of a captured graph.

A node carries its owner and op as labels: strings in ``meta["custom"]``, the only metadata that survives re-export and
saving. Deep copies share that dict, so it is replaced, never written into.
"""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx

from qtk.core.site import Site
from qtk.graph.written_buffers import is_state
from qtk.operators.lookup import row_of
from qtk.operators.op_row import OpRow, Role
from qtk.operators.targets import module_calls, path_of

OWNER, OP, SITE = "qtk_owner", "qtk_op", "qtk_site"
"""Label keys: path of the module that calls an op, the op's name in it, the site of a quantizer call."""

VALUE = "qtk_value"
"""Label key of a node whose value has another site than its op has."""

EXCLUDED, EXCLUDED_MODULE = "qtk_excluded", "qtk_excluded_module"
"""Label keys of ops in excluded modules: what excluded the module, and its path."""

BY_SCAN = "scan"
"""What excludes a scan, which is no module."""

GRAPH_PATH, COMPOSITE = "qtk_place", "qtk_within"
"""Label keys of every node of a nested graph: the module path of the graph; the name by which config rules match all
ops inside the composite it belongs to (``lstm_cell``)."""


def add_labels(node: fx.Node, **labels: str) -> None:
    """Stores strings in the metadata of ``node``, in a new dict: deep copies share the old one."""
    node.meta["custom"] = {**(node.meta.get("custom") or {}), **labels}


def label(node: fx.Node, key: str) -> str | None:
    """The string that ``add_labels`` stored under ``key``, ``None`` if there is none."""
    value = (node.meta.get("custom") or {}).get(key)
    return value if isinstance(value, str) else None


def exclusion(node: fx.Node) -> str | None:
    """Says why ``node`` stays in float, if it is a scan, or an op of an excluded module; else ``None``."""
    by = label(node, EXCLUDED)
    if by == BY_SCAN:
        return "a scan over time, which is one op in float"
    return f"excluded by {by}: {label(node, EXCLUDED_MODULE) or 'the model'}" if by else None


def name_sites(graph: fx.Graph, graph_path: str = "", composite: str = "") -> None:
    """Labels every op node with its owner and op name, from the module stack recorded at capture.

    The only op of a module gets an empty op name, so that its site is the module's path; others are numbered inside
    their owner: ``add``, ``add_1``. The owner of the second call of a module is ``path@1``.

    Args:
        graph: the graph of a model, or a nested graph.
        graph_path: module path of a nested graph.
        composite: the name by which config rules match the composite around a nested graph.
    """
    owners = {node: join(graph_path, owner) for node, owner in _owners(graph).items()}
    labels = {key: text for key, text in ((GRAPH_PATH, graph_path), (COMPOSITE, composite)) if text}
    for node in graph.nodes if labels else ():
        add_labels(node, **labels)
    ops_of: dict[str, list[fx.Node]] = defaultdict(list)
    for node, owner in owners.items():
        ops_of[owner].append(node)
    parents = {parent for owner in ops_of for parent in _ancestors(owner)}
    for owner, nodes in ops_of.items():
        makers = [node for node in nodes if _makes_values(node) and not _is_creation(node)]
        single = makers[0] if len(makers) == 1 and owner and owner not in parents else None
        counts: dict[str, int] = defaultdict(int)
        for node in nodes:
            op = ""
            while node is not single and (not op or join(owner, op) in ops_of):  # a module may be called "add" too
                kind = op_kind(node)
                op = f"{kind}_{counts[kind]}" if counts[kind] else kind
                counts[kind] += 1
            add_labels(node, **{OWNER: owner, OP: op})


def join(path: str, name: str) -> str:
    """``path.name``; either may be empty."""
    return ".".join(filter(None, (path, name)))


def prefixes(path: str) -> list[str]:
    """A module path and the paths of the modules around it, the outermost, ``""``, first.

    >>> prefixes("blocks.0.attn")
    ['', 'blocks', 'blocks.0', 'blocks.0.attn']
    """
    names = path.split(".")
    return [".".join(names[:depth]) for depth in range(len(names) + 1 if path else 1)]


def value_site(node: fx.Node) -> Site:
    """The site of the value that ``node`` produces."""
    if (fields := label(node, VALUE)) is not None:
        return Site(*fields.split("\n"))
    if node.op == "get_attr":
        return Site.parameter(join(label(node, GRAPH_PATH) or "", path_of(node.target)))
    if is_state(node):
        return replace(value_site(node.args[0]), port="input")  # type: ignore[arg-type]
    if node.op == "placeholder":
        return Site(label(node, GRAPH_PATH) or "", str(node.target), "input")
    if node.target is operator.getitem:
        source, index = node.args
        if isinstance(source, fx.Node) and not _is_movement(source):
            return Site(label(source, OWNER) or "", label(source, OP) or "", f"out[{index}]")
    return Site(label(node, OWNER) or "", label(node, OP) or "", "out")


def set_value_site(node: fx.Node, site: Site | None) -> None:
    """Gives the value of ``node`` a site of its own, or with ``None`` the site of its op again."""
    others = {key: text for key, text in (node.meta.get("custom") or {}).items() if key != VALUE}
    node.meta["custom"] = others if site is None else {**others, VALUE: "\n".join((site.owner, site.op, site.port))}


def edge_site(port: Port) -> Site:
    """The site on the edge into one input of an op."""
    return Site(label(port.user, OWNER) or "", label(port.user, OP) or "", f"in[{port.index}]")


@dataclass(frozen=True, slots=True)
class Port:
    """One tensor argument of an op: ``user.args[arg]`` or, in a list, ``user.args[arg][item]``."""

    user: fx.Node
    arg: int
    item: int | None
    index: int
    value: fx.Node


def ports(node: fx.Node) -> Iterator[Port]:
    """The tensor arguments of ``node`` in order, with the index of their edge site."""
    index = 0
    for arg, value in enumerate(node.args):
        listed = isinstance(value, (list, tuple))
        for item, element in enumerate(value if isinstance(value, (list, tuple)) else [value]):
            if isinstance(element, fx.Node) and isinstance(element.meta.get("val"), torch.Tensor):
                yield Port(node, arg, item if listed else None, index, element)
                index += 1


def is_float(node: fx.Node) -> bool:
    """Says whether the value of ``node`` is a tensor of real numbers, so that it can be quantized."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _makes_values(node: fx.Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    floats = any(isinstance(v, torch.Tensor) and v.is_floating_point() for v in values)
    return floats and not _is_movement(node)


def _is_movement(node: fx.Node) -> bool:
    row: OpRow | None = row_of(node)
    return row is not None and row.role is Role.MOVEMENT


def _is_creation(node: fx.Node) -> bool:
    row = row_of(node)
    return row is not None and row.role is Role.CREATE


def op_kind(node: fx.Node) -> str:
    row = row_of(node)
    if row is not None:
        return row.kind
    name = re.sub(r"\W", "_", getattr(node.target, "__name__", str(node.target)).partition(".")[0])
    return name if node.meta.get("val") is not None and _makes_values(node) else f"sym_{name}"


def _owners(graph: fx.Graph) -> dict[fx.Node, str]:
    """Owner path of every op node; calls of one module are told apart by the keys of the module stack."""
    calls: dict[str, dict[tuple[str, ...], int]] = defaultdict(dict)
    owners = {}
    for node in graph.nodes:
        if node.op not in ("call_function", "call_module"):
            continue
        around = module_calls(node)
        path = around[-1].path if around else ""
        call = calls[path].setdefault(tuple(each.key for each in around), len(calls[path]))
        owners[node] = f"{path}@{call}" if call and path else path
    return owners


def _ancestors(owner: str) -> Iterator[str]:
    while "." in owner:
        owner = owner.rpartition(".")[0]
        yield owner
