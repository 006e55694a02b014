"""The numbers a weight can become, against all of them spelled out."""

import pytest
import torch

from qtk.algorithms.weight_grid import WeightGrid
from qtk.core.dtypes import dtype
from qtk.core.granularity import PerChannel
from qtk.core.spec import QuantSpec
from tests.numerics.small_floats import numbers

WEIGHT = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
SCALE = (torch.rand(3, 1, generator=torch.Generator().manual_seed(1)) * 0.2 + 0.1).expand(3, 5)
ZERO = torch.tensor([[3], [7], [11]], dtype=torch.int32).expand(3, 5)


def grid(name):
    spec = QuantSpec(dtype(name), PerChannel(0), symmetric=name != "uint4")
    return WeightGrid(spec, SCALE, None if spec.symmetric else ZERO)


def possible(name):
    """Shape: [3, 5, numbers]."""
    codes = {"int4": torch.arange(-8, 8), "uint4": torch.arange(16)}.get(name)
    if codes is None:
        positive = torch.tensor(numbers(dtype(name)))
        codes = torch.cat([-positive, positive])
    zero = ZERO[..., None] if name == "uint4" else 0
    return (codes - zero) * SCALE[..., None]


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["int4", "uint4", "fp4_e2m1"])
def test_each_weight_goes_to_its_nearest_number(name, kind):
    weight = WEIGHT.to(kind)
    all_of_them = possible(name)
    nearest = (all_of_them - weight[..., None]).abs().argmin(-1, keepdim=True)
    found = grid(name).nearest(weight)
    assert found.dtype is kind
    assert torch.equal(found, all_of_them.gather(-1, nearest)[..., 0].to(kind))


@pytest.mark.parametrize("name", ["int4", "uint4"])
@pytest.mark.parametrize("index", [1, torch.tensor([2, 0]), (slice(None), torch.tensor([4, 1])), (slice(None), None)],
                         ids=["row", "rows", "columns", "new axis"])
def test_a_part_is_the_part_of_the_whole(name, index):
    part = grid(name)[index]
    assert part.scale.shape == WEIGHT[index].shape
    assert (part.zero_point is None) == (name == "int4")
    assert torch.equal(part.nearest(WEIGHT[index]), grid(name).nearest(WEIGHT)[index])


@pytest.mark.parametrize("name", ["int4", "uint4"])
def test_another_order_of_columns(name):
    order = torch.tensor([[3, 0, 4, 1, 2]])
    ordered = grid(name)[None].in_order(order)
    assert torch.equal(ordered.nearest(WEIGHT[None, :, order[0]]), grid(name).nearest(WEIGHT)[None, :, order[0]])


@pytest.mark.parametrize("name", ["int4", "uint4", "fp4_e2m1"])
def test_rounding_with_feedback_and_descent_end_on_the_grid(name):
    """That they are right is tested with the ops, and where they are used; minifloats have no op."""
    whole, weight = grid(name)[None], WEIGHT[None].clone()
    target, change = weight.clone(), weight.clone()
    whole.round_with_feedback_(target, change, torch.zeros(1, 5, 5), backwards=True)
    assert torch.equal(target, whole.nearest(weight))
    assert torch.equal(change, weight - target)
    half_gradient = change * 2
    before = target.clone()
    whole.descend_(target, change, half_gradient, 2 * torch.eye(5)[None], torch.full((1, 5), 0.5))
    assert torch.equal(target, before)
    target += WEIGHT
    change = weight - target
    whole.descend_(target, change, change * 2, 2 * torch.eye(5)[None], torch.full((1, 5), 0.5))
    torch.testing.assert_close(target, before)
