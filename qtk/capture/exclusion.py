"""Excluded submodules, which stay in float, and so do their inputs: finds their names and labels the ops they run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import fx, nn

from qtk.capture.island_search import EXCLUDED as EXCLUDED_RUNG
from qtk.capture.prepared_model import REPORT, PreparedModel
from qtk.errors import CaptureError, ConfigError
from qtk.graph.graphs import graphs
from qtk.graph.sites import EXCLUDED, EXCLUDED_MODULE, GRAPH_PATH, add_labels, join, label, prefixes
from qtk.operators.targets import module_calls
from qtk.registry import nearest

BY_MODULES, BY_CONFIG = "modules_to_exclude", "exclude"
"""What excludes modules: the argument of ``prepare_model``, and the key of a config."""


def module_names(model: nn.Module, module: nn.Module | str) -> set[str]:
    """All names of one submodule of ``model``; a shared submodule has several.

    Raises: CaptureError if ``module`` is no submodule, with the nearest name.
    """
    known = dict(model.named_modules(remove_duplicate=False))
    wanted = module if isinstance(module, nn.Module) else known.get(module)
    names = {path for path, other in known.items() if other is wanted}
    if not names:
        what = repr(module) if isinstance(module, str) else f"a {type(module).__name__}"
        hint = f"; {nearest(module, known)}" if isinstance(module, str) else ""
        raise CaptureError(f"modules_to_exclude: {what} is no submodule of {type(model).__name__}{hint}")
    return names


def exclude(prepared: PreparedModel, excluded: Collection[set[str]]) -> Iterator[str]:
    """Labels the ops of excluded modules. Changes ``prepared``. Yields: a note for each module that runs no op.

    Args:
        prepared: a prepared model.
        excluded: the names of each module.
    """
    paths = set().union(*excluded)
    nodes = _nodes(prepared)
    _label(nodes, BY_MODULES, lambda path: path in paths)
    prepared.meta[REPORT] = replace(prepared.report, excluded=tuple(excluded_modules(prepared)))
    running = _running(prepared, nodes)
    yield from (f"{BY_MODULES}: {min(names)} runs no op" for names in excluded if names.isdisjoint(running))


def exclude_paths(prepared: PreparedModel, globs: Sequence[str]) -> None:
    """Labels the ops of the modules whose path matches one of ``globs``, and no others. Changes ``prepared``.

    Raises: ConfigError if no module that runs an op matches one of them, with the nearest.
    """
    nodes = _nodes(prepared)
    if not globs and not any(label(node, EXCLUDED) == BY_CONFIG for node in nodes):
        return
    running = _running(prepared, nodes)
    problems = [
        f"exclude: no op runs in a module at path {glob!r}; {nearest(glob.strip('*?'), filter(None, running))}"
        for glob in globs if not any(fnmatchcase(path, glob) for path in running)
    ]
    if problems:
        raise ConfigError("\n  ".join(problems))
    for node in nodes:
        if label(node, EXCLUDED) == BY_CONFIG:  # by an earlier config
            add_labels(node, **{EXCLUDED: ""})
    _label(nodes, BY_CONFIG, lambda path: any(fnmatchcase(path, glob) for glob in globs))
    prepared.meta[REPORT] = replace(prepared.report, excluded=tuple(excluded_modules(prepared)))


def excluded_modules(model: nn.Module) -> list[str]:
    """The paths of the excluded modules of a prepared model, in the order in which they run."""
    paths = [label(node, EXCLUDED_MODULE) for node in _nodes(model) if label(node, EXCLUDED)]
    parts = model.report.parts if isinstance(model, PreparedModel) else ()
    return list(dict.fromkeys(filter(None, [*paths, *(part.path for part in parts if part.rung == EXCLUDED_RUNG)])))


def _nodes(model: nn.Module) -> list[fx.Node]:
    return [node for module in graphs(model).values() for node in module.graph.nodes]


def _running(prepared: PreparedModel, nodes: Collection[fx.Node]) -> set[str]:
    """Paths of the modules that run an op or hold a part of the report, an unreached one too."""
    parts = {path for part in prepared.report.parts for path in prefixes(part.path)}
    return parts.union(*(_modules_around(node) for node in nodes))


def _label(nodes: Collection[fx.Node], by: str, is_excluded: Callable[[str], bool]) -> None:
    for node in nodes:
        path = None if label(node, EXCLUDED) else next(filter(is_excluded, _modules_around(node)), None)
        if path is not None:
            add_labels(node, **{EXCLUDED: by, EXCLUDED_MODULE: path})


def _modules_around(node: fx.Node) -> Iterator[str]:
    """Paths of the modules that contain ``node``, and their prefixes: a symbolic trace inlines the modules between."""
    for call in module_calls(node):
        yield from prefixes(join(label(node, GRAPH_PATH) or "", call.path))
