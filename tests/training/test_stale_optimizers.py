import pytest
import torch

from qtk.errors import EncodingError
from tests.training.test_learned_ranges import batches, simulated


def step(sim, optimizer):
    sim.model(batches()[0]).square().sum().backward()
    optimizer.step()


@pytest.mark.medium
def test_an_optimizer_made_before_is_refused_at_its_next_step_and_named():
    sim = simulated()
    optimizer = torch.optim.AdamW(sim.model.parameters(), lr=1e-3)
    step(sim, optimizer)
    sim.learn_ranges()
    before = sim.model.state_dict()["3.bias"].clone()
    for _ in range(2):
        with pytest.raises(EncodingError, match=r"this AdamW holds 4 parameters .* before sim\.learn_ranges.* 5 ranges,"
                                                r" the first of them input:input; .*add_param_group"):
            step(sim, optimizer)
    assert torch.equal(sim.model.state_dict()["3.bias"], before)
    sim.fix_ranges()
    step(sim, optimizer)


@pytest.mark.medium
@pytest.mark.parametrize("way", ["add_param_group", "second optimizer"])
def test_ranges_that_are_added_or_have_their_own_optimizer_are_fine(way):
    sim = simulated()
    optimizer = torch.optim.SGD(sim.model.parameters(), lr=1e-3)
    sim.learn_ranges()
    second = None
    if way == "add_param_group":
        optimizer.add_param_group({"params": sim.range_parameters()})
    else:
        second = torch.optim.SGD(sim.range_parameters(), lr=1e-3)
    for _ in range(2):
        step(sim, optimizer)
    assert second is None or len(second.param_groups) == 1
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.medium
def test_optimizers_of_other_models_and_those_made_after_are_left_alone():
    sim, other = simulated(), simulated()
    of_other = torch.optim.SGD(other.model.parameters(), lr=1e-3)
    sim.learn_ranges()
    after = torch.optim.SGD(sim.model.parameters(), lr=1e-3)
    sim.learn_ranges()
    for each, optimizer in ((other, of_other), (sim, after)):
        assert not optimizer._optimizer_step_pre_hooks
        step(each, optimizer)
