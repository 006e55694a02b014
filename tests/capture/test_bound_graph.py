"""Bound graphs compute what graphs do, bit for bit, and see what has changed between two times."""

import copy

import pytest
import torch
from torch import nn

import qtk
from qtk.calls.calls import detached
from qtk.calls.inputs import split_inputs
from qtk.capture.bound_graph import BoundModel
from qtk.graph.captured_graph import BOUND
from qtk.graph.graphs import graphs
from qtk.torch_private import pytree
from tests.capture.caches import Decoder, words
from tests.zoo.models import ZOO
from tests.zoo.prepared import simulated


def run(model, call):
    with torch.no_grad():
        return model(**detached(call))


def equal(a, b):
    pairs = zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


@pytest.fixture(scope="module")
def decoder():
    model = Decoder().eval()
    step = {"ids": words(2, 3), "cache": run(model, {"ids": words(2, 5)})["cache"]}
    sim = qtk.QuantSim(model, {"ids": words(2, 5)}, variants=[step], dynamic_shapes="all")
    sim.compute_encodings([{"ids": words(2, 5)}, step], progress=False)
    return sim, step


@pytest.mark.medium
def test_a_bound_model_computes_the_same_and_is_bound_for_its_time_alone(decoder):
    sim, step = decoder
    longer = {"ids": words(3, 7), "cache": run(sim.model, {"ids": words(3, 6)})["cache"]}
    expected = [run(sim.model, call) for call in ({"ids": words(2, 5)}, step, longer)]
    model = BoundModel(sim.model)
    with model.running():
        found = [run(sim.model, call) for call in ({"ids": words(2, 5)}, step, longer)]
        assert all(BOUND in vars(graph) for graph in graphs(sim.model).values())
        assert sim.model(**step)["logits"].requires_grad  # which a bound graph would not record
    assert all(map(equal, found, expected))
    assert not any(BOUND in vars(graph) for graph in graphs(sim.model).values())


@pytest.mark.medium
def test_what_changes_between_two_times_is_seen(decoder):
    sim, step = copy.deepcopy(decoder)
    model, before = BoundModel(sim.model), run(sim.model, step)
    with model.running():
        run(sim.model, step)
    weight = next(parameter for name, parameter in sim.model.named_parameters() if name.endswith("qkv.weight"))
    weight.data.mul_(2.0)  # no version counter tells
    quantizer = next(each for each in sim.quantizers.values() if not each.static)
    seen = []
    for change in (lambda: None, lambda: setattr(quantizer, "mode", qtk.Mode.BYPASS),
                   lambda: sim.model.register_forward_hook(lambda *_: seen.append(1))):
        seen.clear()
        change()
        expected, called = run(sim.model, step), len(seen)
        with model.running():
            assert equal(run(sim.model, step), expected)
        assert len(seen) == 2 * called
        assert not equal(expected, before)


@pytest.mark.medium
def test_a_copy_is_bound_to_the_copied_model(decoder):
    sim, step = decoder
    model = BoundModel(sim.model)
    with model.running():
        run(sim.model, step)
    other, of_other = copy.deepcopy((sim.model, model))
    next(other.parameters()).data.zero_()
    with of_other.running():
        assert equal(run(other, step), run(copy.deepcopy(other), step))
        assert not equal(run(other, step), run(sim.model, step))


class Masked(nn.Module):
    """Fused attention, dropout, a buffer that is written, an operator that is written twice, keyword arguments."""

    def __init__(self):
        super().__init__()
        self.qkv, self.dropout = nn.Linear(8, 24), nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x, mask=None):
        query, key, value = self.qkv(x).chunk(3, -1)
        self.count.add_(1)
        x = nn.functional.scaled_dot_product_attention(query, key, value, mask)
        table = torch.zeros(x.shape[-1], device=x.device, dtype=x.dtype) + self.count
        return {"x": self.dropout(x + table), "twice": (x.exp() + 1, x.exp() * self.count)}


@pytest.mark.medium
def test_attention_dropout_and_written_buffers():
    call = {"x": torch.randn(2, 5, 8), "mask": torch.ones(5, 5).tril().log()}
    sim = qtk.QuantSim(Masked().eval(), call)
    sim.compute_encodings([call], progress=False)
    sim.model.get_buffer("count").zero_()
    expected = run(sim.model, call)
    sim.model.get_buffer("count").zero_()
    with BoundModel(sim.model).running():
        assert equal(run(sim.model, call), expected)
        assert sim.model.get_buffer("count").item() == 1


def test_the_end_of_one_time_leaves_a_call_of_another_thread_alone():
    x = torch.randn(2, 4)
    sim = qtk.QuantSim(nn.Sequential(nn.Linear(4, 4)).eval(), x)
    sim.compute_encodings([x], progress=False)
    expected = run(sim.model, {"input": x})
    with BoundModel(sim.model).running():
        run(sim.model, {"input": x})
        function = vars(sim.model)[BOUND]
    assert torch.equal(function(x), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_every_model_of_the_zoo(name):
    sim, inputs = simulated(name), ZOO[name].inputs()
    args, kwargs = split_inputs(inputs)
    with torch.no_grad():
        expected = sim.model(*detached(args), **detached(kwargs))
        with BoundModel(sim.model).running():
            assert equal(sim.model(*args, **kwargs), expected)
