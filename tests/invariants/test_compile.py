"""``torch.compile`` takes the simulation of every model of the zoo whole, and computes the same.

Quick: a residual net, attention, a recurrent cell, merges and splits, nested inputs and outputs, a tied weight.
"""

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.zoo.models import ZOO
from tests.zoo.prepared import simulated, slow_but

QUICK = ("residual", "fused_attention", "stacks_and_scatters", "nested_input", "nested_output", "tied", "in_place")


@pytest.mark.parametrize("name", slow_but(ZOO, *QUICK))
def test_the_simulation_compiles_without_a_graph_break(name):
    entry, model = ZOO[name], simulated(name).model
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected, found = (pytree.tree_leaves(entry.run(each)) for each in (model, compiled))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True) if isinstance(a, Tensor))
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["reused_module", pytest.param("residual", marks=pytest.mark.slow)])
def test_inductor_trains_the_simulation(name):
    entry, sim = ZOO[name], simulated(name)
    compiled = torch.compile(sim.model, fullgraph=True)
    expected, found = entry.run(sim.model), entry.run(compiled)
    # inductor may reorder float sums, so a value on a tie may fall to the next code
    *_, last = sim.encodings().values()
    assert float((expected - found).detach().abs().max()) <= 1.01 * float(last.scale)
    found.sum().backward()
    with_gradient = {name for name, parameter in sim.model.named_parameters() if parameter.grad is not None}
    assert with_gradient == {name for name, _ in sim.model.named_parameters()}
    torch.compiler.reset()
