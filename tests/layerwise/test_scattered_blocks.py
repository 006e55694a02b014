"""Scales whose weights are no run of the layer's columns: two channels of a convolution, one place of its kernel."""

from dataclasses import replace

import torch
from torch import nn

import qtk
from qtk.core.granularity import PerBlock
from qtk.layerwise.layer_state import LayerState, columns_per_scale, scale_index_of
from qtk.layerwise.seq_mse import SeqMse
from qtk.layerwise.weighted_layers import weighted_layers
from qtk.moments.required_statistics import RequiredStatistics
from qtk.moments.second_moments import SecondMoments
from qtk.numerics.im2col import im2col
from qtk.quantizers.quantizer import Quantizer

CANDIDATES = 12


def test_every_scale_takes_the_least_of_all_candidates():
    torch.manual_seed(0)
    conv, x = nn.Conv2d(4, 6, 3, stride=2, padding=1).eval(), torch.randn(5, 4, 9, 9).relu() + 0.2
    sim = qtk.QuantSim(conv, x, weight_bits=4, activation_bits=None)
    ((layer,), _) = weighted_layers(sim.model, sim.plan)
    spec = replace(layer.quantizer.spec, granularity=PerBlock((1, 2, 1, 1)))
    scale = layer.weight.detach().reshape(6, 2, 2, 3, 3).abs().amax(2) / 7
    quantizer = Quantizer(spec, site="weight")
    quantizer.load_encoding(qtk.Encoding(spec, scale))
    layer = replace(layer, quantizer=quantizer)
    assert columns_per_scale(scale_index_of(layer.weight.shape, quantizer.encoding, layer.geometry)) is None
    moments = SecondMoments(layer.geometry, RequiredStatistics(dtype=torch.float64))
    moments.observe(x)
    found = SeqMse(CANDIDATES).apply(LayerState.of(layer, moments)).encoding.scale
    rows = im2col(x.double(), layer.geometry)[0].reshape(-1, 2, 2, 3, 3)  # rows, blocks, channels of a block, kernel
    weight = layer.weight.detach().reshape(6, 2, 2, 3, 3)
    errors = []
    for index in range(1, CANDIDATES + 1):
        steps = (scale * (index / CANDIDATES))[:, :, None]
        change = (weight - (weight / steps).round().clamp(-8, 7) * steps).double()
        errors.append(torch.einsum("nbcyx,obcyx->nobyx", rows, change).square().sum(0))
    chosen = (found / scale * CANDIDATES).round().long() - 1
    every = torch.stack(errors)
    torch.testing.assert_close(every.gather(0, chosen[None])[0], every.min(0).values, rtol=1e-4, atol=1e-9)
