"""Folding a batch norm behind a rectifier, against the batch norm itself in float64, and what it leaves."""

import copy

import pytest
import torch
from torch import nn

import qtk
from qtk.errors import CalibrationError
from qtk.nn.scale_shift import ScaleShift
from qtk.transforms.fold_batch_norm_step import Into
from qtk.transforms.fold_rectified_step import FoldRectifiedBatchNorm
from qtk.transforms.result import Outcome
from qtk.transforms.steps import steps_of
from tests.transforms.folding import count, folded, inputs, norms
from tests.transforms.nets import IMAGE, SEQUENCE, VECTOR, randomized


def net(rectifier, layer=None, *, behind=None, channels=6):
    layer = layer or nn.Conv2d(4, channels, 3, padding=1)
    behind = behind or nn.Conv2d(channels, 5, 3, padding=1)
    norm = {nn.Conv2d: nn.BatchNorm2d, nn.Conv1d: nn.BatchNorm1d, nn.Linear: nn.BatchNorm1d}[type(layer)]
    return nn.Sequential(layer, rectifier, norm(channels), behind)


class Branches(nn.Module):
    """The batch norm behind a ReLU is read by a padded convolution, a grouped one, and a transposed one."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.one = nn.Conv2d(4, 6, 1, bias=False), nn.BatchNorm2d(6), nn.Conv2d(6, 6, 3, padding=1)
        self.two, self.three = nn.Conv2d(6, 6, 5, padding=2, groups=3), nn.ConvTranspose2d(6, 6, 3, padding=1)

    def forward(self, x):
        y = self.bn(torch.relu(self.conv(x)))
        return self.one(y) + self.two(y) + self.three(y)


RECTIFIED = {
    "relu": (lambda: net(nn.ReLU()), IMAGE),
    "leaky_relu": (lambda: net(nn.LeakyReLU(0.1)), IMAGE),
    "prelu": (lambda: net(nn.PReLU(6)), IMAGE),
    "circular padding": (lambda: net(nn.ReLU(), behind=nn.Conv2d(6, 5, 3, padding=1, padding_mode="circular")), IMAGE),
    "reflected padding": (lambda: net(nn.ReLU(), behind=nn.Sequential(
        nn.ReflectionPad2d(1), nn.Conv2d(6, 5, 3, padding=1))), IMAGE),
    "pooled": (lambda: net(nn.Sequential(nn.ReLU(), nn.MaxPool2d(2), nn.AvgPool2d(2, 1, padding=1))), (2, 4, 9, 9)),
    "conv1d": (lambda: net(
        nn.ReLU(), nn.Conv1d(4, 6, 3), behind=nn.Conv1d(6, 6, 3, padding="same", groups=2)), SEQUENCE),
    "branches": (Branches, IMAGE),
}


@pytest.mark.sample(3)
@pytest.mark.medium
@pytest.mark.parametrize("name", RECTIFIED)
def test_the_function_stays_with_scales_of_both_signs_and_a_sum_is_left(name):
    build, shape = RECTIFIED[name]
    model, x = randomized(build()), inputs(shape)
    if name.endswith("padding"):  # signs do not reach the layer behind it
        with torch.no_grad():
            model[2].weight.abs_()
    prepared, result = folded(model, x)
    other = inputs(shape, seed=2)
    torch.testing.assert_close(prepared(other), model(other), rtol=1e-10, atol=1e-12)
    assert [group.outcome for group in result.groups] == [Outcome.APPLIED]
    assert "in front of a rectifier, and a sum" in result.groups[0].detail, str(result)
    assert norms(prepared) == count(prepared, ScaleShift) == 0
    assert sum(node.target is torch.ops.aten.add.Tensor for node in prepared.graph.nodes) == (
        3 if name == "branches" else 1)
    assert not any("running" in key for key in prepared.state_dict())


def test_a_scale_of_zero_divides_nothing():
    model = randomized(net(nn.ReLU()))
    with torch.no_grad():
        model[2].weight[:3] = 0
    prepared, _ = folded(model, inputs(IMAGE))
    assert not prepared.state_dict()["0.weight"][:3].any()
    torch.testing.assert_close(prepared(inputs(IMAGE, seed=3)), model(inputs(IMAGE, seed=3)), rtol=1e-10, atol=1e-12)


def test_without_negative_scales_anything_may_read_it_and_nothing_behind_changes():
    model = randomized(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.BatchNorm1d(6), nn.Sigmoid()))
    with torch.no_grad():
        model[2].weight.abs_()
    prepared, result = folded(model, inputs(VECTOR))
    (step,) = (step for step in steps_of(prepared) if isinstance(step, FoldRectifiedBatchNorm))
    assert (step.into, len(step.layers), step.trailing) == (Into.RECTIFIED, 1, 0)
    assert set(result.sites) >= {site for site in result.sites if site.name in ("0:out", "1:out")} != set()
    torch.testing.assert_close(prepared(inputs(VECTOR, seed=4)), model(inputs(VECTOR, seed=4)), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("build", [
    lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU6(), nn.BatchNorm2d(6), nn.Conv2d(6, 6, 3, padding=1)),
    lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.GELU(), nn.BatchNorm2d(6), nn.Conv2d(6, 6, 3, padding=1)),
    lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.BatchNorm2d(6), nn.Sigmoid()),  # signs go nowhere
])
def test_what_passes_on_no_factor_or_no_sign_becomes_a_scale_and_a_shift(build):
    model = randomized(build())
    prepared, result = folded(model, inputs(IMAGE))
    assert count(prepared, ScaleShift) == 1
    assert "became a scale and a shift" in result.groups[0].detail


def test_a_checkpoint_with_other_signs_runs_through_the_step_or_is_refused():
    model = randomized(net(nn.ReLU()))
    sim = qtk.QuantSim(model, inputs(IMAGE), config={"version": 1, "fold_batch_norms": True})
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[2].weight.neg_()
    sim.load_float_state_dict(other.state_dict())
    bypassed, x = qtk.prepare_model(other, inputs(IMAGE)), inputs(IMAGE, seed=5)
    qtk.fold_batch_norms(bypassed)
    assert all(torch.equal(tensor, sim.model.state_dict()[name]) for name, tensor in bypassed.state_dict().items())
    torch.testing.assert_close(bypassed(x), other(x), rtol=1e-10, atol=1e-12)

    alone = randomized(nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.BatchNorm2d(6), nn.Sigmoid()))
    negative = copy.deepcopy(alone)
    with torch.no_grad():
        alone[2].weight.abs_()
        negative[2].weight.abs_().neg_()
    sim = qtk.QuantSim(alone, inputs(IMAGE), config={"version": 1, "fold_batch_norms": True})
    with pytest.raises(CalibrationError, match=r"2\.weight has negative values in this checkpoint"):
        sim.load_float_state_dict(negative.state_dict())


def test_the_codes_of_the_sum_are_quantized_under_the_name_of_the_batch_norm():
    model, x = randomized(net(nn.ReLU())).float(), inputs(IMAGE, dtype=torch.float32)
    sim = qtk.QuantSim(model, x, config="onnxruntime")
    assert {"1:out", "2:out"} <= {site.name for site in sim.plan}
    assert "folded" not in str(sim.plan.unquantized.get("2:out"))
