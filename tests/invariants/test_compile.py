"""``torch.compile`` takes the simulation of every model of the zoo whole, and computes the same."""

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import qtk
from tests.zoo.models import ZOO


def simulated(name):
    entry = ZOO[name]
    sim = qtk.QuantSim(entry.model(), entry.inputs())
    sim.compute_encodings([2], forward=lambda model, size: entry.run(model, size), progress=False)
    return entry, sim


@pytest.mark.parametrize("name", ZOO)
def test_the_simulation_compiles_without_a_graph_break(name):
    entry, sim = simulated(name)
    model = sim.model
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected, found = (pytree.tree_leaves(entry.run(each)) for each in (model, compiled))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True) if isinstance(a, Tensor))
    torch.compiler.reset()


def test_inductor_trains_the_simulation():
    entry, sim = simulated("residual")
    compiled = torch.compile(sim.model, fullgraph=True)
    expected, found = entry.run(sim.model), entry.run(compiled)
    # inductor may reorder float sums, so a value on a tie may fall to the next code
    *_, last = sim.encodings().values()
    assert float((expected - found).detach().abs().max()) <= 1.01 * float(last.scale)
    found.sum().backward()
    with_gradient = {name for name, parameter in sim.model.named_parameters() if parameter.grad is not None}
    assert with_gradient == {name for name, _ in sim.model.named_parameters()}
    torch.compiler.reset()
