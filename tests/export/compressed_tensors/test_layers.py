"""Which layers a simulated model has, and what the format cannot hold."""

import pytest
import torch
from torch import nn

import qtk
from qtk.errors import ExportError
from qtk.export.compressed_tensors.layers import layers_of
from tests.export.compressed_tensors.models import BLOCKS, PER_TOKEN, STATIC, Siblings, Transposed, Two, X, simulated


class Tied(nn.Module):
    def __init__(self, both):
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 64), nn.Linear(64, 8, bias=False)
        if both:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids))


class Product(nn.Module):
    """A quantized product of two activations."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 64)

    def forward(self, x):
        return self.up(x) @ x.t()


IDS = torch.tensor([[1, 2]])
FOUR_BITS = {"match": {"path": "head"}, "weight": {"dtype": "int4"}}


@pytest.mark.medium
@pytest.mark.sample(2)
@pytest.mark.parametrize(("model", "x", "weight", "rules", "message"), [
    (nn.Sequential(nn.Conv1d(4, 8, 1), nn.Linear(16, 3)), torch.randn(2, 4, 16), {"dtype": "int8"}, [],
     r"0.weight is read by conv1d"),
    (Two(), X, {"dtype": "int8"}, [{"match": {"op": "layer_norm"}, "weight": {"dtype": "int8"}}],
     "norm.weight is read by layer_norm"),
    (Two(), X, {"dtype": "int6"}, [], r"first.weight has int6 codes\n  last.weight has int6"),
    (Two(), X, {"dtype": "fp8_e5m2"}, [], r"first.weight has fp8_e5m2 codes"),
    (Transposed(), X, {"dtype": "mxfp4"}, [], r"inner.weight is \[inputs, outputs\], and four-bit floats are packed"),
    (Tied(False), IDS, {"dtype": "int8"}, [], "embed.weight is read by embedding"),
    (Tied(True), IDS, {"dtype": "int8"}, [FOUR_BITS], "is read in another format, or in float, too"),
], ids=["conv", "norm", "width", "float", "mx", "embedding", "tied"])
def test_what_the_format_cannot_hold_is_named(model, x, weight, rules, message):
    with pytest.raises(ExportError, match=message):
        layers_of(simulated(model, weight, rules, x).model)


@pytest.mark.medium
@pytest.mark.parametrize(("model", "weight", "inputs", "expected"), [
    (Two(), {"dtype": "int4", **BLOCKS}, None, False),
    (Two(), {"dtype": "uint4", "symmetric": False, **BLOCKS}, None, True),
    (Two(), {"dtype": "uint8", "symmetric": False, "granularity": "per_tensor"}, None, False),
    (Two(), {"dtype": "int8", "granularity": "per_channel"}, PER_TOKEN, False),
    (Transposed(), {"dtype": "int4", **BLOCKS}, None, True),
    (nn.Linear(64, 8), {"dtype": "mxfp4"}, None, True),
    (nn.Linear(64, 8), {"dtype": "mxfp4"}, {"dtype": "mxfp4"}, False),
    (nn.Linear(64, 8).bfloat16(), {"dtype": "mxfp4"}, None, False),
])
def test_what_transformers_reads_only_dequantized(model, weight, inputs, expected):
    x = X.to(next(model.parameters()).dtype)
    layers = layers_of(simulated(model, weight, x=x, inputs=inputs).model).quantized.values()
    assert {layer.is_dequantized for layer in layers} == {expected}


@pytest.mark.medium
def test_quantized_activations_that_no_layer_reads_are_named():
    sim = qtk.QuantSim(Two().eval(), X)
    sim.compute_encodings([X], progress=False)
    with pytest.raises(ExportError, match=r"first:out is an activation that layer_norm reads"):
        layers_of(sim.model)
    sim = qtk.QuantSim(Product().eval(), X, config={"version": 1, "rules": [
        {"match": {"op": "linear"}, "output": "float"}]})
    sim.compute_encodings([X], progress=False)
    with pytest.raises(ExportError, match=r"is an activation that the model returns"):
        layers_of(sim.model)


@pytest.mark.medium
@pytest.mark.sample(1)
@pytest.mark.parametrize(("inputs", "message"), [
    ({"dtype": "int8", "symmetric": True, "granularity": "per_token"}, "add narrow_range: true"),
    ({**STATIC, "narrow_range": True}, "take narrow_range: true out"),
    ({**STATIC, "dtype": "int4"}, "is an activation of int4; servers have int8 and fp8_e4m3"),
])
def test_inputs_that_kernels_compute_otherwise_are_refused(inputs, message):
    with pytest.raises(ExportError, match=message):
        layers_of(simulated(Two(), {"dtype": "int8"}, inputs=inputs).model)


@pytest.mark.medium
def test_layers_know_their_inputs_and_what_is_float():
    sim = simulated(Two(), {"dtype": "int8"}, [{"match": {"path": "last"}, "weight": "float", "input": "float"}],
                    inputs=PER_TOKEN)
    found = layers_of(sim.model)
    assert list(found.quantized) == ["first.weight"]
    assert found.quantized["first.weight"].inputs is sim.quantizers["first:in[0]"]
    assert list(found.in_float) == ["last.weight"]
    siblings = layers_of(simulated(Siblings(), {"dtype": "int8"}, inputs=PER_TOKEN).model).quantized
    assert siblings["q.weight"].reads == siblings["k.weight"].reads
    (layer,) = layers_of(simulated(Transposed(), {"dtype": "int4", **BLOCKS}).model).quantized.values()
    assert (layer.name, layer.axes.outputs, layer.axes.columns, layer.path) == ("inner.weight", (1,), (0,), "inner")


@pytest.mark.medium
def test_a_model_in_float_has_no_layer():
    sim = simulated(Two(), {"dtype": "int8"})
    for quantizer in sim.quantizers.values():
        quantizer.mode = qtk.Mode.BYPASS
    with pytest.raises(ExportError, match="no weight of a linear layer is quantized"):
        layers_of(sim.model)
