"""Layers whose weight is cut along its outputs, against the same layers with a parameter each."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qtk


class Cut(nn.Module):
    """Queries of one input, keys and values of another, their weights in one parameter."""

    def __init__(self, lengths):
        super().__init__()
        self.lengths, self.weight = lengths, nn.Parameter(torch.randn(sum(lengths), 8))

    def forward(self, x):
        inputs = (x, x.relu(), x.relu())
        return torch.cat([F.linear(*pair) for pair in zip(inputs, self.weight.split(self.lengths), strict=True)], -1)


class Apart(nn.Module):
    def __init__(self, cut):
        super().__init__()
        self.parts = nn.ParameterList(part.detach().clone() for part in cut.weight.split(cut.lengths))

    def forward(self, x):
        inputs = (x, x.relu(), x.relu())
        return torch.cat([F.linear(*pair) for pair in zip(inputs, self.parts, strict=True)], -1)


@pytest.mark.medium
@pytest.mark.parametrize(("lengths", "methods"), [
    ([6, 6, 6], ["seq_mse", "gptq"]), ([12, 3, 3], ["coordinate_descent"]),
])
def test_parts_are_rounded_as_layers_of_their_own(lengths, methods):
    torch.manual_seed(0)
    cut = Cut(lengths).eval()
    results = []
    batches = [torch.randn(16, 8) for _ in range(5)]
    for model in (cut, Apart(cut).eval()):
        sim = qtk.QuantSim(model, batches[0], weight_bits=3, activation_bits=None)
        sim.compute_encodings(None)
        report = qtk.apply_layerwise(sim, batches, methods, options=qtk.LayerwiseOptions(holdout=0), progress=False)
        assert report.skipped == {}
        weights = [sim.quantizers[name](value) for name, value in sim.model.named_parameters()]
        results.append(torch.cat([weight.detach() for weight in weights]))
    rounded = cut.weight.detach()
    assert not torch.allclose(results[0], rounded, atol=1e-2)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.medium
def test_an_attention_over_another_sequence_is_reached():
    class Cross(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x, y):
            return self.attention(x, y, y)[0]

    x = torch.randn(4, 5, 8), torch.randn(4, 6, 8)
    sim = qtk.QuantSim(Cross().eval(), x, weight_bits=4)
    sim.compute_encodings([x], progress=False)
    report = qtk.apply_gptq(sim, [x] * 4, progress=False)
    assert report.skipped == {}
    assert {layer.name for layer in report.layers} == {"attention.in_proj_weight", "attention.out_proj.weight"}
