"""Supergroups by pattern: formulas spelled out in small ops, each quantized as the one op it is.

A spelling is plain torch code on ``x``. Its arguments ``weight`` and ``bias`` are parameters of the op, ``eps`` may be any
number, all others any value. To add a pattern, add a row.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from qtk.graph.flow import Flow
from qtk.graph.pattern_matcher import PatternMatcher, through

Spelling = Callable[..., Tensor]
Moments = Callable[[Tensor], tuple[Tensor, Tensor]]
"""x → what is scaled, and the second moment it is scaled by."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """One op and the ways to spell it.

    Args:
        kind: the name that config rules use.
        spellings: functions of tensors.
        telling: ATen ops of which every spelling has at least one; a graph without them is not searched.
    """

    kind: str
    spellings: tuple[Spelling, ...]
    telling: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PatternMatch:
    """A formula found in a graph.

    Args:
        kind: of its pattern.
        nodes: its ops in graph order; the last makes the value.
        weight: the parameter that multiplies, as the formula reads it.
        bias: the parameter that is added.
    """

    kind: str
    nodes: tuple[fx.Node, ...]
    weight: fx.Node | None = None
    bias: fx.Node | None = None


def match_patterns(graph: fx.Graph, flow: Flow) -> list[PatternMatch]:
    """Disjoint matches in graph order; where several overlap the one with more ops wins."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    present = {node.target for node in graph.nodes}
    schemas = (getattr(op, "_schema", None) for op in present)
    names = {schema.name.removeprefix("aten::") for schema in schemas if schema is not None}
    candidates = [
        traced for index, pattern in enumerate(PATTERNS) if not names.isdisjoint(pattern.telling)
        for traced in _traced(index) if traced.targets <= present
    ]
    taken: set[fx.Node] = set()
    found = []
    for traced in sorted(candidates, key=lambda traced: -len(traced.graph.nodes)):
        for nodes_map in traced.find(graph):
            nodes = sorted((gn for pn, gn in nodes_map.items() if pn.op != "placeholder"), key=order.__getitem__)
            named = {str(pn.target): gn for pn, gn in nodes_map.items() if pn.op == "placeholder"}
            parameters = {name: named.get(name) for name in ("weight", "bias")}
            if flow.is_static(named["x"]) or not _on_one_axis(nodes):
                continue
            if any(isinstance(node, fx.Node) and not flow.is_static(node) for node in parameters.values()):
                continue
            if taken.isdisjoint(nodes):
                taken.update(nodes)
                found.append(PatternMatch(traced.kind, tuple(nodes), **parameters))
    return sorted(found, key=lambda match: order[match.nodes[-1]])


# The spellings.


def _centered(x: Tensor) -> tuple[Tensor, Tensor]:
    """What is squared and what is scaled: the same value, or the same formula written twice."""
    mean = x.mean(-1, keepdim=True)
    return x - mean, x - mean


def _centered_once(x: Tensor) -> tuple[Tensor, Tensor]:
    centered = x - x.mean(-1, keepdim=True)
    return centered, centered


def _moment(power: Callable[[Tensor], Tensor], center: Moments) -> Moments:
    def moment(x: Tensor) -> tuple[Tensor, Tensor]:
        squared, scaled = center(x)
        return scaled, power(squared).mean(-1, keepdim=True)

    return moment


def _variance(x: Tensor) -> tuple[Tensor, Tensor]:
    return x - x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)


