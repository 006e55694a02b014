"""Losses other than the squared error, against every output formed in float64."""

import pytest
import torch
from torch import nn

import qtk
from qtk.errors import CalibrationError
from qtk.layerwise.layer_state import LayerState, columns_per_scale, scale_index_of
from qtk.layerwise.seq_mse import SeqMse
from qtk.layerwise.weighted_layers import weighted_layers
from qtk.moments.second_moments import SecondMoments

CANDIDATES = 15
ROWS = 300
GRANULARITIES = {
    "per_tensor": {"granularity": "per_tensor"}, "per_channel": {"granularity": "per_channel"},
    "per_block": {"granularity": "per_block", "block_size": 6},
}


def problem(granularity, *, step, one_input=False, asymmetric=False):
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.Linear(12, 5).eval()
    with torch.no_grad():
        model.weight *= torch.tensor([[0.01], [0.1], [1.0], [5.0], [20.0]])  # outputs of very different power
    original = torch.randn(ROWS, 12, generator=generator).relu()
    quantized = original if one_input else original + 0.1 * torch.randn(ROWS, 12, generator=generator)
    weight = {"symmetric": not asymmetric, **GRANULARITIES[granularity]}
    config = {"version": 1, "defaults": {"weight": weight, "activation": {"symmetric": False}, "bias": "float"}}
    sim = qtk.QuantSim(model, original, weight_bits=4, activation_bits=None, config=config)
    sim.compute_encodings(None, progress=False)
    (layer,), _ = weighted_layers(sim.model, sim.plan)
    encoding = layer.quantizer.encoding
    block = columns_per_scale(scale_index_of(layer.weight.shape, encoding, layer.geometry))
    moments = SecondMoments(layer.geometry, step.required_statistics(None if block == 12 else block))
    for part in range(0, ROWS, 100):
        rows = slice(part, part + 100)
        moments.observe(quantized[rows], None if one_input else original[rows])
    return LayerState.of(layer, moments), original.double(), quantized.double(), block


def losses(own, original, quantized, block, loss):
    """Of every candidate for every scale. Shape: [candidates, scales]."""
    encoding, weight = own.encoding, own.float_weight.double()
    found = []
    for index in range(1, CANDIDATES + 1):
        scale = encoding.scale * (index / CANDIDATES)
        steps = scale.reshape(-1, 1).repeat_interleave(block, 1).reshape(-1, 12) if scale.numel() > 1 else scale
        near = ((weight.float() / steps).round().clamp(-8, 7) * steps).double()
        parts = []
        for begin in range(0, 12, block):
            columns = slice(begin, begin + block)
            reference = original[:, columns] @ weight[:, columns].T
            apart = reference - quantized[:, columns] @ near[:, columns].T
            parts.append(apart.abs().sum(0) if loss == "l1" else
                         (apart.square().sum(0) / reference.square().sum(0)).log())
        errors = torch.stack(parts, 1)  # [outputs, blocks]
        found.append(errors.sum().reshape(1) if scale.numel() == 1 else errors.flatten())
    return torch.stack(found)


@pytest.mark.medium
@pytest.mark.parametrize("one_input", [False, True])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("loss", ["sqnr", "l1"])
def test_the_least_of_all_candidates(loss, granularity, one_input):
    step = SeqMse(CANDIDATES, loss=loss)
    own, original, quantized, block = problem(granularity, step=step, one_input=one_input)
    expected = losses(own, original, quantized, block, loss)
    chosen = (step.apply(own).encoding.scale / own.encoding.scale * CANDIDATES).round().long().flatten() - 1
    torch.testing.assert_close(
        expected.gather(0, chosen[None])[0], expected.min(0).values, rtol=1e-5, atol=1e-5
    )


def test_where_outputs_share_a_scale_weak_outputs_count_too():
    found = {}
    for loss in ("mse", "sqnr"):
        step = SeqMse(CANDIDATES, loss=loss)
        own, *_ = problem("per_tensor", step=step)
        found[loss] = float(step.apply(own).encoding.scale)
    assert found["sqnr"] < found["mse"]


def test_what_makes_no_sense_is_refused():
    with pytest.raises(CalibrationError, match="one of mse, sqnr, l1, got 'mae'"):
        SeqMse(loss="mae")
    with pytest.raises(CalibrationError, match="joint needs loss='mse'"):
        SeqMse(joint=True, loss="l1")
