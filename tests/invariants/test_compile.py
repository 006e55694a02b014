"""``torch.compile`` takes the simulation of every model of the zoo whole, and computes the same.

Quick: a residual net, attention, a recurrent cell, merges and splits, nested inputs and outputs, a tied weight.
"""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import qtk
from qtk.quantizers.bias_quantizer import BiasQuantizer
from tests.zoo.models import ZOO
from tests.zoo.prepared import simulated, slow_but

QUICK = ("residual", "fused_attention", "stacks_and_scatters", "nested_input", "nested_output", "tied", "in_place")


@pytest.mark.medium
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", slow_but(ZOO, *QUICK))
def test_the_simulation_compiles_without_a_graph_break(name):
    entry, model = ZOO[name], simulated(name).model
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected, found = (pytree.tree_leaves(entry.run(each)) for each in (model, compiled))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True) if isinstance(a, Tensor))
    torch.compiler.reset()


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("learns", [False, True])
def test_biases_in_int32_break_no_graph(learns):
    x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4)).eval()
    sim = qtk.QuantSim(net, x, config="onnxruntime")
    sim.compute_encodings([x], progress=False)
    assert any(isinstance(quantizer, BiasQuantizer) for quantizer in sim.quantizers.values())
    if learns:
        sim.learn_ranges()
    compiled = torch.compile(sim.model, fullgraph=True, backend="aot_eager")
    assert torch.equal(sim.model(x), compiled(x))
    torch.compiler.reset()


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(("backend", "mode"), [
    ("inductor", "learned"), ("aot_eager", "fixed"), ("aot_eager", "tracked"),
    pytest.param("inductor", "fixed", marks=pytest.mark.slow),
    pytest.param("inductor", "tracked", marks=pytest.mark.slow),
])
def test_a_compiled_training_step_is_the_eager_one_and_follows_new_encodings(backend, mode):
    """Compiled once: neither recalibration nor a step of the optimizer compiles it anew."""
    sim = simulated("residual", weight_bits=4, activation_bits=4)
    if mode == "learned":
        sim.learn_ranges()
    elif mode == "tracked":
        sim.track_weights()
    sim.model.train()
    compiled = torch.compile(sim.model, fullgraph=True, backend=backend)
    optimizer = torch.optim.SGD(sim.model.parameters(), lr=1e-3)
    batches = torch.randn(3, *ZOO["residual"].inputs().shape, generator=torch.Generator().manual_seed(0))
    found = {}
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in batches:
            before, state = sim.encodings(), copy.deepcopy(sim.model.state_dict())
            for model in (sim.model, compiled):
                sim.model.load_state_dict(state)
                optimizer.zero_grad()
                output = model(batch)
                output.square().sum().backward()
                found[model] = [output.detach(), *(parameter.grad for parameter in sim.model.parameters())]
            for eager, own in zip(found[sim.model], found[compiled], strict=True):
                # inductor may reorder float sums, but here no value is on a tie
                torch.testing.assert_close(own, eager, rtol=1e-3, atol=1e-4 * float(eager.abs().max()) + 1e-6)
            optimizer.step()
            sim.compute_encodings([3 * batch], progress=False)
            sim.model.train()
            assert not all(e.equals(before[name]) for name, e in sim.encodings().items())
    torch.compiler.reset()
