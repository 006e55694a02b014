"""Compares a prepared model with its original, in eval mode and in train mode."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from qtk.calls.calls import detached
from qtk.calls.signature import leaf_paths
from qtk.capture.restored import noting_changes, restored
from qtk.capture.train_mode.adopt_drops import adopt_drops
from qtk.capture.train_mode.custom_backward import lost_backwards, noting_custom_functions
from qtk.capture.train_mode.without_dropout import WithoutDropout
from qtk.errors import CaptureError, VerificationError
from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.graphs import graphs
from qtk.nn.instance_norm import InstanceNorm
from qtk.nn.mapped_weights import bounded
from qtk.nn.seed import set_seed
from qtk.operators.targets import batch_norm_called, called_module
from qtk.torch_private import branches, pytree

TOLERANCE = 1e-5
"""Largest difference accepted, relative to the largest output: float32 sums in another order make smaller ones."""


class RunResult(NamedTuple):
    """What a run makes.

    Args:
        output: what the model returns.
        buffers: the buffers afterwards, without buffers that changed shape or dtype (caches).
        changed: the names of the other attributes that the run has changed.
    """

    output: object
    buffers: dict[str, Tensor]
    changed: tuple[str, ...]


def eval_outcome(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RunResult:
    """Runs ``model`` in eval mode with a fixed seed, on ``args`` themselves, not copies; restores the model's state."""
    with restored(model), torch.no_grad():
        return _outcome(model.eval(), args, kwargs)


def difference_over_calls(
    original: nn.Module, prepared: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *,
    expected: RunResult | None = None,
) -> float:
    """``eval_difference``, of a second call too if the first of ``original`` changes what is no buffer.

    Raises: CaptureError if ``original`` keeps a state in an attribute; VerificationError as ``eval_difference``.
    """
    expected = expected or eval_outcome(original, *detached((args, kwargs)))
    try:
        difference = eval_difference(original, prepared, args, kwargs, expected=expected)
        if expected.changed:
            _both_differences(*(_second_outcome(model, args, kwargs) for model in (original, prepared)))
    except VerificationError as error:
        if not expected.changed:
            raise
        shown = f"{', '.join(expected.changed[:3])}{', …' if expected.changed[3:] else ''}"
        leaf = expected.changed[0].rpartition(".")[2]
        raise CaptureError(
            f"forward keeps {shown} from call to call, which a graph holds as at one of them ({error}); make the state "
            f"a buffer that forward writes, self.register_buffer({leaf!r}, torch.zeros(…)), and graph and files keep it"
        ) from None
    return difference


