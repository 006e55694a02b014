"""Trials of functions on tensors without data, and the factors by which their sizes may grow."""

import pytest
import torch
from torch import nn

from qtk.capture.scan_trials import Trials, factors_of_sizes, is_deeper, sizes_of_results
from qtk.torch_private import pytree


def sums(x, turns=None):
    """Each turn adds what the one before made."""
    total = torch.zeros_like(x[:, 0])
    for step in range(x.shape[1] if turns is None else turns):
        total = total + x[:, step]
    return total


def run(function, *args, **factors):
    leaves, structure = pytree.tree_flatten((args, {}))
    return Trials(function).run(leaves, structure, factors)


def test_a_trial_counts_ops_and_the_ops_that_wait_for_each_other():
    short, next_longer, longer = (run(sums, torch.zeros(2, length)) for length in (3, 4, 7))
    assert longer.num_ops - short.num_ops == 4 * (next_longer.num_ops - short.num_ops) > 0
    assert longer.depth - short.depth == 4
    assert is_deeper(short, lambda: longer)
    assert not is_deeper(longer, lambda: short)
    assert not run(sums, torch.zeros(2, 3)).decays
    assert run(lambda x: x.cumsum(1).exp(), torch.zeros(2, 3)).decays


def test_sizes_of_results_are_sizes_of_the_arguments_or_constant():
    first, longer = run(sums, torch.zeros(2, 3)), run(sums, torch.zeros(10, 21))
    assert sizes_of_results(first, longer, {(2, 10): "batch", (3, 21): "steps"}) == ["batch"]
    assert sizes_of_results(first, longer, {(3, 21): "steps"}) is None


@pytest.mark.parametrize("writes", [lambda x: x.add_(1), lambda module, x: setattr(module, "last", 1) or x])
def test_a_function_that_writes_raises(writes):
    module = [nn.Module()] if writes.__code__.co_argcount == 2 else []
    with pytest.raises(ValueError, match="writes into an argument"):
        run(writes, *module, torch.zeros(2))


def decayed(state, x, rate):
    new = state.double() * (x * rate).exp()[..., None] + x[..., None]
    state.copy_(new.to(state.dtype))
    return new.sum(-1)


def softened(state, x, rate):
    """Writes a state that no exponential multiplies."""
    state.copy_(state * rate[:, None] + (x * rate).exp()[..., None])
    return state.sum(-1)


def elsewhere(state, x, rate):
    """The decayed state goes into another argument."""
    x.copy_((state * x.exp()[..., None] + 1).sum(-1))
    return x


def test_a_step_of_a_decay_writes_its_state():
    trial = run(decayed, torch.zeros(2, 3, 4), torch.zeros(2, 3), torch.zeros(3))
    assert trial.decays
    assert trial.written == (0,)


@pytest.mark.parametrize("function", [softened, elsewhere])
def test_what_writes_anything_else_raises(function):
    with pytest.raises(ValueError, match="writes into an argument"):
        run(function, torch.zeros(2, 3, 4), torch.zeros(2, 3), torch.zeros(3))


def test_equal_arguments_are_tried_once():
    calls = []

    def counted(x):
        calls.append(x.shape)
        return x + 1

    trials = Trials(counted)
    for size in (2, 2, 3):
        trials.run([torch.zeros(size)], pytree.tree_structure(((0,), {})), {})
    assert len(calls) == 2


@pytest.mark.parametrize(("free", "fixed", "runs", "joined"), [
    ({"b": 2, "t": 5}, [6], lambda f: True, []),
    ({"b": 2, "c": 2, "t": 5}, [6], lambda f: f["b"] == f["c"], ["bc"]),  # a state's batch
    ({"a": 2, "b": 2, "c": 2}, [2], lambda f: f["b"] == f["c"], ["bc"]),  # beside a length that is 2 by chance
    ({"b": 2, "c": 2, "w": 6}, [6], lambda f: f["b"] == f["c"] and f["w"] == 1, ["bc", "1w"]),  # as wide as a layer
    ({"b": 2, "w": 2}, [2], lambda f: f["w"] == 1, ["1w"]),  # the batch goes on to vary
    ({"t": 5}, [6], lambda f: f["t"] == 1, None),  # it runs at one length alone
    ({"t": -1, "b": 2}, [6], lambda f: f["t"] == f["b"], None),  # a size in a sum alone
])
def test_sizes_have_factors_of_their_own_unless_they_must_be_equal(free, fixed, runs, joined):
    factors = factors_of_sizes(free, fixed, runs)
    if joined is None:
        assert factors is None
        return
    assert runs(factors)
    groups = {}
    for symbol, factor in ({"1": 1} | factors).items():
        groups[factor] = groups.get(factor, "") + symbol
    assert [group for group in groups.values() if len(group) > 1] == sorted(joined, key=lambda g: "1" not in g)
