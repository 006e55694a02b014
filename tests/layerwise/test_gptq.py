"""Against forming every output of both paths, in float64."""

from dataclasses import replace

import pytest
import torch

import qtk
from qtk.algorithms.gptq import gptq
from qtk.algorithms.output_error import OutputError
from qtk.layerwise.gptq import Gptq
from tests.layerwise.layers import CHANNEL, LAYERS, TENSOR, blocks_of, named

SETTINGS = {"tensor": TENSOR, "channel": CHANNEL, "block": blocks_of(2), "asymmetric": CHANNEL | {"symmetric": False}}


def without_shift(problem):
    """The weight itself rounded by the algorithm."""
    return problem.from_gemm(gptq(problem.to_gemm(problem.float_weight), problem.error.gram[:, 0], problem.grid()))


@pytest.mark.sample(6)
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


@pytest.mark.sample(5)
@pytest.mark.parametrize("setting", ["channel", "block", "asymmetric"])
@pytest.mark.parametrize("name", ["linear", "conv", "grouped", "transposed"])
def test_scales_of_few_bits_are_chosen_for_what_is_rounded_with_them(name, setting):
    of_two_bits = SETTINGS[setting] | {"dtype": "uint2" if "symmetric" in SETTINGS[setting] else "int2"}
    given = named(name, of_two_bits | {"symmetric": setting != "asymmetric"}, noise=0.5)
    state = replace(given.problem, moves_scales=True)
    kept, found = Gptq(scales=False).apply(state), Gptq().apply(state)
    assert kept.encoding is state.encoding
    assert given.lost(found.weight) < 0.95 * given.lost(kept.weight)
    assert torch.equal(found.simulated_weight(), found.weight)


@pytest.mark.parametrize(("name", "setting"), [
    ("linear", TENSOR), ("transposed grouped", CHANNEL), ("linear", CHANNEL | {"dtype": "int8", "symmetric": True})])
def test_scales_of_several_rows_and_of_many_bits_stay(name, setting):
    state = replace(named(name, setting, noise=0.5).problem, moves_scales=True)
    assert Gptq().apply(state).encoding is state.encoding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("setting", ["channel", "asymmetric"])
def test_scales_that_were_rounded_for_a_file_stay_in_its_format(setting, dtype):
    state = named("linear", SETTINGS[setting] | {"dtype": "uint4" if setting == "asymmetric" else "int4",
                                                 "symmetric": setting != "asymmetric"}, noise=0.5).problem
    encoding = replace(state.encoding, scale=state.encoding.scale.to(dtype).float())
    for present, is_held in ((encoding, True), (state.encoding, False)):
        found = Gptq().apply(replace(state, encoding=present, moves_scales=True))
        scale = found.encoding.scale
        assert not torch.equal(scale, present.scale)
        assert torch.equal(scale.to(dtype).float(), scale) == is_held
        assert torch.equal(found.simulated_weight(), found.weight)


@pytest.mark.medium
def test_frozen_encodings_stay():
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(16, 8)).eval(), torch.randn(64, 16)
    scales = []
    for frozen in (False, True):
        sim = qtk.QuantSim(model, x, weight_bits=2, activation_bits=None)
        sim.compute_encodings(None, progress=False)
        quantizer = sim.quantizers["0.weight"]
        before, quantizer.frozen = quantizer.encoding, frozen
        qtk.apply_gptq(sim, [x], progress=False)
        scales.append(quantizer.encoding.equals(before))
    assert scales == [False, True]