def _second_outcome(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RunResult:
    """The outcome after a call on other values: what a call keeps of the same ones, the model may hold already."""
    with restored(model), torch.no_grad():
        with suppress(Exception):  # not every model takes them
            _outcome(model.eval(), *pytree.tree_map(_otherwise, detached((args, kwargs))))
        return _outcome(model.eval(), *detached((args, kwargs)))


def _otherwise(leaf: object) -> object:
    """A tensor of the values of ``leaf`` in reversed order, floats halved."""
    if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:
        return leaf
    return leaf.flip([*range(leaf.ndim)]) * 0.5 if leaf.is_floating_point() else leaf.flip([*range(leaf.ndim)])


def eval_difference(
    original: nn.Module,
    prepared: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    expected: RunResult | None = None,
) -> float:
    """Largest absolute difference of outputs and buffers after a run in eval mode; restores the state of both models.

    Args:
        original: the reference.
        prepared: the model to compare with it.
        args: positional arguments.
        kwargs: keyword arguments.
        expected: the result of ``eval_outcome(original, args, kwargs)``, if it is known.

    Raises: VerificationError naming the first output or buffer that differs by more than ``TOLERANCE``.
    """
    expected = expected or eval_outcome(original, *detached((args, kwargs)))
    return _both_differences(expected, eval_outcome(prepared, *detached((args, kwargs))))


def output_difference(a: nn.Module, b: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Largest absolute difference of outputs in eval mode. Raises: VerificationError as ``eval_difference``."""
    outputs = [eval_outcome(model, *detached((args, kwargs))).output for model in (a, b)]
    return _difference(*outputs)


def train_difference(
    original: nn.Module,
    prepared: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    in_eval: RunResult | None = None,
    train_only: Collection[nn.Module] = (),
) -> tuple[float, list[str]]:
    """Largest absolute difference of outputs and buffers after one forward pass in train mode without dropout.

    Restores the state of both models, except that the dropouts of ``prepared`` get the probabilities of the original's.

    Args:
        original: the reference.
        prepared: the model to compare with it.
        args: positional arguments.
        kwargs: keyword arguments.
        in_eval: the result of ``eval_outcome(prepared, args, kwargs)``, if it is known; a graph without batch or
            instance norm is not run again.
        train_only: the modules of the original that act in train mode only.

    Returns: the difference, and notes on dropout and custom backward functions that the capture has lost.

    Raises: VerificationError naming the first output or buffer that differs by more than ``TOLERANCE``.
    """
    with noting_custom_functions() as custom:
        expected, drops = _train_outcome(original, args, kwargs, train_only)
    notes = list(adopt_drops(prepared, drops)) if drops else []
    if in_eval is not None and _does_the_same_in_both_modes(prepared):
        actual = in_eval
    else:
        modules = dict(prepared.named_modules(remove_duplicate=False))
        paths = [path for path, module in original.named_modules() if module in train_only]
        actual, _ = _train_outcome(prepared, args, kwargs, [modules[path] for path in paths if path in modules])
    notes += [
        f"the backward of {name} is not captured: the prepared model has the gradient of the ops in its forward"
        for name in (lost_backwards(original, prepared, args, kwargs) if custom else ())
    ]
    return _both_differences(expected, actual), notes


def _train_outcome(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], train_only: Collection[nn.Module]
) -> tuple[RunResult, Mapping[str, Sequence[float]]]:
    """The outcome in train mode with dropout off, and what would have dropped; see ``WithoutDropout``."""
    with restored(model):
        mode = WithoutDropout(model.train(), train_only)
        with torch.no_grad(), mode:
            return _outcome(model, *detached((args, kwargs))), mode.drops


def _does_the_same_in_both_modes(prepared: nn.Module) -> bool:
    """Says whether train mode computes what eval mode does, apart from dropout."""
    return isinstance(prepared, CapturedGraph) and not any(
        batch_norm_called(node) is not None or isinstance(called_module(node), InstanceNorm)
        for graph in graphs(prepared).values() for node in graph.graph.nodes
    )


def _both_differences(expected: RunResult, actual: RunResult) -> float:
    """Largest difference of outputs, and of the buffers of ``expected``; a prepared model also has constants."""
    buffers = {name: buffer for name, buffer in actual.buffers.items() if name in expected.buffers}
    return max(_difference(expected.output, actual.output), _difference(expected.buffers, buffers, what="buffer "))


def _outcome(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RunResult:
    before = {name: (buffer.shape, buffer.dtype) for name, buffer in model.named_buffers() if not is_lazy(buffer)}
    with torch.random.fork_rng(devices=[]), bounded(model):
        set_seed(0)
        changed = noting_changes(model)
        output = pytree.tree_map(_copied, model(*args, **kwargs))
    after = dict(model.named_buffers())
    buffers = {name: after[name].clone() for name, kind in before.items() if _has_kind(after.get(name), kind)}
    return RunResult(output, buffers, changed())


def _copied(leaf: object) -> object:
    """A copy of a tensor, which may be a buffer, whose value is restored after the run."""
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _has_kind(buffer: Tensor | None, kind: tuple[torch.Size, torch.dtype]) -> bool:
    return buffer is not None and (buffer.shape, buffer.dtype) == kind


def _difference(expected: object, actual: object, *, what: str = "output") -> float:
    expected_leaves, structure = pytree.tree_flatten(expected)
    actual_leaves, other = pytree.tree_flatten(actual)
    if not _same_structure(structure, other):
        raise VerificationError(f"the outputs are built differently: {structure} became {other}")
    worst = 0.0
    for path, a, b in zip(leaf_paths(expected), expected_leaves, actual_leaves, strict=True):
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            if type(a) is type(b) and "__eq__" not in _members(type(a)) and hasattr(a, "__dict__"):
                worst = max(worst, _difference(vars(a), vars(b), what=f"{what}{pytree.keystr(path)}."))
            elif type(a) is not type(b) or a != b:
                raise VerificationError(f"{what}{pytree.keystr(path)} is {b!r}, was {a!r}")
            continue
        worst = max(worst, tensor_difference(f"{what}{pytree.keystr(path)}", a, b))
    return worst


def _same_structure(a: pytree.TreeSpec, b: pytree.TreeSpec) -> bool:
    """Says whether two structures are equal, where a namedtuple class made anew in every call counts as one."""
    if a == b:
        return True
    if a.type is not b.type or a.num_children != b.num_children or _members_of(a.context) != _members_of(b.context):
        return False
    return all(map(_same_structure, branches(a), branches(b)))


def _members_of(context: object) -> object:
    """Returns what identifies a node of a structure: of a namedtuple class its name and fields, else the context."""
    if isinstance(context, type) and issubclass(context, tuple):
        return context.__qualname__, getattr(context, "__match_args__", ())
    return context


def _members(kind: type) -> set[str]:
    return {name for base in kind.__mro__[:-1] for name in vars(base)}


def tensor_difference(name: str, a: Tensor, b: Tensor) -> float:
    """Largest |a - b|, counted as 0 where both are NaN or the same infinity, or have no values (meta).

    Raises: VerificationError if it is more than ``TOLERANCE`` of the largest finite |a|, or shape or dtype differ.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        raise VerificationError(
            f"{name} is {b.dtype} of shape {tuple(b.shape)}, was {a.dtype} of {tuple(a.shape)}"
        )
    if a.layout != torch.strided or b.layout != torch.strided:
        a, b = a.to_dense(), b.to_dense()
    if a.numel() == 0 or a.is_meta or torch.equal(a, b):
        return 0.0
    wide_a, wide_b = a.to(torch.float64), b.to(torch.float64)
    same = (wide_a == wide_b) | (wide_a.isnan() & wide_b.isnan())
    gap = torch.where(same, 0.0, (wide_a - wide_b).abs()).nan_to_num(nan=math.inf)
    size = float(wide_a[wide_a.isfinite()].abs().max()) if bool(wide_a.isfinite().any()) else 0.0
    worst = float(gap.max())
    if worst > TOLERANCE * size:
        raise VerificationError(f"{name} differs by {worst:.3g}, its largest value is {size:.3g}")
    return worst