def _plain(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x


SQUARES: tuple[Callable[[Tensor], Tensor], ...] = (lambda x: x.pow(2), lambda x: x * x, torch.square)
DIVISIONS: tuple[Callable[[Tensor, Tensor, Tensor], Tensor], ...] = (
    lambda x, variance, eps: x / torch.sqrt(variance + eps),
    lambda x, variance, eps: x * torch.rsqrt(variance + eps),
)


def _normalizations(statistics: tuple[Moments, ...]) -> Iterator[Spelling]:
    for moments in statistics:
        for divide in DIVISIONS:

            def normalize(x: Tensor, eps: Tensor, moments: Moments = moments, divide: Spelling = divide) -> Tensor:
                scaled, variance = moments(x)
                return divide(scaled, variance, eps)

            yield normalize


def _over_deviation(x: Tensor, eps: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + eps)


def _weighted_over_deviation(x: Tensor, eps: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return weight * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + eps) + bias


def _with_parameters(normalize: Spelling) -> tuple[Spelling, ...]:
    def scaled(x: Tensor, eps: Tensor, weight: Tensor) -> Tensor:
        return normalize(x, eps) * weight

    def shifted(x: Tensor, eps: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return normalize(x, eps) * weight + bias

    def from_one(x: Tensor, eps: Tensor, weight: Tensor) -> Tensor:
        return normalize(x, eps) * (1 + weight)

    def plain(x: Tensor, eps: Tensor) -> Tensor:
        return normalize(x, eps)

    return shifted, scaled, from_one, plain


CENTERED: tuple[Moments, ...] = (
    _variance, *(_moment(square, center) for square in SQUARES for center in (_centered, _centered_once))
)
UNCENTERED: tuple[Moments, ...] = tuple(_moment(square, _plain) for square in SQUARES)

GELU_TANH: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x.pow(3))),
    lambda x: torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))),
    lambda x: torch.tanh(math.sqrt(2 / math.pi) * x * (1 + 0.044715 * x * x)),
    lambda x: torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)),
)
GELU_ERF: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: torch.erf(x / math.sqrt(2)),
    lambda x: torch.erf(x * math.sqrt(0.5)),
)
HALVES: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda x, s: (0.5 * x) * (1 + s),
    lambda x, s: 0.5 * (x * (1 + s)),
    lambda x, s: x * (0.5 * (1 + s)),
    lambda x, s: (x * (1 + s)) / 2,
    lambda x, s: x * ((1 + s) / 2),
)


def _gelus() -> Iterator[Spelling]:
    for inner in (*GELU_ERF, *GELU_TANH):
        for halve in HALVES:

            def gelu(x: Tensor, inner: Spelling = inner, halve: Spelling = halve) -> Tensor:
                return halve(x, inner(x))

            yield gelu


def _exp(x: Tensor) -> Tensor:
    return torch.exp(x)


def _exp_below_maximum(x: Tensor) -> Tensor:
    return torch.exp(x - x.amax(-1, keepdim=True))


def _exp_below_max(x: Tensor) -> Tensor:
    return torch.exp(x - x.max(-1, keepdim=True)[0])


def _softmaxes() -> Iterator[Spelling]:
    for exp in (_exp_below_maximum, _exp_below_max, _exp):

        def softmax(x: Tensor, exp: Spelling = exp) -> Tensor:
            e = exp(x)
            return e / e.sum(-1, keepdim=True)

        yield softmax


def _l2_norms() -> Iterator[Spelling]:
    for square in SQUARES:

        def over_root(x: Tensor, square: Spelling = square) -> Tensor:
            return x / torch.sqrt(square(x).sum(-1, keepdim=True))

        def over_root_eps(x: Tensor, eps: Tensor, square: Spelling = square) -> Tensor:
            return x / torch.sqrt(square(x).sum(-1, keepdim=True) + eps)

        def times_root(x: Tensor, square: Spelling = square) -> Tensor:
            return x * torch.rsqrt(square(x).sum(-1, keepdim=True))

        def times_root_eps(x: Tensor, eps: Tensor, square: Spelling = square) -> Tensor:
            return x * torch.rsqrt(square(x).sum(-1, keepdim=True) + eps)

        yield from (over_root, over_root_eps, times_root, times_root_eps)


def _rotate_by_chunks(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def _rotate_by_slices(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], -1)


def _rotaries() -> Iterator[Spelling]:
    for rotate in (_rotate_by_chunks, _rotate_by_slices):

        def rotary(x: Tensor, cos: Tensor, sin: Tensor, rotate: Spelling = rotate) -> Tensor:
            return x * cos + rotate(x) * sin

        yield rotary


