"""Folding batch norms keeps the function, in float64 to rounding, and says where each went."""

import copy

import pytest
import torch
from torch import nn

import qtk
from qtk.graph.graphs import graphs
from qtk.graph.targets import batch_norm_called
from qtk.nn.scale_shift import ScaleShift
from qtk.transforms import fold_batch_norm_step
from qtk.transforms.fold_batch_norms import folded_statistics
from qtk.transforms.result import Outcome
from qtk.transforms.steps import ScaleParameter, make
from tests.transforms.nets import INTO_LAYERS, INTO_SCALE_SHIFT, InPython, randomized
from tests.zoo.models import ZOO


def folded(model, x):
    prepared = qtk.prepare_model(copy.deepcopy(model), x)
    return prepared, qtk.fold_batch_norms(prepared)


def count(model, kind):
    return sum(isinstance(module, kind) for module in model.modules())


def norms(model):
    nodes = [node for graph in graphs(model).values() for node in graph.graph.nodes]
    return sum(batch_norm_called(node) is not None for node in nodes)


def inputs(shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", INTO_LAYERS)
def test_into_layers(name):
    build, shape = INTO_LAYERS[name]
    model, x = randomized(build()), inputs(shape)
    prepared, result = folded(model, x)
    other = inputs(shape, seed=2)
    torch.testing.assert_close(prepared(other), model(other), rtol=1e-10, atol=1e-12)
    assert result.groups
    assert all(group.outcome is Outcome.APPLIED for group in result.groups), str(result)
    assert norms(prepared) == count(prepared, ScaleShift) == 0
    assert not any("running" in key or "num_batches" in key for key in prepared.state_dict())


@pytest.mark.parametrize("name", INTO_SCALE_SHIFT)
def test_into_a_scale_and_a_shift_with_the_reason(name):
    build, shape, reason = INTO_SCALE_SHIFT[name]
    model, x = randomized(build()), inputs(shape)
    prepared, result = folded(model, x)
    other = inputs(shape, seed=2)
    torch.testing.assert_close(prepared(other), model(other), rtol=1e-10, atol=1e-12)
    assert norms(prepared) == 0
    assert count(prepared, ScaleShift) >= 1
    left = [group.detail for group in result.applied if group.detail.startswith("became a scale and a shift")]
    assert any(part in detail for detail in left for part in reason.split("|")), left


def test_statistics_of_the_batch_cannot_be_folded():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)).eval()
    prepared, result = folded(model, torch.randn(2, 3, 4, 4))
    assert [group.outcome for group in result.groups] == [Outcome.SKIPPED]
    assert "statistics of the batch" in result.groups[0].detail
    assert norms(prepared) == 1


def test_an_excluded_module_is_left():
    model = randomized(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)))
    prepared = qtk.prepare_model(model, inputs((2, 4, 5, 5)), modules_to_exclude=["0", "1"])
    assert qtk.fold_batch_norms(prepared).skipped[0].detail == "excluded from quantization"


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


@pytest.mark.parametrize("name", ZOO)
def test_the_zoo_keeps_its_function(name):
    entry = ZOO[name]
    model = entry.model()
    prepared = qtk.prepare_model(copy.deepcopy(model), entry.inputs())
    had = norms(prepared)
    result = qtk.fold_batch_norms(prepared)
    assert bool(result.groups) == bool(had)
    assert result.undone == ()
    left = len([group for group in result.skipped if "statistics of the batch" in group.detail])
    assert norms(prepared) == left
    batch = 3 if entry.dynamic else 2
    expected, actual = entry.run(model, batch), entry.run(prepared, batch)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
