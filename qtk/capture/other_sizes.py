"""Compares a captured graph with its module at other sizes than the example inputs have.

The example shows one length of each axis. ``torch.export`` finds by reading the code which lengths the graph serves,
and is wrong both ways: it frees an axis on a condition that nobody checks later, or fixes one that the module takes at
any length.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from qtk.calls.calls import Call, detached
from qtk.calls.served_sizes import BATCH, SIZES, Axis, ServedSizes, SizeLimit
from qtk.calls.size_expressions import evaluate, is_readable
from qtk.capture.free_axes import FreeAxes, Lengths
from qtk.capture.free_shapes import LeafAxis
from qtk.capture.prepared_model import REPORT, PreparedGraph
from qtk.capture.recurrent_tracing import packing_checked
from qtk.capture.verify_prepared import RunResult, eval_difference, eval_outcome, tensor_difference
from qtk.errors import OUT_OF_MEMORY
from qtk.torch_private import TorchDispatchMode, pytree, size_guards

TIME_SHARE, LEAST_S = 0.3, 0.5
"""Largest share of the time of a capture that trying other sizes may take, and seconds that it may always take: more
than a pause of a loaded machine."""

MAX_JOINT, MAX_GUARDS = 2, 8
"""Number of trials in which all free axes have other lengths, and of conditions of torch that are broken on purpose."""

UNROLLED = "the loop over it is unrolled"
READ = "the code reads its length as a number, or branches on it"
"""Why a graph fixes an axis that its module does not fix."""

_NO_MODE = contextlib.nullcontext()


@dataclass(frozen=True, slots=True)
class SizeGuard:
    """A condition under which a graph was traced.

    Args:
        condition: a Python expression over the names of free sizes.
        symbols: these names.
    """

    condition: str
    symbols: tuple[str, ...]


class OtherSizes(FreeAxes):
    """Runs a module and its graph at other sizes than an example has, until the time is up.

    ``guards``: conditions under which the graph was traced; ``unread``: others, which nothing here can evaluate.

    Args as of ``try_other_sizes``.
    """

    def __init__(
        self, model: nn.Module, graph: PreparedGraph, call: Call, *, cost_s: float, budget_s: float
    ) -> None:
        super().__init__(graph, call)
        self._model, self._graph, self._cost_s = model, graph, cost_s
        self._deadline = time.perf_counter() + budget_s
        known = {*self.symbols.values()}
        self.guards = [SizeGuard(f"{symbol} > 1", (symbol,)) for symbol in sorted(known)]
        traced = [SizeGuard(*each) for each in size_guards(self.sizes[0]).items()] if self.sizes else []
        self.unread = list[SizeGuard]()
        for guard in traced:
            if guard.symbols and known.issuperset(guard.symbols):
                can_read = is_readable(guard.condition, self._of_symbols({}))
                (self.guards if can_read else self.unread).append(guard)

    def breaks(self, guard: SizeGuard, lengths: Lengths) -> bool:
        """Says whether these lengths break a condition of torch."""
        return not evaluate(guard.condition, self._of_symbols(lengths))

    def _of_symbols(self, lengths: Lengths) -> dict[str, int]:
        return {symbol: lengths.get(axis, self.lengths[axis]) for axis, symbol in self.symbols.items()}

    def runs(self, lengths: Lengths) -> bool:
        """Says whether the module runs with these lengths; ``False`` also if there is no time."""
        return self._outcome(lengths) is not None

    def serves(self, lengths: Lengths) -> bool | None:
        """Says whether the graph runs with these lengths; ``None`` if there is no time."""
        if not self._is_time_left:
            return None
        try:
            eval_outcome(self._graph, *detached(self.call(lengths)))
        except Exception:  # whatever its ops raise, or memory ends
            return False
        return True

    def agrees(self, lengths: Lengths) -> bool | None:
        """Says whether the graph computes what the module does; ``None`` if the module does not run, or out of time."""
        started = time.perf_counter()
        expected = self._outcome(lengths)
        if expected is None:
            return None
        try:
            eval_difference(self._model, self._graph, *self.call(lengths), expected=expected)
        except OUT_OF_MEMORY:
            return None
        except Exception:  # whatever a graph raises or returns at a size it does not serve
            return 1 in lengths.values() and self._keeps_axes_of_one(lengths, expected)
        finally:
            self._cost_s = max(self._cost_s, time.perf_counter() - started)
        return True

    def _keeps_axes_of_one(self, lengths: Lengths, expected: RunResult) -> bool:
        """Says whether the graph has the values of the module, and axes of length 1 that the module squeezes away."""
        try:
            actual = eval_outcome(self._graph, *detached(self.call(lengths)))
            for before, after in zip(*(pytree.tree_leaves(each[0]) for each in (expected, actual)), strict=True):
                if isinstance(before, Tensor):
                    tensor_difference("output", before.squeeze(), after.squeeze())
        except Exception:  # they differ
            return False
        return True

    def num_ops(self, lengths: Lengths) -> int | None:
        """Number of ATen ops that the module runs with these lengths; ``None`` as ``agrees``."""
        count = _OpCount()
        return None if self._outcome(lengths, count) is None else count.count

    @property
    def _is_time_left(self) -> bool:
        return time.perf_counter() + self._cost_s <= self._deadline

    def _outcome(
        self, lengths: Lengths, mode: contextlib.AbstractContextManager[object] = _NO_MODE
    ) -> RunResult | None:
        if not self._is_time_left:
            return None
        args, kwargs = detached(self.call(lengths))
        try:
            with mode, packing_checked():
                return eval_outcome(self._model, args, kwargs)
        except Exception:  # whatever the model raises, or memory ends
            return None


def try_other_sizes(
    model: nn.Module, graph: PreparedGraph, call: Call, *, cost_s: float, budget_s: float,
    ones: Collection[LeafAxis] = (), compared: Collection[Call] = (),
) -> tuple[frozenset[LeafAxis], Call | None]:
    """Compares graph and module at other lengths of the free axes, and runs the module at others of the fixed ones.

    All free axes change together; single conditions and axes are tried only where that fails. Adds what is found to
    the sizes and to the report of ``graph``.

    Args:
        model: the module.
        graph: its graph.
        call: the call that it was captured with.
        cost_s: duration of one comparison at the sizes of ``call``, in seconds.
        budget_s: time for all trials, in seconds; one that is expected to exceed it is not begun.
        ones: axes of length 1 that stay so.
        compared: the calls that were compared already.

    Returns: the axes that are free in the graph, and for which it holds at the example's length alone; ``call`` with 2
        in place of 1 along axes that were asked to be free, if there are such and the module runs so.
    """
    trials, sizes = OtherSizes(model, graph, call, cost_s=cost_s, budget_s=budget_s), graph.sizes
    limits, unfree = _limits(trials, compared)
    fixed = dict(_fixed(trials, sizes))
    lines = [f"length fixed at {trials.lengths[axis]}: {why} (axis {axis[1]} of input {axis[0]})"
             for axis, why in fixed.items() if sizes.is_asked(axis)]
    lines += [f"the graph serves sizes where {limit}" for limit in limits]
    lines += [f"calls that break a condition of torch are not refused, for its text cannot be read: "
              f"{_as_limit(trials, guard)}" for guard in trials.unread]
    lines += [f"length fixed at {trials.lengths[axis]}: at another the graph computes something else than the model "
              f"(axis {axis[1]} of input {axis[0]})" for axis in sorted(unfree)]
    of_one = [axis for axis in _of_one(trials, sizes) if (trials.numbers[axis[0]], axis[1]) not in ones]
    if not sizes.place:
        lines += [f"axis {axis[1]} of input {axis[0]} has length 1 in the example and stays so; give one of 2 or more"
                  for axis in of_one]
    graph.meta[SIZES] = replace(sizes, limits=limits, fixed=fixed, ties=tuple(_ties(trials)))
    if limits:
        graph.recompile()  # compiled code checks them
    graph.meta[REPORT] = replace(graph.report, reasons=(
        *graph.report.reasons, *(f"{graph.report.rung}: {line}" for line in lines)
    ))
    longer = Call(*trials.call(dict.fromkeys(of_one, 2)), None) if of_one else None
    return frozenset((trials.numbers[name], axis) for name, axis in unfree), longer


def other_length(length: int) -> int:
    """Another length, smaller if that leaves 2 or more, for 1 may be broadcast."""
    return length - 1 if length > 2 else length + 1


def _limits(trials: OtherSizes, known: Collection[Call]) -> tuple[tuple[SizeLimit, ...], frozenset[Axis]]:
    limits: list[SizeGuard] = []
    unfree: set[Axis] = set()
    compared = [*map(trials.lengths_in, known)]

    def served(lengths: Lengths) -> bool:
        return not unfree & lengths.keys() and not any(trials.breaks(guard, lengths) for guard in limits)

    def compare(lengths: Lengths) -> None:
        agrees = trials.agrees(lengths) if served(lengths) else None
        if agrees is not None:
            compared.append(lengths)
        if agrees is False:
            found, axes = _culprits(trials, lengths)
            limits.extend(found)
            unfree.update(axes)

    num_joint = 0
    for lengths in _joint(trials):
        if lengths not in compared:
            compare(lengths)
        num_joint += lengths in compared
        if num_joint == MAX_JOINT:
            break
    num_tried = 0
    for guard in sorted(trials.guards, key=_size):  # the others often follow from short ones
        breaking = [lengths for lengths in _single(trials, guard) if served(lengths) and trials.breaks(guard, lengths)]
        if breaking and num_tried < MAX_GUARDS and not any(
            served(lengths) and trials.breaks(guard, lengths) for lengths in compared
        ):
            compare(breaking[0])
            num_tried += 1
    return tuple(_as_limit(trials, guard) for guard in limits), frozenset(unfree)


def _size(guard: SizeGuard) -> int:
    return len(guard.condition)


def _joint(trials: OtherSizes) -> Iterator[Lengths]:
    """Lengths in which all free axes differ from the example, the likeliest to run first."""
    lengths = {axis: trials.lengths[axis] for axis in trials.symbols}
    if not lengths:
        return
    batches = {length for (_, number), length in lengths.items() if number == 0}
    yield {axis: min(other_length(length), 2 if length > 2 else 3) if length in batches else other_length(length)
           for axis, length in lengths.items()}
    yield {axis: 1 if length in batches else max(length // 2, 2) for axis, length in lengths.items()}
    if len({*lengths.values()}) > 1:  # lengths that must be multiples of something
        yield {axis: 1 if length in batches else length for axis, length in lengths.items()}
        yield {axis: 2 * length for axis, length in lengths.items()}


def _single(trials: OtherSizes, guard: SizeGuard) -> Iterator[Lengths]:
    """Lengths in which one symbol of a condition differs from the example."""
    for symbol in guard.symbols:
        axes = trials.axes_of([symbol])
        length = trials.lengths[axes[0]]
        for other in (other_length(length), length - 2, length - 4, 1, 2, 3, length // 2, length + 1, 2 * length):
            if other > 0:
                yield dict.fromkeys(axes, other)


def _culprits(trials: OtherSizes, lengths: Lengths) -> tuple[list[SizeGuard], set[Axis]]:
    """The conditions of torch that these lengths break and that matter; without one, the axes that matter.

    Of conditions on the same sizes it is the shortest.
    """
    of_symbols: dict[tuple[str, ...], SizeGuard] = {}
    broken = [guard for guard in sorted(trials.guards, key=_size) if trials.breaks(guard, lengths)]
    for guard in broken:
        known = any({*symbols} <= {*guard.symbols} for symbols in of_symbols)
        alone = {axis: lengths[axis] for axis in trials.axes_of(guard.symbols) if axis in lengths}
        if not known and trials.agrees(alone) is False:
            of_symbols[guard.symbols] = guard
    if broken:
        return [*of_symbols.values()] or broken[:1], set()
    by_length: dict[int, dict[Axis, int]] = {}
    for axis, length in lengths.items():
        if length != trials.lengths[axis]:
            by_length.setdefault(trials.lengths[axis], {})[axis] = length
    groups = [*by_length.values()]
    wrong = [group for group in groups if trials.agrees(group) is False] if len(groups) > 1 else groups
    return [], {axis for group in wrong or groups for axis in group}


def _as_limit(trials: OtherSizes, guard: SizeGuard) -> SizeLimit:
    return SizeLimit(guard.condition, tuple((symbol, trials.axes_of([symbol])[0]) for symbol in guard.symbols))


def _ties(trials: OtherSizes) -> Iterator[tuple[Axis, ...]]:
    """Axes of one length in the example that have symbols of their own, and that the graph runs with if they are equal.

    The graph is asked, for a module may skip what ties them: a mask that is 1 everywhere.
    """
    by_length: dict[int, list[str]] = {}
    for symbol in dict.fromkeys(trials.symbols.values()):
        by_length.setdefault(trials.lengths[trials.axes_of([symbol])[0]], []).append(symbol)
    for length, symbols in by_length.items():
        def serves(some: list[str], length: int = length) -> list[bool | None]:
            axes = trials.axes_of(some)
            return [trials.serves(dict.fromkeys(axes, other)) for other in (other_length(length), length + 1)]

        tied = [symbol for symbol in symbols if len(symbols) > 1 and False in serves([symbol])]
        if len(tied) > 1 and all(serves(tied)):
            yield tuple(trials.axes_of(tied))


def _of_one(trials: OtherSizes, sizes: ServedSizes) -> list[Axis]:
    """Axes of length 1 that were asked to be free, and with which of length 2 the module runs."""
    ones = [axis for axis, length in trials.lengths.items() if length == 1 and sizes.is_asked(axis)]
    groups = [ones, *([axis for axis in ones if axis[1] == number] for number in sorted({axis[1] for axis in ones}))]
    together = next((group for group in groups if len(group) > 1 and trials.runs(dict.fromkeys(group, 2))), None)
    if together is not None:
        return together
    alone = [axis for axis in ones if trials.runs({axis: 2})]
    return alone if len(alone) < 2 or trials.runs(dict.fromkeys(alone, 2)) else alone[:1]


def _fixed(trials: OtherSizes, sizes: ServedSizes) -> Iterator[tuple[Axis, str]]:
    """Each axis that was asked to be free and is fixed, though the module runs at another length, and why it is.

    And, where only the batch was asked to be free, axes 1 with a loop over them, which asking for more would not free.
    """
    held = [axis for axis, length in trials.lengths.items() if axis not in trials.symbols and length > 1
            and (sizes.is_asked(axis) or (sizes.asked == BATCH and axis[1] == 1))]
    for length in sorted({trials.lengths[axis] for axis in held}):
        other = other_length(length)
        together = {axis: other for axis, each in trials.lengths.items() if each == length}
        fixed = {axis: other for axis in held if trials.lengths[axis] == length}
        for lengths in _distinct([together, fixed, *({axis: other} for axis in fixed)]):
            if trials.runs(lengths):
                why = UNROLLED if _is_unrolled(trials, lengths, length) else READ
                yield from ((axis, why) for axis in fixed if axis in lengths
                            and (why == UNROLLED or sizes.is_asked(axis)))
                break


def _is_unrolled(trials: OtherSizes, axes: Collection[Axis], length: int) -> bool:
    """Says whether each step of a length adds equally many ops."""
    counts = [trials.num_ops(dict.fromkeys(axes, each)) for each in (length + 2, length + 1, length)]
    if counts[0] is None:
        counts = [trials.num_ops(dict.fromkeys(axes, each)) for each in (length, length - 1, length - 2)]
    last, middle, first = counts
    return last is not None and middle is not None and first is not None and last - middle == middle - first > 0


def _distinct(trials: list[dict[Axis, int]]) -> list[dict[Axis, int]]:
    return [each for index, each in enumerate(trials) if each not in trials[:index]]


class _OpCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the ATen ops that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))
