"""What can have a width of its own, and what each width costs there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from torch import Tensor

from qtk.algorithms.frontier import Term
from qtk.auto.matrix_products import MatrixProduct
from qtk.auto.site_rules import SiteRules
from qtk.config.tensor_setting import Setting, TensorSetting
from qtk.core.plan import QuantPlan
from qtk.core.site import Site
from qtk.graph.footprint import stored_bytes
from qtk.graph.graphs import graphs
from qtk.graph.insert import quantizer_nodes
from qtk.graph.simulation import Simulation

Choice: TypeAlias = int | Literal["float"]
"""A width in bits, or float."""

UNITS = {"bytes": "bytes of parameters", "weight_bits": "bits a weight, on average", "bit_operations": "bit operations",
         "milliseconds": "milliseconds of a call"}
"""What a budget can count → in words."""

FLOAT_BITS = 32
"""Bits of an operand that is not quantized."""

PairCost: TypeAlias = Callable[[MatrixProduct, Choice, Choice], float]
"""The cost of a product by the widths of its data and its other operand."""


def bits_of(width: Choice) -> int:
    """Says how many bits a value of this width has."""
    return FLOAT_BITS if width == "float" else width


def setting_of(width: Choice) -> Setting:
    """Returns what a rule says of a tensor of this width."""
    return "float" if width == "float" else TensorSetting(bits=width)


@dataclass(frozen=True, slots=True)
class Member:
    """Sites that have one width, as no rule can set them apart.

    Args:
        sites: the sites; the first one names them.
        is_weight: whether they are weights.
    """

    sites: tuple[Site, ...]
    is_weight: bool

    @property
    def name(self) -> str:
        return self.sites[0].name


@dataclass(frozen=True, slots=True)
class Costs:
    """What an assignment of widths costs: ``fixed`` and the sum of ``terms`` over members.

    Args:
        fixed: what no choice changes.
        terms: variables are indices of members.
    """

    fixed: float
    terms: tuple[Term, ...]

    def of(self, picks: Sequence[int]) -> float:
        """The cost if each member has the choice of this index."""
        return self.fixed + sum(float(term.costs[tuple(picks[each] for each in term.variables)]) for term in self.terms)


def members(simulation: Simulation, *, only_weights: bool) -> list[Member]:
    """Returns what can have a width of its own: neither frozen, nor learned, nor rounded by a layer-wise method."""
    rules = SiteRules(simulation)
    found = (Member(tuple(sites), rules.is_weight(sites[0])) for sites in rules.groups())
    return [each for each in found if (each.is_weight or not only_weights) and not any(
        (quantizer := simulation.quantizers[site]).frozen or quantizer.learns_range or quantizer.rewrote_weight
        for site in each.sites)]


def weights_of(simulation: Simulation, listed: Iterable[Member]) -> list[list[Tensor]]:
    """The values of the weights of each member, without elements; none of a member that is no weight."""
    values = {quantizer: node.meta["val"] for graph in graphs(simulation.model).values()
              for node, quantizer in quantizer_nodes(graph).items()}
    return [[values[simulation.quantizers[site]] for site in member.sites] if member.is_weight else []
            for member in listed]


def quantized_bytes(simulation: Simulation, listed: Iterable[Member]) -> list[float]:
    """Bytes of the codes and scales of each member, as the simulation quantizes them; 0 of what is no weight."""
    stored = stored_bytes(simulation.model)
    return [float(sum(sum(stored[simulation.quantizers[site]]) for site in member.sites)) if member.is_weight else 0.0
            for member in listed]


def single(costs: Sequence[Sequence[float]], fixed: float) -> Costs:
    """Costs of each member alone: [members, choices]."""
    return Costs(fixed, tuple(Term((index,), np.array(each)) for index, each in enumerate(costs)))


def in_pairs(
    products: Iterable[MatrixProduct], listed: Sequence[Member], choices: Sequence[Choice], plan: QuantPlan,
    cost: PairCost,
) -> Costs:
    """Costs of matrix products by the widths of both operands, of which one, or none, may be a member's.

    Args:
        products: the products.
        listed: the members.
        choices: the widths of each of them.
        plan: says the width of what is no member.
        cost: the cost of a product by the widths of its data and its other operand.
    """
    index_of = {site: index for index, member in enumerate(listed) for site in member.sites}
    fixed, terms = 0.0, []
    for product in products:
        indices = [None if site is None else index_of.get(site) for site in product.operands]
        variables = tuple(sorted({index for index in indices if index is not None}))
        costs = np.empty((len(choices),) * len(variables))
        for picks in np.ndindex(costs.shape):
            picked = dict(zip(variables, picks, strict=True))
            widths = [_present(plan, site) if index is None else choices[picked[index]]
                      for index, site in zip(indices, product.operands, strict=True)]
            costs[picks] = cost(product, widths[0], widths[1])
        if variables:
            terms.append(Term(variables, costs))
        else:
            fixed += float(costs)
    return Costs(fixed, tuple(terms))


def _present(plan: QuantPlan, site: Site | None) -> Choice:
    return "float" if site is None or site not in plan else plan[site].spec.dtype.bits


def bit_operations(product: MatrixProduct, data: Choice, other: Choice) -> float:
    """Multiplications x width x width, as the literature counts them (Baskin et al., arXiv 1804.10969)."""
    return float(product.multiplications * bits_of(data) * bits_of(other))
