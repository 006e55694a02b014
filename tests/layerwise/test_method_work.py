"""The work of methods: by it ranks share layers, and forecasts are made."""

import pytest

from qtk.layerwise.adaround import AdaRound
from qtk.layerwise.gptq import Gptq
from qtk.layerwise.method_work import WORK, multiplications, relative_cost
from qtk.layerwise.reconstruction import Reconstruction


def test_products_count_each_output_and_cubes_each_gram_matrix():
    gptq = [WORK[Gptq]]
    assert multiplications(gptq, 1, 0, 64, 64) == 64**3
    assert multiplications(gptq, 3, 10, 64, 64) == 3 * (64**3 + 5 * 10 * 64**2)
    assert multiplications(gptq, 1, 10, 64, 16) == 64 * 16**2 + 5 * 10 * 64 * 16
    assert multiplications([*gptq, WORK[AdaRound]], 1, 1, 8, 8) == 2.5 * 8**3 + 135 * 8**2


def test_layers_of_a_method_whose_products_count_most_cost_as_their_outputs():
    wide, long = (768, 256, 256), (256, 768, 768)  # gate and down of a decoder
    ratio = relative_cost([AdaRound()], 1, *long) / relative_cost([AdaRound()], 1, *wide)
    assert ratio == pytest.approx(3, rel=0.1)
    assert relative_cost([Gptq()], 1, *long) > 4 * relative_cost([Gptq()], 1, *wide)


def test_a_method_that_is_not_listed_costs_something():
    assert Reconstruction not in WORK
    assert relative_cost([Reconstruction()], 1, 4, 8, 8) == 8**3 + 4 * 8**2
