import itertools

import pytest

from tests.pairwise import full, pairwise


@pytest.mark.parametrize("lengths", [(2, 2), (3, 2, 4), (19, 3, 3, 5), (5, 1, 2), (2,) * 7, (3,) * 5])
def test_every_two_values_meet_in_few_rows(lengths):
    axes = [[f"{axis}{value}" for value in range(length)] for axis, length in enumerate(lengths)]
    rows = pairwise(axes)
    for (i, first), (j, second) in itertools.combinations(enumerate(axes), 2):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(first, second))
    largest, next_largest = sorted(lengths)[-2:]
    assert len(rows) <= 2 * largest * next_largest
    assert len(set(rows)) == len(rows)
    assert set(rows) <= set(full(axes))


def test_one_axis_is_itself_and_an_empty_one_leaves_nothing():
    assert pairwise([[1, 2]]) == [(1,), (2,)]
    assert pairwise([[1, 2], []]) == []


@pytest.mark.pairwise(first="ab", second=(1, 2), third={"x": 3, "y": 4})
def test_a_marked_test_gets_its_axes(first, second, third, request):
    assert (first, second, third) in full(["ab", (1, 2), "xy"])
    assert request.node.callspec.id == f"{first}-{second}-{third}"
