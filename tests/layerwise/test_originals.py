import pytest
import torch
from torch import nn

import qtk
from qtk.layerwise.originals import unchanged_on_error
from qtk.layerwise.weighted_layers import weighted_layers


def layers(sim):
    return weighted_layers(sim.model, sim.plan)[0]


def overwrite(sim, originals, error=None):
    for layer in layers(sim):
        originals.keep(layer.weight, layer.bias)
        with torch.no_grad():
            layer.weight.add_(1)
            layer.bias.add_(1)
        layer.quantizer.drop_encoding()
        layer.quantizer.frozen = layer.quantizer.rewrote_weight = True
    if error is not None:
        raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_layers_held_is_put_back(error):
    x = torch.randn(8, 4)
    sim = qtk.QuantSim(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), x)
    sim.compute_encodings([x], progress=False)
    sim.quantizers["2.weight"].drop_encoding()
    before = {name: value.clone() for name, value in sim.model.state_dict().items()}
    with pytest.raises(error), unchanged_on_error(layers(sim)) as originals:
        overwrite(sim, originals, error)
    after = sim.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert not any(layer.quantizer.frozen or layer.quantizer.rewrote_weight for layer in layers(sim))


def test_without_an_error_everything_stays():
    x = torch.randn(8, 4)
    sim = qtk.QuantSim(nn.Linear(4, 4), x)
    sim.compute_encodings([x], progress=False)
    with unchanged_on_error(layers(sim)) as originals:
        overwrite(sim, originals)
    assert all(layer.quantizer.frozen and layer.quantizer.encoding is None for layer in layers(sim))
