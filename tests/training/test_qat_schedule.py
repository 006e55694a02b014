import copy
import pickle

import pytest
import torch
from torch import nn

import qtk
from qtk.errors import ConfigError, NotCalibratedError
from qtk.ops.gradient_scale import GradientScale
from tests.training.test_learned_ranges import batches, equal_encodings, simulated

KEPT = {"version": 1, "fold_batch_norms": False}


def with_batch_norm():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    sim = qtk.QuantSim(model, batches()[0], config=KEPT)
    sim.compute_encodings(batches(), progress=False)
    return sim


def run(sim, schedule, optimizer, steps):
    """The encodings after each step."""
    seen = []
    for number in range(steps):
        sim.model.train()
        schedule.step()
        optimizer.zero_grad()
        sim.model(3 * batches()[number % 3]).square().sum().backward()
        optimizer.step()
        seen.append(sim.encodings())
    return seen


@pytest.mark.medium
def test_ranges_are_observed_then_stay_then_are_learned_by_one_optimizer():
    sim = simulated()
    schedule = qtk.QatSchedule(sim, observe_until=2, learn_ranges_from=4)
    optimizer = torch.optim.Adam(
        [{"params": sim.weight_parameters()}, {"params": sim.range_parameters(), "lr": 1e-2}], lr=1e-4)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    start = sim.encodings()
    first, second, third, fourth, fifth, _ = run(sim, schedule, optimizer, 6)
    activations, weights = ("input:input", "1:out", "3:out"), ("0.weight", "3.weight")
    for name in activations:  # three times as wide: they grow, a little with each batch
        assert start[name].scale < first[name].scale < second[name].scale < 1.1 * start[name].scale
    assert equal_encodings(third, second)
    assert equal_encodings(fourth, second)
    assert all(torch.equal(start[name].scale, fourth[name].scale) for name in weights)
    assert not any(torch.equal(fourth[name].scale, fifth[name].scale) for name in (*activations, *weights))


def test_batch_norms_stay_frozen_through_train():
    sim = with_batch_norm()
    schedule = qtk.QatSchedule(sim, freeze_batch_norms_at=2)
    optimizer = torch.optim.SGD(sim.model.parameters(), lr=1e-4)
    before = sim.model.state_dict()["1.running_mean"].clone()
    run(sim, schedule, optimizer, 2)
    frozen = sim.model.state_dict()["1.running_mean"].clone()
    assert not torch.equal(frozen, before)
    run(sim, schedule, optimizer, 3)
    assert torch.equal(sim.model.state_dict()["1.running_mean"], frozen)
    assert not any(quantizer.learns_range for quantizer in sim.quantizers.values())


def frozen_norms(model):
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm2d) and not module.training]


@pytest.mark.medium
def test_stepped_at_the_end_of_a_step_it_comes_one_step_later_and_train_undoes_nothing():
    """Lightning, and loops over epochs, call ``train()`` between two steps."""
    sim = with_batch_norm()
    schedule = qtk.QatSchedule(sim, learn_ranges_from=2, freeze_batch_norms_at=1)
    running, held = [], []
    for number in range(4):
        sim.model.train()
        held.append(sim.quantizers["0.weight"].range_gradients_off)
        sim.model(batches()[number % 3])
        running.append(sim.model.state_dict()["1.running_mean"].clone())
        schedule.step()
    assert held == [True, True, True, False]
    assert not torch.equal(running[0], running[1])
    assert torch.equal(running[1], running[2])
    assert torch.equal(running[2], running[3])


@pytest.mark.medium
@pytest.mark.parametrize("of", [lambda sim: sim.model, lambda sim: qtk.block_view(sim, "0"), lambda sim: (
    copy.deepcopy(sim.model)), lambda sim: pickle.loads(pickle.dumps(sim.model)),
    lambda sim: nn.ModuleList([sim.model])], ids=["model", "view", "copy", "pickle", "wrapper"])
def test_frozen_batch_norms_stay_so_in_what_holds_them(of):
    sim = with_batch_norm()
    qtk.QatSchedule(sim, freeze_batch_norms_at=0)
    model = of(sim)
    model.eval()
    model.train()
    assert len(frozen_norms(model)) == 1
    assert all(module.training for module in model.modules() if not isinstance(module, nn.BatchNorm2d))


