"""Formulas that models write in small ops and the planner treats as one op. To add a pattern, add a row.

A spelling is plain torch code. Its arguments called ``weight`` and ``bias`` match parameters, ``eps`` and ``factor``
any number, ``cos`` and ``sin`` data or parameters, all others data. Numbers in the code must equal the model's; the
axes need not, if they are the same everywhere in one match. Spellings with the same normal form need one row only
(``normal_form``, ``pattern_matcher``). The spellings of a row are traced when a graph first has the ops of the row.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from qtk.graph.sites import EXCLUDED, label
from qtk.operators.op_table import OP_NAMES
from qtk.planning.normal_form import HALVES, INTERLEAVED, NormalForm
from qtk.planning.pattern_matcher import NUMBERS, PARAMETERS, TABLES, PatternMatcher, inner_ops
from qtk.torch_private import TorchDispatchMode, pytree

ATEN = torch.ops.aten

Spelling: TypeAlias = Callable[..., Tensor]

Core: TypeAlias = Callable[..., tuple[Tensor, Tensor]]
"""Computes the ``value`` and the ``scale`` that a product reads."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """One op and ways to write it.

    Args:
        kind: a kind of the op table, ``l2_normalize``, ``rotary`` or ``gate``.
        ops: ops of the normal form that all of these ways have; graphs without one of them are not searched.
        spellings: torch codes that compute it, or, for ``products``, the value and the scale that they read.
        products: torch codes that compute it from a ``value`` and its ``scale``, as every spelling computes them.
    """

    kind: str
    ops: frozenset[object]
    spellings: tuple[Spelling | Core, ...]
    products: tuple[Spelling, ...] = ()


@dataclass(frozen=True, slots=True)
class PatternMatch:
    """A formula in a graph that matches a pattern.

    Args:
        kind: kind of the pattern.
        nodes: its ops in graph order; the last produces the result.
        weight: the node matched with ``weight``, which may be a reshape of a parameter; ``None`` if there is none.
        bias: likewise.
    """

    kind: str
    nodes: tuple[fx.Node, ...]
    weight: fx.Node | None
    bias: fx.Node | None


# Norms are a value times a scale, times a weight, plus a bias.


def _centered(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def _square_mean(x: Tensor) -> Tensor:
    return x.square().mean(-1, keepdim=True)


def _square_sum(x: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True)


VARIANCES: tuple[Spelling, ...] = (
    lambda x: _square_mean(_centered(x)),
    lambda x: x.var(-1, keepdim=True),
    lambda x: _square_mean(x) - x.mean(-1, keepdim=True).square(),
)

INVERSE_ROOTS: Mapping[object, tuple[Spelling, ...]] = {
    ATEN.rsqrt: (lambda square, eps: torch.rsqrt(square + eps), lambda square, eps: torch.rsqrt(square)),
    ATEN.reciprocal: (lambda square, eps: 1 / (torch.sqrt(square) + eps),),
}
"""Op of the normal form → the codes that have it."""

INVERSE_NORMS: Mapping[object, tuple[Spelling, ...]] = {
    ATEN.rsqrt: (*INVERSE_ROOTS[ATEN.rsqrt], lambda square, eps: torch.rsqrt(square.clamp(min=eps))),
    ATEN.reciprocal: (*INVERSE_ROOTS[ATEN.reciprocal], lambda square, eps: 1 / torch.sqrt(square).clamp(min=eps)),
}


def _layer_norm(variance: Spelling, inverse: Spelling) -> Core:
    return lambda x, eps: (_centered(x), inverse(variance(x), eps))


def _rms_norm(inverse: Spelling) -> Core:
    return lambda x, eps: (x, inverse(_square_mean(x), eps))


def _l2_normalize(inverse: Spelling) -> Core:
    return lambda x, eps: (x, inverse(_square_sum(x), eps))


def _product(value: Tensor, scale: Tensor) -> Tensor:
    return value * scale


WEIGHTED: tuple[Spelling, ...] = (
    lambda value, scale, weight: value * scale * weight,
    lambda value, scale, weight: value * weight * scale,
    lambda value, scale, weight: value * (scale * weight),
    lambda value, scale, weight: value * scale * (1 + weight),
)

LENGTH_WEIGHTED: tuple[Spelling, ...] = (
    lambda value, scale, factor, weight: value * scale * factor * weight,
    lambda value, scale, factor, weight: value * scale * weight * factor,
    lambda value, scale, factor, weight: value * scale * factor * (1 + weight),
)
"""RMS norms computed from the L2 norm, with a number as the root of the length."""


def _biased(weighted: Spelling) -> Spelling:
    return lambda value, scale, weight, bias: weighted(value, scale, weight) + bias


def _norms(op: object) -> tuple[Pattern, ...]:
    """The norms whose scale ends in an op of the normal form."""
    layer_norms = tuple(_layer_norm(variance, inverse) for variance in VARIANCES for inverse in INVERSE_ROOTS[op])
    rms_norms, l2_norms = (tuple(map(norm, INVERSE_NORMS[op])) for norm in (_rms_norm, _l2_normalize))
    return (
        Pattern("layer_norm", frozenset({ATEN.sub, ATEN.mean, op}), layer_norms,
                (_product, *WEIGHTED, *map(_biased, WEIGHTED))),
        Pattern("rms_norm", frozenset({ATEN.square, ATEN.mean, op}), rms_norms, (_product, *WEIGHTED)),
        Pattern("rms_norm", frozenset({ATEN.square, ATEN.sum, op}), l2_norms, LENGTH_WEIGHTED),
        Pattern("l2_normalize", frozenset({ATEN.square, ATEN.sum, op}), l2_norms, (_product, *WEIGHTED)),
    )


# Activations.

GELU_ARGUMENTS: tuple[Spelling, ...] = (
    lambda x: x + 0.044715 * x**3,
    lambda x: x + 0.044715 * x * x * x,
    lambda x: x + 0.044715 * x**2 * x,
    lambda x: x * (1 + 0.044715 * x**2),
    lambda x: x * (1 + 0.044715 * x * x),
)


def _tanh_of(argument: Spelling) -> Spelling:
    return lambda x: torch.tanh(math.sqrt(2 / math.pi) * argument(x))


TANHS: tuple[Spelling, ...] = (
    *map(_tanh_of, GELU_ARGUMENTS),
    lambda x: torch.tanh(math.sqrt(2 / math.pi) * x * (1 + 0.044715 * x**2)),
    lambda x: torch.tanh(math.sqrt(2 / math.pi) * x * (1 + 0.044715 * x * x)),
)


def _erf_of_x(x: Tensor) -> Tensor:
    return torch.erf(x / math.sqrt(2))


def _gelu(scale: Spelling) -> Core:
    return lambda x: (x, scale(x))


GELUS: tuple[Spelling, ...] = (
    lambda value, scale: 0.5 * value * (1 + scale),
    lambda value, scale: 0.5 * (value * (1 + scale)),
    lambda value, scale: value * (0.5 * (1 + scale)),
)

HARD_SIGMOIDS: tuple[Spelling, ...] = (
    lambda x: F.relu6(x + 3) / 6,
    lambda x: (x / 6 + 0.5).clamp(0, 1),
)


def _times(activation: Spelling) -> Spelling:
    return lambda x: x * activation(x)


def _gate(of: Spelling) -> tuple[Spelling, ...]:
    return lambda x, s: x * of(s), lambda x, s: x * of(s).reshape(s.shape)


def _softmax(exponent: Spelling) -> tuple[Spelling, ...]:
    return (
        lambda x: exponent(x) / exponent(x).sum(-1, keepdim=True),
        lambda x, eps: exponent(x) / (exponent(x).sum(-1, keepdim=True) + eps),
    )



# Rotary embeddings: pairs of entries turned, a pair in the two halves of an axis or side by side.


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    first, second = x.chunk(2, -1)
    return first, second


def _join_halves(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat((a, b), -1)


def _interleaved(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., ::2], x[..., 1::2]


def _interleave(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack((a, b), -1).flatten(-2)


def _rotary(split: Callable[[Tensor], tuple[Tensor, Tensor]], join: Spelling) -> tuple[Spelling, ...]:
    def on_vectors(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = split(x)
        return x * cos + join(-b, a) * sin

    def on_components(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = split(x)
        return join(a * cos - b * sin, b * cos + a * sin)

    return on_vectors, on_components


PATTERNS: tuple[Pattern, ...] = (
    *(pattern for op in INVERSE_NORMS for pattern in _norms(op)),
    Pattern("rms_norm", frozenset({ATEN.square, ATEN.sum, ATEN.sqrt, ATEN.reciprocal}), (
        lambda x, factor, eps, weight: x / (torch.sqrt(_square_sum(x)) * factor).clamp(min=eps) * weight,
        lambda x, factor, eps, weight: weight * (x / (torch.sqrt(_square_sum(x)) * factor + eps)),
    )),
    Pattern("gelu", frozenset({ATEN.mul, ATEN.add, ATEN.erf.default}), (_gelu(_erf_of_x),), GELUS),
    Pattern("gelu", frozenset({ATEN.mul, ATEN.add, ATEN.tanh.default}), tuple(map(_gelu, TANHS)), GELUS),
    Pattern("gelu", frozenset({ATEN.mul, ATEN.sigmoid.default}), (lambda x: x * torch.sigmoid(1.702 * x),)),
    Pattern("silu", frozenset({ATEN.mul, ATEN.sigmoid.default}), (lambda x: x * torch.sigmoid(x),)),
    Pattern("silu", frozenset({ATEN.mul, ATEN.reciprocal, ATEN.exp.default}), (lambda x: x / (1 + torch.exp(-x)),)),
    Pattern("hardswish", frozenset({ATEN.mul, ATEN.add, ATEN.clamp}), (
        lambda x: x * F.relu6(x + 3) / 6,
        lambda x: x / 6 * F.relu6(x + 3),
        *(_times(hard_sigmoid) for hard_sigmoid in HARD_SIGMOIDS),
    )),
    Pattern("hardswish", frozenset({ATEN.mul, ATEN.hardsigmoid.default}), (lambda x: x * F.hardsigmoid(x),)),
    Pattern("mish", frozenset({ATEN.mul, ATEN.tanh.default, ATEN.softplus}),
            (lambda x: x * torch.tanh(F.softplus(x)),)),
    Pattern("mish", frozenset({ATEN.mul, ATEN.tanh.default, ATEN.log.default, ATEN.exp.default}),
            (lambda x: x * torch.tanh(torch.log(1 + torch.exp(x))),)),
    Pattern("sigmoid", frozenset({ATEN.mul, ATEN.reciprocal, ATEN.exp.default}), (lambda x: 1 / (1 + torch.exp(-x)),)),
    Pattern("hardsigmoid", frozenset({ATEN.mul, ATEN.add, ATEN.clamp}), HARD_SIGMOIDS),
    Pattern("softmax", frozenset({ATEN.sum, ATEN.reciprocal, ATEN.exp.default}), (
        *_softmax(torch.exp), *_softmax(lambda x: torch.exp(x - x.amax(-1, keepdim=True))),
    )),
    Pattern("rotary", frozenset({ATEN.mul, ATEN.cat, *HALVES}), _rotary(_halves, _join_halves)),
    Pattern("rotary", frozenset({ATEN.mul, ATEN.stack, *INTERLEAVED}), _rotary(_interleaved, _interleave)),
    Pattern("gate", frozenset({ATEN.mul, ATEN.sigmoid.default}), _gate(torch.sigmoid)),
    Pattern("gate", frozenset({ATEN.mul, ATEN.hardsigmoid.default}), _gate(F.hardsigmoid)),
    Pattern("gate", frozenset({ATEN.mul, ATEN.add, ATEN.clamp}), (*_gate(HARD_SIGMOIDS[0]), *_gate(HARD_SIGMOIDS[1]))),
)

RULE_NAMES = OP_NAMES | {pattern.kind for pattern in PATTERNS}
"""Every name of an op that a config rule may use, formulas among them."""


def match_patterns(graph: fx.Graph) -> list[PatternMatch]:
    """The formulas in a captured graph, disjoint and in graph order; larger patterns are matched first.

    No op outside a match reads its inner values; constants and parameters may be shared. A formula computed from
    parameters alone, or with an excluded op in it, is no match. The graph is only read.
    """
    form = NormalForm(graph)
    position = {node: index for index, node in enumerate(graph.nodes)}
    taken: set[fx.Node] = set()
    matches = []
    for kind, matcher in _matchers(form.by_target.keys()):
        for match in matcher.matches(form):
            nodes = inner_ops(match, form)
            assert nodes is not None
            if taken.isdisjoint(nodes) and not any(label(node, EXCLUDED) for node in nodes):
                taken.update(nodes)
                weight, bias = (form.original(match.arguments.get(name)) for name in ("weight", "bias"))
                matches.append(PatternMatch(kind, tuple(sorted(nodes, key=position.__getitem__)), weight, bias))
    return sorted(matches, key=lambda match: position[match.nodes[-1]])


def _matchers(present: Set[object]) -> list[tuple[str, PatternMatcher]]:
    """The matchers of all patterns whose ops a graph has, the larger first."""
    matchers = [(pattern.kind, each) for pattern in PATTERNS if pattern.ops <= present for each in matchers_of(pattern)]
    return sorted(matchers, key=lambda pair: -pair[1].size)


@functools.cache
def matchers_of(pattern: Pattern) -> tuple[PatternMatcher, ...]:
    """A matcher for every way to write a pattern: for each spelling, or for each with each product."""
    spellings, products = (map(normal_form, codes) for codes in (pattern.spellings, pattern.products))
    ways = itertools.starmap(_inserted, itertools.product(spellings, products)) if pattern.products else spellings
    return tuple(map(PatternMatcher, ways))


@functools.cache
def normal_form(code: Spelling | Core) -> fx.Graph:
    """The normal form of a code, without what nothing reads; traced once."""
    graph = NormalForm(trace(code)).graph
    graph.eliminate_dead_code()
    return graph


def _inserted(core: fx.Graph, product: fx.Graph) -> fx.Graph:
    """A product that reads the results of a core instead of its first two arguments."""
    whole, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    results: Any = whole.graph_copy(core, copies)
    copies.update(zip(product.find_nodes(op="placeholder"), results, strict=False))
    whole.output(whole.graph_copy(product, copies))
    return whole


def trace(code: Spelling | Core) -> fx.Graph:
    """The ATen ops that ``code`` runs, on small inputs; its arguments become placeholders of their names."""
    recorder = _Recorder()
    shapes = {**dict.fromkeys(NUMBERS, ()), **dict.fromkeys((*PARAMETERS, *TABLES), (1,))}
    inputs = [recorder.placeholder(name, shapes.get(name, (2, 4, 8))) for name in inspect.signature(code).parameters]
    with torch.no_grad(), recorder:
        result = code(*inputs)
    recorder.graph.output(pytree.tree_map_only(Tensor, lambda value: recorder.nodes[id(value)], result))
    return recorder.graph


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes every op that runs into a graph, at a tenth of the cost of ``make_fx``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = fx.Graph()
        self.nodes: dict[int, fx.Node] = {}
        self._alive: list[Tensor] = []

    def placeholder(self, name: str, shape: tuple[int, ...]) -> Tensor:
        value = torch.empty(shape, device="meta")
        self._record(self.graph.placeholder(name), value)
        return value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read: Any = pytree.tree_map_only(Tensor, lambda value: self.nodes[id(value)], (args, kwargs or {}))
        node = self.graph.call_function(func, *read)
        self._record(node, result)
        for index, element in enumerate(result if isinstance(result, (list, tuple)) else ()):
            self._record(self.graph.call_function(operator.getitem, (node, index)), element)
        return result

    def _record(self, node: fx.Node, value: Any) -> None:
        node.meta["val"] = value
        self.nodes[id(value)] = node
        self._alive.append(value)  # so that nothing else gets its id
