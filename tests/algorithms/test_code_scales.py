"""Against the least-squares solution with every output formed, in float64."""

import pytest
import torch

from qtk.algorithms.code_scales import code_scales
from qtk.algorithms.output_error import OutputError

GROUPS, OUTPUTS, WIDTH, ROWS = 2, 3, 12, 80


def layer(*, linear):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(GROUPS, OUTPUTS, WIDTH, generator=generator).double()
    x = torch.randn(GROUPS, ROWS, WIDTH, generator=generator).double() + 0.5
    original = x + (0.4 * torch.randn(x.shape, generator=generator).double() if linear else 0)
    term = (weight @ (original - x).mT @ x)[:, None] if linear else None
    return weight, x, original, OutputError((x.mT @ x)[:, None], term)


def found_for(weight, codes, scales, index, error, **settings):
    return code_scales(codes, scales, index, error, half_gradient(weight, codes * scales[index], error), **settings)


def half_gradient(weight, rounded, error):
    return error.half_gradient((weight - rounded)[:, None])[:, 0]


def lost(weight, x, original, rounded):
    return (original @ weight.mT - x @ rounded.mT).square().sum(1)


@pytest.mark.parametrize("linear", [False, True])
def test_a_scale_of_a_whole_output_is_that_of_least_squares(linear):
    weight, x, original, error = layer(linear=linear)
    codes = (weight / 0.4).round()
    index = torch.arange(GROUPS * OUTPUTS).reshape(GROUPS, OUTPUTS, 1).expand_as(weight)
    found = found_for(weight, codes, torch.full((GROUPS * OUTPUTS,), 0.4).double(), index, error, block=WIDTH)
    for group in range(GROUPS):
        for output in range(OUTPUTS):
            factor, target = x[group] @ codes[group, output], original[group] @ weight[group, output]
            expected = torch.linalg.lstsq(factor[:, None], target[:, None]).solution.item()
            assert found[group * OUTPUTS + output].item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("shared", ["block", "tensor", "outputs"])
@pytest.mark.parametrize("linear", [False, True])
def test_repeated_it_ends_where_no_scale_can_be_better(shared, linear):
    weight, x, original, error = layer(linear=linear)
    block = WIDTH if shared == "tensor" else 4
    index = torch.zeros_like(weight, dtype=torch.int64)
    if shared != "tensor":
        index = index + torch.arange(WIDTH // block).repeat_interleave(block)
    if shared == "block":
        index = index + 3 * torch.arange(GROUPS * OUTPUTS).reshape(GROUPS, OUTPUTS, 1)
    scales = torch.full((int(index.max()) + 1,), 0.5).double()  # of other codes
    codes = (weight / 0.4).round()
    losses = [lost(weight, x, original, codes * scales[index]).sum()]
    for _ in range(200):
        scales = found_for(weight, codes, scales, index, error, block=block)
        losses.append(lost(weight, x, original, codes * scales[index]).sum())
        assert losses[-1] <= losses[-2] * (1 + 1e-12)
    assert losses[1] < 0.99 * losses[0]
    for one in range(len(scales)):
        for factor in (0.999, 1.001):
            other = scales.clone()
            other[one] *= factor
            assert lost(weight, x, original, codes * other[index]).sum() > losses[-1]


def test_codes_that_are_all_zero_or_want_a_negative_scale_keep_theirs():
    weight, _, _, error = layer(linear=False)
    index = torch.arange(GROUPS * OUTPUTS).reshape(GROUPS, OUTPUTS, 1).expand_as(weight)
    codes = (weight / 0.4).round()
    codes[0, 0], codes[1, 2] = 0, -codes[1, 2]
    present = torch.full((GROUPS * OUTPUTS,), 0.4)
    found = found_for(weight, codes, present, index, error, block=WIDTH)
    assert found.dtype == torch.float32
    assert found[0] == found[5] == present[0]
    assert bool((found[1:5] != present[1:5]).all())


@pytest.mark.parametrize("shared", ["output", "tensor", "block"])
@pytest.mark.parametrize("linear", [False, True])
def test_what_is_known_before_is_known_after(shared, linear):
    weight, _, _, error = layer(linear=linear)
    block = 4 if shared == "block" else WIDTH
    index = torch.zeros_like(weight, dtype=torch.int64) + torch.arange(WIDTH // block).repeat_interleave(block)
    if shared != "tensor":
        index = index + WIDTH // block * torch.arange(GROUPS * OUTPUTS).reshape(GROUPS, OUTPUTS, 1)
    scales, codes = torch.rand(int(index.max()) + 1).double() + 0.3, (weight / 0.4).round()

    known = half_gradient(weight, codes * scales[index], error)
    found = code_scales(codes, scales, index, error, known, block=block, product=weight @ error.gram[:, 0])
    torch.testing.assert_close(found, found_for(weight, codes, scales, index, error, block=block))
    assert not torch.allclose(found, scales)
    torch.testing.assert_close(known, half_gradient(weight, codes * found[index], error))