def test_batch_norms_that_take_the_place_of_others_are_frozen_too_and_the_next_schedule_frees_them():
    sim = with_batch_norm()
    schedule = qtk.QatSchedule(sim, freeze_batch_norms_at=1)
    nn.SyncBatchNorm.convert_sync_batchnorm(sim.model)
    for _ in range(2):
        schedule.step()
    sim.model.train()
    assert not sim.model.get_submodule("1").training
    assert isinstance(sim.model.get_submodule("1"), nn.SyncBatchNorm)
    qtk.QatSchedule(sim)
    assert sim.model.train().get_submodule("1").training


@pytest.mark.medium
def test_what_is_frozen_or_already_chosen_is_respected():
    sim = simulated()
    sim.freeze("1:out")
    sim.learn_ranges("0.weight", gradient_scale=None)
    before = sim.encodings()
    schedule = qtk.QatSchedule(sim, observe_until=1, learn_ranges_from=1)
    optimizer = torch.optim.Adam(sim.range_parameters(), lr=1e-2)
    first, second = run(sim, schedule, optimizer, 2)
    assert second["1:out"].equals(before["1:out"])
    assert first["0.weight"].equals(before["0.weight"])
    assert not second["0.weight"].equals(before["0.weight"])
    assert sim.quantizers["0.weight"].gradient_scale is GradientScale.NONE
    assert not sim.quantizers["3.weight"].learns_range


@pytest.mark.medium
def test_ranges_that_the_config_gives_follow_no_batch():
    torch.manual_seed(0)
    rules = [{"match": {"op": "softmax"}, "output": {"range": [0.0, 2.0]}},
             {"match": {"op": "relu"}, "output": {"bounds": [0.0, 0.5]}}]
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Softmax(-1)).eval(), torch.randn(8, 4)
    sim = qtk.QuantSim(model, x, config={"version": 1, "rules": rules})
    sim.compute_encodings([x], progress=False)
    given = {site.name for site, decided in sim.plan.items() if decided.range or decided.bounds}
    schedule, before = qtk.QatSchedule(sim, observe_until=2), sim.encodings()
    schedule.step()
    sim.model.train()(3 * x)
    moved = {name for name, encoding in sim.encodings().items() if not encoding.equals(before[name])}
    assert given == {"1:out", "3:out"}
    assert moved == {"input:input", "0:out", "2:out"}


@pytest.mark.medium
def test_a_state_saved_while_ranges_are_held_is_trained_without_the_schedule():
    sim, again = simulated(), simulated()
    sim.learn_ranges(gradient_scale=None)
    qtk.QatSchedule(sim, learn_ranges_from=5).step()
    again.model.load_state_dict(sim.model.state_dict())
    again.model.train()(batches()[0]).square().sum().backward()
    assert {quantizer.gradient_scale for quantizer in again.quantizers.values()} == {GradientScale.NONE}
    assert all(quantizer.scale_factor.grad.any() for quantizer in again.quantizers.values())
    sim.model.train()(batches()[0]).square().sum().backward()
    assert not any(parameter.grad.any() for parameter in sim.range_parameters())


@pytest.mark.medium
def test_a_resumed_training_goes_on_where_it_was():
    sim = simulated()
    schedule = qtk.QatSchedule(sim, observe_until=1, learn_ranges_from=3)
    run(sim, schedule, torch.optim.SGD(sim.model.parameters(), lr=1e-5), 2)
    again = copy.deepcopy(sim)
    resumed = qtk.QatSchedule(again, observe_until=1, learn_ranges_from=3)
    resumed.load_state_dict(schedule.state_dict())
    for each, its in ((sim, schedule), (again, resumed)):
        run(each, its, torch.optim.SGD(each.model.parameters(), lr=1e-5), 3)
    assert equal_encodings(sim.encodings(), again.encodings())
    assert resumed.steps == 5


def test_bad_settings_and_an_uncalibrated_simulation_are_refused():
    sim = simulated()
    with pytest.raises(ConfigError, match="observe_until counts steps, got -1"):
        qtk.QatSchedule(sim, observe_until=-1)
    with pytest.raises(ConfigError, match="cannot be learned from step 3 and observed until 5"):
        qtk.QatSchedule(sim, observe_until=5, learn_ranges_from=3)
    with pytest.raises(ConfigError, match="no 'steps', only epoch"):
        qtk.QatSchedule(sim).load_state_dict({"epoch": 3})
    sim.forget("1:out")
    with pytest.raises(NotCalibratedError, match=r"1 sites have no encoding to train with, 1:out; run sim\.compute"):
        qtk.QatSchedule(sim, learn_ranges_from=0)
    assert not any(quantizer.learns_range for quantizer in sim.quantizers.values())
