import math

import torch

from qtk.analysis.simulated_values import SimulatedValue
from qtk.runtimes.difference_sums import DifferenceSums, absolute_difference


def test_batches_add_up():
    sums = DifferenceSums("out")
    sums.add(SimulatedValue(torch.tensor([1.0, 2.0]), torch.tensor(0.25)), torch.tensor([1.0, 2.5]))
    sums.add(SimulatedValue(torch.tensor([3.0, 4.0]), torch.tensor(0.25)), torch.tensor([3.25, 4.0]))
    found = sums.difference()
    assert (found.elements, found.differing, found.beyond_one_step) == (4, 0.5, 0.25)
    assert found.other_codes == 0.5
    assert (found.max_difference, found.max_steps) == (0.5, 2.0)
    assert math.isclose(found.sqnr_db, 10 * math.log10(30 / 0.3125))


def test_without_a_step_there_are_none():
    sums = DifferenceSums("out")
    sums.add(SimulatedValue(torch.ones(2)), torch.zeros(2))
    assert sums.difference().max_steps is None
    assert sums.difference().beyond_one_step is None


def test_equal_values_have_infinite_sqnr():
    sums = DifferenceSums("out")
    sums.add(SimulatedValue(torch.ones(2), torch.tensor(1.0)), torch.ones(2))
    assert sums.difference().sqnr_db == math.inf


def test_not_finite_values_are_equal_to_themselves_alone():
    ours = torch.tensor([math.inf, math.nan, math.nan, 1.0])
    theirs = torch.tensor([math.inf, math.nan, 0.0, math.inf])
    assert absolute_difference(ours, theirs).tolist() == [0.0, 0.0, math.inf, math.inf]


def test_the_total_weighs_by_elements():
    small, large = DifferenceSums("a"), DifferenceSums("b")
    small.add(SimulatedValue(torch.ones(1), torch.tensor(1.0)), torch.zeros(1))
    large.add(SimulatedValue(torch.ones(3)), torch.ones(3))
    total = DifferenceSums.total([small, large], "both").difference()
    assert (total.elements, total.differing, total.max_steps) == (4, 0.25, 1.0)


def test_what_does_not_count_has_no_part():
    sums = DifferenceSums("out")
    ours, theirs = torch.tensor([[1.0, 2.0], [5.0, 5.0]]), torch.tensor([[1.0, 2.5], [9.0, math.nan]])
    sums.add(SimulatedValue(ours, torch.tensor([[0.25], [0.1]]), torch.tensor([[True, True], [False, False]])), theirs)
    found = sums.difference()
    assert (found.elements, found.differing, found.max_difference, found.max_steps) == (2, 0.5, 0.5, 2.0)


def test_a_float_rounding_of_a_dynamic_value_is_no_other_code():
    sums = DifferenceSums("out")
    sums.add(SimulatedValue(torch.ones(4), torch.tensor(0.1)), torch.tensor([1.0, 1.0 + 1e-6, 1.04, 1.1]))
    found = sums.difference()
    assert (found.differing, found.other_codes, found.beyond_one_step) == (0.75, 0.25, 0.0)


def test_infinite_noise_is_no_error_of_arithmetic():
    sums = DifferenceSums("out")
    sums.add(SimulatedValue(torch.ones(2)), torch.tensor([1.0, math.nan]))
    assert sums.difference().sqnr_db == -math.inf
