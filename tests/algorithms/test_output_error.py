"""Against outputs formed sample by sample, in float64."""

import pytest
import torch

from qtk.algorithms.output_error import OutputError, in_blocks

GROUPS, OUTPUTS, COLUMNS, ROWS = 2, 5, 12, 30


class Inputs:
    """Of both paths, with a weight and its change. Shape: [groups, rows, columns], [groups, outputs, columns]."""

    def __init__(self, *, one: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.quantized = random(GROUPS, ROWS, COLUMNS) @ random(COLUMNS, COLUMNS)
        self.original = self.quantized if one else self.quantized + 0.3 * random(GROUPS, ROWS, COLUMNS)
        self.weight = random(GROUPS, OUTPUTS, COLUMNS)
        self.change = 0.1 * random(GROUPS, OUTPUTS, COLUMNS)
        gram = self.quantized.mT @ self.quantized
        linear = self.weight @ ((self.original - self.quantized).mT @ self.quantized)
        self.error = OutputError(gram[:, None], None if one else linear[:, None])

    def lost(self, change):
        """|X w - X̂ ŵ|². Shape: [groups, outputs]."""
        return (self.original @ self.weight.mT - self.quantized @ (self.weight - change).mT).square().sum(1)

    def constant(self):
        return self.lost(torch.zeros_like(self.change))


def gram_of(x):
    return (x.mT @ x)[None, None]


@pytest.mark.parametrize("one", [False, True])
def test_the_error_is_that_of_the_outputs(one):
    inputs = Inputs(one=one)
    before = inputs.change.clone()
    own = inputs.error.of(inputs.change[:, None])[:, 0]
    torch.testing.assert_close(own + inputs.constant(), inputs.lost(inputs.change), rtol=1e-10, atol=1e-9)
    assert torch.equal(inputs.change, before)


@pytest.mark.parametrize("one", [False, True])
def test_the_slope_is_half_the_gradient_of_the_outputs_error(one):
    inputs = Inputs(one=one)
    change = inputs.change.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(inputs.lost(change).sum(), change)
    linear = None if one else inputs.error.linear.clone()
    half_gradient = inputs.error.half_gradient(inputs.change[:, None])[:, 0]
    torch.testing.assert_close(2 * half_gradient, gradient, rtol=1e-10, atol=1e-9)
    if linear is not None:
        assert torch.equal(inputs.error.linear, linear)  # what is known stays as it is


@pytest.mark.parametrize("blocks", [2, 3, 12])
@pytest.mark.parametrize("one", [False, True])
def test_a_block_says_what_its_change_alone_does_to_the_output(one, blocks):
    inputs = Inputs(one=one)
    own = inputs.error.diagonal_blocks(blocks).of(in_blocks(inputs.change, blocks))
    width = COLUMNS // blocks
    for index in range(blocks):
        alone = torch.zeros_like(inputs.change)
        alone[..., index * width : (index + 1) * width] = inputs.change[..., index * width : (index + 1) * width]
        expected = inputs.lost(alone) - inputs.constant()
        torch.testing.assert_close(own[:, index], expected, rtol=1e-10, atol=1e-9)


def test_as_many_blocks_are_the_same_thing():
    error = Inputs().error
    assert error.diagonal_blocks(1) is error


def test_a_part_is_what_the_whole_says_of_it():
    inputs = Inputs()
    blocked, change = inputs.error.diagonal_blocks(4), in_blocks(inputs.change, 4)
    whole = blocked.of(change)
    for blocks, outputs in ((slice(1, 3), slice(None)), (slice(None), slice(2, 4)), (slice(3, 4), slice(0, 1))):
        part = blocked.select(blocks, outputs)
        torch.testing.assert_close(part.of(change[:, blocks, outputs]), whole[:, blocks, outputs])
    one = Inputs(one=True)
    assert one.error.select(slice(None), slice(1, 2)).linear is None


def test_in_blocks_takes_columns_apart_in_their_order():
    matrix = torch.arange(24.0).reshape(2, 2, 6)
    blocked = in_blocks(matrix, 3)
    assert blocked.shape == (2, 3, 2, 2)
    assert blocked[1, 2, 0].tolist() == matrix[1, 0, 4:].tolist()
    assert blocked[0, 1, 1].tolist() == matrix[0, 1, 2:4].tolist()


INPUTS = {
    "independent": lambda x, mix: x,
    "mixed": lambda x, mix: x @ mix,
    "after a relu": lambda x, mix: torch.relu(x @ mix),
    "of all sizes": lambda x, mix: x * torch.logspace(0, -4, x.shape[1], dtype=x.dtype),
    "with dead columns": lambda x, mix: x * (torch.arange(x.shape[1]) % 3 > 0),
}


@pytest.mark.parametrize("kind", INPUTS)
def test_changes_of_one_weight_have_the_errors_of_uncorrelated_columns(kind):
    generator = torch.Generator().manual_seed(0)
    x, mix = (torch.randn(*shape, generator=generator).double() for shape in ((150, 48), (48, 48)))
    x = INPUTS[kind](x, mix)
    error = OutputError(gram_of(x)).of_uncorrelated()
    one = torch.eye(48, dtype=torch.float64)[None, None]
    torch.testing.assert_close(error.of(3 * one)[0, 0], 9 * x.square().sum(0), rtol=1e-12, atol=0)


def test_a_part_of_an_error_of_uncorrelated_columns_is_what_the_whole_says_of_it():
    inputs = Inputs()
    error, change = inputs.error.diagonal_blocks(3).of_uncorrelated(), in_blocks(inputs.change, 3)
    before, whole = change.clone(), error.of(change)
    assert torch.equal(change, before)
    for blocks, outputs in ((slice(1, 3), slice(None)), (slice(None), slice(2, 4)), (slice(2, 3), slice(0, 1))):
        part = error.select(blocks, outputs)
        torch.testing.assert_close(part.of(change[:, blocks, outputs]), whole[:, blocks, outputs])
