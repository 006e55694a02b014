"""Formulas that models write in small ops and the planner treats as one op. To add a pattern, add a row.

A spelling is plain torch code. Its arguments called ``weight`` and ``bias`` match parameters, ``eps`` and ``factor``
any number, ``cos`` and ``sin`` data or parameters, all others data. Numbers in the code must be those of the model; its
axes need not be, if they are the same everywhere in one match. Spellings with the same normal form need one row only
(``normal_form``, ``pattern_matcher``).
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from qtk.graph.sites import EXCLUDED, label
from qtk.planning.normal_form import NormalForm
from qtk.planning.pattern_matcher import NUMBERS, PARAMETERS, TABLES, PatternMatcher, inner_ops
from qtk.torch_private import TorchDispatchMode, pytree

Spelling: TypeAlias = Callable[..., Tensor]

Core: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(x, eps) → the two factors of a norm: the value to scale, and its scale."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """One op and the ways to write it.

    Args:
        kind: a kind of the op table, ``l2_normalize``, ``rotary`` or ``gate``.
        spellings: the torch codes that compute it.
    """

    kind: str
    spellings: tuple[Spelling, ...]


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


# Norms are a product of two factors, times a weight, plus a bias.


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

INVERSE_ROOTS: tuple[Spelling, ...] = (
    lambda square, eps: torch.rsqrt(square + eps),
    lambda square, eps: 1 / (torch.sqrt(square) + eps),
    lambda square, eps: torch.rsqrt(square),
)

INVERSE_NORMS: tuple[Spelling, ...] = (
    *INVERSE_ROOTS,
    lambda square, eps: 1 / torch.sqrt(square).clamp(min=eps),
    lambda square, eps: torch.rsqrt(square.clamp(min=eps)),
)


def _layer_norm(variance: Spelling, inverse: Spelling) -> Core:
    return lambda x, eps: (_centered(x), inverse(variance(x), eps))


def _rms_norm(inverse: Spelling) -> Core:
    return lambda x, eps: (x, inverse(_square_mean(x), eps))


def _l2_normalize(inverse: Spelling) -> Core:
    return lambda x, eps: (x, inverse(_square_sum(x), eps))


def _alone(core: Core) -> Spelling:
    return lambda x, eps: operator.mul(*core(x, eps))


def _weighted(core: Core) -> tuple[Spelling, ...]:
    def after(x: Tensor, eps: Tensor, weight: Tensor) -> Tensor:
        value, factor = core(x, eps)
        return value * factor * weight

    def before(x: Tensor, eps: Tensor, weight: Tensor) -> Tensor:
        value, factor = core(x, eps)
        return value * weight * factor

    def within(x: Tensor, eps: Tensor, weight: Tensor) -> Tensor:
        value, factor = core(x, eps)
        return value * (factor * weight)

    def from_one(x: Tensor, eps: Tensor, weight: Tensor) -> Tensor:
        value, factor = core(x, eps)
        return value * factor * (1 + weight)

    return after, before, within, from_one


def _biased(weighted: Spelling) -> Spelling:
    return lambda x, eps, weight, bias: weighted(x, eps, weight) + bias


def _length_weighted(inverse: Spelling) -> tuple[Spelling, ...]:
    """RMS norms computed from the L2 norm, with a number as the root of the length."""
    return (
        lambda x, eps, factor, weight: x * inverse(_square_sum(x), eps) * factor * weight,
        lambda x, eps, factor, weight: x * inverse(_square_sum(x), eps) * weight * factor,
        lambda x, eps, factor, weight: x * inverse(_square_sum(x), eps) * factor * (1 + weight),
    )


LAYER_NORMS = [_layer_norm(variance, inverse) for variance in VARIANCES for inverse in INVERSE_ROOTS]
RMS_NORMS = [_rms_norm(inverse) for inverse in INVERSE_NORMS]
L2_NORMS = [_l2_normalize(inverse) for inverse in INVERSE_NORMS]

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


GELU_INNER: tuple[Spelling, ...] = (
    lambda x: torch.erf(x / math.sqrt(2)),
    *map(_tanh_of, GELU_ARGUMENTS),
    lambda x: torch.tanh(math.sqrt(2 / math.pi) * x * (1 + 0.044715 * x**2)),
    lambda x: torch.tanh(math.sqrt(2 / math.pi) * x * (1 + 0.044715 * x * x)),
)


def _gelu(inner: Spelling) -> tuple[Spelling, ...]:
    return (
        lambda x: 0.5 * x * (1 + inner(x)),
        lambda x: 0.5 * (x * (1 + inner(x))),
        lambda x: x * (0.5 * (1 + inner(x))),
    )


HARD_SIGMOIDS: tuple[Spelling, ...] = (
    lambda x: F.relu6(x + 3) / 6,
    lambda x: (x / 6 + 0.5).clamp(0, 1),
)

GATES: tuple[Spelling, ...] = (torch.sigmoid, F.hardsigmoid, *HARD_SIGMOIDS)


def _times(activation: Spelling) -> Spelling:
    return lambda x: x * activation(x)


def _gate(of: Spelling) -> tuple[Spelling, ...]:
    return lambda x, s: x * of(s), lambda x, s: x * of(s).reshape(s.shape)


def _softmax(exponent: Spelling) -> tuple[Spelling, ...]:
    return (
        lambda x: exponent(x) / exponent(x).sum(-1, keepdim=True),
        lambda x, eps: exponent(x) / (exponent(x).sum(-1, keepdim=True) + eps),
    )


EXPONENTS: tuple[Spelling, ...] = (
    torch.exp,
    lambda x: torch.exp(x - x.amax(-1, keepdim=True)),
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


def _flat(groups: Iterable[Iterable[Spelling]]) -> tuple[Spelling, ...]:
    return tuple(itertools.chain.from_iterable(groups))


PATTERNS: tuple[Pattern, ...] = (
    Pattern("layer_norm", (
        *(_alone(core) for core in LAYER_NORMS),
        *_flat(map(_weighted, LAYER_NORMS)),
        *map(_biased, _flat(map(_weighted, LAYER_NORMS))),
    )),
    Pattern("rms_norm", (
        *map(_alone, RMS_NORMS),
        *_flat(map(_weighted, RMS_NORMS)),
        *_flat(map(_length_weighted, INVERSE_NORMS)),
        lambda x, factor, eps, weight: x / (torch.sqrt(_square_sum(x)) * factor).clamp(min=eps) * weight,
        lambda x, factor, eps, weight: weight * (x / (torch.sqrt(_square_sum(x)) * factor + eps)),
    )),
    Pattern("gelu", (*_flat(map(_gelu, GELU_INNER)), lambda x: x * torch.sigmoid(1.702 * x))),
    Pattern("silu", (lambda x: x * torch.sigmoid(x), lambda x: x / (1 + torch.exp(-x)))),
    Pattern("hardswish", (
        lambda x: x * F.relu6(x + 3) / 6,
        lambda x: x / 6 * F.relu6(x + 3),
        lambda x: x * F.hardsigmoid(x),
        *(_times(hard_sigmoid) for hard_sigmoid in HARD_SIGMOIDS),
    )),
    Pattern("mish", (
        lambda x: x * torch.tanh(F.softplus(x)),
        lambda x: x * torch.tanh(torch.log(1 + torch.exp(x))),
    )),
    Pattern("sigmoid", (lambda x: 1 / (1 + torch.exp(-x)),)),
    Pattern("hardsigmoid", HARD_SIGMOIDS),
    Pattern("softmax", _flat(map(_softmax, EXPONENTS))),
    Pattern("l2_normalize", (*map(_alone, L2_NORMS), *_flat(map(_weighted, L2_NORMS)))),
    Pattern("rotary", (*_rotary(_halves, _join_halves), *_rotary(_interleaved, _interleave))),
    Pattern("gate", _flat(map(_gate, GATES))),
)


def match_patterns(graph: fx.Graph) -> list[PatternMatch]:
    """The formulas in a captured graph, disjoint and in graph order; larger patterns are matched first.

    No op outside a match reads its inner values; constants and parameters may be shared. A formula computed from
    parameters alone, or with an excluded op in it, is no match. The graph is only read.
    """
    form = NormalForm(graph)
    position = {node: index for index, node in enumerate(graph.nodes)}
    taken: set[fx.Node] = set()
    matches = []
    for kind, matcher in _matchers():
        for match in matcher.matches(form):
            nodes = inner_ops(match, form)
            assert nodes is not None
            if taken.isdisjoint(nodes) and not any(label(node, EXCLUDED) for node in nodes):
                taken.update(nodes)
                weight, bias = (form.original(match.arguments.get(name)) for name in ("weight", "bias"))
                matches.append(PatternMatch(kind, tuple(sorted(nodes, key=position.__getitem__)), weight, bias))
    return sorted(matches, key=lambda match: position[match.nodes[-1]])


@functools.cache
def _matchers() -> tuple[tuple[str, PatternMatcher], ...]:
    """A matcher for every spelling, the larger first."""
    matchers = [
        (pattern.kind, PatternMatcher(NormalForm(trace(code)))) for pattern in PATTERNS for code in pattern.spellings
    ]
    return tuple(sorted(matchers, key=lambda pair: -pair[1].size))


def trace(code: Spelling) -> fx.Graph:
    """The ATen ops that ``code`` runs, on small inputs; its arguments become placeholders of their names."""
    recorder = _Recorder()
    shapes = {**dict.fromkeys(NUMBERS, ()), **dict.fromkeys((*PARAMETERS, *TABLES), (1,))}
    inputs = [recorder.placeholder(name, shapes.get(name, (2, 4, 8))) for name in inspect.signature(code).parameters]
    with torch.no_grad(), recorder:
        result = code(*inputs)
    recorder.graph.output(recorder.nodes[id(result)])
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
