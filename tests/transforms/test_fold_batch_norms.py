"""Folding all batch norms of a model keeps its function, and an error or a wrong fold leaves it as it was."""

import copy

import pytest
import torch
from torch import nn

import qtk
from qtk.transforms import fold_batch_norm_step
from qtk.transforms.absorb_bias import folded_statistics
from qtk.transforms.result import Outcome
from qtk.transforms.steps import ScaleParameter, make
from tests.transforms.folding import folded, inputs, norms
from tests.transforms.nets import INTO_LAYERS, InPython, randomized
from tests.zoo.models import ZOO
from tests.zoo.prepared import copied, pair


def test_a_model_without_batch_norm_says_so():
    _, result = folded(nn.Linear(4, 2), torch.randn(3, 4))
    assert str(result) == "fold_batch_norms: the model has no batch norm to fold"


def test_the_original_keeps_its_tensors():
    model, x = randomized(INTO_LAYERS["conv2d"][0]()), inputs((2, 4, 6, 6))
    before = copy.deepcopy(model.state_dict())
    prepared = qtk.prepare_model(model, x)  # shares the parameters
    qtk.fold_batch_norms(prepared)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert "1.running_mean" in model.state_dict()


@pytest.mark.medium
def test_a_fold_that_changes_the_outputs_is_undone_and_the_rest_goes_on(monkeypatch):
    model = randomized(nn.Sequential(
        nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)))
    right = fold_batch_norm_step.FoldBatchNorm._scale_and_shift

    def wrong(step, state):
        scale, shift = right(step, state)
        return (scale * 1.01, shift) if step.mean.startswith("4") else (scale, shift)

    monkeypatch.setattr(fold_batch_norm_step.FoldBatchNorm, "_scale_and_shift", wrong)
    x = inputs((2, 4, 5, 5))
    prepared, result = folded(model, x)
    assert [(group.name, group.outcome) for group in result.groups] == [("1", Outcome.APPLIED), ("4", Outcome.UNDONE)]
    assert "changed by" in result.undone[0].detail
    torch.testing.assert_close(prepared(x), model(x), rtol=1e-10, atol=1e-12)
    assert norms(prepared) == 1
    assert "4.running_mean" in prepared.state_dict()


@pytest.mark.medium
def test_an_error_leaves_the_model_as_it_was(monkeypatch):
    model, x = randomized(InPython()), inputs((2, 4, 6, 6))
    prepared = qtk.prepare_model(model, x)
    keys, tensors = list(prepared.state_dict()), list(prepared.parameters())

    def fails(step, state):
        raise KeyboardInterrupt

    monkeypatch.setattr(fold_batch_norm_step.FoldBatchNorm, "update", fails)
    with pytest.raises(KeyboardInterrupt):
        qtk.fold_batch_norms(prepared)
    assert list(prepared.state_dict()) == keys
    assert all(a is b for a, b in zip(prepared.parameters(), tensors, strict=True))
    assert torch.equal(prepared(x), model(x))


def test_statistics_of_folded_layers_follow_later_scalings():
    model = randomized(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1)))
    norm = copy.deepcopy(model[1])
    prepared, _ = folded(model, inputs((2, 4, 5, 5)))
    factor = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    make(prepared, [ScaleParameter("0.bias", factor), ScaleParameter("3.weight", factor)])
    ((name, (mean, std)),) = folded_statistics(prepared).items()
    assert name == "0.weight"
    torch.testing.assert_close(mean, norm.bias.detach() * factor)
    torch.testing.assert_close(std, norm.weight.detach().abs() * factor)


@pytest.mark.sample(6)
@pytest.mark.medium
@pytest.mark.parametrize("name", ZOO)
def test_the_zoo_keeps_its_function(name):
    entry = ZOO[name]
    model, prepared = pair(name)[0], copied(name)[1]
    had = norms(prepared)
    result = qtk.fold_batch_norms(prepared)
    assert bool(result.groups) == bool(had)
    assert result.undone == ()
    left = len([group for group in result.skipped if "statistics of the batch" in group.detail])
    assert norms(prepared) == left
    batch = 3 if entry.dynamic else 2
    expected, actual = entry.run(model, batch), entry.run(prepared, batch)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
