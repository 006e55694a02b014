"""Writes equal formulas of a graph in one normal form, for the pattern matcher.

1. Copies, casts between floats and products with 1 are removed.
2. Constants of one element that are no parameters, and what is computed from them alone, are numbers.
3. ``a / b`` is ``a · (1/b)`` and ``1/sqrt(a)`` is ``rsqrt(a)``; the powers ½, −½, −1, 2 and 3 become the ops they
   equal, ``a · a`` is ``square(a)``, ``a − number`` is ``a + −number``.
4. The number of a sum or product is its second operand.
5. ``relu6``, ``hardtanh``, a ``maximum`` with a number and the like are ``clamp``.
6. A standard deviation is the root of a variance, a norm the root of a sum of squares; axes count from the front.
7. Each half of an axis is one op, whichever ops cut it out; so are its even and its odd entries.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn

from qtk.graph.sites import is_float
from qtk.graph.written_buffers import is_state
from qtk.operators.lookup import row_of
from qtk.operators.op_table import IDENTITY, SPLIT
from qtk.operators.targets import aten_name, named_arguments

ATEN = torch.ops.aten

Value: TypeAlias = fx.Node | float
"""An operand of the normal form: a node or a number."""

Sizes: TypeAlias = tuple[int | None, ...]
"""The sizes of a tensor's axes; ``None`` for one that may vary."""

Arguments: TypeAlias = dict[str, Any]
"""The arguments of an op by name, defaults filled in."""