PATTERNS: tuple[Pattern, ...] = (
    Pattern("layer_norm", tuple(
        spelling for normalize in (*_normalizations(CENTERED), _over_deviation)
        for spelling in _with_parameters(normalize)
    ), ("sqrt", "rsqrt", "std")),
    Pattern("layer_norm", (_weighted_over_deviation,), ("std",)),
    Pattern("rms_norm", tuple(
        spelling for normalize in _normalizations(UNCENTERED) for spelling in _with_parameters(normalize)
    ), ("sqrt", "rsqrt")),
    Pattern("gelu", tuple(_gelus()), ("erf", "tanh")),
    Pattern("gelu", (lambda x: x * torch.sigmoid(1.702 * x),), ("sigmoid",)),
    Pattern("silu", (lambda x: x * torch.sigmoid(x),), ("sigmoid",)),
    Pattern("mish", (lambda x: x * torch.tanh(F.softplus(x)),), ("softplus",)),
    Pattern("hardswish", (
        lambda x: x * F.relu6(x + 3) / 6, lambda x: x * (F.relu6(x + 3) / 6),
        lambda x: x * torch.clamp(x + 3, 0, 6) / 6, lambda x: x * (torch.clamp(x + 3, 0, 6) / 6),
        lambda x: x * F.hardtanh(x + 3, 0.0, 6.0) / 6, lambda x: x * F.hardsigmoid(x),
    ), ("relu6", "clamp", "hardtanh", "hardsigmoid")),
    Pattern("softmax", tuple(_softmaxes()), ("exp",)),
    Pattern("l2_normalize", tuple(_l2_norms()), ("sqrt", "rsqrt")),
    Pattern("rotary", tuple(_rotaries()), ("neg",)),
    Pattern("gate", (lambda x, gate: x * torch.sigmoid(gate), lambda x, gate: x * F.hardsigmoid(gate)),
            ("sigmoid", "hardsigmoid")),
)

PATTERN_KINDS = frozenset(pattern.kind for pattern in PATTERNS)
"""Names that config rules may use besides those of the op table."""


# From spellings to graphs.


@dataclass(frozen=True, slots=True, eq=False)
class _Traced:
    kind: str
    graph: fx.Graph
    targets: frozenset[object]

    def find(self, graph: fx.Graph) -> list[dict[fx.Node, fx.Node]]:
        return [match.nodes_map for match in PatternMatcher(self.graph).match(graph)]


@functools.cache
def _traced(index: int) -> tuple[_Traced, ...]:
    """The spellings of a pattern as graphs; made at the first use.

    Ops that torch makes of others come both whole and in parts, as captured graphs may hold them.
    """
    pattern, traced = PATTERNS[index], dict[str, _Traced]()
    for spelling in pattern.spellings:
        whole = _trace(spelling, whole=True)
        composed = any(isinstance(op, torch._ops.OpOverload) and op._can_decompose() for op in _targets(whole))
        for graph in (whole, _trace(spelling, whole=False)) if composed else (whole,):
            traced.setdefault(str(graph), _Traced(pattern.kind, graph, _targets(graph)))
    return tuple(traced.values())


def _targets(graph: fx.Graph) -> frozenset[object]:
    return frozenset(node.target for node in graph.nodes if node.op == "call_function")


def _trace(spelling: Spelling, *, whole: bool) -> fx.Graph:
    names = [name for name, parameter in inspect.signature(spelling).parameters.items()
             if parameter.default is inspect.Parameter.empty]
    examples = [torch.ones(()) if name == "eps" else torch.ones(2, 4) for name in names]

    def named(*arguments: Tensor) -> Tensor:  # keeps the helpers' default arguments out of the graph
        return spelling(*arguments)

    with torch.enable_grad():
        graph = make_fx(named, pre_dispatch=whole)(*examples).graph
    for node, name in zip(graph.find_nodes(op="placeholder"), names, strict=True):
        node.target = node.name = name
    for node in list(graph.nodes):
        if node.op == "call_function" and through(node) is not node:
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()
    return graph


REDUCTIONS = ("mean", "sum", "var", "std", "amax", "max")


def _on_one_axis(nodes: list[fx.Node]) -> bool:
    """Whether all statistics of a formula run over the same axes."""
    axes = set()
    for node in nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.name.removeprefix("aten::") in REDUCTIONS and len(node.args) > 1:
            given, rank = node.args[1], node.all_input_nodes[0].meta["val"].ndim
            dims = given if isinstance(given, (list, tuple)) else [given]
            axes.add(tuple(sorted(dim % rank for dim in dims if isinstance(dim, int))))
    return len(axes) <= 1
