import pytest
import torch
from torch import nn

import qtk
from qtk.errors import EncodingError
from qtk.quantizers.modes import in_mode
from tests.transforms.nets import INTO_LAYERS, INTO_SCALE_SHIFT, randomized
from tests.zoo.models import ZOO

CASES = INTO_LAYERS | INTO_SCALE_SHIFT


@pytest.mark.sample(3)
@pytest.mark.medium
@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_of_the_original_is_folded_again(name):
    build, shape, *_ = CASES[name]
    x, other = torch.randn(shape, dtype=torch.float64), randomized(build(), seed=5)
    sim = qtk.QuantSim(randomized(build()), x)
    sim.load_float_state_dict(other.state_dict())
    with in_mode(sim.quantizers.values(), qtk.Mode.BYPASS):
        torch.testing.assert_close(sim.model(x), other(x), rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_tied_parameters_are_loaded_once():
    entry = ZOO["tied_embedding"] if "tied_embedding" in ZOO else ZOO["language_model"]
    sim, other = qtk.QuantSim(entry.model(), entry.inputs()), entry.model()
    for parameter in other.parameters():
        nn.init.normal_(parameter)
    sim.load_float_state_dict(other.state_dict())
    with in_mode(sim.quantizers.values(), qtk.Mode.BYPASS):
        assert torch.equal(entry.run(sim.model), entry.run(other))


def net():
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).eval()


def test_encodings_of_the_old_weights_are_forgotten():
    x = torch.randn(2, 3, 4, 4)
    sim = qtk.QuantSim(net(), x)
    sim.compute_encodings([x], progress=False)
    sim.load_float_state_dict(net().state_dict())
    assert sim.encodings() == {}


@pytest.mark.medium
@pytest.mark.parametrize(("change", "message"), [
    (lambda state: state.pop("1.running_var"), "no tensor '1.running_var'"),
    (lambda state: state.pop("0.weight"), "no tensor '0.weight'"),
    (lambda state: state.update({"2.weight": torch.zeros(1)}), "2.weight is unexpected"),
    (lambda state: state.update({"0.weight": torch.zeros(4, 3, 3, 3)}), r"0\.weight has shape \(4, 3, 3, 3\)"),
])
def test_another_checkpoint_is_refused_and_nothing_changes(change, message):
    x, state = torch.randn(2, 3, 4, 4), net().state_dict()
    sim = qtk.QuantSim(net(), x)
    sim.compute_encodings([x], progress=False)
    expected = sim.model(x)
    change(state)
    with pytest.raises(EncodingError, match=message):
        sim.load_float_state_dict(state)
    assert torch.equal(sim.model(x), expected)


def test_frozen_encodings_are_in_the_way():
    x = torch.randn(2, 3, 4, 4)
    sim = qtk.QuantSim(net(), x)
    sim.compute_encodings([x], progress=False)
    sim.freeze("0.weight")
    with pytest.raises(EncodingError, match=r"0\.weight is frozen.*unfreeze"):
        sim.load_float_state_dict(net().state_dict())


@pytest.mark.medium
def test_a_loaded_checkpoint_counts_as_unrounded():
    net, x = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)), torch.randn(16, 8)
    with torch.no_grad():
        net[0].weight[0] *= 50
    sim = qtk.QuantSim(net, x)
    sim.compute_encodings([x], progress=False)
    qtk.apply_gptq(sim, [x], progress=False)
    sim.unfreeze()
    sim.load_float_state_dict(net.state_dict())
    assert qtk.equalize_model(sim).applied
