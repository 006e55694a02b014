import warnings

import pytest
import torch

from qtk.layerwise.layer_input import LayerInput
from qtk.layerwise.starved_matrices import StarvedMatrices
from qtk.moments.matrix_rows import MatrixRows
from qtk.moments.second_moments import SecondMoments
from qtk.numerics.im2col import Geometry
from qtk.numerics.matrix_axes import MatrixAxes

GEOMETRY = Geometry.of_matrices(MatrixAxes((0,), (1,), (2,)), (3, 5, 4))


def moments_of(counts):
    torch.manual_seed(0)
    x, owner = torch.randn(sum(counts), 4), torch.arange(3).repeat_interleave(torch.tensor(counts))
    moments = SecondMoments(GEOMETRY)
    moments.observe_matrices(MatrixRows.of(x, owner, 3))
    return x.double(), moments


def test_they_have_the_gram_matrix_of_all_rows_weighed_as_their_own():
    x, moments = moments_of([8, 2, 0])
    starved = StarvedMatrices()
    gram = starved.pooled("experts", moments).gram[:, 0]
    torch.testing.assert_close(gram[0], x[:8].mT @ x[:8])
    torch.testing.assert_close(gram[1], x.mT @ x * (2 / 10))
    torch.testing.assert_close(gram[2], x.mT @ x * (1 / 10))
    with pytest.warns(match=r"in 1 weights .*experts: 2 of 3 \(1 met 2 rows, 2 met 0 rows\)"):
        starved.warn()


def test_enough_rows_are_left_alone():
    _, moments = moments_of([8, 4, 5])
    starved = StarvedMatrices()
    assert starved.pooled("experts", moments) is moments
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        starved.warn()


def reached(layers, counts):
    """The layers as a walk reaches them, and the rows of each; ``None`` where there are none."""
    torch.manual_seed(0)
    for layer, count in zip(layers, counts, strict=True):
        moments = SecondMoments(Geometry.linear())
        moments.observe(rows := torch.randn(count, 4))
        yield LayerInput(layer, moments if count else None), rows.double()


class Layer:
    """What is asked of a ``WeightedLayer``."""

    def __init__(self, name):
        self.name, self.weight, self.geometry = name, torch.zeros(5, 4), Geometry.linear()


def test_an_expert_with_few_rows_waits_for_those_of_all():
    layers = [Layer(name) for name in "abcd"]
    starved = StarvedMatrices([layers])
    inputs = list(reached(layers, [3, 8, 0, 4]))
    ready = [starved.ready(layer_input) for layer_input, _ in inputs]
    assert [[each.layer.name for each in now] for now in ready] == [[], ["b"], [], ["d", "a", "c"]]
    every = torch.cat([rows for _, rows in inputs])
    last, few, none = ready[3]
    assert last.moments is inputs[3][0].moments
    for found, rows in ((few, 3), (none, 1)):
        torch.testing.assert_close(found.moments.gram[0, 0], every.mT @ every * rows / 15, rtol=1e-5, atol=1e-5)
    assert starved.found == {"a": "met 3 rows", "c": "met 0 rows"}


@pytest.mark.parametrize("counts", [[3, 3], [0, 0]])
def test_layers_that_all_rows_meet_are_not_added_up(counts):
    layers = [Layer(name) for name in "ab"]
    starved = StarvedMatrices([layers])
    inputs = [layer_input for layer_input, _ in reached(layers, counts)]
    assert [starved.ready(each) for each in inputs] == [[], inputs]
    assert not starved.found
