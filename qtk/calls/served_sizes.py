"""The sizes of inputs that a captured graph serves, and what to do about others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qtk.calls.size_expressions import evaluate
from qtk.errors import CaptureError
from qtk.torch_private import assert_when_run

Axis = tuple[str, int]
"""The name of a graph's input, and one of its axes."""

SIZES = "qtk_sizes"
"""Key of the ``meta`` of a graph: the sizes that it serves."""

BATCH, ALL, LATE, GIVEN, STATIC = "batch", "all", "late", "given", "static"
"""Which sizes a capture was asked to free: axis 0, every axis, every axis but that took too long, the axes of explicit
dynamic shapes, none."""


def axis_text(axis: Axis) -> str:
    """``x.shape[0]``."""
    return f"{axis[0]}.shape[{axis[1]}]"


@dataclass(frozen=True, slots=True)
class SizeLimit:
    """A condition on free sizes without which a graph computes something else than its module.

    >>> limit = SizeLimit("s0 > 3", (("s0", ("x", 0)),))
    >>> str(limit), limit.holds({("x", 0): 4}), limit.holds({("x", 0): 3})
    ('x.shape[0] > 3', True, False)

    Args:
        condition: a Python expression over the names in ``axes``.
        axes: name → the axis whose length it is.
    """

    condition: str
    axes: tuple[tuple[str, Axis], ...]

    def holds(self, lengths: Mapping[Axis, int]) -> bool:
        """Says whether it holds for these lengths."""
        return evaluate(self.condition, {name: lengths[axis] for name, axis in self.axes})

    def __str__(self) -> str:
        names = {name: axis_text(axis) for name, axis in self.axes}
        return re.sub(r"\w+", lambda word: names.get(word[0], word[0]), self.condition)


@dataclass(frozen=True, slots=True)
class ServedSizes:
    """The sizes that one graph serves, as far as its placeholders do not show them.

    Args:
        asked: what capture was asked to free: one of ``BATCH``, ``ALL``, ``LATE``, ``GIVEN``, ``STATIC``.
        place: module path of the graph in the whole model; empty for the model itself.
        fixed: an axis that the graph fixes and its module does not → why.
        limits: conditions on free sizes.
        names: axis → its name in files; axes of one name have one length.
        ties: axes with symbols of their own, with which the graph runs only if they have one length.
        values: input → its values, as nested lists, which are written into the graph.
    """

    asked: str = BATCH
    place: str = ""
    fixed: Mapping[Axis, str] = field(default_factory=dict)
    limits: tuple[SizeLimit, ...] = ()
    names: Mapping[Axis, str] = field(default_factory=dict)
    ties: tuple[tuple[Axis, ...], ...] = ()
    values: Mapping[str, object] = field(default_factory=dict)

    @property
    def written(self) -> str:
        """Returns what is said of the inputs whose values are written into the graph."""
        return f"sizes follow from the values of {', '.join(self.values)}, which are written into the graph"

    def other_values(self, leaves: Mapping[str, object]) -> str | None:
        """The first input whose values are written into the graph and that has others in a call."""
        for name, values in self.values.items():
            leaf = leaves[name]
            if not isinstance(leaf, Tensor) or leaf.tolist() != values:
                return name
        return None

    def assert_values(self, leaves: Mapping[str, object]) -> None:
        """Makes code that is compiled or traced compare the values that are written into it, and raise RuntimeError.

        Raises: CaptureError in ``torch.jit.trace``, which would leave the comparison out.
        """
        for name, values in self.values.items():
            if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
                raise CaptureError(f"torch.jit.trace keeps no check of input {name}, and {self.written}; use "
                                   "torch.compile, whose code has one")
            leaf = leaves[name]
            assert isinstance(leaf, Tensor)
            assert_when_run((leaf == leaf.new_tensor(values)).all(), self._has_other_values(name))

    def _has_other_values(self, name: str) -> str:
        return (f"input {name} has other values than when the model was captured, and {self.written}; "
                "prepare the model again with them, or with a call that has them among the variants")

    def check_call(self, leaves: Mapping[str, object]) -> None:
        """Checks the inputs of a call, by name. Raises: CaptureError naming what the graph does not serve."""
        if self.limits or self.names:
            self.check({(name, axis): length for name, leaf in leaves.items() if isinstance(leaf, Tensor)
                        for axis, length in enumerate(leaf.shape)})
        name = self.other_values(leaves)
        if name is not None:
            raise CaptureError(self._has_other_values(name))

    def check(self, lengths: Mapping[Axis, int]) -> None:
        """Checks the lengths of all axes in a call. Raises: CaptureError naming the condition that fails."""
        for limit in self.limits:
            if not limit.holds(lengths):
                sizes = ", ".join(f"{axis_text(axis)} is {lengths[axis]}" for _, axis in limit.axes)
                raise CaptureError(f"{sizes}, and the captured graph computes what the model does only where {limit}; "
                                   f"{self._way_out('pass inputs of such sizes')}")
        first: dict[str, Axis] = {}
        for axis, name in self.names.items():
            other = first.setdefault(name, axis)
            if lengths[axis] != lengths[other]:
                raise CaptureError(f"{axis_text(other)} is {lengths[other]} and {axis_text(axis)} is {lengths[axis]}; "
                                   f"both are {name!r}, pass inputs in which they are equal")

    def is_asked(self, axis: Axis) -> bool:
        """Says whether capture was asked to free an axis, by ``dynamic_shapes`` in words."""
        return self.asked == ALL or (self.asked in (BATCH, LATE) and axis[1] == 0)

    def remedy(self, axis: Axis, size: int) -> str:
        """Returns what to do for another length of an axis that the graph has fixed to ``size``."""
        asked = self.is_asked(axis)
        if size == 1:
            every = "" if asked or self.asked in (LATE, GIVEN) else ', and dynamic_shapes="all"'
            return (f"axis {axis[1]} has length 1 in the example and stays so; prepare the model again with one of 2 "
                    f"or more{every}")
        reason = self.fixed.get(axis)
        if reason is not None or asked:
            why = "the code of the model fixes it" if reason is None else reason
            return f"axis {axis[1]} is fixed: {why}; {self._way_out(f'pass inputs with {size} there')}"
        if self.asked == LATE:
            shapes = f'{{{axis[0]!r}: {{0: "batch", {axis[1]}: "length"}}}}'
            return (f"freeing every axis took too long; free this one by name, dynamic_shapes={shapes}, or prepare the "
                    "model again with such an input")
        if self.asked == GIVEN:
            return f"free axis {axis[1]} of {axis[0]} in dynamic_shapes, or prepare the model again with such an input"
        return ('prepare it again with such an input, or with dynamic_shapes="all", which frees each axis that the '
                "code leaves free")

    def _way_out(self, way: str) -> str:
        """``way``, or what helps an island."""
        if self.place:
            return f"{way}, or leave the module in Python: modules_to_exclude=[{self.place!r}]"
        return f"{way} (pad or cut them), or prepare the model again for the others"