def first_half(x: Tensor, axis: int) -> Tensor:
    return x.narrow(axis, 0, x.shape[axis] // 2)


def second_half(x: Tensor, axis: int) -> Tensor:
    return x.narrow(axis, x.shape[axis] // 2, x.shape[axis] // 2)


def evens(x: Tensor, axis: int) -> Tensor:
    return x.reshape(*x.shape[:axis], -1, 2, *x.shape[axis + 1 :]).select(axis + 1, 0)


def odds(x: Tensor, axis: int) -> Tensor:
    return x.reshape(*x.shape[:axis], -1, 2, *x.shape[axis + 1 :]).select(axis + 1, 1)


def pairs(x: Tensor) -> Tensor:
    """``[…, 2n] → […, n, 2]``."""
    return x.reshape(*x.shape[:-1], -1, 2)


def unpairs(x: Tensor) -> Tensor:
    """``[…, n, 2] → […, 2n]``."""
    return x.flatten(-2)


Rule: TypeAlias = "Callable[[NormalForm, Arguments], Value | None]"
"""Rewrites an op in normal form; returns ``None`` to copy it unchanged."""

HALVES, INTERLEAVED = (first_half, second_half), (evens, odds)


class NormalForm:
    """The normal form of a graph: another graph that computes the same.

    ``made_by``: node of the normal form → original ops that it replaces; the last produces its value.
    ``removed``: original ops that rule 1 removed. ``static``: nodes computed from parameters alone.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = fx.Graph()
        self.made_by: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self.removed: set[fx.Node] = set()
        self.static: set[fx.Node] = set()
        self.by_target: dict[object, list[fx.Node]] = defaultdict(list)
        self._root = graph.owning_module
        self._values: dict[fx.Node, Value] = {}
        self._copies: dict[fx.Node, fx.Node] = {}
        for self._node in graph.nodes:
            self._values[self._node] = self._value(self._node)

    @property
    def sizes(self) -> Sizes:
        """Sizes of the value that is being rewritten."""
        return sizes_of(self._node.meta["val"])

    def original(self, value: Value | None) -> fx.Node | None:
        """The original op that produces a value of the normal form; ``None`` for a number."""
        return self.made_by[value][-1] if isinstance(value, fx.Node) else None

    def emit(self, target: Callable[..., Any], *args: Any, also: tuple[fx.Node, ...] = (), **kwargs: Any) -> fx.Node:
        """Adds an op that replaces the present original op, and the originals in ``also``."""
        return self._create("call_function", target, args, kwargs, also)

    def product(self, a: Value, b: Value) -> Value:
        if not isinstance(a, fx.Node):
            a, b = b, a
        if not isinstance(a, fx.Node):
            return a * b  # type: ignore[operator]
        if b == 1:
            self.removed.add(self._node)
            return a
        return self.emit(ATEN.square, a) if a is b else self.emit(ATEN.mul, a, b)

    def reciprocal(self, a: Value) -> Value:
        if not isinstance(a, fx.Node):
            return 1 / a if a else math.inf
        if a.target is ATEN.sqrt:
            return self.emit(ATEN.rsqrt, a.args[0], also=self.made_by[a])
        return self.emit(ATEN.reciprocal, a)

    def reduction(self, target: Callable[..., Any], arguments: Arguments, *also: fx.Node) -> fx.Node:
        x, dim = arguments["self"], arguments.get("dim")
        kwargs: dict[str, Any] = {"keepdim": bool(arguments.get("keepdim"))}
        rank = arguments.get("rank", rank_of(x))
        dims = range(rank) if dim in (None, [], ()) else dim if isinstance(dim, (list, tuple)) else (dim,)
        if target is ATEN.var:
            correction = arguments.get("correction", int(arguments.get("unbiased", True)))
            kwargs["correction"] = 1 if correction is None else correction
        return self.emit(target, x, tuple(sorted(axis % rank for axis in dims)), also=also, **kwargs)

    def interleaved(self, x: fx.Node, axis: int, index: int, *also: fx.Node) -> fx.Node | None:
        """The even or odd entries of an axis that was reshaped into pairs; ``None`` if ``x`` is no such reshape."""
        if x.target is not pairs or axis % rank_of(x) != rank_of(x) - 1 or index not in (0, 1):
            return None
        return self.emit(INTERLEAVED[index], x.args[0], rank_of(x) - 2, also=(*self.made_by[x], *also))

    def _create(
        self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], also: tuple[fx.Node, ...] = ()
    ) -> fx.Node:
        node = self.graph.create_node(op, target, args, kwargs)
        node.meta["val"] = self._node.meta.get("val")
        self.made_by[node] = (*also, self._node)
        self.by_target[target].append(node)
        if op != "placeholder" and all(source in self.static for source in node.all_input_nodes):
            self.static.add(node)
        return node

    def _value(self, node: fx.Node) -> Value:
        if is_state(node):
            return self._create("placeholder", node.name, (), {})
        number = self._number(node)
        if number is not None:
            self._copies[node] = self._copy(node)  # for readers that want a tensor
            return number
        if node.op == "call_function" and is_float(node):
            args: Any = fx.node.map_arg(node.args, self._values.__getitem__)
            kwargs: Any = fx.node.map_arg(node.kwargs, self._values.__getitem__)
            name, row, value = aten_name(node.target), row_of(node), None
            if node.target is operator.getitem:
                value = self._element(node.all_input_nodes[0], args[1])
            elif row is IDENTITY and is_float(node.all_input_nodes[0]):
                self.removed.add(node)
                value = args[0]
            elif name in RULES:
                arguments: Arguments = named_arguments(node, args, kwargs)
                if not (row is not None and row.arithmetic) and not isinstance(arguments.get("self", node), fx.Node):
                    arguments["self"] = self._copies[node.all_input_nodes[0]]
                value = RULES[name](self, arguments)
            if value is not None:
                return value
        return self._copy(node)

    def _copy(self, node: fx.Node) -> fx.Node:
        def copied(arg: fx.Node) -> fx.Node:
            value = self._values[arg]
            return value if isinstance(value, fx.Node) else self._copies[arg]

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), copied)
        return self._create(node.op, node.target, args, kwargs)

    def _number(self, node: fx.Node) -> float | None:
        """The value of a constant (rule 2)."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or value.is_complex() or any(size != 1 for size in sizes_of(value)):
            return None
        if node.op == "get_attr":
            held = operator.attrgetter(str(node.target))(self._root)
            return None if isinstance(held, nn.Parameter) or held.is_meta else float(held)
        row = row_of(node)
        if node.op != "call_function" or row is None or not (row.arithmetic or row is IDENTITY):
            return None
        if any(isinstance(self._values[arg], fx.Node) for arg in node.all_input_nodes):
            return None
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: torch.tensor(self._values[arg]))
        return float(node.target(*args, **kwargs))  # type: ignore[operator]

    def _element(self, maker: fx.Node, index: int) -> Value | None:
        """One result of an op with several, in normal form; ``None``: as it is."""
        source, name, results = self._values[maker], aten_name(maker.target), maker.meta.get("val")
        if not isinstance(source, fx.Node) or source.op != "call_function":
            return None
        arguments: Arguments = named_arguments(maker, source.args, source.kwargs)
        if name == "max" and index == 0:
            return self.reduction(ATEN.amax, arguments, maker)
        if name in ("var_mean", "std_mean"):
            if index == 1:
                return self.reduction(ATEN.mean, arguments, maker)
            variance = self.reduction(ATEN.var, arguments, maker)
            return variance if name == "var_mean" else self.emit(ATEN.sqrt, variance)
        row = row_of(maker)
        if row is None or row.kind != SPLIT.kind or not isinstance(results, (list, tuple)) or len(results) != 2:
            return None
        x, axis = arguments["self"], arguments.get("dim", 0)
        if name == "unbind":
            return self.interleaved(x, axis, index, maker)
        first, second = map(sizes_of, results)
        are_halves = first == second and first[axis] is not None
        return self.emit(HALVES[index], x, axis % rank_of(x), also=(maker,)) if are_halves else None


def _add(form: NormalForm, arguments: Arguments) -> Value | None:
    a, b = arguments["self"], arguments["other"]
    if arguments.get("alpha", 1) != 1 or not (isinstance(a, fx.Node) or isinstance(b, fx.Node)):
        return None
    return form.emit(ATEN.add, a, b) if isinstance(a, fx.Node) else form.emit(ATEN.add, b, a)


def _sub(form: NormalForm, arguments: Arguments) -> Value | None:
    a, b = arguments["self"], arguments["other"]
    if arguments.get("alpha", 1) != 1:
        return None
    return form.emit(ATEN.sub, a, b) if isinstance(b, fx.Node) else form.emit(ATEN.add, a, -b)


def _div(form: NormalForm, arguments: Arguments) -> Value | None:
    if arguments.get("rounding_mode") is not None:
        return None
    return form.product(arguments["self"], form.reciprocal(arguments["other"]))


def _pow(form: NormalForm, arguments: Arguments) -> Value | None:
    x, exponent = arguments["self"], arguments["exponent"]
    if exponent == 3:
        return form.emit(ATEN.mul, form.emit(ATEN.square, x), x)
    if exponent == -1:
        return form.reciprocal(x)
    known = {2: ATEN.square, 0.5: ATEN.sqrt, -0.5: ATEN.rsqrt}
    return form.emit(known[exponent], x) if isinstance(exponent, (int, float)) and exponent in known else None


def _clamp(form: NormalForm, arguments: Arguments) -> Value:
    bounds = arguments.get("min", arguments.get("min_val")), arguments.get("max", arguments.get("max_val"))
    return form.emit(ATEN.clamp, arguments["self"],
                     *(float(bound) if isinstance(bound, int) else bound for bound in bounds))


def _maximum(form: NormalForm, arguments: Arguments) -> Value | None:
    if "other" not in arguments:
        return form.reduction(ATEN.amax, arguments)
    number = arguments["other"]
    return None if isinstance(number, fx.Node) else form.emit(ATEN.clamp, arguments["self"], number, None)


def _softplus(form: NormalForm, arguments: Arguments) -> Value:
    return form.emit(ATEN.softplus, arguments["self"], arguments["beta"], arguments["threshold"])


def _std(form: NormalForm, arguments: Arguments) -> Value:
    return form.emit(ATEN.sqrt, form.reduction(ATEN.var, arguments))


def _norm(form: NormalForm, arguments: Arguments) -> Value | None:
    x = arguments["self"]
    if arguments.get("ord", arguments.get("p")) not in (None, 2):
        return None
    total = form.reduction(ATEN.sum, {**arguments, "self": form.emit(ATEN.square, x), "rank": rank_of(x)})
    return form.emit(ATEN.sqrt, total)


def _linalg_norm(form: NormalForm, arguments: Arguments) -> Value | None:
    """Only a vector norm is rewritten: with an order and two axes, ``linalg_norm`` is a matrix norm."""
    of_vector = arguments["ord"] is None or (arguments["dim"] is not None and len(arguments["dim"]) == 1)
    return _norm(form, arguments) if of_vector else None


def _slice(form: NormalForm, arguments: Arguments) -> Value | None:
    x, axis = arguments["self"], arguments["dim"] % rank_of(arguments["self"])
    length, bounds = sizes_of(x.meta["val"])[axis], (arguments["start"], arguments["end"], arguments["step"])
    if length is None or length % 2 or any(not isinstance(bound, int | None) for bound in bounds):
        return None
    start, end, step = slice(*bounds).indices(length)
    if step == 2 and end == length and start < 2:
        return form.emit(INTERLEAVED[start], x, axis)
    if step == 1 and 2 * (end - start) == length and start in (0, length // 2):
        return form.emit(HALVES[int(start > 0)], x, axis)
    return None


def _select(form: NormalForm, arguments: Arguments) -> Value | None:
    x = arguments["self"]
    return form.interleaved(x, arguments["dim"], arguments["index"]) if isinstance(x, fx.Node) else None


def _reshape(form: NormalForm, arguments: Arguments) -> Value | None:
    x = arguments["self"]
    old, new = sizes_of(x.meta["val"]), form.sizes
    if _are_pairs(new, old):
        return form.emit(pairs, x)
    if _are_pairs(old, new):
        return form.emit(unpairs, x)
    shape = arguments.get("shape", arguments.get("size"))
    return None if shape is None else form.emit(ATEN.reshape, x, shape)


def _are_pairs(longer: Sizes, shorter: Sizes) -> bool:
    if len(longer) != len(shorter) + 1 or len(shorter) < 1:
        return False
    *_, count, two = longer
    return count is not None and two == 2 and shorter[-1] == 2 * count


def _cat(form: NormalForm, arguments: Arguments) -> Value:
    return form.emit(ATEN.cat, arguments["tensors"], arguments["dim"] % len(form.sizes))


def _stack(form: NormalForm, arguments: Arguments) -> Value:
    return form.emit(ATEN.stack, arguments["tensors"], arguments["dim"] % len(form.sizes))


def _reduce(target: Callable[..., Any]) -> Rule:
    return lambda form, arguments: form.reduction(target, arguments)


RULES: dict[str, Rule] = {
    **dict.fromkeys(("mul", "multiply"), lambda form, arguments: form.product(arguments["self"], arguments["other"])),
    **dict.fromkeys(("div", "divide", "true_divide"), _div),
    **dict.fromkeys(("sub", "subtract"), _sub),
    **dict.fromkeys(("clamp", "clip", "clamp_min", "clamp_max", "hardtanh"), _clamp),
    **dict.fromkeys(("max", "maximum"), _maximum),
    **dict.fromkeys(("norm", "linalg_vector_norm"), _norm),
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten"), _reshape),
    **dict.fromkeys(("cat", "concat"), _cat),
    **{name: _reduce(getattr(ATEN, name)) for name in ("sum", "mean", "amax", "var", "logsumexp")},
    "add": _add,
    "rsub": lambda form, arguments: _sub(form, {**arguments, "self": arguments["other"], "other": arguments["self"]}),
    "neg": lambda form, arguments: form.product(arguments["self"], -1),
    "pow": _pow,
    "square": lambda form, arguments: form.emit(ATEN.square, arguments["self"]),
    "sqrt": lambda form, arguments: form.emit(ATEN.sqrt, arguments["self"]),
    "rsqrt": lambda form, arguments: form.emit(ATEN.rsqrt, arguments["self"]),
    "reciprocal": lambda form, arguments: form.reciprocal(arguments["self"]),
    "relu6": lambda form, arguments: form.emit(ATEN.clamp, arguments["self"], 0.0, 6.0),
    "softplus": _softplus,
    "std": _std,
    "linalg_norm": _linalg_norm,
    "slice": _slice,
    "select": _select,
    "stack": _stack,
}
"""Name of an op → the rule that rewrites it. Not in the op table, for only the pattern matcher uses the normal form."""


def sizes_of(value: Tensor) -> Sizes:
    return tuple(size if isinstance(size, int) else None for size in value.shape)


def rank_of(node: fx.Node) -> int:
    return int(node.meta["val"].ndim)
