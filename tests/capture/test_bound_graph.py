"""Graphs that run as functions compute what graphs do, bit for bit, and see what has changed since."""

import copy
import functools
import gc
import weakref
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import qtk
from qtk.calls.calls import detached
from qtk.calls.inputs import split_inputs
from qtk.capture import bound_graph
from qtk.capture.bound_graph import Binding, weights_once
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


def is_bound(graph, gradients=False):
    with torch.set_grad_enabled(gradients):
        return vars(graph)[BOUND].function(graph) is not None


@pytest.mark.medium
def test_for_a_time_each_weight_is_quantized_once(decoder):
    sim, step = decoder
    longer = {"ids": words(3, 7), "cache": run(sim.model, {"ids": words(3, 6)})["cache"]}
    expected = [run(sim.model, call) for call in ({"ids": words(2, 5)}, step, longer)]
    weight = next(each for each in sim.quantizers.values() if each.cache)
    seen = []
    with weights_once(sim.model), pytest.MonkeyPatch.context() as patch:
        forward = type(weight).forward
        patch.setattr(type(weight), "forward", lambda self, x: [seen.append(self), forward(self, x)][1])
        found = [run(sim.model, call) for call in ({"ids": words(2, 5)}, step, longer)]
        assert seen.count(weight) == 1
        assert sim.model(**step)["logits"].requires_grad
    assert all(map(equal, found, expected))
    assert all(type(vars(graph)[BOUND]) is Binding for graph in graphs(sim.model).values())


@pytest.mark.medium
def test_what_changes_between_two_times_is_seen(decoder):
    sim, step = copy.deepcopy(decoder)
    before = run(sim.model, step)
    with weights_once(sim.model):
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
        with weights_once(sim.model):
            assert equal(run(sim.model, step), expected)
        assert len(seen) == 2 * called
        assert not equal(expected, before)


@pytest.mark.medium
def test_a_copy_is_bound_to_the_copied_model(decoder):
    sim, step = decoder
    with weights_once(sim.model):
        run(sim.model, step)
        other = copy.deepcopy(sim.model)
    next(other.parameters()).data.zero_()
    with weights_once(other):
        assert equal(run(other, step), run(copy.deepcopy(other), step))
        assert not equal(run(other, step), run(sim.model, step))


def small(activations=True):
    torch.manual_seed(0)
    x = torch.randn(2, 4)
    sim = qtk.QuantSim(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)).eval(), x)
    sim.compute_encodings([x], progress=False)
    return sim, x


CHANGES = {
    "a mode": lambda sim: setattr(sim.quantizers["0.weight"], "mode", qtk.Mode.BYPASS),
    "a mode of an activation": lambda sim: setattr(sim.quantizers["input:input"], "mode", qtk.Mode.BYPASS),
    "a range": lambda sim: sim.set_range("input:input", -0.5, 0.5),
    "a range in place": lambda sim: sim.quantizers["2:out"].scale.mul_(2.0),
    "a buffer put in its table": lambda sim: sim.quantizers["input:input"]._buffers.update(scale=torch.tensor([0.5])),
    "a parameter in place": lambda sim: sim.model.get_parameter("0.weight").data.mul_(3.0),
    "another parameter": lambda sim: setattr(sim.model.get_submodule("0"), "weight", nn.Parameter(torch.ones(4, 4))),
    "a parametrization": lambda sim: nn.utils.parametrizations.weight_norm(sim.model.get_submodule("0"), dim=None),
    "learned ranges": lambda sim: (sim.quantizers["input:input"].learn_range(),
                                   sim.quantizers["input:input"].scale_factor.data.fill_(0.3)),
    "a forward of a library": lambda sim: setattr(sim.quantizers["input:input"], "forward", lambda x: x * 0.5),
    "a hook": lambda sim: sim.quantizers["2:out"].register_forward_hook(lambda module, given, result: result + 1),
    "a hook of all modules": lambda sim: None,
    "dtype": lambda sim: sim.model.double(),
    "the code": lambda sim: rewritten(sim.model),
}


def rewritten(graph):
    node = next(node for node in graph.graph.nodes if node.target is torch.ops.aten.relu.default)
    node.target = torch.ops.aten.neg.default
    graph.recompile()


