import copy
import pickle

import pytest
import torch
from torch import nn

import qtk
from qtk.errors import ArgumentError, CalibrationError, EncodingError, NotCalibratedError
from qtk.ops.gradient_scale import GradientScale


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 5)).eval()


def batches(seed=1):
    return list(torch.randn(3, 4, 3, 6, 6, generator=torch.Generator().manual_seed(seed)))


def simulated(**choices):
    sim = qtk.QuantSim(net(), batches()[0], **{"weight_bits": 4, "activation_bits": 4} | choices)
    sim.compute_encodings(batches(), progress=False)
    return sim


def optimizer_of(sim, **settings):
    return torch.optim.Adam([{"params": sim.weight_parameters()}, {"params": sim.range_parameters()}], lr=0.01)


def train(sim, optimizer, steps=5):
    sim.model.train()
    for step in range(steps):
        optimizer.zero_grad()
        sim.model(batches()[step % 3]).square().sum().backward()
        optimizer.step()


def outputs(sim):
    with torch.no_grad():
        return sim.model(batches()[0])


def equal_encodings(a, b):
    return a.keys() == b.keys() and all(a[name].equals(b[name]) for name in a)


@pytest.mark.medium
def test_learning_changes_nothing_until_a_step_is_made_and_then_every_range():
    sim = simulated()
    before, encodings = outputs(sim), sim.encodings()
    taken = sim.learn_ranges()
    assert taken == [name for name, q in sim.quantizers.items() if q.learns_range]
    assert {"0.weight", "3.weight", "input:input", "1:out", "3:out"} <= set(taken)
    assert torch.equal(outputs(sim), before)
    train(sim, optimizer_of(sim))
    moved = sim.encodings()
    assert [name for name in taken if torch.equal(moved[name].scale, encodings[name].scale)] == []
    assert sim.fix_ranges() == taken
    assert equal_encodings(sim.encodings(), moved)
    assert sim.fix_ranges() == []
    sim.check()


@pytest.mark.medium
def test_the_two_groups_are_all_parameters_and_have_none_in_common():
    sim = simulated()
    with pytest.raises(CalibrationError, match=r"no range is learned.*sim\.learn_ranges"):
        sim.range_parameters()
    weights = sim.weight_parameters()
    sim.learn_ranges()
    ranges = {id(parameter) for parameter in sim.range_parameters()}
    assert list(map(id, sim.weight_parameters())) == list(map(id, weights))
    assert ranges.isdisjoint(map(id, weights))
    assert {id(parameter) for parameter in sim.model.parameters()} == ranges | set(map(id, weights))
    symmetric = [q for q in sim.quantizers.values() if q.spec.symmetric]
    assert symmetric
    assert all(len(list(q.parameters())) == 1 for q in symmetric)


@pytest.mark.medium
def test_dynamic_and_frozen_sites_are_skipped():
    config = {"version": 1, "rules": [{"match": {"path": "3"}, "output": {"dynamic": True}}]}
    sim = simulated(config=config)
    sim.freeze("0.weight")
    assert sim.quantizers["3:out"].spec.dynamic
    taken = sim.learn_ranges()
    assert "3:out" not in taken
    assert "0.weight" not in taken
    assert "3.weight" in taken
    for names in ("0.weight", ["3:out", "0.weight"]):
        with pytest.raises(CalibrationError, match=r"no site whose range can be learned: .*0\.weight is frozen"):
            sim.learn_ranges(names)


def test_bad_input_names_the_site_and_changes_nothing():
    sim = simulated()
    with pytest.raises(CalibrationError, match=r"no site is called '0\.weigth'; did you mean '0\.weight'"):
        sim.learn_ranges(["1:out", "0.weigth"])
    with pytest.raises(ArgumentError, match="gradient_scale must be one of 'lsq'"):
        sim.learn_ranges(gradient_scale="mean")
    with pytest.raises(CalibrationError, match="it is empty"):
        sim.learn_ranges([])
    sim.forget("1:out")
    with pytest.raises(NotCalibratedError, match=r"1 of \d sites have no range to start from, 1:out; run sim\.compute"):
        sim.learn_ranges()
    assert not any(q.learns_range for q in sim.quantizers.values())
    with pytest.raises(NotCalibratedError, match=r"1:out has no encoding .* run sim\.compute_encodings"):
        train(sim, torch.optim.SGD(sim.model.parameters(), lr=0.1))


@pytest.mark.medium
def test_a_scale_that_is_lost_names_its_site_where_it_is_used():
    sim = simulated()
    sim.learn_ranges()
    with torch.no_grad():
        sim.quantizers["3.weight"].scale_factor[2] = -0.1
    sim.model.train()
    for use in (lambda: sim.model(batches()[0]), sim.fix_ranges, sim.encodings):
        with pytest.raises(EncodingError, match=r"^3\.weight: a scale has become -"):
            use()
    with pytest.raises(qtk.QtkError, match=r"3\.weight: a scale has become"):
        sim.check()
    assert sim.quantizers["0.weight"].learns_range


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("way", ["state_dict", "assign", "save", "deepcopy"])
def test_learned_ranges_travel(way, tmp_path):
    sim = simulated()
    sim.freeze("0.weight")
    sim.learn_ranges("*:out", gradient_scale=None)
    sim.learn_ranges(["3.weight", "input:input"])
    optimizer = optimizer_of(sim)
    train(sim, optimizer)
    if way == "deepcopy":
        again = copy.deepcopy(sim)
    elif way == "save":
        sim.save(tmp_path / "sim")
        again = qtk.QuantSim.load(tmp_path / "sim", net(), batches()[0])
    else:
        again = qtk.QuantSim(net(), batches()[0], weight_bits=4, activation_bits=4)
        again.model.load_state_dict(copy.deepcopy(sim.model.state_dict()), assign=way == "assign")
    assert equal_encodings(again.encodings(), sim.encodings())
    for name, quantizer in sim.quantizers.items():
        other = again.quantizers[name]
        assert (other.learns_range, other.frozen) == (quantizer.learns_range, quantizer.frozen), name
        assert other.gradient_scale is quantizer.gradient_scale
    other_optimizer = optimizer_of(again)
    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, its in ((sim, optimizer), (again, other_optimizer)):
        train(each, its, steps=3)
    assert torch.equal(outputs(again), outputs(sim))  # resumed, bit for bit


