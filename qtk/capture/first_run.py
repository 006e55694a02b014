"""What the first run of a model tells before it is captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from qtk.calls.calls import Call, detached, raised_in
from qtk.capture.scans import run_for_loops
from qtk.capture.train_mode.train_only import TrainOnly, finding_train_only
from qtk.capture.verify_prepared import RunResult, eval_outcome
from qtk.capture.written_parameters import finding_written_parameters
from qtk.errors import OUT_OF_MEMORY, CaptureError, first_line
from qtk.nn.device import LOAD, empty_tensors, is_dry_run
from qtk.torch_private import pytree, version_of


@dataclass(frozen=True, slots=True, eq=False)
class FirstRun:
    """A run in eval mode.

    Args:
        outcome: what it makes.
        written: numbers of the inputs, among the leaves of the arguments, that the model writes to.
        train_only: the modules that act in train mode only.
        loops: the functions that may be recurrences, as of ``run_for_loops``; ``None`` if the model does not run so, as
            where an op takes a graph.
    """

    outcome: RunResult
    written: tuple[int, ...]
    train_only: TrainOnly
    loops: Sequence[FunctionType] | None


def first_run(model: nn.Module, call: Call) -> FirstRun:
    """Runs the model on copies of its example inputs. Raises: CaptureError if it does not run."""
    run: FirstRun | None = None
    with (
        finding_written_parameters(model),
        suppress(Exception),  # of an op that takes a graph, say; kept, it would keep what the forward holds
    ):
        run = _run(model, call, run_for_loops)
    if run is None:
        try:
            run = _run(model, call, _without_loops)
        except OUT_OF_MEMORY:
            raise
        except Exception as error:
            raise _does_not_run(model, call.args, call.kwargs, error) from error
    leaves = pytree.tree_leaves((call.args, call.kwargs, run.outcome.output))
    if any(isinstance(leaf, Tensor) and leaf.is_nested for leaf in leaves):
        raise CaptureError(f"{type(model).__name__} takes or returns nested tensors; pad them to dense ones")
    return run


def _run(
    model: nn.Module, call: Call, runs: Callable[[nn.Module, Call], tuple[RunResult, Sequence[FunctionType] | None]]
) -> FirstRun:
    given = Call(*detached((call.args, call.kwargs)), None)
    leaves = pytree.tree_leaves((given.args, given.kwargs))  # of now: a cache may hold others afterwards
    versions = [_version(leaf) for leaf in leaves]
    with finding_train_only(model) as train_only:
        outcome, loops = runs(model, given)
    written = (index for index, leaf in enumerate(leaves) if _version(leaf) != versions[index])
    return FirstRun(outcome, tuple(written), train_only, loops)


def _without_loops(model: nn.Module, call: Call) -> tuple[RunResult, None]:
    return eval_outcome(model, call.args, call.kwargs), None


def _does_not_run(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
) -> CaptureError:
    shapes = [tuple(leaf.shape) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    path = raised_in(model, error)
    where = "" if path is None else f", in {path} ({type(model.get_submodule(path)).__name__})"
    hint = "; to pass one dict, wrap it in a tuple" if kwargs and isinstance(error, TypeError) else ""
    if is_dry_run(model):
        hint = f"; {empty_tensors(model)}: on the meta device, without values; {LOAD}, or pass meta tensors"
    return CaptureError(
        f"{type(model).__name__} does not run on its example inputs (tensors of shape {shapes}){where}: "
        f"{first_line(error)}; pass inputs that model(...) accepts{hint}"
    )


def _version(leaf: object) -> int:
    """Says how often a tensor was written to; 0 where torch does not count."""
    return version_of(leaf) if isinstance(leaf, Tensor) and not leaf.is_inference() else 0
