import pytest
import torch
from torch import nn

import qtk
from qtk.capture import bound_code as module
from qtk.capture.bound_code import bound_code
from qtk.nn.attention import Attention


def test_the_function_calls_quantizers_with_fixed_ranges_as_operators():
    x = torch.randn(2, 4)
    sim = qtk.QuantSim(nn.Sequential(nn.Linear(4, 4)).eval(), x)
    sim.compute_encodings([x], progress=False)
    called = []
    for quantizer in sim.quantizers.values():
        forward = quantizer.forward
        quantizer.forward = lambda value, forward=forward, quantizer=quantizer: [
            called.append(quantizer.site), forward(value)][1]
    with torch.no_grad():
        expected = sim.model(x)
        called.clear()
        for quantizer in sim.quantizers.values():
            if quantizer.site != "0.weight":
                del quantizer.forward
        run = bound_code(sim.model, weights_once=False, gradients=False).function({})
        assert torch.equal(run(x), expected)
    assert called == ["0.weight"]


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 8), nn.Linear(64, 8)

    def forward(self, x):
        return self.first(x), self.second(x)


@pytest.mark.parametrize("target", ["vllm_w8a8", "vllm_fp8", "dynamic"])
@pytest.mark.parametrize("weights_once", [False, True])
def test_layers_that_read_one_value_share_its_quantization_at_run_time(target, weights_once, monkeypatch):
    x, calls = torch.randn(2, 3, 64), []
    sim = qtk.QuantSim(Two().eval(), x, config=target)
    sim.compute_encodings(None, progress=False)
    for name in ("fake_quantize_dynamic", "simulate_dynamic"):
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, own=function, **kw: [calls.append(1), own(*args, **kw)][1])
    with torch.no_grad():
        expected = sim.model(x)
        calls.clear()
        found = bound_code(sim.model, weights_once=weights_once, gradients=False).function({})(x)
    assert len(calls) == (1 if weights_once else 2)
    assert all(torch.equal(own, other) for own, other in zip(found, expected, strict=True))


class Places(nn.Module):
    """Writes and reads columns, with lists of indices in which the first is missing."""

    def forward(self, x, place):
        table = torch.zeros(2, 5)
        table[:, place] = x
        return table, table[:, place + 1]


def test_lists_of_indices_may_have_gaps():
    x, place = torch.randn(2, 2), torch.tensor([1, 3])
    prepared = qtk.prepare_model(Places(), (x, place))
    run = bound_code(prepared, weights_once=False, gradients=False).function({})
    assert all(map(torch.equal, run(x, place), Places()(x, place)))


class Zeros(qtk.Quantizer):
    def _simulate_without_scale(self, x):
        return torch.zeros_like(x)


def test_a_quantizer_of_another_class_is_asked_itself():
    x = torch.randn(2, 64)
    sim = qtk.QuantSim(Two().eval(), x, config="dynamic")
    sim.compute_encodings(None, progress=False)
    for quantizer in sim.quantizers.values():
        if quantizer.spec.dynamic:
            quantizer.__class__ = Zeros
    with torch.no_grad():
        found = bound_code(sim.model, weights_once=False, gradients=False).function({})(x)
    assert all(bool((each == each[:1]).all()) for each in found)  # biases alone


def test_a_member_that_is_computed_when_it_is_read_is_not_bound():
    x = torch.randn(2, 4)
    sim = qtk.QuantSim(nn.Sequential(nn.Linear(4, 4)).eval(), x)
    nn.utils.parametrizations.weight_norm(sim.model.get_submodule("0"))
    assert bound_code(sim.model, weights_once=False, gradients=False) is None


def test_a_model_with_hooks_is_not_bound():
    sim = qtk.QuantSim(nn.Sequential(nn.Linear(4, 4)).eval(), torch.randn(2, 4))
    handle = next(iter(sim.quantizers.values())).register_forward_hook(print)
    assert bound_code(sim.model, weights_once=True, gradients=False) is None
    handle.remove()
    assert bound_code(sim.model, weights_once=True, gradients=False) is not None


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1))


@pytest.mark.medium
def test_attention_is_called_where_a_library_has_replaced_its_call_or_its_core():
    x = torch.randn(2, 5, 8)
    sim = qtk.QuantSim(Attending().eval(), x)
    sim.compute_encodings([x], progress=False)
    attention = next(each for each in sim.model.modules() if isinstance(each, Attention))
    core = attention.core

    def with_core(module):
        attention.core = module

    class Values(nn.Module):
        def forward(self, query, key, value, mask=None):
            return sim.quantizers["attention.core.context:out"](value)

    with torch.no_grad():
        expected = sim.model(x)
        for replaced, undo in ((lambda: vars(core).update(forward=lambda q, k, v, mask: v),
                                lambda: vars(core).pop("forward")),
                               (lambda: setattr(attention, "forward", lambda q, k, v: v),
                                lambda: delattr(attention, "forward")),
                               (lambda: with_core(Values()), lambda: with_core(core))):
            for _ in range(4):
                assert torch.equal(sim.model(x), expected)
            replaced()
            assert not torch.equal(sim.model(x), expected)
            undo()


class Noise(nn.Module):
    def forward(self, x):
        return torch.ops.qtk_bound_code_test.noise(x), torch.ops.qtk_bound_code_test.noise(x), x.exp(), x.exp()


def test_two_calls_of_an_operator_of_others_are_two():
    torch.library.define("qtk_bound_code_test::noise", "(Tensor x) -> Tensor")  # random, and without the tag
    torch.library.impl("qtk_bound_code_test::noise", "CompositeExplicitAutograd", torch.rand_like)
    torch.library.register_fake("qtk_bound_code_test::noise", torch.empty_like)
    graph = qtk.prepare_model(Noise().eval(), torch.randn(2, 4), verify=False)
    with torch.no_grad():
        first, second, *once = bound_code(graph, weights_once=True, gradients=False).function({})(torch.randn(2, 4))
    assert not torch.equal(first, second)
    assert once[0] is once[1]