@pytest.mark.sample(12)
@pytest.mark.parametrize("gradients", [False, pytest.param(True, marks=pytest.mark.medium)])
@pytest.mark.parametrize("change", [name if name in ("a mode of an activation", "a parameter in place", "a hook")
                                    else pytest.param(name, marks=pytest.mark.medium) for name in CHANGES])
def test_a_change_is_seen_at_the_next_call(change, gradients):
    sim, x = small()
    with torch.set_grad_enabled(gradients):
        for _ in range(3):
            before = sim.model(x)
        assert is_bound(sim.model, gradients)
        handle = None
        if change == "a hook of all modules":
            handle = nn.modules.module.register_module_forward_hook(
                lambda module, given, result: result * 2 if isinstance(module, nn.Sequential) else None)
        CHANGES[change](sim)
        x = x.to(sim.model.get_parameter("2.weight").dtype)
        found = sim.model(x)
        if handle is not None:
            assert not is_bound(sim.model, gradients)
            handle.remove()
        plain = copy.deepcopy(sim.model) if change != "a parametrization" else sim.model
        plain.__dict__[BOUND] = Left()
        assert torch.equal(found, plain(x)) or change == "a hook of all modules"
        assert found.dtype == x.dtype
        same = "a hook of all modules", "a parametrization", "dtype"
        assert not torch.equal(found.float(), before) or change in same


class Doubled(qtk.Quantizer):
    def forward(self, x):
        return super().forward(x) * 2


def doubled(module):
    forward = module.forward
    module.forward = lambda *given: forward(*given) * 2


def doubled_class(graph):
    forward = type(graph).forward
    type(graph).forward = functools.partial(lambda module, x: forward(module, x) * 2, graph)  # as accelerate does


def with_plain_weight(layer, store):
    weight = layer.weight.detach() * 2
    del layer.weight
    store(weight)


def hooked_anew(module):
    module._forward_hooks = OrderedDict()
    module.register_forward_hook(lambda module, given, result: result * 2)


def with_tables(module, **tables):
    vars(module).update(tables)


REPLACED = {
    "forward": lambda sim: doubled(sim.model),
    "forward of the class": lambda sim: doubled_class(sim.model),
    "the class of a quantizer": lambda sim: setattr(sim.quantizers["2:out"], "__class__", Doubled),
    "a tensor for a parameter": lambda sim: with_plain_weight(
        layer := sim.model.get_submodule("0"), lambda weight: setattr(layer, "weight", weight)),
    "a buffer for a parameter": lambda sim: with_plain_weight(
        layer := sim.model.get_submodule("0"), lambda weight: layer.register_buffer("weight", weight)),
    "the table of hooks": lambda sim: hooked_anew(sim.quantizers["2:out"]),
    "the table of parameters": lambda sim: with_tables(
        layer := sim.model.get_submodule("0"), _parameters={name: each * 2 for name, each in layer.named_parameters()}),
    "the table of modules": lambda sim: with_tables(
        sim.model, _modules={**sim.model._modules, "0": nn.Linear(4, 4)}),
}


@pytest.mark.parametrize("change", [name if name == "forward" else pytest.param(name, marks=pytest.mark.medium)
                                    for name in REPLACED])
def test_what_a_library_puts_in_the_place_of_something_is_seen(change):
    sim, x = small()
    with torch.no_grad():
        for _ in range(3):
            before = sim.model(x)
        assert is_bound(sim.model)
        REPLACED[change](sim)
        found = [sim.model(x) for _ in range(3)]
        sim.model.__dict__[BOUND] = Left()
        expected = sim.model(x)
    assert not torch.equal(expected, before)
    assert all(torch.equal(each, expected) for each in found)


@pytest.mark.medium
def test_a_model_that_is_compiled_in_place_runs_compiled():
    sim, x = small()
    ran = []
    with torch.no_grad():
        for _ in range(3):
            expected = sim.model(x)
        sim.model.compile(backend=lambda graph, _: lambda *given: [ran.append(1), graph(*given)][1])
        for _ in range(3):
            assert torch.equal(sim.model(x), expected)
    assert len(ran) == 3


class Left:
    """In place of a binding: the graph is left as it is."""

    def function(self, graph):
        return None


