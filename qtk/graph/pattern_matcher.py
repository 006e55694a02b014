"""Finds in a graph what a piece of torch code computes, in whatever ops the graph spells it.

Code and graph are both brought into one normal form, which computes the same with fewer ways to say it:

1. Copies, casts between floats and products with 1 vanish.
2. Constants of one element that are no parameters, and what is computed from them alone, are numbers.
3. ``a / b`` is ``a · (1/b)`` and ``1/sqrt(a)`` is ``rsqrt(a)``; the powers ½, −½, −1, 2 and 3 are the ops they stand
   for, ``a · a`` is ``square(a)``, ``a − number`` is ``a + −number``.
4. The number of a sum or product is its second operand.
5. ``relu6``, ``hardtanh``, a ``maximum`` with a number and the like are ``clamp``.
6. A standard deviation is the root of a variance, a norm the root of a sum of squares; axes count from the front.
7. The halves of an axis are one op each, however they are cut out; so are its even and its odd entries.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.utils.matcher_utils import InternalMatch, SubgraphMatcher

from qtk.graph.op_table import ROWS, row_of
from qtk.graph.sites import is_float

aten = torch.ops.aten

Value: TypeAlias = fx.Node | float
"""What an op of the normal form reads: a node or a number."""

Given: TypeAlias = dict[str, Any]
"""The arguments of an op by name, defaults filled in."""

PARAMETERS = ("weight", "bias")
"""Names of a pattern's arguments that stand for what is made from parameters alone."""

NUMBERS = ("eps", "factor")
"""Names that stand for any number."""

TABLES = ("cos", "sin")
"""Names that stand for data or parameters; all other names stand for data."""

TOLERANCE = 1e-3
"""How far, relatively, a number may be from that of the pattern."""


COPIES = {name for name, row in ROWS.items() if row.kind == "identity"}

FOLDED = {*COPIES, "full", "scalar_tensor", "add", "sub", "mul", "div", "pow", "sqrt", "rsqrt", "reciprocal", "neg"}
"""Ops that make numbers of numbers."""


