"""What each batch norm is folded into, and the reason where no layer takes it up."""

import pytest
import torch
from torch import nn

import qtk
from qtk.nn.scale_shift import ScaleShift
from qtk.operators.op_row import Product
from qtk.transforms.fold_batch_norm_step import Into, Layer
from qtk.transforms.foldable_batch_norms import foldable_batch_norms
from qtk.transforms.result import Outcome
from tests.transforms.folding import count, folded, inputs, norms
from tests.transforms.nets import IMAGE, INTO_SCALE_SHIFT, InFront, SharedNorm, SharedPair, randomized


@pytest.mark.medium
@pytest.mark.sample(4)
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


@pytest.mark.parametrize(("std", "is_folded"), [(4.0, True), (1e4, False)])
def test_columns_of_weights_stay_alike(std, is_folded):
    norm = nn.BatchNorm1d(3)
    norm.running_var = torch.tensor([1.0, std, 2.0]).square()
    _, result = folded(nn.Sequential(norm, nn.Linear(3, 4)).eval(), torch.randn(2, 3))
    (group,) = result.groups
    assert group.detail.startswith("into 1, behind it" if is_folded else "became a scale and a shift")
    assert is_folded or "its inputs have standard deviations from 1 to 1e+04" in group.detail


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


def groups_of(model, shape):
    prepared = qtk.prepare_model(randomized(model), inputs(shape))
    code, tensors = prepared.code, list(prepared.state_dict().values())
    groups = foldable_batch_norms(prepared)
    assert prepared.code == code
    assert all(a is b or torch.equal(a, b) for a, b in zip(tensors, prepared.state_dict().values(), strict=True))
    return groups


def test_a_norm_goes_into_the_layer_before_it():
    (group,) = groups_of(nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d(6, eps=0.25)), IMAGE)
    (step,) = group.steps
    assert (group.name, group.detail, [site.name for site in group.sites]) == ("1", "into 0", ["0:out"])
    assert (step.into, step.eps) == (Into.PRODUCER, 0.25)
    assert step.layers == (Layer("0.weight", "0.bias", Product.CONV, 6, groups=2),)
    assert (step.weight, step.bias, step.mean, step.var) == ("1.weight", "1.bias", "1.running_mean", "1.running_var")


def test_a_norm_that_two_layers_read_goes_into_both():
    (group,) = groups_of(InFront(), IMAGE)
    (step,) = group.steps
    assert group.detail == "into conv1, conv2, behind it"
    assert step.into is Into.CONSUMERS
    assert [(layer.weight, layer.outputs, layer.groups) for layer in step.layers] == [
        ("conv1.weight", 6, 1), ("conv2.weight", 6, 2)]


@pytest.mark.medium
def test_calls_of_one_norm_behind_one_layer_are_one_group_and_behind_two_layers_are_two():
    (pair,) = groups_of(SharedPair(), IMAGE)
    assert [site.name for site in pair.steps[0].calls] == ["bn:out", "bn@1:out"]
    assert [group.detail for group in groups_of(SharedNorm(), IMAGE)] == ["into conv1", "into conv2"]


@pytest.mark.medium
def test_what_training_makes_of_the_output_is_beta_and_gamma_without_its_sign():
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
    (step,) = (group.steps[0] for group in groups_of(model, (3, 4)))
    assert torch.equal(step.output_mean, model[1].bias)
    assert torch.equal(step.output_std, model[1].weight.abs())
    (plain,) = groups_of(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, affine=False)), (3, 4))
    assert plain.steps[0].output_mean.tolist() == [0] * 5
    assert plain.steps[0].output_std.tolist() == [1] * 5


def test_a_model_without_norms_has_no_groups():
    assert groups_of(nn.Sequential(nn.Linear(4, 5), nn.ReLU()), (3, 4)) == []
