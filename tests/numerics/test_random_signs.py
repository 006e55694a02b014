import torch

from qtk.numerics.random_signs import random_signs


def test_products_with_a_matrix_tell_the_squares_of_its_columns():
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(30, 8, generator=generator, dtype=torch.float64)
    signs = random_signs(torch.zeros(20_000, 30, dtype=torch.float64), generator)
    assert signs.dtype == torch.float64
    assert signs.abs().eq(1).all()
    found, expected = (signs @ matrix).square(), matrix.square().sum(0)
    deviation = (2 / 20_000) ** 0.5 * expected  # of the mean of squares of sums of many terms
    assert bool(((found.mean(0) - expected).abs() < 5 * deviation).all())


def test_the_same_signs_from_the_same_generator():
    one, other = (random_signs(torch.zeros(5, 7, dtype=torch.bfloat16), torch.Generator().manual_seed(3)) for _ in "ab")
    assert torch.equal(one, other)
