"""Searches the modules of a model that is no one graph for modules that are: islands in its own Python.

Each module that the model calls is tried from the first rung of the ladder on, with the inputs it was called with; one
that is no graph keeps its code (``python``), and the modules that it calls are tried, or it is left as it is
(``opaque``). Modules that the example inputs do not call stay as they are and are listed (``not called``); QuantSim
refuses them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

from torch import nn

from qtk.calls.call_recording import record_calls
from qtk.calls.calls import Call
from qtk.calls.served_sizes import axis_text
from qtk.calls.signature import Kind, call_kind, signature_of
from qtk.capture.fallback import Surroundings, capture_graph
from qtk.capture.free_shapes import DynamicShapes
from qtk.capture.prepare_report import UNCALLED, Part, PrepareReport
from qtk.capture.prepared_model import REPORT, SHAPES, PreparedGraph, PreparedTree
from qtk.capture.restored import restored
from qtk.capture.train_mode.train_only import TrainOnly
from qtk.capture.tree import with_islands
from qtk.capture.variants import add_variant
from qtk.capture.varying_axes import varying_axes
from qtk.capture.verify_prepared import RunResult, eval_difference
from qtk.errors import OUT_OF_MEMORY, CaptureError, QtkError, VerificationError, first_line
from qtk.graph.sites import prefixes

MAX_KINDS = 4
"""Largest number of kinds of calls for which one module gets a graph each."""

PYTHON, OPAQUE, EXCLUDED = "python", "opaque", "excluded"


def capture_tree(
    model: nn.Module,
    calls: Sequence[Call],
    dynamic_shapes: DynamicShapes,
    reason: CaptureError,
    *,
    expected: Sequence[RunResult],
    train_only: TrainOnly = MappingProxyType({}),
    excluded: Collection[str] = (),
) -> PreparedTree:
    """Keeps the Python of ``model`` and captures the modules it calls as islands.

    Args:
        model: the module.
        calls: the calls that it must compute.
        dynamic_shapes: see ``capture``.
        reason: why it cannot be one graph.
        expected: the outcome of each call.
        train_only: the modules in ``model`` that act in train mode only.
        excluded: paths of modules that stay as they are.

    Raises: VerificationError if the result differs from the model although no single island does, or the model differs
        from itself when run twice.
    """
    search = _IslandSearch(model, calls, None if dynamic_shapes is None else "all", excluded, train_only)
    with restored(model):  # the whole model: a submodule may write to modules around it
        search.inside(model, "", [*calls], reason)
    search.note_uncalled(model)
    while True:
        tree = PreparedTree(with_islands(model, search.islands))
        try:
            with _uncalled(search.islands) as uncalled:
                difference = max(eval_difference(model, tree, call.args, call.kwargs, expected=outcome)
                                 for call, outcome in zip(calls, expected, strict=True))
        except OUT_OF_MEMORY:
            raise
        except Exception as error:
            with restored(model):
                search.replace(_culprit(model, search.islands, calls, error), error)
            continue
        if not uncalled:
            break
        search.leave(uncalled)
    tree.meta[REPORT], tree.meta[SHAPES] = search.report(model, difference), dynamic_shapes
    return tree


class _IslandSearch:
    """The search for islands: the islands captured so far, and one ``Part`` for every module that was tried."""

    def __init__(
        self, model: nn.Module, calls: Sequence[Call], dynamic_shapes: DynamicShapes, excluded: Collection[str],
        train_only: TrainOnly,
    ) -> None:
        self.model, self.model_calls = model, calls
        self.dynamic_shapes = dynamic_shapes
        self.train_only = train_only
        self.excluded = frozenset(excluded)
        self.paths = {module: path for path, module in reversed(list(model.named_modules(remove_duplicate=False)))}
        self.islands: dict[nn.Module, PreparedGraph] = {}
        self.parts: dict[nn.Module, Part] = {}
        self.calls: dict[nn.Module, list[Call]] = {}

    def inside(self, module: nn.Module, path: str, calls: list[Call], reason: Exception) -> None:
        """Leaves ``module`` in Python and tries to capture each module it calls."""
        with restored(module):
            called = record_calls(module.eval(), calls)
        self._note(module, path, PYTHON if called else OPAQUE, reason)
        for child, child_calls in called.items():
            self.calls.setdefault(child, []).extend(child_calls)
            self.capture(child)

    def capture(self, module: nn.Module) -> None:
        """Captures ``module`` as an island; if it cannot be one graph, searches its submodules."""
        path, calls = self.paths[module], self.calls[module]
        if path in self.excluded:
            self._note(module, path, EXCLUDED, None)
            return
        if module in self.train_only:
            self._note(module, path, OPAQUE, CaptureError("it acts in train mode only"))
            return
        try:
            island = self._island(module, path, calls)
        except CaptureError as error:
            self.islands.pop(module, None)
            self.inside(module, path, calls, error)
            return
        island.lend_attributes(module)
        self.islands[module] = island
        several = f"calls of {1 + len(island.variants)} kinds, a graph for each" if island.variants else ""
        self._note(module, path, island.report.rung, CaptureError(several) if several else None)

    def _island(self, module: nn.Module, path: str, calls: list[Call]) -> PreparedGraph:
        kinds: dict[Kind, list[Call]] = {}
        for call in calls:
            kinds.setdefault(call_kind(signature_of(module), call.args, call.kwargs), []).append(call)
        if len(kinds) > MAX_KINDS:
            raise CaptureError(
                f"{type(module).__name__} is called with arguments of {len(kinds)} kinds (ranks, dtypes, constants)"
            )
        islands = []
        for same_kind in kinds.values():
            island = capture_graph(module, same_kind, self.dynamic_shapes, verify=True,
                                   around=Surroundings(path, train_only=self.train_only))
            self._refuse_fixed(module, island)
            islands.append(island)
        for kind, island in zip([*kinds][1:], islands[1:], strict=True):
            add_variant(islands[0], kind, island)
        return islands[0]

    def _refuse_fixed(self, module: nn.Module, island: PreparedGraph) -> None:
        """Raises: CaptureError if the island serves sizes of the example alone, without weights or with other data."""
        if self.dynamic_shapes is None:
            return
        holds_weights = any(True for _ in module.parameters())
        if not holds_weights and not island.report.dynamic:
            raise CaptureError("its graph would serve the sizes of the example inputs alone, and holds no weights")
        fixed = island.sizes.fixed
        varying = [*(varying_axes(self.model, self.model_calls, module, island, fixed) if holds_weights else fixed)]
        if varying:
            reason = "it holds no weights" if not holds_weights else "other inputs have another"
            raise CaptureError(f"its graph would serve one length of {axis_text(varying[0])} alone "
                               f"({fixed[varying[0]]}), and {reason}")

    def replace(self, module: nn.Module, error: Exception) -> None:
        """Drops the island of ``module``, which makes the model fail or differ, and searches its submodules instead."""
        del self.islands[module]
        self.inside(module, self.paths[module], self.calls[module], error)

    def leave(self, modules: Collection[nn.Module]) -> None:
        """Drops islands that the copy of the model does not call, and records their modules as opaque."""
        for module in modules:
            del self.islands[module]
            reason = CaptureError("the model calls it by a reference that a copy of the model cannot follow")
            self._note(module, self.paths[module], OPAQUE, reason)

    def note_uncalled(self, model: nn.Module) -> None:
        """Records modules with parameters that the example inputs do not run; excluded modules as excluded."""
        noted = {inner for module, part in self.parts.items() if part.rung != PYTHON for inner in module.modules()}
        for module in model.modules():
            if module in self.parts or module in noted or not list(module.parameters(recurse=False)):
                continue
            is_excluded = not self.excluded.isdisjoint(prefixes(self.paths[module]))
            self._note(module, self.paths[module], EXCLUDED if is_excluded else UNCALLED, None)

    def report(self, model: nn.Module, difference: float) -> PrepareReport:
        """The report of the whole model."""
        reports = [island.report for island in self.islands.values()]
        swaps = sum((Counter(dict(report.swaps)) for report in reports), Counter[str]())
        shown = {parameter for island in self.islands.values() for parameter in island.parameters()}
        total = sum(parameter.numel() for parameter in model.parameters())
        return PrepareReport(
            PYTHON,
            True,
            all(island.report.dynamic for island in self.islands.values() if island.graph.find_nodes(op="placeholder")),
            swaps=tuple(sorted(swaps.items())),
            unknown_ops=tuple(dict.fromkeys(name for report in reports for name in report.unknown_ops)),
            opaque_parts=tuple(part for report in reports for part in report.opaque_parts),
            eval_difference=difference,
            captured=sum(parameter.numel() for parameter in shown) / total if total else 1.0,
            parts=tuple(self.parts.values()),
        )

    def _note(self, module: nn.Module, path: str, rung: str, reason: Exception | None) -> None:
        parameters = sum(parameter.numel() for parameter in module.parameters())
        text = str(reason) if isinstance(reason, QtkError) else None if reason is None else first_line(reason)
        first = None if text is None else text.partition("\n")[0]
        self.parts[module] = Part(path, type(module).__name__, rung, parameters, first)


@contextmanager
def _uncalled(islands: Mapping[nn.Module, PreparedGraph]) -> Iterator[set[nn.Module]]:
    """Yields a set that, when the context ends, holds the modules whose islands were not called."""
    missing = set(islands)
    handles = [
        island.register_forward_pre_hook(lambda _, args, module=module: missing.discard(module))
        for module, island in islands.items()
    ]
    try:
        yield missing
    finally:
        for handle in handles:
            handle.remove()


def _culprit(
    model: nn.Module, islands: Mapping[nn.Module, PreparedGraph], calls: Sequence[Call], error: Exception
) -> nn.Module:
    """The first module whose island alone makes the model fail or differ in one of ``calls``.

    Raises: VerificationError if none does.
    """
    for module, island in islands.items():
        try:
            tree = PreparedTree(with_islands(model, {module: island}))
            for call in calls:
                eval_difference(model, tree, call.args, call.kwargs)
        except OUT_OF_MEMORY:
            raise
        except Exception:
            return module
    try:
        for call in calls:
            eval_difference(model, model, call.args, call.kwargs)
    except VerificationError as difference:
        raise VerificationError(
            f"{type(model).__name__} does not repeat itself: run twice on the same inputs with the same seed, in eval "
            f"mode, its {difference}; nothing can be compared with it"
        ) from error
    raise VerificationError(f"the parts of the model do not add up to it: {first_line(error)}") from error
