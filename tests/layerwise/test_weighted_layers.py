"""Which weights are layers, and how they meet their input: checked by multiplying."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qtk
from qtk.layerwise.weighted_layers import weighted_layers
from qtk.numerics.im2col import im2col, weight_to_gemm


class AddMm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(4))

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight)


class RightFactor(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))

    def forward(self, x):
        return x @ self.weight


MODELS = {
    "linear": (nn.Linear(6, 4), (2, 3, 6)),
    "matmul": (RightFactor(), (2, 3, 6)),
    "addmm": (AddMm(), (3, 6)),
    "conv1d": (nn.Conv1d(4, 6, 3, stride=2, padding=1, dilation=2), (2, 4, 11)),
    "conv2d same": (nn.Conv2d(4, 6, 3, padding="same", dilation=2), (2, 4, 7, 8)),
    "conv2d valid": (nn.Conv2d(4, 6, (3, 1), padding="valid"), (2, 4, 7, 8)),
    "conv3d grouped": (nn.Conv3d(4, 6, 2, groups=2), (2, 4, 4, 3, 5)),
    "depthwise": (nn.Conv2d(4, 8, 3, groups=4, padding=1), (2, 4, 5, 5)),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1), (2, 4, 5, 4)),
    "transposed grouped": (nn.ConvTranspose1d(4, 6, 2, stride=2, groups=2), (2, 4, 5)),
}


def layers_of(model, x, **settings):
    sim = qtk.QuantSim(model.eval(), x, **settings)
    return weighted_layers(sim.model, sim.plan)


@pytest.mark.medium
@pytest.mark.parametrize("name", MODELS)
def test_rows_times_matrix_is_what_the_op_computes(name):
    model, shape = MODELS[name]
    x = torch.randn(shape)
    (layer,), skipped = layers_of(model, x)
    assert (layer.name, skipped) == ("weight", {})
    product = im2col(x, layer.geometry) @ weight_to_gemm(layer.weight.detach(), layer.geometry).mT
    product = torch.cat(list(product), 1)  # rows, outputs of all groups
    with torch.no_grad():
        expected = model(x)
    outputs = expected.movedim(1 if layer.geometry.kernel else -1, -1).reshape(-1, product.shape[1])
    if layer.bias is not None:
        assert layer.bias.shape == (product.shape[1],)
        product = product + layer.bias.detach()
    assert (layer.bias is not None) == (getattr(model, "bias", None) is not None)
    torch.testing.assert_close(product, outputs, rtol=1e-4, atol=1e-5)


def test_a_convolution_of_one_sample_without_a_batch():
    conv, x = nn.Conv2d(4, 6, 3), torch.randn(4, 7, 8)
    (layer,), _ = layers_of(conv, x)
    product = (im2col(x, layer.geometry) @ weight_to_gemm(layer.weight.detach(), layer.geometry).mT)[0]
    with torch.no_grad():
        torch.testing.assert_close(
            product + layer.bias, conv(x).movedim(0, -1).reshape(-1, 6), rtol=1e-4, atol=1e-5
        )


@pytest.mark.medium
def test_weights_and_biases_of_recurrent_nets():
    x = torch.randn(2, 5, 3)
    layers, skipped = layers_of(nn.LSTM(3, 4, num_layers=2, bidirectional=True), x)
    names = [f"{kind}_l{layer}{way}" for layer in range(2) for way in ("", "_reverse")
             for kind in ("weight_ih", "weight_hh")]
    assert [layer.name for layer in layers] == names
    assert skipped == {}
    assert [tuple(layer.bias.shape) for layer in layers] == [(16,)] * 8


class Odd(nn.Module):
    """Weights that are none of a matrix product with their input."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.flipped, self.scaled = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
        self.batched = nn.Parameter(torch.randn(3, 4, 4))
        self.uneven = nn.Conv1d(4, 4, 2, padding="same")
        self.tied = nn.Linear(4, 7, bias=False)
        self.head = nn.Linear(7, 2)

    def forward(self, index):
        x = self.table(index)  # [2, 3, 4]
        x = x @ self.flipped.flip(0)
        x = F.linear(x, self.scaled / self.scaled.norm())
        x = torch.einsum("bij,ijk,i->bik", x, self.batched, x.new_ones(3))
        x = self.uneven(x.transpose(1, 2)).transpose(1, 2)
        return self.head(F.linear(x, self.table.weight) + self.tied(x))


@pytest.mark.medium
def test_what_is_no_layer_is_left_with_its_reason():
    layers, skipped = layers_of(Odd(), torch.tensor([[0, 1, 2], [3, 4, 5]]))
    assert [layer.name for layer in layers] == ["tied.weight", "head.weight"]
    reasons = {
        "table.weight": "embedding", "flipped": "flip", "batched": "einsum",
        "uneven.weight": "one side more",
    }
    assert reasons.keys() <= skipped.keys()
    for name, words in reasons.items():
        assert words in skipped[name], (name, skipped[name])
    (computed,) = skipped.keys() - reasons.keys()
    assert "computed from parameters" in skipped[computed]


def test_float_weights_are_none_of_ours():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    layers, skipped = layers_of(model, torch.randn(2, 4), weight_bits=None)
    assert (layers, skipped) == ([], {})
