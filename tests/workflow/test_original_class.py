"""``sim.to_original``: the user's class with the simulated weights, or with the simulation in its forward."""

import copy

import pytest
import torch
from torch import nn

import qtk
from qtk.errors import CaptureError, NotCalibratedError
from tests.capture.caches import Decoder, words


class Net(nn.Module):
    """A method of its own, a tied weight, a buffer, and a plain attribute."""

    def __init__(self, tied=True):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix, self.head = nn.Embedding(32, 32), nn.Linear(32, 32), nn.Linear(32, 32, bias=False)
        self.register_buffer("shift", torch.arange(32.0) / 32)
        self.names = ["a", "b"]
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(torch.relu(self.mix(self.embed(ids))) + self.shift)

    def best(self, ids):
        return self(ids).argmax(-1)


def simulation(model, **options):
    sim = qtk.QuantSim(model, words(4, 6), **options)
    sim.compute_encodings([words(4, 6)], progress=False)
    return sim


@pytest.mark.parametrize("config", ["weight_only_int4", {"version": 1, "defaults": {"weight": {"bits": 4}}}])
def test_weights_alone_are_those_of_the_users_class(config):
    model = Net(tied=False).eval()
    sim = simulation(model, config=config, activation_bits=None)
    made = sim.to_original()
    assert type(made) is Net
    assert made.names == ["a", "b"]
    assert torch.equal(made(words(4, 6)), sim.model(words(4, 6)))
    assert torch.equal(made.best(words(2, 6, seed=3)), sim.model(words(2, 6, seed=3)).argmax(-1))
    assert [*made.state_dict()] == [*model.state_dict()]
    assert torch.equal(made.mix.weight, sim.quantizers["mix.weight"](sim.model.get_parameter("mix.weight")))
    with torch.no_grad():
        made.mix.weight.zero_()
    assert sim.model.get_parameter("mix.weight").abs().sum() > 0


def test_tied_weights_stay_tied():
    sim = simulation(Net().eval(), activation_bits=None)
    made = sim.to_original()
    assert made.head.weight is made.embed.weight
    assert torch.equal(made(words(4, 6)), sim.model(words(4, 6)))
    assert len({*made.parameters()}) == 3


def test_quantized_activations_run_in_the_forward_of_the_users_class():
    model = Net().eval()
    sim = simulation(model)
    made = sim.to_original()
    assert isinstance(made, Net)
    assert torch.equal(made.best(words(3, 6, seed=5)), sim.model(words(3, 6, seed=5)).argmax(-1))
    assert not torch.equal(made(words(3, 6)), model(words(3, 6)))
    assert {*made.parameters()} == {*sim.model.parameters()}
    with pytest.raises(AttributeError, match="this Net runs a simulation and has no 'mix': its submodules are in the"):
        made.mix  # noqa: B018


def test_generate_quantizes_each_weight_once():
    class Generates(Net):
        def generate(self, ids):
            kept.append(sim.quantizers["mix.weight"].weight_cache.enabled)
            return self(ids)

    kept = []
    sim = simulation(Generates().eval())
    made = sim.to_original()
    assert torch.equal(made.generate(words(4, 6)), made(words(4, 6)))
    assert kept == [True]
    assert not sim.quantizers["mix.weight"].weight_cache.enabled


def test_a_simulation_without_encodings_is_refused():
    sim = qtk.QuantSim(Net(tied=False).eval(), words(4, 6), activation_bits=None)
    with pytest.raises(NotCalibratedError, match=r"weight"):
        sim.to_original()


def test_a_copy_and_a_loaded_simulation_have_the_class_too(tmp_path):
    sim = simulation(Net(tied=False).eval(), activation_bits=None)
    assert type(copy.deepcopy(sim).to_original()) is Net
    sim.save(tmp_path / "saved")
    loaded = qtk.QuantSim.load(tmp_path / "saved", Net(tied=False).eval(), words(4, 6))
    assert torch.equal(loaded.to_original()(words(4, 6)), sim.model(words(4, 6)))


def test_a_folded_batch_norm_has_no_place_in_the_class():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    with torch.no_grad():
        model[1].running_mean.add_(1.0)
        model[1].running_var.mul_(3.0)
    x = torch.randn(4, 3, 6, 6)
    config = {"version": 1, "defaults": {"activation": "float"}, "fold_batch_norms": True}
    sim = qtk.QuantSim(model, x, config=config, activation_bits=None)
    sim.compute_encodings(None)
    with pytest.raises(CaptureError, match=r"^1.weight of .* set fold_batch_norms: false"):
        sim.to_original()
    kept = qtk.QuantSim(model, x, config={**config, "fold_batch_norms": False}, activation_bits=None)
    kept.compute_encodings(None)
    assert torch.equal(kept.to_original()(x), kept.model(x))


def test_a_model_without_the_class_is_refused():
    model = torch.jit.script(nn.Linear(4, 4)).eval()
    holder = nn.Sequential(nn.Linear(4, 4), model).eval()
    sim = qtk.QuantSim(holder, torch.randn(3, 4), activation_bits=None)
    sim.compute_encodings(None)
    with pytest.raises(CaptureError, match=r"class of the model cannot be made again: .*sim.model.state_dict\(\)"):
        sim.to_original()


@pytest.mark.medium
def test_greedy_words_with_a_cache_are_those_without():
    model = Decoder().eval()
    first = {"ids": words(2, 7)}
    step = {"ids": words(2, 3, seed=1), "cache": model(words(2, 7))["cache"]}
    sim = qtk.QuantSim(model, first, variants=[step], dynamic_shapes="all")
    sim.compute_encodings([first, step], progress=False)
    made = sim.to_original()
    assert isinstance(made, Decoder)
    cached, plain = made.greedy(words(2, 5), 20), made.greedy(words(2, 5), 20, cached=False)
    assert torch.equal(cached, plain)
    assert not torch.equal(made(words(2, 5))["logits"], model(words(2, 5))["logits"])
