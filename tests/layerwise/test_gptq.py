"""Against forming every output of both paths, in float64."""

from dataclasses import replace

import pytest
import torch

from qtk.algorithms.gptq import gptq
from qtk.algorithms.output_error import OutputError
from qtk.layerwise.gptq import Gptq
from tests.layerwise.layers import CHANNEL, LAYERS, TENSOR, blocks_of, named

SETTINGS = {"tensor": TENSOR, "channel": CHANNEL, "block": blocks_of(2), "asymmetric": CHANNEL | {"symmetric": False}}


def without_shift(problem):
    """The weight itself rounded by the algorithm."""
    return problem.from_gemm(gptq(problem.to_gemm(problem.float_weight), problem.error.gram[:, 0], problem.grid()))


@pytest.mark.medium
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", LAYERS)
def test_weights_make_up_for_the_difference_of_the_inputs(name, setting):
    given = named(name, SETTINGS[setting], noise=0.5)
    found = Gptq().apply(given.problem)
    own, plain = given.lost(found.simulated_weight()), given.lost(without_shift(given.problem))
    assert own < plain
    before = given.lost(given.problem.simulated_weight())
    assert own < before
    assert given.problem.current_error() - found.current_error() == pytest.approx(before - own, rel=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_one_input_has_no_difference_to_make_up_for(name):
    given = named(name, CHANNEL, noise=0.0)
    found = Gptq().apply(given.problem)
    assert torch.equal(found.weight, without_shift(given.problem))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", LAYERS)
def test_weights_end_on_the_grid_of_the_encoding(name, setting):
    given = named(name, SETTINGS[setting])
    found = Gptq().apply(given.problem)
    assert found.encoding is given.problem.encoding
    assert found.weight.dtype == given.problem.weight.dtype
    assert torch.equal(found.simulated_weight(), found.weight)
    assert not torch.equal(found.weight, given.problem.simulated_weight())


@pytest.mark.parametrize("name", ["grouped", "transposed grouped"])
def test_groups_are_rounded_by_their_own_inputs(name):
    given = named(name, CHANNEL)
    whole = given.problem.to_gemm(Gptq().apply(given.problem).weight)
    error = given.problem.error
    for group in range(2):  # the other group's inputs change nothing
        gram = error.gram.clone()
        gram[1 - group] = torch.eye(gram.shape[-1])
        other = Gptq().apply(replace(given.problem, error=OutputError(gram, error.linear)))
        matrix = given.problem.to_gemm(other.weight)
        assert torch.equal(matrix[group], whole[group])
        assert not torch.equal(matrix[1 - group], whole[1 - group])
