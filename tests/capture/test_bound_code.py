import torch
from torch import nn

import qtk
from qtk.capture.bound_code import bound_code


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