@pytest.mark.medium
def test_gradients_are_those_of_the_graph():
    sim, x = small()
    for quantizer in sim.quantizers.values():
        quantizer.learn_range()
    sim.model.train()

    def gradients():
        loss = sim.model(x).square().sum()
        return torch.autograd.grad(loss, [*sim.model.parameters()], allow_unused=True)

    for _ in range(2):
        found = gradients()
    assert is_bound(sim.model, True)
    sim.model.__dict__[BOUND] = Left()
    assert all(map(torch.equal, found, gradients()))


def test_a_parameter_that_is_replaced_is_not_kept_alive():
    sim, x = small()
    with torch.no_grad():
        for _ in range(3):
            sim.model(x)
    old = weakref.ref(sim.model.get_parameter("0.weight"))
    sim.model.get_submodule("0").weight = nn.Parameter(torch.ones(4, 4))
    gc.collect()
    assert old() is None
    assert is_bound(sim.model)


@pytest.mark.medium
def test_a_parameter_that_is_replaced_after_a_time_is_not_kept_alive():
    sim, x = small()
    with torch.no_grad(), weights_once(sim.model):
        sim.model(x)
    old = weakref.ref(sim.model.get_parameter("0.weight"))
    sim.model.load_state_dict({name: each.clone() for name, each in sim.model.state_dict().items()}, assign=True)
    gc.collect()
    assert old() is None


def test_a_graph_that_changes_all_the_time_is_left_as_it_is(monkeypatch):
    sim, x = small()
    written = []
    code = bound_graph.bound_code
    monkeypatch.setattr(bound_graph, "bound_code", lambda graph, **mode: [written.append(1), code(graph, **mode)][1])
    with torch.no_grad():
        for turn in range(400):
            sim.set_range("input:input", -1.0 - turn, 1.0)
            sim.model(x)
    assert len(written) < 40
    with torch.no_grad():
        for _ in range(bound_graph.MOST_CALLS_LEFT + 2):
            sim.model(x)
    assert is_bound(sim.model)


def test_the_functions_of_several_modes_are_kept(monkeypatch):
    sim, x = small()
    written = []
    code = bound_graph.bound_code
    monkeypatch.setattr(bound_graph, "bound_code", lambda graph, **mode: [written.append(1), code(graph, **mode)][1])
    quantizer = sim.quantizers["input:input"]
    with torch.no_grad():
        expected = {}
        for turn in range(40):
            quantizer.mode = [qtk.Mode.BYPASS, qtk.Mode.SIMULATE][turn % 2]
            assert torch.equal(sim.model(x), expected.setdefault(quantizer.mode, sim.model(x)))
    assert len(written) == 2


def test_modes_of_torch_see_every_operator():
    sim, x = small()
    with torch.no_grad():
        for _ in range(3):
            sim.model(x)
        with FlopCounterMode(display=False) as counter:
            sim.model(x)
    assert counter.get_total_flops() == 2 * 2 * 4 * (4 + 3)


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
    with weights_once(sim.model):
        assert equal(run(sim.model, call), expected)
        assert sim.model.get_buffer("count").item() == 1


def test_the_end_of_one_time_leaves_a_call_of_another_thread_alone():
    sim, x = small()
    with torch.no_grad():
        expected = sim.model(x)
        with weights_once(sim.model), weights_once(sim.model):
            function = vars(sim.model)[BOUND].function(sim.model)
        assert type(vars(sim.model)[BOUND]) is Binding
        assert torch.equal(function(x), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_every_model_of_the_zoo(name):
    sim, inputs = simulated(name), ZOO[name].inputs()
    args, kwargs = split_inputs(inputs)
    sim.model.__dict__[BOUND] = Left()
    with_gradients = detached(pytree.tree_map(lambda leaf: leaf, sim.model(*args, **kwargs)))
    with torch.no_grad():
        expected = sim.model(*detached(args), **detached(kwargs))
        sim.model.__dict__.pop(BOUND)
        with weights_once(sim.model):
            assert equal(sim.model(*args, **kwargs), expected)
        for _ in range(3):
            assert equal(sim.model(*args, **kwargs), expected)
    for _ in range(4):
        assert equal(detached(sim.model(*args, **kwargs)), with_gradients)
