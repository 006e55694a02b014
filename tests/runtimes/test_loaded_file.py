import itertools

import pytest
import torch

from qtk.runtimes.loaded_file import SiteRows, rows_like


@pytest.mark.parametrize("calls", [1, 2, 5])
@pytest.mark.parametrize("shape", [(3, 4, 6), (4, 4, 4), (7,), (3, 4)])
def test_rows_of_any_layout_are_put_back(calls, shape):
    torch.manual_seed(0)
    reference = torch.randn(calls, *shape)
    layouts = [reference] if len(shape) < 3 else [reference, reference.movedim(1, -1)]
    for each in layouts:
        assert torch.equal(rows_like(each.unsqueeze(1), reference), reference)


def test_rows_along_another_axis_than_the_first():
    reference = torch.randn(6, 3, 5)  # steps, rows, features
    rows = torch.stack([reference[:, row:row + 1] for row in range(3)])
    assert torch.equal(rows_like(rows, reference), reference)


def test_leading_axes_that_a_file_joins_are_split_again():
    reference = torch.randn(2, 4, 5, 3)  # rows, heads, steps, features
    assert torch.equal(rows_like(reference, reference.reshape(2, 4, 5, 3)), reference)
    assert torch.equal(rows_like(reference[:1], reference[:1].reshape(1, 4, 5, 3)), reference[:1])


def test_what_has_other_elements_has_no_layout():
    assert rows_like(torch.zeros(2, 3), torch.zeros(7)) is None
    assert SiteRows("a:out").like(torch.zeros(1, 2, 3), torch.zeros(2, 4)) is None


def test_a_transposed_matrix_is_not_taken_for_the_reference():
    reference = torch.arange(12.0).reshape(1, 3, 4)
    wrong = reference.transpose(1, 2)
    found = rows_like(wrong.unsqueeze(0), reference)
    assert found is None or not torch.equal(found, reference) or any(
        torch.equal(wrong.permute(order).reshape(reference.shape), reference)
        for order in itertools.permutations(range(3)))
