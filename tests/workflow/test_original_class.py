"""``sim.to_original``: the user's class with the simulated weights, or with the simulation in its forward."""

import copy
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import qtk
from qtk.errors import CaptureError, NotCalibratedError, VerificationError
from qtk.graph.graphs import roots
from qtk.workflow import original_class
from tests.capture.caches import Cache, Decoder, words


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


class Saves(Net):
    saver = "a setting"

    def save_pretrained(self, path):
        torch.save(self.state_dict(), path)

    save = push_to_hub = save_pretrained


@pytest.fixture(scope="module")
def running():
    """A model whose forward runs a simulation."""
    model = Saves().eval()
    model.config = SimpleNamespace(layers=["mix"])
    made = simulation(model).to_original()
    model.config.layers.append("later")
    return made


def test_a_running_simulation_has_plain_attributes_of_its_own(running):
    assert running.config.layers == ["mix"]


@pytest.mark.parametrize("name", ["save", "save_pretrained", "push_to_hub"])
def test_methods_that_save_a_running_simulation_are_refused(running, name, tmp_path):
    with pytest.raises(CaptureError, match=rf"^{name} of this Saves would write .* write it with sim.export"):
        getattr(running, name)(tmp_path / "model.pt")
    assert not [*tmp_path.iterdir()]
    assert running.saver == "a setting"


def test_a_class_derived_from_that_of_a_running_simulation(running):
    derived = copy.deepcopy(running)
    derived.__class__ = type("Derived", (type(running),), {})
    assert torch.equal(derived(words(2, 6)), running(words(2, 6)))
    with pytest.raises(AttributeError, match="this Derived runs a simulation and has no 'mix'"):
        derived.mix  # noqa: B018


def test_a_running_simulation_is_compared_with_the_examples(monkeypatch):
    sim, run = simulation(Net().eval()), original_class._run
    monkeypatch.setattr(original_class, "_run", lambda *args: 2 * run(*args))
    with pytest.raises(VerificationError, match=r"^Net whose forward runs the simulation computes something else"):
        sim.to_original()


class Flagged(Net):
    def forward(self, ids, use_cache=None, return_dict=None):
        logits = super().forward(ids)
        return (logits,) if return_dict is False else {"logits": logits}


def test_a_flag_that_the_graph_has_decided_otherwise_is_refused():
    made, ids = simulation(Flagged().eval()).to_original(), words(4, 6)
    expected = made(ids)["logits"]
    for flags in ({"return_dict": True}, {"use_cache": False}, {"use_cache": None, "return_dict": None}):
        assert torch.equal(made(ids, **flags)["logits"], expected)
    for name, value in {"return_dict": False, "use_cache": True}.items():
        with pytest.raises(CaptureError, match=rf"^{name}={value}, .*; leave {name} out, or make the simulation from"):
            made(ids, **{name: value})


def test_generate_keeps_no_cache_that_no_graph_takes():
    class Generates(Flagged):
        def __init__(self):
            super().__init__()
            self.generation_config = SimpleNamespace(use_cache=True)

        def generate(self, ids, generation_config=None, use_cache=None):
            settings = generation_config or self.generation_config
            return self(ids, use_cache=settings.use_cache if use_cache is None else use_cache)["logits"]

    class Own(Generates):
        def generate(self, ids):
            return super().generate(ids)

    made, ids = simulation(Generates().eval()).to_original(), words(4, 6)
    given = SimpleNamespace(use_cache=True)
    for options in ({}, {"use_cache": True}, {"use_cache": False}, {"generation_config": given}):
        assert torch.equal(made.generate(ids, **options), made(ids)["logits"])
    assert given.use_cache
    made = simulation(Own().eval()).to_original()
    assert torch.equal(made.generate(ids), made(ids)["logits"])


class Kept(Net):
    def forward(self, ids, logits_to_keep=0):
        return {"logits": super().forward(ids)[:, -logits_to_keep:]}


def test_the_last_logits_are_kept_of_a_graph_that_makes_all():
    """Models of transformers whose config says so get ``logits_to_keep=1`` from ``generate``."""
    made, ids = simulation(Kept().eval()).to_original(), words(4, 6)
    expected = made(ids)["logits"]
    for count in (0, 1, 4):
        assert torch.equal(made(ids, logits_to_keep=count)["logits"], expected[:, -count:])
    with pytest.raises(CaptureError, match="logits_to_keep=tensor"):
        made(ids, logits_to_keep=torch.tensor([1, 2]))


@pytest.fixture
def library(monkeypatch):
    """A package called transformers, whose class of caches is that of the tests."""
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(Cache=Cache))


@pytest.mark.medium
def test_an_empty_cache_of_the_example_stays_empty(library):
    class InPython(Net):
        def forward(self, ids, cache=None):
            if int(ids.sum()) < 0:
                return None
            x = self.embed(ids)
            keys, _ = cache.extend(0, x, x)
            return self.head(self.mix(x + keys.sum(1, keepdim=True)))

    example = {"ids": words(4, 6), "cache": Cache()}
    sim = qtk.QuantSim(InPython().eval(), example)
    sim.compute_encodings([{"ids": words(4, 6), "cache": Cache()}], progress=False)
    made = sim.to_original()
    assert "" not in roots(sim.model)
    outputs = [made(words(4, 6), cache=Cache()) for _ in range(3)]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    cache = Cache()
    made(words(4, 6), cache=cache)
    assert cache.keys[0].shape == (4, 6, 32)
    assert not example["cache"].keys
    assert not sim.model.examples[0].kwargs["cache"].keys


@pytest.mark.medium
def test_an_empty_cache_that_the_example_has_by_position_is_given_to_the_graph(library):
    model = Decoder().eval()
    sim = qtk.QuantSim(model, (words(4, 6), Cache()))
    sim.compute_encodings([(words(4, 6), Cache())], progress=False)
    made = sim.to_original()
    expected = sim.model(words(4, 6), Cache())["logits"]
    assert torch.equal(made(words(4, 6))["logits"], expected)
    assert torch.equal(made(words(4, 6), Cache())["logits"], expected)
    assert set(made(words(4, 6), use_cache=False)) == {"logits"}
