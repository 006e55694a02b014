"""``torch.utils.checkpoint`` around a simulation: the gradients of a plain step bit for bit, or an error."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import qtk
from qtk.errors import CaptureError
from qtk.nn.recomputation_guard import STATE_IS_RESTORED, refuse_recomputation
from tests.test_live_batch_norms import AT_EXPORT, BATCHES, TARGET, simulation

FOLDED = {"version": 1, "extends": "default"}


def gradients(sim, run):
    """The gradients of a step, and the buffers after it, where ``run(model, x)`` is the forward pass."""
    x = BATCHES[0].clone().requires_grad_()
    (run(sim.model.train(), x) * TARGET).sum().backward()
    return [x.grad, *(p.grad for p in sim.model.parameters()), *sim.model.buffers()]


def direct(model, x):
    return model(x)


def recomputing(reentrant):
    return lambda model, x: checkpoint(model, x, use_reentrant=reentrant)


def same(some, others):
    return all(a is b is None or torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("bits", [None, 4])
def test_live_batch_norms_refuse_it_before_they_count_the_batch_again(reentrant, bits):
    sim, once = (simulation(AT_EXPORT, weight_bits=bits) for _ in range(2))
    gradients(once, direct)
    with pytest.raises(CaptureError, match=r"of a live BatchNorm2d\(8\) have moved.*block_view\(sim, …, che"):
        gradients(sim, recomputing(reentrant))
    assert same(sim.model.buffers(), once.model.buffers())


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_compiled_step_refuses_it_too(reentrant):
    sim = simulation(AT_EXPORT)
    compiled = torch.compile(sim.model, backend="aot_eager")
    with pytest.raises(CaptureError, match="statistics of a live batch norm have moved"):
        gradients(sim, lambda model, x: checkpoint(compiled, x, use_reentrant=reentrant))



@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("config", "setting"), [
    (FOLDED, lambda sim: None),
    (FOLDED, lambda sim: sim.learn_ranges()),
    (FOLDED, lambda sim: sim.track_weights()),
    (AT_EXPORT, qtk.fold_batch_norms),
], ids=["fixed", "learned", "tracked weights", "folded later"])
def test_what_does_not_move_is_computed_again_bit_for_bit(reentrant, config, setting):
    found = []
    for run in (direct, recomputing(reentrant)):
        sim = simulation(config, weight_bits=4)
        setting(sim)
        found.append(gradients(sim, run))
    assert same(*found)


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("reentrant", [False, True])
def test_frozen_batch_norms_do_not_move(reentrant):
    found = []
    for run in (direct, recomputing(reentrant)):
        sim = simulation(AT_EXPORT)
        schedule = qtk.QatSchedule(sim, freeze_batch_norms_at=0)

        def frozen(model, x, run=run, schedule=schedule):
            schedule.step()
            return run(model, x)

        found.append(gradients(sim, frozen))
    assert same(*found)


@pytest.mark.medium
@pytest.mark.parametrize("reentrant", [False, True])
def test_ranges_that_follow_batches_refuse_it(reentrant):
    sim = simulation(FOLDED)
    qtk.QatSchedule(sim, observe_until=1).step()
    with pytest.raises(CaptureError, match="the range of input:input has moved in the forward pass"):
        gradients(sim, recomputing(reentrant))


def test_a_hook_of_a_backward_pass_is_refused_unless_it_restores_the_state():
    said = []

    def second_run(gradient):
        with pytest.raises(CaptureError, match="it has moved in the forward pass, which a backward pass runs a second"):
            refuse_recomputation("it has moved")
        token = STATE_IS_RESTORED.set(True)
        refuse_recomputation("it has moved")
        STATE_IS_RESTORED.reset(token)
        said.append(1)

    x = torch.ones(2, requires_grad=True)
    x.register_hook(second_run)
    refuse_recomputation("it has moved")
    x.sum().backward()
    assert said == [1]