def first_half(x: Tensor, axis: int) -> Tensor:
    return x.narrow(axis, 0, x.shape[axis] // 2)


def second_half(x: Tensor, axis: int) -> Tensor:
    return x.narrow(axis, x.shape[axis] // 2, x.shape[axis] // 2)


def evens(x: Tensor, axis: int) -> Tensor:
    return x.unflatten(axis, (-1, 2)).select(axis + 1, 0)


def odds(x: Tensor, axis: int) -> Tensor:
    return x.unflatten(axis, (-1, 2)).select(axis + 1, 1)


def pairs(x: Tensor) -> Tensor:
    """``[…, 2n] → […, n, 2]``."""
    return x.unflatten(-1, (-1, 2))


def unpairs(x: Tensor) -> Tensor:
    """``[…, n, 2] → […, 2n]``."""
    return x.flatten(-2)


Pair: TypeAlias = tuple[Value | None, Value | None, bool]
"""What the pattern has, what the graph has, and whether an elementwise op reads it."""

Rule: TypeAlias = "Callable[[NormalForm, Given], Value | None]"
"""How an op reads in normal form; ``None``: as it is."""

HALVES, TURNS = (first_half, second_half), (evens, odds)
COMMUTATIVE = (aten.add, aten.mul)
NUMERIC = (*COMMUTATIVE, aten.sub, aten.clamp, aten.softplus)
"""Ops whose numbers are part of what they compute; those of others are axes and shapes."""

ELEMENTWISE = (*NUMERIC, aten.reciprocal, aten.sqrt, aten.rsqrt)
BROADCASTS = (aten.expand.default, aten.expand_as.default, aten.unsqueeze.default)
"""Ops that an elementwise reader would do by itself."""

OVER_AXES = (aten.sum, aten.mean, aten.amax, aten.var, aten.logsumexp, aten.cat, aten.stack, *HALVES, *TURNS)
"""Ops whose second argument is the axes they work on."""


class NormalForm:
    """The normal form of a graph, as a graph of its own that computes the same.

    ``made_by`` has the original ops behind each of its nodes, the one that made the value last; ``passed`` are the
    originals that rule 1 removed; ``static`` the nodes made from parameters alone.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = fx.Graph()
        self.made_by: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self.passed: set[fx.Node] = set()
        self.static: set[fx.Node] = set()
        self.by_target: dict[object, list[fx.Node]] = defaultdict(list)
        self._root = graph.owning_module
        self._values: dict[fx.Node, Value] = {}
        self._copies: dict[fx.Node, fx.Node] = {}
        for self._node in graph.nodes:
            self._values[self._node] = self._value(self._node)

    @property
    def shape(self) -> torch.Size:
        """The shape of the value that is being made."""
        shape: torch.Size = self._node.meta["val"].shape
        return shape

    def emit(self, target: Callable[..., Any], *args: Any, also: tuple[fx.Node, ...] = (), **kwargs: Any) -> fx.Node:
        """A new op; ``also`` are the originals it stands for besides the present one."""
        return self._create("call_function", target, args, kwargs, also)

    def product(self, a: Value, b: Value) -> Value:
        if not isinstance(a, fx.Node):
            a, b = b, a
        if not isinstance(a, fx.Node):
            return a * b  # type: ignore[operator]
        if b == 1:
            self.passed.add(self._node)
            return a
        return self.emit(aten.square, a) if a is b else self.emit(aten.mul, a, b)

    def reciprocal(self, a: Value) -> Value:
        if not isinstance(a, fx.Node):
            return 1 / a if a else math.inf
        if a.target is aten.sqrt:
            return self.emit(aten.rsqrt, a.args[0], also=self.made_by[a])
        return self.emit(aten.reciprocal, a)

    def reduction(self, target: Callable[..., Any], given: Given, *also: fx.Node) -> fx.Node:
        x, dim, kwargs = given["self"], given.get("dim"), {"keepdim": bool(given.get("keepdim"))}
        rank = given.get("rank", _rank(x))
        dims = range(rank) if dim in (None, [], ()) else dim if isinstance(dim, (list, tuple)) else (dim,)
        if target is aten.var:
            correction = given.get("correction", int(given.get("unbiased", True)))
            kwargs["correction"] = 1 if correction is None else correction
        return self.emit(target, x, tuple(sorted(axis % rank for axis in dims)), also=also, **kwargs)

    def turn(self, x: fx.Node, axis: int, index: int, *also: fx.Node) -> fx.Node | None:
        """The even or the odd entries of an axis that was cut into pairs."""
        if x.target is not pairs or axis % _rank(x) != _rank(x) - 1 or index not in (0, 1):
            return None
        return self.emit(TURNS[index], x.args[0], _rank(x) - 2, also=(*self.made_by[x], *also))

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
        number = self._number(node)
        if number is not None:
            self._copies[node] = self._copy(node)  # for readers that want a tensor
            return number
        if node.op == "call_function" and is_float(node):
            args: Any = fx.node.map_arg(node.args, self._values.__getitem__)
            kwargs: Any = fx.node.map_arg(node.kwargs, self._values.__getitem__)
            name, value = _name(node), None
            if node.target is operator.getitem:
                value = self._element(node.all_input_nodes[0], args[1])
            elif name in COPIES and is_float(node.all_input_nodes[0]):
                self.passed.add(node)
                value = args[0]
            elif name in RULES:
                value = RULES[name](self, _given(node, args, kwargs))
            if value is not None:
                return value
        return self._copy(node)

    def _copy(self, node: fx.Node) -> fx.Node:
        def copied(arg: fx.Node) -> fx.Node:
            value = self._values[arg]
            return value if isinstance(value, fx.Node) else self._copies[arg]

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), copied)  # type: ignore[misc]
        return self._create(node.op, node.target, args, kwargs)

    def _number(self, node: fx.Node) -> float | None:
        """The value of a constant (rule 2)."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or value.is_complex() or value.numel() != 1:
            return None
        if node.op == "get_attr":
            held = operator.attrgetter(str(node.target))(self._root)
            return None if isinstance(held, nn.Parameter) or held.is_meta else float(held)
        if node.op != "call_function" or _name(node) not in FOLDED:
            return None
        if any(isinstance(self._values[arg], fx.Node) for arg in node.all_input_nodes):
            return None
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: torch.tensor(self._values[arg]))
        return float(node.target(*args, **kwargs))  # type: ignore[operator, misc]

    def _element(self, maker: fx.Node, index: int) -> Value | None:
        """One of the results of an op that has several."""
        source, name, parts = self._values[maker], _name(maker), maker.meta.get("val")
        if not isinstance(source, fx.Node) or source.op != "call_function":
            return None
        given = _given(maker, source.args, source.kwargs)
        if name == "max" and index == 0:
            return self.reduction(aten.amax, given, maker)
        if name in ("var_mean", "std_mean"):
            if index == 1:
                return self.reduction(aten.mean, given, maker)
            variance = self.reduction(aten.var, given, maker)
            return variance if name == "var_mean" else self.emit(aten.sqrt, variance)
        row = row_of(maker)
        if row is None or row.kind != "split" or not isinstance(parts, (list, tuple)) or len(parts) != 2:
            return None
        x, axis = given["self"], given.get("dim", 0)
        if name == "unbind":
            return self.turn(x, axis, index, maker)
        same = parts[0].shape == parts[1].shape
        return self.emit(HALVES[index], x, axis % _rank(x), also=(maker,)) if same else None


def _add(form: NormalForm, given: Given) -> Value | None:
    a, b = given["self"], given["other"]
    if given.get("alpha", 1) != 1 or not (isinstance(a, fx.Node) or isinstance(b, fx.Node)):
        return None
    return form.emit(aten.add, a, b) if isinstance(a, fx.Node) else form.emit(aten.add, b, a)


def _sub(form: NormalForm, given: Given) -> Value | None:
    a, b = given["self"], given["other"]
    if given.get("alpha", 1) != 1:
        return None
    return form.emit(aten.sub, a, b) if isinstance(b, fx.Node) else form.emit(aten.add, a, -b)


def _div(form: NormalForm, given: Given) -> Value | None:
    whole = given.get("rounding_mode") is None
    return form.product(given["self"], form.reciprocal(given["other"])) if whole else None


def _pow(form: NormalForm, given: Given) -> Value | None:
    x, exponent = given["self"], given["exponent"]
    if exponent == 3:
        return form.emit(aten.mul, form.emit(aten.square, x), x)
    if exponent == -1:
        return form.reciprocal(x)
    known = {2: aten.square, 0.5: aten.sqrt, -0.5: aten.rsqrt}
    return form.emit(known[exponent], x) if isinstance(exponent, (int, float)) and exponent in known else None


def _clamp(form: NormalForm, given: Given) -> Value:
    return form.emit(aten.clamp, given["self"], given.get("min", given.get("min_val")),
                     given.get("max", given.get("max_val")))


def _maximum(form: NormalForm, given: Given) -> Value | None:
    if "other" not in given:
        return form.reduction(aten.amax, given)
    number = given["other"]
    return None if isinstance(number, fx.Node) else form.emit(aten.clamp, given["self"], number, None)


def _std(form: NormalForm, given: Given) -> Value:
    return form.emit(aten.sqrt, form.reduction(aten.var, given))


def _norm(form: NormalForm, given: Given) -> Value | None:
    x = given["self"]
    if given.get("ord", given.get("p")) not in (None, 2):
        return None
    total = form.reduction(aten.sum, {**given, "self": form.emit(aten.square, x), "rank": _rank(x)})
    return form.emit(aten.sqrt, total)


def _linalg_norm(form: NormalForm, given: Given) -> Value | None:
    """With an order and two axes it is a norm of matrices."""
    of_vector = given["ord"] is None or (given["dim"] is not None and len(given["dim"]) == 1)
    return _norm(form, given) if of_vector else None


def _slice(form: NormalForm, given: Given) -> Value | None:
    x, axis = given["self"], given["dim"] % _rank(given["self"])
    length, bounds = x.meta["val"].shape[axis], (given["start"], given["end"], given["step"])
    if any(not isinstance(number, int | None) for number in (length, *bounds)) or length % 2:
        return None
    start, end, step = slice(*bounds).indices(length)
    if step == 2 and end == length and start < 2:
        return form.emit(TURNS[start], x, axis)
    if step == 1 and 2 * (end - start) == length and start in (0, length // 2):
        return form.emit(HALVES[int(start > 0)], x, axis)
    return None


def _select(form: NormalForm, given: Given) -> Value | None:
    return form.turn(given["self"], given["dim"], given["index"]) if isinstance(given["self"], fx.Node) else None


def _reshape(form: NormalForm, given: Given) -> Value | None:
    x = given["self"]
    old, new = x.meta["val"].shape, form.shape
    if _are_pairs(new, old):
        return form.emit(pairs, x)
    return form.emit(unpairs, x) if _are_pairs(old, new) else None


def _are_pairs(longer: torch.Size, shorter: torch.Size) -> bool:
    if len(longer) != len(shorter) + 1 or len(shorter) < 1:
        return False
    *_, count, two = longer
    return isinstance(count, int) and two == 2 and shorter[-1] == 2 * count


def _cat(form: NormalForm, given: Given) -> Value:
    return form.emit(aten.cat, given["tensors"], given["dim"] % len(form.shape))


def _stack(form: NormalForm, given: Given) -> Value:
    return form.emit(aten.stack, given["tensors"], given["dim"] % len(form.shape))


def _reduce(target: Callable[..., Any]) -> Rule:
    return lambda form, given: form.reduction(target, given)


RULES: dict[str, Rule] = {
    **dict.fromkeys(("mul", "multiply"), lambda form, given: form.product(given["self"], given["other"])),
    **dict.fromkeys(("div", "divide", "true_divide"), _div),
    **dict.fromkeys(("sub", "subtract"), _sub),
    **dict.fromkeys(("clamp", "clip", "clamp_min", "clamp_max", "hardtanh"), _clamp),
    **dict.fromkeys(("max", "maximum"), _maximum),
    **dict.fromkeys(("norm", "linalg_vector_norm"), _norm),
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten"), _reshape),
    **dict.fromkeys(("cat", "concat"), _cat),
    **{name: _reduce(getattr(aten, name)) for name in ("sum", "mean", "amax", "var", "logsumexp")},
    "add": _add,
    "rsub": lambda form, given: _sub(form, {**given, "self": given["other"], "other": given["self"]}),
    "neg": lambda form, given: form.product(given["self"], -1),
    "pow": _pow,
    "square": lambda form, given: form.emit(aten.square, given["self"]),
    "sqrt": lambda form, given: form.emit(aten.sqrt, given["self"]),
    "rsqrt": lambda form, given: form.emit(aten.rsqrt, given["self"]),
    "reciprocal": lambda form, given: form.reciprocal(given["self"]),
    "relu6": lambda form, given: form.emit(aten.clamp, given["self"], 0, 6),
    "softplus": lambda form, given: form.emit(aten.softplus, given["self"], given["beta"], given["threshold"]),
    "std": _std,
    "linalg_norm": _linalg_norm,
    "slice": _slice,
    "select": _select,
    "stack": _stack,
}
"""Name of an op → how it reads in normal form; ``None`` from a rule: as it is."""


def _name(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return "" if schema is None else schema.name.removeprefix("aten::")


def _given(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    return {**given, **{argument.name: value for argument, value in zip(schema, args, strict=False)}, **kwargs}


def _rank(node: fx.Node) -> int:
    return int(node.meta["val"].ndim)


@dataclass
class SpellingMatch(InternalMatch):  # type: ignore[misc]
    """A match in the making: what the placeholders stand for, the ops it took from the normal form."""

    arguments: dict[str, Value] = field(default_factory=dict)
    ops: list[fx.Node] = field(default_factory=list)


class PatternMatcher(SubgraphMatcher):  # type: ignore[misc]
    """One spelling, to be looked for at one op after the other.

    Beyond what torch's matcher does: operands of sums and products match in either order, with backtracking; numbers
    match within ``TOLERANCE``; a placeholder takes what its name allows; a value that is read twice may be computed
    twice; all ops of a match that work on axes work on the same.

    Args:
        code: normal form of the spelling.
    """

    def __init__(self, code: NormalForm) -> None:
        code.graph.eliminate_dead_code()
        super().__init__(code.graph)
        ops = [node for node in code.graph.nodes if node.op == "call_function" and node.target not in BROADCASTS]
        self.size = len(ops)
        self.targets = {node.target for node in ops}

    def matches(self, form: NormalForm) -> Iterator[SpellingMatch]:
        """Every match in a graph; they may overlap."""
        if not self.targets <= form.by_target.keys():
            return
        (anchor,) = self.pattern_anchors
        for node in form.by_target[anchor.target]:
            match = SpellingMatch([anchor])
            if self._match_all(((anchor, node, False),), match, form):
                yield match

    def _match_all(self, todo: tuple[Pair, ...], match: SpellingMatch, form: NormalForm) -> bool:
        """Whether all pairs match, and with them the whole; ``match`` is left as it was if they do not."""
        if not todo:
            return _has_one_set_of_axes(match) and inner_ops(match, form) is not None
        (pattern, value, elementwise), *others = todo
        rest = tuple(others)
        if not isinstance(pattern, fx.Node):
            return _is_number(pattern, value) and self._match_all(rest, match, form)
        if pattern.op == "placeholder":
            return self._bind(str(pattern.target), value, rest, match, form)
        ops = list(_through_broadcasts(value)) if elementwise else [value]
        if not isinstance(ops[-1], fx.Node) or not self._nodes_are_equal(pattern, ops[-1]):
            return False
        before = len(match.ops)
        match.ops += ops
        for operands in _orders(pattern, ops[-1]):
            if self._match_all((*operands, *rest), match, form):
                return True
        del match.ops[before:]
        return False

    def _bind(
        self, name: str, value: Value, rest: tuple[Pair, ...], match: SpellingMatch, form: NormalForm
    ) -> bool:
        bound = match.arguments
        if name in bound:
            same = bound[name] is value if isinstance(value, fx.Node) else bound[name] == value
            return same and self._match_all(rest, match, form)
        if not _takes(name, value, form) or (name not in NUMBERS and any(value is other for other in bound.values())):
            return False
        bound[name] = value
        if self._match_all(rest, match, form):
            return True
        del bound[name]
        return False


def inner_ops(match: SpellingMatch, form: NormalForm) -> list[fx.Node] | None:
    """The original ops of a match, the last value's among them; ``None`` if an inner value is read outside."""
    last = form.made_by[match.ops[0]][-1]
    inside = {node for op in match.ops for node in form.made_by[op]}
    unseen = [node for node in inside if node is not last]
    while unseen:
        for user in unseen.pop().users:
            if user in inside:
                continue
            if user not in form.passed:
                return None
            inside.add(user)
            unseen.append(user)
    return list(inside)


def _takes(name: str, value: Value, form: NormalForm) -> bool:
    """Whether a placeholder of this name can stand for ``value``."""
    if name in NUMBERS or not isinstance(value, fx.Node):
        return name in NUMBERS and not isinstance(value, fx.Node)
    return is_float(value) and (name in TABLES or (value in form.static) == (name in PARAMETERS))


def _is_number(wanted: float | None, value: Value | None) -> bool:
    if wanted is None or value is None or isinstance(value, fx.Node):
        return wanted is value
    return abs(value - wanted) <= TOLERANCE * abs(wanted)


def _through_broadcasts(value: Value) -> Iterator[Value]:
    yield value
    while isinstance(value, fx.Node) and value.target in BROADCASTS:
        value = value.args[0]  # type: ignore[assignment]
        yield value


def _orders(pattern: fx.Node, value: fx.Node) -> Iterator[list[Pair]]:
    """How the operands of two calls of one op may belong together; what says most about the match goes first."""
    wanted, given = _operands(pattern), _operands(value)
    if len(wanted) != len(given):
        return
    elementwise = pattern.target in ELEMENTWISE
    for operands in (given, given[::-1]) if pattern.target in COMMUTATIVE else (given,):
        together = [(p, g, elementwise) for p, g in zip(wanted, operands, strict=True)]
        yield sorted(together, key=lambda pair: isinstance(pair[0], fx.Node) and pair[0].op == "placeholder")


def _operands(node: fx.Node) -> list[Value | None]:
    """What ``node`` computes with: its tensors, and its numbers if they are operands."""
    if node.target in NUMERIC:
        return list(node.args)  # type: ignore[arg-type]
    first = node.args[0]
    return list(first) if isinstance(first, (list, tuple)) else [first]  # type: ignore[list-item, arg-type]


def _has_one_set_of_axes(match: SpellingMatch) -> bool:
    found = set()
    for op in match.ops:
        if op.target in OVER_AXES:
            axes = op.args[1]
            found.add(axes if isinstance(axes, tuple) else (axes - (op.target is aten.stack),))  # type: ignore[operator]
    return len(found) <= 1