@pytest.mark.medium
def test_recalibration_keeps_the_mode_and_the_parameters():
    sim = simulated()
    taken = sim.learn_ranges()
    optimizer, before = optimizer_of(sim), sim.range_parameters()
    train(sim, optimizer)
    sim.compute_encodings(batches(2), progress=False)
    assert [name for name, q in sim.quantizers.items() if q.learns_range] == taken
    assert all(a is b for a, b in zip(sim.range_parameters(), before, strict=True))
    fresh = qtk.QuantSim(net(), batches()[0], weight_bits=4, activation_bits=4)
    fresh.model.load_state_dict({k: v for k, v in sim.model.state_dict().items() if "qtk_quantizers" not in k})
    fresh.compute_encodings(batches(2), progress=False)
    assert equal_encodings(sim.encodings(), fresh.encodings())
    train(sim, optimizer)
    assert not equal_encodings(sim.encodings(), fresh.encodings())


@pytest.mark.medium
def test_learning_lowers_the_loss_more_than_fixed_ranges_do():
    """Weights stay as they are: what gets better does so by the ranges, which begin as those of min_max."""
    rules = [{"match": {"op": ["conv", "linear"]}, "weight": {"scheme": "min_max"}}]
    sim = simulated(weight_bits=3, activation_bits=3, config={"version": 1, "extends": "default", "rules": rules})
    teacher = net()

    def loss():
        return sum(float((sim.model(x) - teacher(x)).square().mean()) for x in batches())

    start = loss()
    sim.learn_ranges()
    optimizer = torch.optim.Adam(sim.range_parameters(), lr=5e-3)
    for step in range(60):
        optimizer.zero_grad()
        x = batches()[step % 3]
        (sim.model(x) - teacher(x).detach()).square().mean().backward()
        optimizer.step()
    assert loss() < 0.8 * start


@pytest.mark.medium
def test_second_derivatives_pass_through_a_model_that_learns_its_ranges():
    sim = simulated()
    sim.learn_ranges()
    x = batches()[0].requires_grad_()
    of_input, = torch.autograd.grad(sim.model(x).square().sum(), x, create_graph=True)
    of_input.square().sum().backward()  # a gradient penalty
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in sim.range_parameters())


@pytest.mark.medium
def test_tracked_weights_have_at_every_step_the_range_that_calibration_would_find():
    rules = [{"match": {"op": ["conv", "linear"]}, "weight": {"scheme": "min_max"}}]
    sim = simulated(config={"version": 1, "extends": "default", "rules": rules})
    assert sim.track_weights() == ["0.weight", "3.weight"]
    optimizer = torch.optim.SGD(sim.model.parameters(), lr=1e-3)
    for _ in range(3):
        train(sim, optimizer, steps=1)
        sim.model(batches()[0])
        tracked = sim.encodings()
        sim.compute_encodings(None, sites="*.weight", progress=False)
        assert equal_encodings(tracked, sim.encodings())
    with pytest.raises(CalibrationError, match=r"no site whose range can follow: 1:out is no parameter"):
        sim.track_weights("1:out")
    sim.learn_ranges("3.weight")
    assert sim.quantizers["3.weight"].momentum is None
    assert sim.track_weights("3.weight") == ["3.weight"]
    assert not sim.quantizers["3.weight"].learns_range


@pytest.mark.medium
def test_gradient_scaling_is_chosen_site_by_site():
    sim = simulated()
    sim.learn_ranges("*.weight")
    sim.learn_ranges("*:out", gradient_scale=None)
    assert sim.quantizers["0.weight"].gradient_scale is GradientScale.LSQ
    assert sim.quantizers["1:out"].gradient_scale is GradientScale.NONE


def saved_and_loaded(model, file):
    torch.save(model, file)
    return torch.load(file, weights_only=False)


@pytest.mark.medium
@pytest.mark.parametrize("copied", [
    lambda model, file: pickle.loads(pickle.dumps(model)), saved_and_loaded, lambda model, file: copy.deepcopy(model),
], ids=["pickle", "torch.save", "deepcopy"])
def test_a_copy_of_a_model_in_training_computes_and_trains_alike(copied, tmp_path):
    sim = simulated()
    sim.learn_ranges()
    optimizer = optimizer_of(sim)
    train(sim, optimizer, steps=2)
    optimizer.zero_grad()
    model = copied(sim.model, tmp_path / "model.pt")
    for each in (sim.model, model):
        loss = sum(each(x).square().sum() for x in batches())
        loss.backward()
    assert torch.equal(model(batches()[0]), sim.model(batches()[0]))
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert any(name.endswith("scale_factor") for name in gradients)
    for name, parameter in sim.model.named_parameters():
        assert torch.equal(gradients[name], parameter.grad)
        assert parameter.grad is not gradients[name]
