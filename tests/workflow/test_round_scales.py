"""Scales as files hold them."""

import pytest
import torch
from torch import nn

import qtk
from qtk.errors import EncodingError, NotCalibratedError
from qtk.export.compressed_tensors.layers import layers_of
from qtk.numerics.scale_formats import tensor_scale_of
from tests.export.compressed_tensors.models import STATIC, Siblings, X, simulated


@pytest.mark.medium
def test_scales_become_what_the_dtype_holds_and_codes_follow():
    sim = simulated(Siblings(), {"dtype": "int8"}, inputs=STATIC)
    before = {name: quantizer.encoding for name, quantizer in sim.quantizers.items()}
    assert qtk.round_scales(sim) == {}  # a float32 model
    changes = qtk.round_scales(sim, torch.bfloat16)
    assert {"q.weight", "k.weight"} <= set(changes)
    for name, quantizer in sim.quantizers.items():
        scale = quantizer.scale
        assert torch.equal(scale, before[name].scale.bfloat16().float()), name
        change = float((scale / before[name].scale - 1).abs().max())
        assert changes.get(quantizer.site, 0.0) == pytest.approx(change)
        assert change < 2**-8
    weight = sim.model.get_parameter("q.weight")
    scale = sim.quantizers["q.weight"].scale.reshape(-1, 1) if sim.quantizers["q.weight"].scale.numel() > 1 else (
        sim.quantizers["q.weight"].scale)
    expected = (weight / scale).round().clamp(-128, 127) * scale
    assert torch.equal(sim.quantizers["q.weight"](weight), expected)
    assert qtk.round_scales(sim, torch.bfloat16) == {}


@pytest.mark.medium
def test_nvfp4_layers_of_one_value_get_the_largest_scale_of_the_tensor():
    sim = simulated(Siblings(), {"dtype": "nvfp4"})
    scales = [sim.quantizers[name].scale.clone() for name in ("q.weight", "k.weight")]
    assert tensor_scale_of(torch.cat(scales)) is None
    (change,) = qtk.round_scales(sim).values()
    assert 0 < change < 2**-4  # half a step of three bits
    rounded = [sim.quantizers[name].scale for name in ("q.weight", "k.weight")]
    assert torch.equal(rounded[1], scales[1])
    assert tensor_scale_of(torch.cat(rounded)) == tensor_scale_of(scales[1])
    assert torch.isfinite(sim.model(X)).all()


class Shared(nn.Module):
    """Layers of two values, and one of both."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.of_first, self.of_second, self.of_both = (nn.Linear(64, 64, bias=False) for _ in range(3))
        self.of_first.weight.data *= 7
        self.of_second.weight.data *= 3

    def forward(self, x):
        y = x.flip(0).relu()
        return self.of_both(x) + self.of_first(x) + self.of_both(y) + self.of_second(y)


@pytest.mark.medium
def test_a_layer_of_two_values_joins_the_layers_of_both():
    sim = simulated(Shared(), {"dtype": "nvfp4"})
    largest = max(tensor_scale_of(quantizer.scale) for quantizer in sim.quantizers.values())
    qtk.round_scales(sim)
    assert tensor_scale_of(torch.cat([quantizer.scale for quantizer in sim.quantizers.values()])) == largest
    assert {float(divisor) for divisor in layers_of(sim.model).global_scales().values()} == {float(1 / largest)}
    assert qtk.round_scales(sim) == {}


@pytest.mark.medium
def test_no_scale_becomes_zero():
    sim = simulated(nn.Linear(64, 8), {"dtype": "int8"})
    quantizer = sim.quantizers["weight"]
    quantizer.load_encoding(qtk.Encoding(quantizer.spec, torch.full_like(quantizer.scale, 1e-12)))
    qtk.round_scales(sim, torch.float16)
    assert quantizer.scale.min() == 2.0**-24


@pytest.mark.medium
def test_what_is_refused():
    sim = simulated(nn.Linear(64, 8), {"dtype": "int8"})
    with pytest.raises(EncodingError, match=r"scales are stored as torch.float16"):
        qtk.round_scales(sim, torch.int8)
    sim.freeze()
    scale = sim.quantizers["weight"].scale.clone()
    with pytest.raises(EncodingError, match="frozen"):
        qtk.round_scales(sim, torch.bfloat16)
    assert torch.equal(sim.quantizers["weight"].scale, scale)
    with pytest.raises(NotCalibratedError, match=r"run sim\.compute_encodings"):
        qtk.round_scales(qtk.QuantSim(nn.Linear(64, 8).eval(), X))
