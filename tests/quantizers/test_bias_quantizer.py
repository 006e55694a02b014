import copy

import pytest
import torch

from qtk.core.dtypes import INT32, dtype
from qtk.core.encoding import Encoding
from qtk.core.granularity import PerChannel
from qtk.core.spec import QuantSpec
from qtk.errors import EncodingError, NotCalibratedError
from qtk.quantizers.bias_quantizer import BiasQuantizer
from qtk.quantizers.quantizer import Mode, Quantizer

BIAS = QuantSpec(INT32, PerChannel(0), symmetric=True)


def quantizers():
    x = Quantizer(QuantSpec(dtype("uint8")), site="x")
    weight = Quantizer(QuantSpec(dtype("int8"), PerChannel(0), symmetric=True), site="w")
    bias = BiasQuantizer(BIAS, x, weight, site="b")
    bias.mode = Mode.SIMULATE
    return x, weight, bias


def calibrated(scale=0.5):
    x, weight, bias = quantizers()
    x.load_encoding(Encoding(x.spec, torch.tensor([scale]), torch.tensor([7], dtype=torch.int32)))
    weight.load_encoding(Encoding(weight.spec, torch.tensor([0.25, 2.0])))
    return x, weight, bias


def test_the_scale_is_the_product_and_follows_both():
    x, weight, bias = calibrated()
    assert torch.equal(bias(torch.tensor([0.3, 3.4])), torch.tensor([0.25, 3.0]))  # steps of 0.125 and 1
    weight.load_encoding(Encoding(weight.spec, torch.tensor([0.5, 4.0])))
    assert torch.equal(bias(torch.tensor([0.3, 3.4])), torch.tensor([0.25, 4.0]))
    x.load_encoding(Encoding(x.spec, torch.tensor([1.0]), torch.tensor([0], dtype=torch.int32)))
    assert bias.encoding.equals(Encoding(BIAS, torch.tensor([0.5, 4.0])))


def test_it_has_no_state_and_waits_for_both():
    x, _, bias = quantizers()
    assert (bias.ready, bias.encoding) == (False, None)
    with pytest.raises(NotCalibratedError, match="b has no encoding"):
        bias(torch.zeros(2))
    x.load_encoding(Encoding(x.spec, torch.tensor([1.0]), torch.tensor([0], dtype=torch.int32)))
    assert not bias.ready
    assert not bias.state_dict()
    assert not list(bias.children())
    with pytest.raises(EncodingError, match="the product of the scales of x and w"):
        bias.load_encoding(Encoding(BIAS, torch.tensor([1.0, 1.0])))


def test_a_copy_of_a_model_follows_its_own_quantizers():
    model = torch.nn.ModuleList(calibrated())
    _, weight, bias = twin = copy.deepcopy(model)
    weight.load_encoding(Encoding(weight.spec, torch.tensor([1.0, 1.0])))
    assert bias.encoding.scale.tolist() == [0.5, 0.5]
    assert model[2].encoding.scale.tolist() == [0.125, 1.0]
    assert twin[2].factors[1] is twin[1]


def test_learned_ranges_carry_it_along_without_a_gradient():
    x, weight, bias = calibrated(scale=0.5)
    for quantizer in (x, weight, bias):
        quantizer.learn_range()
    with torch.no_grad():
        x.scale.fill_(-1.0)  # simulated as its magnitude
    value = torch.tensor([0.3, 3.4], requires_grad=True)
    bias(value).sum().backward()
    assert bias.encoding.scale.tolist() == [0.25, 2.0]
    assert torch.equal(value.grad, torch.ones(2))
    assert (x.scale.grad, weight.scale.grad) == (None, None)


def test_codes_beyond_two_to_the_thirty_saturate():
    x, _, bias = calibrated()
    x.load_encoding(Encoding(x.spec, torch.tensor([2.0**-30]), torch.tensor([0], dtype=torch.int32)))
    assert bias(torch.tensor([5.0, 5.0])).tolist() == [0.25, 2.0]  # 2**30 steps of 2**-32 and of 2**-29
